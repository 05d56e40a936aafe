"""The cache of horner.hf: a `horner.State` in each layer of a model of transformers."""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import horner

from ._hf_masks import Seen, mask_text
from ._hf_variants import SHAPES, of_layer, with_cap


class RecurrentLayer(CacheLayerMixin):
    """The stream of one layer. `update` returns only the new keys, marked with the layer for `attention` to find."""

    def __init__(self):
        super().__init__()
        self.states = {}  # of each part of the layer
        self.tokens = 0
        self.waiting = False
        self.past = {}  # what the layer's own weights need of the tokens before: rows of convolutions, sums of gates

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

    def attend(self, q, k, v, variant, seen, scale, inputs, part=0):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise NotImplementedError(
                "a RecurrentCache has no gradients: decode under torch.no_grad(), or train without a cache"
            )
        if seen.cu_seqlens is not None:
            raise NotImplementedError("a RecurrentCache holds one sequence a row and does not support packed sequences")
        if "bias" in inputs:
            raise NotImplementedError("a RecurrentCache does not support a position bias: its sums have lost the positions")
        if part not in self.states:
            _check_state(variant)
            mask = mask_text(variant, seen, None)
            B, heads, _, dim = k.shape
            shape = {"batch": B, "heads": heads, "dim": dim, "value_dim": v.shape[3]}
            self.states[part] = horner.State(variant.run, **shape, dtype=k.dtype, device=k.device, mask=mask, scale=scale)
        self.waiting = False
        return self.states[part].step(q, k, v, keep=seen.keep, **inputs)

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
        if self.states:
            rows = torch.arange(self.batch_size)[indices.cpu()]
            self.states, self.batch_size = self._selected(rows), len(rows)
            self.past = {name: x[rows.to(x.device)] for name, x in self.past.items()}

    def _selected(self, rows):
        return {part: state.select(rows) for part, state in self.states.items()}

    def batch_repeat_interleave(self, repeats):
        if self.states:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove):
        if tokens_to_remove != 0:
            raise NotImplementedError("a RecurrentCache cannot forget its last tokens: its sums contain them")

    def offload(self):
        raise NotImplementedError("a RecurrentCache does not support offloading")

    def __deepcopy__(self, memo):
        copy = RecurrentLayer()
        copy.__dict__.update(self.__dict__)
        copy.past = dict(self.past)
        if self.states:
            copy.states = self._selected(torch.arange(self.batch_size))
        return copy


def _check_state(variant):
    if variant.mask == "prefix" or variant.reach.ahead:
        raise NotImplementedError(f"a RecurrentCache does not support the mask of {variant.text!r}, which shows keys ahead")
    if "bias" in variant.inputs:
        raise NotImplementedError("a RecurrentCache does not support a position bias: its sums have lost the positions")


def _grows(variant, mask):
    """Whether a state keeps all keys, which a cache of transformers could keep as well."""
    by_key = any(SHAPES[name].endswith("S") for name in variant.inputs)  # of which only a State keeps the gates
    return bool(mask == "causal" and variant.no_state and not by_key)


def past_of(cache, layer):
    """What a RecurrentCache keeps for the weights of a layer; None for another cache."""
    return cache.layers[layer].past if isinstance(cache, RecurrentCache) else None


class RecurrentCache(Cache):
    """`model.generate(..., past_key_values=RecurrentCache(model.config))` decodes with a `horner.State` in each layer.

    The memory and the time of a token do not grow with the number of tokens: a layer holds F(E + 1) sums for each key
    head, or the keys and values of its sliding window. Above order 3, a GPU keeps all keys. Layers and heads without a
    finite state keep their keys and values where others of the model have one; where none has, this is an error.
    """

    def __init__(self, config):
        config = config.get_text_config(decoder=True)
        implementation, _, name = (config._attn_implementation or "").partition(":")
        if implementation != "horner":
            given = config._attn_implementation
            raise ValueError(f"a RecurrentCache requires attn_implementation='horner', got {given!r}")
        kinds, kept = getattr(config, "layer_types", None), []
        cap = getattr(config, "attn_logit_softcapping", None)
        for i in range(config.num_hidden_layers):
            window = getattr(config, "sliding_window", None)
            kind = kinds[i] if kinds else "sliding_attention" if window else "full_attention"
            if kind not in ("full_attention", "sliding_attention"):
                raise NotImplementedError(f"a RecurrentCache does not support layers of type {kind!r}")
            seen = Seen(True, window if kind == "sliding_attention" else None)
            for variant in of_layer(config, name or None, i).variants:
                _check_state(variant)
                mask, capped = mask_text(variant, seen, None), with_cap(variant, cap)
                kept.append((_grows(variant, mask), variant))
                if _grows(capped, mask) and not _grows(variant, mask):
                    raise ValueError(
                        f"a RecurrentCache requires a finite state or a window, but {capped.text!r} has none: {capped.no_state}. "
                        f"This model caps them (attn_logit_softcapping={cap}): use another cache"
                    )
        if kept and all(grows for grows, _ in kept):
            variant = kept[0][1]
            raise ValueError(
                f"a RecurrentCache requires a finite state or a window, but {variant.text!r} has none: {variant.no_state}. "
                "Use another variant, such as 'taylor2', or another cache"
            )
        super().__init__(layers=[RecurrentLayer() for _ in range(config.num_hidden_layers)])

    @property
    def bytes(self) -> int:
        """The memory that all layers use now."""
        return sum(state.bytes for layer in self.layers for state in layer.states.values())
