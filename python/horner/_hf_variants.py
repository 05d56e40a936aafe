"""The variant of a layer, for horner.hf: from the name of the implementation or from the config."""

import re
from typing import NamedTuple, Optional

import torch

import horner
import horner.nn

from ._heads import Parts, parts_of, variants_of

SHAPES = {name: shape for name, shape, _, _ in torch.ops.horner.inputs()}


class Reach(NamedTuple):
    """The keys that a mask shows, as in the library: the last `back`, `ahead` after them, and the first `first`."""

    back: Optional[int]  # None: all
    ahead: int
    chunk: int
    first: int


class Variant(NamedTuple):
    text: str
    run: str  # what `horner.attend` gets
    own_scale: bool
    own_cap: bool
    mask: str  # "causal", "window", or the text of another
    reach: Reach
    no_state: str
    inputs: tuple[str, ...]  # what it needs besides q, k and v
    short_conv: int  # tokens of a convolution of q, k and v; 0: none
    rope: bool  # whether the model's rotary positions apply
    tied_keys: bool  # keys made of the gates of their channels
    mamba: bool  # the inside of a Mamba-2 block makes q, k and v
    whole: bool  # near keys or the delta rule: a state of all past tokens, to which no window of the model applies


class Layer(NamedTuple):
    """The heads of a layer: of one variant, or in parts with one each."""

    text: str
    variants: tuple[Variant, ...]
    parts: Optional[Parts]  # None: all heads have the same variant


_variants: dict[str, Variant] = {}


@torch.compiler.assume_constant_result
def find(text):
    if text in _variants:
        return _variants[text]
    about, around = horner.describe(text), torch.ops.horner.around(text)
    mask, (back, *reach), own_scale = torch.ops.horner.mask_and_scale(text)
    if mask == "full":
        raise ValueError(f"horner variant {text!r} has a full mask: the model determines the mask here")
    return _variants.setdefault(text, Variant(
        text, horner.nn.with_stage(text, "decay=none") if around["raw_decay"] else text, own_scale, "softcap=" in about["spec"],
        "window" if mask.startswith("window") else mask or "causal", Reach(None if back < 0 else back, *reach),
        about["no_state"], tuple(about["inputs"].split()), around["short_conv"], bool(around["rope"]),
        bool(around["tied_keys"]), bool(around["mamba"]), re.search(r"(?:^|,)(?:near=|values=delta)", about["spec"]) is not None,
    ))  # fmt: skip


_turns: dict[str, tuple[str, ...]] = {}


@torch.compiler.assume_constant_result
def turn(text):
    """The variants of a pattern such as "linear_decay*3,softmax", which repeats; of the text of one variant, that one."""
    if text not in _turns:
        _turns[text] = tuple(horner.nn.turn(text))
    return _turns[text]


_layers: dict[tuple[str, int, int], Layer] = {}


@torch.compiler.assume_constant_result
def _layer(text, heads, kv_heads):
    key = text, heads, kv_heads
    if key not in _layers:
        parts = parts_of(text, heads, kv_heads)
        variants = tuple(find(name) for name in variants_of(text))
        if parts is not None:  # q, k and v, and their positions, are those of the model
            variants = tuple(variant._replace(rope=True, short_conv=0) for variant in variants)
        _layers[key] = Layer(text, variants, parts)
    return _layers[key]


def of_config(config):
    """The variants that `config.horner_variant` names, which repeat over the layers; () if it is not set."""
    field = getattr(config, "horner_variant", None)
    if field is None:
        return ()
    texts = [field] if isinstance(field, str) else field
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            "config.horner_variant must be a variant, a pattern such as 'linear_decay*3,softmax', or a list of variants, "
            f"got {field!r}"
        )
    variants = [variant for text in texts for variant in turn(text)]
    layers = getattr(config, "num_hidden_layers", None)
    if not variants:
        raise ValueError("config.horner_variant is an empty list: name at least one variant, or set it to None")
    if layers is not None and len(variants) > max(layers, 1):
        raise ValueError(
            f"config.horner_variant has {len(variants)} layers, but the model has {layers}: it may be shorter, which repeats, "
            "but not longer"
        )
    return variants


def of_layer(config, name, layer):
    """The variants of a layer: from the name of the implementation, or from the config."""
    named, field = () if name is None else turn(name), of_config(config)
    if layer is None and max(len(named), len(field)) > 1:
        raise ValueError("the variants are a pattern of layers, and this attention does not know its own")
    wanted, saved = (pattern[(layer or 0) % len(pattern)] if pattern else None for pattern in (named, field))
    if wanted is not None and saved is not None and wanted != saved:
        raise ValueError(
            f"attn_implementation='horner:{name}', but config.horner_variant says {saved!r} for this layer: set config.horner_variant "
            "to None, or pass attn_implementation='horner', which uses it"
        )
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    text = wanted or saved or "softmax"
    return _layer(text, heads, kv_heads) if isinstance(heads, int) and isinstance(kv_heads, int) else _layer(text, 1, 1)


def with_stages(variant, stages):
    """The variant with these stages changed as well."""
    if not stages:
        return variant
    return find(horner.nn.with_stage(variant.text, ",".join(stages)))


def with_cap(variant, cap):
    """The variant with the model's cap of the scores, or with its own."""
    return variant if cap is None or variant.own_cap else with_stages(variant, [f"softcap={cap!r}"])


def with_sink(variant):
    """The variant with a learned sink in its denominator, where that is the sum of the weights."""
    return with_stages(variant, [_with_sink(variant.text)])


@torch.compiler.assume_constant_result
def _with_sink(text):
    given = re.search(r"(?:^|,)denominator=(\w+)(?:\((.*?)\))?", horner.describe(text)["spec"])
    if given and given[1] != "sum":
        raise NotImplementedError(
            f"horner variant {text!r} has the denominator {given[1]!r}, which has no place for this model's attention sinks "
            "(s_aux): choose a variant that divides by the sum of its weights, such as softmax"
        )
    return f"denominator=sum({given[2]},sink)" if given and given[2] else "denominator=sum(sink)"
