"""A mask as a tensor, for horner.attend: it becomes the stage `bias` of the scores, under the mask "full"."""

from typing import Optional, Union

import torch

from . import _transforms

_ops = torch.ops.horner
_known: dict[str, tuple[str, bool]] = {}


@torch.compiler.assume_constant_result
def _facts(variant):
    """Why the variant does not support a tensor as mask ("" if it does), and whether it has a bias of its own."""
    if variant not in _known:
        if len(_known) == 1000:
            _known.clear()
        _known[variant] = _ops.mask_as_bias(variant)
    return _known[variant]


def why_not(variant: str) -> str:
    """Why a variant does not support a tensor as mask; "" if it does."""
    return _facts(variant)[0]


def _shape(mask, full):
    """The shape of the mask with four axes; raises unless it broadcasts to [B, H, T, S]."""
    shape = (*(1,) * (4 - mask.dim()), *mask.shape)
    if not 0 < mask.dim() <= 4 or any(n != 1 and n != most for n, most in zip(shape, full)):
        raise RuntimeError(f"mask must broadcast to [B, H, T, S] = {list(full)}, got {list(mask.shape)}")
    return shape


def _fits(bias, full):
    """Whether the library accepts this bias; if not, its error says why."""
    if bias.dim() != 4 or not bias.is_floating_point():
        return False
    return bias.shape[0] in (1, full[0]) and bias.shape[1] in (1, full[1]) and tuple(bias.shape[2:]) == full[2:]


def _check_memory(name, x):
    """Raises if the storage of a tensor was freed, which torch's operators would read; the library checks its own inputs."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta or 0 in x.shape or _transforms.active():
        return
    last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
    if (last + 1) * x.itemsize > x.untyped_storage().nbytes():
        raise RuntimeError(f"{name} must be in memory, got a tensor whose storage was freed")


def as_bias(variant: str, mask: torch.Tensor, q, k, inputs) -> tuple[str, Optional[str], dict[str, Union[torch.Tensor, int, None]]]:
    """The variant, the text of the mask and the inputs that compute this mask."""
    if mask.dtype != torch.bool and mask.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise RuntimeError(
            "mask must have dtype bool, where True shows a key, or float64, float32, bfloat16 or float16, which is added to "
            f"the scores; got {str(mask.dtype).removeprefix('torch.')}"
        )
    reason, own = _facts(variant)
    if reason:
        raise RuntimeError(
            f"variant {variant!r} does not support a tensor as mask, which is added to the scores as 0 and -inf: {reason}. "
            "Pass the name of a mask, keep or cu_seqlens instead"
        )
    given = inputs.get("bias")
    if q is None or k is None:
        return variant, "full", inputs  # which the operator refuses
    full = (*q.shape[:3], *k.shape[2:3])
    if q.dim() != 4 or k.dim() != 4 or (given is not None) != own or own and not _fits(given, full):
        return variant, "full", inputs  # which the library refuses
    shape = _shape(mask, full)
    for name, x in (("mask", mask), ("bias", given)):
        if x is None:
            continue
        if x.device != q.device:
            raise RuntimeError(f"{name} must be on the same device as q ({q.device}), got {x.device}")
        if not torch.compiler.is_compiling():
            _check_memory(name, x)
    bias = mask
    if mask.dtype == torch.bool:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        bias = torch.zeros(mask.shape, dtype=wide, device=mask.device).masked_fill(~mask, -torch.inf)
    bias = bias.reshape(shape).expand(*shape[:2], *full[2:])
    if own:
        bias = bias + given
    return variant if own else f"{variant}{',' if ':' in variant else ':'}bias", "full", {**inputs, "bias": bias}
