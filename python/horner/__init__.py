"""Attention operators as data: one algebra, every exact form.

>>> import torch, horner
>>> q, k, v = (torch.randn(1, 8, 128, 64) for _ in range(3))
>>> o = horner.attend(q, k, v, variant="taylor4")
>>> o = horner.attend(q, k, v, variant="softmax:norm=l2,denominator=nothing")  # composed on the spot

`horner.variants()` names the variants, `horner.describe(name)` says what one is.
"""

from pathlib import Path
from typing import Optional, Union

import torch

from ._torch import check as _check_torch

_library = Path(__file__).parent / "libhorner_python.so"
if not _library.exists():
    raise ImportError(f"{_library} is missing: build horner first (make build, or pip install .)")
_check_torch(torch.__version__)
torch.ops.load_library(_library)
_ops = torch.ops.horner

__all__ = ["State", "attend", "describe", "executions", "statistics", "variants", "why_not"]

_STAGE_INPUTS = (
    "decay", "input_gate", "denominator_gate", "output_gate", "post_gate", "length_scale", "log_power",
    "count_exponent", "norm_weight", "norm_bias", "query_projection", "key_projection", "keep", "cu_seqlens",
)  # fmt: skip


def _spelled(variant, mask, scale, temperature, clamp):
    """The variant with the stages that keywords change, as text."""
    changes = [
        f"{stage}={value}"
        for stage, value in (
            ("mask", mask),
            ("scale", None if scale is None else f"fixed({float(scale)!r})"),
            ("temperature", None if temperature is None else repr(float(temperature))),
            ("clamp", None if clamp is None else repr(float(clamp))),
        )
        if value is not None
    ]
    if not changes:
        return variant
    return variant + ("," if ":" in variant else ":") + ",".join(changes)


def _arguments(q, k, v, variant, execution, mask, scale, temperature, clamp, stages):
    unknown = set(stages) - set(_STAGE_INPUTS)
    if unknown:
        raise TypeError(f"no input {sorted(unknown)[0]!r}; possible: {', '.join(_STAGE_INPUTS)}")
    inputs = [stages.get(name) for name in _STAGE_INPUTS]
    return (q, k, v, *inputs, _spelled(variant, mask, scale, temperature, clamp), execution)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    variant: str = "softmax",
    execution: str = "auto",
    mask: Optional[str] = None,
    scale: Optional[float] = None,
    temperature: Optional[float] = None,
    clamp: Optional[float] = None,
    **stages: Optional[torch.Tensor],
) -> torch.Tensor:
    """Attention of queries to keys, with gradients.

        x_ts = min(clamp, scale_t * f(q_t).f(k_s) - centre_t)
        N_t  = sum over the keys s that t sees of  w(x_ts) * decay_ts * in_s * v_s
        W_t  = sum over the keys s that t sees of  w(x_ts) * decay_ts
        o_t  = post_t * norm(out_t * N_t / Z_t),   Z_t = denominator(W_t, ...)

    q is [B, H, T, D], k is [B, G, S, D], v is [B, G, S, E]; H is a multiple of G. Returns [B, H, T, E].
    Where S > T, the last query stands at the last key.

    variant      a name of `variants()`, and after a colon stages to change: "taylor4:norm=l2"
    execution    "auto" or a name of `executions()`
    mask         "causal", "full" or "window(128)"; the variant's own when None
    scale        what multiplies q.k instead of the variant's scale (most have 1/sqrt(D))
    temperature  what divides the scale
    clamp        the largest score
    **stages     what the variant's stages take (`describe(variant)["inputs"]`): decay, input_gate,
                 denominator_gate [B, G, S]; output_gate, post_gate [B, H, T]; length_scale, count_exponent
                 [H]; log_power [H, 3]; norm_weight, norm_bias [E]; query_projection [H, D, F];
                 key_projection [G, D, F]. And for every variant: keep [B, S] (bool, False hides a key),
                 cu_seqlens [n + 1] (int: where packed sequences begin, and the end).
    """
    return _ops.attend(*_arguments(q, k, v, variant, execution, mask, scale, temperature, clamp, stages))


def statistics(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    variant: str = "softmax",
    execution: str = "auto",
    mask: Optional[str] = None,
    scale: Optional[float] = None,
    temperature: Optional[float] = None,
    clamp: Optional[float] = None,
    **stages: Optional[torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What `attend` gives, and what each row says of its weights, from the same pass: [B, H, T] each.

    With a_s = |weight of key s| and A their sum over the keys that the row sees:
    entropy -sum a/A log(a/A), largest a/A, first: a/A of the first key, negative: the share of negative weights.
    """
    out, *rows = _ops.statistics(*_arguments(q, k, v, variant, execution, mask, scale, temperature, clamp, stages))
    return out, dict(zip(("entropy", "largest", "first", "negative"), rows))


def why_not(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    execution: str,
    variant: str = "softmax",
    mask: Optional[str] = None,
    scale: Optional[float] = None,
    temperature: Optional[float] = None,
    clamp: Optional[float] = None,
    **stages: Optional[torch.Tensor],
) -> str:
    """Why an execution cannot run these inputs; "" when it can."""
    return _ops.why_not(*_arguments(q, k, v, variant, execution, mask, scale, temperature, clamp, stages))


class State:
    """A stream of tokens: what they left behind, of fixed size where the variant's weight has a finite state.

        S_t = g_t S_(t-1) + phi(k_t) v_t^T,   N_t = phi(q_t) S_t

    >>> state = horner.State("taylor2", batch=1, heads=8, dim=16)
    >>> o = state.step(q, k, v)        # a prompt: as `attend` of it
    >>> o = state.step(q1, k1, v1)     # one token more: as `attend` of all so far, the last row

    heads are those of k and v. Without a finite state (`describe(variant)["no_state"]` says why) all keys and
    values are held, or those in the window; on a GPU above order 3 too. Without gradients.
    """

    def __init__(self, variant: str = "softmax", *, batch: int, heads: int, dim: int, value_dim: Optional[int] = None,
                 dtype: torch.dtype = torch.float32, device: Union[torch.device, str] = "cpu", mask: Optional[str] = None,
                 scale: Optional[float] = None, temperature: Optional[float] = None, clamp: Optional[float] = None):  # fmt: skip
        text = _spelled(variant, mask, scale, temperature, clamp)
        device = torch.empty(0, device=device).device  # "cuda" is one of them
        self._state = torch.classes.horner.State(text, [batch, heads, dim, value_dim or dim], dtype, device)

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **stages: Optional[torch.Tensor]) -> torch.Tensor:
        """Takes in T tokens and gives their results [B, H, T, E]."""
        *inputs, _, _ = _arguments(q, k, v, "", "", None, None, None, None, stages)
        return self._state.step(inputs)

    def select(self, rows: torch.Tensor) -> "State":
        """A copy that has these rows of the batch, in this order."""
        copy = object.__new__(State)
        copy._state = self._state.select(rows)
        return copy

    @property
    def tokens(self) -> int:
        """How many were taken in."""
        return self._state.tokens()

    @property
    def bytes(self) -> int:
        """That it holds now."""
        return self._state.bytes()


def variants() -> list[str]:
    """The names of the attention variants. Families go on: any order n of "taylor<n>" is one."""
    return _ops.variants()


def executions() -> list[str]:
    """The names of the executions, best first."""
    return _ops.executions()


def describe(variant: str) -> dict[str, str]:
    """What a variant is: its name, about, source, spec, notes, the inputs that it takes, and why there is no_state of
    fixed size ("" where there is one)."""
    return dict(_ops.describe(variant))
