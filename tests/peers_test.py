"""Rows of the catalog against the plain code of flash-linear-attention, where that is installed: outputs and gradients.

    pip install --no-deps fla-core einops

Only its files `ops/*/naive.py` are read, one by one: the package itself imports Triton.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

import horner

B, H, T, D, E = 2, 3, 37, 16, 8


def naive(op, function):
    """A function of fla/ops/<op>/naive.py."""
    if importlib.util.find_spec("einops") is None:
        pytest.skip(f"{op}: einops is not installed")
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        pytest.skip(f"{op}: flash-linear-attention (fla-core) is not installed")
    path = Path(package.submodule_search_locations[0]) / "ops" / op / "naive.py"
    if not path.exists():
        pytest.skip(f"{op}: this version of flash-linear-attention has no {path.name} for it")
    spec = importlib.util.spec_from_file_location(f"fla_{op}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def turned(*tensors):
    """[B, H, T, ...] to [B, T, H, ...]"""
    return [x.transpose(1, 2) for x in tensors]


def unit(x):
    return torch.nn.functional.normalize(x, dim=-1)


# Each gets q, k, v and gates as horner.attend does, and gives [B, H, T, E].
def delta(q, k, v, beta):
    return naive("delta_rule", "delta_rule_recurrence")(unit(q), unit(k), v, beta)[0] * D**0.5


def gated_delta(q, k, v, beta, decay):
    f = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    return f(*turned(unit(q), unit(k), v, beta, decay), scale=1.0)[0].transpose(1, 2)


def kda(q, k, v, beta, channel_decay):
    f = naive("kda", "naive_recurrent_kda")
    return f(*turned(unit(q), unit(k), v, channel_decay, beta), scale=1.0)[0].transpose(1, 2)


def gla(q, k, v, channel_decay):
    return naive("gla", "naive_recurrent_gla")(*turned(q, k, v, channel_decay))[0].transpose(1, 2)


def hgrn2(q, k, v, channel_decay):
    return gla(q, k, v, channel_decay) * D**0.5


def linear_decay(q, k, v, decay):
    return naive("simple_gla", "naive_recurrent_simple_gla")(*turned(q, k, v, decay))[0].transpose(1, 2)


def forgetting(q, k, v, decay):
    return naive("forgetting_attn", "naive_forgetting_attn")(*turned(q, k, v, decay)).transpose(1, 2)


def stick_breaking(q, k, v):
    f = naive("stickbreaking_attn", "naive_stickbreaking_attn")
    return f(*turned(q, k, v), attend_current=True)[0].transpose(1, 2)


def sink(q, k, v, sink):
    return naive("attn", "naive_parallel_attn")(*turned(q, k, v), sink_bias=sink)[0].transpose(1, 2)


ROWS = {  # without the norms and gates that follow in a layer
    "delta:norm=none": delta,
    "gated_delta:norm=none,no_post_gate,no_channel_gates": gated_delta,
    "kda:norm=none,no_post_gate,no_channel_gates": kda,
    "gla:norm=none,no_post_gate,no_channel_gates": gla,
    "hgrn2:norm=none": hgrn2,
    "linear_decay:norm=none": linear_decay,
    "forgetting": forgetting,
    "stick_breaking": stick_breaking,
    "sink": sink,
}


@pytest.mark.parametrize("variant", ROWS)
def test_a_row_is_what_flash_linear_attention_computes(variant):
    theirs = ROWS[variant]
    torch.manual_seed(1)
    made = {
        "q": torch.randn(B, H, T, D),
        "k": torch.randn(B, H, T, D),
        "v": torch.randn(B, H, T, E),
        "beta": torch.rand(B, H, T),
        "decay": torch.nn.functional.logsigmoid(2 + torch.randn(B, H, T)),
        "channel_decay": torch.nn.functional.logsigmoid(2 + torch.randn(B, H, T, D)),
        "sink": torch.randn(H),
    }
    inputs = {name: made[name].requires_grad_() for name in theirs.__code__.co_varnames[: theirs.__code__.co_argcount]}
    right = theirs(**inputs)
    direction = torch.randn_like(right)
    wanted = torch.autograd.grad(right, list(inputs.values()), direction)
    for execution in ["reference", "auto"]:
        found = horner.attend(**inputs, variant=variant, execution=execution)
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
        for name, x, y in zip(inputs, torch.autograd.grad(found, list(inputs.values()), direction), wanted):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5 * float(y.abs().max()), msg=lambda m: f"d {name}: {m}")
