"""Layers whose heads have different operators, inside transformers: the folders of `horner convert` open, compute what the
command computes, train and decode."""

import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

import horner
import horner.nn

transformers = pytest.importorskip("transformers")
import horner.hf  # noqa: E402

transformers.logging.set_verbosity_error()
HORNER = os.environ["HORNER"]
TOOL = os.path.join(os.path.dirname(HORNER), "model_tool")
TOKENS = torch.randint(3, 99, (2, 23), generator=torch.Generator().manual_seed(5))
LOLCATS = "lolcats:features=hedgehog(8),near=window(5)"
LAYERS = [  # of 6 heads on 3 key heads: uneven sharing, as many key heads as the layer has but others, sums, gates
    f"softmax|{LOLCATS}|softmax^2|l2^2",
    "softmax:mask=window(4)+gated_delta^3|softmax^3",
    f"{LOLCATS}^3|gated_delta|taylor2:norm=l2,post_gate|softmax",
    "softmax^6",
]
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 99,
         "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}  # fmt: skip


def llama(layers=LAYERS):
    return transformers.LlamaConfig(**SIZES, horner_variant=layers)


def gemma(layers=LAYERS):
    """Two layers with a window of 7 tokens, two without."""
    kinds = ["sliding_attention", "full_attention"] * 2
    return transformers.Gemma3TextConfig(**SIZES, layer_types=kinds, sliding_window=7, query_pre_attn_scalar=16, horner_variant=layers)


def made(config, **more):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="horner", **more)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if ".horner." in name:
                x.add_(0.3 * torch.randn_like(x))
            elif x.dim() > 1:
                x.mul_(4)
    return model.eval()


def run(*words):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def of_the_command(what, folder, tokens, where, *more):
    save_file({"tokens": tokens}, where / "tokens.safetensors")
    run(TOOL, what, folder, where / "tokens.safetensors", where / "out.safetensors", *more)
    return load_file(where / "out.safetensors")


def near(ours, theirs):
    return (ours - theirs).abs().max() < 1e-4 * (1 + theirs.abs().max())


@pytest.mark.parametrize("config", [llama, gemma])
def test_a_model_computes_what_the_command_computes(config, tmp_path):
    model = made(config())
    model.save_pretrained(tmp_path / "model")
    own = {name for name in load_file(tmp_path / "model/model.safetensors") if ".horner." in name}
    assert "model.layers.0.horner.1.query_projection" in own and "model.layers.1.horner.1.decay.weight" in own
    assert not any(name.startswith(("model.layers.0.horner.0", "model.layers.3")) for name in own)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="horner").eval()
    with torch.no_grad():
        logits = again(TOKENS).logits
        assert near(logits, model(TOKENS).logits)
    assert near(logits, of_the_command("logits", tmp_path / "model", TOKENS, tmp_path)["logits"])
    again.train()(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    theirs, found = of_the_command("loss", tmp_path / "model", TOKENS, tmp_path), 0
    for name, x in again.named_parameters():
        if name in theirs and x.grad is not None:
            assert (x.grad - theirs[name]).abs().max() < 1e-4 * (1e-3 + theirs[name].abs().max()), name
            found += ".horner." in name
    assert found == len([name for name, x in again.named_parameters() if ".horner." in name])


@torch.no_grad()
def test_the_narrower_of_two_windows_applies(tmp_path):
    """Layers 0 and 2 have a window of 7 tokens. The command and transformers agree, and decode so."""
    wide, plain = ([f"softmax{mask}", "l2", f"softmax{mask}^2|l2{mask}^4", "softmax"] for mask in (":mask=window(12)", ""))
    model = made(gemma(wide))
    logits = model(TOKENS, use_cache=False).logits
    assert near(logits, made(gemma(plain))(TOKENS, use_cache=False).logits)
    model.save_pretrained(tmp_path / "model")
    assert near(logits, of_the_command("logits", tmp_path / "model", TOKENS, tmp_path)["logits"])
    assert near(logits, of_the_command("stream", tmp_path / "model", TOKENS, tmp_path, 9)["logits"])
    for own in ("window(3)", "window(12,ahead=2)"):
        model = made(gemma([f"softmax:mask={own}"]))
        model.save_pretrained(tmp_path / "model")
        logits = model(TOKENS, use_cache=False).logits
        assert near(logits, of_the_command("logits", tmp_path / "model", TOKENS, tmp_path)["logits"])


@torch.no_grad()
def test_a_cap_of_the_variant_stays(tmp_path):
    config = transformers.Gemma2Config(**SIZES, sliding_window=7, attn_logit_softcapping=50.0, horner_variant=["softmax:softcap=0.5", "softmax"])
    model = made(config)
    model.save_pretrained(tmp_path / "model")
    logits = model(TOKENS, use_cache=False).logits
    assert near(logits, of_the_command("logits", tmp_path / "model", TOKENS, tmp_path)["logits"])


def test_other_masks_beside_a_window_are_refused(tmp_path):
    model = made(gemma(["softmax:mask=streaming(first=2,size=3)"]))
    with pytest.raises(NotImplementedError, match="this layer of the model has a window"):
        model(TOKENS)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(AssertionError, match="this layer of the model has a window of 7 tokens"):
        of_the_command("logits", tmp_path / "model", TOKENS, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("config", [llama, gemma])
def test_a_recurrent_cache_holds_a_state_for_each_part(config):
    model = made(config())
    wanted, cache = model(TOKENS, use_cache=False).logits, horner.hf.RecurrentCache(model.config)
    parts = [model(TOKENS[:, a:b], past_key_values=cache).logits for a, b in ((0, 9), *((t, t + 1) for t in range(9, 23)))]
    assert near(torch.cat(parts, 1), wanted)
    assert [len(layer.states) for layer in cache.layers] == [3, 3, 4, 1] and cache.bytes > 0
    cache.batch_select_indices(torch.tensor([1]))
    one = horner.hf.RecurrentCache(model.config)
    model(TOKENS[1:], past_key_values=one)
    assert near(*(model(TOKENS[1:, :1], past_key_values=c).logits for c in (cache, one)))


@torch.no_grad()
def test_a_recurrent_cache_keeps_the_keys_of_softmax_layers_beside_others():
    model = made(llama("gated_decay*3,softmax"))
    wanted, cache = model(TOKENS, use_cache=False).logits, horner.hf.RecurrentCache(model.config)
    parts = [model(TOKENS[:, a:b], past_key_values=cache).logits for a, b in ((0, 9), (9, 10), (10, 23))]
    assert near(torch.cat(parts, 1), wanted)


@torch.no_grad()
def test_generation_is_the_same_with_every_cache():
    model = made(llama([f"softmax^2|{LOLCATS}^4", "softmax^5|l2"] * 2))
    padded = {"input_ids": TOKENS.clone(), "attention_mask": torch.ones_like(TOKENS)}
    padded["input_ids"][0, :4], padded["attention_mask"][0, :4] = 0, 0
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    wanted = model.generate(**padded, **options, use_cache=False)
    assert torch.equal(wanted, model.generate(**padded, **options))
    assert torch.equal(wanted, model.generate(**padded, **options, past_key_values=horner.hf.RecurrentCache(model.config)))


@torch.no_grad()
def test_caches_that_lack_something_are_refused():
    with pytest.raises(NotImplementedError, match="gates of its keys .*RecurrentCache"):
        made(llama()).generate(TOKENS, max_new_tokens=2)
    with pytest.raises(NotImplementedError, match="holds only the model's window of 7 tokens in this layer: decode with .*RecurrentCache"):
        made(gemma([f"softmax^2|{LOLCATS}^4"])).generate(TOKENS, max_new_tokens=2)
    with pytest.raises(NotImplementedError, match="has a fixed size: decode with .*RecurrentCache"):
        made(llama([f"softmax^2|{LOLCATS}^4"])).generate(TOKENS, max_new_tokens=3, cache_implementation="static", disable_compile=True)
    with pytest.raises(ValueError, match="requires a finite state or a window"):
        horner.hf.RecurrentCache(made(llama(["softmax^3|l2^3"])).config)


@torch.no_grad()
def test_packed_sequences_and_weights():
    model = made(llama())
    ids = torch.cat([torch.arange(10), torch.arange(13)])[None]
    packed = model(TOKENS[:1], position_ids=ids, use_cache=False).logits
    alone = [model(TOKENS[:1, a:b], use_cache=False).logits for a, b in ((0, 10), (10, 23))]
    assert near(packed, torch.cat(alone, 1))
    some = made(llama(["softmax^2|l2^3|softmax+l2"]))
    models = [some, made(llama(["softmax"])), made(llama(["l2"]))]
    weights = [each(TOKENS, output_attentions=True, use_cache=False).attentions[0] for each in models]
    assert near(weights[0], torch.cat([weights[1][:, :2], weights[2][:, 2:5], (weights[1] + weights[2])[:, 5:]], 1))


@torch.no_grad()
def test_the_text_of_heads_as_a_name(tmp_path):
    text = f"softmax^2|{LOLCATS}^4,l2|softmax^5"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES), attn_implementation=f"horner:{text}").eval()
    assert model.config.horner_variant == [f"softmax^2|{LOLCATS}^4", "l2|softmax^5"] * 2
    wanted = model(TOKENS).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert near(compiled(TOKENS, use_cache=False).logits, wanted)
    model.set_attn_implementation("horner:softmax")
    assert not any(".horner." in name for name, _ in model.named_parameters())
    assert not near(model(TOKENS).logits, wanted)


def test_texts_of_heads():
    layer = "lolcats:features=hedgehog(16),near=window(16)^2|softmax|lolcats:near=window(8),temperature=2"
    assert horner.nn.turn(layer + ",l2") == [layer, "l2"]
    mixed = "taylor2:norm=l2,post_gate|l2"
    assert horner.nn.turn(mixed + ",softmax|linear*2") == [mixed, "softmax|linear", "softmax|linear"]
    assert horner.nn.turn("softmax:temperature=2+gated_delta,l2") == ["softmax:temperature=2+gated_delta", "l2"]
    for wrong, message in (("softmax^2|l2", "has 3 heads, but a layer of the model has 6"), ("softmax^0|l2^6", "'softmax\\^0'"),
                           ("softmax||l2^4", "has the part ''"), ("softmax^x|l2^5", "'softmax\\^x'"), ("softmax+^6", "a variant is missing"),
                           ("hgrn2|softmax^5", "'hgrn2' changes more than the operator"), ("sofmax|l2^5", "did you mean 'softmax'")):  # fmt: skip
        with pytest.raises((ValueError, RuntimeError), match=message):
            made(llama(wrong))
        with pytest.raises((ValueError, RuntimeError), match=message):
            horner.nn.Attention(48, 6, kv_heads=3, variant=wrong)


def test_a_converted_folder_opens(tmp_path):
    (tmp_path / "text").write_text("".join(f"the number {i * 7919 % 1000} is not {i * 104729 % 997}; " for i in range(2000)))
    run(HORNER, "data", "pack", tmp_path / "text", "--out", tmp_path / "text.bin")
    run(TOOL, "new", "tiny", "softmax", 3, tmp_path / "teacher")
    heads = [{"layer": 0, "head": 1, "form": "hedgehog8"}, {"layer": 0, "head": 2, "form": "delta"}]
    heads += [{"layer": 1, "head": h, "form": "hedgehog8"} for h in range(4)]
    (tmp_path / "plan.json").write_text(json.dumps({"near": 8, "tokens": 1024, "heads": heads}))
    run(HORNER, "convert", "--model", tmp_path / "teacher", "--data", tmp_path / "text.bin", "--out", tmp_path / "out", "--plan", tmp_path / "plan.json",
        "--near", 8, "--tokens", 1024, "--length", 96, "--batch", 2, "--transfer-steps", 2, "--heal-steps", 2, "--evaluate-sequences", 2, "--measure-tokens", 64)  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="horner").eval()
    assert model.config.horner_variant[0].count("|") == 3 and "|" not in model.config.horner_variant[1]
    with torch.no_grad():
        wanted = of_the_command("logits", tmp_path / "out", TOKENS, tmp_path)["logits"]
        assert near(model(TOKENS).logits, wanted)
        parts, cache = [], horner.hf.RecurrentCache(model.config)
        for a, b in ((0, 20), (20, 21), (21, 23)):
            parts.append(model(TOKENS[:, a:b], past_key_values=cache).logits)
    assert near(torch.cat(parts, 1), wanted)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(2):
        model.train()(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(tmp_path / "trained")
    with torch.no_grad():
        logits = model(TOKENS).logits
    assert not near(logits, wanted)
    assert near(logits, of_the_command("logits", tmp_path / "trained", TOKENS, tmp_path)["logits"])
