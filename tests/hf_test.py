"""horner.hf against transformers' own sdpa: the same logits, tokens, losses and gradients; and its recurrent cache.

HORNER_LONG=1 adds what takes minutes: torch.compile of a whole model, 20,000 tokens in constant memory.
"""

import copy
import functools
import json
import os
import re
import resource
import runpy
import time
import warnings
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM

import horner.hf

torch.set_num_threads(1)  # the models are tiny

ROOT = Path(__file__).parent.parent
GEMMA = ROOT / "pretrained" / "gemma-3-270m"
needs_gemma = pytest.mark.skipif(not GEMMA.exists(), reason="no pretrained/gemma-3-270m (make pretrained)")
long = pytest.mark.skipif(not os.environ.get("HORNER_LONG"), reason="takes minutes: HORNER_LONG=1")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97,
             max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=96)  # fmt: skip
SLIDING = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=128, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
            pad_token_id=0, bos_token_id=1, eos_token_id=96)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, head_dim=16, sliding_window=6),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, use_sliding_window=True, **SLIDING),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=16, query_pre_attn_scalar=10, **SLIDING),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
}
FAMILIES = pytest.mark.parametrize("family", CONFIGS)


def model(family, implementation="horner", **changes):
    torch.manual_seed(0)
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():  # weights large enough for attention to choose, and for greedy tokens to differ
        for p in made.parameters():
            if p.dim() == 2:
                p.mul_(5)
    return made


def tokens(batch=3, length=20):
    return torch.randint(1, 96, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(left):
    keep = torch.ones(3, 20, dtype=torch.long)
    keep[0, :7] = keep[1, :1] = 0
    return keep if left else keep.flip(1)


POSITIONS = torch.tensor([[*range(5), *range(9), *range(6)], [*range(20)], [0, *range(19)]])
INPUTS = {
    "plain": {},
    "left padding": {"attention_mask": padding(True)},
    "right padding": {"attention_mask": padding(False)},
    "packed": {"position_ids": POSITIONS, "use_cache": False},
}


@FAMILIES
def test_logits_are_those_of_sdpa(family):
    ours, theirs, ids = model(family), model(family, "sdpa"), tokens()
    with torch.no_grad():
        for name, inputs in INPUTS.items():
            real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
            wanted = theirs(ids, **inputs).logits[real]
            assert wanted.std() > 0.1
            torch.testing.assert_close(ours(ids, **inputs).logits[real], wanted, atol=1e-4, rtol=0, msg=lambda m: f"{name}: {m}")
    packed = {"position_ids": POSITIONS[:1], "use_cache": False}
    with torch.no_grad():  # the tokens of the second sequence, alone
        torch.testing.assert_close(ours(ids[:1], **packed).logits[:, 5:14], ours(ids[:1, 5:14]).logits, atol=1e-4, rtol=0)


@FAMILIES
def test_greedy_tokens_are_those_of_sdpa(family):
    models, ids = (model(family), model(family, "sdpa")), tokens()
    settings = dict(do_sample=False, eos_token_id=None, attention_mask=padding(True))
    new = [m.generate(ids, max_new_tokens=50, **settings) for m in models]
    assert torch.equal(*new)
    assert new[0][:, 20:].unique().numel() > 5  # they say something
    if family in ("gemma3", "gpt2"):
        static = [m.generate(ids, max_new_tokens=10, cache_implementation="static", **settings) for m in models]
        assert torch.equal(*static) and torch.equal(static[0], new[0][:, :30])


def padded_batch(rows):
    """Right padding and a loss on the real tokens."""
    keep = padding(False)[: len(rows)]
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "attention_mask": keep, "labels": ids.masked_fill(keep == 0, -100)}


def trainer_step(made, rows, collate, folder):
    """The loss and the gradients of one step of transformers' Trainer."""
    gradients = {}

    class Keep(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            gradients.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    settings = transformers.TrainingArguments(output_dir=folder, max_steps=1, per_device_train_batch_size=len(rows), report_to="none", use_cpu=True,
                                              save_strategy="no", disable_tqdm=True, logging_strategy="no", max_grad_norm=0)  # fmt: skip
    trainer = transformers.Trainer(made, settings, train_dataset=rows, data_collator=collate, callbacks=[Keep()])
    return trainer.train().training_loss, gradients


@pytest.mark.parametrize("family, batch", [*((f, "padded") for f in CONFIGS), ("gemma3", "packed"), ("qwen3", "packed"), ("gpt2", "packed")])
def test_trainer_step_is_that_of_sdpa(family, batch, tmp_path):
    if batch == "padded":
        rows, collate = [{"input_ids": row} for row in tokens()], padded_batch
    else:
        rows = [{"input_ids": row[:n].tolist()} for row, n in zip(tokens(), (5, 20, 12))]
        collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=family == "qwen3")
    loss, gradients = trainer_step(model(family), rows, collate, tmp_path)
    wanted_loss, wanted = trainer_step(model(family, "sdpa"), rows, collate, tmp_path)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert gradients.keys() == wanted.keys() and len(wanted) > 10
    for name, g in wanted.items():
        torch.testing.assert_close(gradients[name], g, atol=1e-5 * g.abs().max().item(), rtol=0, msg=lambda m: f"{name}: {m}")


def test_variants_by_name_by_config_and_by_layer():
    ids = tokens()
    l2 = model("llama", "horner:l2")(ids).logits
    assert not torch.allclose(l2, model("llama")(ids).logits, atol=0.01)
    torch.testing.assert_close(model("llama", horner_variant="l2")(ids).logits, l2)
    by_layer = model("llama", horner_variant=["l2", "softmax"])(ids).logits
    assert not torch.allclose(by_layer, l2, atol=0.01)
    assert torch.equal(model("llama", horner_variant="l2,softmax")(ids).logits, by_layer)
    assert torch.equal(model("llama", horner_variant=["l2"])(ids).logits, l2)
    composed = model("llama", horner_variant="taylor4:norm=l2")(ids).logits
    torch.testing.assert_close(model("llama", horner.hf.register("taylor4:norm=l2"))(ids).logits, composed)
    # a window of the variant's and one of the model's: the narrower
    narrow = model("mistral", "horner", horner_variant="softmax:mask=window(3)")(ids).logits
    torch.testing.assert_close(narrow, model("mistral", "sdpa", sliding_window=3)(ids).logits, atol=1e-4, rtol=0)
    assert horner.hf.find("softmax_window").reach.back == 128
    # a scale of the variant's stays, 1/sqrt(D) is the model's
    own = model("gemma3", horner_variant="softmax:scale=fixed(0.5)")(ids).logits
    torch.testing.assert_close(own, model("gemma3", query_pre_attn_scalar=4)(ids).logits, atol=1e-4, rtol=0)


def test_any_text_names_a_variant(tmp_path):
    ids = tokens()
    named = model("llama", "horner:topk20:temperature=0.5")
    torch.testing.assert_close(named(ids).logits, model("llama", horner_variant="topk20:temperature=0.5")(ids).logits)
    # the name is saved with the model; without it, the model would be another, which is said
    named.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["horner_variant"] == "topk20:temperature=0.5"
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="horner").eval()
    torch.testing.assert_close(again(ids).logits, named(ids).logits)
    said = "names the horner variant 'topk20:temperature=0.5', but attn_implementation='sdpa'"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        AutoModelForCausalLM.from_pretrained(tmp_path)
        model("llama", "sdpa", horner_variant=["softmax", "softmax"])
    assert len([w for w in found if said in str(w.message)]) == len([w for w in found if "horner variant" in str(w.message)]) == 1
    plain = model("llama", "sdpa")
    plain.set_attn_implementation("horner:taylor6:norm=l2")
    torch.testing.assert_close(plain(ids).logits, model("llama", horner_variant="taylor6:norm=l2")(ids).logits)
    plain.set_attn_implementation("horner:l2")
    torch.testing.assert_close(plain(ids).logits, model("llama", "horner:l2")(ids).logits)
    for text, message in (("topq20", "no attention variant 'topq20'"), ("softmax:temprature=2", "temprature")):
        with pytest.raises((RuntimeError, ValueError), match=message):
            model("llama", f"horner:{text}")


def test_bidirectional_models():
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=97)
    bert = transformers.BertModel._from_config(config, attn_implementation="sdpa").eval()
    wanted = bert(tokens(), attention_mask=padding(False)).last_hidden_state
    bert.set_attn_implementation("horner")
    real = padding(False).bool()
    torch.testing.assert_close(bert(tokens(), attention_mask=padding(False)).last_hidden_state[real], wanted[real], atol=1e-4, rtol=0)


def test_gradient_checkpointing_and_bfloat16():
    made, ids = model("gemma3").train(), tokens()
    wanted = torch.autograd.grad(made(ids, labels=ids).loss, made.lm_head.weight)
    made.gradient_checkpointing_enable()
    torch.testing.assert_close(torch.autograd.grad(made(ids, labels=ids).loss, made.lm_head.weight), wanted)
    half = model("llama").to(torch.bfloat16)
    theirs = model("llama", "sdpa").to(torch.bfloat16)
    torch.testing.assert_close(half(ids).logits, theirs(ids).logits, atol=0.05, rtol=0)


REFUSED = {
    "output_attentions with this cache": lambda ids: model("llama", "horner:taylor2")(ids, output_attentions=True, past_key_values=horner.hf.RecurrentCache(model("llama", "horner:taylor2").config)),
    "output_attentions with packed sequences": lambda ids: model("llama")(ids, output_attentions=True, use_cache=False, position_ids=torch.arange(20).remainder(7).expand(3, -1)),
    "head masks (head_mask)": lambda ids: model("llama")(ids, head_mask=torch.ones(4)),
    "(something_new)": lambda ids: model("llama")(ids, something_new=1),
    "config.horner_variant says 'taylor2' for this layer: set config.horner_variant to None": lambda ids: model("llama", "horner:l2", horner_variant="taylor2")(ids),
    "horner_variant is an empty list": lambda ids: model("llama", horner_variant=[])(ids),
    "did you mean 'l2'": lambda ids: model("llama", "sdpa", horner_variant=["softmax", "ll2"]),
    "variant must be a str, got int": lambda ids: horner.hf.register(5),
    "has 3 layers, but the model has 2": lambda ids: model("llama", horner_variant=["l2", "softmax", "l2"])(ids),
    "or a list of variants, got 17": lambda ids: model("llama", horner_variant=17)(ids),
    "or a list of variants, got ['l2', 3]": lambda ids: model("llama", horner_variant=["l2", 3])(ids),
    "a pattern looks like": lambda ids: model("llama", horner_variant="")(ids),
    "did you mean 'softmax'": lambda ids: model("llama", horner_variant="sofmax")(ids),
    "has a full mask": lambda ids: horner.hf.register("softmax:mask=full"),
    "got 'sdpa'": lambda ids: horner.hf.RecurrentCache(model("llama", "sdpa").config),
    "'l2' has none: its weight has no finite state": lambda ids: horner.hf.RecurrentCache(model("llama", "horner:l2").config),
    "no gradients": lambda ids: model("llama", "horner:taylor2")(ids, past_key_values=horner.hf.RecurrentCache(model("llama", "horner:taylor2").config)),
    "cannot forget": lambda ids: horner.hf.RecurrentCache(model("llama", "horner:taylor2").config).crop(-1),
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_the_weights_of_softmax_are_those_of_eager(name, monkeypatch):
    ids, made = tokens(), model(name)
    wanted = model(name, "eager")(ids, attention_mask=padding(True), output_attentions=True).attentions
    got = made(ids, attention_mask=padding(True), output_attentions=True).attentions
    assert len(got) == len(wanted) > 0
    seen = padding(True)[:, None, :, None].bool()  # eager gives rows of padding some numbers
    for a, b in zip(got, wanted):
        torch.testing.assert_close(torch.where(seen, a, 0), torch.where(seen, b, 0), atol=1e-5, rtol=0)
    assert made(ids).get("attentions") is None  # only where they are asked for
    monkeypatch.setattr(horner, "_MOST_WEIGHTS", 1000)
    with pytest.raises(RuntimeError, match="more than 1000 numbers: take fewer tokens"):
        made(ids, output_attentions=True)
    assert made(ids).get("attentions") is None


def test_a_pattern_of_layers(tmp_path):
    made = model("llama", "horner:l2*1,taylor2:centred")
    layers = made.config.num_hidden_layers
    assert made.config.horner_variant == ["l2", "taylor2:centred"] * (layers // 2)
    other = model("llama", horner_variant=made.config.horner_variant)
    assert torch.equal(made(tokens()).logits, other(tokens()).logits)
    made.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="horner")
    assert torch.equal(made(tokens()).logits, again.eval()(tokens()).logits)
    own = model("llama", "horner:gated,softmax")  # weights of its own in every second layer
    assert [hasattr(layer, "horner") for layer in own.model.layers] == [True, False] * (layers // 2)
    with pytest.raises((ValueError, RuntimeError), match="did you mean 'softmax'"):
        model("llama", "horner:l2,sofmax")


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_honoured_is_named(named):
    with pytest.raises((NotImplementedError, ValueError, RuntimeError, TypeError), match=re.escape(named)):
        REFUSED[named](tokens())


def test_a_recurrent_cache_that_attention_does_not_use_is_an_error():
    made = model("llama", "horner:taylor2")
    cache = horner.hf.RecurrentCache(made.config)
    made.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="attention did not use it"):
        made.generate(tokens(), max_new_tokens=3, eos_token_id=None, past_key_values=cache)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("family, more", [
    ("llama", {"attention_mask": padding(True), "max_new_tokens": 70}),  # more than the 64 that wait in a state
    ("gemma3", {"attention_mask": padding(True), "max_new_tokens": 20}),
    ("gpt2", {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 20}),
])  # fmt: skip
def test_recurrent_cache(family, more, device):
    made, ids = model(family, "horner:taylor2").to(device), tokens().to(device)
    more = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in more.items()}
    cache = horner.hf.RecurrentCache(made.config)
    settings = dict(do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True, **more)
    wanted, got = made.generate(ids, **settings), made.generate(ids, past_key_values=cache, **settings)
    assert torch.equal(got.sequences, wanted.sequences) and cache.get_seq_length() == 19 + more["max_new_tokens"]
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), atol=1e-4, rtol=1e-4)


def test_recurrent_cache_of_a_prompt_is_copied():
    made, ids = model("llama", "horner:centred_taylor2"), tokens()
    cache = horner.hf.RecurrentCache(made.config)
    with torch.no_grad():
        made(ids[:, :18], past_key_values=cache)
    settings = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    wanted = made.generate(ids, **settings)
    for c in (copy.deepcopy(cache), cache):
        assert torch.equal(made.generate(ids, past_key_values=c, **settings), wanted)
    cache.reset()
    assert cache.get_seq_length() == 0 and torch.equal(made.generate(ids, past_key_values=cache, **settings), wanted)


def long_model():
    """A taylor2 model with heads of 16 channels."""
    config = transformers.LlamaConfig(**{**SMALL, "hidden_size": 64, "max_position_embeddings": 1 << 20})
    return AutoModelForCausalLM.from_config(config, attn_implementation="horner:taylor2").eval()


def more(made, ids, cache, n):
    """n tokens more, and the processor time that each took, in ms."""
    start = time.process_time()
    ids = made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=True, eos_token_id=None, past_key_values=cache)
    return ids, 1e3 * (time.process_time() - start) / n


def test_memory_is_constant():
    made = long_model()
    caches = [horner.hf.RecurrentCache(made.config) for _ in range(2)]
    for cache, n in zip(caches, (10, 140)):
        ids, _ = more(made, tokens(1, 4), cache, n)
        assert ids.shape[1] == 4 + n and cache.get_seq_length() == 3 + n
    assert caches[0].bytes == caches[1].bytes < 200_000


def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@long
def test_twenty_thousand_tokens():
    made = long_model()
    cache, ids = horner.hf.RecurrentCache(made.config), tokens(1, 4)
    ids, _ = more(made, ids, cache, 1_000)
    before = memory()
    ids, _ = more(made, ids, cache, 19_000)
    grown = memory() - before
    early, late = [], []  # by turns: what else the machine does takes as much from either
    for _ in range(7):
        early.append(more(made, tokens(1, 4), horner.hf.RecurrentCache(made.config), 200)[1])
        ids, ms = more(made, ids, cache, 200)
        late.append(ms)
    early, late = sorted(early)[3], sorted(late)[3]
    print(f"\ncache {cache.bytes} bytes; memory grew by {grown / 1e6:.2f} MB in 19,000 tokens; "
          f"ms a token: {early:.2f} of the first 200, {late:.2f} after {ids.shape[1]}")  # fmt: skip
    assert grown < 2e6  # input_ids and the attention mask take 16 bytes a token
    assert late < 1.3 * early


def test_a_training_step_runs_forward_once_in_a_layer(monkeypatch):
    """As bench/compiled_step.py counts it, of its four layers."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # the same graphs, sooner
    torch.compiler.reset()
    bench = runpy.run_path(str(ROOT / "bench" / "compiled_step.py"))
    for name, step in bench["make"](64, "l2").items():
        step()
        counts = bench["forwards"](step)
        assert sum(n for key, n in counts.items() if key.endswith(" forward")) == 4, (name, counts)
        assert name == "eager" or counts["horner::attend_forward"] == counts["horner::attend_backward"] == 4, counts


@long
def test_a_whole_model_compiles_without_a_graph_break():
    made = model("llama", "horner", num_hidden_layers=1, horner_variant="taylor4:norm=l2")
    compiled = torch.compile(made, fullgraph=True, dynamic=True)
    for length in (9, 17):
        for inputs in ({}, {"attention_mask": torch.ones(2, length).tril(3).flip(0).long()}):
            ids = tokens(2, length)
            loss = [m(ids, labels=ids, use_cache=False, **inputs).loss for m in (compiled, made)]
            gradients = [torch.autograd.grad(x, [*made.parameters()]) for x in loss]
            torch.testing.assert_close(*loss)
            torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@needs_gemma
def test_gemma():
    torch.set_num_threads(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(GEMMA)
    texts = ["All happy families are alike; every unhappy family is unhappy in its own way.", "The sea was"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    made = AutoModelForCausalLM.from_pretrained(GEMMA, attn_implementation="sdpa", dtype=torch.float32).eval()
    real, settings = inputs["attention_mask"].bool(), dict(max_new_tokens=50, do_sample=False)
    logits, new = {}, {}
    with torch.no_grad():
        for name in ("sdpa", "horner"):
            made.set_attn_implementation(name)
            logits[name], new[name] = made(**inputs).logits[real].double(), made.generate(**inputs, **settings)
        exact = made.double()(**inputs).logits[real]
    assert torch.equal(new["horner"], new["sdpa"])
    far = {name: (x - exact).abs().max().item() for name, x in logits.items()}
    apart = (logits["horner"] - logits["sdpa"]).abs()
    print(f"\nlogits up to {exact.abs().max():.1f}; from float64 {far}; horner from sdpa: rms {apart.square().mean().sqrt():.1e}, most {apart.max():.1e}")
    # sdpa itself is further than 1e-4 from float64: logits go up to 36
    assert apart.square().mean().sqrt() < 1e-4 and apart.max() < 2e-4
    assert far["horner"] < 2 * max(far["sdpa"], 1e-4)


def test_the_example_of_fine_tuning(tmp_path, monkeypatch, capsys):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "<s>": 1, "war": 2, "and": 3, "peace": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="[UNK]").save_pretrained(tmp_path / "model")
    model("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text("war and peace and " * 100)
    settings = f"--model {tmp_path / 'model'} --variant l2 --layers 1 --steps 20 --length 20 --rate 1e-2 --out {tmp_path / 'tuned'}"
    monkeypatch.setattr("sys.argv", ["finetune.py", str(tmp_path / "book.txt"), *settings.split()])
    runpy.run_path(str(ROOT / "examples" / "finetune.py"))
    said = re.search(r"l2: loss ([\d.]+) originally, ([\d.]+) after the swap, ([\d.]+) after 20 steps", capsys.readouterr().out)
    before, after, recovered = map(float, said.groups())
    assert before != after and recovered < after / 2
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", attn_implementation="horner")
    assert tuned.config.horner_variant == ["softmax", "l2"]
    ids = torch.tensor([[1, 2, 3, 4, 3, 2]])
    kept = tuned(ids).logits
    tuned.set_attn_implementation("sdpa")
    assert (tuned(ids).logits - kept).abs().max() > 0.01  # it was loaded with its operator


def test_the_page():
    """docs/huggingface.md: its Python runs as it stands, from the root, in one namespace."""
    page = (ROOT / "docs" / "huggingface.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) >= 3
    names = {}
    here = os.getcwd()
    os.chdir(ROOT)
    try:
        for block in blocks:
            if "pretrained/" in block and not GEMMA.exists():
                continue
            exec(compile(block, "docs/huggingface.md", "exec"), names)
    finally:
        os.chdir(here)
