"""Which models of transformers run with attn_implementation="horner": prints the table of docs/huggingface.md.

    python scripts/families.py              every family, as Markdown
    python scripts/families.py gpt2 t5      only these

Tiny random models of each family run with "horner" and with transformers' own "eager". A cell is a tick if both give
the same numbers, a letter if horner refuses (with its message below the table), and a dash if the mode does not exist
or transformers itself fails in it.
"""

import argparse
import logging
import re
import sys
import tempfile
import unittest.mock
import warnings
from pathlib import Path

import torch
import transformers

import horner.hf
from horner._hf_families import attentions

PAGE = Path(__file__).parent.parent / "docs" / "huggingface.md"
MODES = ("full", "left-padded", "static cache", "compile", "generate", "Trainer step")

TOKENS = dict(vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=96)
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128, **TOKENS)
GROUPED = dict(SIZES, num_key_value_heads=2)
HEADS = dict(GROUPED, head_dim=8)
SLIDING = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
OLD = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128, **TOKENS)
QUIET = dict(attention_dropout=0.0, hidden_dropout=0.0)
BERT = dict(SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
BOTH = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, max_position_embeddings=128, dropout=0.0, decoder_start_token_id=1, forced_eos_token_id=None, **TOKENS)  # fmt: skip
T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=1, **TOKENS)


def config(name, **settings):
    return lambda: getattr(transformers, name + "Config")(**settings)


def pair():
    text = dict(BERT, intermediate_size=32)
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(transformers.BertConfig(**text), transformers.BertConfig(**text))
    both.decoder_start_token_id, both.pad_token_id = 1, 0
    return both


# Every family: how its models are opened, and a small config.
DECODER, ENCODER, PAIR = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
FAMILIES = {
    "Llama": (DECODER, config("Llama", **GROUPED)),
    "Mistral": (DECODER, config("Mistral", **HEADS, sliding_window=6)),
    "Mixtral": (DECODER, config("Mixtral", **GROUPED, **EXPERTS)),
    "Qwen2": (DECODER, config("Qwen2", **GROUPED, use_sliding_window=True, **SLIDING)),
    "Qwen3": (DECODER, config("Qwen3", **HEADS)),
    "Qwen3Moe": (DECODER, config("Qwen3Moe", **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)),
    "Gemma": (DECODER, config("Gemma", **HEADS)),
    "Gemma2": (DECODER, config("Gemma2", **HEADS, **SLIDING, query_pre_attn_scalar=10)),
    "Gemma3": (DECODER, config("Gemma3Text", **HEADS, **SLIDING, query_pre_attn_scalar=10)),
    "GptOss": (DECODER, config("GptOss", **HEADS, **SLIDING, **EXPERTS)),
    "GPT2": (DECODER, config("GPT2", **OLD, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)),
    "GPT2 with dropout": (DECODER, config("GPT2", **OLD, embd_pdrop=0.0, resid_pdrop=0.0)),
    "GPTBigCode": (DECODER, config("GPTBigCode", **OLD, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)),
    "GPTNeoX": (DECODER, config("GPTNeoX", **SIZES, **QUIET)),
    "GPTNeo": (DECODER, config("GPTNeo", hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], max_position_embeddings=128, **TOKENS)),
    "GPTJ": (DECODER, config("GPTJ", **OLD, rotary_dim=4)),
    "CodeGen": (DECODER, config("CodeGen", **OLD, rotary_dim=4)),
    "OPT": (DECODER, config("OPT", hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32, dropout=0.0, max_position_embeddings=128, **TOKENS)),
    "Bloom": (DECODER, config("Bloom", hidden_size=32, n_layer=2, n_head=4, **TOKENS)),
    "Falcon": (DECODER, config("Falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **TOKENS)),
    "MPT": (DECODER, config("Mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=128, **TOKENS)),
    "Phi": (DECODER, config("Phi", **SIZES, embd_pdrop=0.0, resid_pdrop=0.0)),
    "Phi3": (DECODER, config("Phi3", **GROUPED)),
    "StableLm": (DECODER, config("StableLm", **GROUPED)),
    "Starcoder2": (DECODER, config("Starcoder2", **GROUPED, sliding_window=6, embedding_dropout=0.0, residual_dropout=0.0)),
    "Olmo2": (DECODER, config("Olmo2", **GROUPED)),
    "Olmo3": (DECODER, config("Olmo3", **GROUPED, **SLIDING)),
    "Cohere": (DECODER, config("Cohere", **GROUPED)),
    "Cohere2": (DECODER, config("Cohere2", **GROUPED, **SLIDING)),
    "Granite": (DECODER, config("Granite", **GROUPED)),
    "Glm4": (DECODER, config("Glm4", **HEADS)),
    "SmolLM3": (DECODER, config("SmolLM3", **GROUPED)),
    "Exaone4": (DECODER, config("Exaone4", **GROUPED, **SLIDING)),
    "Ernie4_5": (DECODER, config("Ernie4_5", **HEADS)),
    "Nemotron": (DECODER, config("Nemotron", **HEADS)),
    "DeepseekV3": (DECODER, config("DeepseekV3", **SIZES, **LATENT, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
                                   moe_intermediate_size=24, n_shared_experts=1, first_k_dense_replace=1)),
    "Llama4": (DECODER, config("Llama4Text", **HEADS, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=48,
                               layer_types=["chunked_attention", "full_attention"])),
    "Mamba2": (DECODER, config("Mamba2", hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1, **TOKENS)),
    "BERT": (ENCODER, config("Bert", **BERT)),
    "RoBERTa": (ENCODER, config("Roberta", **BERT)),
    "ModernBERT": (ENCODER, config("ModernBert", **SIZES, local_attention=6, layer_types=["full_attention", "sliding_attention"])),
    "DistilBERT": (ENCODER, config("DistilBert", dim=32, hidden_dim=48, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0, max_position_embeddings=128, **TOKENS)),
    "DeBERTa": (ENCODER, config("Deberta", **BERT)),
    "BART": (PAIR, config("Bart", **BOTH)),
    "T5": (PAIR, config("T5", **T5)),
    "T5 with dropout": (PAIR, config("T5", **{**T5, "dropout_rate": 0.1})),
    "EncoderDecoder of two BERTs": (PAIR, pair),
}  # fmt: skip


def build(family, implementation):
    opener, make = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, opener).from_config(make(), attn_implementation=implementation).eval()
    with torch.no_grad():  # weights large enough for attention to choose, and for greedy tokens to differ
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(4)
    return model


def batch(family, padded=False):
    """Three rows of 20 tokens, and which of them are real."""
    ids = torch.randint(2, 96, (3, 20), generator=torch.Generator().manual_seed(1))
    keep = torch.ones(3, 20, dtype=torch.long)
    if padded:
        keep[0, :7] = keep[1, :1] = 0
        ids = ids * keep
    inputs = {"input_ids": ids, **({"attention_mask": keep} if padded else {})}
    if FAMILIES[family][0] == PAIR:
        inputs["decoder_input_ids"] = ids.flip(1).clamp(min=1)[:, :9]
    return inputs, keep.bool()


def logits(model, inputs, real):
    with torch.no_grad():
        out = model(**inputs).logits
    return out if "decoder_input_ids" in inputs else out[real]


def full(family, model):
    """Every attention module of a model with horner calls it: numbers that agree do not show that."""
    with unittest.mock.patch.object(horner, "attend", wraps=horner.attend) as attend:
        out = logits(model, *batch(family))
    wanted = len(attentions(model)) if model.config._attn_implementation.startswith("horner") else 0
    if attend.call_count != wanted:
        raise RuntimeError(f"{wanted} attention modules called horner.attend {attend.call_count} times")
    return out


def left_padded(family, model):
    return logits(model, *batch(family, padded=True))


def tokens_of(family, model, **settings):
    if not model.can_generate() or FAMILIES[family][0] == ENCODER:
        return None
    inputs, _ = batch(family, padded=True)
    inputs.pop("decoder_input_ids", None)
    return model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, **settings).double()


def static_cache(family, model):
    return tokens_of(family, model, cache_implementation="static")


def generate(family, model):
    return tokens_of(family, model)


def compiled(family, model):
    torch._dynamo.reset()
    inputs, real = batch(family)
    if FAMILIES[family][0] == DECODER:
        inputs["use_cache"] = False
    return logits(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs, real)


def trainer_step(family, model):
    """The loss and every gradient of one step of transformers' Trainer, as one row of numbers."""
    inputs, _ = batch(family, padded=True)
    seen = inputs["attention_mask"].cumsum(1) > 1  # the first token is predicted from padding
    labels = inputs["input_ids"].masked_fill(~seen, -100)
    if (shorter := inputs.pop("decoder_input_ids", None)) is not None:
        labels = shorter
    rows = [{**{name: x[i] for name, x in inputs.items()}, "labels": labels[i]} for i in range(3)]
    numbers = []

    class Keep(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            numbers.extend(p.grad.flatten() for p in model.parameters() if p.grad is not None)

    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(output_dir=folder, max_steps=1, per_device_train_batch_size=3, report_to="none", use_cpu=True,
                                                  save_strategy="no", disable_tqdm=True, logging_strategy="no", max_grad_norm=0)  # fmt: skip
        loss = transformers.Trainer(model, settings, train_dataset=rows, callbacks=[Keep()]).train().training_loss
    return torch.cat([torch.tensor([loss]), *numbers])


RUN = dict(zip(MODES, (full, left_padded, static_cache, compiled, generate, trainer_step)))
TICK, DASH = "✓", "–"


def attempt(mode, family, implementation):
    try:
        return RUN[mode](family, build(family, implementation)), None
    except Exception as error:  # whatever a family throws is what the table is about
        return None, error


def reason(error):
    """The first sentence of a refusal of ours, without the name of the class."""
    text = str(error).partition(". ")[0].removeprefix("attn_implementation='horner' ")
    return re.sub(r"^does not support \w+: it ", "", text)


def cell(mode, family):
    # other generators drop other weights: with dropout, the same step again is what a step is compared with
    again = mode == "Trainer step" and family.endswith("with dropout")
    wanted, theirs = attempt(mode, family, "horner" if again else "eager")
    got, ours = attempt(mode, family, "horner")
    if ours is not None:
        if isinstance(ours, (NotImplementedError, ValueError)) and "horner" in str(ours):
            return reason(ours)
        if theirs is None:
            raise RuntimeError(f"{family}, {mode}: fails with horner only") from ours
    if wanted is None:
        return DASH
    far = (got - wanted).abs().max().item() / wanted.abs().max().item()
    if not far < 1e-4:
        raise RuntimeError(f"{family}, {mode}: differs from transformers' own attention by {far:.1e} of the largest number")
    return TICK


def cells(family):
    """For each mode: a tick, a dash, or why horner refuses."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [cell(mode, family) for mode in MODES]


def markdown(families):
    notes, lines = {}, [f"| | {' | '.join(MODES)} |", "|---" * (len(MODES) + 1) + "|"]
    for number, family in enumerate(families, 1):
        print(f"{number}/{len(families)} {family} …", file=sys.stderr, flush=True)
        row = [text if text in (TICK, DASH) else f"({notes.setdefault(text, 'abcdefghijklmnopqrstuvwxyz'[len(notes)])})" for text in cells(family)]
        lines.append(f"| {family} | {' | '.join(row)} |")
    return "\n".join([*lines, "", *(f"- ({letter}) {text}" for text, letter in notes.items())])


def on_the_page():
    """The rows of docs/huggingface.md, as `cells` returns them."""
    lines = PAGE.read_text().splitlines()
    start = lines.index(f"| | {' | '.join(MODES)} |")
    notes = {line[2:5]: line[6:] for line in lines[start:] if line.startswith("- (")}
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        family, *marks = (part.strip() for part in line.strip("|").split("|"))
        rows[family] = [notes.get(mark, mark) for mark in marks]
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    wanted = [name.lower() for name in parser.parse_args().families]
    unknown = [name for name in wanted if name not in {family.lower() for family in FAMILIES}]
    if unknown:
        parser.error(f"no family {unknown[0]!r}; possible: {', '.join(FAMILIES)}")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # the models are tiny
    print(markdown([family for family in FAMILIES if not wanted or family.lower() in wanted]))
