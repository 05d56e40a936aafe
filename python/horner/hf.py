"""Attention variants of horner in transformers: importing this module registers attn_implementation="horner".

>>> import horner.hf
>>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="horner:l2")

"horner:TEXT" is any variant that `horner.attend` accepts: "horner:topk20", "horner:softmax:temperature=0.5". "horner"
alone uses `config.horner_variant`, a text or a list with one for each layer, which the command horner reads and writes
too; the default is softmax. A variant that is set by name is saved in that field. The scale of the model replaces
1/sqrt(D), and its sliding window narrows the mask of the variant. Anything unsupported raises an error that names it.

`RecurrentCache` makes `model.generate` decode in constant memory if the variant has a finite state.
"""

import functools
import inspect
import warnings
from typing import NamedTuple, Optional

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers import __version__ as _version
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

import horner
import horner.nn

__all__ = ["RecurrentCache", "register"]

if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError(f"horner.hf requires transformers 5, got {_version}: its masks lack the positions of the queries")


class Seen(NamedTuple):
    """Replaces a mask [B, 1, T, S]: the keys that a query sees are always an interval."""

    causal: bool
    window: Optional[int] = None
    keep: Optional[torch.Tensor] = None  # [B, S] bool: False hides a key
    cu_seqlens: Optional[torch.Tensor] = None  # where packed sequences begin in the B*T tokens, and their end
    length: Optional[int] = None  # how many keys hold tokens (static caches)

    # transformers treats masks as tensors and reads these

    @property
    def ndim(self):
        return 4

    def contiguous(self):
        return self


# The mask interface.


def _may_look():
    """Whether the values of a tensor can be read: not while a graph is being captured."""
    return not (torch.compiler.is_compiling() or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


_KNOWN_MASKS = {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
}  # fmt: skip


def _check_mask(function):
    """Raises unless every part of the mask is known here. Closures cannot be read under torch.compile."""
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
            _check_mask(part)
    elif function.__qualname__ not in _KNOWN_MASKS:
        raise NotImplementedError(
            f"attn_implementation='horner' does not support the mask {function.__qualname__}; "
            "it supports causal and full masks, sliding windows, padding and packed sequences"
        )


def _refuse_custom_mask(mask_function, use_vmap, chunked):
    if torch.compiler.is_compiling():
        kind = "a custom mask function" if use_vmap else "chunked attention" if chunked else None
        kind = "or_mask" if mask_function.__name__ == "or_mask" else kind
        if kind is not None:
            raise NotImplementedError(f"attn_implementation='horner' does not support the mask {kind}")
    else:
        _check_mask(mask_function)


def _cu_seqlens(mask_function, batch, length, device):
    """Where packed sequences begin among the B*T tokens: at those that do not see the previous token. Empty sequences
    fill the rest, so that the number of sequences is known without reading the tensor."""
    b = torch.arange(batch, device=device)[:, None]
    t = torch.arange(length, device=device)[None, :]
    sees = mask_function(b, torch.zeros_like(b), t, (t - 1).clamp(min=0)).expand(batch, length) & (t > 0)
    if _may_look() and sees[:, 1:].all():
        return None
    place = torch.arange(batch * length, device=device)
    starts = torch.where(sees.reshape(-1), 0, place).cummax(0).values
    return torch.cat([starts, starts.new_full((1,), batch * length)])


def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
         local_size=None, use_vmap=False, config=None, device="cpu", **kwargs):  # fmt: skip
    """transformers calls this once for each kind of layer, instead of building a mask [B, 1, T, S]."""
    if isinstance(attention_mask, Seen):
        return attention_mask
    chunk = getattr(config, "attention_chunk_size", None)
    causal = "allow_is_bidirectional_skip" not in kwargs  # only the bidirectional callers pass it
    _refuse_custom_mask(mask_function, use_vmap, chunk is not None and local_size == chunk)
    if not causal and local_size is not None:
        raise NotImplementedError("attn_implementation='horner' does not support a bidirectional sliding window")
    keep = None
    if attention_mask is not None:
        keep = attention_mask[:, kv_offset : kv_offset + kv_length]
        if keep.shape[1] == kv_length and _may_look() and keep.all():
            keep = None
    if isinstance(q_offset, torch.Tensor) and q_length == 1:
        return _one_query(batch_size, kv_length, q_offset, kv_offset, local_size, keep, device)
    cu_seqlens = None
    whole = q_length == kv_length and kv_offset == 0
    if causal and attention_mask is None and whole and mask_function.__name__ == "and_mask":
        cu_seqlens = _cu_seqlens(mask_function, batch_size, q_length, device)
    length = None
    if causal and (end := int(q_offset) + q_length - kv_offset) < kv_length:
        length, keep = end, None if keep is None or keep[:, :end].all() else keep[:, :end]
    elif keep is not None and keep.shape[1] < kv_length:
        keep = torch.nn.functional.pad(keep, (0, kv_length - keep.shape[1]))
    return Seen(causal, local_size, keep, cu_seqlens, length)


def _one_query(batch, kv_length, q_offset, kv_offset, window, keep, device):
    """One token of a static cache. Its position is a tensor that cannot be read: which slots of the cache it sees."""
    s = torch.arange(kv_length, device=device) + kv_offset
    sees = s <= q_offset if window is None else (s <= q_offset) & (s > q_offset - window)
    sees = sees[None, :].expand(batch, kv_length)
    if keep is not None:
        sees = sees & torch.nn.functional.pad(keep, (0, kv_length - keep.shape[1]))
    return Seen(False, None, sees)


# The attention interface.


class _Variant(NamedTuple):
    text: str
    own_scale: bool
    window: Optional[int]
    no_state: str
    inputs: tuple[str, ...]  # what it needs besides q, k and v


_variants: dict[str, _Variant] = {}


@torch.compiler.assume_constant_result
def _variant(text):
    if text in _variants:
        return _variants[text]
    about, around = horner.describe(text), torch.ops.horner.around(text)
    if around["mamba"] or around["short_conv"] or not around["rope"]:
        what = "a Mamba-2 block" if around["mamba"] else "convolved q, k and v" if around["short_conv"] else "no positions"
        raise ValueError(f"variant {text!r} has {what}, which models of transformers do not: use horner.nn or 'horner train'")
    mask, window, own_scale = torch.ops.horner.mask_and_scale(text)
    if mask == "full":
        raise ValueError(f"horner variant {text!r} has a full mask: the model determines the mask here")
    return _variants.setdefault(text, _Variant(text, own_scale, window, about["no_state"], tuple(about["inputs"].split())))


def _of_layer(config, name, layer):
    """The variant of a layer: from the name of the implementation, or from the config."""
    field = getattr(config, "horner_variant", None)
    if isinstance(field, (list, tuple)):
        if layer is None or layer >= len(field):
            raise ValueError(f"the config names {len(field)} variants, but none for layer {layer}")
        field = field[layer]
    if name is not None and field is not None and field != name:
        raise ValueError(f"attn_implementation='horner:{name}', but the config says {field!r}: remove one")
    return _variant(name or field or "softmax")


_PREFIX = "horner:"


def _names(implementation):
    """The texts in an attn_implementation: one, or one for each part of the model."""
    if isinstance(implementation, dict):
        for part in implementation.values():
            yield from _names(part)
    elif isinstance(implementation, str):
        yield implementation


def _on_demand(method):
    """Registers variants as they are named; transformers knows only those that were registered before."""

    @functools.wraps(method)
    def wrapped(self, attn_implementation, *args, **kwargs):
        for name in _names(attn_implementation):
            if name.startswith(_PREFIX):
                register(name[len(_PREFIX) :])
        out = method(self, attn_implementation, *args, **kwargs)
        used = out if isinstance(out, str) else attn_implementation
        field = getattr(self.config, "horner_variant", None)
        chosen = field is None or method.__name__ == "set_attn_implementation"
        if isinstance(used, str) and used.startswith(_PREFIX) and chosen:
            self.config.horner_variant = used[len(_PREFIX) :]
        elif isinstance(out, str) and not used.startswith("horner") and field not in (None, "softmax"):
            warnings.warn(
                f"the config names the horner variant {field!r}, but attn_implementation={used!r} computes softmax: "
                "pass attn_implementation='horner', or set config.horner_variant to None",
                stacklevel=3,
            )
        return out

    return wrapped


# The weights of a variant's gates, norms and learned numbers.


def _attentions(model):
    """The attention modules of a model, each with the layer that holds it."""
    for layer in model.modules():
        for module in layer.children():
            if type(module).__name__.endswith("Attention") and getattr(module, "layer_idx", None) is not None:
                yield layer, module


def _add_own(model):
    """Gives every layer whose variant needs more than q, k and v the module `horner` with its weights."""
    for layer, module in list(_attentions(model)):
        config = module.config
        implementation, _, name = (config._attn_implementation or "").partition(":")
        if implementation != "horner":
            continue
        variant = _of_layer(config, name or None, module.layer_idx)
        if getattr(module, "_horner_variant", None) == variant.text:
            continue
        if hasattr(layer, "horner"):
            del layer.horner
        module._horner_variant = variant.text
        module.__dict__["_horner_own"] = None  # not a submodule of its own: the layer has it
        if not variant.inputs:
            continue
        like = next(module.parameters())
        heads = config.num_attention_heads
        layer.horner = horner.nn.Own(
            config.hidden_size, heads, variant=variant.text, kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(module, "head_dim", None) or config.hidden_size // heads, short_conv=0, device=like.device, dtype=like.dtype,
        )  # fmt: skip
        module.__dict__["_horner_own"] = layer.horner
        if not hasattr(module, "_horner_hook"):
            module._horner_hook = module.register_forward_pre_hook(_remember, with_kwargs=True)


def _remember(module, args, kwargs):
    """The rows of the tokens, from which gates are made; transformers gives an attention function only q, k and v."""
    module.__dict__["_horner_rows"] = args[0] if args else kwargs["hidden_states"]


def _own_inputs(module, variant, keys):
    """The inputs of the variant besides q, k and v."""
    if not variant.inputs:
        return {}
    own, rows = module.__dict__.get("_horner_own"), module.__dict__.pop("_horner_rows", None)
    if own is None or rows is None:
        raise NotImplementedError(
            f"variant {variant.text!r} requires {', '.join(variant.inputs)}, and this model has no weights for them: "
            f"load it with attn_implementation='horner:{variant.text}', or set that with model.set_attn_implementation"
        )
    inputs = own(rows)
    by_key = [name for name in inputs if _SHAPES[name].startswith("B") and _SHAPES[name].endswith("S")]
    if by_key and keys != rows.shape[1]:
        raise NotImplementedError(
            f"variant {variant.text!r} has gates of its keys ({', '.join(by_key)}), which a KV cache of transformers does "
            "not hold: decode with past_key_values=horner.hf.RecurrentCache(model.config), or use_cache=False"
        )
    return inputs


_SHAPES = {name: shape for name, shape, _, _ in torch.ops.horner.inputs()}


def _after_setting(method):
    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        out = method(self, *args, **kwargs)
        _add_own(self)
        return out

    return wrapped


def _before_init(method):
    @functools.wraps(method)
    def wrapped(self):
        _add_own(self)  # so that its weights are initialised, loaded and saved as all others
        return method(self)

    return wrapped


def _with_own_start(method):
    @functools.wraps(method)
    def wrapped(self, module):
        if isinstance(module, horner.nn.Own):
            module.reset_parameters()
        return method(self, module)

    return wrapped


if not hasattr(PreTrainedModel.post_init, "__wrapped__"):
    PreTrainedModel._check_and_adjust_attn_implementation = _on_demand(PreTrainedModel._check_and_adjust_attn_implementation)
    PreTrainedModel.set_attn_implementation = _after_setting(_on_demand(PreTrainedModel.set_attn_implementation))
    PreTrainedModel.post_init = _before_init(PreTrainedModel.post_init)
    PreTrainedModel._init_weights = _with_own_start(PreTrainedModel._init_weights)


# Arguments of an attention function of transformers that do not change the result.
_WITHOUT_EFFECT = {
    "position_ids", "use_cache", "cache_position", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "position_embeddings", "return_dict",
    "logits_to_keep", "deterministic",
}  # fmt: skip


_NAMES = {
    "softcap": "soft-capping", "s_aux": "attention sinks", "head_mask": "head masks",
    "position_bias": "a position bias", "output_attentions": "returning weights", "cache": "paged caches",
}  # fmt: skip


def _refuse(dropout, kwargs):
    if dropout:
        raise NotImplementedError(
            f"attn_implementation='horner' does not support attention dropout, and this model trains with {dropout}: "
            "set attention_dropout (GPT-2: attn_pdrop) of its config to 0"
        )
    for name, value in kwargs.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            what = _NAMES.get(name, "this argument")
            raise NotImplementedError(f"attn_implementation='horner' does not support {what} ({name})")


def _mask_text(variant, seen, keys):
    windows = [w for w in (seen.window, variant.window) if w is not None]
    if not seen.causal:
        if windows:
            raise NotImplementedError(f"variant {variant.text!r} has a window, but this attention is bidirectional")
        return "full"
    return f"window({min(windows)})" if windows and (keys is None or min(windows) < keys) else "causal"


def _seen(module, query, key, attention_mask, is_causal, sliding_window, kwargs):
    """The mask, or if the model made none, the same from the other arguments."""
    seen = attention_mask
    if seen is None:
        seen = Seen(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if sliding_window is not None and (sliding_window < key.shape[2] or hasattr(key, "_horner_layer")):
            raise NotImplementedError(
                "attn_implementation='horner' takes the sliding window from the mask, but this model gives none"
            )
    if not isinstance(seen, Seen):
        raise NotImplementedError(
            f"attn_implementation='horner' does not support a ready-made mask, got {tuple(seen.shape)}: "
            "pass padding as [batch, tokens] and packed sequences as position_ids"
        )
    if is_causal is not None and is_causal != seen.causal and query.shape[2] > 1:
        raise NotImplementedError(f"is_causal={is_causal} with a mask that is {'' if seen.causal else 'not '}causal")
    if seen.cu_seqlens is None and kwargs.get("cu_seq_lens_q") is not None:
        seen = seen._replace(cu_seqlens=kwargs["cu_seq_lens_q"])
    return seen


def _one_row(x):
    """[B, heads, T, ..] -> [1, heads, B*T, ..]"""
    return x.transpose(0, 1).flatten(1, 2)[None]


def attention(module, query, key, value, attention_mask, name=None, dropout=0.0, scaling=None, is_causal=None,
              sliding_window=None, **kwargs):  # fmt: skip
    """transformers calls this in each layer: query [B, H, T, D], key and value [B, G, S, D]. Returns [B, T, H, E]."""
    _refuse(dropout, kwargs)
    variant = _of_layer(module.config, name, getattr(module, "layer_idx", None))
    scale = None if variant.own_scale else scaling
    seen = _seen(module, query, key, attention_mask, is_causal, sliding_window, kwargs)
    inputs = _own_inputs(module, variant, key.shape[2])
    layer = getattr(key, "_horner_layer", None)
    if layer is not None:
        return layer.attend(query, key, value, variant, seen, scale, inputs).transpose(1, 2), None
    if seen.length is not None:
        key, value = key[:, :, : seen.length], value[:, :, : seen.length]
    B, H, T, _ = query.shape
    stages = dict(inputs)
    if seen.keep is not None:
        stages["keep"] = seen.keep.to(key.device)
    if seen.cu_seqlens is not None:
        stages["cu_seqlens"] = seen.cu_seqlens.to(key.device)
        query, key, value = (_one_row(x) for x in (query, key, value))  # [1, H, B*T, D]
        stages = {name: _one_row(x) if _SHAPES[name].startswith("B") and name != "keep" else x for name, x in stages.items()}
    mask = _mask_text(variant, seen, key.shape[2])
    out = horner.attend(query, key, value, variant=variant.text, scale=scale, mask=mask, **stages)
    if seen.cu_seqlens is not None:
        out = out[0].unflatten(1, (B, T)).transpose(0, 1)
    return out.transpose(1, 2).contiguous(), None


def register(variant: str) -> str:
    """Registers attn_implementation="horner:VARIANT" for any variant of `horner.attend`, and returns that name."""
    _variant(variant)  # raises its errors now
    return _register(variant)


def _register(variant):
    name = "horner" if variant is None else f"horner:{variant}"
    AttentionInterface.register(name, functools.partial(attention, name=variant))
    AttentionMaskInterface.register(name, mask)
    return name


# The recurrent cache.


class RecurrentLayer(CacheLayerMixin):
    """The stream of one layer. `update` returns only the new keys, marked with the layer for `attention` to find."""

    def __init__(self):
        super().__init__()
        self.state = None
        self.tokens = 0
        self.waiting = False

    def lazy_initialization(self, key_states, value_states):
        self.batch_size = key_states.shape[0]
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check()
        self.waiting = True
        self.tokens += key_states.shape[2]
        key_states = key_states.view_as(key_states)  # a new tensor to mark
        key_states._horner_layer = self
        return key_states, value_states

    def _check(self):
        if self.waiting:
            raise RuntimeError(
                "a RecurrentCache was given to a model whose attention did not use it: it requires "
                "attn_implementation='horner' and keys that go unchanged from the cache to the attention"
            )

    def attend(self, q, k, v, variant, seen, scale, inputs):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise NotImplementedError(
                "a RecurrentCache has no gradients: decode under torch.no_grad(), or train without a cache"
            )
        if seen.cu_seqlens is not None:
            raise NotImplementedError("a RecurrentCache holds one sequence a row and does not support packed sequences")
        if self.state is None:
            mask = _mask_text(variant, seen, None)
            _check_state(variant, mask)
            B, heads, _, dim = k.shape
            shape = {"batch": B, "heads": heads, "dim": dim, "value_dim": v.shape[3]}
            self.state = horner.State(variant.text, **shape, dtype=k.dtype, device=k.device, mask=mask, scale=scale)
        self.waiting = False
        return self.state.step(q, k, v, keep=seen.keep, **inputs)

    def get_mask_sizes(self, query_length):
        self._check()
        return query_length, self.tokens  # only the new tokens

    def get_seq_length(self):
        return self.tokens

    def get_max_length(self):
        return -1

    def reset(self):
        self.__init__()

    def reorder_cache(self, beam_idx):
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices):
        if self.state is not None:
            rows = torch.arange(self.batch_size)[indices.cpu()]
            self.state, self.batch_size = self.state.select(rows), len(rows)

    def batch_repeat_interleave(self, repeats):
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove):
        if tokens_to_remove != 0:
            raise NotImplementedError("a RecurrentCache cannot forget its last tokens: its sums contain them")

    def offload(self):
        raise NotImplementedError("a RecurrentCache does not support offloading")

    def __deepcopy__(self, memo):
        copy = RecurrentLayer()
        copy.__dict__.update(self.__dict__)
        if self.state is not None:
            copy.state = self.state.select(torch.arange(self.batch_size))
        return copy


def _check_state(variant, mask):
    by_key = any(_SHAPES[name].endswith("S") for name in variant.inputs)  # of which only a State keeps the gates
    if mask == "causal" and variant.no_state and not by_key:
        raise ValueError(
            f"a RecurrentCache requires a finite state or a window, but {variant.text!r} has none: {variant.no_state}. "
            "Use another variant, such as 'taylor2', or another cache"
        )


class RecurrentCache(Cache):
    """`model.generate(..., past_key_values=RecurrentCache(model.config))` decodes with a `horner.State` in each layer.

    The memory and the time of a token do not grow with the number of tokens: a layer holds F(E + 1) sums for each key
    head, or the keys and values of its sliding window. Above order 3, a GPU keeps all keys.
    """

    def __init__(self, config):
        config = config.get_text_config(decoder=True)
        implementation, _, name = (config._attn_implementation or "").partition(":")
        if implementation != "horner":
            given = config._attn_implementation
            raise ValueError(f"a RecurrentCache requires attn_implementation='horner', got {given!r}")
        kinds = getattr(config, "layer_types", None)
        for i in range(config.num_hidden_layers):
            window = getattr(config, "sliding_window", None)
            kind = kinds[i] if kinds else "sliding_attention" if window else "full_attention"
            if kind not in ("full_attention", "sliding_attention"):
                raise NotImplementedError(f"a RecurrentCache does not support layers of type {kind!r}")
            variant = _of_layer(config, name or None, i)
            seen = Seen(True, window if kind == "sliding_attention" else None)
            _check_state(variant, _mask_text(variant, seen, None))
        super().__init__(layers=[RecurrentLayer() for _ in range(config.num_hidden_layers)])

    @property
    def bytes(self) -> int:
        """The memory that all layers use now."""
        return sum(layer.state.bytes for layer in self.layers if layer.state is not None)


for _name in [None, *horner.variants()]:
    _register(_name)
