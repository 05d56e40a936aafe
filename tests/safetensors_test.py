"""safetensors files against the `safetensors` package: its files read by us, ours by it, and the same verdict on broken ones."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

TOOL = Path(os.environ["HORNER"]).parent / "safetensors_tool"
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint32,
          torch.uint64]  # fmt: skip


def tensors():
    torch.manual_seed(0)
    out = {}
    for i, dtype in enumerate(DTYPES):
        for shape in ([], [3], [2, 5], [0, 2], [1, 2, 3, 2]):
            out[f"layer.{i}.{len(shape)}"] = (torch.randn(shape) * 100).abs().to(dtype)
    out["an ünusual \"name\"\n"] = torch.ones(2)
    return out


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert torch.equal(a[name].contiguous().view(-1).view(torch.uint8), b[name].contiguous().view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "ü": "a\nb"}])
def test_both_ways(tmp_path, metadata):
    wrote = tensors()
    save_file(wrote, tmp_path / "theirs", metadata)
    subprocess.run([TOOL, "copy", tmp_path / "theirs", tmp_path / "ours"], check=True)
    same(wrote, load_file(tmp_path / "ours"))
    with safe_open(tmp_path / "ours", "pt") as f:
        assert f.metadata() == metadata


def mutations(good, count):
    draw = random.Random(1)
    header = 8 + int.from_bytes(good[:8], "little")
    for i in range(count):
        out = bytearray(good)
        if i % 4 == 0:
            del out[draw.randrange(len(out)) :]
        else:
            for _ in range(draw.randint(1, 3)):
                out[draw.randrange(header if i % 4 > 1 else len(out))] ^= 1 << draw.randrange(8)
        yield bytes(out)


def verdict(path):
    try:
        with safe_open(path, "np"):
            return True
    except (SafetensorError, UnicodeDecodeError, OSError):
        return False


def handmade():
    def file(header, size=8):
        header = header if isinstance(header, bytes) else json.dumps(header).encode()
        return len(header).to_bytes(8, "little") + header + b"x" * size

    def row(dtype="U8", shape=(8,), offsets=(0, 8)):
        return {"dtype": dtype, "shape": shape, "data_offsets": offsets}

    yield file({"a": row()})
    yield file({}, 0)
    yield file({"a": row(shape=[])}, 1)
    yield file({"a": row(offsets=[0, 6], shape=[6])})
    yield file({"a": row(offsets=[2, 8], shape=[6])})
    yield file({"a": row(shape=[2**62, 4])})
    yield file({"a": row("F64", [1])})
    yield file({"a": row(), "b": row()})
    yield file({"a": row(), "b": row(offsets=[8, 8], shape=[0])})
    yield file(b'{"a": ' + json.dumps(row()).encode() + b"}      ")
    yield file(b'  {"a": ' + json.dumps(row()).encode() + b"}")
    yield file(b'{"__metadata__": {"a": 1}}', 0)


def test_same_verdict_on_broken_files(tmp_path):
    save_file({k: v for k, v in tensors().items() if "1." in k or "2" in k}, tmp_path / "good", {"format": "pt"})
    files = []
    for i, data in enumerate([*handmade(), *mutations((tmp_path / "good").read_bytes(), 1000)]):
        files.append(tmp_path / f"{i}.safetensors")
        files[-1].write_bytes(data)
    run = subprocess.run([TOOL, "check", *files], check=True, capture_output=True, text=True, errors="replace")
    ours = run.stdout.splitlines()
    assert len(ours) == len(files) and 20 < ours.count("fine") < 900
    for file, line in zip(files, ours):
        # The format forbids both; the package accepts them.
        stricter = "duplicate key" in line or line.endswith("header is not a JSON object")
        assert (line == "fine") == verdict(file) or stricter, f"{file.name}: {line}"
    assert sum("duplicate key" in line for line in ours) < 10
