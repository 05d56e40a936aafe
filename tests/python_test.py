"""The Python package: every variant through torch's own checks of an operator."""

import copy
import inspect
import os
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import horner

SHAPES = {name: shape for name, shape, _, _ in torch.ops.horner.inputs()}
# Without the higher orders of a series, unless HORNER_LONG=1.
ROWS = [v for v in horner.variants() if os.environ.get("HORNER_LONG") or not re.search(r"(taylor|power)([4-9]|\d\d)$", v)]
ROLES = {name: role for name, _, role, _ in torch.ops.horner.inputs()}
CONSTANTS = {name for name, role in ROLES.items() if role in ("constant", "mask")}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
SIZES = {"B": 2, "H": 4, "G": 2, "T": 5, "S": 5, "D": 3, "E": 2, "F": 16, "3": 3}


def inputs(variant, dtype=torch.double, **sizes):
    """q, k, v and what the variant's stages take, all positive: no sum comes near zero."""
    around = torch.ops.horner.around(variant)
    sizes = {**SIZES, "F": around["features"], **sizes}

    def new(name):
        shape = SHAPES[name].upper() + ("E" if around["channel_gates"] and SHAPES[name] == "BHT" else "")
        if name == "prefix":
            return torch.arange(1, sizes["B"] + 1)
        x = torch.rand([sizes[letter] for letter in shape], dtype=dtype) * 0.8 + 0.1
        return (x.log() if ROLES[name] == "log_gate" else x).requires_grad_(ROLES[name] != "constant")

    names = horner.describe(variant)["inputs"].split()
    return new("q"), new("k"), new("v"), {name: new(name) for name in names}


def call(variant, q, k, v, stages):
    """The raw operator, its arguments and its keywords."""
    return torch.ops.horner.attend.default, (q, k, v, variant, "auto", None, None, None, None), stages


# No gradient flows through parts of these, which a numeric derivative cannot know.
CONSTANT_PARTS = {"detached_sum", "detached_sum_gate", "adaptive_temperature"}


@pytest.mark.parametrize("variant", [v for v in ROWS if v not in CONSTANT_PARTS])
def test_gradcheck(variant):
    torch.manual_seed(0)
    q, k, v, stages = inputs(variant)

    def run(q, k, v, *given):
        return horner.attend(q, k, v, variant=variant, **dict(zip(stages, given)))

    assert torch.autograd.gradcheck(run, (q, k, v, *stages.values()), fast_mode=True)


SOME = ["softmax", "l2", "gated_decay", "based", "linear_cosine", "asentmax"]


@pytest.mark.parametrize("variant, dtype", [(v, torch.double) for v in ROWS] + [(v, d) for v in SOME for d in (torch.float, torch.bfloat16)])
def test_opcheck(variant, dtype):
    q, k, v, stages = inputs(variant, dtype)
    torch.library.opcheck(*call(variant, q, k, v, stages))


def test_opcheck_of_settings():
    q, k, v, _ = inputs("softmax", torch.float)
    torch.library.opcheck(torch.ops.horner.attend.default, (q, k, v, "taylor4:centred", "auto", "full", 0.3, 0.5, 3.0))


def test_opcheck_of_masks_and_of_the_gradient():
    q, k, v, _ = inputs("l2", torch.float)
    keep, cuts = torch.tensor([[True] * 4 + [False]] * 2), torch.tensor([0, 0, 2, 5])
    for stages in ({"keep": keep}, {"cu_seqlens": cuts}):
        op, arguments, _ = call("l2", q, k, v, stages)
        torch.library.opcheck(op, arguments, stages)
        plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        backward = torch.ops.horner.attend_backward.default
        torch.library.opcheck(backward, (torch.rand(2, 4, 5, 2), [0, 1, 2], None, *plain), stages)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_CUDA = [("softmax", torch.bfloat16), ("l2", torch.bfloat16), ("taylor4", torch.float), ("sigmoid", torch.half)]


def on_cuda(variant, dtype, T=96):
    """q, k, v, a gradient, and what hides keys."""
    torch.manual_seed(T)
    qkv = [torch.randn(2, heads, T, 64, device="cuda", dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    keep = torch.rand(2, T, device="cuda") < 0.8
    cuts = torch.tensor([0, 0, 17, T], device="cuda")
    return qkv, torch.randn(2, 4, T, 64, device="cuda", dtype=dtype), ({}, {"keep": keep}, {"cu_seqlens": cuts})


@cuda
@pytest.mark.parametrize("variant, dtype", ON_CUDA)
def test_cuda_graph(variant, dtype):
    """Forward and backward are captured; played again on other numbers they give what eager gives."""
    qkv, grad, hiding = on_cuda(variant, dtype)
    for stages in hiding:

        def run():
            out = horner.attend(*qkv, variant=variant, **stages)
            return out, *torch.autograd.grad(out, qkv, grad)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        with torch.no_grad():
            for x in qkv:
                x.normal_()
        graph.replay()
        torch.testing.assert_close([x.clone() for x in captured], list(run()))


@cuda
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_cuda_compile(mode):
    torch.compiler.reset()  # what other tests compiled of the same code counts against its limit
    compiled = torch.compile(lambda q, k, v, **s: horner.attend(q * 2, k, v, variant="l2", **s), fullgraph=True, mode=mode)
    for T in (96, 160):
        qkv, grad, hiding = on_cuda("l2", torch.float, T)
        for stages in hiding:
            for _ in range(3):  # warm, recorded, played
                torch.compiler.cudagraph_mark_step_begin()
                out = compiled(*qkv, **stages)
                got = [out.clone(), *(x.clone() for x in torch.autograd.grad(out, qkv, grad))]
            wanted = horner.attend(qkv[0] * 2, *qkv[1:], variant="l2", **stages)
            torch.testing.assert_close(got, [wanted, *torch.autograd.grad(wanted, qkv, grad)], atol=1e-3, rtol=1e-3)


def test_compile_without_graph_break():
    q, k, v, _ = inputs("taylor4", torch.float)
    compiled = torch.compile(lambda q, k, v: horner.attend(q * 2, k, v, variant="taylor4"), fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (5, 9):
        q, k, v, _ = inputs("taylor4", torch.float, T=T, S=T)
        o = compiled(q, k, v)
        torch.testing.assert_close(o, horner.attend(q * 2, k, v, variant="taylor4"))
        grads = torch.autograd.grad(o.sum(), (q, k, v))
        wanted = torch.autograd.grad(horner.attend(q * 2, k, v, variant="taylor4").sum(), (q, k, v))
        torch.testing.assert_close(grads, wanted)


def test_meta():
    q, k, v = (torch.empty(2, h, 7, 8, device="meta", dtype=torch.bfloat16) for h in (4, 2, 2))
    o = horner.attend(q, k, v[..., :5])
    assert o.shape == (2, 4, 7, 5) and o.dtype == torch.bfloat16 and o.device.type == "meta"


def test_autocast():
    q, k, v, stages = inputs("rms", torch.float)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = horner.attend(q, k, v, variant="rms", **stages)
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert q.grad.dtype == torch.float and stages["norm_weight"].grad.dtype == torch.float
    torch.testing.assert_close(o.float(), horner.attend(q, k, v, variant="rms", **stages), atol=0.05, rtol=0.05)


def test_keywords_change_the_variant():
    q, k, v, _ = inputs("softmax")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    k4, v4 = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    full = horner.attend(q, k, v, mask="full", scale=0.3)
    torch.testing.assert_close(full, sdpa(q, k4, v4, scale=0.3))
    sharp = horner.attend(q, k, v, temperature=0.5, scale=0.3)
    torch.testing.assert_close(sharp, sdpa(q, k4, v4, scale=0.6, is_causal=True))
    window = horner.attend(q, k, v, variant="taylor4:centred", mask="window(1)", clamp=3)
    torch.testing.assert_close(window, v4)


def test_padding_and_packing():
    q, k, v, _ = inputs("l2", T=6, S=6)
    keep = torch.tensor([[True] * 4 + [False] * 2] * 2)
    padded = horner.attend(q, k, v, variant="l2", mask="full", keep=keep)
    torch.testing.assert_close(padded, horner.attend(q, k[:, :, :4], v[:, :, :4], variant="l2", mask="full"))
    packed = horner.attend(q, k, v, variant="l2", cu_seqlens=torch.tensor([0, 2, 6]))
    parts = [horner.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], variant="l2") for a, b in ((0, 2), (2, 6))]
    torch.testing.assert_close(packed, torch.cat(parts, 2))


def test_statistics():
    q, k, v, _ = inputs("softmax", torch.float, T=9, S=9)
    out, rows = horner.statistics(q, k, v)
    torch.testing.assert_close(out, horner.attend(q, k, v))
    weights = (q @ k.repeat_interleave(2, 1).mT / 3**0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    p = weights.softmax(-1).detach()
    torch.testing.assert_close(rows["entropy"], -torch.xlogy(p, p).sum(-1))
    torch.testing.assert_close(rows["largest"], p.amax(-1))
    torch.testing.assert_close(rows["first"], p[..., 0])
    assert not rows["negative"].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("variant, mask", [("taylor2", None), ("centred_taylor3", None), ("softmax", None), ("l2", "window(7)")])
def test_state(variant, mask, device):
    q, k, v = (torch.randn(3, heads, 150, 8, device=device) for heads in (4, 2, 2))
    keep = torch.rand(3, 150, device=device) < 0.9
    wanted = horner.attend(q, k, v, variant=variant, mask=mask, keep=keep)
    state = horner.State(variant, batch=3, heads=2, dim=8, mask=mask, device=device)
    parts = [(0, 20), *((t, t + 1) for t in range(20, 150))]
    got = [state.step(*(x[:, :, a:b] for x in (q, k, v)), keep=keep[:, a:b]) for a, b in parts[:60]]
    rows = torch.tensor([2, 0, 2], device=device)
    other, bytes = state.select(rows), state.bytes  # which goes its own way
    got += [state.step(*(x[:, :, a:b] for x in (q, k, v)), keep=keep[:, a:b]) for a, b in parts[60:]]
    last = [other.step(*(x[rows, :, a:b] for x in (q, k, v)), keep=keep[rows, a:b]) for a, b in parts[60:]]
    torch.testing.assert_close(torch.cat(got, 2), wanted, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(torch.cat(last, 2), wanted[rows][:, :, 79:], atol=1e-4, rtol=1e-3)
    # A GPU has no sums in double, which centred rows want: it keeps their keys.
    has_cache = variant == "softmax" or (device == "cuda" and "centred" in variant)
    assert state.tokens == other.tokens == 150 and (state.bytes > bytes) == has_cache


def test_the_library_has_no_standard_library_of_its_own():
    """A second copy of libstdc++ beside torch's crashes when an error message prints a number."""
    nm, library = shutil.which("nm"), Path(horner.__file__).parent / "libhorner_python.so"
    if nm is None:
        pytest.skip("no nm")
    symbols = subprocess.run([nm, "-DC", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    assert not re.findall(r" [TDBR] std::.*", symbols)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))])
@pytest.mark.parametrize(
    "call, words",
    [
        (lambda q: horner.attend(q, q, q, execution="chunked"), "cannot run on q"),
        (lambda q: horner.attend(q, q, q, execution="chunked_cuda"), "cannot run on q"),
        (lambda q: horner.attend(q.cpu(), q.cpu(), q.cpu(), execution="hopper_cuda"), "cannot run on q"),
        (lambda q: horner.attend(q, q, q[:, :, :5]), r"v must have shape \[B, G, S, E\] with S = 16, got \[1, 2, 5, 64\]"),
        (lambda q: horner.attend(q, q[0], q), r"k must have shape \[B, G, S, D\], got \[2, 16, 64\]"),
        (lambda q: horner.attend(q, q.double(), q), "dtype"),
        (lambda q: horner.attend(q, q, q, variant="rms", norm_weight=q.new_ones(3)), r"norm_weight must have shape \[E\]"),
        (lambda q: horner.attend(q, q, q, variant="gated_decay"), "missing input 'decay'"),
        (lambda q: horner.attend(q, q, q, temperature=0), "temperature must be"),
        (lambda q: horner.attend(q, q, q, cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)), "cu_seqlens"),
    ],
)
def test_errors_are_errors_on_every_device(call, words, device):
    q = torch.randn(1, 2, 16, 64, device=device)
    with pytest.raises(RuntimeError, match=words):
        call(q)


def test_errors_of_a_state():
    q, k, v, _ = inputs("softmax", torch.float)
    with pytest.raises(RuntimeError, match="this state was made for B = 2, G = 2, D = 4"):
        horner.State("taylor2", batch=2, heads=2, dim=4).step(q, k, v)
    for name, mask in (("taylor2:mask=full", "full"), ("prefix_lm", "prefix"), ("two_way_window", "window")):
        with pytest.raises(RuntimeError, match=f"a stream requires a mask that sees no later tokens, such as .*, not mask={mask}"):
            horner.State(name, batch=2, heads=2, dim=4)
    assert horner.describe("softmax")["no_state"] and not horner.describe("taylor2")["no_state"]


COMPOSED = ["near_taylor2:decay=slope", "taylor3:decay=slope,norm=l2", "delta:decay=slope", "near_taylor2:values=count_power", "sink:decay=slope"]


@pytest.mark.parametrize("variant", [*ROWS, *COMPOSED])
def test_nan_of_every_input(variant):
    """A NaN in an input makes the same rows NaN as in the reference: all of them, or those that see its token."""
    q, k, v, more = inputs(variant, torch.float)
    q, k, v, more = q.detach(), k.detach(), v.detach(), {name: x.detach() for name, x in more.items() if x.is_floating_point()}
    for name, x in more.items():
        for place in {0, x.numel() // 2, x.numel() - 1}:
            nan = torch.zeros(x.shape, dtype=torch.bool)
            nan.view(-1)[place] = True
            given = {**more, name: x.masked_fill(nan, torch.nan)}
            wanted = horner.attend(q, k, v, variant=variant, execution="reference", **given).isnan()
            sees = torch.arange(5) >= (nan.nonzero()[0][2] if SHAPES[name][2:3] == "S" else 0)
            for execution in ("fused_cpu", "chunked", "recurrent"):
                if horner.why_not(q, k, v, variant=variant, execution=execution, **given) == "":
                    found = horner.attend(q, k, v, variant=variant, execution=execution, **given).isnan()
                    assert not (found & ~wanted).any() and torch.equal(found[:, :, sees], wanted[:, :, sees]), f"{name}[{place}] {execution}"


@pytest.mark.parametrize("name, variant", [("decay", "linear_decay"), ("channel_decay", "hgrn2")])
def test_gates_in_the_place_of_their_logs(name, variant):
    """Refused for any number of tokens and any gates; logs that grow a little, or that are 0, are not."""
    torch.manual_seed(0)
    for T in (1, 7, 2000):
        q, k, v, more = inputs(variant, torch.float, T=T, S=T)
        gates = torch.rand(more[name].shape) * 0.9 + 0.1
        for wrong in (gates, gates.square() + 1e-6, torch.full_like(gates, 0.97), gates.masked_fill(gates > 0.9, -torch.inf)):
            with pytest.raises(RuntimeError, match=rf"{name} must hold the logs of gates, .* their mean is 0\.\d+; pass gate.log\(\)"):
                horner.attend(q, k, v, variant=variant, **{**more, name: wrong})
        for right in (gates.log(), torch.zeros_like(gates), torch.full_like(gates, 0.01), torch.full_like(gates, -torch.inf), gates.log() + 0.1):
            horner.attend(q, k, v, variant=variant, **{**more, name: right})
    with pytest.raises(RuntimeError, match=rf"{name} must hold the logs of gates, at most 1, got 3; pass gate.log\(\)"):
        horner.attend(q, k, v, variant=variant, **{**more, name: gates.log() + 3 - gates.log().max()})


def test_errors_say_what_is_possible():
    q, k, v, _ = inputs("softmax")
    with pytest.raises(RuntimeError, match="no attention variant 'sofmax'; did you mean 'softmax'"):
        horner.attend(q, k, v, variant="sofmax")
    with pytest.raises(RuntimeError, match=r"missing input 'output_gate' \[B, H, T\] \(.*\), required by variant 'gate'"):
        horner.attend(q, k, v, variant="gate")
    with pytest.raises(TypeError, match="unknown input 'gate'; possible: decay, slope, channel_decay"):
        horner.attend(q, k, v, gate=q)
    with pytest.raises(RuntimeError, match="'decay' was given, but variant 'softmax:norm=l2' does not use it"):
        horner.attend(q, k, v, variant="softmax:norm=l2", decay=q[..., 0])
    with pytest.raises(RuntimeError, match="no mask 'diagonal'; possible: 'full', 'causal', 'window'"):
        horner.attend(q, k, v, mask="diagonal")
    with pytest.raises(RuntimeError, match="temperature must be 1e-06 to 1e[+]06, not 0"):
        horner.attend(q, k, v, temperature=0)
    with pytest.raises(RuntimeError, match="temperature must be 1e-06 to 1e[+]06, not 0"):
        horner.State("taylor2", batch=2, heads=2, dim=4, temperature=0)
    for name, hint in (("attn_mask", "pass mask, a tensor of bool"), ("is_causal", "pass mask='causal' or mask='full'")):
        with pytest.raises(TypeError, match=f"unknown input '{name}': {hint}"):
            horner.attend(q, k, v, **{name: True})
    for more in ({}, {"mask": "full"}):
        with pytest.raises(TypeError, match="dropout_p must be a number, got None"):
            horner.attend(q, k, v, dropout_p=None, **more)
    with pytest.raises(RuntimeError, match="no execution 'fast'; possible: "):
        horner.attend(q, k, v, execution="fast")


def test_signature_and_help_name_the_inputs():
    rows = torch.ops.horner.inputs()
    assert [name for name, *_ in rows[:3]] == ["q", "k", "v"]
    for function in (horner.attend, horner.statistics, horner.why_not, horner.State.step):
        parameters = inspect.signature(function).parameters
        assert {name for name, *_ in rows} <= set(parameters)
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    for name, shape, _, about in rows[3:]:
        letters = ", ".join(x.upper() + " or 1" if x in "bh" else x for x in shape)
        assert re.search(rf"^ +{name} +\[{letters}\] +{about}$", horner.attend.__doc__, re.M)
    assert re.search(r"decay +\[B, G, S\] +log of each token's gate", horner.attend.__doc__)


def test_settings_are_the_stages_of_the_text():
    """To the bit, in every operator that takes them."""
    q, k, v, _ = inputs("taylor2", torch.float, T=9, S=9)
    settings = {"mask": "window(3)", "scale": 0.3, "temperature": 0.7, "clamp": 1.1}
    text = "taylor2:mask=window(3),scale=fixed(0.3),temperature=0.7,clamp=1.1"
    assert torch.equal(horner.attend(q, k, v, variant="taylor2", **settings), horner.attend(q, k, v, variant=text))
    typed, written = horner.statistics(q, k, v, variant="taylor2", **settings), horner.statistics(q, k, v, variant=text)
    assert all(torch.equal(typed[1][name], x) for name, x in written[1].items())
    assert horner.why_not(q, k, v, execution="chunked", variant="taylor2", clamp=1.1) == "clamped scores have no finite state"
    shape = {"batch": 2, "heads": 2, "dim": 3, "value_dim": 2}
    typed, written = horner.State("taylor2", **settings, **shape), horner.State(text, **shape)
    assert torch.equal(typed.step(q, k, v), written.step(q, k, v))


def test_settings_in_full_precision():
    """A scale, temperature or clamp that went through float32 would differ by 1e-8; of a saved state too."""
    torch.manual_seed(0)
    q, k, v = (x.detach() for x in inputs("softmax", T=9, S=9)[:3])
    scores = (q @ k.repeat_interleave(2, 1).mT) * ((1 / 3) / 0.7)
    assert (scores > 1.1 / 3).any() and (scores < 1.1 / 3).any()
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    wanted = scores.clamp(max=1.1 / 3).masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    settings = {"scale": 1 / 3, "temperature": 0.7, "clamp": 1.1 / 3}
    state = horner.State("softmax", batch=2, heads=2, dim=3, value_dim=2, dtype=torch.double, **settings)
    parts = [state.step(*(x[:, :, :5] for x in (q, k, v)))]
    state = pickle.loads(pickle.dumps(state))
    parts.append(state.step(*(x[:, :, 5:] for x in (q, k, v))))
    found = {e: horner.attend(q, k, v, execution=e, **settings) for e in ("auto", "reference")}
    for name, out in {**found, "state": torch.cat(parts, 2)}.items():
        torch.testing.assert_close(out, wanted, atol=1e-13, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_tables():
    assert len(horner.variants()) >= 60
    assert "reference" in horner.executions()
    q, k, v, _ = inputs("softmax")
    assert horner.why_not(q, k, v, execution="reference") == ""
    assert horner.describe("softmax_gate")["name"] == "gate"
    assert "ill-conditioned" in horner.describe("raw_taylor3")["notes"]


def test_gradients_of_gradients():
    q, k, v, _ = inputs("softmax")
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))

    def second(execution):
        (g,) = torch.autograd.grad(horner.attend(q, k, v, execution=execution).square().sum(), q, create_graph=True)
        return torch.autograd.grad(g.sin().sum(), (q, k, v))

    torch._C._set_warnAlways(True)
    try:
        with pytest.warns(UserWarning, match="'fused_cpu' has only first gradients, one at a time: this backward pass runs 'reference'"):
            found = second("fused_cpu")
    finally:
        torch._C._set_warnAlways(False)
    torch.testing.assert_close(found, second("reference"), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", ["softmax", "taylor2", "gated_decay", "centred_taylor2", "softmax_window", "cumulative_gate"])
def test_states_are_copied_pickled_and_saved(variant, device, tmp_path):
    q, k, v, more = inputs(variant, torch.float32, T=70, S=70)

    def part(a, b):
        cut = {name: x.detach().to(device)[..., a:b] if SHAPES[name][-1] in "ST" else x.detach().to(device) for name, x in more.items()}
        return (*(x.detach().to(device)[:, :, a:b] for x in (q, k, v)),), cut

    state = horner.State(variant, batch=2, heads=2, dim=3, value_dim=2, device=device)
    tensors, rest = part(0, 67)
    state.step(*tensors, **rest)
    torch.save(state, tmp_path / "state.pt")
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state)), torch.load(tmp_path / "state.pt")]
    tensors, rest = part(67, 70)
    wanted = state.step(*tensors, **rest)
    for other in copies:
        assert other.tokens == 67
        assert torch.equal(other.step(*tensors, **rest), wanted)  # and none shares memory with another
    assert state.tokens == 70


@pytest.mark.parametrize("variant", ["softmax", "taylor2", "near_taylor2", "forgetting", "gla"])
def test_saved_states_that_do_not_fit_are_refused(variant):
    """torch.load reads them as it reads weights: none may have the library read what is not there."""
    q, k, v, more = inputs(variant, torch.float, T=7, S=7)
    state = horner.State(variant, batch=2, heads=2, dim=3, value_dim=2)
    state.step(q.detach(), k.detach(), v.detach(), **{name: x.detach() for name, x in more.items()})
    text, numbers, tensors = state.__getstate__()
    wrong = [(text, numbers[:-1], tensors), (text, numbers, tensors[:-1]), ("sofmax=3", numbers, tensors)]
    for i, n in enumerate(numbers):
        wrong += [(text, [*numbers[:i], m, *numbers[i + 1 :]], tensors) for m in ((-1,) if i == 5 else (-1, n + 16, 2**40))]
    for i, x in enumerate(tensors):
        others = [torch.zeros(2, 2, 3, 5)] if x is None else [*(x.narrow(d, 0, x.shape[d] - 1) for d in range(x.dim())), x.long(), x.to("meta")]
        others += [] if x is None else [None]
        wrong += [(text, numbers, [*tensors[:i], y, *tensors[i + 1 :]]) for y in others]
    for parts in wrong:
        other = object.__new__(horner.State)
        with pytest.raises(RuntimeError, match="saved state|by another version|no stage|too large|the limit is"):
            other.__setstate__(parts)
    other.__setstate__((text, numbers, tensors))
    assert other.tokens == 7


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", horner.__version__)


@pytest.mark.parametrize("execution", ["auto", "reference", "fused_cpu", "chunked"])
def test_no_tokens_give_an_empty_result_and_zeros(execution):
    """As torch's attention does: no keys are zeros, no queries nothing, and both have gradients of zeros."""
    for T, S in ((0, 0), (3, 0), (0, 3)):
        q, k, v = (torch.randn(2, h, n, 8, requires_grad=True) for h, n in ((4, T), (2, S), (2, S)))
        out = horner.attend(q, k, v, variant="taylor2", execution=execution)
        assert torch.equal(out, torch.zeros(2, 4, T, 8))
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(gradients, (q, k, v)))
    for variant in ("taylor2", "centred_taylor2", "near_centred_taylor2", "delta", "by_count"):  # no sequences, some hidden
        q, k, v, more = inputs(variant, torch.float, B=0)
        if horner.why_not(q, k, v, variant=variant, execution=execution if execution != "auto" else "reference", **more) == "":
            out = horner.attend(q, k, v, variant=variant, execution=execution, keep=torch.ones(0, 5, dtype=torch.bool), **more)
            assert out.shape == (0, 4, 5, 2) and torch.autograd.grad(out.sum(), q)[0].shape == q.shape
    q, k, v = (torch.randn(2, h, n, 8) for h, n in ((4, 3), (2, 0), (2, 0)))
    out, lse, weights = horner.attend(q, k, v, return_lse=True, return_weights=True)
    assert (lse == -torch.inf).all() and weights.shape == (2, 4, 3, 0)
    assert torch.equal(torch.func.vmap(lambda q: horner.attend(q, k, v))(q[None])[0], out)
    state = horner.State("taylor2", batch=2, heads=2, dim=8)
    assert state.step(q[:, :, :0], k, v).shape == (2, 4, 0, 8) and state.tokens == 0
