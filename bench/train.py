"""The other side of `horner train`: the same model in PyTorch, on the same batches and schedule.

    horner data pack --out text.bin
    horner train --model 10m --attention taylor4 --data text.bin --batch 64 --steps 1000 --dtype bfloat16 --out run
    python bench/train.py --settings run/settings.json --compile

prints one line of JSON: tokens/s (median of the steps after the first ones) and the validation loss. `--settings` is what
`horner train` saved beside its run, so both sides have the same numbers. softmax and l2 go through torch's own
scaled_dot_product_attention, Taylor variants through their weights as matrices: what a PyTorch user writes.
"""

import argparse
import contextlib
import json
import math
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

# width, MLP, layers, heads, vocabulary: as src/nn/config.cpp has them
PRESETS = {"tiny": (64, 128, 2, 4, 256), "10m": (384, 1024, 6, 6, 256), "small": (1024, 2048, 20, 16, 32000)}


def mixed(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_bits(seed, stream, index):
    """src/core/random.h, on arrays."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        first = mixed(mixed(np.uint64(seed) + golden) + np.uint64(stream) * golden)
        return mixed(first + (index.astype(np.uint64) + np.uint64(1)) * golden)


class Text:
    def __init__(self, path, seed, length):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r", offset=1024)
        self.pieces = min(max(len(self.tokens) >> 20, 1), 64)
        self.piece = len(self.tokens) // self.pieces
        self.held = self.piece // 20
        self.seed, self.length = seed, length

    def batch(self, split, first, count, device):
        size, offset = (self.piece - self.held, 0) if split == 0 else (self.held, self.piece - self.held)
        starts = size - self.length
        at = random_bits(self.seed, split, np.arange(first, first + count)) % np.uint64(self.pieces * starts)
        begin = [int(a) // starts * self.piece + offset + int(a) % starts for a in at]
        rows = np.stack([self.tokens[b : b + self.length + 1] for b in begin]).astype(np.int64)
        x = torch.from_numpy(rows).to(device, non_blocking=True)
        return x[:, :-1], x[:, 1:]


def attend(name, q, k, v):
    if name in ("softmax", "l2"):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.normalize(out, dim=-1) if name == "l2" else out
    order = int(name.removeprefix("taylor"))
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    weights = torch.ones_like(scores)
    for n in range(order, 0, -1):
        weights = 1 + weights * scores / n
    weights = weights.tril()
    return (weights / weights.sum(-1, keepdim=True)).to(v.dtype) @ v


class Block(nn.Module):
    def __init__(self, attention, C, M, H):
        super().__init__()
        self.attention, self.H = attention, H
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(C, M, bias=False), nn.Linear(C, M, bias=False), nn.Linear(M, C, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        y = self.norm1(x)
        q, k, v = (w(y).view(B, T, self.H, -1).transpose(1, 2) for w in (self.q, self.k, self.v))

        def turned(z):
            a, b = z.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(v.dtype)

        y = attend(self.attention, turned(q), turned(k), v).transpose(1, 2).reshape(B, T, C)
        x = x + self.o(y)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, preset, attention, length):
        super().__init__()
        C, M, layers, H, V = PRESETS[preset]
        self.embedding, self.head = nn.Embedding(V, C), nn.Linear(C, V, bias=False)
        self.blocks = nn.ModuleList(Block(attention, C, M, H) for _ in range(layers))
        self.norm = nn.RMSNorm(C, eps=1e-5)
        D = C // H
        angle = torch.arange(length).float()[:, None] * 10000 ** (-torch.arange(0, D, 2).float() / D)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


NAMES = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
         "down": "mlp.down_proj", **{x: f"self_attn.{x}_proj" for x in "qkvo"}}  # fmt: skip


def load(model, folder):
    """The weights that `horner` begins with, so that both sides begin with the same."""
    tensors = load_file(f"{folder}/model.safetensors")
    tops = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("blocks."):
                _, layer, part, kind = name.split(".")
                theirs = f"model.layers.{layer}.{NAMES[part]}.{kind}"
            else:
                theirs = tops[name]
            p.copy_(tensors.pop(theirs))
    assert not tensors, tensors.keys()


def rate(s, step):
    end = s["decay-steps"] or s["steps"]
    up = s["warmup"] if s["warmup"] >= 0 else min(1000, end // 10)
    if step < up:
        return s["learning-rate"] * (step + 1) / up
    return s["learning-rate"] * max(0, end - step) / max(1, end - up)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", required=True, help="settings.json of a run of horner train")
    parser.add_argument("--initial", help="a Hugging Face folder with the weights to begin with (tests/model_tool new)")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, help="only so many of the settings' steps")
    o = parser.parse_args()
    s = json.load(open(o.settings))
    device = "cuda" if torch.cuda.is_available() and s["device"] != "cpu" else "cpu"
    torch.manual_seed(s["seed"])
    model = Model(s["model"], s["attention"] or "softmax", s["length"]).to(device)
    if o.initial:
        load(model, o.initial)
    text = Text(s["data"], s["seed"], s["length"])
    decayed = [p for p in model.parameters() if p.dim() >= 2 or s["decay-all"]]
    others = [p for p in model.parameters() if p.dim() < 2 and not s["decay-all"]]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": s["weight-decay"]}, {"params": others, "weight_decay": 0}],
                                  lr=torch.tensor(0.0, device=device) if device == "cuda" else 0.0,
                                  betas=(s["beta1"], s["beta2"]), eps=s["eps"], fused=True)  # fmt: skip
    run = torch.compile(model) if o.compile else model
    precision = (lambda: torch.autocast(device, torch.bfloat16)) if s["dtype"] == "bfloat16" else contextlib.nullcontext
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    steps, losses, rates = o.steps or s["steps"], [], []
    for step in range(steps):
        wait()
        begin = time.perf_counter()
        x, y = text.batch(0, step * s["batch"], s["batch"], device)
        for group in optimizer.param_groups:
            if device == "cuda":
                group["lr"].fill_(rate(s, step))
            else:
                group["lr"] = rate(s, step)
        with precision():
            loss = run(x, y)
        loss.backward()
        if s["clip"] > 0:
            nn.utils.clip_grad_norm_(model.parameters(), s["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        wait()
        rates.append(s["batch"] * s["length"] / (time.perf_counter() - begin))
    sums = []
    with torch.no_grad(), precision():
        for first in range(0, s["evaluate-sequences"], s["batch"]):
            n = min(s["batch"], s["evaluate-sequences"] - first)
            sums.append((model(*text.batch(1, first, n, device)).item(), n))
    validation = sum(a * n for a, n in sums) / sum(n for _, n in sums) if sums else None
    print(json.dumps({"side": "PyTorch, compiled" if o.compile else "PyTorch, eager", "model": s["model"],
                      "attention": s["attention"] or "softmax", "dtype": s["dtype"], "steps": steps,
                      "tokens_per_second": statistics.median(rates[min(5, len(rates) - 1):]),
                      "first_loss": losses[0].item(), "train_loss": torch.stack(losses[-128:]).mean().item(),
                      "validation_loss": validation,
                      "peak_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else None}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
