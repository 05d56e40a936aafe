"""How fast tokenizers are beside the `tokenizers` package, one thread each, in one run; checked before it is timed.

    python bench/tokenizer.py [--build build] [--text FILE] TOKENIZER.json…

Ours starts with an empty cache of words each time, theirs is warm after the first; of theirs the fastest way counts.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import numpy as np  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("tokenizers", nargs="+", type=Path)
parser.add_argument("--build", type=Path, default=Path("build"))
parser.add_argument("--text", type=Path, help="a text file [3 MB of the Python sources of torch]")
parser.add_argument("--repeats", type=int, default=5)
o = parser.parse_args()
if o.text:
    text = o.text.read_bytes().decode()
else:
    text = b"".join(p.read_bytes() for p in sorted(Path(torch.__file__).parent.rglob("*.py"))[:150]).decode()[:3_000_000]
size = len(text.encode()) / 1e6
lines = text.splitlines(keepends=True)


def seconds(run):
    times = []
    for _ in range(o.repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


with tempfile.TemporaryDirectory() as folder:
    file, items = Path(folder) / "text", Path(folder) / "items"
    data = text.encode()
    file.write_bytes(data)
    items.write_bytes(len(data).to_bytes(4, "little") + data)
    tool = o.build / "tokenizer_tool"
    for path in o.tokenizers:
        theirs = Tokenizer.from_file(str(path))
        wanted = theirs.encode(text, add_special_tokens=False).ids
        got = subprocess.run([tool, "encode", path, items, "raw"], check=True, capture_output=True).stdout
        assert np.frombuffer(got, "<u4")[1:].tolist() == wanted, f"{path}: not the same tokens"
        ours = [subprocess.run([tool, "time", path, file], check=True, capture_output=True, text=True) for _ in range(o.repeats)]
        our_load = statistics.median(float(run.stderr.split()[2]) / 1e3 for run in ours)
        ours = statistics.median(float(run.stdout.split()[0]) for run in ours)
        whole = seconds(lambda: theirs.encode_batch_fast([text], add_special_tokens=False))
        by_line = seconds(lambda: theirs.encode_batch_fast(lines, add_special_tokens=False))
        best = min(whole, by_line)
        load = seconds(lambda: Tokenizer.from_file(str(path)))
        print(f"{path}: {size:.1f} MB, {len(wanted)} tokens, the same; ours {size / ours:.1f} MB/s, "
              f"theirs {size / best:.1f} MB/s ({size / whole:.1f} at once, {size / by_line:.1f} by line): {best / ours:.1f} ×; "
              f"loading {our_load:.2f} s and {load:.2f} s")  # fmt: skip
