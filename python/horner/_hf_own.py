"""What a variant has besides q, k and v in a model of transformers, for horner.hf: the weights of its gates, norms and
learned numbers, its convolution, and whether it takes the model's positions."""

import functools
import inspect

import torch
from torch.nn import functional as F

import horner.nn

from ._hf_variants import SHAPES, of_layer

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def attentions(model):
    """The attention modules of a model, each with the layer that holds it."""
    for layer in model.modules():
        for module in layer.children():
            known = hasattr(module, "config") and getattr(module, "layer_idx", None) is not None
            if known and type(module).__name__.endswith("Attention"):
                yield layer, module


def add_own(model):
    """Gives every layer whose variant needs more than q, k and v the module `horner` with its weights."""
    for layer, module in list(attentions(model)):
        config = module.config
        implementation, _, name = (config._attn_implementation or "").partition(":")
        if implementation != "horner":
            continue
        variant = of_layer(config, name or None, module.layer_idx)
        if getattr(module, "_horner_variant", None) == variant.text:
            continue
        _check_module(module, variant)
        if hasattr(layer, "horner"):
            del layer.horner
        module._horner_variant, module._horner_rope = variant.text, variant.rope
        module.__dict__["_horner_own"] = None  # not a submodule of its own: the layer has it
        if (variant.inputs or variant.short_conv or not variant.rope) and not hasattr(module, "_horner_hook"):
            module._horner_hook = module.register_forward_pre_hook(_remember, with_kwargs=True)
        if not variant.inputs and not variant.short_conv:
            continue
        like = next(module.parameters())
        heads = config.num_attention_heads
        layer.horner = horner.nn.Own(
            config.hidden_size, heads, variant=variant.text, kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(module, "head_dim", None) or config.hidden_size // heads, short_conv=variant.short_conv,
            device=like.device, dtype=like.dtype,
        )  # fmt: skip
        module.__dict__["_horner_own"] = layer.horner
        if variant.short_conv and not hasattr(module, "_horner_convolved"):
            first, module._horner_convolved = 0, []
            for projection in (getattr(module, name) for name in _PROJECTIONS):
                hook = functools.partial(_convolved, module, first)
                module._horner_convolved.append(projection.register_forward_hook(hook))
                first += projection.weight.shape[0]


def _check_module(module, variant):
    """Raises where the code of the family leaves no place for what the variant has."""
    what = ""
    if variant.short_conv and not all(isinstance(getattr(module, name, None), torch.nn.Linear) for name in _PROJECTIONS):
        what = f"convolves q, k and v, but {type(module).__name__} does not project them one by one ({', '.join(_PROJECTIONS)})"
    elif not variant.rope and "position_embeddings" not in inspect.signature(type(module).forward).parameters:
        what = f"has no positions, but {type(module).__name__} takes none that could be left out (position_embeddings)"
    if what:
        raise NotImplementedError(f"variant {variant.text!r} {what}: use a family like Llama's, horner.nn or 'horner train'")


def _remember(module, args, kwargs):
    """The rows of the tokens, from which gates are made, and what they see; transformers gives an attention function only
    q, k and v. A variant without positions gets a rotation by nothing."""
    module.__dict__["_horner_rows"] = args[0] if args else kwargs["hidden_states"]
    module.__dict__["_horner_seen"] = kwargs.get("attention_mask")
    if module._horner_rope:
        return None
    given = kwargs.get("position_embeddings")
    if not isinstance(given, tuple) or len(given) != 2:
        raise NotImplementedError(
            f"variant {module._horner_variant!r} has no positions, but this model rotates q and k in another way than by a pair "
            "of cosines and sines (position_embeddings)"
        )
    return args, {**kwargs, "position_embeddings": (torch.ones_like(given[0]), torch.zeros_like(given[1]))}


def _convolved(module, first, projection, args, rows):
    """A hook of q_proj, k_proj and v_proj: what they give [B, T, channels], convolved. Padding counts as nothing, and each
    packed sequence begins anew."""
    own, seen = module.__dict__.get("_horner_own"), module.__dict__.get("_horner_seen")
    if own is None or not hasattr(own, "short_conv"):
        return None
    if getattr(seen, "keep", None) is not None and seen.keep.shape[1] == rows.shape[1]:
        rows = rows * seen.keep[..., None].to(rows.dtype)
    places = None
    if getattr(seen, "cu_seqlens", None) is not None:
        places = horner.nn._places(rows.shape[0] * rows.shape[1], seen.cu_seqlens, rows.device).view(rows.shape[:2])
    return own.short_conv(rows, first, places)


def own_inputs(module, variant, keys):
    """The inputs of the variant besides q, k and v."""
    own, rows = module.__dict__.get("_horner_own"), module.__dict__.pop("_horner_rows", None)
    if not variant.inputs and not variant.short_conv:
        return {}
    if own is None or rows is None:
        what = ", ".join(variant.inputs) or "a convolution"
        raise NotImplementedError(
            f"variant {variant.text!r} requires {what}, and this model has no weights for it: "
            f"load it with attn_implementation='horner:{variant.text}', or set that with model.set_attn_implementation"
        )
    inputs = own(rows)
    by_key = [name for name in inputs if SHAPES[name].startswith("B") and "S" in SHAPES[name]]
    if keys != rows.shape[1] and (by_key or variant.short_conv):
        what = f"gates of its keys ({', '.join(by_key)})" if by_key else "a convolution"
        raise NotImplementedError(
            f"variant {variant.text!r} has {what}, which a KV cache of transformers does "
            "not hold: decode with past_key_values=horner.hf.RecurrentCache(model.config), or use_cache=False"
        )
    return inputs


def tied(query, key):
    """HGRN2: queries, keys and the logs of the gates of their channels."""
    return F.silu(query), (-key).sigmoid(), horner.nn.log_sigmoid(key)
