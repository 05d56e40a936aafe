"""The command line as a user meets it: output, JSON, messages, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HORNER = os.environ.get("HORNER") or str(Path(__file__).parent.parent / "build" / "horner")
ROOT = Path(__file__).parent.parent
COMMANDS = ["list", "show", "check", "info"]


def horner(*args, timeout=120):
    return subprocess.run([HORNER, *args], capture_output=True, text=True, timeout=timeout)


def output(*args):
    done = horner(*args)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\033" not in done.stdout
    return done.stdout


def error(*args):
    """The one line on stderr of a command that must not run."""
    done = horner(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("horner: ") and done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture(scope="module")
def table():
    return json.loads(output("list", "--json"))


def test_alone_prints_help():
    text = output()
    assert text == output("--help")
    assert all(command in text for command in COMMANDS)


def test_version():
    name, number = output("--version").split()
    assert name == "horner" and number.count(".") == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command):
    text = output(command, "--help")
    assert f"Usage: horner {command}" in text
    assert "Examples:\n  horner " + command in text
    assert "--json" in text


def test_list_json(table):
    assert len(table["variants"]) >= 60
    keys = ["name", "about", "source", "aliases", "mechanism", "spec", "notes", "executions"]
    for variant in table["variants"]:
        assert list(variant) == keys
        assert variant["executions"]["reference"] == "yes"
        assert all(variant["executions"].values())
        assert not re.search(r"\bn\b", variant["about"]) or "log n" in variant["about"], variant  # a family's, without its number
    assert "taylor<n>" in [family["name"] for family in table["families"]]


def test_list_shows_every_variant(table):
    text = output("list")
    shown = [line.split()[0] for line in text.splitlines() if line]
    assert all(variant["name"] in shown for variant in table["variants"])
    assert "  taylor<n>" in text


def test_list_fits_100_columns():
    for args in ([], ["-v"]):
        assert max(len(line) for line in output("list", *args).splitlines()) <= 100


def test_list_marks_what_runs(table):
    text = output("list")
    letters = dict(re.findall(r"  ([A-Z]) (\w+)", next(s for s in text.splitlines() if s.startswith("runs on cpu"))))
    assert set(letters.values()) == {"fused_cpu", "chunked", "recurrent", "reference"}
    shown = {line.split()[0]: line.split()[1] for line in text.split("\nruns on")[0].splitlines()[1:] if line}
    for variant in table["variants"]:
        runs = "".join(k if variant["executions"][name] == "yes" else "." for k, name in letters.items())
        assert shown[variant["name"]] == runs


def test_list_verbose_gives_every_reason(table):
    blocks = [" ".join(block.split()) for block in output("list", "-v").split("\n\n")]
    for variant in table["variants"]:
        for name, reason in variant["executions"].items():
            if reason != "yes":
                said = next(b for b in blocks if b.startswith(f"{name} cannot run: {reason}"))
                assert variant["name"] in re.split(r"[ ,]+", said)


def test_list_probes_the_device_and_dtype_that_are_asked_for(table):
    double = json.loads(output("list", "softmax", "--dtype", "float64", "--json"))["variants"][0]
    assert double["executions"]["fused_cpu"] != "yes" and double["executions"]["reference"] == "yes"
    if not json.loads(output("info", "--json"))["gpus"]:
        assert "'cuda'" in error("list", "--device", "cuda")


def test_list_patterns():
    names = [v["name"] for v in json.loads(output("list", "l2*", "softmax", "--json"))["variants"]]
    assert "l2_out_gate" in names and "softmax" in names
    assert all(name.startswith("l2") or name == "softmax" for name in names)
    assert len(names) == len(set(names))


def test_list_into_a_closed_pipe():
    command = f"'{HORNER}' list | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("variant") and done.stderr == ""


@pytest.mark.parametrize(
    "name, lines",
    {
        "softmax": ["x = q·k / √D", "w = exp(x)", "s ≤ t", "o = Σ w v / Σ w"],
        "taylor10": ["w = 1 + x + x²/2! + x³/3! + … + x¹⁰/10!"],
        "taylor3": ["w = 1 + x + x²/2! + x³/3!"],
        "centred_taylor2": ["x = q·k / √D − mean of the row"],
        "clamped_sum": ["x = min(5, q·k / √D)", "o = Σ w v / max(1, Σ w)"],
        "detached_sum": ["o = Σ w v / stopgrad(max(1, Σ w))"],
        "softmax1": ["o = Σ w v / (1 + Σ w)"],
        "linear_relu": ["x = relu(q)·relu(k)", "w = x", "o = Σ w v / (10⁻⁸ + Σ w)"],
        "softmax_window": ["t − 128 < s ≤ t"],
        "softmax:mask=full": ["all s"],
        "gated_decay": ["w = exp(x) · ∏ g", "o = LayerNorm( out · Σ w in v / n )"],
        "l2_post_gate": ["o = post · L2( Σ w v )"],
        "sparsemax": ["w = max(x − τ, 0)", "τ such that Σ w = 1"],
        "softmax:temperature=2": ["x = q·k / (2 √D)"],
        "based": ["x = (P q)·(R k) / √16"],
        "gdn": ["g = exp(decay), the gate of each token after s, up to t; in w(kₛ·kᵣ): after r, up to s"],
    }.items(),
)
def test_show_formula(name, lines):
    text = output("show", name)
    shown = [line.strip().partition("  ")[2].strip() or line.strip() for line in text.splitlines()]
    for line in lines:
        assert line in shown


def test_every_variant_can_be_written_as_its_spec_says(table):
    specs = {variant["spec"] for variant in table["variants"]}
    again = json.loads(output("list", *(f"softmax:{spec}" for spec in specs), "--json"))
    assert {variant["spec"] for variant in again["variants"]} == specs


def test_show_inputs():
    inputs = json.loads(output("show", "gated", "--json"))["inputs"]
    required = {i["name"]: i["shape"] for i in inputs if not i["optional"]}
    assert required["input_gate"] == "[B, G, S]" and required["norm_bias"] == "[E]"
    assert "decay" not in required


def test_show_state():
    state = json.loads(output("show", "taylor2", "--dim", "48", "--json"))["state"]
    assert state["why_not"] == ""
    assert [s["D"] for s in state["sizes"]] == [16, 32, 48, 64, 128]
    by_dim = {s["D"]: s for s in state["sizes"]}
    assert by_dim[64]["features"] == 2145
    assert by_dim[64]["bytes"] == 2145 * 65 * 4
    wide = json.loads(output("show", "taylor2", "--value-dim", "128", "--json"))["state"]["sizes"]
    assert {s["D"]: s["bytes"] for s in wide}[64] == 2145 * 129 * 4
    assert "558 KB" in output("show", "taylor2")
    assert "no recurrent form: its weight" in output("show", "softmax")


def test_info():
    facts = json.loads(output("info", "--json"))
    assert facts["threads"] >= 1 and facts["gpus"] >= 0
    assert facts["torch"] in output("info")
    assert output("--version").split()[1] == facts["horner"]


@pytest.mark.parametrize(
    "args, words",
    [
        (["lst"], ["'lst'", "'list'"]),
        (["--jsno"], ["'--jsno'"]),
        (["list", "--jsno"], ["'--jsno'", "'horner list'", "'--json'"]),
        (["list", "tylor*"], ["'tylor*'", "'taylor1'"]),
        (["show"], ["NAME"]),
        (["show", "sofmax"], ["'sofmax'", "'softmax'"]),
        (["show", "softmax", "l2"], ["'l2'"]),
        (["show", "softmax", "--dim", "wide"], ["--dim", "wide"]),
        (["show", "softmax", "--dim", "0"], ["--dim"]),
        (["show", "softmax:norm=l3"], ["'l3'", "'l2'"]),
        (["check", "--variant", "sofmax"], ["'sofmax'", "'softmax'"]),
        (["check", "--variant", "tylor*"], ["'tylor*'", "'taylor1'"]),
        (["check", "--execution", "fast"], ["'fast'", "'reference'"]),
        (["check", "--dtype", "int8"], ["'int8'", "'bfloat16'"]),
        (["check", "--device", "tpu"], ["'tpu'", "'cuda'"]),
        (["check", "--seed", "-1"], ["--seed"]),
        (["check", "--seed"], ["--seed"]),
    ],
    ids=" ".join,
)
def test_errors_name_what_is_wrong(args, words):
    line = error(*args)
    assert all(word in line for word in words), line


def test_no_gpu_is_an_error():
    if json.loads(output("info", "--json"))["gpus"]:
        pytest.skip("there is one")
    assert "'cuda'" in error("check", "--device", "cuda")


def test_check_passes():
    text = output("check", "--variant", "softmax", "--variant", "l2", "--execution", "reference")
    head, softmax, l2 = text.splitlines()[:3]
    assert head.split() == ["variant", "execution", "float32", "float64", "bfloat16"]
    for line, name in [(softmax, "softmax"), (l2, "l2")]:
        assert line.split()[:2] == [name, "reference"] and line.split()[2::2] == ["ok"] * 3
    assert "6 ok, 0 failed" in text


def test_check_all_executions_of_softmax():
    report = json.loads(output("check", "--variant", "softmax", "--dtype", "float32", "--json"))
    assert report["ok"] and not report["stopped"]
    for result in report["results"]:
        assert result["result"] == "ok" or result["skipped"][0]["why"]


def test_check_notices_every_mutant():
    report = json.loads(output("check", "--mutants", "--variant", "taylor2", "--execution", "chunked", "--dtype", "bfloat16", "--json"))
    assert report["ok"] and len(report["results"]) > 30
    plain, *mutants = report["results"]
    assert plain["mutant"] is None and plain["result"] == "ok" and plain["cases"] > 5
    assert {m["result"] for m in mutants} == {"caught"} and all(m["by"] for m in mutants)
    assert {m["old_rule"] for m in mutants} == {True, False}  # the rule before this one missed some
    assert "--forward-only" in error("check", "--mutants", "--forward-only")


def test_check_what_has_no_name_in_the_table():
    names = ["taylor7", "softmax:norm=l2"]
    args = ["--variant", *names, "--execution", "reference", "--dtype", "float32"]
    report = json.loads(output("check", *args, "--forward-only", "--seed", "5", "--json"))
    assert [r["variant"] for r in report["results"]] == names
    assert report["seed"] == 5 and not report["gradients"]
    for result in report["results"]:
        assert result["cases"] > 5
        assert result["worst"]["error"] <= result["worst"]["allowed"]
        assert "--seed 5" in result["reproduce"]


def catches(pid, sig):
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return int(caught, 16) >> (sig - 1) & 1


def test_ctrl_c_prints_the_table_so_far():
    run = subprocess.Popen(
        [HORNER, "check", "--dtype", "float32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 30
        while not catches(run.pid, signal.SIGINT):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=10)
    finally:
        run.kill()
    assert run.returncode == 130
    assert out.startswith("variant") and "softmax" in out and "interrupted; so far" in out
    assert err == ""


def test_the_page_of_variants_is_in_step():
    script = ROOT / "scripts" / "variants.py"
    made = subprocess.run([sys.executable, script, HORNER], capture_output=True, text=True, check=True).stdout
    assert made == (ROOT / "docs" / "variants.md").read_text(), "run scripts/variants.py build/horner --write"
