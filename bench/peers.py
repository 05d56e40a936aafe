"""One table for each shape: the variants of `horner bench attention --device cuda`, torch's backends of softmax beside them, and
the peers that are reached from Python: compiled FlexAttention (softmax, clamped scores, and a Taylor series by the logarithm of
its weight) and, where it is installed, flash-linear-attention. Causal, bfloat16, 16 heads, 16,384 tokens in all; a length above
that is one sequence. Times in ms, forward and forward+backward, medians of CUDA events, and their multiple of cuDNN's softmax in
the same run; memory: the most beyond the inputs.

Then what takes linear time, at 65,536 tokens, beside flash-linear-attention.

    python bench/peers.py [--horner build-cuda/horner] [--dims 64 128] [--lengths 1024 4096 16384 65536] [--no-flex]
"""

import argparse
import json
import pathlib
import subprocess

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

HEADS, TOKENS = 16, 16384
VARIANTS = ["softmax", "l2", "taylor2", "taylor4", "taylor10", "by_count", "gated"]
LINEAR = {64: (["linear", "linear_relu", "taylor2"], "linear, fla chunk"), 16: (["taylor2"], "taylor2, fla fused_chunk_based")}  # by head dimension


def median_ms(run, rounds=5):
    for _ in range(2):
        run()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 3)
    return sorted(times)[len(times) // 2]


def softmax(backend):
    def attend(q, k, v):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def taylor(order):
    """Softmax of log e_n(x), for even n, where the series is positive."""

    def score(x, b, h, t, s):
        y = torch.ones_like(x)
        for n in range(order, 0, -1):
            y = 1 + y * x / n
        return torch.log(y)

    return score


SCORES = {"softmax": None, "clamped at 5": lambda x, b, h, t, s: torch.clamp(x, max=5.0), "taylor2": taylor(2), "taylor10": taylor(10)}


def flash_linear_attention():
    """Name and function on q, k, v [B, T, H, D]; empty where the package is missing."""
    try:
        from fla.ops.based import fused_chunk_based, parallel_based
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return {}
    return {"taylor2, fla parallel_based": parallel_based, "linear, fla chunk": chunk_linear_attn, "taylor2, fla fused_chunk_based": fused_chunk_based}


def measured(attend, q, k, v):
    """Forward and forward+backward in ms, bytes beyond the inputs; or why not."""
    try:
        with torch.no_grad():
            forward = median_ms(lambda: attend(q, k, v))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        direction = torch.randn_like(q)

        def both():
            out = attend(*leaves)
            torch.autograd.grad(out[0] if isinstance(out, tuple) else out, leaves, direction)

        ms = median_ms(both)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        return forward, ms, torch.cuda.max_memory_allocated() - before
    except Exception as error:  # a peer that does not run here is no failure of ours
        return type(error).__name__


def of_horner(program, shape, variants=VARIANTS, executions=("hopper_cuda", "fused_cuda")):
    """Name to (forward, both, bytes) of every variant by the best kernels that run it."""
    command = [program, "bench", "attention", "--device", "cuda", "--dtype", "bfloat16", "--json", "--repeats", "5"]
    command += ["--shape", ",".join(map(str, shape)), "--variant", *variants, "--execution", *executions]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.strip() or f"{program} ended with {done.returncode}")
    rows = {}
    for r in json.loads(done.stdout)["results"] if done.stdout else []:
        name = r["variant"] if r["execution"] == "torch" else f"{r['variant']}, {r['execution']}"
        if r["result"] == "ok":
            rows[name] = (r["forward"]["ms"], r["forward_backward"]["ms"], r["extra_bytes"])
        elif r["result"] == "wrong":
            rows[name] = f"wrong: {r['check']}"
    return rows


def peers(shape, flex):
    B, H, T, D = shape
    q, k, v = (torch.randn(B, H, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    yield "softmax, cuDNN", measured(softmax(SDPBackend.CUDNN_ATTENTION), q, k, v)
    yield "softmax, FlashAttention-2", measured(softmax(SDPBackend.FLASH_ATTENTION), q, k, v)
    if flex:
        mask = create_block_mask(lambda b, h, t, s: t >= s, None, None, T, T)
        for name, score in SCORES.items():
            compiled = torch.compile(flex_attention, dynamic=False)
            yield f"{name}, FlexAttention", measured(lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=mask), q, k, v)
            torch.compiler.reset()
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    for name, attend in flash_linear_attention().items():
        if T <= TOKENS and "fused_chunk" not in name:
            yield name, measured(attend, q, k, v)


def linear_time(program, T=65536):
    for D, (variants, peer) in LINEAR.items():
        print(f"\n| B1 H{HEADS} T{T} D{D} bfloat16 | forward | forward+backward | × fla | memory |\n|---|---|---|---|---|")
        q, k, v = (torch.randn(1, T, HEADS, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        attend = flash_linear_attention().get(peer)
        result = measured(attend, q, k, v) if attend else "not installed"
        best = None if isinstance(result, str) else result[1]
        print_row(peer, result, best)
        if pathlib.Path(program).exists():
            for name, ours in of_horner(program, (1, HEADS, T, D), variants, ("chunked_cuda",)).items():
                print_row(name, ours, best)


def print_row(name, result, best):
    if isinstance(result, str):
        return print(f"| {name} | – | – | – | – | {result}", flush=True)
    forward, both, extra = result
    times = f"{both / best:.2f}" if best else "–"
    print(f"| {name} | {forward:.3f} | {both:.3f} | {times} | {extra / 1e6:.0f} MB |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--horner", default="build-cuda/horner", help="the program; left out where there is none")
    parser.add_argument("--dims", type=int, nargs="+", default=[64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention, whose compilation takes most of the time")
    parser.add_argument("--no-linear", action="store_true", help="without the last table")
    o = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for D in o.dims:
        for T in o.lengths:
            shape = (max(TOKENS // T, 1), HEADS, T, D)
            print(f"\n| B{shape[0]} H{HEADS} T{T} D{D} bfloat16 | forward | forward+backward | × cuDNN | memory |\n|---|---|---|---|---|")
            best = None
            for name, result in peers(shape, not o.no_flex and T <= TOKENS):
                best = best or (None if isinstance(result, str) else result[1])
                print_row(name, result, best)
            torch.cuda.empty_cache()
            if pathlib.Path(o.horner).exists():
                for name, result in of_horner(o.horner, shape).items():
                    print_row(name, result, best)
    if not o.no_linear:
        linear_time(o.horner)


if __name__ == "__main__":
    main()
