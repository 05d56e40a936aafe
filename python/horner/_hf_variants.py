"""The variant of a layer, for horner.hf: from the name of the implementation or from the config."""

import re
from typing import NamedTuple, Optional

import torch

import horner
import horner.nn

SHAPES = {name: shape for name, shape, _, _ in torch.ops.horner.inputs()}


class Variant(NamedTuple):
    text: str
    own_scale: bool
    window: Optional[int]
    no_state: str
    inputs: tuple[str, ...]  # what it needs besides q, k and v


_variants: dict[str, Variant] = {}


@torch.compiler.assume_constant_result
def find(text):
    if text in _variants:
        return _variants[text]
    about, around = horner.describe(text), torch.ops.horner.around(text)
    if around["mamba"] or around["short_conv"] or not around["rope"]:
        what = "a Mamba-2 block" if around["mamba"] else "convolved q, k and v" if around["short_conv"] else "no positions"
        raise ValueError(f"variant {text!r} has {what}, which models of transformers do not: use horner.nn or 'horner train'")
    mask, window, own_scale = torch.ops.horner.mask_and_scale(text)
    if mask == "full":
        raise ValueError(f"horner variant {text!r} has a full mask: the model determines the mask here")
    return _variants.setdefault(text, Variant(text, own_scale, window, about["no_state"], tuple(about["inputs"].split())))


_turns: dict[str, tuple[str, ...]] = {}


@torch.compiler.assume_constant_result
def turn(text):
    """The variants of a pattern such as "linear_decay*3,softmax", which repeats; of the text of one variant, that one."""
    if text not in _turns:
        _turns[text] = tuple(horner.nn.turn(text))
    return _turns[text]


def of_layer(config, name, layer):
    """The variant of a layer: from the name of the implementation, or from the config."""
    field = getattr(config, "horner_variant", None)
    if isinstance(field, (list, tuple)):
        if layer is None or layer >= len(field):
            raise ValueError(f"the config names {len(field)} variants, but none for layer {layer}")
        field = field[layer]
    pattern = (name,) if name is None else turn(name)
    if len(pattern) > 1 and layer is None:
        raise ValueError(f"'horner:{name}' is a pattern of layers, and this attention does not know its own")
    wanted = pattern[(layer or 0) % len(pattern)]
    if wanted is not None and field is not None and field not in (wanted, name):
        raise ValueError(f"attn_implementation='horner:{name}', but the config says {field!r}: remove one")
    return find(wanted or field or "softmax")


def with_stages(variant, stages):
    """The variant with these stages changed as well."""
    if not stages:
        return variant
    return find(variant.text + ("," if ":" in variant.text else ":") + ",".join(stages))


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
