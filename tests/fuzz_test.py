"""Random calls, most of them malformed: each gives a result or one of the documented errors. None ends the process.

A child process makes the calls and writes the number of each before it begins, so that a crash has a number:
`python tests/fuzz_test.py cpu 1234 1` makes call 1234 alone and prints it. HORNER_LONG=1 makes 10,000 calls.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy
import pytest
import torch

import horner

CALLS = 10_000 if os.environ.get("HORNER_LONG") else 1_500
ROWS = {name: (shape, role) for name, shape, role, _ in torch.ops.horner.inputs()}

# What the package documents (docs/python.md), and words of messages that are not its own.
ERRORS = (TypeError, RuntimeError)
FOREIGN = re.compile(
    r"\bc10\b|enforce fail|INTERNAL ASSERT|Internal error|[\w/]+\.(cpp|h|py|cu)\b|Exception raised|Could not run|CUDA error"
    r"|not implemented for|Declaration:|Position: |frame #|PYBIND|aten::|at::|std::|Expected all tensors|out of range"
    r"|must match the size|mat1|cannot reshape|can't allocate|device-side"
)


class Subclass(torch.Tensor):
    """Without code of its own."""


# Tensors. Each takes a random.Random and a tensor.


def resized(rng, x):
    axis = rng.randrange(x.dim()) if x.dim() else 0
    size = rng.choice([0, 1, 2, 3, 5, 8])
    shape = [size if i == axis else n for i, n in enumerate(x.shape)]
    return torch.zeros(shape, dtype=x.dtype, device=x.device)


def set_one(value):
    def change(rng, x):
        x = x.detach().clone()
        if x.numel():
            x.view(-1)[rng.randrange(x.numel())] = value if x.is_floating_point() else rng.choice([-1, 0, 99, 2**31 - 1])
        return x

    return change


def freed(rng, x):
    x = x.detach().clone()
    x.untyped_storage().resize_(0)
    return x


def is_freed(x):
    """Then torch itself would read what is not there."""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested and x.numel() > 0 and x.untyped_storage().nbytes() == 0


def inference(rng, x):
    with torch.inference_mode():
        return x.detach().clone()


def dtype(rng, x):
    names = "float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 uint8 bool complex64 complex128"
    return x.detach().to(getattr(torch, rng.choice(names.split())))


TENSORS = [
    resized,
    resized,
    dtype,
    dtype,
    set_one(float("nan")),
    set_one(float("inf")),
    set_one(-1e30),
    lambda rng, x: x[0] if x.dim() and x.shape[0] else x.sum(),
    lambda rng, x: x.unsqueeze(rng.randint(0, x.dim())),
    lambda rng, x: x.flatten(),
    lambda rng, x: torch.tensor(1.0, device=x.device),
    lambda rng, x: torch.empty(0, device=x.device),
    lambda rng, x: x.permute(*rng.sample(range(x.dim()), x.dim())),
    lambda rng, x: torch.stack([x, x], -1)[..., 1],
    lambda rng, x: x.flip(0) if x.dim() else x,
    lambda rng, x: x[..., ::2],
    lambda rng, x: x[..., 1:],
    lambda rng, x: x.sum().expand(x.shape) if x.is_floating_point() else x,
    lambda rng, x: torch.cat([x.flatten(), x.flatten()])[1 : x.numel() + 1].view(x.shape),
    lambda rng, x: torch.as_strided(torch.ones(64, device=x.device), (2, 4, 3, 3), (1, 1, 1, 1)),
    lambda rng, x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
    lambda rng, x: x.to("meta"),
    lambda rng, x: x.cpu(),
    lambda rng, x: x.detach().to_sparse(),
    lambda rng, x: x.detach()[0, 0].to_sparse_csr() if x.dim() == 4 and 0 not in x.shape else x,
    lambda rng, x: torch.nested.nested_tensor([x.detach()]) if x.dim() else x,
    lambda rng, x: torch.nested.nested_tensor([x.detach(), x.detach()], layout=torch.jagged) if x.dim() > 1 else x,
    lambda rng, x: x.detach().float().to_mkldnn() if x.device.type == "cpu" else x,
    lambda rng, x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8),
    lambda rng, x: torch.nn.Parameter(x.detach(), requires_grad=x.is_floating_point()),
    lambda rng, x: x.detach().as_subclass(Subclass),
    lambda rng, x: torch._neg_view(x.detach()) if x.is_floating_point() else x,
    lambda rng, x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
    lambda rng, x: torch.view_as_complex(torch.stack([x, x], -1).detach().float()).conj().imag,
    freed,
    inference,
]
KINDS = [None, [1.0, 2.0], (), {}, "q", b"q", 3, 2.5, 1j, True, object(), numpy.ones((2, 4, 5, 3), numpy.float32), torch.float32, Ellipsis]
TEXTS = ["", "softmax", "sofmax", "taylor-3", "taylor999999999999", "taylor3:norm=l2", "softmax:", ":", "softmax:clamp=nan", "taylor2:mask=window(0)",
         "softmax:weight=taylor(order=-1)", "ünïcödé ☃", "\0", "a\0b", "\ud800", "\n%s%n", "x" * 5000, "full", "window(-1)", "window(99999999999999999999)", "window(3)",
         "causal", "reference", "fused_cpu", "chunked", "recurrent", "hopper_cuda", "fused_cuda", "chunked_cuda", "softmax:decay=token_gate,mask=full", "((((", "⟨nested⟩"]  # fmt: skip
NUMBERS = [0, 1, -1, 0.5, 1e300, -1e300, 1e-300, float("nan"), float("inf"), float("-inf"), 10**400, -(10**400), 2**63, True, numpy.float32(2), numpy.ones(3), torch.tensor(0.5),
           torch.ones(2), torch.empty(1, device="meta"), "0.5", b"1", 1j, [1], object()]  # fmt: skip


def valid(rng, variant, device):
    """q, k, v and what the variant requires."""
    sizes = {"B": rng.choice([1, 2, 2, 0]), "G": rng.choice([1, 2]), "S": rng.choice([1, 5, 17, 70]), "D": rng.choice([1, 3, 16]), "E": rng.choice([1, 5, 16]), "F": 16, "3": 3}
    sizes["H"], sizes["T"] = sizes["G"] * rng.choice([1, 2, 3]), rng.choice([sizes["S"]] * 4 + [0, 1, 9])
    sizes["b"], sizes["h"] = rng.choice([1, sizes["B"]]), rng.choice([1, sizes["H"]])
    kind = rng.choice([torch.float32] * 4 + [torch.bfloat16, torch.float16, torch.float64])
    inputs = {}
    for name, (shape, role) in ROWS.items():
        if role == "tensor" or name in horner.describe(variant)["inputs"].split():
            x = torch.rand([sizes[letter] for letter in shape], device=device) * 0.8 + 0.1
            inputs[name] = x.log().to(kind) if role == "log_gate" else x.to(kind)
    if rng.random() < 0.3:
        inputs["keep"] = torch.rand(sizes["B"], sizes["S"], device=device) < 0.7
    if rng.random() < 0.3:
        cuts = [0, sizes["S"] // 2, sizes["S"]]
        inputs["cu_seqlens"] = torch.tensor(cuts, device=device, dtype=rng.choice([torch.int32, torch.int64]))
    return inputs


def spoil(rng, inputs, device):
    name = rng.choice(list(inputs) if rng.random() < 0.8 else list(ROWS) + ["gate", "Q", ""])
    if rng.random() < 0.15:
        inputs[name] = rng.choice(KINDS)
    elif rng.random() < 0.1 and name not in ("q", "k", "v"):
        inputs.pop(name, None)
    elif name == "cu_seqlens" and rng.random() < 0.7:
        inputs[name] = torch.tensor([rng.choice([-5, 0, 0, 1, 3, 70, 2**31 - 1, 2**40]) for _ in range(rng.randint(0, 4))], device=device)
    else:
        x = inputs.get(name)
        x = x if isinstance(x, torch.Tensor) and not is_freed(x) else torch.rand(rng.choice([(2, 4, 5), (3,), (2, 5), ()]), device=device)
        try:
            inputs[name] = rng.choice(TENSORS)(rng, x)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            inputs[name] = None  # torch has no such tensor
    if rng.random() < 0.3:
        for x in inputs.values():
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_leaf and not x.is_inference() and rng.random() < 0.5:
                x.requires_grad_()


def settings(rng):
    out = {}
    for name, values in (("variant", TEXTS), ("execution", TEXTS), ("mask", TEXTS), ("scale", NUMBERS), ("temperature", NUMBERS), ("clamp", NUMBERS)):
        if rng.random() < 0.08:
            out[name] = rng.choice(values + KINDS)
        elif name == "execution" and rng.random() < 0.5:
            out[name] = rng.choice(horner.executions())
    return out


def settings_of_attend(rng):
    """Those that no other function has."""
    values = {"dropout_p": [0.1, 0.1, 0.5, 1.0, *NUMBERS], "return_lse": [True], "return_weights": [True]}
    return {name: rng.choice(some) for name, some in values.items() if rng.random() < 0.1}


def dense(rng, inputs, device):
    """A mask that is a tensor, in place of its name."""
    q, k = inputs.get("q"), inputs.get("k")
    shape = (*q.shape[:3], k.shape[2]) if all(isinstance(x, torch.Tensor) and not x.is_nested and x.dim() == 4 for x in (q, k)) else (2, 4, 5, 5)
    shape = [n if rng.random() < 0.8 else 1 for n in shape][rng.choice([0, 0, 0, 1, 2, 3]) :]
    some = {"mask": torch.randn(shape, device=device).to(rng.choice([torch.float32, torch.bfloat16, torch.float64]))}
    some["mask"] = some["mask"] > 0 if rng.random() < 0.6 else some["mask"]
    if rng.random() < 0.5:
        spoil(rng, some, device)
    return some.get("mask")


def stepped(rng, inputs, options, device):
    """A state that fits the inputs, or not, and a step or two."""
    options.pop("execution", None)
    k, v = inputs.get("k"), inputs.get("v")
    shape = {"batch": 2, "heads": 2, "dim": 3, "value_dim": 5, "device": device}
    if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor) and not (k.is_nested or v.is_nested) and k.dim() == 4 and v.dim() == 4:
        shape.update(batch=k.shape[0], heads=k.shape[1], dim=k.shape[3], value_dim=v.shape[3], dtype=k.dtype)
    if rng.random() < 0.3:
        shape[rng.choice(list(shape))] = rng.choice(KINDS + NUMBERS + [torch.int64, "cuda:99", "meta"])
    state = horner.State(**shape, **options)
    q, k, v = (inputs.pop(name, None) for name in "qkv")
    out = state.step(q, k, v, **inputs)
    if rng.random() < 0.5:
        rows = rng.choice([torch.tensor([0]), torch.tensor([0, 99]), torch.tensor([-1]), torch.tensor([0.5]), torch.tensor(0), [0], None])
        state = state.select(rows)
    if rng.random() < 0.2:
        state.merge(rng.choice([state, horner.State(**{**shape, **options}), horner.State(**{**shape, **options, "variant": "taylor2"}), None]))
    return out if rng.random() < 0.5 else state.step(q, k, v, **inputs)


def differentiated(rng, out):
    if isinstance(out, tuple):
        out = out[0]
    if out.requires_grad and out.device.type != "meta":
        grads = [torch.ones_like(out), out.new_ones(1).expand(out.shape), torch.full_like(out, float("nan")), torch.ones_like(out).transpose(0, 1).contiguous().transpose(0, 1)]
        out.backward(rng.choice(grads))
    return out


def transformed(rng, how, function, q):
    """torch's transforms of a function of the queries."""
    def loss(q):
        return function(q).float().sum()

    more = {"randomness": rng.choice(["error", "different", "same"])}
    return {
        "vmap": lambda: torch.func.vmap(function, **more)(q.expand(2, *q.shape)),
        "grad": lambda: torch.func.grad(loss)(q),
        "jvp": lambda: torch.func.jvp(function, (q,), (torch.ones_like(q),)),
        "functionalize": lambda: torch.func.functionalize(function)(q),
        "functionalize grad": lambda: torch.func.functionalize(torch.func.grad(loss))(q),
        "vmap grad": lambda: torch.func.vmap(torch.func.grad(loss), **more)(q.expand(2, *q.shape)),
    }[how]()


TRANSFORMS = ["vmap", "grad", "jvp", "functionalize", "functionalize grad", "vmap grad"]


def can_be_transformed(x):
    """By torch itself."""
    plain = type(x) is torch.Tensor and x.layout is torch.strided and not (x.is_nested or x.is_quantized or x.is_inference() or is_freed(x))
    return plain and x.is_floating_point() and x.itemsize > 1 and not x._is_zerotensor() and not x.is_neg()


def call(rng, device):
    """A function without arguments, and its text."""
    variant = rng.choice(horner.variants())
    inputs = valid(rng, variant, device)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        spoil(rng, inputs, device)
    options = {"variant": variant, **settings(rng)}
    if rng.random() < 0.2:
        options["mask"] = dense(rng, inputs, device)
    how = rng.choice(["attend"] * 6 + ["statistics", "why_not", "step", "step", "weights", "transformed", "transformed"])
    if how == "transformed":
        how = rng.choice(TRANSFORMS if can_be_transformed(inputs.get("q")) else ["attend"])
    if how == "attend" or how in TRANSFORMS:
        options |= settings_of_attend(rng)
    around = rng.choice(["", "", "", "autocast", "no_grad", "inference_mode"])

    def run():
        context = {"autocast": lambda: torch.autocast(device, torch.bfloat16), "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
        with context.get(around, torch.enable_grad)():
            if how == "step":
                return stepped(rng, inputs, options, device)
            q, k, v = (inputs.pop(name, None) for name in "qkv")
            if how == "why_not":
                options.setdefault("execution", "reference")
                return horner.why_not(q, k, v, **options, **inputs)
            if how == "weights":
                options.pop("execution", None)
                return differentiated(rng, horner.weights(q, k, **options, **inputs))
            if how in TRANSFORMS:
                def first(q):
                    out = horner.attend(q, k, v, **options, **inputs)
                    return out[0] if isinstance(out, tuple) else out

                return transformed(rng, how, first, q)
            out = getattr(horner, how)(q, k, v, **options, **inputs)
        return differentiated(rng, out)

    def text(x):
        return f"{x.layout} {x.dtype} {x.device} {x.shape if not x.is_nested else 'nested'}" if isinstance(x, torch.Tensor) else repr(x)[:60]

    return run, f"{how} {around} " + ", ".join(f"{name}: {text(x)}" for name, x in {**options, **inputs}.items())


def outcome(number, device):
    """What call `number` came to, and the text of a wrong one."""
    torch.manual_seed(number)
    rng = random.Random(number)
    run, text = call(rng, device)
    try:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return "result", ""
    except ERRORS as error:
        message = str(error)
        if FOREIGN.search(message) or not message or isinstance(error, NotImplementedError):
            return "foreign error", f"{number}: {text}\n  {type(error).__name__}: {message[:500]}"
        return type(error).__name__, ""
    except Exception as error:
        return "foreign error", f"{number}: {text}\n  {type(error).__name__}: {str(error)[:500]}"


def main(device, first, count, counts_file=None, now_file=None):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts, wrong = {}, []
    now = os.open(now_file, os.O_RDWR | os.O_CREAT) if now_file else None
    for number in range(first, first + count):
        if now is not None:
            os.pwrite(now, f"{number:12}".encode(), 0)
        what, text = outcome(number, device)
        counts[what] = counts.get(what, 0) + 1
        wrong += [text] if text else []
    if counts_file:
        Path(counts_file).write_text(json.dumps({"counts": counts, "wrong": wrong}))
    else:
        print(*wrong, counts, sep="\n")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))])
def test_malformed_calls_are_errors(device):
    with tempfile.TemporaryDirectory() as folder:
        counts, now = Path(folder) / "counts.json", Path(folder) / "now"
        child = subprocess.run([sys.executable, __file__, device, "0", str(CALLS), counts, now], capture_output=True, text=True)
        last = now.read_text().strip() if now.exists() else "the first"
        assert child.returncode == 0, f"call {last} on {device} ended the process ({child.returncode}): {child.stderr[-2000:]}"
        found = json.loads(counts.read_text())
    print(found["counts"])
    assert not found["wrong"], "\n".join(found["wrong"][:20])
    assert found["counts"]["result"] > CALLS // 20 and sum(found["counts"].values()) == CALLS


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
