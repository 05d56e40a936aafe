"""Which layer of a model has which variant, and which head of a layer: "linear_decay*3,softmax^2|l2^2". The grammar is that
of the command, src/nn/pattern.h."""

import re
from typing import NamedTuple, Optional

import torch

import horner


_MOST = 10000  # layers or heads, as in the command


def _outside(text):
    """The text with blanks for what is in parentheses, where no mark counts: "fixed(1e+2)+l2" becomes "fixed(    )+l2"."""
    out, depth = "", 0
    for letter in text:
        before, depth = depth, depth + {"(": 1, ")": -1}.get(letter, 0)
        out += " " if before > 0 and depth > 0 else letter
    return out


def _pieces(text, separators):
    """At the separators outside parentheses."""
    cuts = [-1, *(m.start() for m in re.finditer(f"[{re.escape(separators)}]", _outside(text))), len(text)]
    return [text[a + 1 : b] for a, b in zip(cuts, cuts[1:])]


def _is_change(piece):
    """Whether a piece after a variant with changes is one more of them: "norm=l2", or a word that no variant is called."""
    first = _pieces(piece, "*|^+")[0]
    if ":" in first or "=" in first:
        return ":" not in first
    try:
        return not horner.describe(first)
    except (RuntimeError, ValueError):
        return True


def _has_changes(item):
    """Whether the last variant of an item has changes, to which more may be added."""
    return ":" in _pieces(item, "|+")[-1]


def _repeated(item, mark, wrong):
    """The variant and the number of "variant<mark>number"; 1 without the mark."""
    at = _outside(item).rfind(mark)
    variant, count = (item, "1") if at < 0 else (item[:at], item[at + 1 :])
    if not variant or not re.fullmatch("0*[1-9][0-9]{0,4}", count) or int(count) > _MOST:
        raise ValueError(f"{wrong} has the part {item!r}")
    return variant, int(count)


def turn(pattern):
    """One turn of a pattern, a list of the texts of layers."""
    if not isinstance(pattern, (str, list, tuple)):
        raise TypeError(f"a pattern of layers must be a str or a list of str, got {type(pattern).__name__}")
    if not isinstance(pattern, str):
        return [variant for each in pattern for variant in turn(each)]
    joined = []
    for item in _pieces(pattern, ","):
        if joined and _has_changes(joined[-1]) and _is_change(item):
            joined[-1] += "," + item
        else:
            joined.append(item)
    out = []
    for item in joined:
        variant, count = _repeated(item, "*", f"a pattern looks like 'linear_decay*3,softmax'; {pattern!r}")
        out += [variant] * count
    return out


def variants_of_layers(pattern: str | list[str], layers: int) -> list[str]:
    """The variants of a model's layers, from a pattern as `horner train --attention` takes it: "linear_decay*3,softmax", or
    a list of variants. The pattern repeats until every layer has one."""
    variants = turn(pattern)
    if not variants:
        raise ValueError(f"a pattern looks like 'linear_decay*3,softmax'; {pattern!r} has no layer")
    if not 1 <= len(variants) <= layers:
        raise ValueError(f"the pattern {pattern!r} has {len(variants)} layers, but the model has {layers}: it may be shorter, not longer")
    return [variants[i % len(variants)] for i in range(layers)]


def forms(layer):
    """The operators of the heads of a layer and how many heads have them; None: all that the layer has."""
    texts = _pieces(layer, "|")
    if len(texts) == 1 and "^" not in _outside(layer):
        found = [(layer, None)]
    else:
        found = [_repeated(text, "^", f"heads look like 'softmax^2|lolcats'; {layer!r}") for text in texts]
    out = [(tuple(_pieces(text, "+")), count) for text, count in found]
    if not all(variant for variants, _ in out for variant in variants):
        raise ValueError(f"heads look like 'softmax^2|lolcats'; in {layer!r} a variant is missing")
    return out


def variants_of(layer):
    """Each variant of the heads of a layer once, in the order of its parts."""
    return list(dict.fromkeys(variant for variants, _ in forms(layer) for variant in variants))


class Part(NamedTuple):
    """Heads of a layer that have the same operator, and the key heads that serve them, as many of its heads each."""

    variant: str
    heads: tuple[int, ...]
    key_heads: tuple[int, ...]


class Group(NamedTuple):
    """Heads one after the other that have the same operators: how many, and where they are in each of these parts."""

    heads: int
    found: tuple[tuple[int, int], ...]  # part, its first head


class Parts(NamedTuple):
    parts: tuple[Part, ...]
    groups: tuple[Group, ...]


def _key_heads(heads, shared):
    served = [head // shared for head in heads]
    each = sorted(set(served))
    return tuple(each if len({served.count(group) for group in each}) == 1 else served)


def parts_of(layer: str, heads: int, kv_heads: int) -> Optional[Parts]:
    """The parts of a layer; None if all its heads have the same operator."""
    found, names = forms(layer), variants_of(layer)
    if len(names) == 1 and found[0][1] is None:
        return None
    of_heads = [variants for variants, count in found for _ in range(heads if count is None else count)]
    if len(of_heads) != heads:
        raise ValueError(f"{layer!r} has {len(of_heads)} heads, but a layer of the model has {heads}")
    if len(names) == 1:
        return None
    with_name = [[head for head, variants in enumerate(of_heads) if name in variants] for name in names]
    for name in names:
        around = torch.ops.horner.around(name)
        if any(around[what] for what in ("mamba", "raw_decay", "tied_keys", "exp_gate")):
            raise ValueError(f"{layer!r}: variant {name!r} changes more than the operator, so it cannot share a layer with others")
    parts = [Part(name, tuple(has), _key_heads(has, heads // kv_heads)) for name, has in zip(names, with_name)]
    groups, head = [], 0
    while head < heads:
        n = 1
        while head + n < heads and of_heads[head + n] == of_heads[head]:
            n += 1
        found = tuple((i, part.heads.index(head)) for i, part in enumerate(parts) if part.variant in of_heads[head])
        groups.append(Group(n, found))
        head += n
    return Parts(tuple(parts), tuple(groups))


def some_heads(x, heads):
    """These heads of [B, H, ..]. By slices: an index would have to be copied to the GPU."""
    runs = []
    for head in heads:
        if runs and head == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((head, 1))
    slices = [x.narrow(1, first, n) for first, n in runs]
    return slices[0] if len(slices) == 1 else torch.cat(slices, 1)


def all_heads(groups, results):
    """The result of a layer [B, H, ..] from those of its parts."""
    out = []
    for group in groups:
        slices = [results[part].narrow(1, first, group.heads) for part, first in group.found]
        out.append(sum(slices[1:], slices[0]))
    return torch.cat(out, 1)
