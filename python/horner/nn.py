"""Modules around `horner.attend`: projections, gates, norms and whatever else a variant has weights for.

>>> block = horner.nn.TransformerBlock(256, 8, variant="gated_decay")
>>> y = block(torch.randn(2, 128, 256))

The names of a block's weights are those of a layer in a folder of `horner train`, without its prefix "model.layers.N.".
Which weights a variant has comes from the library's table of inputs, so every variant of `horner.attend` works here.
"""

import math
from typing import Optional

import torch
from torch import nn
from torch.nn import functional as F

import horner

from ._heads import all_heads, parts_of, some_heads, turn, variants_of, variants_of_layers  # noqa: F401

__all__ = ["Attention", "Own", "TransformerBlock", "variants_of_layers"]

_ROWS = torch.ops.horner.inputs()  # name, shape, role, meaning
_RAW_DECAY_TOKENS = 1024  # gated_decay@code divides its gates by this
_BUCKETS, _FARTHEST = 32, 128  # of a learned bias by distance, as in T5


def log_sigmoid(x):
    """In float32 at least. Contiguous: torch.compile expects other strides of torch's logsigmoid than it gives."""
    return F.logsigmoid((x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).contiguous())


def _own(dim, variant, short_conv, **sizes):
    """The weights of a variant, or None if it has none of its own. `short_conv`: None for what the variant says. Where the
    heads have several variants, those of each part under its number."""
    parts = parts_of(variant, sizes["heads"], sizes["kv_heads"])
    if parts is not None:
        each = {}
        for i, part in enumerate(parts.parts):
            each[str(i)] = _own(dim, part.variant, 0, **{**sizes, "heads": len(part.heads), "kv_heads": len(part.key_heads)})
        each = {i: own for i, own in each.items() if own is not None}
        return nn.ModuleDict(each) if each else None
    variant = variants_of(variant)[0]
    around = torch.ops.horner.around(variant)
    short_conv = around["short_conv"] if short_conv is None else short_conv
    wanted = _roles(variant) or around["mamba"] or short_conv
    return Own(dim, variant=variant, short_conv=short_conv, **sizes) if wanted else None


def _roles(variant):
    """The inputs of a variant that a layer makes, and their roles."""
    names, around = horner.describe(variant)["inputs"].split(), torch.ops.horner.around(variant)
    roles = {name: role for name, _, role, _ in _ROWS if name in names and role != "mask"}
    if around["raw_decay"]:
        roles["decay"] = "log_gate"
    if around["tied_keys"]:  # gates made of the keys
        roles.pop("channel_decay")
    for name in ("decay", "input_gate") if around["mamba"] else ():  # made of its steps
        roles.pop(name, None)
    return roles


class _Convolution(nn.Module):
    """silu of the sum over the last n tokens of weight_j * row, channel by channel; zeros before the first."""

    def __init__(self, channels, n, bias, **where):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, n, **where))
        self.bias = nn.Parameter(torch.empty(channels, **where)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        for x in self.parameters():
            if not getattr(x, "_is_hf_initialized", False):  # transformers marks what it has loaded
                x.uniform_(-(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)

    def forward(self, x, first=0, *, keep=None, places=None, past=None):
        """Of x [B, T, some channels from `first` on]. `keep` [B, T]: False where a token is padding and counts as zeros.
        `places` [B or 1, T]: those of the tokens in packed sequences. `past`: a dict that keeps the last rows of a stream."""
        weight, n = self.weight[first : first + x.shape[-1]].to(x.dtype), self.weight.shape[1]
        bias = None if self.bias is None else self.bias[first : first + x.shape[-1]].to(x.dtype)
        if keep is not None:
            x = x.masked_fill(~keep[..., None], 0)
        T, before = x.shape[1], None if past is None else past.get(("rows", first))
        rows = F.pad(x, (0, 0, n - 1, 0)) if before is None else torch.cat([before.to(x.dtype), x], 1)
        if past is not None:
            past["rows", first] = rows[:, T:].detach().clone()
        if places is None:
            return F.silu(F.conv1d(rows.mT, weight[:, None], bias, groups=len(weight)).mT)
        y = x * weight[:, n - 1]
        for j in range(1, n):  # tokens back
            y = y + (rows[:, n - 1 - j : n - 1 - j + T] * weight[:, n - 1 - j]).masked_fill((places < j)[..., None], 0)
        return F.silu(y if bias is None else y + bias)


class _Norm(nn.Module):
    def __init__(self, channels, **where):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, **where))

    def forward(self, x, eps):
        return F.rms_norm(x, x.shape[-1:], self.weight, eps)


class _Mamba(nn.Module):
    """The inside of a Mamba-2 block (arXiv 2405.21060), without its output projection."""

    def __init__(self, dim, heads, head_dim, short_conv, **where):
        super().__init__()
        self.heads, self.head_dim, inner = heads, head_dim, heads * head_dim
        for name, channels in (("z", inner), ("x", inner), ("B", head_dim), ("C", head_dim)):
            setattr(self, name, nn.Linear(dim, channels, bias=False, **where))
        self.dt = nn.Linear(dim, heads, **where)
        self.conv = _Convolution(inner + 2 * head_dim, short_conv, bias=True, **where)
        self.A_log = nn.Parameter(torch.empty(heads, **where))
        self.D = nn.Parameter(torch.empty(inner, **where))
        self.norm = _Norm(inner, **where)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        step = torch.empty_like(self.dt.bias).uniform_(math.log(0.001), math.log(0.1)).exp()
        for x, start in (
            (self.A_log, torch.empty_like(self.A_log).uniform_(1, 16).log()),
            (self.D, torch.ones_like(self.D)),
            (self.norm.weight, torch.ones_like(self.norm.weight)),
            (self.dt.bias, step + torch.log(-torch.expm1(-step))),  # softplus gives the step
        ):
            if not getattr(x, "_is_hf_initialized", False):
                x.copy_(start)

    def split(self, rows, **conv):
        """From rows [B, T, dim]: q, k and v [B, T, heads * head_dim], and the inputs of the operator that are made of the
        steps. `conv`: what the convolution takes."""
        H, D = self.heads, self.head_dim
        u, B, C = self.conv(torch.cat([self.x(rows), self.B(rows), self.C(rows)], -1), **conv).split([H * D, D, D], -1)
        dt = F.softplus(self.dt(rows).to(self.dt.bias.dtype)).transpose(1, 2)  # [B, H, T]
        q, k = (y[..., None, :].expand(-1, -1, H, -1).flatten(2) for y in (C, B))  # shared by the heads
        return q, k, u, {"decay": -self.A_log.exp()[:, None] * dt, "input_gate": dt}

    def joined(self, y, u, rows):
        """What goes to the output projection: from the result y of the operator and its values u, [B, T, channels]."""
        return self.norm((y + self.D * u) * F.silu(self.z(rows)), 1e-5)


class Own(nn.Module):
    """The weights that a variant has besides q, k, v and o: linear maps of the token for its gates, its learned numbers,
    a bias by distance, a short convolution or the inside of a Mamba-2 block. `own(x)` gives the inputs of `horner.attend`.
    `given`: names of inputs that it does not make."""

    def __init__(self, dim, heads, *, variant, kv_heads, head_dim, short_conv, given=(), device=None, dtype=None):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.around = around = torch.ops.horner.around(variant)
        groups = heads if around["mamba"] else kv_heads
        sizes = {"H": heads, "G": groups, "D": head_dim, "E": head_dim, "F": around["features"], "3": 3}
        self.roles = {name: role for name, role in _roles(variant).items() if name not in given}
        if around["mamba"]:
            self.mamba = _Mamba(dim, heads, head_dim, short_conv, **where)
        elif short_conv:
            self.short_conv = _Convolution((heads + 2 * kv_heads) * head_dim, short_conv, bias=False, **where)
        self.unit = head_dim**-0.5
        self.channels = {}  # of each gate: 0 for one number of each head
        for name, shape, role, _ in _ROWS:
            if name not in self.roles:
                continue
            if role == "parameter":
                self.register_parameter(name, nn.Parameter(torch.empty([sizes[x] for x in shape], **where)))
            elif role == "constant":
                self.register_buffer(name, torch.empty([sizes[x] for x in shape], **where))
            elif role == "score":
                self.register_parameter(name, nn.Parameter(torch.empty([heads, _BUCKETS], **where)))
            else:
                self.channels[name] = head_dim if len(shape) == 4 or (shape == "BHT" and around["channel_gates"]) else 0
                self.add_module(name, nn.Linear(dim, sizes[shape[1]] * max(1, self.channels[name]), **where))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """The values with which the numbers of a variant begin (docs/models.md); its linear maps have their own."""
        for name, x in (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)):
            if not getattr(x, "_is_hf_initialized", False):  # transformers marks what it has loaded
                x.copy_(_started(name, x, self.unit, self.around["alibi"]))

    def _logits(self, name, x):
        """[B, heads, T] or [B, heads, T, channels], in float32 at least: logarithms in bfloat16 are too coarse to sum."""
        y = getattr(self, name)(x)
        if self.channels[name]:
            y = y.unflatten(-1, (-1, self.channels[name]))
        y = y.transpose(1, 2)
        return y.float() if y.dtype in (torch.bfloat16, torch.float16) else y

    def relative_bias(self, queries, keys, two_way, place=None):
        """[1, H, T, S], from the distance of each pair; the last query stands at the last key, or at `place` (one query)."""
        if place is not None:
            return self.bias[:, _bucket(torch.arange(keys, device=self.bias.device) - place, two_way)][None, :, None]
        ahead = torch.arange(1 - keys, queries, device=self.bias.device)  # of the first key to the last query, and so on
        return self.bias[:, _bucket(ahead, two_way)].unfold(1, keys, 1).flip(1)[None]

    def forward(self, x: torch.Tensor, past: Optional[dict] = None) -> dict[str, torch.Tensor]:
        """`past`: a dict that keeps what a stream of tokens has summed up."""
        out = {}
        for name, role in self.roles.items():
            if role == "score":
                continue
            if role in ("parameter", "constant"):
                out[name] = getattr(self, name)
                continue
            y = self._logits(name, x)
            if role == "log_gate":
                y = y if self.around["raw_decay"] else log_sigmoid(y) / self.around["gate_root"]
            elif role == "gate":
                if self.around["exp_gate"] and name == "output_gate":
                    y = (-y).exp()
                else:
                    y = F.silu(y) if self.around["silu_gate"] and name == "post_gate" else y.sigmoid()
            out[name] = y
        if self.around["raw_decay"]:
            _spread_raw_decay(out, past)
        return out


def _bucket(ahead, two_way):
    """The bucket of a key that is so many tokens ahead of its query. Half of the buckets hold one distance each, the other
    half distances up to 128, on a scale of logarithms; the last one holds what is farther. With `two_way`, keys ahead have
    the second half of all; otherwise they count as the query's own."""
    n = _BUCKETS // 2 if two_way else _BUCKETS
    distance = ahead.abs() if two_way else (-ahead).clamp(min=0)
    far = (distance.clamp(min=1) / (n // 2)).log() * ((n - n // 2) / math.log(_FARTHEST / (n // 2)))
    bucket = torch.where(distance < n // 2, distance, (n // 2 + far.long()).clamp(max=n - 1))
    return bucket + n * (ahead > 0) if two_way else bucket


def sees_ahead(variant):
    """Whether a query may see keys after its own."""
    spec = horner.describe(variant)["spec"]
    return any(word in spec for word in ("mask=full", "mask=prefix", "ahead="))


def with_stage(variant, stage):
    return f"{variant}{',' if ':' in variant else ':'}{stage}"


def _started(name, x, unit, alibi):
    if name == "slope" and alibi:  # ALiBi: 2^(-8 / heads) to the power of the head, from 1
        return torch.exp2(-8.0 * (1 + torch.arange(len(x), device=x.device)) / len(x))
    if name == "slope":  # RetNet: head h keeps 1 - 2^(-5 - h) of a weight per token of distance
        return -torch.log1p(-torch.exp2(-5.0 - torch.arange(len(x), device=x.device)))
    if x.dim() == 3:  # projections
        return torch.randn_like(x) * unit
    return torch.full_like(x, {"norm_bias": 0.0, "sink": 0.0, "bias": 0.0, "norm_weight": unit, "count_exponent": 0.5, "near_share": math.log(0.1 / 0.9)}.get(name, 1.0))


def _spread_raw_decay(inputs, past):
    """e^(c_t - c_s), c_t the sum of logits / 1024 over the tokens before t, as a factor of the output gate and one of the
    input gate: it may grow, which executions do not expect of a decay."""
    each = inputs.pop("decay").double() / _RAW_DECAY_TOKENS
    sums = each.cumsum(-1)
    if past is not None:
        sums = sums + past.get("sums", 0)
        past["sums"] = sums[..., -1:].detach().clone()
    sums = sums - each
    groups = inputs["output_gate"].shape[1] // sums.shape[1]
    inputs["input_gate"] = inputs["input_gate"] * (-sums).exp().to(inputs["input_gate"].dtype)
    inputs["output_gate"] = inputs["output_gate"] * sums.repeat_interleave(groups, 1).exp().to(inputs["output_gate"].dtype)


def _places(T, cu_seqlens, device):
    """The positions of the tokens, which begin again at each packed sequence."""
    places = torch.arange(T, device=device)
    if cu_seqlens is None:
        return places
    return places - cu_seqlens[torch.searchsorted(cu_seqlens, places.to(cu_seqlens.dtype), right=True) - 1]


def _rotated(x, places, theta):
    """Rotary positions (arXiv 2104.09864) of [B, heads, T, D], halves as in Llama; the angles in float32 or wider."""
    D = x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    angle = places.to(wide)[:, None] * theta ** (-torch.arange(0, D, 2, device=x.device, dtype=wide) / D)
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


class Attention(nn.Module):
    """[B, T, dim] -> [B, T, dim]: projections, rotary positions, the variant's own weights, `horner.attend`, o_proj.

    `kv_heads` divides `heads`; `head_dim` is dim / heads; `rope_theta=None` leaves out positions. `short_conv`: tokens of
    a convolution of q, k and v (default: what the variant says). `variant`, `mask` and `execution` are those of `attend`, `dropout`
    is its `dropout_p` in training. The heads may have several variants, "softmax^2|l2": then rotary positions apply to all of
    them, and no convolution.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        variant: str = "softmax",
        kv_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        bias: bool = False,
        rope_theta: Optional[float] = 10000.0,
        short_conv: Optional[int] = None,
        mask: Optional[str] = None,
        execution: str = "auto",
        dropout: float = 0.0,
        device=None,
        dtype=None,
        own: bool = True,
    ):
        super().__init__()
        sizes = {"dim": dim, "heads": heads, "kv_heads": heads if kv_heads is None else kv_heads}
        dim, heads, kv_heads = (horner._size(name, n) for name, n in sizes.items())
        head_dim = head_dim if head_dim is None else horner._size("head_dim", head_dim)
        horner._text("variant", variant), horner._execution(execution)
        if not isinstance(mask, (str, type(None))):
            raise TypeError(f"mask must be the name of a mask, got {type(mask).__name__}; forward takes keep and bias, horner.attend any mask")
        dropout, rope_theta = horner._number("dropout", dropout, optional=False), horner._number("rope_theta", rope_theta)
        if head_dim is None and dim % heads:
            raise ValueError(f"dim must be a multiple of heads, or head_dim given; got {dim} and {heads}")
        if heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        head_dim = head_dim or dim // heads
        self.parts, names = parts_of(variant, heads, kv_heads), variants_of(variant)
        if short_conv is not None and short_conv != 0:
            short_conv = horner._size("short_conv", short_conv)
        if self.parts is not None and short_conv:
            raise ValueError(f"the heads of {variant!r} have several variants, which share q, k and v: short_conv must be None or 0, got {short_conv}")
        variant = names[0] if self.parts is None else variant
        around = torch.ops.horner.around("softmax" if self.parts is not None else variant)
        if rope_theta is not None and around["rope"] and head_dim % 2 and not around["mamba"]:
            raise ValueError(f"rotary positions require an even head_dim, got {head_dim}; rope_theta=None leaves them out")
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.rope_theta = rope_theta if around["rope"] else None
        self.mask, self.execution, self.dropout, self.mamba = mask, execution, dropout, bool(around["mamba"])
        self.tied_keys = bool(around["tied_keys"])
        self.variant = with_stage(variant, "decay=none") if around["raw_decay"] else variant
        run = [self.variant] if self.parts is None else names
        masked = [name if mask is None else with_stage(name, f"mask={mask}") for name in names]
        takes = [horner.describe(name)["inputs"].split() for name in masked]
        for name in masked if dropout != 0 else ():
            horner.describe(with_stage(name, f"dropout={dropout!r}"))  # raises its errors now
        self.operators = list(zip(run, takes, map(sees_ahead, masked)))
        where = {"device": device, "dtype": dtype}
        if not self.mamba:
            self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias, **where)
            self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=bias, **where)
            self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=bias, **where)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=bias, **where)
        if own:
            self.horner = _own(dim, variant, short_conv, heads=heads, kv_heads=kv_heads, head_dim=head_dim, **where)

    def extra_repr(self) -> str:
        return f"variant={self.variant!r}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"

    def forward(
        self,
        x: torch.Tensor,
        *,
        keep: Optional[torch.Tensor] = None,
        cu_seqlens: Optional[torch.Tensor] = None,
        bias: Optional[torch.Tensor] = None,
        prefix: Optional[torch.Tensor] = None,
        own: Optional[Own] = None,
    ) -> torch.Tensor:
        """`keep`, `cu_seqlens`, `bias` and `prefix` as in `attend`; a variant that requires them has a learned bias by distance
        and no prefix where they are not given. `own`: the variant's weights where a block holds them."""
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[2] != self.dim:
            got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"x must be a tensor [B, T, {self.dim}], got {got}")
        masks = {"keep": keep, "cu_seqlens": cu_seqlens, "bias": bias, "prefix": prefix}
        masks = {name: m for name, m in masks.items() if m is not None}
        horner._check_tensors(x, x, x, masks)
        if keep is not None and (keep.dtype != torch.bool or keep.shape != x.shape[:2]):
            got = f"{list(keep.shape)} {keep.dtype}"
            raise ValueError(f"keep must be a tensor {list(x.shape[:2])} of torch.bool, False where a token is padding, got {got}")
        if cu_seqlens is not None and (cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2):
            got = f"{list(cu_seqlens.shape)} {cu_seqlens.dtype}"
            raise ValueError(f"cu_seqlens must be a tensor [n] of int32 or int64, 0 and the end of each sequence, got {got}")
        own = getattr(self, "horner", None) if own is None else own
        T = x.shape[1]
        places = None if cu_seqlens is None else _places(T, cu_seqlens, x.device)[None]
        if self.mamba:
            q, k, v, steps = own.mamba.split(x, keep=keep, places=places)
            y = self._operate(0, own, x, *(self._heads(z) for z in (q, k, v)), {**steps, **masks})
            return self.o_proj(own.mamba.joined(_channels(y), v, x))
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        rows = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        if own is not None and hasattr(own, "short_conv"):
            rows = own.short_conv(rows, keep=keep, places=places)
        q, k, v = (self._heads(y) for y in rows.split(sizes, -1))
        if self.rope_theta is not None:
            places = _places(T, cu_seqlens, x.device)
            q, k = (_rotated(y, places, self.rope_theta) for y in (q, k))
        if self.parts is None:
            return self.o_proj(_channels(self._operate(0, own, x, q, k, v, masks)))
        results = []
        for i, part in enumerate(self.parts.parts):
            of_part = own[str(i)] if own is not None and str(i) in own else None
            if bias is not None and bias.dim() == 4 and bias.shape[1] == self.heads:
                masks["bias"] = some_heads(bias, part.heads)
            heads = some_heads(q, part.heads), some_heads(k, part.key_heads), some_heads(v, part.key_heads)
            results.append(self._operate(i, of_part, x, *heads, masks))
        return self.o_proj(_channels(all_heads(self.parts.groups, results)))

    def _heads(self, rows):
        return rows.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _operate(self, i, own, x, q, k, v, given):
        """The operator of all heads, or of a part of them: [B, heads, T, head_dim]."""
        variant, takes, two_way = self.operators[i]
        of_others = {name for _, names, _ in self.operators for name in names} - set(takes)
        given = {name: y for name, y in given.items() if name not in of_others}
        inputs = {**(own(x) if own is not None else {}), **given}
        if "bias" not in inputs and own is not None and "bias" in own.roles:
            inputs["bias"] = own.relative_bias(x.shape[1], x.shape[1], two_way)
        if "prefix" not in inputs and "prefix" in takes:
            inputs["prefix"] = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        if self.tied_keys:  # HGRN2: the keys are what their channels' gates let in
            inputs["channel_decay"] = log_sigmoid(k)
            q, k = F.silu(q), (-k).sigmoid()
        p = self.dropout if self.training else 0.0
        return horner.attend(q, k, v, variant=variant, mask=self.mask, execution=self.execution, dropout_p=p, **inputs)


def _channels(heads):
    """[B, heads, T, channels] -> [B, T, heads * channels]"""
    return heads.transpose(1, 2).flatten(2)


class _Mlp(nn.Module):
    def __init__(self, dim, hidden, bias, **where):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=bias, **where)
        self.up_proj = nn.Linear(dim, hidden, bias=bias, **where)
        self.down_proj = nn.Linear(hidden, dim, bias=bias, **where)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TransformerBlock(nn.Module):
    """A layer of Llama with any variant: x + attention(norm(x)), then x + mlp(norm(x)), with RMSNorm and SwiGLU.

    `hidden` is 8/3 dim, rounded up to a multiple of 64; the rest goes to `Attention`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        hidden: Optional[int] = None,
        eps: float = 1e-5,
        variant: str = "softmax",
        kv_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        bias: bool = False,
        rope_theta: Optional[float] = 10000.0,
        short_conv: Optional[int] = None,
        mask: Optional[str] = None,
        execution: str = "auto",
        dropout: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        dim, eps = horner._size("dim", dim), horner._number("eps", eps, optional=False)
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps must be a number from 0 on, got {eps}")
        hidden = -(-8 * dim // 3 // 64) * 64 if hidden is None else horner._size("hidden", hidden)
        self.input_layernorm = nn.RMSNorm(dim, eps=eps, **where)
        self.self_attn = a = Attention(
            dim, heads, variant=variant, kv_heads=kv_heads, head_dim=head_dim, bias=bias, rope_theta=rope_theta,
            short_conv=short_conv, mask=mask, execution=execution, dropout=dropout, own=False, **where,
        )  # fmt: skip
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=eps, **where)
        self.mlp = _Mlp(dim, hidden, bias, **where)
        self.horner = _own(dim, variant, short_conv, heads=heads, kv_heads=a.kv_heads, head_dim=a.head_dim, **where)

    def forward(
        self,
        x: torch.Tensor,
        *,
        keep: Optional[torch.Tensor] = None,
        cu_seqlens: Optional[torch.Tensor] = None,
        bias: Optional[torch.Tensor] = None,
        prefix: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """The keywords are those of `Attention.forward`."""
        masks = {"keep": keep, "cu_seqlens": cu_seqlens, "bias": bias, "prefix": prefix}
        x = x + self.self_attn(self.input_layernorm(x), own=self.horner, **masks)
        return x + self.mlp(self.post_attention_layernorm(x))
