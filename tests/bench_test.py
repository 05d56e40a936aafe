"""horner bench: the numbers that it gives, and what it says when it cannot."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

HORNER = os.environ.get("HORNER") or str(Path(__file__).parent.parent / "build" / "horner")
TINY = ["--shape", "1,2,96,16"]


def bench(*args, timeout=120):
    return subprocess.run([HORNER, "bench", *args], capture_output=True, text=True, timeout=timeout)


def output(*args):
    done = bench("attention", *args)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def report():
    return json.loads(output(*TINY, "--json"))


def test_machine(report):
    machine = report["machine"]
    assert machine["cpu"] and machine["instruction_set"] and machine["threads"] >= 1
    assert report["peak_gflops"]["float32"] > 0
    assert not report["stopped"]


def test_the_yardstick_comes_first(report):
    first = report["results"][0]
    assert (first["variant"], first["execution"]) == ("torch sdpa", "torch")
    assert first["forward"]["times_sdpa"] == first["forward_backward"]["times_sdpa"] == 1


def test_every_number_is_there(report):
    names = ["softmax", "l2", "taylor2", "taylor4", "taylor10", "by_count", "gated"]
    ran = [r for r in report["results"] if r["execution"] == "fused_cpu"]
    assert [r["variant"] for r in ran] == names
    assert all(r["execution"] != "reference" for r in report["results"])
    for result in ran:
        assert result["result"] == "ok" and result["check"]["error"] <= result["check"]["allowed"]
        assert result["shape"] == {"B": 1, "H": 2, "T": 96, "D": 16}
        for part, products in [("forward", 2), ("forward_backward", 7)]:
            timing = result[part]
            assert timing["flop"] == products * 2 * 96 * 96 * 16
            assert timing["gflops"] == pytest.approx(timing["flop"] / timing["ms"] / 1e6)
            share = timing["gflops"] / report["peak_gflops"]["float32"]
            assert timing["share_of_peak"] == pytest.approx(share)
            assert timing["times_sdpa"] == pytest.approx(timing["sdpa_ms"] / timing["ms"])
            assert timing["times_sdpa"] > 0
            assert 3 <= timing["runs"] <= 30
            assert 0 < timing["best_ms"] <= timing["ms"]


def test_memory_is_at_least_the_output_and_the_gradients(report):
    tensor = 2 * 96 * 16 * 4
    for result in report["results"]:
        if result["result"] == "ok":
            assert 4 * tensor <= result["extra_bytes"] < 1000 * tensor


def test_table():
    text = output(*TINY, "--variant", "softmax", "sparsemax", "--execution", "fused_cpu", "--repeats", "3")
    wide = output("--shape", "1,2,96,300", "--variant", "softmax", "--execution", "fused_cpu", "--repeats", "3")
    lines = text.splitlines()
    assert "threads" in lines[0] and "peak" in lines[0] and "GFLOP/s float32" in lines[0]
    assert lines[2].startswith("B1 H2 T96 D16 float32 · peak ")
    assert lines[3].split()[:3] == ["variant", "execution", "forward"]
    assert lines[4].startswith("torch sdpa  –") and lines[4].count("1.00") >= 2
    assert lines[5].split()[:2] == ["softmax", "fused_cpu"] and len(lines[5].split()) == 12
    assert lines[6].split()[:2] == ["sparsemax", "fused_cpu"] and len(lines[6].split()) == 12
    assert ["softmax", "fused_cpu", "–"] in [line.split() for line in wide.splitlines()]
    assert "fused_cpu cannot run, supports head dimensions up to 256: softmax" in wide.splitlines()
    assert max(map(len, lines)) <= 120


def test_forward_only_and_repeats():
    args = ["--variant", "l2", "--dtype", "bfloat16", "float32", "--forward-only", "--repeats", "5"]
    report = json.loads(output(*TINY, *args, "--json"))
    assert set(report["peak_gflops"]) == {"bfloat16", "float32"}
    assert {r["dtype"] for r in report["results"]} == {"bfloat16", "float32"}
    for result in report["results"]:
        if result["result"] == "ok":
            assert result["forward_backward"] is None
            assert result["forward"]["runs"] == 5


def test_a_reference_that_would_not_fit_is_skipped():
    memory = Path("/proc/meminfo").read_text().split()
    free = 1024 * int(memory[memory.index("MemAvailable:") + 1])
    T = int((free / 12) ** 0.5)  # one T x T matrix in float32 is then a third of what is free
    args = ["--shape", f"1,1,{T},8", "--variant", "softmax", "--execution", "reference"]
    report = json.loads(output(*args, "--forward-only", "--repeats", "1", "--json"))
    assert report["results"][1]["result"] == "cannot run"
    assert "T x S matrices would need about" in report["results"][1]["why_not"]


def test_peers_are_rows_of_the_table(tmp_path):
    script = tmp_path / "peer.sh"
    ran = {"variant": "other", "execution": "mine", "forward_ms": 2.5, "both_ms": 5.0, "extra_bytes": 4096}
    not_run = {"variant": "third", "execution": "mine", "why_not": "no such GPU"}
    script.write_text(f"echo $@ > {tmp_path}/args; echo a library talks; echo '{json.dumps(ran)}'; echo '{json.dumps(not_run)}'")
    args = [*TINY, "--variant", "l2", "--execution", "fused_cpu", "--peers", f"sh {script}"]
    results = json.loads(output(*args, "--json"))["results"]
    assert [r["variant"] for r in results] == ["torch sdpa", "other", "third", "l2"]
    assert (tmp_path / "args").read_text() == "--shape 1,2,96,16 --dtype float32 --device cpu\n"
    other = results[1]
    assert other["forward"]["ms"] == 2.5 and other["forward_backward"]["ms"] == 5 and other["extra_bytes"] == 4096
    assert other["forward"]["sdpa_ms"] == results[0]["forward"]["ms"]
    assert results[2]["result"] == "cannot run" and "mine cannot run, no such GPU: third" in output(*args)


@pytest.mark.parametrize("peer, words", [("false", "'false --shape 1,2,96,16 --dtype float32 --device cpu' failed"), ("echo '{}' #", "invalid row '{}'")])
def test_peers_that_fail_are_errors(peer, words):
    done = bench("attention", *TINY, "--json", "--peers", peer)
    assert done.returncode == 2 and done.stdout == ""
    assert f"horner: --peers: {words}" in done.stderr


@pytest.mark.parametrize(
    "args, words",
    [
        ([], ["WHAT", "required"]),
        (["atention"], ["'atention'", "'attention'"]),
        (["attention", "--variant", "sofmax"], ["'sofmax'", "'softmax'"]),
        (["attention", "--variant", "tylor*"], ["'tylor*'", "'taylor1'"]),
        (["attention", "--execution", "fast"], ["'fast'", "'reference'"]),
        (["attention", "--shape", "1,2,96"], ["'1,2,96'", "B,H,T,D"]),
        (["attention", "--shape", "1,2,96,16,4"], ["'1,2,96,16,4'", "B,H,T,D"]),
        (["attention", "--shape", "1,2,0,16"], ["'1,2,0,16'", "B,H,T,D"]),
        (["attention", "--shape", "1,2,x,16"], ["'1,2,x,16'", "B,H,T,D"]),
        (["attention", "--shape", "64,64,1000000,128"], ["GB"]),
        (["attention", "--dtype", "int8"], ["'int8'", "'bfloat16'"]),
        (["attention", "--device", "tpu"], ["'tpu'", "'cuda'"]),
        (["attention", "--repeats", "0"], ["--repeats"]),
        (["attention", "--jsno"], ["'--jsno'", "'--json'"]),
    ],
    ids=" ".join,
)
def test_errors_name_what_is_wrong(args, words):
    done = bench(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("horner: ") and done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_ctrl_c_prints_the_table_so_far():
    args = [HORNER, "bench", "attention", "--variant", "softmax", "--shape", "1,4,512,32"]
    args += ["--repeats", "1000000"]
    run = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "peak" in run.stdout.readline()
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=20)
    finally:
        run.kill()
    assert run.returncode == 130
    assert "torch sdpa" in out and "interrupted" in out
    assert err == ""
