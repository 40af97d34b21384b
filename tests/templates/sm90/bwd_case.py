"""Inputs of the backward kernel, as the CPU forward leaves them; run alone, launches a few."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple
from unittest import mock

import torch

from sage_cute.compile import bwd_launch
from sage_cute.numerics.backward import sage_backward
from sage_cute.numerics.forward import sage_forward
from sage_cute.policies import resolve

FIRST = "fast"
PER_TOKEN = "fast:k_scale=per_token"
SIXTEEN = "fast:dp=16bit"  # exact V
DEQUANTIZED = "accurate"  # dP in 16 bit of the V that the forward saw
PAPER = "sagebwd:dv=16bit,dk=16bit,dq=16bit"  # blocks of 128 queries and 64 keys


class Case(NamedTuple):
    """One call: (batch, heads, kv_heads, seqlen_q, seqlen_k) and what else it depends on."""

    shape: tuple[int, int, int, int, int]
    head_dim: int = 128
    policy: str = FIRST
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    sigma: float = 1.0
    scale: float | None = None
    dlse: bool = False
    seed: int = 0

    @property
    def softmax_scale(self):
        return self.head_dim**-0.5 if self.scale is None else self.scale


class Inputs(NamedTuple):
    """What the backward takes, on the CPU."""

    dout: torch.Tensor
    dlse: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    saved: tuple


def make_inputs(case):
    """Keys with a mean, values and gradients whose tokens differ in size, a zero value."""
    rng = torch.Generator().manual_seed(case.seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    batch, heads, kv_heads, seqlen_q, seqlen_k = case.shape
    d = case.head_dim
    q = normal(batch, heads, seqlen_q, d) * case.sigma
    k = normal(batch, kv_heads, seqlen_k, d) * case.sigma + 2 * normal(1, kv_heads, 1, d)
    v = normal(batch, kv_heads, seqlen_k, d) * normal(batch, kv_heads, seqlen_k, 1).exp()
    dout = normal(batch, heads, seqlen_q, d) * normal(batch, heads, seqlen_q, 1).exp()
    if seqlen_k > 40:
        v[:, :, 37] = 0.0
    q, k, v, dout = (x.to(case.dtype) for x in (q, k, v, dout))
    dlse = normal(batch, heads, seqlen_q) if case.dlse else None
    policy = resolve(case.policy)
    out, lse, saved = sage_forward(
        q, k, v, scale=case.softmax_scale, causal=case.causal, policy=policy
    )
    return Inputs(dout, dlse, q, k, v, out, lse, saved)


def expected(case, inputs):
    """Gradients of the CPU implementation."""
    return sage_backward(
        *inputs, scale=case.softmax_scale, causal=case.causal, policy=resolve(case.policy)
    )


def _poisoned(*args, **kwargs):
    x = _EMPTY(*args, **kwargs)
    return x.fill_(math.nan) if x.is_floating_point() else x.fill_(77)


_EMPTY = torch.empty


def launch(case, inputs, *, config=None):
    """The kernels' dq, dk, dv; outputs and workspace are poisoned before."""
    cuda = lambda x: None if x is None else x.cuda()
    saved = inputs.saved
    dq, dk, dv = (
        torch.full_like(x, math.nan, device="cuda") for x in (inputs.q, inputs.k, inputs.v)
    )
    with mock.patch.object(bwd_launch.torch, "empty", _poisoned):
        bwd_launch.backward(
            cuda(inputs.dout),
            cuda(inputs.dlse),
            cuda(inputs.v),
            cuda(inputs.out),
            cuda(inputs.lse),
            cuda(saved.q_codes),
            cuda(saved.k_codes),
            cuda(saved.q_scale),
            cuda(saved.k_scale),
            dq,
            dk,
            dv,
            scale=case.softmax_scale,
            is_causal=case.causal,
            policy=resolve(case.policy),
            config=config,
        )
    return dq, dk, dv


def errors(case, **options):
    """Relative L2 error of dq, dk and dv against the CPU implementation; NaN if any is NaN."""
    inputs = make_inputs(case)
    found = []
    for got, want in zip(launch(case, inputs, **options), expected(case, inputs), strict=True):
        got, want = got.float().cpu(), want.float()
        norm = want.norm().item()
        found.append((got - want).norm().item() / norm if norm else got.norm().item())
    return found


def main() -> None:
    """A few small ragged launches, for compute-sanitizer, whose tool is the argument."""
    from sage_cute.templates.blocks import loading

    if sys.argv[1:] == ["racecheck"]:
        loading.ARRIVALS = 32
    for policy in (FIRST, SIXTEEN, "int8", "sagebwd"):
        for causal in (False, True):
            case = Case((1, 2, 1, 150, 300), 64, policy, causal)
            launch(case, make_inputs(case))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
