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
