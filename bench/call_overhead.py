"""Time of one call of horner.attend on tensors so small that nothing but the call is left, in microseconds.

Beside it: an operator registered in C++ that only allocates its result, and torch's own attention; without gradients, and
with the gradients of q, k and v. The contenders take turns; a time is the mean over the calls of one round, of the
thread's processor time, which other work on the machine changes less than the clock's. The median and the fastest round
are shown.

    PYTHONPATH=build/python python bench/call_overhead.py
"""

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


def contenders():
    load_inline("horner_overhead", EMPTY, is_python_module=False, extra_cflags=["-O2"])
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(1, 2, 8, 16)
    linear_decay = {"variant": "linear_decay", "decay": torch.rand(1, 2, 8).log(), "norm_weight": torch.ones(16)}
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
    torch.set_num_threads(1)
    calls = contenders()
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(microseconds(call))
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}; q, k, v [1, 2, 8, 16] float32")
    print(f"{'microseconds per call':44}{'median':>8}{'fastest':>9}")
    for name, of in times.items():
        print(f"{name:44}{statistics.median(of):8.1f}{min(of):9.1f}")


if __name__ == "__main__":
    main()
