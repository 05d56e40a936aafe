"""Swap the attention of a trained model and fine-tune it on a text file with transformers' Trainer.

    python examples/finetune.py book.txt --variant taylor4 --steps 30 --out finetuned

Prints the loss on held-out rows: of the original model, right after the swap, and at the end. transformers
(attn_implementation="horner") and `horner generate --model finetuned` open the folder that it saves.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

import horner.hf  # registers attn_implementation="horner"

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("text", type=Path)
parser.add_argument("--model", default="pretrained/gemma-3-270m")
parser.add_argument("--variant", default="l2", help="any variant of horner.attend: l2, taylor4:norm=l2, ...")
parser.add_argument("--layers", type=int, nargs="*", help="the layers to swap (all)")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--rate", type=float, default=5e-5)
parser.add_argument("--out", default="finetuned")
args = parser.parse_args()
set_seed(0)

model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="sdpa", dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(args.model)

# Rows of `length` tokens, each with the token that begins a text; 8 from all over the text are kept for the loss.
ids = tokenizer(args.text.read_text(), add_special_tokens=False)["input_ids"]
first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
step = args.length - len(first)
rows = [first + ids[i : i + step] for i in range(0, len(ids) - step + 1, step)]
rows = [{"input_ids": row, "labels": row} for row in rows]
every = max(1, len(rows) // 8)
test = rows[::every][:8]
train = [row for i, row in enumerate(rows) if i % every or i >= 8 * every]

# Two thirds of Gemma 270M are its embedding; what has to adapt to another attention are the layers.
model.get_input_embeddings().requires_grad_(False)
settings = TrainingArguments(
    output_dir=args.out, max_steps=args.steps, per_device_train_batch_size=args.batch,
    per_device_eval_batch_size=args.batch, prediction_loss_only=True, learning_rate=args.rate,
    warmup_steps=args.steps // 10, logging_steps=5, save_strategy="no", report_to="none",
)  # fmt: skip
trainer = Trainer(model, settings, train_dataset=train, eval_dataset=test)
before = trainer.evaluate()["eval_loss"]

layers = range(model.config.num_hidden_layers)
swapped = [args.variant if args.layers is None or i in args.layers else "softmax" for i in layers]
model.config.horner_variant = swapped
model.set_attn_implementation("horner")
after = trainer.evaluate()["eval_loss"]

trainer.train()
recovered = trainer.evaluate()["eval_loss"]
swap = f"loss {before:.3f} originally, {after:.3f} after the swap"
print(f"{args.variant}: {swap}, {recovered:.3f} after {args.steps} steps")
trainer.save_model(args.out)
tokenizer.save_pretrained(args.out)
