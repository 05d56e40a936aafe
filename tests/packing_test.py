"""Packed sequences with numbers of keys of their own (`cu_seqlens_k`): each is what it is alone."""

import pytest
import torch

import horner

QUERIES, KEYS = [0, 3, 10, 10, 17, 20], [0, 5, 9, 13, 20, 20]  # more keys, fewer, no queries, as many, no keys


def tensors(dtype=torch.double, device="cpu"):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 6)
    return [x.to(dtype).to(device).requires_grad_() for x in (q, k, v)]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["causal", "full", "window(3)", "window(2,ahead=2)", "chunks(3)", "streaming(first=2,size=2)"])
@pytest.mark.parametrize("variant", ["softmax", "taylor2", "entmax15", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.double, torch.float])
def test_each_sequence_is_what_it_is_alone(variant, mask, dtype, device):
    q, k, v = tensors(dtype, device)
    cuts = {"cu_seqlens": torch.tensor(QUERIES, device=device), "cu_seqlens_k": torch.tensor(KEYS, dtype=torch.int32, device=device)}
    out = horner.attend(q, k, v, variant=variant, mask=mask, **cuts)
    g = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), g)
    alone = torch.zeros_like(out)
    for a, b, c, d in zip(QUERIES, QUERIES[1:], KEYS, KEYS[1:]):
        if a < b and c < d:  # the last query stands at the last key
            alone[:, :, a:b] = horner.attend(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], variant=variant, mask=mask, execution="reference")
    close = {"atol": 1e-9, "rtol": 0} if dtype == torch.double else {"atol": 2e-4, "rtol": 2e-4}
    torch.testing.assert_close(out, alone, **close)
    for x, y in zip(gradients, torch.autograd.grad(alone, (q, k, v), g)):
        torch.testing.assert_close(x, y, **close)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("mask", ["causal", "streaming(first=2,size=2)"])
def test_cuda_graph_reads_the_cuts_at_each_replay(mask):
    q, k, v = (x.detach() for x in tensors(torch.float, "cuda"))
    a, b = (torch.tensor(x, device="cuda") for x in (QUERIES, KEYS))
    horner.attend(q, k, v, mask=mask, cu_seqlens=a, cu_seqlens_k=b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = horner.attend(q, k, v, mask=mask, cu_seqlens=a, cu_seqlens_k=b)
    for queries, keys in ((QUERIES, KEYS), (KEYS, QUERIES)):
        a.copy_(torch.tensor(queries)), b.copy_(torch.tensor(keys))
        graph.replay()
        plain = horner.attend(q, k, v, mask=mask, cu_seqlens=a, cu_seqlens_k=b, execution="reference")
        torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-4)


def test_compiled_and_fake():
    torch.compiler.reset()
    q, k, v = tensors(torch.float)
    run = torch.compile(lambda q, k, v, a, b: horner.attend(q, k, v, cu_seqlens=a, cu_seqlens_k=b), fullgraph=True, backend="aot_eager")
    a, b = torch.tensor([0, 4, 15]), torch.tensor([0, 9, 20])
    torch.testing.assert_close(run(q[:, :, :15], k, v, a, b), horner.attend(q[:, :, :15], k, v, cu_seqlens=a, cu_seqlens_k=b))
    small = [x.detach()[:, :, :n] for x, n in zip(tensors(), (5, 6, 6))]
    cuts = {"cu_seqlens": torch.tensor([0, 3, 5]), "cu_seqlens_k": torch.tensor([0, 2, 6])}
    torch.autograd.gradcheck(lambda *x: horner.attend(*x, **cuts), [x.clone().requires_grad_() for x in small])


WRONG = {
    "cu_seqlens_k requires cu_seqlens": ([], [0, 20]),
    "must cut the same number of sequences, got 1 and 2": ([0, 20], [0, 5, 20]),
    "cu_seqlens_k must go from 0 to 20, got 0 to 19": ([0, 20], [0, 19]),
    "cu_seqlens_k must not decrease, got 8 before 3": ([0, 5, 9, 20], [0, 8, 3, 20]),
}


@pytest.mark.parametrize("named", WRONG)
def test_what_is_wrong_is_named(named):
    a, b = (torch.tensor(x) if x else None for x in WRONG[named])
    with pytest.raises(RuntimeError, match=named):
        horner.attend(*tensors(), cu_seqlens=a, cu_seqlens_k=b)


@pytest.mark.parametrize("variant", ["gated_decay", "linear_decay", "forgetting", "gla", "gated_delta", "kda", "linear_decay:near=window(8)"])
def test_nan_in_a_gate_stays_where_the_definition_has_it(variant):
    """In the rows that see a key before it: not in later sequences, nor in a window that is past it, nor before a pad."""
    torch.manual_seed(0)
    T, packed = 90, torch.tensor([0, 40, 90])
    q, k, v = (torch.randn(2, h, T, 8, requires_grad=True) for h in (4, 2, 2))
    rows = {"input_gate": (2, 2, T), "beta": (2, 2, T), "output_gate": (2, 4, T), "post_gate": (2, 4, T, 8), "norm_weight": (8,), "norm_bias": (8,)}
    wanted = horner.describe(variant)["inputs"].split()
    more = {name: torch.rand(rows[name]) for name in wanted if name in rows}
    name = "decay" if "decay" in wanted else "channel_decay"
    shape = (2, 2, T) if name == "decay" else (2, 2, T, 8)
    keep = torch.ones(2, T, dtype=torch.bool)
    keep[0, :25] = False
    for place in (0, 20, 40, 60):
        logs = torch.rand(shape).log()
        logs[0, 1, place] = torch.nan
        logs.requires_grad_()
        for case in ({"cu_seqlens": packed}, {"keep": keep}, {"mask": "window(16)"}, {"mask": "full"}, {}):
            arguments = {"variant": variant, **more, **case, name: logs}
            try:
                exact = horner.attend(q, k, v, execution="reference", **arguments)
            except RuntimeError:  # near keys, and the delta rule, require a causal mask
                continue
            numbers = ~exact.isnan()
            assert numbers.any() and numbers[1].all()
            for execution in ("fused_cpu", "chunked", "recurrent"):
                if horner.why_not(q, k, v, execution=execution, **arguments):
                    continue
                found = horner.attend(q, k, v, execution=execution, **arguments)
                same = ~found.isnan() == numbers
                if "beta" in more:  # the reference's system has 0 * NaN in later rows
                    same |= ~numbers
                assert same.all(), (place, case, execution)
                torch.testing.assert_close(found[numbers], exact[numbers], atol=2e-4, rtol=2e-3)
                gradients = [torch.autograd.grad(o.sin().sum(), (q, k, v), retain_graph=True) for o in (found, exact)]
                for a, b in zip(*gradients):
                    torch.testing.assert_close(a[1], b[1], atol=2e-3, rtol=2e-2)
