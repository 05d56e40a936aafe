"""Models against the transformers package, in both directions, and decoding against the whole."""
import functools
import itertools
import json
import os
import re
import subprocess

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

HORNER = os.environ["HORNER"]
TOOL = os.path.join(os.path.dirname(HORNER), "model_tool")
PRETRAINED = os.path.join(os.path.dirname(__file__), "..", "pretrained", "gemma-3-270m")
transformers.logging.set_verbosity_error()
SMALL = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 10000.0}
NEOX = {name: x for name, x in SMALL.items() if name != "num_key_value_heads"}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(num_hidden_layers=2, **SMALL),
    "llama_bias_tied": lambda: transformers.LlamaConfig(num_hidden_layers=2, attention_bias=True, mlp_bias=True,
                                                        tie_word_embeddings=True, **SMALL),
    "llama3_rope": lambda: transformers.LlamaConfig(num_hidden_layers=2, rope_parameters=LLAMA3, **SMALL),
    "mistral": lambda: transformers.MistralConfig(num_hidden_layers=2, sliding_window=8, **SMALL),
    "qwen2": lambda: transformers.Qwen2Config(num_hidden_layers=2, **SMALL),
    "qwen2_window": lambda: transformers.Qwen2Config(num_hidden_layers=3, use_sliding_window=True, sliding_window=7,
                                                     max_window_layers=1, **SMALL),
    "qwen3": lambda: transformers.Qwen3Config(num_hidden_layers=2, head_dim=12, **SMALL),
    "olmo2": lambda: transformers.Olmo2Config(num_hidden_layers=3, pad_token_id=0, **SMALL),
    "olmo2_bias": lambda: transformers.Olmo2Config(num_hidden_layers=2, pad_token_id=0, attention_bias=True,
                                                   **SMALL),
    "gemma2": lambda: transformers.Gemma2Config(num_hidden_layers=3, head_dim=12, sliding_window=8, query_pre_attn_scalar=20,
                                                attn_logit_softcapping=1.5, final_logit_softcapping=0.5, **SMALL),
    "gemma3": lambda: transformers.Gemma3TextConfig(num_hidden_layers=7, head_dim=12, sliding_window=8,
                                                    query_pre_attn_scalar=20, **SMALL),
    "gemma3_softcap": lambda: transformers.Gemma3TextConfig(num_hidden_layers=2, head_dim=12, sliding_window=8,
                                                            query_pre_attn_scalar=20, final_logit_softcapping=0.5, **SMALL),
    "phi3": lambda: transformers.Phi3Config(num_hidden_layers=2, pad_token_id=0, sliding_window=8, **SMALL),
    "phi3_partial": lambda: transformers.Phi3Config(num_hidden_layers=2, pad_token_id=0, **{**SMALL, "hidden_size": 48},
                                                    rope_parameters={"rope_type": "default", "rope_theta": 500.0,
                                                                     "partial_rotary_factor": 0.5}),
    "smollm3": lambda: transformers.SmolLM3Config(num_hidden_layers=4, pad_token_id=0, no_rope_layer_interval=2, **SMALL),
    "smollm3_window": lambda: transformers.SmolLM3Config(num_hidden_layers=4, pad_token_id=0, use_sliding_window=True, sliding_window=7,
                                                         no_rope_layers=[1, 0, 0, 1], attention_bias=True, mlp_bias=True, **SMALL),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(num_hidden_layers=2, rotary_pct=0.5, **NEOX),
    "gpt_neox_serial": lambda: transformers.GPTNeoXConfig(num_hidden_layers=2, use_parallel_residual=False, attention_bias=False,
                                                          rotary_pct=1.0, rotary_emb_base=500, tie_word_embeddings=True,
                                                          hidden_act="gelu_new", **NEOX),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                                            bos_token_id=1, eos_token_id=1),
}


def run(*arguments):
    done = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def logits_of(folder, tokens, where, *more):
    save_file({"tokens": tokens}, where / "tokens.safetensors")
    run("stream" if more else "logits", folder, where / "tokens.safetensors", where / "out.safetensors", *more)
    return load_file(where / "out.safetensors")["logits"]


def random_model(config, seed=0):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases and norms of a new model are all zeros and ones
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_and_we_agree(name, tmp_path):
    model = random_model(CONFIGS[name]())
    model.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(0, 99, (2, 37))
    with torch.no_grad():
        wanted = model(tokens).logits
    assert (logits_of(tmp_path / "theirs", tokens, tmp_path) - wanted).abs().max() < 1e-4
    run("copy", tmp_path / "theirs", tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_transformers(name, tmp_path):
    model = random_model(CONFIGS[name]())
    model.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(1, 99, (2, 21))  # transformers keeps gradients from a padding token, 0
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    run("loss", tmp_path / "theirs", tmp_path / "tokens.safetensors", tmp_path / "out.safetensors")
    ours = load_file(tmp_path / "out.safetensors")
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits.reshape(-1, 99), tokens[:, 1:].reshape(-1))
    loss.backward()
    assert abs(loss.item() - ours.pop("loss").item()) < 1e-5
    theirs = dict(model.named_parameters())
    if "neox" in name and "embed_out.weight" in ours:  # transformers renames it when it loads a file
        ours["lm_head.weight"] = ours.pop("embed_out.weight")
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        wanted = theirs[key].grad
        assert (gradient - wanted).abs().max() < 1e-4 * (1 + wanted.abs().max()), key


@functools.cache
def variants():
    """All variants that a model can decode with; without HORNER_LONG, of those that differ by a number in their names only the first."""
    listed = json.loads(subprocess.run([HORNER, "list", "--json"], capture_output=True, text=True).stdout)
    names = [v["name"] for v in listed["variants"] if v["name"] not in ("bias", "prefix_lm", "two_way_window")]
    return names if os.environ.get("HORNER_LONG") else list({re.sub(r"\d+", "#", name): name for name in names[::-1]}.values())[::-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_is_the_whole_text_for_every_family(name, tmp_path):
    random_model(CONFIGS[name]()).save_pretrained(tmp_path / "model")
    tokens = torch.randint(0, 99, (2, 30))
    whole = logits_of(tmp_path / "model", tokens, tmp_path)
    streamed = logits_of(tmp_path / "model", tokens, tmp_path, 19)
    assert (whole - streamed).abs().max() < 1e-4 * (1 + whole.abs().max())


def test_a_prompt_then_decoding_is_the_whole_text_for_every_variant(tmp_path):
    torch.manual_seed(1)
    tokens = torch.randint(0, 256, (2, 30))
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    run("variants", "tiny", 3, tmp_path / "model", tmp_path / "tokens.safetensors", tmp_path / "out.safetensors", 19, *variants())
    logits = load_file(tmp_path / "out.safetensors")
    assert len(logits) == 2 * len(variants())
    for name in variants():
        whole, streamed = logits[f"{name}.whole"], logits[f"{name}.streamed"]
        assert whole.shape == (2, 30, 256)
        assert torch.isfinite(whole).all(), name
        assert (whole - streamed).abs().max() < 1e-4 * (1 + whole.abs().max()), name


def model_with(where, variant, **fields):
    """A new model whose scores are not all near 0."""
    patch = {"initializer_range": 0.3, "num_hidden_layers": 2, **fields}
    run("new", "tiny", variant, 3, where / "m", json.dumps(patch))
    return where / "m"


@pytest.mark.parametrize("variant, own", [
    ("gated_conv", {}), ("softmax", {"short_conv": 3}), ("taylor2", {"short_conv": 1}), ("linear_elu", {"key_shift": True}),
    ("gated_conv", {"key_shift": True}), ("linear_mamba", {}), ("linear_mamba", {"short_conv": 5}), ("gated_decay@code", {}),
])  # fmt: skip
def test_decoding_keeps_what_convolutions_and_shifts_need(variant, own, tmp_path):
    folder = model_with(tmp_path, variant, horner=own)
    tokens = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(4))
    whole = logits_of(folder, tokens, tmp_path)
    assert (whole - logits_of(folder, tokens.flip(1), tmp_path)).abs().max() > 0.1
    for prompt in (1, 2, 19):  # token by token; shorter than the convolution; a real prompt
        streamed = logits_of(folder, tokens, tmp_path, prompt)
        assert (whole - streamed).abs().max() < 1e-4 * (1 + whole.abs().max()), prompt


class PlainLlama:
    """A Llama from its tensors, in double, with any attention: attend(tensors of the layer, x [B, T, C]) -> [B, T, C]."""

    def __init__(self, folder, attend):
        self.attend, self.layers = attend, json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        self.tensors = {k: v.double().requires_grad_() for k, v in load_file(folder / "model.safetensors").items()}

    def logits(self, tokens):
        def norm(x, name):
            return torch.nn.functional.rms_norm(x, x.shape[-1:], self.tensors[name], 1e-5)

        x = self.tensors["model.embed_tokens.weight"][tokens]
        for i in range(self.layers):
            prefix = f"model.layers.{i}."
            own = {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}
            x = x + self.attend(own, norm(x, prefix + "input_layernorm.weight"))
            y = norm(x, prefix + "post_attention_layernorm.weight")
            gate, up, down = (own[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return norm(x, "model.norm.weight") @ self.tensors["lm_head.weight"].T


def compare_with_plain(folder, attend, tmp_path):
    tokens = torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(5))
    plain = PlainLlama(folder, attend)
    wanted = plain.logits(tokens[:, :-1])
    assert (logits_of(folder, tokens[:, :-1].contiguous(), tmp_path) - wanted).abs().max() < 1e-4 * (1 + wanted.abs().max())
    loss = torch.nn.functional.cross_entropy(wanted.reshape(-1, 256), tokens[:, 1:].reshape(-1))
    loss.backward()
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    run("loss", folder, tmp_path / "tokens.safetensors", tmp_path / "out.safetensors")
    ours = load_file(tmp_path / "out.safetensors")
    assert abs(loss.item() - ours.pop("loss").item()) < 1e-4
    assert ours.keys() == {key for key in plain.tensors if not key.endswith(".slope")}  # a constant
    for key, gradient in ours.items():
        theirs = plain.tensors[key].grad
        assert theirs.abs().max() > 0 and (gradient - theirs).norm() < 1e-3 * theirs.norm(), key


def heads_of(x, n):
    return x.unflatten(-1, (n, -1)).transpose(1, 2)  # [B, n, T, D]


def rotated(x):
    T, D = x.shape[-2:]
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D).double()
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


def linear_of(own, name, x):
    """W x + b of each head, [B, heads, T, 1]."""
    return torch.nn.functional.linear(x, own[f"horner.{name}.weight"], own[f"horner.{name}.bias"]).transpose(1, 2)[..., None]


def ended(own, out):
    return out.transpose(1, 2).flatten(2) @ own["self_attn.o_proj.weight"].T


def projected(own, x, rope=True):
    q, k, v = (heads_of(x @ own[f"self_attn.{name}_proj.weight"].T, 4) for name in "qkv")
    return (rotated(q), rotated(k), v) if rope else (q, k, v)


def clamped_exp(q, k):
    return (q @ k.transpose(-1, -2) / 4).clamp(max=5).exp().tril()


def gated_conv(own, x):
    """The authors' gated_softmax_plusplus: F.conv1d and SiLU on the joint projections, RoPE, gated softmax, LayerNorm."""
    T, F = x.shape[1], torch.nn.functional
    joint = torch.cat([x @ own[f"self_attn.{name}_proj.weight"].T for name in "qkv"], -1).transpose(1, 2)
    weight = own["horner.short_conv.weight"].unsqueeze(1)
    joint = F.silu(F.conv1d(joint, weight, padding=3, groups=len(weight))[..., :T]).transpose(1, 2)
    q, k, v = (heads_of(part, 4) for part in joint.split(64, -1))
    weights, into, out = clamped_exp(rotated(q), rotated(k)), *(linear_of(own, f"{n}_gate", x).sigmoid() for n in ("input", "output"))
    out = out * (weights @ (into * v)) / torch.arange(1, T + 1)[:, None]
    return ended(own, F.layer_norm(out, (16,), own["horner.norm_weight"], own["horner.norm_bias"], 1e-5))


def gated_decay_code(own, x):
    """The authors' gated_softmax_decay: no RoPE; raw gates, shifted by a token, summed and divided by 1,024."""
    q, k, v = projected(own, x, rope=False)
    into, out = (linear_of(own, f"{n}_gate", x).sigmoid() for n in ("input", "output"))
    raw = linear_of(own, "decay", x)[..., 0]
    sums = torch.cat([torch.zeros_like(raw[..., :1]), raw[..., :-1]], -1).cumsum(-1) / 1024
    weights = clamped_exp(q, k) * (sums[..., :, None] - sums[..., None, :]).exp()
    out = out * (weights @ (into * v)) / torch.arange(1, x.shape[1] + 1)[:, None]
    if "horner.norm_weight" in own:  # whether there is a norm is for the catalog to say
        out = torch.nn.functional.layer_norm(out, (16,), own["horner.norm_weight"], own["horner.norm_bias"], 1e-5)
    return ended(own, out)


def cumulative_gate(own, x):
    q, k, v = projected(own, x)
    return ended(own, clamped_exp(q, k) @ v / linear_of(own, "denominator_gate", x).exp().cumsum(-2).clamp(min=1))


def cumulative_gate_count_code(own, x):
    q, k, v = projected(own, x)
    return ended(own, (-linear_of(own, "output_gate", x)).exp() * (clamped_exp(q, k) @ v) / torch.arange(1, x.shape[1] + 1)[:, None])


def retention(own, x):
    """RetNet: head h forgets 2^(-5 - h) of a weight per token; not learned."""
    q, k, v = projected(own, x)
    t = torch.arange(x.shape[1]).double()
    kept = (1 - 2.0 ** (-5 - torch.arange(4).double()))[:, None, None] ** (t[:, None] - t).clamp(min=0)
    out = (q @ k.transpose(-1, -2) / 4 * kept).tril() @ v
    return ended(own, torch.nn.functional.rms_norm(out, (16,), own["horner.norm_weight"], 1e-5))


@pytest.mark.parametrize("name, attend", {"gated_conv": gated_conv, "gated_decay@code": gated_decay_code, "cumulative_gate": cumulative_gate,
                                          "cumulative_gate_count@code": cumulative_gate_count_code, "retention": retention}.items())  # fmt: skip
def test_what_a_model_does_for_a_variant_is_the_authors_formula(name, attend, tmp_path):
    compare_with_plain(model_with(tmp_path, name), attend, tmp_path)


def mamba(own, x):
    """Mamba-2 from its recurrence, token by token."""
    own = {k.removeprefix("horner.mamba."): v for k, v in own.items()}
    F, T, H, D = torch.nn.functional, x.shape[1], 4, 16
    u = torch.cat([x @ own[f"{name}.weight"].T for name in "xBC"], -1)
    past = F.pad(u, (0, 0, 1, 0))[:, :T]
    u = F.silu(own["conv.weight"][:, 0] * past + own["conv.weight"][:, 1] * u + own["conv.bias"])
    v, B, C = u.split([H * D, D, D], -1)
    v = v.unflatten(-1, (H, D))
    dt = F.softplus(x @ own["dt.weight"].T + own["dt.bias"])
    state, rows = torch.zeros(x.shape[0], H, D, D, dtype=x.dtype), []
    for t in range(T):
        step = dt[:, t, :, None, None]
        fade = torch.exp(-torch.exp(own["A_log"])[:, None, None] * step)
        state = fade * state + step * v[:, t, :, :, None] * B[:, t, None, None, :]
        rows.append((state * C[:, t, None, None, :]).sum(-1) + own["D"].view(H, D) * v[:, t])
    y = torch.stack(rows, 1).flatten(2) * F.silu(x @ own["z.weight"].T)
    return F.rms_norm(y, (H * D,), own["norm.weight"], 1e-5) @ own["self_attn.o_proj.weight"].T


def test_mamba_is_its_recurrence(tmp_path):
    compare_with_plain(model_with(tmp_path, "linear_mamba"), mamba, tmp_path)


def test_initial_weights_can_be_torchs(tmp_path):
    for init in ("normal", "torch"):
        run("new", "10m", "gated", 3, tmp_path / init, json.dumps({"num_hidden_layers": 1, "horner": {"init": init}}))
    normal, ours = (load_file(tmp_path / init / "model.safetensors") for init in ("normal", "torch"))
    for name, x in ours.items():
        inputs = 1024 if "down_proj" in name else 384
        if "embed" in name or "lm_head" in name:
            assert torch.equal(x, normal[name]), name
        elif "norm" in name:
            assert (x == (0 if name.endswith("bias") else 1)).all(), name
        else:  # torch.nn.Linear: uniform, also biases
            assert 0.9 * inputs**-0.5 < x.abs().max() <= inputs**-0.5 or x.numel() < 20, name
            assert x.abs().max() <= inputs**-0.5 and abs(x.std() * (3 * inputs) ** 0.5 - 1) < (0.05 if x.numel() > 1000 else 0.5), name


def test_mamba_starts_as_its_authors_let_it(tmp_path):
    run("new", "small", "linear_mamba", 3, tmp_path / "m", json.dumps({"num_hidden_layers": 1, "vocab_size": 9}))
    own = {k.split("mamba.")[1]: v for k, v in load_file(tmp_path / "m/model.safetensors").items() if "mamba." in k}
    steps, rates = torch.nn.functional.softplus(own["dt.bias"]), own["A_log"].exp()
    assert own["dt.bias"].shape == own["A_log"].shape == (16,) and own["conv.weight"].shape == (1024 + 128, 2)
    assert 0.001 <= steps.min() < 0.01 < steps.max() <= 0.1 and 1 <= rates.min() < 5 and 12 < rates.max() <= 16
    assert (own["D"] == 1).all() and (own["norm.weight"] == 1).all()
    assert 0.7 < own["conv.weight"].abs().max() <= 0.5**0.5 and 0.7 < own["conv.bias"].abs().max() <= 0.5**0.5


def test_the_loss_of_capped_logits_is_the_same_in_slices(tmp_path):
    """Logits of 131,072 words come in slices of 128 tokens."""
    config = transformers.Gemma3TextConfig(num_hidden_layers=1, head_dim=8, final_logit_softcapping=2.0, sliding_window=8,
                                           **{**SMALL, "vocab_size": 131072, "hidden_size": 16, "intermediate_size": 16})  # fmt: skip
    model = random_model(config)
    model.save_pretrained(tmp_path / "m")
    tokens = torch.randint(1, 131072, (2, 141))
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    run("loss", tmp_path / "m", tmp_path / "tokens.safetensors", tmp_path / "out.safetensors")
    ours = load_file(tmp_path / "out.safetensors")
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert abs(loss.item() - ours["loss"].item()) < 1e-4
    wanted = model.model.embed_tokens.weight.grad
    assert (ours["model.embed_tokens.weight"] - wanted).norm() < 1e-4 * wanted.norm()


def test_transformers_opens_a_new_model(tmp_path):
    for preset in ("tiny", "10m"):
        run("new", preset, "softmax", 5, tmp_path / preset)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / preset).eval()
        tokens = torch.randint(0, 256, (1, 40))
        with torch.no_grad():
            assert (logits_of(tmp_path / preset, tokens, tmp_path) - model(tokens).logits).abs().max() < 1e-4


def drawn(seed, name, shape):
    """Standard normal numbers, as docs/models.md describes: SplitMix64 keyed by seed and name, Box-Muller."""

    def mixed(x):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    golden, stream = np.uint64(0x9E3779B97F4A7C15), 0xCBF29CE484222325
    for byte in name.encode():
        stream = (stream ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        key = mixed(mixed(np.uint64(seed) + golden) + np.uint64(stream) * golden)
        bits = mixed(key + np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * golden)
    x, y = (bits >> np.uint64(11)).astype(float).reshape(-1, 2).T * 2.0**-53
    length = np.sqrt(-2 * np.log(1 - x))
    return torch.from_numpy(np.stack([length * np.cos(2 * np.pi * y), length * np.sin(2 * np.pi * y)], 1).reshape(shape))


def test_initial_weights_are_a_function_of_seed_and_name(tmp_path):
    run("new", "tiny", "gated", 11, tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    matrices = {name: x for name, x in tensors.items() if x.dim() == 2}
    assert len(matrices) == 2 * (7 + 2) + 2
    for name, x in matrices.items():
        assert (x.double() - 0.02 * drawn(11, name, x.shape)).abs().max() < 1e-8, name
        assert abs(x.mean()) < 4 * 0.02 / x.numel() ** 0.5 and abs(x.std() / 0.02 - 1) < 4 / (2 * x.numel()) ** 0.5, name
    for name, x in tensors.items():
        if x.dim() == 1:
            gain = 0 if name.endswith("bias") else 0.25 if "norm_weight" in name else 1
            assert (x == gain).all(), name


def test_damaged_folders_are_refused(tmp_path):
    random_model(CONFIGS["llama"]()).save_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())

    def error(**changes):
        changed = {k: v for k, v in {**config, **changes}.items() if v is not ...}
        (tmp_path / "m/config.json").write_text(json.dumps(changed))
        done = subprocess.run([TOOL, "copy", tmp_path / "m", tmp_path / "x"], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done
        return done.stderr

    assert "did you mean" in error(horner_variant="sofmax")
    assert "unknown model_type 'bert'; supported: 'llama'" in error(model_type="bert")
    assert """'num_key_value_heads' must be an integer, got "x\"""" in error(num_key_value_heads="x")
    assert "'head_dim' must be an integer, got 2.5" in error(head_dim=2.5)
    assert "'tie_word_embeddings' must be true or false, got 3" in error(tie_word_embeddings=3)
    assert "'num_attention_heads' must be a multiple of 'num_key_value_heads', got 4 and 3" in error(num_key_value_heads=3)
    assert "'hidden_size' must be 1 to 1099511627775, got 0" in error(hidden_size=0)
    assert "missing field 'hidden_size'" in error(model_type="olmo2", hidden_size=..., vocab_size=9)
    assert "'horner' in it, must be JSON objects" in error(horner=3)
    assert "q_proj" in error(num_attention_heads=8, head_dim=8)
    assert "layers.2" in error(num_hidden_layers=3)
    assert "vocab_size" in error(vocab_size="many")
    assert "embed_tokens" in error(vocab_size=100)
    assert "softcapping" in error(final_logit_softcapping=30.0)
    assert "'partial_rotary_factor' is not supported for model_type 'llama', got 0.5" in error(
        rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    assert "unknown rope_type 'longrope'; supported: 'default', 'linear' or 'llama3'" in error(
        model_type="phi3", rope_parameters={"rope_type": "longrope", "short_factor": [1.0]})
    assert "even number of the 8 channels of a head, got 3" in error(model_type="gpt_neox", layer_norm_eps=1e-5, rotary_pct=0.4)
    assert "'based' has a weight for each channel of a key ('query_projection')" in error(model_type="gpt_neox", horner_variant="based")
    assert "'no_rope_layers' must have an integer for each layer, got [1]" in error(model_type="smollm3", no_rope_layers=[1])
    (tmp_path / "m/config.json").write_text("{")
    assert "config.json' is not valid JSON" in subprocess.run([TOOL, "copy", tmp_path / "m", tmp_path / "x"], capture_output=True, text=True).stderr


@pytest.fixture(scope="module")
def gemma():
    if not os.path.exists(os.path.join(PRETRAINED, "config.json")):
        pytest.skip("no pretrained weights: make pretrained")
    return transformers.AutoModelForCausalLM.from_pretrained(PRETRAINED).eval()


def test_gemma_3_270m(gemma, tmp_path):
    tokens = torch.randint(0, 262144, (1, 64), generator=torch.Generator().manual_seed(2))
    tokens[0, 0] = 2
    with torch.no_grad():
        wanted = gemma(tokens).logits
    assert (logits_of(PRETRAINED, tokens, tmp_path) - wanted).abs().max() < 1e-3 * wanted.abs().max() / 10


def test_gemma_goes_on_with_the_same_tokens(gemma):
    prompt = "The history of mathematics begins"
    done = subprocess.run([HORNER, "generate", "--model", PRETRAINED, "--prompt", prompt, "--tokens", "24",
                           "--temperature", "0", "--json"], capture_output=True, text=True, check=True)
    words = transformers.AutoTokenizer.from_pretrained(PRETRAINED)
    tokens = torch.tensor([words(prompt).input_ids])
    assert tokens[0, 0] == 2
    with torch.no_grad():
        wanted = gemma.generate(tokens, max_new_tokens=24, min_new_tokens=24, do_sample=False)[0, tokens.shape[1]:]
    assert json.loads(done.stdout)["tokens"] == wanted.tolist()


POST = {
    "none": lambda: None,
    "byte_level": lambda: processors.ByteLevel(trim_offsets=False),
    "template": lambda: processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
    "sequence": lambda: processors.Sequence([POST["byte_level"](), POST["template"]()]),
    "bert": lambda: processors.BertProcessing(("</s>", 2), ("<s>", 1)),
    "roberta": lambda: processors.RobertaProcessing(("</s>", 2), ("<s>", 1), add_prefix_space=False),
}


def test_a_text_begins_as_the_tokenizer_of_the_folder_says(tmp_path):
    """config.json has a bos_token_id everywhere; only the post-processor of tokenizer.json adds the token."""
    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    config = transformers.LlamaConfig(num_hidden_layers=2, bos_token_id=1, eos_token_id=2, **{**SMALL, "vocab_size": len(names)})
    model = random_model(config)
    model.save_pretrained(tmp_path / "m")
    found = {}
    for post, add in itertools.product(POST, [None, True, False]):
        words = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
        words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        words.add_special_tokens(names[:3])
        if POST[post]():
            words.post_processor = POST[post]()
        words.save(str(tmp_path / "m/tokenizer.json"))
        settings = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add}
        (tmp_path / "m/tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
        prompt = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")("The others").input_ids
        if tuple(prompt) not in found:
            with torch.no_grad():
                text = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0]
            found[tuple(prompt)] = text[len(prompt):].tolist()
        done = subprocess.run([HORNER, "generate", "--model", tmp_path / "m", "--prompt", "The others", "--tokens", "8",
                               "--temperature", "0", "--json"], capture_output=True, text=True, check=True)  # fmt: skip
        ours = json.loads(done.stdout)
        assert (ours["prompt_tokens"], ours["tokens"]) == (len(prompt), found[tuple(prompt)]), (post, add)
    assert sorted(map(len, found)) == [10, 11, 12] and len(set(map(tuple, found.values()))) == 3
