"""What a variant has besides q, k and v in a model of transformers, for horner.hf: the weights of its gates, norms and
learned numbers, its convolution, and whether it takes the model's positions."""

import functools
import inspect

import torch
from torch.nn import functional as F

import horner.nn

from ._hf_cache import past_of
from ._hf_families import adds_positions
from ._hf_variants import SHAPES, of_layer

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_OTHER_PROJECTIONS = ("query", "key", "value")  # BERT
_JOINED = {"GPT2Attention": "c_attn", "Phi3Attention": "qkv_proj"}  # one of q, k and v, one after the other
_OF_HEADS = (*_PROJECTIONS, "q_norm", "k_norm")  # which a Mamba-2 block does not have
_OTHER_ROWS = ("key_value_states", "encoder_hidden_states")  # of keys and values in cross-attention


class _FromMamba(torch.nn.Module):
    """In the place of a projection or of a norm of heads: gives what the Mamba-2 block has made, or what it gets."""

    def __init__(self, module, name):
        super().__init__()
        self.__dict__["module"], self.name = module, name  # not a submodule

    def forward(self, rows):
        return self.module.__dict__["_horner_mamba"][self.name] if self.name in _PROJECTIONS else rows


def attentions(model):
    """The attention modules of a model, each with the layer that holds it."""
    for layer in model.modules():
        for module in layer.children():
            known = hasattr(module, "config") and getattr(module, "layer_idx", None) is not None
            if known and type(module).__name__.endswith("Attention"):
                yield layer, module


def add_own(model):
    """Gives every layer whose variants need more than q, k and v the module `horner` with their weights. What cannot be is an
    error before anything changes."""
    for layer, module, wanted, own in list(_changes(model)):
        first = wanted.variants[0]
        if hasattr(layer, "horner"):
            del layer.horner
        module._horner_variant, module._horner_rope = wanted.text, first.rope or not adds_positions(type(module))
        module._horner_others = [name for name in _OTHER_ROWS if _takes(module, name)]
        module.__dict__["_horner_own"] = None  # not a submodule of its own: the layer has it
        _place_projections(module, first)
        if (own is not None or not module._horner_rope) and not hasattr(module, "_horner_hook"):
            module._horner_hook = module.register_forward_pre_hook(_remember, with_kwargs=True)
        if own is None:
            continue
        layer.horner = own
        module.__dict__["_horner_own"] = layer.horner
        if first.short_conv and not first.mamba and not hasattr(module, "_horner_convolved"):
            rows, module._horner_convolved = 0, []
            for projection in _projections(module):
                hook = functools.partial(_convolved, module, rows)
                module._horner_convolved.append(projection.register_forward_hook(hook))
                rows += projection.weight.shape[0]


def _changes(model):
    """The layers of a model that get another variant, with their attention and the new weights, None if there are none."""
    for layer, module in attentions(model):
        implementation, _, name = (module.config._attn_implementation or "").partition(":")
        if implementation != "horner":
            continue
        wanted = of_layer(module.config, name or None, module.layer_idx)
        if getattr(module, "_horner_variant", None) == wanted.text:
            continue
        _check_module(module, wanted.variants[0])
        needs = any(_makes(module, variant) for variant in wanted.variants)
        yield layer, module, wanted, _weights(module, wanted) if needs else None


def _made(module, variant):
    """The inputs of a variant that its own weights make."""
    given = _given(module)
    return [name for name in variant.inputs if name != "prefix" and name not in given]


def _makes(module, variant):
    return bool(_made(module, variant) or variant.short_conv)


def _weights(module, layer):
    """The own weights of a layer; of one in parts, those of each part under its number."""
    config, like = module.config, next(module.parameters())
    heads = config.num_attention_heads
    dim = getattr(module, "head_dim", None) or config.hidden_size // heads

    def own(variant, heads, kv_heads):
        return horner.nn.Own(
            config.hidden_size, heads, variant=variant.text, kv_heads=kv_heads, head_dim=dim, short_conv=variant.short_conv,
            given=_given(module), device=like.device, dtype=like.dtype,
        )  # fmt: skip

    if layer.parts is None:
        return own(layer.variants[0], heads, getattr(config, "num_key_value_heads", None) or heads)
    each = enumerate(zip(layer.variants, layer.parts.parts))
    return torch.nn.ModuleDict(
        {str(i): own(variant, len(part.heads), len(part.key_heads)) for i, (variant, part) in each if _makes(module, variant)}
    )


def _own(module, part):
    """The own weights of a part of a layer, or None."""
    own = module.__dict__.get("_horner_own")
    if isinstance(own, torch.nn.ModuleDict):
        return own[str(part)] if str(part) in own else None
    return own


def _given(module):
    """The inputs that the code of the family makes itself: T5 a bias by distance."""
    return ("bias",) if _takes(module, "position_bias") else ()


def _place_projections(module, variant):
    """Puts what a Mamba-2 block makes in the place of the projections, or these back."""
    if variant.mamba and "_horner_taken" not in module.__dict__:
        module.__dict__["_horner_taken"] = taken = {name: getattr(module, name) for name in _OF_HEADS if hasattr(module, name)}
        for name in taken:
            setattr(module, name, _FromMamba(module, name))
    elif not variant.mamba and "_horner_taken" in module.__dict__:
        like = next(module.parameters())
        for name, projection in module.__dict__.pop("_horner_taken").items():
            if projection.weight.is_meta:  # of a model that was loaded with the block: new weights
                projection.to_empty(device=like.device)
                reset = getattr(projection, "reset_parameters", lambda: torch.nn.init.ones_(projection.weight))
                reset()
            setattr(module, name, projection.to(like.device, like.dtype))


def _takes(module, name):
    return name in inspect.signature(type(module).forward).parameters


def _projections(module):
    """The modules that make q, k and v, or the one that makes all three; () if they are of another form."""
    joined = getattr(module, _JOINED.get(type(module).__name__, ""), None)
    if joined is not None and not getattr(module, "is_cross_attention", False):
        return (joined,)
    for names in (_PROJECTIONS, _OTHER_PROJECTIONS):
        found = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(x, (torch.nn.Linear, _FromMamba)) for x in found):
            return found
    return ()


def _check_module(module, variant):
    """Raises where the code of the family leaves no place for what the variant has."""
    what, name = "", type(module).__name__
    if variant.mamba and not (_takes(module, "position_embeddings") and all(hasattr(module, each) for each in _PROJECTIONS)):
        what = f"puts a block in the place of {', '.join(_PROJECTIONS)}, but {name} has other projections or positions"
    elif variant.short_conv and not _projections(module):
        what = f"convolves q, k and v, but {name} does not project them one by one ({', '.join(_PROJECTIONS)})"
    elif not variant.rope and adds_positions(type(module)) and not _takes(module, "position_embeddings"):
        what = f"has no positions, but {name} takes none that could be left out (position_embeddings)"
    if what:
        raise NotImplementedError(f"variant {variant.text!r} {what}: use a family like Llama's, horner.nn or 'horner train'")


def _remember(module, args, kwargs):
    """The rows of the tokens, from which gates are made, and what they see; transformers gives an attention function only
    q, k and v. A variant without positions gets a rotation by nothing."""
    module.__dict__["_horner_rows"] = args[0] if args else kwargs["hidden_states"]
    module.__dict__["_horner_crossed"] = any(kwargs.get(name) is not None for name in module._horner_others)
    module.__dict__["_horner_seen"] = kwargs.get("attention_mask")
    module.__dict__["_horner_past"] = past_of(kwargs.get("past_key_values"), module.layer_idx)
    if getattr(own := module.__dict__["_horner_own"], "mamba", None) is not None:
        rows = module.__dict__["_horner_rows"]
        q, k, v, steps = own.mamba.split(rows, **_neighbours(module, rows))
        module.__dict__["_horner_mamba"] = {"q_proj": q, "k_proj": k, "v_proj": v, "steps": steps, "rows": rows}
    if module._horner_rope:
        return None
    given = kwargs.get("position_embeddings")
    if not isinstance(given, tuple) or len(given) != 2:
        raise NotImplementedError(
            f"variant {module._horner_variant!r} has no positions, but this model rotates q and k in another way than by a pair "
            "of cosines and sines (position_embeddings)"
        )
    return args, {**kwargs, "position_embeddings": (torch.ones_like(given[0]), torch.zeros_like(given[1]))}


def _neighbours(module, rows):
    """What a convolution of rows [B, T, channels] takes: padding counts as nothing, each packed sequence begins anew, and a
    RecurrentCache holds the last rows."""
    seen, past = module.__dict__.get("_horner_seen"), module.__dict__.get("_horner_past")
    keep, cu_seqlens, places = getattr(seen, "keep", None), getattr(seen, "cu_seqlens", None), None
    if cu_seqlens is not None:
        places = horner.nn._places(rows.shape[0] * rows.shape[1], cu_seqlens, rows.device).view(rows.shape[:2])
    keep = keep if keep is not None and keep.shape[1] == rows.shape[1] else None
    return {"keep": keep, "places": places, "past": past}


def _convolved(module, first, projection, args, rows):
    """A hook of q_proj, k_proj and v_proj: what they give [B, T, channels], convolved."""
    own = module.__dict__.get("_horner_own")
    return own.short_conv(rows, first, **_neighbours(module, rows)) if hasattr(own, "short_conv") else None


def rows_of(module):
    """The rows of the tokens, which `_remember` has kept."""
    return module.__dict__.pop("_horner_rows", None)


def own_inputs(module, part, variant, rows, keys):
    """The inputs of the variant besides q, k and v that do not depend on what the layer sees."""
    if not _makes(module, variant):
        return {}
    own, made = _own(module, part), _made(module, variant)
    if own is None or rows is None:
        what = ", ".join(made) or "a convolution"
        raise NotImplementedError(
            f"variant {variant.text!r} requires {what}, and this model has no weights for it: "
            f"load it with attn_implementation='horner:{variant.text}', or set that with model.set_attn_implementation"
        )
    inputs = own(rows, module.__dict__.get("_horner_past"))
    if variant.mamba:
        inputs |= module.__dict__["_horner_mamba"]["steps"]
    by_key = [name for name in inputs if SHAPES[name].startswith("B") and "S" in SHAPES[name]]
    what = f"gates of its keys ({', '.join(by_key)})" if by_key else "a convolution"
    if module.__dict__["_horner_crossed"] and (by_key or variant.short_conv):
        raise NotImplementedError(
            f"variant {variant.text!r} has {what}, which are made of the tokens of a layer, but the keys of {type(module).__name__} "
            "are those of other tokens: choose a variant without them for a model with cross-attention"
        )
    if keys != rows.shape[1] and (by_key or variant.short_conv):
        raise NotImplementedError(
            f"variant {variant.text!r} has {what}, which a KV cache of transformers does "
            "not hold: decode with past_key_values=horner.hf.RecurrentCache(model.config), or use_cache=False"
        )
    return inputs


def own_bias(module, part, variant, queries, keys, seen):
    """The bias by distance that the layer has learned, [1, H, T, S]; None if it has none. Not of cross-attention, whose
    tokens have no distance: there it is 0."""
    own = _own(module, part)
    if own is None or "bias" not in own.roles:
        return None
    if not seen.causal and seen.place is None and queries != keys:
        return own.bias.new_zeros(1, 1, queries, keys)
    if seen.dense is not None and queries != keys:
        raise NotImplementedError(
            f"variant {variant.text!r} learns a bias by distance, and a mask [batch, heads, queries, keys] does not say where {queries} "
            f"queries are among {keys} keys: pass padding as [batch, tokens], or use_cache=False"
        )
    ahead = variant.mask == "prefix" or variant.reach.ahead > 0 or not seen.causal and seen.place is None
    return own.relative_bias(queries, keys, ahead, seen.place)


def joined(module, out):
    """What a Mamba-2 block makes of the result [B, T, H, E] of its operator."""
    made = module.__dict__.pop("_horner_mamba")
    return module.__dict__["_horner_own"].mamba.joined(out.flatten(2), made["v_proj"], made["rows"]).view(out.shape)


def tied(query, key):
    """HGRN2: queries, keys and the logs of the gates of their channels."""
    return F.silu(query), (-key).sigmoid(), horner.nn.log_sigmoid(key)
