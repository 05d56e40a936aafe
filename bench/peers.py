"""The peers of fused_cuda that are reached from Python: compiled FlexAttention (softmax, clamped scores, and a Taylor series by
the logarithm of its weight) and, where it is installed, flash-linear-attention. Times in ms, forward and forward+backward,
medians of CUDA events, in bfloat16, causal, 16 heads, 16,384 tokens in all.

    python bench/peers.py [head dimension]
"""

import sys

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def median_ms(run, rounds=7, runs=5):
    for _ in range(2):
        run()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(runs):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / runs)
    return sorted(times)[len(times) // 2]


def taylor(order):
    """Softmax of log e_n(x), for even n, where the series is positive."""

    def score(x, b, h, t, s):
        y = torch.ones_like(x)
        for n in range(order, 0, -1):
            y = 1 + y * x / n
        return torch.log(y)

    return score


SCORES = {
    "softmax": None,
    "clamped at 5": lambda x, b, h, t, s: torch.clamp(x, max=5.0),
    "taylor2": taylor(2),
    "taylor10": taylor(10),
}


def flash_linear_attention():
    """Name and function on q, k, v [B, T, H, D]; empty where the package is missing."""
    try:
        from fla.ops.based import parallel_based
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return {}
    return {"taylor2, fla parallel_based": parallel_based, "linear, fla chunk": chunk_linear_attn}


def row(name, attend, q, k, v):
    try:
        with torch.no_grad():
            forward = median_ms(lambda: attend(q, k, v))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        direction = torch.randn_like(q)

        def both():
            out = attend(*leaves)
            (out[0] if isinstance(out, tuple) else out).backward(direction)

        print(f"| {name} | {forward:.3f} | {median_ms(both):.3f} |", flush=True)
    except Exception as error:  # a peer that does not run here is no failure of ours
        print(f"| {name} | – | – | {type(error).__name__}", flush=True)


def main():
    D = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for B, T in [(16, 1024), (4, 4096), (1, 16384)]:
        print(f"\n| B{B} H16 T{T} D{D} bfloat16 | forward | forward+backward |\n|---|---|---|")
        q, k, v = (torch.randn(B, 16, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        mask = create_block_mask(lambda b, h, t, s: t >= s, None, None, T, T)
        for name, score in SCORES.items():
            compiled = torch.compile(flex_attention, dynamic=False)
            row(f"{name}, FlexAttention", lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=mask), q, k, v)
            torch.compiler.reset()
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        for name, attend in flash_linear_attention().items():
            row(name, attend, q, k, v)


if __name__ == "__main__":
    main()
