"""Masks [batch, heads, queries, keys] in models of transformers: the caller's own, and those of models whose form is not known."""

import sys
from pathlib import Path

import pytest
import torch
import transformers
from hf_test import CONFIGS, model, padding, tokens

import horner.hf

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import families  # noqa: E402

torch.set_num_threads(1)  # the models are tiny


def shown(batch=3, length=20):
    """Past keys, some of them hidden by chance, and the token's own; a key ahead."""
    torch.manual_seed(3)
    mask = (torch.rand(batch, 1, length, length) < 0.7).tril() | torch.eye(length).bool()
    mask[0, 0, 4, 9] = True
    return mask


def in_floats(mask, least=torch.finfo(torch.float).min):
    return torch.zeros(mask.shape).masked_fill(~mask, least)


MASKS = {
    "bool": shown(),
    "floats": in_floats(shown()),
    "infinite": in_floats(shown(), -torch.inf),
    "scores": torch.randn(3, 1, 20, 20) + in_floats(shown()),
    "of all rows": shown(1),
    "of each head": shown(12).view(3, 4, 20, 20),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_sdpa(family, name):
    ours, theirs = (model(family, implementation)(tokens(), attention_mask=MASKS[name]).logits for implementation in ("horner", "sdpa"))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_padding_as_a_mask():
    """Queries of padding see nothing: the others are as with the mask [batch, tokens], of another variant too."""
    keep = padding(True).bool()
    mask = torch.ones(20, 20).tril().bool() & keep[:, None, None, :]
    for variant in ("softmax", "l2", "sparsemax", "gate", "softmax^2|l2^2"):
        made = model("gpt2" if variant == "gate" else "llama", f"horner:{variant}")
        wanted, got = made(tokens(), attention_mask=padding(True), use_cache=False).logits, made(tokens(), attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(got[keep], wanted[keep], atol=1e-4, rtol=0)
        gradients = [torch.autograd.grad(x[keep].sin().sum(), [*made.parameters()]) for x in (got, wanted)]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_masks_of_heads_in_parts():
    """Each part of the heads of a layer gets its own of them."""
    mixed, plain = model("llama", "horner:softmax^2|softmax:temperature=1^2"), model("llama")
    mask = MASKS["of each head"]
    torch.testing.assert_close(mixed(tokens(), attention_mask=mask).logits, plain(tokens(), attention_mask=mask).logits, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_masks_with_a_cache(cache):
    made = model("llama")
    wanted = made(tokens(), attention_mask=shown().tril(), use_cache=False).logits
    size = 24 if cache == "static" else None
    past = transformers.StaticCache(made.config, max_cache_len=size) if size else transformers.DynamicCache(config=made.config)
    parts = []
    for a, b in ((0, 7), (7, 8), (8, 20)):
        mask = shown().tril()[:, :, a:b, : 20 if size else b]
        mask = torch.nn.functional.pad(mask, (0, size - 20)) if size else mask
        parts.append(made(tokens()[:, a:b], attention_mask=mask, past_key_values=past).logits)
    torch.testing.assert_close(torch.cat(parts, 1), wanted, atol=1e-4, rtol=0)


@torch.no_grad()
def test_masks_of_a_form_that_is_not_known():
    """Of the model: both ways in a window of a decoder, and several tokens after a cache of chunks."""
    ids = tokens()
    for mask in (None, padding(True)):
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        ours, theirs = (model("gemma3", x, use_bidirectional_attention=True)(ids, attention_mask=mask).logits for x in ("horner", "sdpa"))
        torch.testing.assert_close(ours[real], theirs[real], atol=1e-4, rtol=0)
    made, results = families.build("Llama4", "eager").eval(), {}
    for implementation in ("eager", "horner"):
        made.set_attn_implementation(implementation)
        cache = transformers.DynamicCache(config=made.config)
        results[implementation] = torch.cat([made(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 5), (5, 11), (11, 20))], 1)
    torch.testing.assert_close(results["horner"], results["eager"], atol=1e-4, rtol=0)


def test_bias_by_distance():
    """Added to the mask; not where the places of the queries are not known."""
    made, causal = model("llama", "horner:bias"), torch.ones(1, 1, 20, 20).tril().bool()
    for layer in made.model.layers:
        torch.nn.init.normal_(layer.horner.bias)
    wanted = made(tokens(), use_cache=False).logits
    torch.testing.assert_close(made(tokens(), attention_mask=causal, use_cache=False).logits, wanted, atol=1e-4, rtol=0)
    cache = made(tokens()[:, :19], use_cache=True).past_key_values
    with pytest.raises(NotImplementedError, match="does not say where 1 queries are among 20 keys"):
        made(tokens()[:, 19:], attention_mask=causal[:, :, 19:], past_key_values=cache)


def test_a_compiled_model():
    made = model("llama", "horner:l2")
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    for mask in (shown(), in_floats(shown())):
        torch.testing.assert_close(compiled(tokens(), attention_mask=mask).logits, made(tokens(), attention_mask=mask).logits)


@pytest.mark.parametrize(
    "variant, mask, words",
    [
        ("taylor2", shown(), r"variant 'taylor2' does not support a mask \[batch, heads, queries, keys\].*a score of -inf has a weight"),
        ("gated_decay", shown(), "decay depends on the distance.*Choose a variant such as softmax, or pass padding as"),
        ("softmax_window", shown(), "it has the mask window of its own"),
        ("chunk_window", shown(), "it has the mask chunks of its own"),
        ("prefix_lm", shown(), "it has the mask prefix of its own"),
        ("softmax", shown()[0], r"does not support a mask of shape \[1, 20, 20\]: pass \[batch, tokens\] for padding"),
        ("softmax", shown().long(), "mask must have dtype bool, where True shows a key, or float64.*got int64"),
        ("softmax", shown(2), r"mask must broadcast to \[B, H, T, S\] = \[3, 4, 20, 20\], got \[2, 1, 20, 20\]"),
    ],
)
def test_errors(variant, mask, words):
    with pytest.raises((NotImplementedError, RuntimeError), match=words):
        model("llama", f"horner:{variant}")(tokens(), attention_mask=mask, use_cache=False)


def test_a_recurrent_cache_takes_no_such_mask():
    made = model("llama", "horner:taylor2,softmax")
    with pytest.raises(NotImplementedError, match=r"a RecurrentCache does not support a mask \[batch, heads, queries, keys\]"), torch.no_grad():
        made(tokens(), attention_mask=shown(), past_key_values=horner.hf.RecurrentCache(made.config))
