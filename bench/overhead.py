"""Time of one call of horner.attend on tensors so small that nothing but the call is left, in microseconds.

Beside it: an operator registered in C++ that only allocates its result, and torch's own attention. The contenders take
turns; a time is the mean over the calls of one round, of which the median and the fastest are shown (on a machine with
other work the fastest is the one to compare).

    PYTHONPATH=build/python python bench/overhead.py
"""

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

import horner

ROUNDS, CALLS = 1000, 20

EMPTY = """
#include <ATen/ATen.h>
#include <torch/library.h>
static at::Tensor empty(const at::Tensor& q, const at::Tensor&, const at::Tensor&) { return at::empty_like(q); }
TORCH_LIBRARY(horner_overhead, m) { m.def("empty(Tensor q, Tensor k, Tensor v) -> Tensor", &empty); }
"""


def contenders():
    load_inline("horner_overhead", EMPTY, is_python_module=False, extra_cflags=["-O2"])
    q, k, v = (torch.randn(1, 1, 4, 16) for _ in range(3))
    linear_decay = {"variant": "linear_decay", "decay": torch.rand(1, 1, 4).log(), "norm_weight": torch.ones(16)}
    empty = torch.ops.horner_overhead.empty
    return {
        "empty operator": lambda: empty(q, k, v),
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "horner.attend": lambda: horner.attend(q, k, v),
        'horner.attend(mask="full", scale=0.3)': lambda: horner.attend(q, k, v, mask="full", scale=0.3),
        'horner.attend(variant="taylor4:norm=l2")': lambda: horner.attend(q, k, v, variant="taylor4:norm=l2"),
        'horner.attend(variant="linear_decay", ...)': lambda: horner.attend(q, k, v, **linear_decay),
    }


def microseconds(call):
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - start) / 1e3 / CALLS


def main():
    torch.set_num_threads(1)
    calls = contenders()
    times = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(microseconds(call))
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}; q, k, v [1, 1, 4, 16] float32, no gradients")
    print(f"{'microseconds per call':44}{'median':>8}{'- empty':>9}{'fastest':>9}{'- empty':>9}")
    empty = times["empty operator"]
    for name, of in times.items():
        columns = (f"{f(of):{width}.1f}{f(of) - f(empty):9.1f}" for f, width in ((statistics.median, 8), (min, 9)))
        print(f"{name:44}{''.join(columns)}")


if __name__ == "__main__":
    main()
