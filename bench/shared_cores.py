"""What other processes cost: a short training run and a small study beside 0, 1, 2 and 4 processes that only compute.

  python bench/shared_cores.py build/horner [--repeats 3] [--size 2,128]

Each cell is the median wall-clock time of `repeats` runs and their range; the ways take turns. "default" is horner as it
is (GOMP_SPINCOUNT=5000), "asleep" sets OMP_WAIT_POLICY=passive, "spinning" sets GOMP_SPINCOUNT to what libgomp has by itself.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = {"default": {}, "asleep": {"OMP_WAIT_POLICY": "passive"}, "spinning": {"GOMP_SPINCOUNT": "300000"}}
SETTINGS = {"steps": 40, "evaluate-sequences": 0, "entropy-every": 0, "checkpoint-every": 0}


def seconds(command, way):
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    begin = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, env={**environment, **WAYS[way]})
    return time.monotonic() - begin


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("horner")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2, 4])
    options.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options.add_argument("--what", nargs="+", default=["train", "study"], choices=["train", "study"])
    options.add_argument("--size", default="2,128", help="batch and length")
    given = options.parse_args()
    batch, length = map(int, given.size.split(","))
    settings = {**SETTINGS, "batch": batch, "length": length}
    study = {"title": "two", "attention": ["softmax", "taylor2"], "seeds": [0], "tasks": ["text"], "settings": settings}
    train = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    print(f"{os.cpu_count()} cores, batch {batch}, {length} tokens, medians of {given.repeats}")
    print("| other processes | " + " | ".join(f"{what}, {way}" for what in given.what for way in given.ways) + " |")
    for n in given.processes:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
        try:
            row = []
            for what in given.what:
                times = {way: [] for way in given.ways}
                for way in given.ways * given.repeats:
                    with tempfile.TemporaryDirectory() as folder:
                        (Path(folder) / "study.json").write_text(json.dumps(study))
                        args = train if what == "train" else [f"{folder}/study.json"]
                        times[way].append(seconds([given.horner, what, *args, "--out", f"{folder}/out"], way))
                row += [f"{statistics.median(t):.1f} ({min(t):.1f} to {max(t):.1f})" for t in times.values()]
        finally:
            for process in busy:
                process.kill()
                process.wait()
        print(f"| {n} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
