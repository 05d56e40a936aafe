"""Runs as one small file; sizes, lengths, heads and fitted laws in the report, from made-up runs with known numbers."""

import json
import math
import os
import subprocess

import pytest

HORNER = os.environ.get("HORNER", "build/horner")


def horner(*words, code=0):
    done = subprocess.run([HORNER, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout if code == 0 else done.stderr


def made_up(folder, settings, result, heads=None):
    """A folder like that of a finished run."""
    folder.mkdir(parents=True)
    loss = result.get("validation_loss", 1.0)
    settings = {"model": "tiny", "steps": 300, "length": 64, **settings}
    (folder / "settings.json").write_text(json.dumps(settings))
    lines = [{"step": s, "loss": loss + 3 / s, "gradient_norm": 1 / s} for s in range(1, 301)]
    lines[-1]["entropy"] = [1.5, 0.5]
    lines.append({"step": 300, "validation_loss": loss, "validation_accuracy": result.get("validation_accuracy", 0.5)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"finished": True, "steps": 300, **result}))
    if heads:
        (folder / "heads.json").write_text(json.dumps(heads))


def report_of(*words, out):
    horner("report", *words, "--out", out)
    report = json.loads((out / "report.json").read_text())
    return report, {s["heading"]: s["content"] for s in report["sections"]}


@pytest.fixture(scope="module")
def text_runs(tmp_path_factory):
    """Three variants on text at two lengths, with heads."""
    folder = tmp_path_factory.mktemp("text")
    for i, name in enumerate(("softmax", "ssmax", "entmax15")):
        for seed in range(3):
            loss = 2 + 0.1 * i + 0.01 * seed
            at = lambda n: {"length": n, "validation_loss": loss * (1 + n / 1e3), "validation_accuracy": 0.4}
            heads = [{"length": n, "heads": 4, "entropy ratio": 0.5 + 0.1 * i, "separable share, N = 16": 0.9 - n / 1e3, "largest weight": None} for n in (64, 512)]
            made_up(folder / name / f"seed{seed}", {"attention": name, "seed": seed, "evaluate-lengths": "64,512"},
                    {"validation_loss": loss, "validation_accuracy": 0.4, "lengths": [at(64), at(512)]}, heads)  # fmt: skip
    return folder


def test_a_file_gives_the_same_page_as_its_folders(text_runs, tmp_path):
    file = tmp_path / "numbers.json"
    first, tables = report_of(text_runs, "--numbers", file, out=tmp_path / "a")
    again, same = report_of(file, out=tmp_path / "b")
    assert first["summary"] == again["summary"]
    for name in ("Comparisons", "The ablation", "Scores by length", "What the heads select"):
        assert tables[name] == same[name], name
    assert file.stat().st_size < 60_000
    report_of(file, "--numbers", tmp_path / "twice.json", out=tmp_path / "c")
    assert file.read_text() == (tmp_path / "twice.json").read_text(), "nothing is lost"
    both, _ = report_of(file, text_runs, out=tmp_path / "d")
    assert both["subtitle"] == first["subtitle"], "two copies of a run count once"


def test_errors_of_files(text_runs, tmp_path):
    file, other = tmp_path / "numbers.json", tmp_path / "other.json"
    horner("report", text_runs, "--out", tmp_path / "a", "--numbers", file)
    other.write_text('{"a": 1}')
    assert "is not a file of runs: 'horner report DIR --numbers FILE' writes one" in horner("report", other, "--out", tmp_path / "b", code=2)
    assert "is a file: add --out DIR" in horner("report", file, code=2)
    assert "other.json" in horner("report", text_runs, "--out", tmp_path / "b", "--numbers", other, code=2)
    assert json.loads(other.read_text()) == {"a": 1}
    damaged = json.loads(file.read_text())
    del damaged["runs"][1]["step"]
    other.write_text(json.dumps(damaged))
    assert "run 2 is damaged or incomplete" in horner("report", other, "--out", tmp_path / "b", code=2)


def test_text_at_other_lengths_has_losses_and_comparisons(text_runs, tmp_path):
    report, tables = report_of(text_runs, out=tmp_path / "out")
    longest = [r for r in tables["Comparisons"]["rows"] if r[0] == "ssmax" and r[3]["value"] == 512]
    by = [(2.1 + 0.01 * s) / (2 + 0.01 * s) - 1 for s in range(3)]
    assert longest[0][4]["value"] == pytest.approx(sum(by) / 3)
    assert tables["Longer sequences: Text"]["y_label"] == "validation loss"
    assert any(s.startswith("Text, sequences of 512 tokens after training with 64: losses softmax 3.0391") for s in report["summary"])
    assert any(s.startswith("Text, at 512 tokens against softmax: ssmax +5.0 %") for s in report["summary"])
    row = next(r for r in tables["What the heads select"]["rows"] if r[0] == "entmax15" and r[2]["value"] == 512)
    assert row[3]["value"] == pytest.approx(2.21 * 1.512) and row[4]["value"] == pytest.approx(0.7) and row[6]["text"] == "–"
    assert any("from 64 to 512 tokens: softmax 0.84 to 0.39 (entropy 0.50 to 0.50)" in s for s in report["summary"])


def test_sizes_are_tasks_of_their_own_and_give_a_law(tmp_path):
    for width, weights in ((32, 1e5), (64, 4e5), (128, 1.6e6), (256, 6.4e6)):
        for name, factor in (("softmax", 1.0), ("l2", 1.1)):
            for seed in range(2):
                loss = factor * (1.2 + 0.9 * (weights / 1e6) ** -0.25) * (1 + 0.001 * (-1) ** seed)
                made_up(tmp_path / f"runs/{name}/w{width}/{seed}", {"attention": name, "seed": seed, "model-config": {"hidden_size": width}},
                        {"validation_loss": loss, "parameters": weights})  # fmt: skip
    report, tables = report_of(tmp_path / "runs", out=tmp_path / "out")
    assert {r[2] for r in tables["Comparisons"]["rows"]} == {f"text, hidden_size {w}" for w in (32, 64, 128, 256)}
    assert all(r[4]["value"] == pytest.approx(0.1) for r in tables["Comparisons"]["rows"])
    fitted = {r[0]: r for r in tables["Scaling"]["rows"]}
    assert fitted["softmax"][3]["value"] == pytest.approx(0.25, abs=0.01) and fitted["l2"][2]["value"] == pytest.approx(1.32, abs=0.02)
    assert [s["name"] for s in tables["Loss against weights: text"]["series"]] == ["softmax", "softmax, fit", "l2", "l2, fit"]
    assert any(s.startswith("Exponents of the weights in the loss on text (95 % intervals): softmax 0.2") for s in report["summary"])


def test_recall_gives_a_capacity(tmp_path):
    for dim, state in ((8, 512), (16, 2048), (32, 8192)):
        for pairs in (8, 32, 128):
            right = 1 / 32 + 31 / 32 / (1 + (pairs / (0.1 * state**0.75)) ** 2.5)
            task = f"mqar:pairs={pairs},vocabulary=289,values=32"
            made_up(tmp_path / f"runs/{dim}/{pairs}", {"attention": "linear_elu", "task": task, "model-config": {"head_dim": dim}, "length": 512},
                    {"validation_loss": 1.0, "validation_accuracy": right, "state_numbers": state})  # fmt: skip
    report, tables = report_of(tmp_path / "runs", out=tmp_path / "out")
    row = tables["Capacity"]["rows"][0]
    assert row[0] == "linear_elu" and row[1]["value"] == pytest.approx(0.1 * 2048**0.75, rel=1e-3) and row[3]["value"] == pytest.approx(0.75, abs=1e-3)
    assert any(s.startswith("Pairs of which half are recalled (95 % intervals): linear_elu 30 ") for s in report["summary"])


def test_a_study_diagnoses_its_models(tmp_path):
    """Heads of finished models, at the length of training and beyond; sizes have folders of their own."""
    small = {"model": "tiny", "device": "cpu", "threads": 1, "batch": 2, "length": 48, "steps": 3, "evaluate-sequences": 2, "evaluate-lengths": "48,96"}
    sizes = [{"task": "text", "size": f"w{w}", "settings": {"model-config": {"hidden_size": w}}} for w in (16, 32)]
    grid = {"attention": ["softmax", "topk", "linear_decay"], "settings": small, "diagnose": [48, 96], "tasks": sizes}
    (tmp_path / "study.json").write_text(json.dumps(grid))
    out = tmp_path / "out"
    horner("study", tmp_path / "study.json", "--out", out, "--jobs", 2)
    heads = json.loads((out / "text/w16/softmax/seed0/heads.json").read_text())
    assert [h["length"] for h in heads] == [48, 96] and all(0 < h["entropy ratio"] <= 1 and 0 <= h["separable share, N = 16"] <= 1 for h in heads)
    assert "does not support negative weights" in json.loads((out / "text/w32/linear_decay/seed0/heads.json").read_text())["why"]
    report = json.loads((out / "report.json").read_text())
    rows = next(s["content"]["rows"] for s in report["sections"] if s["heading"] == "What the heads select")
    assert [(r[0], r[1], r[2]["value"]) for r in rows] == [(v, f"text, hidden_size {w}", n) for w in (16, 32) for v in ("softmax", "topk") for n in (48, 96)]
    assert "'diagnose' must have lengths of at least 32 tokens, not 8" in horner("study", bad(tmp_path, grid, diagnose=[8]), "--out", tmp_path / "x", code=2)


def bad(folder, grid, **fields):
    path = folder / "bad.json"
    path.write_text(json.dumps({**grid, **fields}))
    return path


def test_needles_are_found_by_the_command(tmp_path):
    """The task over text of `horner train`: its tokens are bytes, its level of guessing 1 / 10."""
    settings = {"steps": 3, "batch": 2, "length": 400, "evaluate-sequences": 4, "evaluate-lengths": "400,800"}
    words = [w for name, value in settings.items() for w in (f"--{name}", value)]
    horner("train", "--model", "tiny", "--task", "needle", "--device", "cpu", "--threads", 1, *words, "--out", tmp_path / "run")
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert [x["length"] for x in result["lengths"]] == [400, 800] and math.isfinite(result["validation_loss"])
