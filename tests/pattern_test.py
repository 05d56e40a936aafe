"""Patterns of layers: every command takes them, and a model with several variants trains, resumes, decodes and reopens."""

import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

import horner.nn as readers  # `horner` is the command here

HORNER = os.environ["HORNER"]
TOOL = os.path.join(os.path.dirname(HORNER), "model_tool")
PATTERN = "linear_decay*2,softmax,linear_mamba"
LAYERS = ["linear_decay", "linear_decay", "softmax", "linear_mamba", "linear_decay"]
SIZE = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
        "num_hidden_layers": 5}  # fmt: skip
SMALL = ["--model", "tiny", "--task", "copy", "--device", "cpu", "--threads", 1, "--batch", 2, "--length", 16, "--evaluate-sequences", 2,
         "--model-config", json.dumps(SIZE), "--entropy-every", 4]  # fmt: skip


def horner(*words, code=0):
    done = subprocess.run([HORNER, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def tool(*words):
    done = subprocess.run([TOOL, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def variants(folder):
    return json.loads((folder / "config.json").read_text())["horner_variant"]


def logits(folder, tokens, where, *prompt):
    save_file({"tokens": tokens}, where / "tokens.safetensors")
    tool("stream" if prompt else "logits", folder, where / "tokens.safetensors", where / "out.safetensors", *prompt)
    return load_file(where / "out.safetensors")["logits"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of twelve steps."""
    out = tmp_path_factory.mktemp("run") / "straight"
    horner("train", "--out", out, *SMALL, "--attention", PATTERN, "--steps", 12, "--checkpoint-every", 6, "--decay-steps", 20)
    return out


def test_each_layer_has_the_weights_of_its_variant(run):
    last = run / "checkpoint-00000012"
    assert variants(last) == LAYERS and json.loads((run / "result.json").read_text())["attention"] == PATTERN
    own = {name.split(".")[2] + "." + name.split(".horner.")[1] for name in load_file(last / "model.safetensors") if ".horner." in name}
    gates = {"decay.weight", "decay.bias", "norm_weight"}
    assert {x for x in own if "mamba" not in x} == {f"{layer}.{gate}" for layer in (0, 1, 4) for gate in gates}
    assert {x.split(".")[0] for x in own if "mamba" in x} == {"3"}


def test_a_stopped_run_resumes_exactly(run, tmp_path):
    """Once by text and once by the list of the settings file, which is the same pattern."""
    (tmp_path / "settings.json").write_text(json.dumps({"attention": LAYERS[:4]}))
    for steps in (7, 12):
        horner("train", "--out", tmp_path / "parts", *SMALL, "--config", tmp_path / "settings.json", "--steps", steps,
               "--checkpoint-every", 6, "--decay-steps", 20, "--resume-or-start")  # fmt: skip
        if steps < 12:
            (tmp_path / "parts/result.json").unlink()
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(folder / "checkpoint-00000012" / name) for folder in (tmp_path / "parts", run))
        assert ours.keys() == theirs.keys() and len(ours) > 30
        for key in ours:
            assert key.startswith("random.") or torch.equal(ours[key], theirs[key]), key
    said = horner("train", "--out", tmp_path / "parts", "--attention", "softmax", "--resume", code=2)
    assert f'holds a run with attention "{PATTERN}"' in said


TURNS = {
    "softmax:scale=fixed(1e+2),temperature=2,l2": ["softmax:scale=fixed(1e+2),temperature=2", "l2"],
    "softmax:temperature=2,scale=fixed(1e+0),clamp=3|l2^3": ["softmax:temperature=2,scale=fixed(1e+0),clamp=3|l2^3"],
    "l2+softmax:scale=fixed(1e+0),temperature=2,l2": ["l2+softmax:scale=fixed(1e+0),temperature=2", "l2"],
    "l2^3|softmax:scale=fixed(1e+0),softmax^2|l2+softmax:norm=rms(eps=1e-3),post_gate^2": [
        "l2^3|softmax:scale=fixed(1e+0)", "softmax^2|l2+softmax:norm=rms(eps=1e-3),post_gate^2"],
}  # fmt: skip


@pytest.mark.parametrize("text", TURNS)
def test_marks_in_parentheses_do_not_count(text, tmp_path):
    """To the command and to horner.nn."""
    turn = TURNS[text]
    assert readers.turn(text) == turn
    tool("new", "tiny", text, 1, tmp_path / "model", json.dumps({"num_hidden_layers": len(turn)}))
    found = variants(tmp_path / "model")
    assert turn == ([found] * len(turn) if isinstance(found, str) else found)
    for i, layer in enumerate(turn):
        own = horner_names(readers.Attention(64, 4, variant=layer).horner) if "post_gate" in layer else set()
        assert own == {name.split(".horner.")[1] for name in load_file(tmp_path / "model/model.safetensors") if f"layers.{i}.horner." in name}


def horner_names(module):
    return {name for name, _ in module.named_parameters()}


def test_decoding_is_the_whole_text(run, tmp_path):
    last = run / "checkpoint-00000012"
    tokens = torch.randint(0, 64, (2, 30), generator=torch.Generator().manual_seed(4))
    whole = logits(last, tokens, tmp_path)
    for prompt in (1, 19):
        assert (whole - logits(last, tokens, tmp_path, prompt)).abs().max() < 1e-4 * (1 + whole.abs().max())
    said = json.loads(horner("generate", "--model", run, "--prompt", "!!!!", "--tokens", 8, "--temperature", 0, "--json"))
    prompt = torch.tensor([[33] * 4])
    for token in said["tokens"]:
        assert logits(last, prompt, tmp_path)[0, -1].argmax() == token
        prompt = torch.cat([prompt, torch.tensor([[token]])], 1)


def test_a_folder_reopens_and_another_pattern_trains_from_it(run, tmp_path):
    tool("copy", run / "checkpoint-00000012", tmp_path / "copy")
    tokens = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(4))
    assert variants(tmp_path / "copy") == LAYERS
    assert torch.equal(logits(tmp_path / "copy", tokens, tmp_path), logits(run / "checkpoint-00000012", tokens, tmp_path))
    size = [x for x in SMALL if x != "tiny"]
    size[size.index("--model-config") + 1] = "{}"
    horner("train", "--out", tmp_path / "own", "--model", tmp_path / "copy", *size[1:], "--steps", 1)  # the folder's own pattern
    assert variants(tmp_path / "own/checkpoint-00000001") == LAYERS
    horner("train", "--out", tmp_path / "other", *SMALL, "--attention", "softmax*5", "--steps", 1)
    assert variants(tmp_path / "other/checkpoint-00000001") == ["softmax"] * 5


@pytest.mark.parametrize("wrong, message", [
    ("softmax*6", "has 6 layers, but the model has 5"),
    ("softmax*0,l2", "the number of layers in 'softmax*0' must be 1 to 10000"),
    ("softmax*x", "the number of layers in 'softmax*x' must be 1 to 10000"),
    ("softmax,", "a variant is missing"),
    ("*2,softmax", "a variant is missing"),
    ("linear_decay*3,sofmax", "no attention variant 'sofmax'; did you mean 'softmax'"),
    ("taylor2:norm=l2,sofmax", "no stage 'sofmax'"),
    ('["softmax", "l2"]', "is a JSON list, which only a file can have; separate the variants by commas instead, as in 'linear_decay*3,softmax'"),
])  # fmt: skip
def test_wrong_patterns_are_refused(wrong, message, tmp_path):
    assert message in horner("train", "--out", tmp_path / "run", *SMALL, "--attention", wrong, "--steps", 1, code=2)
    assert not (tmp_path / "run/settings.json").exists()


def test_wrong_lists_are_refused(tmp_path):
    for wrong, message in (([], "or a list of variants, got []"), ([1], "must have texts, got 1"), ("", "a variant is missing"), (3, "got 3")):
        patch = json.dumps({**SIZE, "horner_variant": wrong})
        said = horner("train", "--out", tmp_path / "run", *SMALL, "--model-config", patch, "--steps", 1, code=2)
        assert message in said, said


def test_plan_says_what_each_layer_keeps():
    words = ("plan", "taylor2:norm=l2,post_gate*2,softmax", "--layers", 7, "--dim", 16, "--tokens", 65536)
    plan = json.loads(horner(*words, "--json"))
    first, second = plan["variants"]
    assert (first["variant"], first["of_layers"], first["keeps"]) == ("taylor2:norm=l2,post_gate", [0, 1, 3, 4, 6], "state")
    assert (second["variant"], second["of_layers"], second["keeps"]) == ("softmax", [2, 5], "cache")
    assert plan["kept_bytes"] == first["state_bytes"] + second["cache_bytes"]
    text = horner(*words)
    assert "0-1, 3-4, 6  taylor2:norm=l2,post_gate" in text and "2, 5" in text and "a KV cache" in text
    assert json.loads(horner("plan", "l2*3", "--json"))["layers"] == 3
    assert "has 2 layers, but the model has 1" in horner("plan", "l2,softmax", "--layers", 1, code=2)


def test_a_study_has_patterns_among_its_variants(tmp_path):
    settings = {"model": "tiny", "device": "cpu", "threads": 1, "batch": 2, "length": 16, "steps": 2, "evaluate-sequences": 2, "model-config": SIZE}
    grid = {"attention": ["softmax", "taylor{1,2}*2,l2", ["linear_decay", "softmax"]], "settings": settings, "tasks": ["copy"]}
    (tmp_path / "study.json").write_text(json.dumps(grid))
    horner("study", tmp_path / "study.json", "--out", tmp_path / "out", "--keep-weights")
    folders = sorted(p.parent.name for p in (tmp_path / "out/copy").glob("*/seed0"))
    assert folders == ["linear_decay-softmax", "softmax", "taylor1-2-l2", "taylor2-2-l2"]
    assert variants(tmp_path / "out/copy/taylor2-2-l2/seed0/checkpoint-00000002") == ["taylor2", "taylor2", "l2", "taylor2", "taylor2"]
    report = (tmp_path / "out/report.json").read_text()
    assert "taylor1 in layers 0-1; l2 in layer 2 of each 3" in report and "unknown variant" not in report


def test_diagnose_measures_the_layers_that_it_can(run, tmp_path):
    (tmp_path / "text").write_bytes(bytes(33 + i * i % 29 for i in range(80)))
    words = ["diagnose", "--model", run, "--text", tmp_path / "text", "--length", 32, 64, "--out", tmp_path / "out", "--json"]
    found = json.loads(horner(*words, "--what-if", "--per-head", "--orders", 2, "--normaliser", "l2", "--what-if-tokens", 32))
    assert found["attention"] == PATTERN and found["variants"] == LAYERS
    assert {h["layer"] for h in found["heads"]} == {2}
    layers = [f["text"] for f in found["findings"] if f["title"] == "Layers"][0]
    assert "linear_decay in layers 0-1, 4 (not measured: the analysis does not support" in layers and "softmax in layer 2;" in layers
    assert found["what_if"]["normalisers"][0]["loss_all"] != found["what_if"]["loss"]
    assert {h["layer"] for h in found["what_if"]["top_of_heads"]} == {2}
    assert "layer 0 has no attention weights to analyse" in horner(*words, "--layers", 0, code=2)
