"""Several processes: gradients compared with those of one process, and the death of a rank."""
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

TOOL = os.path.join(os.path.dirname(os.environ["HORNER"]), "comm_tool")
TORCHRUN = os.path.join(os.path.dirname(sys.executable), "torchrun")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
SOON = 20  # seconds for the others to exit when a rank has died


def started(*words, **environment):
    return subprocess.Popen([*map(str, words)], env=ENVIRONMENT | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def torchrun(world, *arguments, **more):
    """All ranks, started by torchrun, which hosts the store and terminates the others when one dies."""
    return started(TORCHRUN, "--standalone", "--no-python", f"--nproc-per-node={world}", TOOL, *arguments, **more)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ranks(world, *arguments, only=None, tool=TOOL, **more):
    """Each rank separately, as a scheduler starts it: rank 0 hosts the store, and no launcher terminates ranks."""
    store = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [started(tool, *arguments, RANK=str(r), **store | more) for r in (range(world) if only is None else only)]


def finish(process, seconds=60):
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running after {seconds} s: {process.communicate()}")
    return process.returncode, out, err


def good(process):
    code, out, err = finish(process)
    assert code == 0, err
    return out


def alone(*arguments, **more):
    return good(started(TOOL, *arguments, **more))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("launch", ["torchrun", "ranks"])
def test_broadcast_and_sum(launch, world, tmp_path):
    out = tmp_path / "talk"
    if launch == "torchrun":
        good(torchrun(world, "talk", out))
    else:
        assert [good(p) for p in ranks(world, "talk", out)] == ["gloo\n"] * world
    for r in range(world):
        got = load_file(f"{out}{r}")
        assert torch.equal(got["x"], torch.ones(5, 3))
        assert torch.equal(got["y"], torch.arange(4))
        assert torch.equal(got["w"], torch.zeros(7))
        assert torch.equal(got["z"], torch.full((2,), sum(i + 0.5 for i in range(world)), dtype=torch.double))


def test_one_process_needs_no_other(tmp_path):
    assert alone("talk", tmp_path / "talk") == "none\n"
    assert alone("talk", tmp_path / "talk", RANK="0", WORLD_SIZE="1") == "none\n"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """One process on the whole batch, per variant, in float32 and in double."""
    done = {}

    def run(variant):
        if variant not in done:
            folder = tmp_path_factory.mktemp("single")
            alone("train", folder / "float", variant, 1, 3)
            alone("train", folder / "double", variant, 1, 3, DOUBLE="1")
            done[variant] = load_file(folder / "float0"), load_file(folder / "double0")
        return done[variant]

    return run


@pytest.mark.parametrize("world, variant, accumulate",
                         [(2, "softmax", 1), (3, "softmax", 1), (2, "softmax", 3), (3, "taylor4", 2),
                          (2, "gated_decay", 2), (2, "l2", 1)])  # fmt: skip
def test_gradients_are_those_of_one_process(world, variant, accumulate, single, tmp_path):
    float32, truth = single(variant)
    for process in ranks(world, "train", tmp_path / "many", variant, accumulate, 3):
        good(process)
    many = load_file(tmp_path / "many0")
    assert set(many) == set(truth)
    assert sum(name.startswith("grad.") for name in truth) > 10
    for name, wanted in truth.items():
        wanted = wanted.double()
        error = (many[name].double() - wanted).abs().max()
        own = (float32[name].double() - wanted).abs().max()
        assert error <= 2 * own + 16 * 2**-24 * wanted.abs().max(), (name, error, own, wanted.abs().max())
        for r in range(1, world):
            assert torch.equal(load_file(tmp_path / f"many{r}")[name], many[name]), f"rank {r} differs in {name}"


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_without_gradient(world, tmp_path):
    good(torchrun(world, "unused", tmp_path / "unused"))
    for r in range(world):
        got = load_file(tmp_path / f"unused{r}")
        assert torch.allclose(got["shared"], torch.full((3,), (world + 1) / 2, dtype=torch.double), rtol=1e-15)
        assert torch.allclose(got["first"], torch.full((3,), 6 / world, dtype=torch.double), rtol=1e-15)


@pytest.mark.parametrize("where, world, rank", [("forward", 2, 0), ("backward", 2, 1), ("backward", 3, 1)])
def test_a_rank_that_dies_under_torchrun(where, world, rank):
    code, _, err = finish(torchrun(world, "die", where, rank), SOON + 20)
    assert code != 0
    assert err.count(f"lost rank {rank}") == world - 1, err
    assert "resume with --resume" in err


@pytest.mark.parametrize("where, world, rank", [("forward", 2, 0), ("backward", 2, 1), ("backward", 3, 1)])
def test_a_rank_that_dies_by_itself(where, world, rank):
    processes = ranks(world, "die", where, rank)
    assert finish(processes[rank])[0] == -signal.SIGKILL
    died = time.monotonic()
    for r, process in enumerate(processes):
        if r != rank:
            code, _, err = finish(process, SOON)
            assert code > 0
            assert f"lost rank {rank}" in err and "resume with --resume" in err, err
    assert time.monotonic() - died < SOON


def process_ids(folder, world):
    """Waits until every rank has made two steps."""
    for _ in range(600):
        files = [folder / str(r) for r in range(world)]
        if all(f.exists() and f.read_text().endswith("\n") for f in files):
            return [int(f.read_text()) for f in files]
        time.sleep(0.1)
    raise AssertionError(f"only {os.listdir(folder)} of {world} ranks came")


def test_a_rank_killed_from_outside(tmp_path):
    process = torchrun(3, "go", tmp_path)
    os.kill(process_ids(tmp_path, 3)[2], signal.SIGKILL)
    code, _, err = finish(process, SOON)
    assert code != 0 and err.count("lost rank 2") == 2, err


def test_sigterm_to_all_is_reported(tmp_path):
    process = torchrun(2, "go", tmp_path)
    process_ids(tmp_path, 2)
    process.terminate()
    code, _, err = finish(process, SOON)
    assert code != 0 and "received SIGTERM" in err, err


def test_a_rank_that_is_silent():
    """Stopped, like a machine without power: its connections stay open."""
    processes = ranks(2, "die", "stop", 1)
    try:
        code, _, err = finish(processes[0], SOON + 20)
        assert code == 3 and "lost rank 1: no heartbeat for 8 s" in err, err
    finally:
        processes[1].kill()
        processes[1].communicate()


def test_a_suspended_run_continues(tmp_path):
    """All ranks are stopped for longer than the limit of silence, and continued one after the other."""
    processes = ranks(2, "go", tmp_path)
    try:
        ids = process_ids(tmp_path, 2)
        for i in ids:
            os.kill(i, signal.SIGSTOP)
        time.sleep(10)
        for i in ids:
            os.kill(i, signal.SIGCONT)
            time.sleep(2)
        assert [p.poll() for p in processes] == [None, None]
    finally:
        for p in processes:
            p.kill()
            p.communicate()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_ends_the_others(rank):
    processes = ranks(3, "die", "throw", rank)
    for r, process in enumerate(processes):
        code, _, err = finish(process, SOON + 20)
        said = f"an error of rank {rank}" if r == rank else f"rank {rank} failed with an error"
        assert code > 0 and said in err, (r, err)


def test_a_rank_that_does_not_join():
    [process] = ranks(3, "talk", "none", only=[0], JOIN="3")
    code, _, err = finish(process, SOON)
    assert code == 2 and "timed out after 3 s waiting for ranks 1, 2 (of 3)" in err


def test_different_models():
    for process, said in zip(ranks(2, "differ"), ["rank 1 failed with an error", "not to match sizes"]):
        code, _, err = finish(process)
        assert code == 2 and said in err, err


@pytest.mark.parametrize("environment, wanted", [
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be an integer from 1 to"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
    ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2: must be an integer from 0 to 1"),
    ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK=-1"),
    ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "1x"}, "LOCAL_RANK=1x"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is set but MASTER_ADDR is not"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "BACKEND": "mpi"},
     "'backend' must be 'auto', 'gloo' or 'nccl', not \"mpi\""),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "BACKEND": "nccl"},
     "cannot use NCCL: it requires tensors on a GPU"),
])  # fmt: skip
def test_a_wrong_environment_is_named(environment, wanted):
    code, _, err = finish(started(TOOL, "talk", "none", **environment))
    assert code == 2 and wanted in err, err
