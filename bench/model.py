"""A training step and a forward pass beside PyTorch's, in one run: rounds of ours and theirs in turn, medians; checked before timed.
Beside the time on the clock stands that of the processors: on a machine that others use too, it is the steadier one.

    python bench/model.py train [--dtype float32|bfloat16] [--preset 10m] [--batch 8] [--tokens 512]
        forward, backward and AdamW against the same model with scaled_dot_product_attention, eager and compiled
    python bench/model.py forward FOLDER [--tokens 1024]
        logits of all positions, loading, and decoding, against transformers with sdpa
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two processes share the cores: none may spin
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["train", "forward"])
parser.add_argument("folder", nargs="?", type=Path)
parser.add_argument("--build", type=Path, default=Path("build"))
parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
parser.add_argument("--preset", default="10m")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--tokens", type=int)
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--without", choices=["eager", "compiled"], action="append", default=[])
o = parser.parse_args()
torch.set_num_threads(os.cpu_count())
TOOL = o.build / "model_tool"


class Ours:
    """A process of ours that does one round for each line it reads, and answers with seconds and a number."""

    all = []

    def __init__(self, *arguments):
        Ours.all.append(self)
        self.process = subprocess.Popen([TOOL, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, command=""):
        print(command, file=self.process.stdin, flush=True)
        seconds, value = self.process.stdout.readline().split()
        return float(seconds), float(value)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def timed(run):
    def once():
        start = time.perf_counter()
        value = run()
        return time.perf_counter() - start, value

    return once


def processor_seconds():
    """Of this process and of ours; one side works at a time."""
    ticks = os.sysconf("SC_CLK_TCK")
    files = [Path(f"/proc/{side.process.pid}/stat") for side in Ours.all]
    return time.process_time() + sum(sum(map(int, f.read_text().rsplit(")", 1)[1].split()[11:13])) / ticks for f in files if f.exists())


def medians(sides):
    """Of the rounds of each side, taken in turn after one to warm up: seconds on the clock, and of the processors."""
    times = {name: [] for name in sides}
    for round in range(o.rounds + 1):
        for name, run in sides.items():
            before = processor_seconds()
            seconds, value = run()
            if round >= 1:
                times[name].append((seconds, processor_seconds() - before))
    return {name: tuple(map(statistics.median, zip(*t))) for name, t in times.items()}


class Llama(torch.nn.Module):
    """The model of the presets, as one writes it in PyTorch."""

    def __init__(self, folder):
        super().__init__()
        self.config = c = json.loads((folder / "config.json").read_text())
        self.heads, self.eps = c["num_attention_heads"], c["rms_norm_eps"]
        weights = load_file(folder / "model.safetensors")
        self.names = list(weights)
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(w.clone()) for w in weights.values()])
        theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
        D = c["hidden_size"] // self.heads
        angle = torch.arange(c["max_position_embeddings"])[:, None] * theta ** (-torch.arange(0, D, 2) / D)
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def turned(self, x):
        a, b = x.chunk(2, -1)
        T = x.shape[2]
        return (x * self.cos[:T] + torch.cat((-b, a), -1) * self.sin[:T]).to(x.dtype)

    def forward(self, tokens, targets):
        w = dict(zip(self.names, self.weights))
        B, T = tokens.shape
        norm = lambda x, name: F.rms_norm(x, x.shape[-1:], w[name], self.eps)  # noqa: E731
        x = F.embedding(tokens, w["model.embed_tokens.weight"])
        for i in range(self.config["num_hidden_layers"]):
            p = f"model.layers.{i}."
            y = norm(x, p + "input_layernorm.weight")
            q, k, v = (F.linear(y, w[p + f"self_attn.{n}_proj.weight"]).view(B, T, self.heads, -1).transpose(1, 2) for n in "qkv")
            a = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
            x = x + F.linear(a.transpose(1, 2).reshape(B, T, -1), w[p + "self_attn.o_proj.weight"])
            y = norm(x, p + "post_attention_layernorm.weight")
            y = F.silu(F.linear(y, w[p + "mlp.gate_proj.weight"])) * F.linear(y, w[p + "mlp.up_proj.weight"])
            x = x + F.linear(y, w[p + "mlp.down_proj.weight"])
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        logits = F.linear(norm(x, "model.norm.weight"), head)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train():
    T = o.tokens or 512
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        subprocess.run([TOOL, "new", o.preset, "softmax", "3", folder / "model"], check=True)
        text = torch.randint(0, 256, (o.batch, T + 1), generator=torch.Generator().manual_seed(1))
        save_file({"tokens": text}, folder / "tokens.safetensors")

        def theirs(compiled):
            model = Llama(folder / "model")
            run = torch.compile(model) if compiled else model
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

            def step():
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast("cpu", torch.bfloat16, enabled=o.dtype == "bfloat16"):
                    loss = run(text[:, :-1], text[:, 1:])
                loss.backward()
                optimizer.step()
                return loss.item()

            return timed(step)

        sides = {"ours": Ours("steps", folder / "model", folder / "tokens.safetensors", o.dtype)}
        for name in ("eager", "compiled"):
            if name not in o.without:
                sides[name] = theirs(name == "compiled")
        for _ in range(3):  # the same losses, step by step
            losses = {name: run()[1] for name, run in sides.items()}
            print("losses", losses, flush=True)
            assert max(losses.values()) - min(losses.values()) < (1e-4 if o.dtype == "float32" else 1e-2)
        found = medians(sides)
        sides["ours"].end()
    best = [min(t[i] for name, t in found.items() if name != "ours") for i in range(2)]
    for name, (seconds, processor) in found.items():
        print(f"{name}: {seconds * 1e3:.0f} ms a step, {o.batch * T / seconds:.0f} tokens/s, {best[0] / seconds:.2f} x the best of theirs; "
              f"processors {processor * 1e3:.0f} ms, {best[1] / processor:.2f} x")  # fmt: skip


def forward():
    import transformers

    T = o.tokens or 1024
    transformers.logging.set_verbosity_error()
    load = timed(lambda: transformers.AutoModelForCausalLM.from_pretrained(o.folder, attn_implementation="sdpa", dtype=torch.float32))
    model = load()[1].eval()
    text = torch.randint(3, model.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(1))
    text[0, 0] = 2
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        save_file({"tokens": text}, Path(folder) / "tokens.safetensors")
        save_file({"tokens": text[:, :32]}, Path(folder) / "prompt.safetensors")
        subprocess.run([TOOL, "logits", o.folder, Path(folder) / "prompt.safetensors", Path(folder) / "logits"], check=True)
        wanted = model(text[:, :32]).logits
        apart = (load_file(Path(folder) / "logits")["logits"] - wanted).abs().max() / wanted.abs().max()
        assert apart < 1e-4, apart
        ours, decoding = (Ours("times", o.folder, Path(folder) / f"{name}.safetensors") for name in ("tokens", "prompt"))
        report("loading", medians({"ours": lambda: ours("load"), "transformers": load}))
        found = medians({"ours": lambda: ours("logits"), "transformers": timed(lambda: model(text).logits[0, -1].max().item())})
        report(f"logits of {T} tokens", found)

        def generate(n):
            start = time.perf_counter()
            model.generate(text[:, :32], max_new_tokens=n, min_new_tokens=n, do_sample=False)
            return time.perf_counter() - start, n

        few, many = 2, 34  # the difference leaves the prompt out
        sides = {}
        for n in (few, many):
            sides[f"ours {n}"] = lambda n=n: decoding(f"decode {n}")
            sides[f"transformers {n}"] = lambda n=n: generate(n)
        found = medians(sides)
        rest = {k: tuple(a - b for a, b in zip(found[f"{k} {many}"], found[f"{k} {few}"])) for k in ("ours", "transformers")}
        report(f"decoding {many - few} tokens", rest)
        ours.end(), decoding.end()


def report(what, found):
    (ours, our_processor), (theirs, their_processor) = found["ours"], found["transformers"]
    print(f"{what}: ours {ours * 1e3:.0f} ms, transformers {theirs * 1e3:.0f} ms, {theirs / ours:.2f} x; processors "
          f"{our_processor * 1e3:.0f} and {their_processor * 1e3:.0f} ms, {their_processor / max(our_processor, 1e-2):.2f} x", flush=True)  # fmt: skip


{"train": train, "forward": forward}[o.what]()
