"""Attention operators as data: one algebra, every exact form.

>>> import torch, horner
>>> q, k, v = (torch.randn(1, 8, 128, 64) for _ in range(3))
>>> o = horner.attend(q, k, v, variant="taylor4")
>>> o = horner.attend(q, k, v, variant="softmax:norm=l2,denominator=nothing")  # composed on the spot

`horner.variants()` lists the variants, `horner.describe(name)` describes one.
"""

import inspect
import math
from pathlib import Path
from typing import Callable, Optional, TypedDict, TypeVar, Union

import torch
from typing_extensions import Unpack  # torch requires it

from ._checks import kind as _kind, number as _number, seed as _seed, shape_text as _shape_text, size as _size, text as _text
from ._torch import check as _check_torch

_library = Path(__file__).parent / "libhorner_python.so"
if not _library.exists():
    raise ImportError(f"{_library} is missing: build horner first (make build, or pip install .)")
_check_torch(torch.__version__)
torch.ops.load_library(_library)
from . import _masks, _transforms  # noqa: E402  (need the operators)

_ops = torch.ops.horner
_attend_quick = _ops.attend_quick.default._op  # without a frame of its own
_Tensor, _strided, _is_compiling = torch.Tensor, torch.strided, torch.compiler.is_compiling
_attend, _attend_rows, _why_not = _ops.attend.default, _ops.attend_rows.default, _ops.why_not.default

__version__: str = _ops.version()
__all__ = ["State", "attend", "describe", "executions", "statistics", "variants", "weights", "why_not"]

# The inputs besides q, k and v. The library declares them (src/attn/inputs.cpp): name, shape, role, meaning.
_ROWS = [row for row in _ops.inputs() if row[2] != "tensor"]
_INPUTS = dict.fromkeys(row[0] for row in _ROWS)

_Function = TypeVar("_Function", bound=Callable)


class Inputs(TypedDict, total=False):
    """The same for editors and type checkers, which read the source."""

    decay: Optional[torch.Tensor]
    slope: Optional[torch.Tensor]
    channel_decay: Optional[torch.Tensor]
    input_gate: Optional[torch.Tensor]
    beta: Optional[torch.Tensor]
    denominator_gate: Optional[torch.Tensor]
    sink: Optional[torch.Tensor]
    output_gate: Optional[torch.Tensor]
    post_gate: Optional[torch.Tensor]
    length_scale: Optional[torch.Tensor]
    log_power: Optional[torch.Tensor]
    count_exponent: Optional[torch.Tensor]
    near_share: Optional[torch.Tensor]
    norm_weight: Optional[torch.Tensor]
    norm_bias: Optional[torch.Tensor]
    query_projection: Optional[torch.Tensor]
    key_projection: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]
    prefix: Optional[torch.Tensor]
    keep: Optional[torch.Tensor]
    cu_seqlens: Optional[torch.Tensor]
    cu_seqlens_k: Optional[torch.Tensor]
    seed: Union[int, torch.Tensor, None]


def _with_inputs(function: _Function) -> _Function:
    """Names the library's inputs in the function's signature, and in its documentation where that says {inputs}."""
    signature = inspect.signature(function)
    kind, tensor = inspect.Parameter.KEYWORD_ONLY, Optional[torch.Tensor]
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += [inspect.Parameter(name, kind, default=None, annotation=Inputs.__annotations__.get(name, tensor)) for name in _INPUTS]
    function.__signature__ = signature.replace(parameters=parameters)
    if function.__doc__:  # python -OO has none
        rows = [f"    {name:18}{_shape_text(shape):14} {about}" for name, shape, _, about in _ROWS]
        function.__doc__ = function.__doc__.replace("    {inputs}", "\n".join(rows))
    return function


# Arguments of torch's attention that have other names here.
_OF_TORCH = {
    "attn_mask": "pass mask, a tensor of bool or of floats, or the name of a mask",
    "is_causal": "pass mask='causal' or mask='full'; most variants are causal",
    "enable_gqa": "leave it out, k and v may have fewer heads than q",
}


def _check_tensors(q, k, v, inputs, **more):
    unknown = [name for name in inputs if name not in _INPUTS]
    if unknown:
        hint = f": {_OF_TORCH[unknown[0]]}" if unknown[0] in _OF_TORCH else ""
        raise TypeError(f"unknown input {unknown[0]!r}{hint}; possible: {', '.join(_INPUTS)}")
    for name, x in (("q", q), ("k", k), ("v", v), *inputs.items(), *more.items()):
        if x is None and name in _INPUTS:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {_kind(x)}")
        if x.is_nested or x.layout is not torch.strided:
            raise RuntimeError(f"{name} must be a dense tensor, got {'a nested one' if x.is_nested else x.layout}")


_MOST_WEIGHTS = 2**27
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _check_matrix(q, k):
    if q.dim() != 4 or k.dim() != 4:
        return  # which the library refuses
    shape = [*q.shape[:3], k.shape[2]]
    if math.prod(shape) > _MOST_WEIGHTS:
        raise RuntimeError(
            f"the weights {shape} would be more than {_MOST_WEIGHTS} numbers: take fewer tokens, or what `horner.statistics` "
            "says of each row"
        )


def _execution(name):
    possible = ["auto", *executions()]
    if _text("execution", name) not in possible:
        raise RuntimeError(f"no execution {name!r}; possible: {', '.join(map(repr, possible))}")
    return name


def _settings(variant, execution, mask, scale, temperature, clamp):
    return (
        _text("variant", variant),
        _text("execution", execution),
        None if mask is None else _text("mask", mask),
        _number("scale", scale),
        _number("temperature", temperature),
        _number("clamp", clamp),
    )


def _settings_of(q, k, v, inputs, variant, execution, mask, *numbers):
    """The settings and inputs of a call; a mask that is a tensor is one of the inputs."""
    if "seed" in inputs:
        inputs = {**inputs, "seed": _seed(inputs["seed"], getattr(q, "device", None))}
    dense = isinstance(mask, torch.Tensor)
    _check_tensors(q, k, v, inputs, **({"mask": mask} if dense else {}))
    if dense:
        variant, mask, inputs = _masks.as_bias(_text("variant", variant), mask, q, k, inputs)
    elif mask is not None and not isinstance(mask, str):
        raise TypeError(f"mask must be a str or a torch.Tensor, got {_kind(mask)}")
    return _settings(variant, execution, mask, *numbers), inputs


def _with_dropout(variant, p, q, inputs):
    """The variant with dropout, and the inputs with its seed: a tensor, a number, or drawn from torch's default generator."""
    p, device = _number("dropout_p", p, optional=False), getattr(q, "device", None)
    seed = _seed(inputs.get("seed"), device)
    if p == 0:
        return variant, {**inputs, "seed": seed if "dropout=" in variant else None} if "seed" in inputs else inputs
    if seed is None:
        seed = torch.randint(2**63 - 1, (1,), device=device)
    return f"{variant}{',' if ':' in variant else ':'}dropout={float(p)!r}", {**inputs, "seed": seed}


def _transformed():
    return not torch.compiler.is_compiling() and _transforms.active()


def _run(settings, q, k, v, inputs):
    if _transformed():
        return _transforms.attend(settings, q, k, v, inputs)
    return _attend(q, k, v, *settings, **inputs)


_AFTER_WEIGHTS = ("output_gate", "post_gate", "norm_weight", "norm_bias")  # the inputs that the matrix is without


@torch.compiler.assume_constant_result
def _before_norm(variant):
    return _ops.before_norm.default(variant)


def _weights(settings, q, k, inputs):
    """What the definition multiplies each value by before the output gate and the norm: its result for the values of an
    identity."""
    variant, _, *rest = settings
    inputs = {name: x for name, x in inputs.items() if name not in _AFTER_WEIGHTS}
    settings = (_before_norm(variant), "reference", *rest)
    if k.dim() != 4 or k.dtype not in _FLOATS:
        return _run(settings, q, k, k, inputs)  # whose errors come before those of the values
    n = k.shape[2]
    identity = k.new_ones(max(n, 1)).diag()[:n]
    return _run(settings, q, k, identity.expand(*k.shape[:2], *identity.shape), inputs)[..., :n]


def _with_rows(n, settings, q, k, v, inputs):
    if _transformed():
        return _transforms.attend_rows(n, settings, q, k, v, inputs)
    return _attend_rows(n, q, k, v, *settings, **inputs)


@_with_inputs
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    variant: str = "softmax",
    execution: str = "auto",
    mask: Union[str, torch.Tensor, None] = None,
    scale: Optional[float] = None,
    temperature: Optional[float] = None,
    clamp: Optional[float] = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_weights: bool = False,
    **inputs: Unpack[Inputs],
) -> Union[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Attention of queries to keys, differentiable.

        x_ts = min(clamp, softcap(scale_t * f(q_t).f(k_s)) + bias_ts - centre_t - log n_t)
        N_t  = sum over the keys s that t sees of  w(x_ts) * decay_ts * kept_ts * values(in_s * v_s)
        W_t  = sum over the keys s that t sees of  w(x_ts) * decay_ts
        o_t  = post_t * norm(out_t * N_t / Z_t),   Z_t = denominator(W_t, ...)

    n_t is the number of keys that t sees, kept_ts dropout; a variant has few of these stages.
    q is [B, H, T, D], k is [B, G, S, D], v is [B, G, S, E]; H is a multiple of G. Returns [B, H, T, E].
    If S > T, the last query has the position of the last key.

    variant           a name from `variants()`, and after a colon the stages to change, if any: "taylor4:norm=l2"
    execution         "auto" or a name from `executions()`
    mask              "causal", "full", "window(128)", "window(64,ahead=64)", "chunks(128)", "streaming(first=4,size=128)" or
                      "prefix"; None keeps the mask of the variant. Or a tensor that broadcasts to [B, H, T, S], as in torch's
                      attention, in place of the variant's mask: of bool, where True shows a key, or of floats, which are
                      added to the scores (and to `bias`); not of variants that count keys or weigh a score of -inf.
    scale             factor of q.k; None keeps the scale of the variant, in most 1/sqrt(D)
    temperature       divides the scale
    clamp             upper bound of the scores
    dropout_p         leaves each pair of a query and a key out of N with this probability and multiplies the others by
                      1/(1-dropout_p); for training. Which pairs, is a function of `seed` (an int, or a tensor) and their
                      places alone; without a seed, torch's default generator draws one.
    return_lse        returns (o, lse) with lse = log W [B, H, T] in float32 (float64 for float64), of variants whose
                      weight w is exp. It is without a gradient; a row that sees no key has -inf.
    return_weights    returns (o, weights) or (o, lse, weights): the matrix of `weights`, of small inputs, after dropout

    A variant requires the inputs that `describe(variant)["inputs"]` lists; every variant accepts keep and cu_seqlens.

    {inputs}
    """
    plain = type(dropout_p) is float and dropout_p == 0 and not (return_lse or return_weights)
    if plain and not inputs and mask is scale is temperature is clamp is None:
        if (
            type(q) is type(k) is type(v) is _Tensor
            and type(variant) is type(execution) is str
            and q.layout is k.layout is v.layout is _strided
            and not (q.is_nested or k.is_nested or v.is_nested)
            and variant.isprintable()
            and execution.isprintable()
            and not _is_compiling()
            and not _transforms.active()
        ):
            return _attend_quick(q, k, v, variant, execution)
    if not plain or "seed" in inputs:
        variant, inputs = _with_dropout(_text("variant", variant), dropout_p, q, inputs)
    settings, inputs = _settings_of(q, k, v, inputs, variant, execution, mask, scale, temperature, clamp)
    if return_weights:
        _check_matrix(q, k)
    if return_lse:
        out, rows = _with_rows(1, settings, q, k, v, inputs)
        more = (rows[0],)
    else:
        out, more = _run(settings, q, k, v, inputs), ()
    if return_weights:
        more = (*more, _weights(settings, q, k, inputs))
    return (out, *more) if more else out


@_with_inputs
def statistics(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    variant: str = "softmax",
    execution: str = "auto",
    mask: Union[str, torch.Tensor, None] = None,
    scale: Optional[float] = None,
    temperature: Optional[float] = None,
    clamp: Optional[float] = None,
    **inputs: Unpack[Inputs],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The result of `attend` and, from the same pass, statistics of the weights of each row: [B, H, T] each.

    Let a_s = |weight of key s| and A be the sum of a_s over the keys that the row sees. The statistics are
    entropy: -sum a/A log(a/A); largest: the largest a/A; first: a/A of the first key; negative: the sum of a/A over
    negative weights. The arguments are those of `attend`.
    """
    settings, inputs = _settings_of(q, k, v, inputs, variant, execution, mask, scale, temperature, clamp)
    out, rows = _with_rows(4, settings, q, k, v, inputs)
    return out, dict(zip(("entropy", "largest", "first", "negative"), rows.unbind(0)))


@_with_inputs
def weights(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    variant: str = "softmax",
    mask: Union[str, torch.Tensor, None] = None,
    scale: Optional[float] = None,
    temperature: Optional[float] = None,
    clamp: Optional[float] = None,
    **inputs: Unpack[Inputs],
) -> torch.Tensor:
    """The matrix [B, H, T, S] that multiplies the values, differentiable: for small inputs, since it is built whole.

    The result of `attend` is post_t * norm(out_t * (weights @ v)). The arguments are those of `attend`; the inputs of
    the output gate, the post gate and the norm may be left out. Under autocast the matrix has its dtype.
    """
    settings, inputs = _settings_of(q, k, k, inputs, variant, "reference", mask, scale, temperature, clamp)
    _check_matrix(q, k)
    return _weights(settings, q, k, inputs)


@_with_inputs
def why_not(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    execution: str,
    variant: str = "softmax",
    mask: Union[str, torch.Tensor, None] = None,
    scale: Optional[float] = None,
    temperature: Optional[float] = None,
    clamp: Optional[float] = None,
    **inputs: Unpack[Inputs],
) -> str:
    """Why an execution cannot run these inputs; "" if it can. The arguments are those of `attend`."""
    settings, inputs = _settings_of(q, k, v, inputs, variant, execution, mask, scale, temperature, clamp)
    _transforms.check_none("why_not", "call it outside")
    return _why_not(q, k, v, *settings, **inputs)


_NOT_A_STATE = "horner.State", "it changes in place. Call horner.attend there, or use a State of a larger batch instead of vmap"


class State:
    """What a stream of tokens leaves behind. Its size is fixed if the weight of the variant has a finite state.

        S_t = g_t S_(t-1) + phi(k_t) v_t^T,   N_t = phi(q_t) S_t

    >>> state = horner.State("taylor2", batch=1, heads=8, dim=16)
    >>> o = state.step(q, k, v)        # prefill: equal to `attend`
    >>> o = state.step(q1, k1, v1)     # the next token: equal to the last row of `attend` of all tokens

    `heads` are the heads of k and v. If there is no finite state (`describe(variant)["no_state"]` says why), or on a
    GPU above order 3, the state is a KV cache, limited to the window if the mask has one. There are no gradients.
    `copy.deepcopy`, `pickle`, `torch.save` and `torch.load` take a state as it is: what is decoded after is the same to the
    last bit.
    """

    def __init__(
        self,
        variant: str = "softmax",
        *,
        batch: int,
        heads: int,
        dim: int,
        value_dim: Optional[int] = None,
        dtype: torch.dtype = torch.float32,
        device: Union[torch.device, str] = "cpu",
        mask: Optional[str] = None,
        scale: Optional[float] = None,
        temperature: Optional[float] = None,
        clamp: Optional[float] = None,
    ):
        if not isinstance(device, (int, str, torch.device)):
            raise TypeError(f"device must be a str or a torch.device, got {_kind(device)}")
        try:
            device = torch.empty(0, device=device).device  # "cuda" becomes the current one, "cuda:0"
        except (AssertionError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            count = torch.cuda.device_count()
            raise RuntimeError(
                f"cannot use device {device!r}; possible: 'cpu'" + (f" and 'cuda:0' to 'cuda:{count - 1}'" if count else "")
            ) from error
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {_kind(dtype)}")
        sizes = {"batch": batch, "heads": heads, "dim": dim, "value_dim": dim if value_dim is None else value_dim}
        shape = [_size(name, n) for name, n in sizes.items()]
        variant, _, *settings = _settings(variant, "auto", mask, scale, temperature, clamp)
        _transforms.check_none(*_NOT_A_STATE)
        self._state = torch.classes.horner.State(variant, *settings, shape, dtype, device)

    @_with_inputs
    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **inputs: Unpack[Inputs]) -> torch.Tensor:
        """Adds T tokens and returns their results [B, H, T, E]. The inputs are those of `attend`."""
        _check_tensors(q, k, v, inputs)
        _transforms.check_none(*_NOT_A_STATE, q, k, v, *inputs.values())
        return self._state.step([q, k, v, *(inputs.get(name) for name in _INPUTS)])

    def select(self, rows: torch.Tensor) -> "State":
        """A copy with these rows of the batch, in this order."""
        if not isinstance(rows, torch.Tensor):
            raise TypeError(f"rows must be a torch.Tensor, got {_kind(rows)}")
        _transforms.check_none(*_NOT_A_STATE)
        copy = object.__new__(State)
        copy._state = self._state.select(rows)
        return copy

    @staticmethod
    def joined(states: list["State"]) -> "State":
        """A copy of all states of a list as one: their streams are the rows of its batch, in this order, and each goes on as it
        would alone. The streams may have different numbers of tokens, unless the mask counts from the first token
        ("chunks", "streaming"); `tokens` is then that of the longest."""
        for state in states:
            if not isinstance(state, State):
                raise TypeError(f"states must be a list of horner.State, got one of {_kind(state)}")
        _transforms.check_none(*_NOT_A_STATE)
        both = object.__new__(State)
        both._state = torch.classes.horner.State.joined([state._state for state in states])
        return both

    def merge(self, later: "State") -> None:
        """Appends the tokens that `later`, another state of the same variant and sizes, has seen: as if this one had stepped
        through them after its own. `later` stays as it is. The sums of both add, so the parts of a long text can be read
        apart. Refused for values that depend on the sums before them (the delta rule) or on their place in the stream."""
        if not isinstance(later, State):
            raise TypeError(f"later must be a horner.State, got {_kind(later)}")
        _transforms.check_none(*_NOT_A_STATE)
        self._state.merge(later._state)

    def __getstate__(self):
        return self._state.pickled()

    def __setstate__(self, parts):
        self._state = torch.classes.horner.State.unpickled(parts)

    @property
    def tokens(self) -> int:
        """The number of tokens so far."""
        return self._state.tokens()

    @property
    def bytes(self) -> int:
        """The memory in use now."""
        return self._state.bytes()


torch.serialization.add_safe_globals([State])  # for torch.load, whose default is weights_only=True


def variants() -> list[str]:
    """The names of the attention variants. Every other order of a family is a name too: "taylor<n>" for any n."""
    return _ops.variants()


def executions() -> list[str]:
    """The names of the executions, best first."""
    return _ops.executions()


def describe(variant: str) -> dict[str, str]:
    """A variant's name, about, source, spec, notes, the inputs that it requires, and no_state: why it has no state of
    fixed size ("" if it has one)."""
    return dict(_ops.describe(_text("variant", variant)))
