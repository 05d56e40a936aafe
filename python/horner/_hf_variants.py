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
    short_conv: int  # tokens of a convolution of q, k and v; 0: none
    rope: bool  # whether the model's rotary positions apply
    tied_keys: bool  # keys made of the gates of their channels


_variants: dict[str, Variant] = {}


@torch.compiler.assume_constant_result
def find(text):
    if text in _variants:
        return _variants[text]
    about, around = horner.describe(text), torch.ops.horner.around(text)
    if around["mamba"] or around["raw_decay"]:
        what = "a Mamba-2 block" if around["mamba"] else "gates that grow over the whole text"
        raise ValueError(f"variant {text!r} has {what}, which models of transformers do not: use horner.nn or 'horner train'")
    mask, window, own_scale = torch.ops.horner.mask_and_scale(text)
    if mask == "full":
        raise ValueError(f"horner variant {text!r} has a full mask: the model determines the mask here")
    more = around["short_conv"], bool(around["rope"]), bool(around["tied_keys"])
    return _variants.setdefault(text, Variant(text, own_scale, window, about["no_state"], tuple(about["inputs"].split()), *more))


_turns: dict[str, tuple[str, ...]] = {}


@torch.compiler.assume_constant_result
def turn(text):
    """The variants of a pattern such as "linear_decay*3,softmax", which repeats; of the text of one variant, that one."""
    if text not in _turns:
        _turns[text] = tuple(horner.nn.turn(text))
    return _turns[text]


def _of_config(config):
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
    if not variants or layers is not None and len(variants) > max(layers, 1):
        raise ValueError(
            f"config.horner_variant has {len(variants)} layers, but the model has {layers}: it may be shorter, which repeats, "
            "but not longer"
        )
    return variants


def of_layer(config, name, layer):
    """The variant of a layer: from the name of the implementation, or from the config."""
    named, field = () if name is None else turn(name), _of_config(config)
    if layer is None and max(len(named), len(field)) > 1:
        raise ValueError("the variants are a pattern of layers, and this attention does not know its own")
    wanted, saved = (pattern[(layer or 0) % len(pattern)] if pattern else None for pattern in (named, field))
    if wanted is not None and saved is not None and wanted != saved:
        raise ValueError(f"attn_implementation='horner:{name}', but the config says {saved!r}: remove one")
    return find(wanted or saved or "softmax")


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
