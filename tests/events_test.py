"""Event files, read back by TensorBoard."""
import math
import os
import random
import resource
import struct
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TOOL = os.path.join(os.path.dirname(os.environ["HORNER"]), "comm_tool")


def float32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def same(a, b):
    return struct.pack("f", a) == struct.pack("f", b) or (math.isnan(a) and math.isnan(b))


def write(folder, first, events, **more):
    """Events are (step, time, value, tag); returns the finished process."""
    lines = "".join(f"{step} {when!r} {value!r} {tag}\n" for step, when, value, tag in events)
    return subprocess.run([TOOL, "events", folder, str(first)], input=lines, capture_output=True, text=True, **more)


def written(folder, first, events):
    done = write(folder, first, events)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def read(folder):
    """{tag: [(time, step, value)]}, all of them: TensorBoard's default is a sample."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.wall_time, e.step, e.value) for e in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]}  # fmt: skip


def scalars(steps, tag="loss"):
    return [(s, 1.6e9 + s, float32(1 / (1 + s)), tag) for s in steps]


def test_every_value_comes_back(tmp_path):
    rng = random.Random(3)
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.4028234663852886e38, 1 / 3]
    values += [float32(rng.uniform(-1, 1) * 10 ** rng.uniform(-30, 30)) for _ in range(2000)]
    tags = ["loss", "norm/layer 3", "Entropie über Köpfe " + "x" * 200]
    events = [(step if step < 500 else 2**40 + step, 1.7e9 + step / 7, value, tag)
              for step, value in enumerate(values) for tag in tags]  # fmt: skip
    written(tmp_path, 0, events)
    got = read(tmp_path)
    assert set(got) == set(tags)
    for tag in tags:
        wanted = [(step, when, value) for step, when, value, t in events if t == tag]
        assert len(got[tag]) == len(wanted)
        for (when, step, value), (step_, when_, value_) in zip(got[tag], wanted):
            assert (step, when) == (step_, when_) and same(value, float32(value_)), (step, value, value_)


def test_a_cut_last_record_hides_nothing_else(tmp_path):
    path = written(tmp_path / "whole", 0, scalars(range(10)))
    with open(path, "rb") as f:
        whole = f.read()
    written(tmp_path / "short", 0, scalars(range(9)))
    [short] = [os.path.getsize(f) for f in (tmp_path / "short").iterdir()]
    assert short < len(whole)
    for size in range(short, len(whole)):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / os.path.basename(path)).write_bytes(whole[:size])
        assert [step for _, step, _ in read(folder)["loss"]] == list(range(9)), size


def test_a_changed_byte_is_noticed(tmp_path):
    """Proves that the checks above can fail."""
    path = written(tmp_path, 0, scalars(range(3)))
    with open(path, "r+b") as f:
        f.seek(-6, os.SEEK_END)
        byte = f.read(1)
        f.seek(-6, os.SEEK_END)
        f.write(bytes([byte[0] ^ 1]))
    assert [step for _, step, _ in read(tmp_path).get("loss", [])] == [0, 1]


def test_a_resumed_run_writes_its_own_file(tmp_path):
    """Killed after step 17, resumed from 10: steps 10 to 17 come from the second start."""
    written(tmp_path, 0, scalars(range(18)))
    again = [(s, 1.6e9 + 100 + s, 100.0 + s, "loss") for s in range(10, 25)]
    written(tmp_path, 10, again)
    written(tmp_path, 25, [(25, 1.6e9 + 200, 7.0, "loss")])  # within the same second as the others
    assert len(list(tmp_path.iterdir())) == 3
    got = read(tmp_path)["loss"]
    assert [step for _, step, _ in got] == list(range(26))
    assert [value for _, _, value in got[10:25]] == [100.0 + s for s in range(10, 25)]
    assert got[25][2] == 7.0


def test_a_full_disk_leaves_whole_records(tmp_path):
    limit = 600

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = write(tmp_path, 0, scalars(range(100)), preexec_fn=small_files, restore_signals=False)
    assert done.returncode == 2 and "File too large" in done.stderr, done
    got = read(tmp_path)["loss"]
    assert [step for _, step, _ in got] == list(range(len(got))) and 3 < len(got) < 100
    [data] = [f.read_bytes() for f in tmp_path.iterdir()]
    at = records = 0
    while at < len(data):
        at += 8 + 4 + struct.unpack_from("<Q", data, at)[0] + 4
        records += 1
    assert at == len(data) <= limit and records == len(got) + 2  # the version and the start


@pytest.mark.parametrize("folder", ["/dev/null/run", "/proc/run"])
def test_an_invalid_folder(folder):
    done = write(folder, 0, [])
    assert done.returncode == 2 and folder in done.stderr
