"""Dropout in Python: `attend(dropout_p=…, seed=…)`, torch's transforms and compiler, `horner.nn` and `horner.hf`.

`dropout_test.cpp` compares the executions and counts what is dropped.
"""

import numpy
import pytest
import torch
import torch._dynamo.testing
import transformers
from torch.func import grad, jvp, vmap

import horner
import horner.hf
import horner.nn

VARIANTS = ["softmax", "softmax:norm=l2", "taylor4", "entmax15"]


def tensors(dtype=torch.float, T=20, **options):
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 4, T, 8), (2, 2, T, 8), (2, 2, T, 6)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_(options.get("requires_grad", False)) for s in shapes]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_weights_are_dropped_after_they_are_normalised(variant):
    q, k, v = tensors(torch.double)
    text = variant + ("," if ":" in variant else ":") + "dropout=0.3"
    seed = torch.tensor([9])
    whole, left = horner.weights(q, k, variant=variant), horner.weights(q, k, variant=text, seed=seed)
    kept = left != 0
    seen = whole != 0
    assert 0.6 < kept.sum() / seen.sum() < 0.8 and not (kept & ~seen).any()
    torch.testing.assert_close(left, torch.where(kept, whole / 0.7, 0))
    if variant != "softmax:norm=l2":  # a norm is not a matrix
        out = horner.attend(q, k, v, variant=variant, dropout_p=0.3, seed=9)
        torch.testing.assert_close(out, left @ v.repeat_interleave(2, 1))
    for execution in ("reference", "fused_cpu"):
        a, b = (horner.attend(*tensors(), variant=variant, dropout_p=0.3, seed=9, execution=e) for e in (execution, "auto"))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@cuda
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_drops_what_the_cpu_drops(variant, dtype):
    x = [t.to(dtype) for t in tensors(T=150)]
    direction = torch.randn(2, 4, 150, 6, generator=torch.Generator().manual_seed(6)).to(dtype)  # not along a normed row
    results = []
    for device in ("cpu", "cuda"):
        own = [t.to(device).requires_grad_() for t in x]
        out = horner.attend(*own, variant=variant, dropout_p=0.3, seed=9)
        results.append([out, *torch.autograd.grad(out, own, direction.to(device))])
    for a, b in zip(*results):
        torch.testing.assert_close(a.float(), b.cpu().float(), rtol=0, atol=(1e-4 if dtype == torch.float else 0.05) * a.float().abs().max().item())


@cuda
def test_cuda_graph_reads_the_seed_at_each_replay():
    q, k, v = (t.cuda() for t in tensors(T=100))
    seed = torch.tensor([1], device="cuda")
    horner.attend(q, k, v, dropout_p=0.3, seed=seed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = horner.attend(q, k, v, dropout_p=0.3, seed=seed)
    for s in (1, 2):
        seed.fill_(s)
        graph.replay()
        torch.testing.assert_close(out, horner.attend(q, k, v, dropout_p=0.3, seed=s), atol=1e-5, rtol=1e-5)


def test_seeds():
    q, k, v = tensors()
    one = horner.attend(q, k, v, dropout_p=0.5, seed=1)
    assert torch.equal(one, horner.attend(q, k, v, dropout_p=0.5, seed=torch.tensor([1])))
    assert torch.equal(one, horner.attend(q, k, v, variant="softmax:dropout=0.5", seed=1))
    assert torch.equal(one, horner.attend(q, k, v, dropout_p=0.5, seed=numpy.int64(1)))
    text = "softmax:dropout=0.5"
    assert torch.equal(*(horner.weights(q, k, variant=text, seed=seed) for seed in (1, torch.tensor([1]))))
    assert torch.equal(*(horner.statistics(q, k, v, variant=text, seed=seed)[0] for seed in (1, torch.tensor([1]))))
    assert not torch.equal(one, horner.attend(q, k, v, dropout_p=0.5, seed=2))
    torch.manual_seed(0)
    drawn = [horner.attend(q, k, v, dropout_p=0.5) for _ in range(2)]
    torch.manual_seed(0)
    assert torch.equal(drawn[0], horner.attend(q, k, v, dropout_p=0.5)) and not torch.equal(*drawn)
    state = torch.get_rng_state()
    assert torch.equal(horner.attend(q, k, v), horner.attend(q, k, v, dropout_p=0.0, seed=3))
    assert torch.equal(state, torch.get_rng_state())  # nothing is drawn without dropout
    mean = sum(horner.attend(q, k, v, dropout_p=0.2, seed=s) for s in range(2000)) / 2000
    torch.testing.assert_close(mean, horner.attend(q, k, v), atol=0.1, rtol=0)


WRONG = {
    "dropout must be 0 to 0.999, not 1": {"dropout_p": 1.0},
    "dropout must be 0 to 0.999, not -0.5": {"dropout_p": -0.5},
    "dropout must be 0 to 0.999, not nan": {"dropout_p": float("nan")},
    "dropout_p must be a number, got str": {"dropout_p": "some"},
    "seed must be an integer of 64 bits": {"dropout_p": 0.1, "seed": 2**63},
    "seed must be an int or a torch.Tensor, got str": {"dropout_p": 0.1, "seed": "x"},
    "seed must be an int or a torch.Tensor, got float": {"dropout_p": 0.1, "seed": 1.0},
    "seed must have dtype int64, got float32": {"dropout_p": 0.1, "seed": torch.ones(1)},
    r"seed must have shape \[1\], got \[2\]": {"dropout_p": 0.1, "seed": torch.tensor([1, 2])},
    "missing input 'seed'": {"variant": "softmax:dropout=0.1"},
    "dropout of single pairs has no finite state": {"variant": "linear", "dropout_p": 0.1, "execution": "chunked"},
}


@pytest.mark.parametrize("named", WRONG)
def test_what_is_wrong_is_named(named):
    with pytest.raises((RuntimeError, TypeError), match=named):
        horner.attend(*tensors(), **WRONG[named])


def test_a_state_has_none():
    with pytest.raises(RuntimeError, match="does not support dropout: it is for training"):
        horner.State("softmax:dropout=0.1", batch=1, heads=2, dim=8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients(variant):
    x = tensors(torch.double, T=7, requires_grad=True)
    seed = torch.tensor([4])

    def run(*x):
        return horner.attend(*x, variant=variant, dropout_p=0.3, seed=seed)

    torch.autograd.gradcheck(run, x)
    text = variant + ("," if ":" in variant else ":") + "dropout=0.3"
    arguments = (*(t.detach().float().requires_grad_() for t in x), text, "auto", None, None, None, None)
    torch.library.opcheck(torch.ops.horner.attend.default, arguments, {"seed": seed})
    values = tuple(t.detach() for t in x)
    tangents = tuple(torch.randn_like(t) for t in values)
    out, slope = jvp(run, values, tangents)
    torch.testing.assert_close(out, run(*values))
    step = 1e-6
    near = [run(*(a + s * step * b for a, b in zip(values, tangents))) for s in (1, -1)]
    torch.testing.assert_close(slope, (near[0] - near[1]) / (2 * step), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(grad(lambda q: run(q, *values[1:]).sum())(values[0]), torch.autograd.grad(run(*x).sum(), x[0])[0])


def test_vmap_drops_what_a_loop_drops():
    x = tensors()
    many = [torch.stack([t, t.flip(2)]) for t in x]
    out = vmap(lambda q, k, v: horner.attend(q, k, v, dropout_p=0.4, seed=1))(*many)
    for i in range(2):
        torch.testing.assert_close(out[i], horner.attend(*(x[i] for x in many), dropout_p=0.4, seed=1))
    seeds = torch.tensor([[1], [2]])
    out = vmap(lambda s: horner.attend(*x, dropout_p=0.4, seed=s))(seeds)
    torch.testing.assert_close(out[1], horner.attend(*x, dropout_p=0.4, seed=2))
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda q, k, v: horner.attend(q, k, v, dropout_p=0.4))(*many)
    out = vmap(lambda q: horner.attend(q, *x[1:], dropout_p=0.4), randomness="different")(torch.stack([x[0]] * 2))
    assert not torch.equal(*out)


def test_compiled_gradients_drop_the_same_pairs():
    torch.compiler.reset()
    x = tensors(requires_grad=True, T=70)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda *x, seed: horner.attend(*x, dropout_p=0.3, seed=seed), fullgraph=True, backend=counter)
    for s in (1, 2, 3):
        seed = torch.tensor([s])
        outs = [run(*x, seed=seed), horner.attend(*x, dropout_p=0.3, seed=seed)]
        assert torch.equal(*outs)
        assert all(torch.equal(a, b) for a, b in zip(*(torch.autograd.grad(o.square().sum(), x) for o in outs)))
    assert counter.frame_count == 1
    drawn = torch.compile(lambda *x: horner.attend(*x, dropout_p=0.3), fullgraph=True, backend="aot_eager")
    a, b = drawn(*x), drawn(*x)
    assert not torch.equal(a, b)
    # linear in v: its gradient tells whether backward dropped what forward did
    g = torch.randn_like(a)
    (dv,) = torch.autograd.grad(a, x[2], g)
    torch.testing.assert_close((dv * x[2]).sum(), (a * g).sum(), rtol=1e-3, atol=1e-3)


def test_the_modules_drop_in_training_only():
    torch.manual_seed(0)
    block = horner.nn.TransformerBlock(32, 4, variant="gated", dropout=0.5)
    x = torch.randn(2, 9, 32)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def gpt2(**options):
    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **options)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="horner")


def test_gpt2_trains_with_dropout():
    ids = torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(0))
    made, plain = gpt2(attn_pdrop=0.2), gpt2(attn_pdrop=0.0)
    torch.testing.assert_close(made.eval()(ids).logits, plain.eval()(ids).logits)

    def step():
        torch.manual_seed(2)
        made.zero_grad()
        made.train()(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in made.parameters()]

    first, again = step(), step()
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    made.gradient_checkpointing_enable()
    for a, b in zip(first, step()):
        torch.testing.assert_close(a, b)
    plain.train()(ids, labels=ids, use_cache=False).loss.backward()
    assert not torch.allclose(first[2], [p.grad for p in plain.parameters()][2], rtol=1e-2)
    with pytest.raises(NotImplementedError, match="call model.eval"), torch.no_grad():
        other = gpt2(attn_pdrop=0.2)
        other.set_attn_implementation("horner:taylor2")
        other.train()(ids, past_key_values=horner.hf.RecurrentCache(other.config))
