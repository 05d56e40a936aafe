"""torch's transforms of `horner.attend`: vmap, grad, vjp, jvp, Jacobians, gradients of gradients, batches of gradients."""

import pytest
import torch
from python_test import CONSTANT_PARTS, CONSTANTS, ROWS, inputs
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import horner

SAMPLE = ["softmax", "gated", "taylor3", "gated_decay", "entmax15", "linear_cosine", "centred_taylor2", "ssmax"]
OTHER_KERNELS = ["gated_delta", "gla", "hgrn2", "near_taylor2"]


def split(variant, dtype, execution="auto", **sizes):
    """attend as a function of its differentiable tensors, and their values."""
    torch.manual_seed(3)
    q, k, v, more = inputs(variant, dtype, **sizes)
    fixed = {name: x for name, x in more.items() if name in CONSTANTS}
    free = {"q": q, "k": k, "v": v, **{name: x for name, x in more.items() if name not in CONSTANTS}}

    def function(*tensors):
        named = dict(zip(free, tensors))
        return horner.attend(named.pop("q"), named.pop("k"), named.pop("v"), variant=variant, execution=execution, **named, **fixed)

    return function, [x.detach() for x in free.values()]


def directions(tensors):
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(x.shape, generator=generator, dtype=torch.double).to(x.dtype) for x in tensors)


def close(a, b, dtype):
    many = (a, b) if isinstance(a, (tuple, list)) else ([a], [b])
    assert len(many[0]) == len(many[1])
    for x, y in zip(*many):
        size = max(1.0, y.detach().abs().max().item())
        torch.testing.assert_close(x, y, rtol=0, atol=size * (1e-9 if dtype == torch.double else 1e-3))


IN_CHUNKS = {"execution": "chunked", "T": 70, "S": 70}
CASES = [(v, torch.double, {}) for v in ROWS] + [(v, torch.float, {}) for v in SAMPLE + OTHER_KERNELS] + [("taylor2", torch.float, IN_CHUNKS)]


@pytest.mark.parametrize("variant, dtype, more", CASES)
def test_every_variant(variant, dtype, more):
    f, x = split(variant, dtype, **more)
    leaves = [t.clone().requires_grad_() for t in x]
    (u,), t = directions([f(*x)]), directions(x)
    wanted = torch.autograd.grad((f(*leaves) * u).sum(), leaves)
    places = tuple(range(len(x)))
    close(grad(lambda *x: (f(*x) * u).sum(), places)(*x), wanted, dtype)
    y, pull = vjp(f, *x)
    close(pull(u), wanted, dtype)
    # the Jacobian's product with the tangents, by its transpose
    y2, dy = jvp(f, tuple(x), t)
    close(y2, y, dtype)
    close((dy * u).sum(), sum((a * b).sum() for a, b in zip(wanted, t)), dtype)
    with forward_ad.dual_level():
        dual = f(*(forward_ad.make_dual(a, b) for a, b in zip(x, t)))
        close(forward_ad.unpack_dual(dual).tangent, dy, dtype)
    # a batch of all tensors, parameters too, and of the queries alone
    two = [torch.stack([a, a + 0.1 * b]) for a, b in zip(x, directions(x[::-1])[::-1])]
    each = [f(*(a[i] for a in two)) for i in range(2)]
    close(vmap(f)(*two), torch.stack(each), dtype)
    close(vmap(lambda q: f(q, *x[1:]), 1)(two[0].movedim(0, 1))[0], each[0], dtype)
    by_sample = vmap(grad(lambda *x: (f(*x) * u).sum(), places))(*two)
    close([g[0] for g in by_sample], wanted, dtype)


TWICE = [v for v in ROWS if v not in CONSTANT_PARTS]


@pytest.mark.parametrize("variant", TWICE)
def test_every_variant_twice(variant):
    """Numeric second derivatives, and the Jacobian of q by rows beside its product with a direction."""
    f, x = split(variant, torch.double, B=1, T=4, S=4)
    leaves = [t.clone().requires_grad_() for t in x]
    torch.autograd.gradgradcheck(f, leaves, fast_mode=True, atol=1e-4)
    (t,) = directions(x[:1])
    jacobian = jacrev(f)(*x)
    close((jacobian * t).sum((-4, -3, -2, -1)), jvp(lambda q: f(q, *x[1:]), (x[0],), (t,))[1], torch.double)


@pytest.mark.filterwarnings("ignore:.*has only first gradients")
@pytest.mark.parametrize("variant, dtype", [(v, d) for v in SAMPLE for d in (torch.double, torch.float)])
def test_second_gradients(variant, dtype):
    f, x = split(variant, dtype)
    leaves = [t.clone().requires_grad_() for t in x]
    t = directions(x)

    def second(tensors):
        first = torch.autograd.grad(f(*tensors).sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum((a * b).sum() for a, b in zip(first, t)), tensors, allow_unused=True)

    def slope(*tensors):
        first = grad(lambda *y: f(*y).sin().sum(), tuple(range(len(x))))(*tensors)
        return sum((a * b).sum() for a, b in zip(first, t))

    wanted = [torch.zeros_like(a) if g is None else g for a, g in zip(x, second(leaves))]
    close(grad(slope, tuple(range(len(x))))(*x), wanted, dtype)
    if dtype == torch.double:
        torch.autograd.gradgradcheck(f, leaves, fast_mode=True, atol=1e-4)
    gradients = torch.stack([u for u in directions([f(*x)] * 3)])
    many = torch.autograd.grad(f(*leaves), leaves, gradients, is_grads_batched=True)
    one = torch.autograd.grad(f(*leaves), leaves, gradients[1])
    close([g[1] for g in many], one, dtype)


@pytest.mark.filterwarnings("ignore:.*has only first gradients")
@pytest.mark.parametrize("variant", ["linear_cosine", "gated_decay", "centred_taylor2"])
def test_a_batch_of_gradients_runs_no_kernel(variant):
    """Not even on zeros: what the reference gives goes to the inputs, and nothing to the nodes of the execution."""
    f, x = split(variant, torch.float, T=70, S=70)
    leaves = [t.clone().requires_grad_() for t in x]
    out = f(*leaves)

    def kernels(gradient, **more):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.grad(out, leaves, gradient, retain_graph=True, **more)
        return sum(e.count for e in profile.key_averages() if e.key.endswith(" backward"))

    assert kernels(torch.randn(2, *out.shape), is_grads_batched=True) == 0
    assert kernels(torch.randn(out.shape)) > 0


@pytest.mark.parametrize("variant, dtype", [(v, torch.double) for v in SAMPLE] + [(v, torch.float) for v in ("softmax", "gated", "gla")])
def test_jacobians(variant, dtype):
    f, x = split(variant, dtype)
    small = [a[:1] if a.dim() > 2 else a for a in x]
    for place in range(len(x)):
        close(jacrev(f, place)(*small), jacfwd(f, place)(*small), dtype)
    h = hessian(lambda q: f(q, *small[1:]).sin().sum())(small[0])
    close(h, jacrev(jacrev(lambda q: f(q, *small[1:]).sin().sum()))(small[0]), dtype)
    flat = h.reshape(small[0].numel(), -1)
    close(flat, flat.T, dtype)


@pytest.mark.parametrize("dtype", [torch.double, torch.float])
@pytest.mark.parametrize("variant", sorted(CONSTANT_PARTS))
def test_jacobians_with_constant_parts(variant, dtype):
    """By rows: the rows of gradients."""
    f, x = split(variant, dtype)
    (u,) = directions([f(*x)])
    leaves = [t.clone().requires_grad_() for t in x]
    wanted = torch.autograd.grad((f(*leaves) * u).sum(), leaves)
    for place, gradient in enumerate(wanted):
        close((jacrev(f, place)(*x).movedim((0, 1, 2, 3), (-4, -3, -2, -1)) * u).sum((-4, -3, -2, -1)), gradient, dtype)


def test_autocast():
    """What a transform gives is as without: the same dtypes, and gradients of the same numbers, outside of autocast too."""
    q, k, v = (x.detach() for x in inputs("softmax", torch.float)[:3])

    def f(q):
        return horner.attend(q, k.bfloat16(), v)

    def first(q):
        return f(q).float().sin().sum()

    leaf, (t,) = q.clone().requires_grad_(), directions([q])
    with torch.autocast("cpu", torch.bfloat16):
        out, loss = f(q), first(leaf)
        (y, dy), (z, pull), lse = jvp(f, (q,), (t,)), vjp(first, q), jvp(lambda q: horner.attend(q, k, v, return_lse=True), (q,), (t,))
        found = grad(first)(q), vmap(grad(first))(q[None])[0], functionalize(first)(q), functionalize(grad(first))(q)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(f(forward_ad.make_dual(q, t)))
        two = grad(lambda q: (grad(first)(q) * t).sum())(q)
    loss.backward()
    assert out.dtype == y.dtype == dy.dtype == dual.tangent.dtype == lse[1][0].dtype == torch.bfloat16
    assert torch.equal(y, out) and torch.equal(dual.primal, out) and torch.equal(z, loss) and torch.equal(found[2], loss)
    assert torch.equal(found[0], leaf.grad) and torch.equal(found[1], leaf.grad) and torch.equal(pull(torch.ones(()))[0], leaf.grad)
    exact = grad(lambda q: horner.attend(q, k, v).sin().sum())
    torch.testing.assert_close(found[3], exact(q), atol=0.05, rtol=0.05)
    torch.testing.assert_close(dy.float(), jvp(lambda q: horner.attend(q, k, v), (q,), (t,))[1], atol=0.05, rtol=0.05)
    torch.testing.assert_close(two, grad(lambda q: (exact(q) * t).sum())(q), atol=0.05, rtol=0.05)


def test_masks_and_packing_under_transforms():
    q, k, v, _ = inputs("softmax")
    q, k, v = (x.detach() for x in (q, k, v))
    keep = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()
    cuts = torch.tensor([0, 2, 5])
    for more in ({"keep": keep}, {"cu_seqlens": cuts}):
        def f(q, more=more):
            return horner.attend(q, k, v, variant="l2", **more)

        two = torch.stack([q, q * 0.5])
        close(vmap(f)(two), torch.stack([f(q), f(q * 0.5)]), torch.double)
        close(jacrev(f)(q), jacfwd(f)(q), torch.double)
    keeps = torch.stack([keep, ~keep.flip(0)])
    close(vmap(lambda keep: horner.attend(q, k, v, keep=keep))(keeps)[1], horner.attend(q, k, v, keep=keeps[1]), torch.double)


def rows_of(variant, **more):
    """The result, and the statistics of its rows, or the logs of their sums, as a function of q, k and v."""
    if more.pop("lse", False):
        return lambda q, k, v: horner.attend(q, k, v, variant=variant, return_lse=True, **more)

    def function(q, k, v):
        out, rows = horner.statistics(q, k, v, variant=variant, **more)
        return out, torch.stack([*rows.values()], -1)

    return function


SHOWN = torch.ones(5, 5, dtype=torch.bool).tril()
SHOWN[3, 0] = SHOWN[4] = False  # all keys of a row


@pytest.mark.parametrize("dtype", [torch.double, torch.float])
@pytest.mark.parametrize("variant, more", [
    ("softmax", {"lse": True}), ("l2", {"lse": True, "mask": SHOWN}), ("softmax", {}), ("taylor3", {}), ("entmax15", {}),
])  # fmt: skip
def test_statistics_of_rows(variant, more, dtype):
    """Numbers as without a transform, and no gradient: that of the result is as of `attend` alone."""
    torch.manual_seed(5)
    f = rows_of(variant, **more)
    x = [x.detach() for x in inputs(variant, dtype)[:3]]
    t = directions(x)
    out, rows = f(*x)

    def loss(*x):
        out, rows = f(*x)
        return out.sin().sum() + rows.sum(), (out, rows)

    leaves = [a.clone().requires_grad_() for a in x]
    wanted = torch.autograd.grad(f(*leaves)[0].sin().sum(), leaves)
    gradients, aux = grad(loss, (0, 1, 2), has_aux=True)(*x)
    close(gradients, wanted, dtype)
    close(aux, (out, rows), dtype)
    primals, tangents = jvp(f, tuple(x), t)
    close(primals, (out, rows), dtype)
    close((tangents[0] * out.cos()).sum(), sum((a * b).sum() for a, b in zip(wanted, t)), dtype)
    assert not tangents[1].any()
    with forward_ad.dual_level():
        dual = f(*(forward_ad.make_dual(a, b) for a, b in zip(x, t)))
        close(forward_ad.unpack_dual(dual[0]).tangent, tangents[0], dtype)
        assert forward_ad.unpack_dual(dual[1]).tangent is None
    two = [torch.stack([a, a + 0.1 * b]) for a, b in zip(x, t)]
    each = [torch.stack(parts) for parts in zip(f(*x), f(*(a[1] for a in two)))]
    close(vmap(f)(*two), each, dtype)
    close(vmap(lambda q: f(q, *x[1:]), 1)(two[0].movedim(0, 1))[1][0], rows, dtype)
    close([g[0] for g in vmap(grad(lambda *x: loss(*x)[0], (0, 1, 2)))(*two)], wanted, dtype)
    close(hessian(lambda q: loss(q, *x[1:])[0])(x[0]), jacrev(jacrev(lambda q: f(q, *x[1:])[0].sin().sum()))(x[0]), dtype)


def test_statistics_of_gates_that_are_mapped():
    """Parameters with the mapped axis go one by one, also with their statistics."""
    q, k, v, more = inputs("gated", torch.double)
    weights = torch.stack([more.pop("norm_weight"), torch.rand(2, dtype=torch.double)]).detach()

    def f(w):
        out, rows = horner.statistics(q, k, v, variant="gated", norm_weight=w, **more)
        return out, rows["entropy"]

    close(vmap(f)(weights), [torch.stack(parts) for parts in zip(*map(f, weights))], torch.double)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "dual", "nested"])
def test_what_has_no_transform_says_so(transform):
    q, k, v = (x.detach().float() for x in inputs("taylor2")[:3])
    state = horner.State("taylor2", batch=2, heads=2, dim=3, value_dim=2)
    other = horner.State("taylor2", batch=2, heads=2, dim=3, value_dim=2)

    def refused(f):
        words = r"(horner\.State|why_not) is not supported under torch.func's transforms and forward-mode differentiation: (it changes|call it)"
        with pytest.raises(RuntimeError, match=words):
            if transform == "vmap":
                vmap(f)(torch.stack([q, q]))
            elif transform == "grad":
                grad(lambda q: f(q).sum())(q)
            elif transform == "jvp":
                jvp(f, (q,), (q,))
            elif transform == "nested":
                vmap(grad(lambda q: f(q).sum()))(torch.stack([q, q]))
            else:
                with forward_ad.dual_level():
                    f(forward_ad.make_dual(q, q))

    refused(lambda q: state.step(q, k, v))
    assert state.tokens == 0
    if transform == "dual":  # which only concerns tensors with a tangent
        with forward_ad.dual_level():
            assert state.step(q, k, v).shape == (2, 4, 5, 2) and horner.why_not(q, k, v, execution="reference") == ""
        return
    refused(lambda q: state.select(q[:, 0, 0, 0].long()))
    refused(lambda q: state.merge(other))
    refused(lambda q: horner.State("taylor2", batch=2, heads=2, dim=3).step(q, k, v))
    refused(lambda q: horner.why_not(q, k, v, execution="reference"))


def test_transforms_and_compile():
    """Of what is compiled, and vmap within. Gradients within are refused with what to do, or right (torch 2.14)."""
    q, k, v = (x.detach().float() for x in inputs("softmax")[:3])

    def f(q):
        return horner.attend(q, k, v).sin().sum()

    close(grad(torch.compile(f, backend="aot_eager"))(q), grad(f)(q), torch.float)
    inside = torch.compile(lambda q: vmap(f)(q), backend="aot_eager")
    close(inside(torch.stack([q, q])), vmap(f)(torch.stack([q, q])), torch.float)
    try:
        found = torch.compile(lambda q: grad(f)(q), backend="aot_eager")(q)
    except RuntimeError as error:
        assert "transform the compiled one, torch.func.grad" in str(error)
    else:
        close(found, grad(f)(q), torch.float)


def has_warned(recwarn, capfd):
    """Of an operator that vmap runs one by one, in Python or as the compiler does."""
    return "performance drop" in capfd.readouterr().err or any("horner::" in str(w.message) for w in recwarn)


def test_vmap_in_a_compiled_function_runs_one_batch(recwarn, capfd):
    q, k, v, more = inputs("rms", torch.float)
    q, k, v, w = (x.detach() for x in (q, k, v, more["norm_weight"]))

    def f(q, w):
        return horner.attend(q, k, v, variant="rms", norm_weight=w), horner.attend(q, k, v, return_lse=True)[1]

    for dims in ((0, None), (0, 0)):
        two = (torch.stack([q, q.flip(0)]), w if dims[1] is None else torch.stack([w, w + 1]))
        found = torch.compile(vmap(f, dims), backend="aot_eager", fullgraph=True)(*two)
        close(found, vmap(f, dims)(*two), torch.float)
    assert not has_warned(recwarn, capfd)


@pytest.mark.parametrize("variant", SAMPLE)
def test_functionalize(variant, recwarn, capfd):
    f, x = split(variant, torch.double)
    close(functionalize(f)(*x), f(*x), torch.double)
    two = torch.stack([x[0], x[0].flip(0)])
    first = grad(lambda q: f(q, *x[1:]).sin().sum())
    for each in (lambda q: f(q, *x[1:]), first, jacfwd(lambda q: f(q, *x[1:]).sum((0, 1)))):
        close(functionalize(vmap(each))(two), vmap(each)(two), torch.double)
        close(vmap(functionalize(each))(two), vmap(each)(two), torch.double)
    close(grad(functionalize(lambda q: f(q, *x[1:]).sin().sum()))(x[0]), first(x[0]), torch.double)
    assert not has_warned(recwarn, capfd)


@pytest.mark.parametrize("words, more", [
    (r"slope must have shape \[G\], got \[\]", {"variant": "softmax:decay=slope", "slope": torch.tensor(1.0)}),
    (r"v must have shape \[B, G, S, E\] with S = 3, got \[2, 2, 5, 2\]", {"short": True}),
    ("missing input 'output_gate'", {"variant": "gate"}),
    ("input 'decay' was given, but variant 'softmax' does not use it", {"decay": torch.zeros(2, 2, 5)}),
    ("keep must have dtype bool, got float64", {"keep": torch.ones(2, 5).double()}),
    ("no execution 'nonsense'; possible: 'auto'", {"execution": "nonsense"}),
    ("chunked: supports only float32, bfloat16 and float16", {"execution": "chunked"}),
    ("k must be a torch.Tensor, got None", {"k": None}),
    ("decay must hold the logs of gates", {"variant": "softmax:decay=token_gate", "decay": torch.full((2, 2, 5), 0.97)}),
    ("cu_seqlens must go from 0 to 5, got 0 to 9", {"cu_seqlens": torch.tensor([0, 3, 9])}),
])  # fmt: skip
def test_calls_are_checked(words, more):
    """Before a batch of vmap is folded, and where functionalize has the reference run beside a derivative."""
    q, k, v = (x.detach() for x in inputs("softmax")[:3])
    k = more.get("k", k[:, :, : 3 if "short" in more else 5])
    more = {name: x for name, x in more.items() if name not in ("k", "short")}

    def f(q):
        return horner.attend(q, k, v, **more).sum()

    for function, x in ((f, q), (grad(f), q), (vmap(grad(f)), q[None])):
        for each in (function, functionalize(function)):
            with pytest.raises((RuntimeError, TypeError), match=words):
                each(x)


def test_functionalized_statistics():
    q, k, v = (x.detach() for x in inputs("softmax")[:3])

    def f(q):
        return horner.attend(q, k, v, return_lse=True)

    close(functionalize(f)(q), f(q), torch.double)
    close(functionalize(vmap(f))(q[None]), vmap(f)(q[None]), torch.double)
    with pytest.raises(RuntimeError, match="do not support torch.func.functionalize together with a derivative"):
        functionalize(grad(lambda q: f(q)[0].sum()))(q)


def test_vmap_of_nothing():
    q, k, v, more = inputs("rms")
    q, k, v, w = (x.detach() for x in (q, k, v, more["norm_weight"]))
    none = q[None][:0]
    assert vmap(lambda q: horner.attend(q, k, v))(none).shape == (0, 2, 4, 5, 2)
    assert vmap(lambda q: horner.attend(q, k, v, return_lse=True)[1], 1)(none.movedim(0, 1)).shape == (0, 2, 4, 5)
    assert vmap(grad(lambda q: horner.attend(q, k, v).sum()))(none).shape == none.shape
    with pytest.raises(RuntimeError, match="vmap of an empty batch requires tensors with an axis of batch"):
        vmap(lambda w: horner.attend(q, k, v, variant="rms", norm_weight=w))(w[None][:0])
