"""Which models of transformers take their attention from its interface, for horner.hf. The others would ignore
attn_implementation="horner", with a line in a log at most: here they get an error."""

import functools
import inspect
import re
import sys
import warnings

import torch
from torch.nn import Module
from transformers import PreTrainedModel


def _source(thing):
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return None  # a notebook, or code that was made on the spot


@functools.cache
def _own_attention(family):
    """Whether the file of a class of models computes attention without the interface."""
    code = _source(sys.modules.get(family.__module__))
    if code is None or "ALL_ATTENTION_FUNCTIONS" in code:
        return False
    return re.search(r"^class \w*Attention\w*\(nn\.Module\b", code, re.M) is not None


@functools.cache
def _takes_attention(kind):
    """Whether a class of attention modules calls the function that the interface names."""
    sources = [_source(part) for part in kind.__mro__ if issubclass(part, Module)]
    return any(code is None or "ALL_ATTENTION_FUNCTIONS" in code for code in sources)


@functools.cache
def adds_positions(kind):
    """Whether a class of attention modules adds positions to q, k or their scores. GPT-2 has added its own to the tokens."""
    sources = [_source(part) for part in kind.__mro__ if issubclass(part, Module) and part is not Module]
    words = r"rotary|(?<!p)rope|alibi|relative|position_(emb|bias)|distance"
    return any(code is None or re.search(words, code, re.I) for code in sources)


def scaled_in(code):
    """How many of q and k a forward multiplies itself, by 1/sqrt(D) in all, and asks for a scale of 1."""
    asks = re.search(r"\bscaling=1\.0\b", code) and re.search(r"self\.\w*scal", code)
    if not asks and "* self.attention_head_size**-0.5" not in code:
        return 0
    return 2 if "key_states * self.scaling" in code else 1


_scaled: dict[type, int] = {}


@torch.compiler.assume_constant_result
def scales_itself(kind):
    """How many of q and k a class of attention modules has scaled before: those of OPT, Whisper and ESM the queries, OpenAI's
    Privacy Filter both."""
    if kind not in _scaled:
        _scaled[kind] = scaled_in(_source(kind.forward) or "")
    return _scaled[kind]


def _is_attention(module):
    return re.search("Attention|MLA$", type(module).__name__)


def attentions(model):
    """The attention modules of a model that hold no other."""
    found = [module for module in model.modules() if _is_attention(module)]
    return [module for module in found if not any(_is_attention(part) for part in module.modules() if part is not module)]


def _asked(model, part, implementation):
    """What an attn_implementation asks of a part of a model."""
    if not isinstance(implementation, dict):
        return implementation or ""
    name = next((key for key in implementation if key and getattr(model.config, key, None) is part.config), "")
    asked = implementation.get(name, "")
    return asked if isinstance(asked, str) else ""


def check_class(model, implementation):
    """Raises if a part of the model, or the model before it has parts, has its own attention and is asked for horner."""
    parts = {id(part): part for part in [model, *model.modules()] if isinstance(part, PreTrainedModel)}
    for part in parts.values():
        asked = _asked(model, part, implementation)
        if asked.partition(":")[0] == "horner" and _own_attention(type(part)):
            raise NotImplementedError(
                f"attn_implementation={asked!r} does not support {type(part).__name__}: it computes attention in code of its "
                "own, without transformers' AttentionInterface. Load it without attn_implementation, or choose a family "
                "of the table in horner's docs/huggingface.md"
            )


def check_modules(model):
    """Raises if a model that is asked for horner has no attention, and warns of attention modules that stay as they are."""
    asked = model.config._attn_implementation or ""
    if asked.partition(":")[0] != "horner":
        return
    kinds = {type(module) for module in attentions(model)}
    if not kinds:
        raise NotImplementedError(
            f"attn_implementation={asked!r} does not support {type(model).__name__}: it has no attention. If it is a part of "
            "a larger model, name the other parts: attn_implementation={'text_config': 'horner'}"
        )
    without = sorted(kind.__name__ for kind in kinds if not _takes_attention(kind))
    if without:
        warnings.warn(
            f"attn_implementation={asked!r} does not reach {', '.join(without)} of {type(model).__name__}, which computes in "
            "code of its own",
            stacklevel=5,
        )
