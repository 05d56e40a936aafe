"""horner.State.merge: what two states have seen, one after the other, is what one state would have seen."""

import copy
import re

import pytest
import torch
from python_test import ROWS, SHAPES, inputs

import horner

# Whose values depend on the sums before them or on their place, and near keys of a map that a state does not hold.
REFUSED = re.compile("delta|gated_delta|kda|linear_cosine|cosine_taylor|lolcats")
ALONE = {"two_way_window", "prefix_lm", "bias", "chunk_window"}  # no streams, and one that has a test of its own
TEXTS = [
    "softmax:mask=window(7)", "softmax:mask=streaming(first=3,size=7)", "softmax:mask=streaming(first=30,size=2)",
    "forgetting:mask=window(7)", "linear_elu:near=window(9)", "near_taylor2:near=window(9),decay=token_gate",
]  # fmt: skip


def cut(tensors, *cuts):
    """The inputs of each part of a stream."""
    out = []
    for a, b in zip(cuts, cuts[1:]):
        axes = {name: max(SHAPES[name].upper().find("S"), SHAPES[name].upper().find("T")) for name in tensors}
        out.append({name: x if axes[name] < 0 else x.narrow(axes[name], a, b - a) for name, x in tensors.items()})
    return out


def stream(variant, dtype=torch.double):
    """The inputs of 40 tokens, by name."""
    torch.manual_seed(9)
    q, k, v, more = inputs(variant, dtype, T=40, S=40)
    return {name: x.detach() for name, x in {"q": q, "k": k, "v": v, **more}.items()}


def state(variant, *steps, **more):
    made = horner.State(variant, **{"batch": 2, "heads": 2, "dim": 3, "value_dim": 2, "dtype": torch.double, **more})
    for tensors in steps:
        made.step(**tensors)
    return made


def check_merged(variant, whole, a, b, **more):
    """States of the tokens up to a and of those up to b; then the other tokens, one at a time."""
    first, next_, later, *end = cut(whole, 0, a, min(a + 1, b), b, *range(b + 1, 41))
    one, two = state(variant, first, **more), state(variant, next_, later, **more)
    kept = copy.deepcopy(two)
    assert one.merge(two) is None and (one.tokens, two.tokens) == (b, b - a)
    wanted = horner.attend(**whole, variant=variant, execution="reference", **more)
    for t, tensors in enumerate(end, b):
        torch.testing.assert_close(one.step(**tensors), wanted[:, :, t : t + 1], atol=1e-8, rtol=1e-6)
        assert torch.equal(two.step(**tensors), kept.step(**tensors))  # the later state is as it was


@pytest.mark.parametrize("variant", [v for v in [*ROWS, *TEXTS] if v not in ALONE])
def test_merged_is_stepped(variant):
    if REFUSED.match(variant):
        first, later = (state(variant, tensors) for tensors in cut(stream(variant), 0, 20, 40))
        with pytest.raises(RuntimeError, match="cannot merge states of (the delta rule|this variant|a variant that divides values)"):
            first.merge(later)
        return
    for a, b in ((21, 37), (3, 39), (20, 20), (0, 30), (7, 28)):
        check_merged(variant, stream(variant), a, b)


def test_hidden_keys_and_closed_gates():
    """Padding of either state; a gate of 0 in the later one, of its first token too, forgets the earlier one."""
    for variant in ("taylor2", "softmax", "linear_decay", "centred_taylor2", "ssmax", "softmax:mask=window(7)"):
        whole = stream(variant)
        whole["keep"] = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.6
        whole["keep"][0, :25] = whole["keep"][1, 21:30] = False
        check_merged(variant, whole, 21, 33)
    for variant in ("linear_decay", "forgetting"):
        for t in (21, 25):
            whole = stream(variant)
            whole["decay"][0, :, t] = -torch.inf
            check_merged(variant, whole, 21, 33)


@pytest.mark.parametrize("variant", ["linear_decay", "gla", "gated_decay", "near_taylor2:near=window(9),decay=token_gate"])
@pytest.mark.parametrize("before, tokens", [(0, 30), (21, 30), (21, 35)])
def test_gates_before_the_first_key(variant, before, tokens):
    """NaN among the gates before the first key that is not hidden: of no row, as in one stream."""
    whole = stream(variant)
    whole["keep"] = torch.ones(2, 40, dtype=torch.bool)
    whole["keep"][0, :32] = False
    for t in (5, 25, 31, 32):
        whole["channel_decay" if variant == "gla" else "decay"][0, :, t] = torch.nan
    check_merged(variant, whole, before, tokens)


def test_chunks_are_merged_whole():
    whole = stream("softmax")
    check_merged("softmax", whole, 14, 33, mask="chunks(7)")
    first, later = (state("softmax", tensors, mask="chunks(7)") for tensors in cut(whole, 0, 15, 40))
    with pytest.raises(RuntimeError, match="cannot merge states of chunks of 7 tokens after 15 tokens"):
        first.merge(later)
    assert first.tokens == 15


def test_a_tree_of_parts():
    """A long text in parts, in any order of merging; and a state merged with itself."""
    whole = stream("taylor2")
    parts = [state("taylor2", tensors) for tensors in cut(whole, 0, 10, 20, 30, 39)]
    parts[2].merge(parts[3]), parts[0].merge(parts[1]), parts[0].merge(parts[2])
    (last,) = cut(whole, 39, 40)
    wanted = horner.attend(**whole, variant="taylor2")[:, :, 39:]
    torch.testing.assert_close(parts[0].step(**last), wanted, atol=1e-8, rtol=1e-6)
    for variant in ("taylor2", "softmax", "linear_decay"):
        (half,) = cut(stream(variant), 0, 20)
        twice, both = state(variant, half, half), state(variant, half)
        both.merge(both)
        (last,) = cut(stream(variant), 39, 40)
        torch.testing.assert_close(both.step(**last), twice.step(**last), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_smaller_dtypes(dtype):
    for variant in ("taylor2", "softmax"):
        whole = stream(variant, dtype)
        first, later, last = cut(whole, 0, 20, 39, 40)
        one, two = (state(variant, tensors, dtype=dtype) for tensors in (first, later))
        one.merge(two)
        torch.testing.assert_close(one.step(**last), state(variant, first, later, dtype=dtype).step(**last), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float, torch.half])
def test_autocast_changes_nothing(dtype):
    """A state computes in the dtype that it was made for."""
    for variant in ("near_taylor2", "based", "delta_exp", "softmax"):
        parts = cut(stream(variant, dtype), 0, 20, 39, 40)
        results = []
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                one = state(variant, parts[0], dtype=dtype)
                if variant == "delta_exp":
                    one.step(**parts[1])
                else:
                    one.merge(state(variant, parts[1], dtype=dtype))
                results.append(one.step(**parts[2]))
        assert results[0].dtype == dtype and torch.equal(*results)


@pytest.mark.parametrize(
    "other, error, words",
    [
        (lambda: torch.ones(1), TypeError, "later must be a horner.State, got Tensor"),
        (lambda: state("taylor3"), RuntimeError, "cannot merge states of two variants: .*taylor"),
        (lambda: state("taylor2", scale=0.5), RuntimeError, "cannot merge states of two variants"),
        (lambda: state("taylor2", dtype=torch.float), RuntimeError, "cannot merge states of two dtypes: float64 and float32"),
        (lambda: state("taylor2", batch=1), RuntimeError, r"cannot merge states of two shapes: k is \[2, 2, T, 3\] and \[1, 2, T, 3\]"),
        (lambda: state("taylor2", value_dim=3), RuntimeError, "cannot merge states of two shapes"),
    ],
)
def test_errors(other, error, words):
    one = state("taylor2", *cut(stream("taylor2"), 0, 20))
    with pytest.raises(error, match=words):
        one.merge(other())
    assert one.tokens == 20


@pytest.mark.parametrize("variant", ["softmax", "taylor2", "gated_delta", "linear_cosine"])
def test_joined_rows_go_on_as_each_alone(variant):
    whole = stream(variant)
    parts = [cut(whole, 0, n, n + 1)[:2] for n in (5, 20)]
    alone = [state(variant, first) for first, _ in parts]
    both = horner.State.joined(alone)
    batched = {name for name in whole if "B" in SHAPES[name]}
    step = {name: torch.cat([later[name] for _, later in parts]) if name in batched else x for name, x in parts[0][1].items()}
    wanted = torch.cat([s.step(**later) for s, (_, later) in zip(alone, parts)])
    torch.testing.assert_close(both.step(**step), wanted, atol=1e-9, rtol=1e-9)
    assert both.tokens == 21


def test_streams_that_cannot_be_joined():
    states = [state("softmax:mask=chunks(16)", *cut(stream("softmax"), 0, n)) for n in (3, 5)]
    with pytest.raises(RuntimeError, match="streams of 3 and 5 tokens: the chunks of its mask"):
        horner.State.joined(states)
    with pytest.raises(TypeError, match="got one of"):
        horner.State.joined([states[0], 3])
