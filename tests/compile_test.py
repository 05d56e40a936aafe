"""torch.compile, fake and meta tensors: forward runs once in a step, and what cannot run is refused before it runs."""

import pytest
import torch
from python_test import CONSTANTS, SHAPES, call, inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import horner

# One for each kind of execution on the CPU that keeps something: tiles, whole rows, chunks with and without a state.
KEPT = ["l2", "gated_decay", "centred_taylor2", "entmax15", "topk32", "adaptive_temperature", "taylor1", "linear_cosine", "asentmax",
        "channel_out_gate", "delta_exp", "delta", "gated_delta", "kda", "gla", "hgrn2", "delta_taylor2", "near_taylor2", "lolcats"]  # fmt: skip
IN_CHUNKS = {"delta", "gated_delta", "kda", "gla", "hgrn2", "lolcats"}


def step(function, tensors, weights):
    out = function(*tensors)
    return [out, *torch.autograd.grad(out, tensors, weights, allow_unused=True)]


def random_inputs(variant, dtype, **sizes):
    torch.manual_seed(1)
    q, k, v, more = inputs(variant, dtype, **sizes)
    fixed = {name: x for name, x in more.items() if name in CONSTANTS}
    free = {name: x for name, x in more.items() if name not in CONSTANTS}
    return (q, k, v, *free.values()), list(free), fixed


def forwards(function):
    """How often the executions ran forward, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    return result, sum(e.count for e in profile.key_averages() if e.key.endswith(" forward"))


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
@pytest.mark.parametrize("variant", KEPT)
@pytest.mark.parametrize("dynamic", [False, None])
def test_forward_runs_once(variant, dtype, dynamic):
    execution = "chunked" if "taylor" in variant or "linear" in variant or variant in IN_CHUNKS else "auto"
    for T in (70, 150):
        tensors, names, fixed = random_inputs(variant, dtype, T=T, S=T, D=24, E=20)
        if T == 70 or dynamic is False:

            def run(q, k, v, *more):
                return horner.attend(q * 1, k, v, variant=variant, execution=execution, **dict(zip(names, more)), **fixed)

            torch.compiler.reset()
            compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        weights = torch.randn(2, 4, T, 20, dtype=dtype)
        wanted, once = forwards(lambda: step(run, tensors, weights))
        got, count = forwards(lambda: step(compiled, tensors, weights))
        assert all(torch.equal(a, b) for a, b in zip(got, wanted))  # to the bit
        assert count == once == (2 if "delta" in variant or variant == "kda" else 1)  # its values, then the sums


@pytest.mark.parametrize("variant", ["gated_delta", "gla", "near_taylor2", "taylor2"])
@pytest.mark.parametrize("packed", [False, True])
def test_forward_runs_once_in_pieces_and_packs(variant, packed):
    """Several nodes, one after another; packed sequences. From the second length on, its size is symbolic."""
    torch.compiler.reset()

    def run(q, k, v, fixed, *more):
        return horner.attend(q * 1, k, v, variant=variant, execution="chunked", **dict(zip(names, more)), **fixed)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for T in (300, 400, 4200):
        tensors, names, fixed = random_inputs(variant, torch.float, B=1, T=T, S=T, D=8, E=6)
        fixed |= {"cu_seqlens": torch.tensor([0, T // 3, T])} if packed else {}
        weights = torch.randn(1, 4, T, 6)
        wanted, once = forwards(lambda: step(lambda q, k, v, *more: run(q, k, v, fixed, *more), tensors, weights))
        got, count = forwards(lambda: step(lambda q, k, v, *more: compiled(q, k, v, fixed, *more), tensors, weights))
        assert all(torch.equal(a, b) for a, b in zip(got, wanted))
        if T < 4200 or packed:  # else the views of the pieces are made again
            assert count == once


def test_two_backward_passes_of_one_graph():
    """What is kept serves any number of them, with other gradients in each."""
    torch.compiler.reset()
    tensors, _, _ = random_inputs("l2", torch.float, T=70, S=70)
    run = torch.compile(lambda q, k, v: horner.attend(q, k, v, variant="l2"), fullgraph=True, backend="aot_eager")
    out, eager = run(*tensors), horner.attend(*tensors, variant="l2")
    for seed in (0, 1):
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
        first, other = (torch.autograd.grad(o, tensors, g, retain_graph=True) for o in (out, eager))
        assert all(torch.equal(a, b) for a, b in zip(first, other))


def test_a_graph_of_symbolic_sizes_meets_other_executions():
    """The room was for tiles; a longer sequence runs in chunks, whose states do not fit: forward runs again."""
    torch.compiler.reset()
    run = torch.compile(lambda q, k, v: horner.attend(q, k, v, variant="taylor1"), fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (20, 900, 30):
        tensors, _, _ = random_inputs("taylor1", torch.float, B=1, T=T, S=T, D=8, E=4)
        g = torch.randn(1, 4, T, 4)
        wanted = step(lambda q, k, v: horner.attend(q, k, v, variant="taylor1"), tensors, g)
        assert all(torch.equal(a, b) for a, b in zip(step(run, tensors, g), wanted))


def test_a_batch_of_any_size_is_refused_only_when_it_is_too_large():
    torch.compiler.reset()
    run = torch.compile(lambda *x: horner.attend(*x, variant="taylor2", execution="chunked"), fullgraph=True, backend="aot_eager")
    q, k, v = torch.randn(3, 2, 32, 270, 64)
    for x in (q, k, v):
        torch._dynamo.mark_dynamic(x, 0)
    assert run(q, k, v).isfinite().all()


def test_statistics_and_lse_compile():
    torch.compiler.reset()
    tensors, _, _ = random_inputs("l2", torch.float, T=9, S=9)

    def run(q, k, v):
        out, rows = horner.statistics(q * 2, k, v, variant="l2")
        o, lse = horner.attend(q * 2, k, v, variant="l2", return_lse=True)
        return out + o, rows["entropy"], rows["negative"], lse

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for got, wanted in zip(compiled(*tensors), run(*tensors)):
        torch.testing.assert_close(got, wanted)
    got, wanted = (torch.autograd.grad(f(*tensors)[0].sin().sum(), tensors) for f in (compiled, run))
    torch.testing.assert_close(got, wanted)
    assert not compiled(*tensors)[3].requires_grad


WRONG = {
    "a missing input": lambda a, m: (a, {}),
    "an input too many": lambda a, m: (a, {**m, "slope": a[0].new_ones(2)}),
    "a shape": lambda a, m: ((a[0], a[1][..., :2], a[2]), m),
    "a rank": lambda a, m: ((a[0], a[1][0], a[2]), m),
    "the length of v": lambda a, m: ((a[0], a[1], a[2][:, :, :4]), m),
    "a parameter's shape": lambda a, m: (a, {**m, "norm_weight": m["norm_weight"][:1]}),
    "a dtype": lambda a, m: ((a[0], a[1].double(), a[2]), m),
    "a whole number": lambda a, m: (tuple(x.long() for x in a), m),
    "heads": lambda a, m: ((a[0][:, :3], a[1], a[2]), {**m, "output_gate": m["output_gate"][:, :3]}),
    "a mask's dtype": lambda a, m: (a, {**m, "keep": torch.ones(2, 5, device=a[0].device)}),
    "packing": lambda a, m: ((a[0][:, :, :4], a[1], a[2]),
                             {**m, "output_gate": m["output_gate"][..., :4], "cu_seqlens": torch.zeros(2, dtype=torch.int, device=a[0].device)}),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_errors_are_those_of_real_tensors(what):
    q, k, v, more = inputs("gated", torch.float)
    more = {name: x.detach() for name, x in more.items()}

    def message(a, m):
        a, m = WRONG[what](a, m)
        with pytest.raises(RuntimeError) as error:
            horner.attend(*a, variant="gated", **m)
        return str(error.value).split("\n")[0]

    real = message((q, k, v), more)
    meta = message([x.to("meta") for x in (q, k, v)], {name: x.to("meta") for name, x in more.items()})
    assert meta == real
    mode = FakeTensorMode()
    fake = [mode.from_tensor(x.detach()) for x in (q, k, v, *more.values())]
    with mode:
        assert message(fake[:3], dict(zip(more, fake[3:]))) == real


@pytest.mark.parametrize("execution", ["nonsense", "chunked", "fused_cuda"])
@pytest.mark.parametrize("more", [{}, {"return_lse": True}])
def test_executions_are_those_of_real_tensors(execution, more):
    q, k, v = (x.detach() for x in inputs("softmax", torch.float)[:3])
    mode = FakeTensorMode()
    messages = []
    for change in (lambda x: x, mode.from_tensor, *([] if torch.cuda.is_available() else [lambda x: x.to("meta")])):
        with pytest.raises(RuntimeError) as error:
            horner.attend(*map(change, (q, k, v)), execution=execution, **more)
        messages.append(str(error.value))
    assert messages[0].startswith(("no execution 'nonsense'; possible: 'auto', ", "cannot run on q")) and len(set(messages)) == 1
    k, v = (x[:, :, :0] for x in (k, v))  # any that there is
    if execution != "nonsense":
        assert horner.attend(*(x.to("meta") for x in (q, k, v)), execution=execution).shape == (2, 4, 5, 2)


def test_meta_gradients_and_devices():
    q, k, v = (torch.empty(2, h, 7, 8, device="meta", requires_grad=True) for h in (4, 2, 2))
    o, lse = horner.attend(q, k, v, variant="l2", return_lse=True)
    o.sum().backward()
    assert o.shape == (2, 4, 7, 8) and lse.shape == (2, 4, 7) and k.grad.shape == k.shape
    with pytest.raises(RuntimeError, match=r"k must be on the same device as q \(meta\), got cpu"):
        horner.attend(q, torch.rand(2, 2, 7, 8), v)


def test_opcheck_of_both_halves():
    q, k, v, more = inputs("gated", torch.float)
    _, arguments, more = call("gated", q.detach(), k.detach(), v.detach(), {name: x.detach() for name, x in more.items()})
    for rows in (0, 4):
        torch.library.opcheck(torch.ops.horner.attend_forward.default, (rows, 4096, *arguments), more)
        torch.library.opcheck(torch.ops.horner.attend_forward.default, (rows, 0, *arguments), more)
    kept = torch.ops.horner.attend_forward.default(0, 4096, *arguments, **more)[2]
    g = torch.rand(2, 4, 5, 2)
    torch.library.opcheck(torch.ops.horner.attend_backward.default, (g, [0, 2], kept, *arguments), more)
    torch.library.opcheck(torch.ops.horner.attend_rows.default, (4, q, k, v, *arguments[3:]), more)


def lse(q, k, mask):
    x = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    return x.masked_fill(~mask, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16, torch.double])
@pytest.mark.parametrize("variant", ["softmax", "l2"])
def test_lse(variant, dtype):
    torch.manual_seed(0)
    q, k, v = (20 * torch.randn(2, h, 9, 8).to(dtype) for h in (4, 2, 2))  # exp of these would overflow
    keep = torch.tensor([[False] * 3 + [True] * 6, [True] * 9])
    q.requires_grad_()
    o, found = horner.attend(q, k, v, variant=variant, keep=keep, return_lse=True)
    assert torch.equal(o, horner.attend(q, k, v, variant=variant, keep=keep))
    assert o.requires_grad and not found.requires_grad and found.shape == (2, 4, 9)
    assert found.dtype == (torch.double if dtype == torch.double else torch.float)
    mask = torch.ones(9, 9).tril().bool() & keep[:, None, None]
    torch.testing.assert_close(found.double(), lse(q.detach(), k, mask), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert (found[0, :, :3] == -torch.inf).all()
    with torch.no_grad():
        assert torch.equal(horner.attend(q, k, v, variant=variant, keep=keep, return_lse=True)[1], found)


def test_lse_of_other_weights():
    q, k, v, _ = inputs("taylor2")
    with pytest.raises(RuntimeError, match="variant 'taylor2' has no log of a sum of exponentials: return_lse requires weight=exp"):
        horner.attend(q, k, v, variant="taylor2", return_lse=True)
    with pytest.raises(RuntimeError, match="return_lse requires weight=exp"):
        torch.func.vmap(lambda q: horner.attend(q, k, v, variant="taylor2", return_lse=True)[1])(q[None])
    q, k, v, more = inputs("adaptive_temperature", torch.float)
    found = [horner.attend(q, k, v, variant="adaptive_temperature", execution=e, return_lse=True, **more)[1] for e in ("auto", "reference")]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("variant", ["softmax", "entmax15", "taylor3", "gated_decay", "linear_cosine", "rms", "softmax_window", "cumulative_gate"])
def test_weights(variant):
    """They multiply the values, before output gates and norms."""
    q, k, v, more = inputs(variant)
    found = horner.weights(q, k, variant=variant, **more)
    assert found.shape == (2, 4, 5, 5)
    plain = {name: x for name, x in more.items() if name not in ("output_gate", "post_gate", "norm_weight", "norm_bias")}
    assert torch.equal(found, horner.weights(q, k, variant=variant, **plain))
    stages = horner.describe(variant)["spec"]
    o = horner.attend(q, k, v, variant=variant, **more)
    if "norm" not in stages and "gate" not in stages:
        torch.testing.assert_close(found @ v.repeat_interleave(2, 1), o)
    gradients = torch.autograd.grad(found.sin().sum(), (q, k))
    assert all(g.abs().max() > 0 for g in gradients)
    if variant == "softmax":
        torch.testing.assert_close(found.sum(-1), torch.ones(2, 4, 5).double())
        assert not found.triu(1).any()


@pytest.mark.parametrize("variant", ["softmax", "gated_decay", "entmax15", "channel_out_gate", "linear_cosine", "delta", "lolcats", "rms:channel_gates,post_gate"])
def test_weights_compile(variant):
    """As one operator of each direction, for any shape, alone and beside the result; of fake tensors and under transforms."""
    q, k, v, more = inputs(variant)
    more = {name: x.detach() for name, x in more.items()}

    def run(q, k, v):
        out, matrix = horner.attend(q * 1, k, v, variant=variant, return_weights=True, **more)
        return out, matrix + horner.weights(q, k, variant=variant, **more)

    wanted = run(q, k, v)
    gradients = torch.autograd.grad(wanted[1].sin().sum() + wanted[0].sum(), (q, k, v))
    for dynamic in (None, True):
        torch.compiler.reset()
        got = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)(q, k, v)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(torch.autograd.grad(got[1].sin().sum() + got[0].sum(), (q, k, v)), gradients)
    mode = FakeTensorMode()
    fake = {name: mode.from_tensor(x) for name, x in {**more, "q": q.detach(), "k": k.detach()}.items()}
    assert horner.weights(fake.pop("q"), fake.pop("k"), variant=variant, **fake).shape == (2, 4, 5, 5)
    q, k, v = (x.detach() for x in (q, k, v))
    for f in (lambda q: horner.weights(q, k, variant=variant, **more), lambda q: horner.attend(q, k, v, variant=variant, **more)):
        out, push = torch.func.linearize(f, q)
        torch.testing.assert_close((out, push(q)), torch.func.jvp(f, (q,), (q,)))


def test_a_traced_graph_computes():
    """Of plain tensors too it has the operators: the numbers of a kernel are not constants of the graph."""
    q, k, v = (x.detach().float() for x in inputs("taylor2")[:3])

    def f(q):
        return horner.attend(q, k, v, variant="taylor2", scale=0.3, return_weights=True)

    torch.testing.assert_close(make_fx(f)(q)(q + 1), f(q + 1))


def test_weights_have_errors():
    q, k, _, _ = inputs("softmax")
    with pytest.raises(RuntimeError, match="decay must hold the logs of gates"):
        horner.weights(q, k, variant="linear_decay", decay=torch.full((2, 2, 5), 0.97))
    with pytest.raises(RuntimeError, match="cu_seqlens must not decrease, got 9 before 5"):
        horner.weights(q, k, cu_seqlens=torch.tensor([0, 9, 5]))
    with pytest.raises(RuntimeError, match="q must have dtype float64, float32, bfloat16 or float16, got int64"):
        horner.weights(q.long(), k.long())
    with pytest.raises(RuntimeError, match="missing input 'decay'"):
        horner.weights(q, k, variant="linear_decay")
    with pytest.raises(RuntimeError, match=r"k must have shape \[B, G, S, D\]"):
        horner.weights(q, k[..., :2])
    assert set(SHAPES) - {"v"} <= set(horner.weights.__signature__.parameters)
