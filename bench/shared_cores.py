"""What other processes cost: a short training run and a small study beside 0, 1, 2 and 4 processes that only compute.

  python bench/shared_cores.py build/horner [--repeats 3]

Each cell is the median wall-clock time of `repeats` runs and their range. "default" is horner as it is, "asleep" sets
OMP_WAIT_POLICY=passive, "spinning" sets GOMP_SPINCOUNT to what libgomp has by itself.
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
STEPS = ["--steps", "40", "--evaluate-sequences", "0", "--entropy-every", "0", "--checkpoint-every", "0", "--batch", "2", "--length", "128"]
STUDY = {"title": "two", "attention": ["softmax", "taylor2"], "seeds": [0], "tasks": ["text"],
         "settings": {"steps": 40, "batch": 2, "length": 128, "evaluate-sequences": 0, "entropy-every": 0, "checkpoint-every": 0}}  # fmt: skip


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
    given = options.parse_args()
    print(f"{os.cpu_count()} cores, medians of {given.repeats}")
    print("| other processes | " + " | ".join(f"{what}, {way}" for what in ("train", "study") for way in given.ways) + " |")
    for n in given.processes:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
        try:
            row = []
            for what in ("train", "study"):
                for way in given.ways:
                    times = []
                    for _ in range(given.repeats):
                        with tempfile.TemporaryDirectory() as folder:
                            (Path(folder) / "study.json").write_text(json.dumps(STUDY))
                            args = STEPS if what == "train" else [f"{folder}/study.json"]
                            times.append(seconds([given.horner, what, *args, "--out", f"{folder}/out"], way))
                    row.append(f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})")
        finally:
            for process in busy:
                process.kill()
                process.wait()
        print(f"| {n} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
