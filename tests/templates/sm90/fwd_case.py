"""Inputs of the forward kernel, quantized by the CPU implementation; run alone, launches a few."""

from __future__ import annotations

import math
import sys

import torch

from sage_cute.compile.launch import forward
from sage_cute.numerics.forward import quantize_q, quantize_v, smooth_keys
from sage_cute.numerics.quantize import quantize, token_mean
from sage_cute.numerics.visibility import Visibility, only
from sage_cute.policies import resolve

ORDER = torch.tensor([8 * b + 2 * q + c for q in range(4) for b in range(2) for c in range(2)])


def make_inputs(
    batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, sigma=1.0, seed=0, spread=0.2
):
    """bfloat16-exact float32 q, k, v: keys with a mean, a sink with a small value, a zero value.

    spread: of the values' norms; with 0.2 most blocks are flat, with 1 none.
    """
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    q = normal(batch, heads, seqlen_q, head_dim) * sigma
    k = normal(batch, kv_heads, seqlen_k, head_dim) * sigma + 2 * normal(1, kv_heads, 1, head_dim)
    v = (
        normal(batch, kv_heads, seqlen_k, head_dim)
        * (spread * normal(batch, kv_heads, seqlen_k, 1)).exp()
    )
    v[:, :, 0] *= 0.05
    if seqlen_k > 40:
        v[:, :, 37] = 0.0
    return [x.bfloat16().float() for x in (q, k, v)]


def quantized(q, k, v, policy, causal=False):
    """What the prologue makes of q, k, v: the tensors that ``forward`` takes, on the CPU."""
    if policy.q_scale == "per_block":
        q = only(q, Visibility.of(q.shape[2], k.shape[2], causal).seeing())
    smooth_k = smooth_keys(k, token_mean(k), policy)
    q8, _ = quantize_q(q, policy)
    k8 = quantize(smooth_k, 1 if policy.k_scale == "per_token" else policy.block_k)
    v8, _ = quantize_v(v, policy)
    pad = -k.shape[2] % 128
    padded = torch.nn.functional.pad(v8.codes, (0, 0, 0, pad))
    index = torch.arange(padded.shape[2])
    permuted = padded[:, :, index // 16 * 16 + ORDER[index % 16]]
    v_scale = v8.scale
    if policy.v_scale == "per_token":
        v_scale = torch.nn.functional.pad(v_scale, (0, pad))
    return {
        "q_codes": q8.codes.contiguous(),
        "q_scale": q8.scale.contiguous(),
        "k_codes": k8.codes.contiguous(),
        "k_scale": k8.scale.contiguous(),
        "v_t": (permuted.transpose(2, 3).contiguous().int() + 128).to(torch.uint8),
        "v_scale": v_scale.contiguous(),
    }


def launch(tensors, *, dtype, scale, causal, policy, config=None):
    """The kernel's out and lse, poisoned before."""
    batch, heads, seqlen_q, head_dim = tensors["q_codes"].shape
    out = torch.full((batch, heads, seqlen_q, head_dim), math.nan, dtype=dtype, device="cuda")
    lse = torch.full((batch, heads, seqlen_q), math.nan, device="cuda")
    forward(
        **tensors, out=out, lse=lse, scale=scale, is_causal=causal, policy=policy, config=config
    )
    return out, lse


def main() -> None:
    """A few small ragged launches, for compute-sanitizer, whose tool is the argument."""
    from sage_cute.templates.blocks import loading

    if sys.argv[1:] == ["racecheck"]:
        loading.ARRIVALS = 32
    for name in ("fast", "sagebwd"):
        policy = resolve(name)
        for causal in (False, True):
            q, k, v = make_inputs(1, 2, 1, 150, 300, 64)
            tensors = {n: x.cuda() for n, x in quantized(q, k, v, policy, causal).items()}
            launch(tensors, dtype=torch.bfloat16, scale=0.125, causal=causal, policy=policy)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
