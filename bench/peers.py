"""Peers that are reached from Python, for the table of `horner bench attention`: compiled FlexAttention (softmax, clamped scores,
and a Taylor series by the logarithm of its weight) and, where it is installed, flash-linear-attention. Causal; times in ms, medians
of CUDA events; memory: the most beyond the inputs. An object for each row, in a line of its own.

    horner bench attention --device cuda --dtype bfloat16 --peers "python bench/peers.py" --shape 4,16,4096,64
    horner bench attention --device cuda --dtype bfloat16 --peers "python bench/peers.py --only linear" --shape 1,16,65536,64
"""

import argparse
import json

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

LONG = 16384  # above it what takes quadratic time is left out, FlexAttention of softmax excepted


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


def measured(attend, q, k, v, forward_only):
    """Forward and forward+backward in ms, bytes beyond the inputs; or why not."""
    try:
        with torch.no_grad():
            forward = median_ms(lambda: attend(q, k, v))
        leaves = [x.detach().requires_grad_(not forward_only) for x in (q, k, v)]
        direction = torch.randn_like(q)

        def both():
            out = attend(*leaves)
            out = out[0] if isinstance(out, tuple) else out
            return out if forward_only else torch.autograd.grad(out, leaves, direction)

        ms = None if forward_only else median_ms(both)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        return {"forward_ms": forward, "both_ms": ms, "extra_bytes": torch.cuda.max_memory_allocated() - before}
    except Exception as error:  # a peer that does not run here is no failure of ours
        return {"why_not": (str(error).strip() or type(error).__name__).splitlines()[0]}


def taylor(order):
    """Softmax of log e_n(x), for even n, where the series is positive."""

    def score(x, b, h, t, s):
        y = torch.ones_like(x)
        for n in range(order, 0, -1):
            y = 1 + y * x / n
        return torch.log(y)

    return score


SCORES = {"softmax": None, "clamp 5": lambda x, b, h, t, s: torch.clamp(x, max=5.0), "taylor2": taylor(2), "taylor10": taylor(10)}


def flex(q):
    """Name and function on q, k, v [B, H, T, D]."""
    T = q.shape[2]
    mask = create_block_mask(lambda b, h, t, s: t >= s, None, None, T, T)
    for name, score in SCORES.items():
        if T <= LONG or score is None:
            torch.compiler.reset()
            compiled = torch.compile(flex_attention, dynamic=False)
            yield name, "FlexAttention", lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=mask)


def flash_linear_attention(q):
    """The same; its layout is [B, T, H, D]."""
    try:
        from fla.ops.based import fused_chunk_based, parallel_based
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return
    T, D = q.shape[2:]
    known = [("linear", "fla chunk", chunk_linear_attn)]
    if T <= LONG:
        known.append(("taylor2", "fla parallel_based", parallel_based))
    if D == 16:
        known.append(("taylor2", "fla fused_chunk_based", fused_chunk_based))
    yield from known


def flash_linear_attention_gates(q):
    """Its delta rule and gated linear attention, with unit keys, as [B, T, H, D]."""
    try:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gla import chunk_gla
    except ImportError:
        return
    B, H, T, D = q.shape
    beta = torch.rand(B, T, H, device=q.device, dtype=q.dtype)
    gates = torch.nn.functional.logsigmoid(torch.randn(B, T, H, D, device=q.device)).div(16).to(q.dtype)
    beta.requires_grad_(), gates.requires_grad_()
    yield "delta", "fla chunk", lambda q, k, v: chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True)
    yield "gla", "fla chunk", lambda q, k, v: chunk_gla(q, k, v, gates)


KINDS = {"flex": (flex, False), "linear": (flash_linear_attention, True),
         "gates": (flash_linear_attention_gates, True)}  # and whether heads come behind tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="batch, heads, tokens, head dimension: B,H,T,D")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    o = parser.parse_args()
    if not o.device.startswith("cuda"):
        parser.error(f"these peers run on an NVIDIA GPU: --device cuda, not {o.device}")
    shape = [int(n) for n in o.shape.split(",")]
    q, k, v = (torch.randn(shape, device=o.device, dtype=getattr(torch, o.dtype)) for _ in range(3))
    for kind in o.only:
        peers, tokens_first = KINDS[kind]
        given = [x.transpose(1, 2).contiguous() for x in (q, k, v)] if tokens_first else [q, k, v]
        for variant, execution, attend in peers(q):
            row = {"variant": variant, "execution": execution, **measured(attend, *given, o.forward_only)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
