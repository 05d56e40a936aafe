"""Time of one call of horner.attend on tensors so small that nothing but the call is left, in microseconds.

Beside it: an operator registered in C++ that only allocates its result, and torch's own attention; without gradients, and
with the gradients of q, k and v. The contenders take turns; a time is the mean over the calls of one round, of the
thread's processor time, which other work on the machine changes less than the clock's. The median and the fastest round
are shown.

With `--device cuda` a time is that until the call returns: the kernels run behind it, in a queue that is emptied between
the rounds.

    PYTHONPATH=build/python python bench/call_overhead.py [--device cuda] [--dtype bfloat16]
"""

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

import horner

ROUNDS, CALLS = 500, 20

EMPTY = """
#include <ATen/ATen.h>
#include <torch/library.h>
static at::Tensor empty(const at::Tensor& q, const at::Tensor&, const at::Tensor&) { return at::empty_like(q); }
TORCH_LIBRARY(horner_overhead, m) { m.def("empty(Tensor q, Tensor k, Tensor v) -> Tensor", &empty); }
"""


def contenders(shape, where):
    load_inline("horner_overhead", EMPTY, is_python_module=False, extra_cflags=["-O2"])
    q, k, v, grad = (torch.randn(shape, **where) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    decay = torch.rand(shape[:3], device=where["device"]).log()
    linear_decay = {"variant": "linear_decay", "decay": decay, "norm_weight": torch.ones(shape[3], **where)}
    empty = torch.ops.horner_overhead.empty

    def trained(function):
        return lambda: torch.autograd.grad(function(*leaves), leaves, grad)

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return {
        "empty operator": lambda: empty(q, k, v),
        "scaled_dot_product_attention": lambda: sdpa(q, k, v),
        "horner.attend": lambda: horner.attend(q, k, v),
        'horner.attend(mask="full", scale=0.3)': lambda: horner.attend(q, k, v, mask="full", scale=0.3),
        'horner.attend(variant="taylor4:norm=l2")': lambda: horner.attend(q, k, v, variant="taylor4:norm=l2"),
        'horner.attend(variant="linear_decay", ...)': lambda: horner.attend(q, k, v, **linear_decay),
        "scaled_dot_product_attention, gradients": trained(sdpa),
        "horner.attend, gradients": trained(horner.attend),
    }


def microseconds(call):
    start = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return (time.thread_time_ns() - start) / 1e3 / CALLS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--shape", default="1,2,8,16", help="B,H,T,D")
    options = parser.parse_args()
    shape = [int(n) for n in options.shape.split(",")]
    torch.set_num_threads(1)
    calls = contenders(shape, {"device": options.device, "dtype": getattr(torch, options.dtype)})
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(microseconds(call))
            if options.device == "cuda":
                torch.cuda.synchronize()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {device}; q, k, v {shape} {options.dtype}")
    print(f"{'microseconds per call':44}{'median':>8}{'fastest':>9}")
    for name, of in times.items():
        print(f"{name:44}{statistics.median(of):8.1f}{min(of):9.1f}")


if __name__ == "__main__":
    main()
