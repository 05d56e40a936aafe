"""Attention variants of horner in transformers: importing this module registers attn_implementation="horner".

>>> import horner.hf
>>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="horner:l2")

"horner:TEXT" is any variant that `horner.attend` accepts: "horner:topk20", "horner:softmax:temperature=0.5"; or a pattern
of layers, which repeats: "horner:linear_decay*3,softmax"; or one for the heads of each layer: "horner:softmax^2|l2^2".
"horner" alone uses `config.horner_variant`, a text or a list with one for each layer, which the command horner reads and
writes too; the default is softmax. A variant that is set by
name is saved in that field. The scale of the model replaces 1/sqrt(D), and its sliding window narrows the mask of the
variant. Anything unsupported raises an error that names it.

`RecurrentCache` makes `model.generate` decode in constant memory if the variant has a finite state.
"""

import functools
import warnings
import weakref
from typing import NamedTuple, Optional

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import horner
import horner.nn

from ._heads import all_heads, some_heads, variants_of
from ._hf_cache import RecurrentCache
from ._hf_families import check_class, check_modules, scales_itself
from ._hf_masks import Seen, check_form, mask, mask_text, within
from ._hf_own import add_own, attentions, joined, own_bias, own_inputs, rows_of, tied
from ._hf_variants import SHAPES, find, of_config, of_layer, turn, with_cap, with_sink, with_stages

__all__ = ["RecurrentCache", "register"]

_PREFIX = "horner:"


def _names(implementation):
    """The texts in an attn_implementation: one, or one for each part of the model."""
    if isinstance(implementation, dict):
        for part in implementation.values():
            yield from _names(part)
    elif isinstance(implementation, str):
        yield implementation


def _saved(config, text):
    """What `config.horner_variant` says of a text: itself, or of a pattern the variant of each layer."""
    if len(turn(text)) == 1:
        return text
    return horner.nn.variants_of_layers(text, config.get_text_config(decoder=True).num_hidden_layers)


_last_warned = [lambda: None]  # a weak reference to a config, which the parts of a model share


def _check_saved(config, used):
    """Raises if `config.horner_variant` names no variants, and warns if they are not what another implementation computes."""
    variants = {name for text in of_config(config) for name in variants_of(text)}
    plain = [horner.describe(find(name).text)["spec"] == "" for name in variants]
    if all(plain) or _last_warned[0]() is config:
        return
    _last_warned[0] = weakref.ref(config)
    warnings.warn(
        f"the config names the horner variant {config.horner_variant!r}, but attn_implementation={used!r} computes softmax: "
        "pass attn_implementation='horner', or set config.horner_variant to None",
        stacklevel=4,
    )


def _on_demand(method):
    """Registers variants as they are named; transformers knows only those that were registered before."""

    @functools.wraps(method)
    def wrapped(self, attn_implementation, *args, **kwargs):
        for name in _names(attn_implementation):
            if name.startswith(_PREFIX):
                register(name[len(_PREFIX) :])
        check_class(self, attn_implementation)
        out = method(self, attn_implementation, *args, **kwargs)
        used = out if isinstance(out, str) else attn_implementation
        field = getattr(self.config, "horner_variant", None)
        chosen = field is None or method.__name__ == "set_attn_implementation"
        if isinstance(used, str) and used.startswith(_PREFIX) and chosen:
            self.config.horner_variant = _saved(self.config, used[len(_PREFIX) :])
        elif isinstance(out, str) and not used.startswith("horner"):
            _check_saved(self.config, used)
        return out

    return wrapped


def _is_horner(config):
    return (config._attn_implementation or "").partition(":")[0] == "horner"


_asking = []  # the models that run with output_attentions now: not all of them pass it on to their attention


_prefixed = []  # the models that now run with a prefix, and whether it has reached an attention that uses it


def _before(model, args, kwargs):
    if not _is_horner(model.config):
        return
    asked = kwargs.get("output_attentions")
    if model.config.output_attentions if asked is None else asked:
        _asking.append(model)
    if kwargs.get("prefix") is not None:
        _prefixed.append([model, False])


def _after(model, args, output):
    if _asking and _asking[-1] is model:
        _asking.pop()
    if _prefixed and _prefixed[-1][0] is model and not _prefixed.pop()[1] and output is not None:
        raise ValueError(
            f"prefix was given, but no attention of {type(model).__name__} has used it: this requires a variant with the mask "
            "prefix, such as attn_implementation='horner:prefix_lm', in a family that passes keywords on to its attention"
        )


def _watch(model):
    if _is_horner(model.config) and not hasattr(model, "_horner_watch"):
        model._horner_watch = [
            model.register_forward_pre_hook(_before, with_kwargs=True),
            model.register_forward_hook(_after, always_call=True),
        ]


_FIELDS = ("_attn_implementation_internal", "horner_variant")  # what choosing an implementation sets in a config


def _configs(model):
    """Those of a model, of its parts and within them, each once."""
    found, more = {}, [module.config for module in model.modules() if hasattr(module, "config")]
    while more:
        config = more.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            more += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return found.values()


def _after_setting(method):
    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        before = [(vars(c), {name: vars(c)[name] for name in _FIELDS if name in vars(c)}) for c in _configs(self)]
        try:
            out = method(self, *args, **kwargs)
            check_modules(self)
            add_own(self)
        except Exception:  # then the model is as it was
            for fields, old in before:
                for name in _FIELDS:
                    fields.pop(name, None)
                fields.update(old)
            raise
        _watch(self)
        return out

    return wrapped


def _before_init(method):
    @functools.wraps(method)
    def wrapped(self):
        check_modules(self)
        _watch(self)
        add_own(self)  # so that its weights are initialised, loaded and saved as all others
        return method(self)

    return wrapped


def _with_own_start(method):
    @functools.wraps(method)
    def wrapped(self, module):
        if isinstance(module, (horner.nn.Own, horner.nn._Convolution, horner.nn._Mamba)):
            module.reset_parameters()
        return method(self, module)

    return wrapped


def _with_prefix(method):
    """Keeps `generate` from refusing `prefix`, which no model names among its arguments."""

    @functools.wraps(method)
    def wrapped(self, model_kwargs):
        own = {"prefix"} if _is_horner(self.config) else set()
        return method(self, {name: x for name, x in model_kwargs.items() if name not in own})

    return wrapped


def _with_pages(method):
    """Keeps transformers from refusing the attention of the model, or from replacing it by one of its own."""

    @functools.wraps(method)
    def wrapped(self, model, *args, **kwargs):
        if not _is_horner(model.config):
            return method(self, model, *args, **kwargs)
        for _, module in attentions(model):  # now: an error in the thread that generates only reaches a log
            name = module.config._attn_implementation.partition(":")[2]
            for variant in of_layer(module.config, name or None, module.layer_idx).variants:
                _check_pages(variant.inputs)

    return wrapped


if not hasattr(PreTrainedModel.post_init, "__wrapped__"):
    PreTrainedModel._check_and_adjust_attn_implementation = _on_demand(PreTrainedModel._check_and_adjust_attn_implementation)
    PreTrainedModel.set_attn_implementation = _after_setting(_on_demand(PreTrainedModel.set_attn_implementation))
    PreTrainedModel.post_init = _before_init(PreTrainedModel.post_init)
    PreTrainedModel._init_weights = _with_own_start(PreTrainedModel._init_weights)
    if hasattr(GenerationMixin, "_validate_model_kwargs"):  # private names, which may change
        GenerationMixin._validate_model_kwargs = _with_prefix(GenerationMixin._validate_model_kwargs)
    if hasattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn"):
        switch = ContinuousBatchingManager.switch_to_cb_friendly_attn
        ContinuousBatchingManager.switch_to_cb_friendly_attn = _with_pages(switch)


# Arguments of an attention function of transformers that do not change the result.
_WITHOUT_EFFECT = {
    "position_ids", "use_cache", "cache_position", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "position_embeddings", "return_dict",
    "logits_to_keep", "deterministic", "output_attentions",
}  # fmt: skip

# What transformers' continuous batching adds for its own caches.
_OF_PAGES = {"read_index", "write_index", "block_table", "logits_indices", "logits_processor_args"}

_NAMES = {"head_mask": "head masks"}


def _refuse(kwargs):
    for name, value in kwargs.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            what = _NAMES.get(name, "this argument")
            raise NotImplementedError(f"attn_implementation='horner' does not support {what} ({name})")


def _seen(module, query, key, attention_mask, is_causal, sliding_window, kwargs):
    """The mask, or if the model made none, the same from the other arguments."""
    seen = attention_mask
    if seen is None:
        seen = Seen(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if sliding_window is not None and (sliding_window < key.shape[2] or hasattr(key, "_horner_layer")):
            raise NotImplementedError(
                "attn_implementation='horner' takes the sliding window from the mask, but this model gives none"
            )
    if not isinstance(seen, Seen):  # a tensor that the caller gave
        check_form(seen, 4)
        seen = Seen(getattr(module, "is_causal", True), dense=seen)
    if seen.dense is not None:
        return seen
    if is_causal is not None and is_causal != seen.causal and query.shape[2] > 1:
        raise NotImplementedError(f"is_causal={is_causal} with a mask that is {'' if seen.causal else 'not '}causal")
    if seen.cu_seqlens is None and kwargs.get("cu_seq_lens_q") is not None:
        seen = seen._replace(cu_seqlens=kwargs["cu_seq_lens_q"])
    return seen


def _one_row(x):
    """[B, heads, T, ..] -> [1, heads, B*T, ..]"""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _of_the_model(variant, stages, softcap, sink, bias):
    """What the model adds to the variant: a cap of the scores (Gemma 2), learned sinks (gpt-oss), a bias (T5)."""
    stages, variant = dict(stages), with_cap(variant, softcap)
    if bias is not None:
        variant = with_stages(variant, [] if "bias" in variant.inputs else ["bias"])
        stages["bias"] = bias
    if sink is not None:
        variant, stages["sink"] = with_sink(variant), sink
    return variant, stages


def _prefix(given, query, keep):
    """How many keys of each row all queries see, [B]: as many tokens after the padding on the left."""
    n = torch.as_tensor(0 if given is None else given, device=query.device).expand(query.shape[0])
    return n if keep is None else torch.where(n > 0, n + keep.to(torch.uint8).argmax(1), n)


def _packed(query, key, value, cu_seqlens, stages, attend):
    """`attend` of sequences that lie one after the other in all rows."""
    B, _, T, _ = query.shape
    flat = {name: _one_row(x) if SHAPES[name].startswith("B") else x for name, x in stages.items() if name != "keep"}
    if "keep" in stages:
        flat["keep"] = stages["keep"].reshape(1, -1)
    query, key, value = (_one_row(x) for x in (query, key, value))
    out = attend(query, key, value, cu_seqlens=cu_seqlens.to(key.device), **flat)  # [1, H, B*T, E]
    return out[0].unflatten(1, (B, T)).transpose(0, 1)


def _check_pages(inputs):
    by_token = ", ".join(name for name in inputs if SHAPES[name][0] in "Bb")
    if by_token:
        raise NotImplementedError(f"attn_implementation='horner' does not support a paged cache with the inputs {by_token}")


def _paged(query, key, value, kwargs, stages, attend):
    """`attend` of each sequence of a paged cache, whose new tokens lie one after the other in one row, as all keys do."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "attn_implementation='horner' does not support a paged cache in a CUDA graph: pass use_cuda_graph=False in the "
            "ContinuousBatchingConfig"
        )
    _check_pages(stages)
    ends = [kwargs[name].tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    for first, last, start, end in zip(ends[0], ends[0][1:], ends[1], ends[1][1:]):
        if last > first:
            out[:, :, first:last] = attend(query[:, :, first:last], key[:, :, start:end], value[:, :, start:end], **stages)
    return out


def _check_cached(variant, seen, query, key):
    """Near keys and the delta rule sum over all tokens up to the query. A cache of a window holds only the last of them, a
    static one has places after the query."""
    if not variant.whole or key.shape[2] == query.shape[2] or seen.window is None and seen.place is None:
        return
    what = "has a fixed size" if seen.window is None else f"holds only the model's window of {seen.window} tokens in this layer"
    raise NotImplementedError(
        f"variant {variant.text!r} sums over all past tokens, but this KV cache of transformers {what}: decode with "
        "past_key_values=horner.hf.RecurrentCache(model.config), or use_cache=False"
    )


def _check_weights(stream, cache, seen):
    if stream is not None or cache is not None or seen.cu_seqlens is not None:
        what = "packed sequences" if stream is None and cache is None else "this cache"
        raise NotImplementedError(f"attn_implementation='horner' does not support output_attentions with {what}")


class _Call(NamedTuple):
    """What is the same for all parts of a layer."""

    module: torch.nn.Module
    rows: Optional[torch.Tensor]  # of the tokens, from which gates are made
    seen: Seen
    stream: object  # the layer of a RecurrentCache, if there is one
    cache: object  # of pages
    weights: bool  # whether the matrix is asked for
    scaling: Optional[float]
    softcap: Optional[float]
    prefix: object
    dropout: float
    kwargs: dict


def attention(module, query, key, value, attention_mask, name=None, dropout=0.0, scaling=None, is_causal=None,
              sliding_window=None, softcap=None, s_aux=None, position_bias=None, prefix=None, cache=None, **kwargs):  # fmt: skip
    """transformers calls this in each layer: query [B, H, T, D], key and value [B, G, S, D]. Returns [B, T, H, E]."""
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        kwargs = {name: x for name, x in kwargs.items() if name not in _OF_PAGES}
    _refuse(kwargs)
    layer = of_layer(module.config, name, getattr(module, "layer_idx", None))
    seen = _seen(module, query, key, attention_mask, is_causal, sliding_window, kwargs)
    stream, weights = getattr(key, "_horner_layer", None), bool(_asking) or bool(kwargs.get("output_attentions"))
    if weights:
        _check_weights(stream, cache, seen)
    if seen.dense is not None and (stream is not None or cache is not None):
        raise NotImplementedError(
            f"{'a RecurrentCache' if cache is None else 'a paged cache'} does not support a mask [batch, heads, queries, keys]: pass "
            "padding as [batch, tokens]"
        )
    scaled = scales_itself(type(module)) if scaling == 1.0 else 0
    if scaled:  # not what features, norms and scales of the variant expect
        scaling = query.shape[-1] ** -0.5
        query = query / scaling ** (1 / scaled)
        key = key / scaling**0.5 if scaled == 2 else key
    if stream is not None and dropout:
        raise NotImplementedError("a RecurrentCache does not support attention dropout: call model.eval()")
    call = _Call(module, rows_of(module), seen, stream, cache, weights, scaling, softcap, prefix, dropout, kwargs)
    if layer.parts is None:
        out, matrix = _part(call, 0, layer.variants[0], query, key, value, s_aux, position_bias)
    else:
        results = []
        for i, (variant, part) in enumerate(zip(layer.variants, layer.parts.parts)):
            k, v = (some_heads(x, part.key_heads) for x in (key, value))
            sink = None if s_aux is None else some_heads(s_aux[None], part.heads)[0]
            bias = position_bias if position_bias is None or position_bias.shape[1] == 1 else some_heads(position_bias, part.heads)
            if seen.dense is not None and seen.dense.shape[1] != 1:
                call = call._replace(seen=seen._replace(dense=some_heads(seen.dense, part.heads)))
            results.append(_part(call, i, variant, some_heads(query, part.heads), k, v, sink, bias))
        out = all_heads(layer.parts.groups, [out for out, _ in results])
        matrix = all_heads(layer.parts.groups, [matrix for _, matrix in results]) if weights else None
    out = out.transpose(1, 2).contiguous()
    return joined(module, out) if layer.variants[0].mamba else out, matrix


def _part(call, part, variant, query, key, value, sink, bias):
    """The operator of some heads of a layer, or of all: its result [B, heads, T, E], and the matrix or None."""
    module, seen = call.module, call.seen
    scale = None if variant.own_scale else call.scaling
    stages = own_inputs(module, part, variant, call.rows, key.shape[2])
    if variant.tied_keys:
        query, key, stages["channel_decay"] = tied(query, key)
    variant, stages = _of_the_model(variant, stages, call.softcap, sink, bias)
    if call.stream is not None:
        return call.stream.attend(query, key, value, variant, seen, scale, stages, part), None
    _check_cached(variant, seen, query, key)
    if seen.length is not None:
        key, value = key[:, :, : seen.length], value[:, :, : seen.length]
    if seen.place is not None:
        seen = seen._replace(keep=within(variant, seen))
    text = mask_text(variant, seen, key.shape[2])
    text = _of_the_mask(module, part, query, key, variant, seen, text, call.prefix, stages)
    attend = functools.partial(horner.attend, variant=variant.run, scale=scale, mask=text, dropout_p=call.dropout)
    if call.cache is not None:
        return _paged(query, key, value, call.kwargs, stages, attend), None
    if seen.cu_seqlens is not None:
        return _packed(query, key, value, seen.cu_seqlens, stages, attend), None
    if call.weights:
        return attend(query, key, value, return_weights=True, **stages)
    return attend(query, key, value, **stages), None


def _of_the_mask(module, part, query, key, variant, seen, text, prefix, stages):
    """Adds the inputs that depend on which keys the queries see: padding, a prefix, a bias by distance. Returns the mask."""
    packed = seen.cu_seqlens is not None
    if "bias" in stages:  # the model's own
        stages["bias"] = stages["bias"][..., : key.shape[2]]
        if packed:
            raise NotImplementedError("attn_implementation='horner' does not support packed sequences with a position bias")
    rows = query.shape[0] if packed else 1  # which become one
    bias = own_bias(module, part, variant, rows * query.shape[2], rows * key.shape[2], seen)
    if bias is not None:
        stages["bias"] = bias
    if seen.keep is not None:
        stages["keep"] = seen.keep.to(key.device)
    if variant.mask == "prefix":
        for entry in _prefixed:
            entry[1] = True
        if packed and prefix is not None:
            raise NotImplementedError(
                "attn_implementation='horner' does not support packed sequences with a prefix; a model that torch.compile compiles "
                "takes them for packed unless it gets an attention_mask"
            )
        if text == "prefix":
            if packed:
                return "causal"
            stages["prefix"] = _prefix(prefix, query, stages.get("keep"))
    return text


def register(variant: str) -> str:
    """Registers attn_implementation="horner:VARIANT" for any variant of `horner.attend`, or for a pattern of layers such as
    "linear_decay*3,softmax", and returns that name."""
    for layer in turn(horner._text("variant", variant)):
        for each in variants_of(layer):
            find(each)  # raises its errors now
    return _register(variant)


def _register(variant):
    name = "horner" if variant is None else f"horner:{variant}"
    AttentionInterface.register(name, functools.partial(attention, name=variant))
    AttentionMaskInterface.register(name, mask)
    return name


for _name in [None, *horner.variants()]:
    _register(_name)
