"""What a query sees, for horner.hf: transformers asks for a mask [B, 1, T, S] and gets these few facts instead."""

import inspect
from typing import NamedTuple, Optional

import torch
from transformers import __version__ as _version
from transformers.masking_utils import sdpa_mask

import horner

if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError(f"horner.hf requires transformers 5, got {_version}: its masks lack the positions of the queries")


class Seen(NamedTuple):
    """Replaces a mask [B, 1, T, S]: the keys that a query sees are nearly always an interval."""

    causal: bool
    window: Optional[int] = None  # the last keys, its own among them; on either side of it if not causal
    keep: Optional[torch.Tensor] = None  # [B, S] bool: False hides a key
    cu_seqlens: Optional[torch.Tensor] = None  # where packed sequences begin in the B*T tokens, and their end
    length: Optional[int] = None  # how many keys hold tokens (static caches)
    place: Optional[torch.Tensor] = None  # of one query among the keys, where it is not the last (static caches)
    dense: Optional[torch.Tensor] = None  # a mask [B or 1, H or 1, T, S] after all, where its form is not known here

    # transformers treats masks as tensors and reads these

    @property
    def ndim(self):
        return 4

    def contiguous(self):
        return self


def _may_look():
    """Whether the values of a tensor can be read: not while a graph is being captured."""
    return not (torch.compiler.is_compiling() or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


_KNOWN_MASKS = {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask", "chunked_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
}  # fmt: skip


def _is_known(function, use_vmap):
    """Whether every part of a mask is known here. Closures cannot be read under torch.compile."""
    if torch.compiler.is_compiling():
        return not use_vmap and function.__name__ != "or_mask"
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        return all(_is_known(part, False) for part in inspect.getclosurevars(function).nonlocals["mask_functions"])
    if function.__qualname__ == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        return _is_known(inspect.getclosurevars(function).nonlocals["mask_function"], False)
    return function.__qualname__ in _KNOWN_MASKS


def _cu_seqlens(mask_function, batch, length, device):
    """Where packed sequences, or chunks, begin among the B*T tokens: at those that do not see the previous token. Empty
    sequences fill the rest, so that the number of sequences is known without reading the tensor."""
    b = torch.arange(batch, device=device)[:, None]
    t = torch.arange(length, device=device)[None, :]
    sees = mask_function(b, torch.zeros_like(b), t, (t - 1).clamp(min=0)).expand(batch, length) & (t > 0)
    if _may_look() and sees[:, 1:].all():
        return None
    place = torch.arange(batch * length, device=device)
    starts = torch.where(sees.reshape(-1), 0, place).cummax(0).values
    return torch.cat([starts, starts.new_full((1,), batch * length)])


def check_form(mask, axes):
    """Raises unless the mask that a model was called with is a tensor with so many axes."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != axes:
        what = f"of shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"that is a {type(mask).__name__}"
        raise NotImplementedError(
            f"attn_implementation='horner' does not support a mask {what}: pass [batch, tokens] for padding, or a tensor "
            "[batch, heads, queries, keys]"
        )


def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
         local_size=None, use_vmap=False, config=None, device="cpu", **kwargs):  # fmt: skip
    """transformers calls this once for each kind of layer, instead of building a mask [B, 1, T, S]."""
    if isinstance(attention_mask, Seen):
        return attention_mask
    chunk = getattr(config, "attention_chunk_size", None)
    chunked = chunk is not None and local_size == chunk
    causal = "allow_is_bidirectional_skip" not in kwargs  # only the bidirectional callers pass it

    def dense_mask():
        made = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
                         allow_is_causal_skip=False, use_vmap=use_vmap, device=device)  # fmt: skip
        return Seen(causal, dense=made)

    if attention_mask is not None:
        check_form(attention_mask, 2)
    if not _is_known(mask_function, use_vmap):
        return dense_mask()
    keep = None
    if attention_mask is not None:
        keep = attention_mask[:, kv_offset : kv_offset + kv_length]
        if keep.shape[1] == kv_length and _may_look() and keep.all():
            keep = None
    if q_length == 1 and (chunked or isinstance(q_offset, torch.Tensor)):
        return _one_query(batch_size, kv_length, q_offset, kv_offset, mask_function, keep, device, causal)
    length, keys = None, kv_length
    if causal and (end := int(q_offset) + q_length - kv_offset) < kv_length:
        length, keys, keep = end, end, None if keep is None or keep[:, :end].all() else keep[:, :end]
    elif keep is not None and keep.shape[1] < kv_length:
        keep = torch.nn.functional.pad(keep, (0, kv_length - keep.shape[1]))
    whole = q_length == keys and kv_offset == 0
    if chunked and not whole:
        return dense_mask()
    cu_seqlens = None
    if chunked or causal and attention_mask is None and whole and mask_function.__name__ == "and_mask":
        cu_seqlens = _cu_seqlens(mask_function, batch_size, q_length, device)
    return Seen(causal, None if chunked else local_size, keep, cu_seqlens, length)


def _one_query(batch, kv_length, q_offset, kv_offset, mask_function, keep, device, causal):
    """The slots of a cache that one token sees. Its position may be a tensor that cannot be read (static caches)."""
    b = torch.arange(batch, device=device)[:, None]
    s = torch.arange(kv_length, device=device)[None, :] + kv_offset
    place = torch.as_tensor(q_offset, device=device)
    sees = mask_function(b, torch.zeros_like(b), place, s).expand(batch, kv_length)
    if keep is not None:
        sees = sees & torch.nn.functional.pad(keep, (0, kv_length - keep.shape[1]))
    return Seen(False, None, sees, place=place - kv_offset if causal else None)


def within(variant, seen):
    """The keys that one query of a static cache sees under the mask of the variant too, [B, S]."""
    r, s = variant.reach, torch.arange(seen.keep.shape[1], device=seen.keep.device)
    if r.chunk:
        return seen.keep & (s // r.chunk == seen.place // r.chunk)
    return seen.keep if r.back is None else seen.keep & ((s > seen.place - r.back) | (s < r.first))


def _tensor(variant, seen, keys):
    """A mask that is a tensor, for `horner.attend`."""
    why_not = horner._masks.why_not(variant.run)
    if variant.mask != "causal":
        why_not = f"it has the mask {variant.mask} of its own"
    if why_not:
        raise NotImplementedError(
            f"variant {variant.text!r} does not support a mask [batch, heads, queries, keys], which this model or its caller gives: "
            f"{why_not}. Choose a variant such as softmax, or pass padding as [batch, tokens] and packed sequences as position_ids"
        )
    return seen.dense[..., :keys]


def mask_text(variant, seen, keys):
    """The mask of `horner.attend` for a variant in a layer that sees this; keys: how many there are, if that is known."""
    if seen.dense is not None:
        return _tensor(variant, seen, keys)
    without = seen.window is None or variant.whole or keys is not None and seen.window >= keys
    window = None if without else seen.window
    if seen.place is not None:  # `within` has its mask
        return "full"
    if variant.mask not in ("causal", "window", "prefix"):
        if window is not None or not seen.causal:
            what = "this attention is bidirectional" if not seen.causal else "this layer of the model has a window"
            raise NotImplementedError(f"variant {variant.text!r} has the mask {variant.mask}, but {what}")
        return variant.mask
    back, ahead = variant.reach.back, variant.reach.ahead
    if not seen.causal:
        if back is not None and not ahead:
            raise NotImplementedError(f"variant {variant.text!r} has a window, but this attention is bidirectional")
        if seen.window is not None:  # either side of its own
            back, ahead = min(back or seen.window + 1, seen.window + 1), min(ahead or seen.window, seen.window)
        return "full" if back is None else f"window({back},ahead={ahead})"
    if variant.mask == "prefix":
        if window is not None:
            raise NotImplementedError(f"variant {variant.text!r} has the mask prefix, but this layer of the model has a window")
        return "prefix"
    windows = [w for w in (window, back) if w is not None]
    if ahead:
        return f"window({min(windows)},ahead={ahead})"
    return f"window({min(windows)})" if windows and (keys is None or min(windows) < keys) else "causal"
