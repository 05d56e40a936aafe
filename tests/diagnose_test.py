"""horner diagnose: comparison with attention matrices of the transformers package, and error messages."""
import json
import os
import resource
import shutil
import signal
import subprocess

import numpy as np
import pytest
import torch
import transformers
import transformers.models.llama.modeling_llama as llama

HORNER = os.environ["HORNER"]
transformers.logging.set_verbosity_error()
SMALL = dict(vocab_size=256, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(sliding_window=20, **SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(head_dim=12, **SMALL),
    "gemma3": lambda: transformers.Gemma3TextConfig(head_dim=12, sliding_window=20, query_pre_attn_scalar=20, **SMALL),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1),
}
WORDS = b"In the beginning of the evening nobody knew what the end of the day would bring to any of them. "
LENGTH = 64


def diagnose(*arguments, fails=False):
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([HORNER, "diagnose", *map(str, arguments)], capture_output=True, text=True, env=environment)
    assert (done.returncode == 2) == fails, done.stderr + done.stdout
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(WORDS * 4)
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p) * 0.2)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = model, folder
        return made[name]

    return get


def tokens():
    return torch.tensor([list((WORDS * 4)[:LENGTH])])


def attentions(model):
    with torch.no_grad():
        return [a[0].double().numpy() for a in model(tokens(), output_attentions=True).attentions]


def corrected(crossed):
    loose = ("print", "expectation", "not a bound")
    return {k: v for k, v in crossed.items() if not any(word in k for word in loose)}


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_those_of_transformers(name, models, text, tmp_path):
    model, folder = models(name)
    got = json.loads(diagnose("--model", folder, "--text", text, "--length", 32, LENGTH, "--top", 1, 5, "--out", tmp_path, "--json"))
    matrices = attentions(model)
    for head in got["heads"]:
        a = matrices[head["layer"]][head["head"]][1:]  # the first row sees one token
        seen = (a > 0).sum(-1)
        entropy = -(a * np.log(np.where(a > 0, a, 1))).sum(-1)
        assert head["entropy"] == pytest.approx(entropy.mean(), rel=1e-4, abs=1e-5)
        if name not in ("mistral", "gemma3"):
            assert head["entropy ratio"] == pytest.approx((entropy / np.log(np.arange(2, LENGTH + 1))).mean(), rel=1e-3, abs=1e-5)
            assert (seen <= np.arange(2, LENGTH + 1)).all()
        assert head["first-token mass"] == pytest.approx(a[:, 0].mean(), rel=1e-3, abs=1e-6)
        assert head["largest weight"] == pytest.approx(a.max(-1).mean(), rel=1e-4)
    assert all(c["times"] == 0 and c["of"] > 0 for c in corrected(got["crossed"]).values()), got["crossed"]
    assert len(corrected(got["crossed"])) >= 9
    page = tmp_path / "report.json"
    report = json.loads(page.read_text())
    wanted = {"Findings", "Distance against length", "Separability against N", "Bounds", "Coverage by several heads", "Does the distance vanish as N grows with L?",
              "Sensitivity by raw q·k", "The 1/T law in both units", "Jacobian of the weights by the scores (Lemma 2)"}  # fmt: skip
    assert wanted <= {s["heading"] for s in report["sections"]}
    assert "attention: softmax" in report["subtitle"]
    assert json.loads((tmp_path / "diagnosis.json").read_text())["heads"] == got["heads"]


def test_distances_of_token_embeddings_are_the_definition(models, text, tmp_path):
    model, folder = models("gpt2")
    got = json.loads(diagnose("--model", folder, "--text", text, "--length", LENGTH, "--top", 1, 5, "--embedding", "tokens", "--out", tmp_path, "--json"))
    with torch.no_grad():
        x = (model.transformer.wte(tokens()[0]) + model.transformer.wpe.weight[:LENGTH]).double().numpy()
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for head in got["heads"]:
        a = attentions(model)[head["layer"]][head["head"]]
        distances, shares = [], []
        for t in range(5, LENGTH):
            row, order = a[t, : t + 1], np.argsort(-a[t, : t + 1], kind="stable")
            inside, outside = order[:5], order[5:]
            for points, out in ((x, distances), (unit, shares)):
                y = row[:, None] * points[: t + 1]
                far = np.linalg.norm(y - y[inside].sum(0), axis=1)
                out.append(far[outside].sum() if points is x else (far[inside] < far[outside].min()).mean())
        assert head["distance"][got["grid"].index(5)] == pytest.approx(np.mean(distances), rel=1e-4)
        assert head["separable"][got["separable"].index(5)] == pytest.approx(np.mean(shares), abs=0.011)  # a tie or two


def test_claims_are_the_definitions(models, text, tmp_path):
    model, folder = models("gpt2")
    got = json.loads(diagnose("--model", folder, "--text", text, "--length", 32, LENGTH, "--top", 1, 5, "--embedding", "tokens", "--out", tmp_path, "--json"))
    with torch.no_grad():
        x = (model.transformer.wte(tokens()[0]) + model.transformer.wpe.weight[:LENGTH]).double().numpy()
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    queries = sorted(1 + (2 * i + 1) * (LENGTH - 1) // 64 for i in range(32))
    norms = []
    for layer, matrices in enumerate(attentions(model)):
        selected, covered, separated = np.zeros(4), np.zeros(4), 0
        for t in range(5, LENGTH):
            chosen, hit = np.zeros(LENGTH, int), np.zeros(LENGTH, bool)
            for a in matrices:
                y = a[t, : t + 1, None] * unit[: t + 1]
                order = np.argsort(-a[t, : t + 1], kind="stable")
                far = np.linalg.norm(y - y[order[:5]].sum(0), axis=1)
                inside = order[:5][far[order[:5]] < far[order[5:]].min()]
                chosen[order[:5]] += 1
                hit[inside] = True
                separated += len(inside)
            for m in range(4):
                selected[m] += (chosen == m + 1).sum()
                covered[m] += hit[chosen == m + 1].sum()
        at = next(c for c in got["coverage"] if c["layer"] == layer and c["N"] == 5)
        p = separated / (4 * 5 * (LENGTH - 5))
        assert [m["selected"] for m in at["by_heads"]] == list(selected)
        assert at["one_head"] == pytest.approx(p, abs=0.005)  # a tie or two
        assert at["measured"] == pytest.approx(covered.sum() / selected.sum(), abs=0.005)
        assert at["independent_heads"] == pytest.approx(sum(n * (1 - (1 - p) ** (m + 1)) for m, n in enumerate(selected)) / selected.sum(), abs=0.01)
        assert at["paper"] == pytest.approx(1 - (1 - p) ** 4, abs=0.01)
        for a in matrices:
            rows = (a[t, : t + 1] for t in queries)
            norms += [np.linalg.svd(np.diag(row) - np.outer(row, row), compute_uv=False)[0] for row in rows]
    own = got["jacobians"][0]
    assert own["name"] == "softmax" and {j["name"] for j in got["jacobians"]} >= {"taylor4", "power2", "sigmoid / sum", "sigmoid / count"}
    assert own["norm"] == pytest.approx(np.median(norms), rel=1e-3) and own["largest_norm"] == pytest.approx(max(norms), rel=1e-3)
    assert all(j["attained_largest"] <= 1 + 1e-6 and j["derived_bound"] <= j["two_term_bound"] for j in got["jacobians"])
    for growth in got["growth"]["fractions"]:
        slopes = [h["exponents, N in proportion"][[0.06, 0.25, 0.5, 0.75, 0.9, 1].index(growth["fraction"])]["distance"] for h in got["heads"]]
        assert growth["distance"]["median"] == pytest.approx(np.median(slopes))
        low, high = growth["distance"]["low"], growth["distance"]["high"]
        assert growth["verdict"] == ("grows" if low > 0 else "falls" if high < 0 else "undecided")
    for head in got["heads"]:
        assert head["scale"] == pytest.approx(8**-0.5)
        bound = 1 / (2 * np.array(got["temperatures"]))[:, None]
        assert (np.array(head["sensitivity by raw products of the most sensitive row"]) <= bound * (1 + 1e-4)).all()


def test_another_operator_is_compared_with_itself(models, text, tmp_path):
    _, folder = models("llama")
    taylor = tmp_path / "taylor4"
    shutil.copytree(folder, taylor)
    config = json.loads((taylor / "config.json").read_text())
    (taylor / "config.json").write_text(json.dumps({**config, "horner_variant": "taylor4"}))
    got = json.loads(diagnose("--model", taylor, "--text", text, "--length", LENGTH, "--top", 1, 5, "--out", tmp_path / "out", "--json"))
    assert got["attention"] == "taylor4" and got["jacobians"][0]["name"] == "taylor4"
    assert all(h["Taylor order for 1 %"] <= 4 for h in got["heads"])
    assert not [name for name in got["crossed"] if "Corollary" in name]
    assert "attention: taylor4" in json.loads((tmp_path / "out/report.json").read_text())["subtitle"]


def test_what_if_measures_the_loss(models, text, tmp_path):
    model, folder = models("llama")
    got = json.loads(diagnose("--model", folder, "--text", text, "--length", LENGTH, "--top", 1, 5, "--out", tmp_path, "--json", "--what-if", "--what-if-tokens", LENGTH,
                              "--normaliser", "softmax:temperature=2", "topk64", "sparsemax", "ssmax", "--orders", 3, "--per-head"))["what_if"]  # fmt: skip
    with torch.no_grad():
        loss = model(tokens(), labels=tokens()).loss.item()
        assert got["loss"] == pytest.approx(loss, rel=1e-4)
        for layer in model.model.layers:
            layer.self_attn.scaling /= 2
        cooler = model(tokens(), labels=tokens()).loss.item()
        for layer in model.model.layers:
            layer.self_attn.scaling *= 2
    by_name = {e["name"]: e for e in got["normalisers"]}
    assert by_name["softmax:temperature=2"]["loss_all"] == pytest.approx(cooler, rel=1e-4)
    assert by_name["topk64"]["loss_all"] == pytest.approx(loss, rel=1e-4)  # no row has more tokens
    assert by_name["sparsemax"]["entropy_ratio"] < by_name["topk64"]["entropy_ratio"]
    assert [e["name"] for e in got["centred"]] == ["centred_taylor1", "centred_taylor2", "centred_taylor3"]
    for top in got["top"]:
        losses = dict(map(tuple, top["losses"]))
        assert 1 <= top["within_5_percent"] <= top["within_1_percent"] <= LENGTH
        assert all(l <= 1.05 * loss * (1 + 1e-6) for n, l in losses.items() if n == top["within_5_percent"])


def cut(layer, head, N):
    """Attention of the transformers package with one head truncated to the N largest weights of a row."""
    whole = llama.eager_attention_forward

    def attention(module, query, key, value, mask, scaling, **more):
        out, weights = whole(module, query, key, value, mask, scaling, **more)
        if module.layer_idx == layer:
            rows = weights[:, head]
            least = rows.topk(min(N, rows.shape[-1]), -1).values[..., -1:]
            own = value[:, head // module.num_key_value_groups]
            out[:, :, head] = torch.where(rows >= least, rows, 0) @ own
        return out, weights

    return attention


def test_the_top_of_each_head_is_the_least_that_the_loss_allows(models, text, tmp_path, monkeypatch):
    model, folder = models("llama")
    options = ("--what-if", "--per-head", "--what-if-tokens", LENGTH, "--normaliser", "topk64", "--orders", 0)
    got = json.loads(diagnose("--model", folder, "--text", text, "--length", LENGTH, "--top", 1, 5, "--out", tmp_path, "--json", *options))["what_if"]
    grid = [1, 2, 3, 4, 5, 7, 9, 12, 16, 22, 30, 42, 58, 64]

    def loss(layer, head, N):
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(llama, "eager_attention_forward", cut(layer, head, N))
            return model(tokens(), labels=tokens()).loss.item()

    for top in got["top_of_heads"]:
        where = top["layer"], top["head"]
        for name, more in (("1_percent", 1.01), ("5_percent", 1.05)):
            alone, together = grid.index(top["alone_" + name]), grid.index(top["together_" + name])
            assert loss(*where, grid[alone]) <= more * got["loss"] * (1 + 1e-5)
            assert alone == 0 or loss(*where, grid[alone - 1]) > more * got["loss"] * (1 - 1e-5)
            assert together == 0 or got["together_" + name]["output_error"] < 1
    assert len(got["top_of_heads"]) == 8 and max(t["alone_1_percent"] for t in got["top_of_heads"]) > 1
    for name, more in (("1_percent", 1.01), ("5_percent", 1.05)):
        assert got["together_" + name]["loss"] <= more * got["loss"]
    maps = {s["heading"]: s["content"] for s in json.loads((tmp_path / "report.json").read_text())["sections"]}
    for heading, field in (("N of each head alone, 1 %", "alone_1_percent"), ("N of each head, all truncated, 5 %", "together_5_percent")):
        assert [n for row in maps[heading]["values"] for n in row] == [t[field] for t in got["top_of_heads"]]


@pytest.fixture(scope="module")
def steep(tmp_path_factory):
    """A model of horner's with large scores: far from softmax, whatever the order."""
    folder = tmp_path_factory.mktemp("steep")

    def get(attention):
        run = folder / attention.replace(":", "_")
        if not run.exists():
            change = {"initializer_range": 0.3, "hidden_size": 32, "intermediate_size": 48, "horner_variant": attention}
            subprocess.run([HORNER, "train", "--out", str(run), "--steps", "1", "--learning-rate", "0", "--batch", "1", "--length", "16", "--evaluate-sequences",
                            "0", "--entropy-every", "0", "--model-config", json.dumps(change)], check=True, capture_output=True)  # fmt: skip
        return run

    return get


@pytest.mark.parametrize("attention", ["taylor4", "l2", "by_count", "taylor2:norm=l2"])
def test_everything_is_compared_with_the_operator_of_the_model(steep, text, tmp_path, attention):
    options = ("--model", steep(attention), "--text", text, "--length", LENGTH, "--top", 1, 5, "--out", tmp_path)
    what = ("--what-if", "--what-if-tokens", LENGTH, "--normaliser", attention, "softmax", "--orders", 5)
    got = json.loads(diagnose(*options, *what, "--json"))
    losses = {e["name"]: e["loss_all"] for e in got["what_if"]["normalisers"] + got["what_if"]["plain"]}
    own = got["what_if"]["loss"]
    assert got["attention"] == got["what_if"]["attention"] == attention
    assert losses[attention] == pytest.approx(own, rel=1e-5)
    assert losses["softmax"] != pytest.approx(own, rel=1e-3)
    if attention == "taylor4":
        assert losses["taylor4"] == pytest.approx(own, rel=1e-5) and losses["taylor2"] != pytest.approx(own, rel=1e-3)
        assert max(h["Taylor order for 1 %"] for h in got["heads"]) <= 4
    for top in got["what_if"]["top"]:  # all weights of a row are the model itself
        assert dict(map(tuple, top["losses"])).get(LENGTH, own) == pytest.approx(own, rel=1e-4)
        assert top["within_1_percent"] <= LENGTH
    sections = {s["heading"]: s["text"] for s in json.loads((tmp_path / "report.json").read_text())["sections"]}
    for heading in ("What if: another normaliser", "What if: a series instead of exp", "What if: only the top N", "Series instead of exp"):
        assert attention in sections[heading], heading


def test_the_normalisers_that_are_tried_are_about_the_operator(steep, text, tmp_path):
    got = json.loads(diagnose("--model", steep("taylor4"), "--text", text, "--length", 32, "--top", 1, 5, "--out", tmp_path, "--what-if", "--what-if-tokens", 32, "--orders", 0, "--json"))
    names = [e["name"] for e in got["what_if"]["normalisers"]]
    assert "taylor4:temperature=2" in names and "softmax" in names and "softmax:temperature=2" not in names
    assert got["what_if"]["whole"] and "top_of_heads" not in got["what_if"]
    assert all(e["loss_half"] is None for e in got["what_if"]["normalisers"])


def test_losses_come_first_and_survive_an_interrupt(models, text, tmp_path):
    _, folder = models("llama")
    run = subprocess.Popen([HORNER, "diagnose", "--model", str(folder), "--text", str(text), "--length", str(LENGTH), "--top", "1", "--out", str(tmp_path), "--what-if",
                            "--per-head", "--what-if-tokens", str(LENGTH), "--orders", "170"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    seen = [run.stdout.readline() for _ in range(4)]
    run.send_signal(signal.SIGINT)
    rest, said = run.communicate(timeout=60)
    assert run.returncode == 130 and "interrupted; the report has" in said
    assert "softmax, unchanged" in seen[0] and all("loss " in line for line in seen) and all("%" in line for line in seen[1:])
    got = json.loads((tmp_path / "diagnosis.json").read_text())
    assert got["interrupted"] and not got["what_if"]["whole"] and len(got["what_if"]["normalisers"]) >= 3
    page = json.loads((tmp_path / "report.json").read_text())
    assert "interrupted" in page["subtitle"] and page["sections"][0]["heading"] == "What if: another normaliser"


def test_a_run_of_training_is_diagnosed(text, tmp_path):
    run, data, long = tmp_path / "run", tmp_path / "data", tmp_path / "long.txt"
    long.write_bytes(WORDS * 20)
    subprocess.run([HORNER, "data", "pack", str(long), "--out", str(data)], check=True, capture_output=True)
    subprocess.run([HORNER, "train", "--model", "tiny", "--data", str(data), "--length", "32", "--batch", "2", "--steps", "4", "--checkpoint-every", "2",
                    "--evaluate-sequences", "1", "--out", str(run)], check=True, capture_output=True)  # fmt: skip
    options = ("--text", text, "--length", 32, LENGTH, "--top", 1, 5, "--json")
    of = {}
    for name in ("run", "run/checkpoint-00000002", "run/checkpoint-00000004"):
        of[name] = json.loads(diagnose("--model", tmp_path / name, *options, "--out", tmp_path / "out"))["heads"]
    assert of["run"] == of["run/checkpoint-00000004"] != of["run/checkpoint-00000002"]
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "checkpoint-00000004", attn_implementation="eager").eval()
    matrices = attentions(model)
    for head in of["run"]:
        a = matrices[head["layer"]][head["head"]][1:]
        assert head["entropy"] == pytest.approx(-(a * np.log(np.where(a > 0, a, 1))).sum(-1).mean(), rel=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_a_gpu_gives_the_same(name, models, text, tmp_path):
    _, folder = models(name)
    options = ("--what-if", "--what-if-tokens", LENGTH, "--orders", 2)
    cpu, cuda = (json.loads(diagnose("--model", folder, "--text", text, "--length", 32, LENGTH, "--top", 1, 5, "--out", tmp_path, "--json", "--device", on, *options))
                 for on in ("cpu", "cuda"))  # fmt: skip
    assert all(c["times"] == 0 for c in corrected(cuda["crossed"]).values())
    for ours, theirs in zip(cuda["heads"], cpu["heads"]):
        for metric in ("entropy", "largest weight", "first-token mass", "attention distance", "effective temperature", "distance", "sensitivity"):
            one, other = (np.array(h[metric], dtype=float) for h in (ours, theirs))
            assert np.allclose(one, other, rtol=1e-2, atol=1e-4, equal_nan=True), metric
    what = [[*w["normalisers"], w["plain"][1], w["centred"][1]] for w in (cuda["what_if"], cpu["what_if"])]
    for ours, theirs in zip(*what):
        assert ours["loss_all"] == pytest.approx(theirs["loss_all"], rel=2e-2), ours["name"]


@pytest.mark.skipif("HORNER_LONG" not in os.environ, reason="takes minutes: make test-long")
def test_a_long_text_takes_less_than_two_gigabytes_beside_the_model(tmp_path):
    shape = dict(vocab_size=256, n_embd=768, n_layer=2, n_head=12, n_positions=32768, bos_token_id=1, eos_token_id=1)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_bytes(WORDS * 400)
    diagnose("--model", tmp_path / "model", "--text", tmp_path / "text", "--length", 32768, "--embedding", "values", "--out", tmp_path / "out")
    own = (tmp_path / "model/model.safetensors").stat().st_size
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < own + 2e9


def test_what_is_wrong_is_said(models, text, tmp_path):
    _, folder = models("llama")
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text(" \n")
    short.write_text("Only a few words.")
    fine = ("--model", folder, "--text", text, "--length", LENGTH, "--out", tmp_path / "out")
    assert "is empty" in diagnose("--model", folder, "--text", empty, fails=True)
    assert "has 17 tokens, fewer than the length 64" in diagnose("--model", folder, "--text", short, "--length", 64, fails=True)
    assert "no embedding 'token'" in diagnose(*fine, "--embedding", "token", fails=True)
    assert "no layer 7; the model has 0 to 1" in diagnose(*fine, "--layers", 7, fails=True)
    assert "no head 4; the model has 0 to 3" in diagnose(*fine, "--heads", 4, fails=True)
    assert "unknown device 'gpu'; expected 'cpu' or 'cuda'" in diagnose(*fine, "--device", "gpu", fails=True)
    if not torch.cuda.is_available():
        assert "device 'cuda' is not available" in diagnose(*fine, "--device", "cuda", fails=True)
    assert "no model folder" in diagnose("--model", tmp_path / "none", "--text", text, fails=True)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "model.safetensors" in diagnose("--model", broken, "--text", text, "--length", LENGTH, fails=True)
    signed = tmp_path / "signed"
    shutil.copytree(folder, signed)
    config = json.loads((signed / "config.json").read_text())
    (signed / "config.json").write_text(json.dumps({**config, "horner_variant": "taylor3"}))
    said = diagnose("--model", signed, "--text", text, "--length", LENGTH, fails=True)
    assert "no attention weights to analyse: the analysis does not support negative weights" in said
    assert not (tmp_path / "out").exists()
