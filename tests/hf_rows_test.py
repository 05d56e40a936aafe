"""Every row of the catalog inside transformers: it trains, and its mask, bias and prefix are those of the definition."""

import copy
import os

import pytest
import torch

import horner
import horner.nn

transformers = pytest.importorskip("transformers")
import horner.hf  # noqa: E402

transformers.logging.set_verbosity_error()
TOKENS = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(5))


def llama(variant, **more):
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=99, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=f"horner:{variant}").eval()


def sets_of_weights():
    sets = {}
    for name in horner.variants():
        around = torch.ops.horner.around(name)
        sets.setdefault((horner.describe(name)["inputs"], torch.ops.horner.mask_and_scale(name)[0], *around.values()), []).append(name)
    return horner.variants() if os.environ.get("HORNER_LONG") else [names[0] for names in sets.values()]


def test_every_row_trains():
    for variant in sets_of_weights():
        model = llama(variant)
        start = {name: x.clone() for name, x in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        losses = []
        for _ in range(3):
            losses.append(model(TOKENS, labels=TOKENS, use_cache=False).loss)
            losses[-1].backward()
            optimizer.step()
            assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters()), variant
            optimizer.zero_grad()
        assert losses[2] < losses[0], variant
        assert torch.equal(start["lm_head.weight"], model.lm_head.weight) is False


def left_padded(model, n=3, **more):
    padded = torch.cat([torch.zeros(2, n, dtype=torch.long), TOKENS], 1)
    mask = (padded != 0).long()
    ids = (mask.cumsum(1) - 1).clamp(min=0)
    return model(padded, attention_mask=mask, position_ids=ids, use_cache=False, **more).logits[:, n:]


@torch.no_grad()
@pytest.mark.parametrize("mask", ["chunks(5)", "streaming(first=2,size=3)", "window(3)", "window(3,ahead=2)", "prefix"])
def test_the_mask_of_a_variant_applies(mask):
    """As in a model of horner.nn with the same weights; in a static cache too."""
    model = llama(f"softmax:mask={mask}")
    x = model.model.embed_tokens(TOKENS)
    for layer in model.model.layers:
        block = horner.nn.TransformerBlock(32, 4, hidden=48, eps=1e-6, variant="softmax", mask=mask, kv_heads=2)
        block.load_state_dict(layer.state_dict())
        x = block(x)
    wanted = model.lm_head(model.model.norm(x))
    torch.testing.assert_close(model(TOKENS, use_cache=False).logits, wanted, atol=1e-4, rtol=1e-3)
    if "ahead" in mask:  # what is cached has not seen the later tokens
        return
    for cache in ("dynamic", "static"):
        made = transformers.StaticCache(model.config, max_cache_len=20) if cache == "static" else transformers.DynamicCache(config=model.config)
        parts = [model(TOKENS[:, a:b], past_key_values=made).logits for a, b in ((0, 7), (7, 8), (8, 9), (9, 12))]
        torch.testing.assert_close(torch.cat(parts, 1), wanted, atol=1e-4, rtol=1e-3)


def test_masks_that_exclude_each_other_are_refused():
    config = transformers.MistralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, vocab_size=99, sliding_window=4)  # fmt: skip
    for variant in ("chunk_window", "streaming", "prefix_lm"):
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=f"horner:{variant}")
        with pytest.raises(NotImplementedError, match="this layer of the model has a window"):
            model(TOKENS)
    with pytest.raises(NotImplementedError, match="shows keys ahead"):
        horner.hf.RecurrentCache(llama("prefix_lm").config)


@torch.no_grad()
def test_prefix():
    """How many tokens all queries see, by keyword; 0 without it."""
    model = llama("prefix_lm")
    plain = model(TOKENS, use_cache=False).logits
    softmax = llama("softmax")
    softmax.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain, softmax(TOKENS).logits, atol=1e-5, rtol=1e-4)
    prefix = torch.tensor([0, 6])
    some = model(TOKENS, prefix=prefix, use_cache=False).logits
    torch.testing.assert_close(some[0], plain[0])
    assert (some[1, :5] - plain[1, :5]).abs().amax(-1).min() > 1e-4
    changed = TOKENS.clone()
    changed[1, 5] += 1  # the last of the prefix: the first one sees it
    assert (model(changed, prefix=prefix, use_cache=False).logits[1, 0] - some[1, 0]).abs().max() > 1e-5
    changed = TOKENS.clone()
    changed[1, 6] += 1  # the first behind it: none before it does
    torch.testing.assert_close(model(changed, prefix=prefix, use_cache=False).logits[1, :6], some[1, :6])
    torch.testing.assert_close(left_padded(model, prefix=prefix), some, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(model(TOKENS, prefix=6, use_cache=False).logits[1], some[1])
    tokens = [model.generate(TOKENS, max_new_tokens=5, do_sample=False, prefix=prefix, use_cache=c) for c in (True, False)]
    assert torch.equal(*tokens)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(TOKENS, use_cache=False).logits, plain, atol=1e-5, rtol=1e-4)
    masked = {"prefix": prefix, "attention_mask": torch.ones_like(TOKENS), "use_cache": False}
    torch.testing.assert_close(compiled(TOKENS, **masked).logits, some, atol=1e-5, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="packed sequences with a prefix"):
        model(TOKENS.view(1, -1), position_ids=torch.arange(12).repeat(2)[None], use_cache=False, prefix=3)
    with pytest.raises(ValueError, match="no attention of LlamaModel has used it|no attention of LlamaForCausalLM has used it"):
        softmax(TOKENS, prefix=prefix)


def test_prefix_survives_gradient_checkpointing():
    gradients = []
    for again in (False, True):
        model = llama("prefix_lm").train()
        if again:
            model.gradient_checkpointing_enable()
        model(TOKENS, labels=TOKENS, prefix=torch.tensor([3, 6]), use_cache=False).loss.backward()
        gradients.append(model.model.embed_tokens.weight.grad)
    torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_bias_by_distance():
    """Learned, with T5's buckets: begins as softmax; distances do not change by padding, packing or a cache."""
    model = llama("bias")
    softmax = llama("softmax")
    softmax.load_state_dict({name: x for name, x in model.state_dict().items() if ".horner." not in name})
    torch.testing.assert_close(model(TOKENS, use_cache=False).logits, softmax(TOKENS).logits, atol=1e-5, rtol=1e-4)
    for layer in model.model.layers:
        assert layer.horner.bias.shape == (4, 32)
        layer.horner.bias.normal_()
    whole = model(TOKENS, use_cache=False).logits
    assert (whole - softmax(TOKENS).logits).abs().max() > 1e-2
    torch.testing.assert_close(left_padded(model), whole, atol=1e-4, rtol=1e-3)
    packed = model(TOKENS.view(1, -1), position_ids=torch.arange(12).repeat(2)[None], use_cache=False).logits
    torch.testing.assert_close(packed.view(2, 12, -1), whole, atol=1e-4, rtol=1e-3)
    for cache in (transformers.StaticCache(model.config, max_cache_len=20), transformers.DynamicCache(config=model.config)):
        parts = [model(TOKENS[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 8), (8, 12))]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-3)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(TOKENS, use_cache=False).logits, whole, atol=1e-4, rtol=1e-3)
    with pytest.raises((NotImplementedError, ValueError), match="position bias|requires a finite state"):
        horner.hf.RecurrentCache(model.config)


@pytest.mark.parametrize("two_way", [False, True])
def test_buckets_are_those_of_t5(two_way):
    from transformers.models.t5.modeling_t5 import T5Attention

    ahead = torch.arange(-500, 501)
    wanted = T5Attention._relative_position_bucket(ahead, bidirectional=two_way, num_buckets=32, max_distance=128)
    assert torch.equal(horner.nn._bucket(ahead, two_way), wanted)
    own = horner.nn.Attention(16, 2, variant="bias").horner
    torch.nn.init.normal_(own.bias)
    t, s = torch.arange(5)[:, None] + 3, torch.arange(8)
    assert torch.equal(own.relative_bias(5, 8, two_way)[0], own.bias[:, horner.nn._bucket(s - t, two_way)])
    assert torch.equal(own.relative_bias(1, 8, two_way, torch.tensor(4))[0, :, 0], own.bias[:, horner.nn._bucket(s - 4, two_way)])


@torch.no_grad()
def test_t5_gives_its_own_bias():
    config = transformers.T5Config(d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=99, decoder_start_token_id=0, dropout_rate=0.0)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    wanted = model(TOKENS, decoder_input_ids=TOKENS).logits
    model.set_attn_implementation("horner:bias")
    assert not [name for name, _ in model.named_parameters() if ".horner." in name]
    torch.testing.assert_close(model(TOKENS, decoder_input_ids=TOKENS).logits, wanted, atol=1e-4, rtol=1e-3)


def test_a_mamba_block_is_saved_and_loaded(tmp_path):
    """New weights in a folder without the block begin as they should; what is saved has no projections."""
    plain = llama("softmax")
    plain.config.horner_variant = None
    plain.save_pretrained(tmp_path / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="horner:linear_mamba")
    mamba = model.model.layers[1].horner.mamba
    assert (mamba.D == 1).all() and (mamba.norm.weight == 1).all() and (0 <= mamba.A_log).all() and (mamba.A_log <= 2.78).all()
    step = torch.nn.functional.softplus(mamba.dt.bias)
    assert (step > 0.0009).all() and (step < 0.11).all()
    model.save_pretrained(tmp_path / "mamba")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mamba", attn_implementation="horner")
    assert torch.equal(again(TOKENS, use_cache=False).logits, model(TOKENS, use_cache=False).logits)
    assert not [name for name in again.state_dict() if "q_proj" in name]
    again.set_attn_implementation("horner:softmax")  # with new projections
    assert again(TOKENS).logits.isfinite().all()
    qwen = transformers.Qwen3Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                    num_key_value_heads=2, vocab_size=99, head_dim=8)  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(qwen, attn_implementation="horner:linear_mamba")
    model(TOKENS, labels=TOKENS).loss.backward()
    assert all(x.grad is not None for x in model.parameters())
