"""Variants with convolutions, gates and no positions in families that are not like Llama: GPT-2, OPT, BERT, Phi-3."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

import horner.hf
import horner.nn

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import families  # noqa: E402

torch.set_num_threads(1)  # the models are tiny

TOKENS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(5))
ROWS = ["gated_decay@code", "gated_conv", "alibi", "forgetting", "stick_breaking", "gla", "hgrn2", "delta", "gated_delta", "kda"]
# The attention modules of a family, and what they call their projections, or the one of all three, and the last one.
OF = {
    "GPT2": ("GPT2Attention", ["c_attn"], "c_proj"),
    "GPTBigCode": ("GPTBigCodeAttention", ["c_attn"], "c_proj"),
    "OPT": ("OPTAttention", ["q_proj", "k_proj", "v_proj"], "out_proj"),
    "BERT": ("BertSelfAttention", ["query", "key", "value"], None),
    "Phi3": ("Phi3Attention", ["qkv_proj"], "o_proj"),
}


def weight(module):
    """Of a linear map [channels, dim]; transformers' Conv1D has it the other way."""
    return module.weight.T if type(module).__name__ == "Conv1D" else module.weight


def beside(family, model, variant):
    """What goes into each attention module of a model, what comes out, and an attention of horner.nn with the same weights."""
    kind, projections, last = OF[family]
    found = []

    def hook(module, args, kwargs, out):
        found.append((module, args[0] if args else kwargs["hidden_states"], out[0]))

    hooks = [m.register_forward_hook(hook, with_kwargs=True) for m in model.modules() if type(m).__name__ == kind]
    model(TOKENS, **({} if family == "BERT" else {"use_cache": False}))
    for each in hooks:
        each.remove()
    for module, rows, out in found:
        config = module.config
        kv_heads = getattr(config, "num_key_value_heads", None) or (1 if family == "GPTBigCode" else config.num_attention_heads)
        ours = horner.nn.Attention(config.hidden_size, config.num_attention_heads, variant=variant, kv_heads=kv_heads, bias=family != "Phi3",
                                   rope_theta=10000.0 if family == "Phi3" else None, mask="full" if family == "BERT" else None)  # fmt: skip
        sizes = [config.hidden_size, *[kv_heads * config.hidden_size // config.num_attention_heads] * 2]
        parts = [getattr(module, name) for name in projections]
        weights = torch.cat([weight(part) for part in parts]).split(sizes)
        biases = torch.cat([part.bias for part in parts]).split(sizes) if family != "Phi3" else [None] * 3
        state = {f"{name}.weight": x for name, x in zip(("q_proj", "k_proj", "v_proj"), weights)}
        state |= {f"{name}.bias": x for name, x in zip(("q_proj", "k_proj", "v_proj"), biases) if x is not None}
        state["o_proj.weight"] = torch.eye(config.hidden_size) if last is None else weight(getattr(module, last))
        state |= {} if family == "Phi3" else {"o_proj.bias": torch.zeros(config.hidden_size) if last is None else getattr(module, last).bias}
        own = module.__dict__["_horner_own"]
        state |= {f"horner.{name}": x for name, x in (own.state_dict() if own is not None else {}).items()}
        names = ours.state_dict().keys()
        assert set(state) == set(names), (sorted(state), sorted(names))
        ours.load_state_dict(state)
        yield ours(rows), out


@torch.no_grad()
@pytest.mark.parametrize("family", OF)
def test_attention_is_that_of_horner_nn(family):
    rows = {"BERT": ["gated_conv", "stick_breaking"], "GPTBigCode": ["forgetting", "alibi", "gla"],
            "OPT": [*ROWS, "linear_elu", "softmax:scale=fixed(0.3)", "cosine_softmax", "l2"]}.get(family, ROWS)  # fmt: skip
    for variant in rows:
        model = families.build(family, f"horner:{variant}")
        pairs = list(beside(family, model, variant))
        assert len(pairs) == 2
        for ours, theirs in pairs:
            torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-3, msg=lambda m, variant=variant: f"{variant}: {m}")


@pytest.mark.parametrize("family", ["GPT2", "OPT", "Phi3", "BERT"])
def test_every_row_trains(family):
    for variant in ["gated_conv", "stick_breaking"] if family == "BERT" else ROWS:
        model = families.build(family, f"horner:{variant}").train()
        model(TOKENS, labels=TOKENS if family != "BERT" else None)[0].square().mean().backward()
        own = {name: x for name, x in model.named_parameters() if ".horner." in name}
        assert all(x.grad is not None and x.grad.isfinite().all() for x in own.values()), variant
        assert bool(own) == (variant not in ("stick_breaking", "alibi"))


@torch.no_grad()
@pytest.mark.parametrize("family", ["GPT2", "OPT", "Phi3"])
def test_padding_and_streams(family):
    """Left padding changes nothing, and a RecurrentCache holds the rows of a joined convolution."""
    for variant in ("gated_conv", "gated_delta", "gla"):
        model = families.build(family, f"horner:{variant}")
        wanted = model(TOKENS, use_cache=False).logits
        padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), TOKENS], 1)
        keep = (padded != 0).long()
        more = {"position_ids": (keep.cumsum(1) - 1).clamp(min=0)}
        got = model(padded, attention_mask=keep, use_cache=False, **more).logits[:, 3:]
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
        cache = horner.hf.RecurrentCache(model.config)
        parts = [model(TOKENS[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 8), (8, 9), (9, 12))]
        torch.testing.assert_close(torch.cat(parts, 1), wanted, atol=1e-3, rtol=1e-3)


def test_saved_and_loaded(tmp_path):
    model = families.build("GPT2", "horner:gated_delta")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="horner").eval()
    assert torch.equal(again(TOKENS, use_cache=False).logits, model(TOKENS, use_cache=False).logits)
    model.set_attn_implementation("horner:softmax")  # the hooks of the convolution stay and do nothing
    eager = families.build("GPT2", "eager")
    eager.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(TOKENS).logits, eager(TOKENS).logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "family, variant, words",
    [
        ("GPTNeoX", "gated_conv", "GPTNeoXAttention does not project them one by one"),
        ("GPTBigCode", "delta", "GPTBigCodeAttention does not project them one by one"),
        ("T5", "forgetting", "T5Attention takes none that could be left out"),
        ("GPT2", "linear_mamba", "puts a block in the place of q_proj, k_proj, v_proj, but GPT2Attention has other projections"),
        ("OPT", "linear_mamba", "puts a block in the place of q_proj, k_proj, v_proj, but OPTAttention has other projections or positions"),
        ("BART", "gated", "are made of the tokens of a layer, but the keys of BartAttention are those of other tokens"),
        ("EncoderDecoder of two BERTs", "gated_conv", "the keys of BertCrossAttention are those of other tokens"),
        ("BERT", "forgetting", "decay depends on the distance to a past key: it requires a mask that sees no later keys"),
    ],
)
def test_errors(family, variant, words):
    with pytest.raises((NotImplementedError, RuntimeError), match=words):
        model = families.build(family, f"horner:{variant}")
        model(TOKENS, **({"decoder_input_ids": TOKENS} if families.FAMILIES[family][0] == families.PAIR else {}))
