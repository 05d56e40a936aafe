"""Masks that are tensors, as torch's attention takes them: beside it, and beside the keys that each row sees, alone."""

import pytest
import torch
import torch.nn.functional as F
from python_test import ROLES, ROWS, SHAPES, inputs

import horner

# What a score of -inf leaves out of the row entirely.
TAKE = {
    "softmax", "softmax_window", "cosine_softmax", "softmax_out_gate", "clamped_sum", "detached_sum", "detached_sum_gate", "gate",
    "rms", "l2", "l2_clamped", "l2_times_dim", "l2_out_gate", "l2_post_gate", "softmax1", "sparsemax", "entmax15", "topk", "topk8",
    "topk_raw8", "softcap", "sink", "bias", "channel_out_gate", "stick_breaking", "two_way_window", "chunk_window", "streaming", "prefix_lm",
}  # fmt: skip


def case(variant, dtype=torch.double, T=5, S=7):
    """q, k, v, the other inputs, and a mask with a row without keys and a key that no row sees."""
    torch.manual_seed(4)
    q, k, v, more = inputs(variant, dtype, T=T, S=S)
    more = {name: x for name, x in more.items() if ROLES[name] != "mask"}
    mask = torch.rand(2, 4, T, S) < 0.5
    mask[0, 1, 2], mask[..., 3] = False, False
    return q, k, v, more, mask


def by_rows(variant, q, k, v, more, mask):
    """Every row alone, with the keys that it sees and no others."""
    rows = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, q.shape[:3])):
        keys = mask[b, h, t].nonzero()[:, 0]
        if len(keys):
            at = {"B": b[None], "H": h[None], "G": h[None] // 2, "T": t[None], "S": keys}

            def cut(name, x, at=at):
                for axis, letter in enumerate(SHAPES[name].upper()):
                    x = x.index_select(axis, at[letter]) if letter in at and x.shape[axis] > 1 else x
                return x

            some = {name: cut(name, x) for name, x in {"q": q, "k": k, "v": v, **more}.items()}
            rows[b, h, t] = horner.attend(variant=variant, mask="full", execution="reference", **some)[0, 0, 0]
    return rows


@pytest.mark.parametrize("variant", ROWS)
def test_rows_see_the_keys_that_are_shown(variant):
    q, k, v, more, mask = case(variant)
    tensors = (q, k, v, *(x for x in more.values() if x.requires_grad))
    if variant not in TAKE:
        with pytest.raises(RuntimeError, match=r"does not support a tensor as mask.*Pass the name of a mask, keep or cu_seqlens"):
            horner.attend(q, k, v, variant=variant, mask=mask, **more)
        return
    wanted = by_rows(variant, q, k, v, more, mask)
    given = torch.autograd.grad(wanted.square().sum(), tensors, allow_unused=True)
    for execution in ("reference", "fused_cpu"):
        dtype = torch.double if execution == "reference" else torch.float
        some = [x.to(dtype) for x in (q, k, v)]
        out = horner.attend(*some, variant=variant, mask=mask, execution=execution, **{name: x.to(dtype) for name, x in more.items()})
        torch.testing.assert_close(out.double(), wanted, atol=1e-4 if dtype == torch.float else 1e-9, rtol=0)
        assert not out[0, 1, 2].any()
        found = torch.autograd.grad(out.double().square().sum(), tensors, allow_unused=True)
        for a, b in zip(found, given):
            torch.testing.assert_close(a, b if b is not None or a is None else torch.zeros_like(a), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", [(5, 7), (7,), (1, 7), (5, 1), (4, 1, 1), (2, 1, 5, 7), (1, 4, 5, 7), (2, 4, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float])
def test_the_calls_of_torchs_attention(shape, dtype):
    """The same keywords, values and gradients, of a float mask too."""
    q, k, v, _, _ = case("softmax", torch.float)
    torch.manual_seed(6)
    mask = (torch.rand(shape) < 0.7) if dtype == torch.bool else torch.randn(shape, requires_grad=True)
    ends = [x for x in (q, k, v, mask) if x.requires_grad]
    ours = horner.attend(q, k, v, mask=mask)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(2, 4, 5, 7), enable_gqa=True)
    torch.testing.assert_close(ours, theirs.nan_to_num())
    if not theirs.isnan().any():
        torch.testing.assert_close(torch.autograd.grad(ours.sin().sum(), ends), torch.autograd.grad(theirs.sin().sum(), ends))
    with torch.autocast("cpu", torch.bfloat16):
        assert horner.attend(q, k, v, mask=mask).dtype == torch.bfloat16


def test_it_is_a_bias():
    """Added to one that is given; and what else takes a mask takes a tensor."""
    q, k, v, _, mask = case("bias")
    bias = torch.randn(1, 4, 5, 7, dtype=torch.double)
    hidden = torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)
    wanted = {"variant": "bias", "mask": "full", "bias": bias + hidden}
    assert torch.equal(horner.attend(q, k, v, variant="bias", mask=mask, bias=bias), horner.attend(q, k, v, **wanted))
    assert torch.equal(horner.attend(q, k, v, variant="bias", mask=hidden, bias=bias), horner.attend(q, k, v, **wanted))
    wanted["bias"] = hidden
    for function in (lambda **more: horner.statistics(q, k, v, **more)[1]["entropy"], lambda **more: horner.weights(q, k, **more),
                     lambda **more: horner.attend(q, k, v, return_lse=True, return_weights=True, **more)[1],
                     lambda **more: horner.attend(q, k, v, dropout_p=0.3, seed=1, **more)):  # fmt: skip
        torch.testing.assert_close(function(mask=mask), function(**wanted), rtol=0, atol=0)
    assert horner.attend(q, k, v, mask=mask, return_lse=True)[1][0, 1, 2] == -torch.inf
    assert "bias" in horner.why_not(q.float(), k.float(), v.float(), mask=mask, execution="chunked")


def test_masks_under_compile_and_transforms():
    q, k, v, _, mask = case("l2", torch.float)
    wanted = horner.attend(q, k, v, variant="l2", mask=mask)

    def f(q, mask):
        return horner.attend(q, k, v, variant="l2", mask=mask)

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, mask), wanted)
    torch.testing.assert_close(torch.autograd.grad(compiled(q, mask).sin().sum(), q), torch.autograd.grad(wanted.sin().sum(), q))
    masks = torch.stack([~mask, mask])
    torch.testing.assert_close(torch.func.vmap(f, (None, 0))(q, masks)[1], wanted)
    # infinite scores have no tangents in a polynomial of them, and none is asked for
    small, t = q.detach(), torch.randn_like(q)
    tangent = torch.func.jvp(lambda q: f(q, mask), (small,), (t,))[1]
    g = torch.func.vjp(lambda q: f(q, mask), small)[1](wanted.detach())[0]
    torch.testing.assert_close((tangent * wanted).sum(), (g * t).sum(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        (lambda m: m[:, :3], RuntimeError, r"mask must broadcast to \[B, H, T, S\] = \[2, 4, 5, 7\], got \[2, 3, 5, 7\]"),
        (lambda m: m[None], RuntimeError, "mask must broadcast"),
        (lambda m: m[0, 0, 0, 0], RuntimeError, r"mask must broadcast to .*, got \[\]"),
        (lambda m: m.int(), RuntimeError, "mask must have dtype bool, where True shows a key, or float64.*got int32"),
        (lambda m: m.to("meta"), RuntimeError, "mask must be on the same device as q"),
        (lambda m: m.to_sparse(), RuntimeError, "mask must be a dense tensor"),
        (lambda m: m.tolist(), TypeError, "mask must be a str or a torch.Tensor, got list"),
    ],
)
def test_errors_of_masks(wrong, error, words):
    q, k, v, _, mask = case("softmax")
    with pytest.raises(error, match=words):
        horner.attend(q, k, v, mask=wrong(mask))


def test_a_bias_still_needs_its_stage():
    q, k, v, _, mask = case("softmax")
    with pytest.raises(RuntimeError, match="'bias' was given, but variant 'softmax' does not use it"):
        horner.attend(q, k, v, mask=mask, bias=torch.zeros(1, 1, 5, 7))
    with pytest.raises(RuntimeError, match="missing input 'bias'"):
        horner.attend(q, k, v, variant="bias", mask=mask)
    with pytest.raises(RuntimeError, match=r"bias must have shape \[B or 1, H or 1, T, S\]"):
        horner.attend(q, k, v, variant="bias", mask=mask, bias=torch.zeros(5, 7))
    with pytest.raises(TypeError, match="mask must be a str, got Tensor"):
        horner.State(batch=1, heads=1, dim=2, mask=mask)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("variant", ["softmax", "l2", "entmax15", "sink", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_cuda_is_the_cpu(variant, dtype):
    q, k, v, more, mask = case(variant, torch.float, T=70, S=90)
    direction = torch.randn(2, 4, 70, v.shape[3], generator=torch.Generator().manual_seed(5)).to(dtype)

    def results(device, wide, execution):
        x = [t.detach().to(dtype).to(device, wide).requires_grad_() for t in (q, k, v)]
        inputs = {name: t.detach().to(device) for name, t in more.items()}
        out = horner.attend(*x, variant=variant, mask=mask.to(device), execution=execution, **inputs)
        return [t.cpu().double() for t in (out, *torch.autograd.grad(out, x, direction.to(device, wide)))]

    truth, plain = results("cpu", torch.double, "reference"), results("cpu", dtype, "reference")
    for a, b, c in zip(results("cuda", dtype, "auto"), truth, plain):
        assert (a - b).abs().max() <= 3 * (c - b).abs().max() + 1e-5 * b.abs().max()
