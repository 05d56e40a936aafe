"""Families of transformers' models with horner.hf: the table of docs/huggingface.md, what is refused, paged caches, and
the notebook.

HORNER_LONG=1 compares every row of the table (minutes).
"""

import json
import os
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import horner._hf_families
import horner.hf

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import families  # noqa: E402
import notebook  # noqa: E402

torch.set_num_threads(1)  # the models are tiny

FEW = ["Gemma2", "GptOss", "GPTJ", "ModernBERT"]
SMALL = dict(families.GROUPED)


def test_the_page_has_every_family():
    assert list(families.on_the_page()) == list(families.FAMILIES)


@pytest.mark.parametrize("family", families.FAMILIES if os.environ.get("HORNER_LONG") else FEW)
def test_the_table_is_in_step(family):
    assert families.cells(family) == families.on_the_page()[family]


@pytest.mark.parametrize("family", ["GPTJ", "GPTNeo", "CodeGen", "Bloom", "Falcon", "MPT", "DeBERTa"])
def test_attention_that_cannot_be_swapped_is_an_error(family):
    said = r"does not support \w+: it computes attention in code of its own, without transformers' AttentionInterface"
    for implementation in ("horner", "horner:l2"):
        with pytest.raises(NotImplementedError, match=said):
            families.build(family, implementation)
    model = families.build(family, "eager")
    with pytest.raises(NotImplementedError, match=said):
        model.set_attn_implementation("horner")
    assert model.config._attn_implementation == "eager"


def test_a_property_is_no_position():
    class Plain(torch.nn.Module):
        @property
        def size(self):
            return 1

    class Rotated(torch.nn.Module):
        def forward(self, q, cos, sin):
            return apply_rope(q, cos, sin)  # noqa: F821

    assert not horner._hf_families.adds_positions(Plain) and horner._hf_families.adds_positions(Rotated)


def test_models_without_attention_and_in_part():
    with pytest.raises(NotImplementedError, match="does not support Mamba2Model: it has no attention"):
        families.build("Mamba2", "horner")
    config = transformers.SiglipVisionConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8)
    with pytest.warns(UserWarning, match="does not reach MultiheadAttention of SiglipVisionModel"):
        model = transformers.SiglipVisionModel._from_config(config, attn_implementation="horner").eval()
    pixels = torch.randn(2, 3, 16, 16)
    wanted = model(pixels).last_hidden_state
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(pixels).last_hidden_state, wanted, atol=1e-4, rtol=0)


def weights(model, inputs, **options):
    out = model(**inputs, **options)
    return {name: x for name, x in out.items() if name.endswith("attentions") and x}


@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT", "BERT", "T5"])
def test_weights_are_those_of_eager(family):
    model, (inputs, _) = families.build(family, "horner"), families.batch(family)
    got = weights(model, inputs, output_attentions=True)
    assert not weights(model, inputs)
    model.set_attn_implementation("eager")
    wanted = weights(model, inputs, output_attentions=True)
    assert len(wanted) == (3 if family == "T5" else 1)
    model.config.output_attentions = True
    by_config = weights(model, inputs)  # of T5 none: its parts have configs of their own
    model.set_attn_implementation("horner")
    for found, wanted in ((got, wanted), (weights(model, inputs), by_config)):
        assert list(found) == list(wanted)
        for name, layers in wanted.items():
            assert len(found[name]) == len(layers) == 2, name
            for x, y in zip(found[name], layers):
                torch.testing.assert_close(x, y, atol=1e-4, rtol=0)  # the rule of the table


def test_a_sink_needs_a_sum():
    with pytest.raises(NotImplementedError, match="'l2' has the denominator 'nothing', which has no place for this model's attention sinks"):
        families.full("GptOss", families.build("GptOss", "horner:l2"))
    assert horner.hf.with_sink(horner.hf.find("softmax1")).text == "softmax1:denominator=sum(plus=1,sink)"
    # every other variant of the sum has it too
    assert not torch.allclose(*(families.full("GptOss", families.build("GptOss", f"horner:{v}")) for v in ("taylor4", "softmax")), atol=1e-3)


def test_a_cap_of_the_model_leaves_no_state():
    """A capped score is no polynomial: a RecurrentCache would keep all keys."""
    said = re.escape("'taylor2:softcap=50.0' has none: capped scores have no finite state. This model caps them")
    for variant in ("taylor2", ["softmax", "taylor2"], ["taylor2", "softmax"]):
        config = families.FAMILIES["Gemma2"][1]()
        config.horner_variant, config.layer_types = variant, ["full_attention"] * 2
        model = AutoModelForCausalLM.from_config(config, attn_implementation="horner").eval()
        with pytest.raises(ValueError, match=said):
            horner.hf.RecurrentCache(model.config)
    sliding = families.FAMILIES["Gemma2"][1]()  # a window has its keys alone, and softmax beside it all of them, as it says
    sliding.horner_variant = ["taylor2", "softmax"]
    free = families.FAMILIES["Gemma2"][1]()
    free.horner_variant, free.attn_logit_softcapping, free.layer_types = "taylor2", None, ["full_attention"] * 2
    ids, settings = families.batch("Gemma2")[0]["input_ids"], {"do_sample": False, "eos_token_id": None}
    for config in (sliding, free):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="horner").eval()
        cache = horner.hf.RecurrentCache(model.config)
        tokens = model.generate(ids, max_new_tokens=8, past_key_values=cache, **settings)
        assert torch.equal(tokens, model.generate(ids, max_new_tokens=8, **settings))
        before = cache.bytes
        model.generate(tokens, max_new_tokens=200, past_key_values=cache, **settings)
        assert (cache.bytes > before) == (config is sliding)


@torch.no_grad()
@pytest.mark.parametrize("family, projections, scaled", [
    ("Esm", ("query", "key"), 1), ("OpenAIPrivacyFilter", ("q_proj", "k_proj"), 2), ("OPT", ("q_proj", "k_proj"), 1), ("Llama", ("q_proj", "k_proj"), 0),
])  # fmt: skip
def test_scales_of_a_family_are_taken_back(family, projections, scaled, monkeypatch):
    """`attend` gets q and k as they were projected, apart from a rotation, and the scale of the model."""
    torch.manual_seed(0)
    sizes = dict(families.GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=6, mask_token_id=5, token_dropout=False,
                 rope_parameters={"rope_type": "default", "rope_theta": 1e4}, position_embedding_type="rotary", ffn_dim=48, word_embed_proj_dim=32)  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation="horner:softmax:features=elu1" if family != "OpenAIPrivacyFilter" else "horner").eval()
    module = next(m for m in model.modules() if hasattr(m, projections[0]))
    assert horner._hf_families.scales_itself(type(module)) == scaled
    found, lengths = [], []
    for name in projections:
        getattr(module, name).register_forward_hook(lambda _, __, out: lengths.append(out.unflatten(-1, (-1, 8)).norm(dim=-1).mT))
    attend = horner.attend
    monkeypatch.setattr(horner, "attend", lambda q, k, v, **more: found.append((q, k, more["scale"])) or attend(q, k, v, **more))
    model(torch.randint(6, 90, (2, 12)))
    q, k, scale = found[0]
    torch.testing.assert_close(q.norm(dim=-1), lengths[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(k.norm(dim=-1), lengths[1], rtol=1e-5, atol=1e-6)
    assert scale == pytest.approx(8**-0.5)


def scaling_classes():
    """The classes of transformers' sources whose forward takes its attention from the interface and scales q or k before."""
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        code = path.read_text()
        for kind in re.findall(r"^class \w.*?(?=^class |\Z)", code, re.M | re.S) if "ALL_ATTENTION_FUNCTIONS" in code else ():
            if "ALL_ATTENTION_FUNCTIONS" in kind:
                yield path.parent.name, kind


def test_the_page_names_the_families_that_scale_queries():
    """Of transformers 5.23. Those with a scale of 1 are T5's relatives and models that norm q and k."""
    found = {name for name, code in scaling_classes() if horner._hf_families.scaled_in(code)}
    page = re.search(r"Families that scale their queries themselves \((.*?)\)", (ROOT / "docs" / "huggingface.md").read_text(), re.S)[1]
    on_the_page = set(re.findall(r"`(\w+)`", page))
    assert found <= on_the_page and (on_the_page == found or transformers.__version__[:4] != "5.23")
    suspects = {name for name, code in scaling_classes() if re.search(r"query\w* = .*(\bscaling\b|_(size|dim) ?\*\*)", code)}
    assert suspects - found <= {"qwen3_next"}, "a product of queries and a scale that scaled_in does not know"


def test_an_implementation_that_fails_changes_nothing():
    """Of a model, nor of the parts of one: what cannot be is found before anything changes."""
    def names(model):
        return model.config._attn_implementation, getattr(model.config, "horner_variant", None), {n: x.data_ptr() for n, x in model.state_dict().items()}

    for family, start, wrong, error in (
        ("GPT2", "eager", "horner:linear_mamba", NotImplementedError), ("GPT2", "horner:gated", "horner:linear_mamba", NotImplementedError),
        ("GPT2", "horner:l2", "horner:gated,linear_mamba", NotImplementedError), ("Llama", "sdpa", "horner:softmax,l2,l2", ValueError),
        ("Llama", "horner:gated_decay", "horner:softmax^2|l2", ValueError), ("Mamba2", "eager", "horner:l2", NotImplementedError),
    ):  # fmt: skip
        model = families.build(family, start)
        before = names(model)
        with pytest.raises(error):
            model.set_attn_implementation(wrong)
        assert names(model) == before, (family, wrong)
        if family != "Mamba2":
            inputs = families.batch(family)[0]
            assert model(**inputs).logits.isfinite().all()
            model.set_attn_implementation("horner:gated")
            assert model.config.horner_variant == "gated" and model(**inputs, use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("variant, more", [("l2", {}), ("softmax", {"sliding_window": 6})])
def test_paged_caches(variant, more):
    """transformers' continuous batching: the tokens of each prompt alone."""
    config = (transformers.MistralConfig if more else transformers.LlamaConfig)(**SMALL, **more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=f"horner:{variant}").eval()
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16], [3]]
    settings = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batch = model.generate_batch(prompts, generation_config=settings, progress_bar=False)
    got = [batch[name].generated_tokens for name in sorted(batch, key=lambda name: int(re.sub(r"\D", "", name)))]
    alone = [model.generate(torch.tensor([p]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, len(p) :].tolist() for p in prompts]
    assert got == alone
    model.set_attn_implementation("horner:gated")
    with pytest.raises(NotImplementedError, match="does not support a paged cache with the inputs input_gate, output_gate"):
        model.generate_batch(prompts, generation_config=settings, progress_bar=False)


def words(outputs):
    """What cells printed, without the numbers, which differ from one processor to the next."""
    text = ["".join(output.get("text", output.get("data", {}).get("text/plain", []))) for output in outputs]
    return re.sub(r"[\d.,−-]+", "#", "".join(text))


def test_the_notebook(monkeypatch):
    path = ROOT / "examples" / "swap_train_diagnose.ipynb"
    monkeypatch.setenv("PATH", f"{Path(os.environ['HORNER']).parent}:{os.environ['PATH']}")
    stored = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(stored) == 10 and all(cell["outputs"] for cell in stored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = [cell for cell in notebook.run(path)["cells"] if cell["cell_type"] == "code"]
    for then, now in zip(stored, new):
        if "diagnose" not in "".join(now["source"]):  # its sentences depend on the numbers
            assert words(now["outputs"]) == words(then["outputs"])
    assert any("image/svg+xml" in output.get("data", {}) for output in new[-1]["outputs"])
