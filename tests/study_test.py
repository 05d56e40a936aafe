"""horner study and horner report: grids, interruptions, failing runs, runs from several machines."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

HORNER = os.environ.get("HORNER", "build/horner")
TINY = {
    "model": "tiny", "device": "cpu", "threads": 1, "batch": 4, "length": 16, "steps": 300, "warmup": 4, "learning-rate": 3e-3,
    "evaluate-every": 100, "evaluate-sequences": 8, "checkpoint-every": 50, "entropy-every": 100,
    "model-config": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1,
                     "head_dim": 16, "vocab_size": 64, "horner": {"key_shift": True}},
}  # fmt: skip


def horner(*words, code=0):
    done = subprocess.run([HORNER, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout if code == 0 else done.stderr


def study_file(folder, **fields):
    path = folder / "study.json"
    grid = {"title": "Tiny", "attention": ["softmax", "taylor{1..2}"], "settings": TINY,
            "tasks": ["recall:pairs=4", "copy"]}  # fmt: skip
    path.write_text(json.dumps({**grid, **fields}))
    return path


def numbers(folder):
    """The report without the command, which differs between folders."""
    report = json.loads((folder / "report.json").read_text())
    for section in report["sections"]:
        content = section["content"]
        if content["kind"] == "facts":
            content["facts"] = [f for f in content["facts"] if f["name"] != "command"]
    return report


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished study."""
    folder = tmp_path_factory.mktemp("whole")
    out = folder / "out"
    said = horner("study", study_file(folder), "--out", out, "--jobs", 2)
    assert f"report: {out}/report." in said
    return folder


def test_patterns_name_variants(tmp_path):
    grid = study_file(tmp_path, attention=["taylor{1..3}", "linear_{elu,relu}", "cosine_s*", "taylor2"], tasks=["copy"], seeds=[0, 3])
    runs = horner("study", grid, "--out", tmp_path / "out", "--list").split()
    names = ["taylor1", "taylor2", "taylor3", "linear_elu", "linear_relu", "cosine_softmax"]
    assert runs == [f"copy/{n}/seed{s}" for s in (0, 3) for n in names]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"attention": ["tailor1"]}, "did you mean 'taylor1'"),
        ({"attention": ["foo*"]}, "no attention variant matches 'foo*'"),
        ({"attention": ["taylor{1..x}"]}, "a range must look like {1..10}"),
        ({"attention": ["taylor{1"]}, "'taylor{1': missing '}'"),
        ({"variants": []}, "no field 'variants'; possible: 'title'"),
        ({"settings": {"step": 3}}, "no setting 'step'; did you mean 'steps'"),
        ({"settings": {"steps": "3"}}, "'steps' must be an integer"),
        ({"tasks": ["recal"]}, "no task 'recal'; possible: 'text', 'recall'"),
        ({"attention-settings": {"l*": {"clip": 1}}}, "no variant of the study matches 'l*' of 'attention-settings'"),
        ({"tasks": []}, "'tasks' must be a list"),
        ({"tasks": ["copy", "copy"]}, "two runs have the name copy/softmax/seed0"),
        ({"learning-rates": ["fast"]}, "'learning-rate' must be a number, not \"fast\""),
        ({"learning-rates": [1e-3, 1e-3]}, "two runs have the name recall-pairs=4/softmax/lr0.001/seed0"),
        ({"settings": {"evaluate-lengths": "64;128"}}, "'evaluate-lengths' must be lengths such as 64,128,256, not '64;128'"),
        ({"settings": {"evaluate-lengths": "64,"}}, "not '64,'"),
        ({"tasks": ["s3:pairs=3"]}, "no parameter 'pairs=3'; possible: none for 's3'"),
    ],
)
def test_errors_of_a_study_file(tmp_path, fields, words):
    assert words in horner("study", study_file(tmp_path, **fields), "--out", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def test_errors_of_the_commands(tmp_path):
    assert "it is neither a preset ('quick'" in horner("study", "quik", "--out", tmp_path / "out", code=2)
    assert "no runs in" in horner("report", tmp_path, code=2)
    assert "no folder '" in horner("report", tmp_path / "none", code=2)


def test_a_study_has_a_folder_for_every_run_and_a_report_of_all(whole):
    out = whole / "out"
    folders = sorted(str(p.parent.relative_to(out)) for p in out.rglob("result.json"))
    assert folders == sorted(f"{t}/{a}/seed0" for t in ("recall-pairs=4", "copy") for a in ("softmax", "taylor1", "taylor2"))
    assert {p.name for p in (out / folders[0]).iterdir()} == {"settings.json", "metrics.jsonl", "result.json", "taylor.json", "log.txt"}
    report = json.loads((out / "report.json").read_text())
    assert report["subtitle"] == "3 variants, 2 tasks, 1 seed: 6 runs"
    curves = [s for s in report["sections"] if s["heading"].endswith("training loss")]
    assert len(curves) == 2
    for s in curves:
        assert [x["name"] for x in s["content"]["series"]] == ["softmax", "taylor1", "taylor2"]
        assert all(len(x["points"]) == 300 for x in s["content"]["series"])
    # Weights of taylor1 may be negative, so separability is undefined.
    for name, variants in (("Entropy of the weights: Copy", ["softmax", "taylor1", "taylor2"]), ("Separability: Copy", ["softmax", "taylor2"])):
        seen = next(s for s in report["sections"] if s["heading"] == name)["content"]
        assert seen["y"] == variants and len(seen["values"][0]) == 2
        lines = [json.loads(line) for line in (out / "copy/softmax/seed0/metrics.jsonl").read_text().splitlines()]
        assert seen["values"][0] == pytest.approx([line for line in lines if "entropy" in line][-1][name.split(" ")[0].strip(":").lower()])
    # What the report says is what the runs have.
    table = next(s for s in report["sections"] if s["content"]["kind"] == "table")["content"]["rows"]
    for row in table:
        task = row[1].replace(":", "-")
        result = json.loads((out / task / row[0] / "seed0/result.json").read_text())
        assert row[2]["value"] == pytest.approx(result["validation_loss"])
        assert row[4]["value"] == pytest.approx(result["validation_accuracy"])
    sweep = report["sections"][0]["content"]["series"]
    assert [s["name"] for s in sweep] == ["softmax", "plain"] and [p[0] for p in sweep[1]["points"]] == [1, 2]
    assert any(s.startswith("Recall of 4 pairs: ") and "(guessing: 3.1 %)" in s for s in report["summary"])


@pytest.mark.parametrize("preset, variants", [
    ("state-tracking", ["delta_negative", "gla"]), ("recall-state", ["delta_taylor2", "gated_delta"])])  # fmt: skip
def test_longer_sequences_and_learning_rates(tmp_path, preset, variants):
    """The presets of the delta rule, with few steps: every length, and the best rate by the loss at that of training."""
    out = tmp_path / "out"
    small = {"steps": 3, "batch": 2, "threads": 1, "evaluate-sequences": 4, "evaluate-lengths": "600,40,1200" if preset == "recall-state" else "100,16"}
    only = [p for v in variants for p in (f"parity/{v}/*/seed0", f"parity/{v}/*/seed1", f"s3/{v}/*/seed0", f"mqar-pairs=256*/{v}/*/seed0")]
    lengths = sorted(map(int, small["evaluate-lengths"].split(",")))
    if preset == "recall-state":  # 256 pairs do not fit in 40 tokens: an error before the first step
        error = horner("study", preset, "--out", tmp_path / "short", "--set", json.dumps(small), "--only", *only, code=2)
        assert "requires sequences longer than 512 tokens, not 40" in error
        small["evaluate-lengths"], lengths = "600,1200", lengths[1:]
    horner("study", preset, "--out", out, "--jobs", 2, "--set", json.dumps(small), "--only", *only)
    runs = {p.parent: json.loads(p.read_text()) for p in out.rglob("result.json")}
    for result in runs.values():
        assert [x["length"] for x in result["lengths"]] == lengths
        assert all(0 <= x["validation_accuracy"] <= 1 and x["validation_loss"] > 0 for x in result["lengths"])
    report = json.loads((out / "report.json").read_text())
    tables = {s["heading"]: s["content"]["rows"] for s in report["sections"] if s["content"]["kind"] == "table"}
    # By hand: the mean over the seeds of the rate with the lowest mean loss.
    for task in {p.relative_to(out).parts[0] for p in runs}:
        for variant in variants:
            rates = {p.name: [runs[q] for q in runs if q.parent == p] for p in (out / task / variant).iterdir()}
            assert len(rates) > 1
            best = min(rates, key=lambda r: sum(x["validation_loss"] for x in rates[r]) / len(rates[r]))
            mine = [row for row in tables["Learning rates"] if row[0] == variant and row[1].replace(":", "-").replace(",", "-") == task]
            assert [row[6] for row in mine].count("yes") == 1 and len(mine) == len(rates)
            assert next(row[2]["value"] for row in mine if row[6] == "yes") == float(best.removeprefix("lr"))
            for i, length in enumerate(lengths):
                right = [x["lengths"][i]["validation_accuracy"] for x in rates[best]]
                row = next(r for r in tables["Scores by length"] if r[0] == variant and r[1].replace(":", "-").replace(",", "-") == task and r[2]["value"] == length)
                assert row[5]["value"] == pytest.approx(sum(right) / len(right))
                assert row[6]["value"] == pytest.approx(min(right)) and row[7]["value"] == pytest.approx(max(right))
                assert row[9]["text"] == f"{sum(x >= 0.99 for x in right)} of {len(right)}"
    states = {row[0]: row[7]["value"] / 4 for row in tables["The ablation"]}
    assert states == ({"delta_taylor2": 2 * 153 * 16, "gated_delta": 70 * 70} if preset == "recall-state" else dict.fromkeys(variants, 2 * 4 * 16 * 16))
    assert any(f"sequences of {lengths[-1]:,} tokens after training with" in s for s in report["summary"])


def test_a_grid_is_extended_and_differences_have_intervals(tmp_path):
    """The best rate at the edge adds one beyond; comparisons are paired by seed, by hand here."""
    grid = study_file(tmp_path, attention=["softmax", "taylor2"], tasks=["copy"], seeds=[0, 1, 2],
                      settings={**TINY, "steps": 40}, **{"learning-rates": [1e-5, 1e-4], "extend-rates": 1})  # fmt: skip
    out = tmp_path / "out"
    said = horner("study", grid, "--out", out, "--jobs", 2)
    rates = {p.parent.name for p in out.glob("copy/softmax/*/seed0")}
    assert rates == {"lr1e-05", "lr0.0001", "lr0.001"}
    assert "added because the best one was at the edge of the grid: copy/softmax/lr0.001, copy/taylor2/lr0.001" in " ".join(said.split())
    report = json.loads((out / "report.json").read_text())
    sections = {s["heading"]: s["content"] for s in report["sections"]}
    assert [p[0] for p in sections["Loss against learning rate: Copy"]["series"][0]["points"]] == [1e-5, 1e-4, 1e-3]
    assert "each variant at the best of the learning rates it was given" in next(s["text"] for s in report["sections"] if s["heading"] == "Comparisons")
    row = sections["Comparisons"]["rows"][0]
    best = {}
    for v in ("softmax", "taylor2"):
        by = {r: [json.loads((out / f"copy/{v}/{r}/seed{s}/result.json").read_text()) for s in range(3)] for r in rates}
        best[v] = min(by.values(), key=lambda runs: sum(r["validation_loss"] for r in runs))
    gaps = [a["validation_accuracy"] - b["validation_accuracy"] for a, b in zip(best["taylor2"], best["softmax"])]
    mean = sum(gaps) / 3
    error = (sum((g - mean) ** 2 for g in gaps) / 2 / 3) ** 0.5
    assert row[4]["value"] == pytest.approx(mean, abs=1e-12)
    assert row[5]["value"] == pytest.approx(mean - 4.302652729749462 * error, abs=1e-9)
    assert row[6]["value"] == pytest.approx(mean + 4.302652729749462 * error, abs=1e-9)
    shown = row[10] == "yes"
    if row[5]["value"] < 0 < row[6]["value"]:
        assert not shown and any("not shown to differ from softmax: taylor2" in s for s in report["summary"])
    assert "better" not in " ".join(report["summary"])
    # Run again: nothing changes, and nothing is added twice.
    horner("study", grid, "--out", out)
    assert {p.parent.name for p in out.glob("copy/softmax/*/seed0")} == rates


def test_sizes_are_told_apart_by_what_differs(tmp_path):
    """Tasks of one name differ in the length, or in a field inside of a field of the model."""
    convolved = {**TINY["model-config"], "horner": {"key_shift": True, "short_conv": 2}}
    sizes = [{"task": "copy", "size": name, "settings": own}
             for name, own in (("short", {}), ("long", {"length": 32}), ("conv", {"model-config": convolved}))]  # fmt: skip
    grid = study_file(tmp_path, attention=["softmax", "taylor2"], tasks=sizes, seeds=[0, 1], settings={**TINY, "steps": 4})
    horner("study", grid, "--out", tmp_path / "out", "--jobs", 2)
    report = json.loads((tmp_path / "out/report.json").read_text())
    sections = {s["heading"]: s for s in report["sections"]}
    names = {"copy, length 16", "copy, length 32", "copy, horner.short_conv 2, length 16"}
    assert {(row[1], row[5]["value"]) for row in sections["The ablation"]["content"]["rows"]} == {(name, 2) for name in names}
    comparisons = sections["Comparisons"]
    assert len(comparisons["content"]["rows"]) == 3 and "learning rate" not in comparisons["text"]
    error = horner("study", study_file(tmp_path, tasks=[{"task": "copy", "size": "a"}, {"task": "copy", "size": "b"}]), "--out", tmp_path / "x", code=2)
    assert "copy/a/softmax/seed0 and copy/b/softmax/seed0 have the same settings" in error
    for name, values in (("steps", (4, 8)), ("data", ("a.bin", "b.bin"))):  # reports would take them for copies of one run
        sizes = [{"task": "text", "size": str(x)[0], "settings": {name: x}} for x in values]
        error = horner("study", study_file(tmp_path, tasks=sizes), "--out", tmp_path / "x", code=2)
        assert f"text/{str(values[0])[0]}/softmax/seed0 and text/{str(values[1])[0]}/softmax/seed0 have the same" in error


def test_hopeless_runs_are_given_up(tmp_path):
    grid = study_file(tmp_path, attention=["softmax"], tasks=["recall:pairs=4"], settings={**TINY, "steps": 3000, "evaluate-every": 50},
                      **{"learning-rates": [3e-3, 1e-7], "extend-rates": 0, "give-up": {"after": 0.1, "behind": 0.05}})  # fmt: skip
    out = tmp_path / "out"
    said = horner("study", grid, "--out", out, "--jobs", 1)
    listed = json.loads(horner("study", grid, "--out", out, "--list", "--json"))["runs"]
    assert sorted(r["state"] for r in listed) == ["done", "given up"] and any("lr0.003/seed0" in r.get("why", "") for r in listed)
    given_up = json.loads((out / "recall-pairs=4/softmax/lr1e-07/seed0/given_up.json").read_text())
    assert 300 <= given_up["step"] < 3000 and "lr0.003/seed0" in given_up["why"]
    assert "runs given up before their last step" in " ".join(said.split())
    assert not (out / "recall-pairs=4/softmax/lr1e-07/seed0/result.json").exists()
    before = (out / "recall-pairs=4/softmax/lr1e-07/seed0/metrics.jsonl").read_bytes()
    horner("study", grid, "--out", out)  # it stays as it is
    assert before == (out / "recall-pairs=4/softmax/lr1e-07/seed0/metrics.jsonl").read_bytes()
    assert "'give-up' must be like" in horner("study", study_file(tmp_path, **{"give-up": {"after": 2}}), "--out", tmp_path / "x", code=2)


def test_a_learning_rate_replaces_the_grid(tmp_path):
    listed = horner("study", "state-tracking", "--out", tmp_path, "--list", "--set", '{"learning-rate": 0.1}', "--only", "s3/delta/*").split()
    assert listed == ["s3/delta/seed0", "s3/delta/seed1", "s3/delta/seed2"]


def test_what_is_finished_is_not_run_again(whole):
    before = {p: p.stat().st_mtime_ns for p in (whole / "out").rglob("metrics.jsonl")}
    horner("study", whole / "study.json", "--out", whole / "out")
    assert before == {p: p.stat().st_mtime_ns for p in (whole / "out").rglob("metrics.jsonl")}


def test_another_study_in_its_place_is_refused(whole):
    error = horner("study", whole / "study.json", "--out", whole / "out", "--set", '{"batch": 8}', code=2)
    assert "holds a run with batch 4, not 8; choose another --out" in error


def children_of(process):
    return [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def started(whole, out, steps):
    """Starts a study and waits until one of its runs has made `steps` steps."""
    process = subprocess.Popen([HORNER, "study", whole / "study.json", "--out", out, "--jobs", "2"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    # Not rglob: it would walk into checkpoints, which are renamed meanwhile.
    wait_until(lambda: any(p.read_text().count("\n") >= steps for p in out.glob("*/*/*/metrics.jsonl")))
    return process


def test_killed_and_restarted_it_reports_the_same(whole, tmp_path):
    out = tmp_path / "out"
    for steps in (30, 120, 220):
        process = started(whole, out, steps)
        children = children_of(process)
        process.kill()
        process.wait()
        wait_until(lambda: not any(Path(f"/proc/{c}").exists() for c in children))  # no child is left
    horner("study", whole / "study.json", "--out", out)
    assert numbers(out) == numbers(whole / "out")


def test_ctrl_c_interrupts_and_the_study_resumes(whole, tmp_path):
    out = tmp_path / "out"
    process = started(whole, out, 60)
    children = children_of(process)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not any(Path(f"/proc/{c}").exists() for c in children)
    assert any(out.rglob("checkpoint-*")), "interrupted runs leave a checkpoint"
    assert not (out / "report.json").exists()
    horner("study", whole / "study.json", "--out", out)
    assert numbers(out) == numbers(whole / "out")


def test_a_run_that_fails_leaves_the_others(tmp_path):
    grid = study_file(tmp_path, attention=["softmax"],
                      tasks=[{"task": "text", "settings": {**TINY, "data": "nowhere.bin"}}, "copy"])  # fmt: skip
    error = horner("study", grid, "--out", tmp_path / "out", code=1)
    assert "text/softmax/seed0" in error and "FAILED" in error and "nowhere.bin" in error
    assert "1 of 2 runs failed" in error
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["subtitle"] == "1 variant, 1 task, 1 seed: 1 run"


def test_runs_from_several_machines_are_joined(whole, tmp_path):
    small = ("settings.json", "metrics.jsonl", "result.json", "taylor.json")
    for i, run in enumerate(sorted(p.parent for p in (whole / "out").rglob("result.json"))):
        to = tmp_path / ("here" if i % 2 else "there") / run.relative_to(whole / "out")
        to.mkdir(parents=True)
        for name in small:
            shutil.copy(run / name, to)
        if i == 0:  # the same run in both folders counts once
            shutil.copytree(to, tmp_path / "here" / run.relative_to(whole / "out"))
    horner("report", tmp_path / "here", tmp_path / "there", "--out", tmp_path / "both", "--title", "Tiny")
    assert numbers(tmp_path / "both") == numbers(whole / "out")


def test_a_report_of_unfinished_and_odd_runs(whole, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole / "out", out)
    run = out / "copy/taylor1/seed0"
    (run / "result.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:120]) + lines[120][:10])  # an incomplete last line
    name = "<img src=x onerror=alert(1)>"
    odd = out / "copy/softmax/seed0/settings.json"
    odd.write_text(odd.read_text().replace('"attention": "softmax"', f'"attention": "{name}"'))
    horner("report", out)
    report = json.loads((out / "report.json").read_text())
    assert "1 of 6 runs are unfinished: their latest validation is used." in report["summary"]
    copies = next(s for s in report["sections"] if s["heading"] == "Copy: training loss")["content"]["series"]
    assert {s["name"] for s in copies} == {name, "taylor1", "taylor2"}
    if (out / "report.html").exists():
        assert "<img" not in (out / "report.html").read_text()
