"""Masks and packed batches of the ops' CUDA implementations, emulated, against the CPU's."""

from __future__ import annotations

import pytest
import torch

import sage_cute
from sage_cute.numerics import rel_l2

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import emulator  # noqa: E402

BOUNDS = (5e-3, 1e-5, 7e-3, 7e-3, 7e-3)  # out, lse, dq, dk, dv: as test_ops has them


def differentiated(attend, tensors, dout):
    """(out, lse, dq, dk, dv)."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    return out.detach(), lse.detach(), *grads


def check(attend, tensors, dout):
    """The same on both, bit for bit the same without gradients, and finite."""
    expected = differentiated(attend, tensors, dout)
    with emulator.emulated_gpu(), emulator.seeded(1):
        got = differentiated(attend, tensors, dout)
        assert torch.equal(attend(*tensors)[0], got[0])
    names = "out", "lse", "dq", "dk", "dv"
    for name, a, b, bound in zip(names, got, expected, BOUNDS, strict=True):
        seen = b.isfinite()
        assert torch.equal(a.isfinite(), seen), name
        assert rel_l2(a[seen], b[seen]) < bound, (name, rel_l2(a[seen], b[seen]))
        nothing = b.abs().amax(-1) == 0  # tokens that see none or that none sees
        assert (a[nothing] == 0).all(), name


def test_window_key_lengths_and_a_given_mean() -> None:
    q, dout = (torch.randn(2, 4, 150, 40).bfloat16() for _ in range(2))
    k, v = (torch.randn(2, 2, 200, 40).bfloat16() for _ in range(2))
    mean, lengths = k.float().mean(2), torch.tensor([90, 200])
    check(
        lambda q, k, v: sage_cute.attention(
            q, k, v, window=(60, 20), key_lengths=lengths, k_mean=mean, return_lse=True
        ),
        (q, k, v),
        dout,
    )


def test_packed_causal_sequences() -> None:
    lengths_q, lengths_k = [70, 0, 40, 30], [100, 20, 30, 0]
    bounds = lambda first, lengths: torch.tensor([first, *lengths]).cumsum(0).int()
    q, dout = (torch.randn(150, 4, 64).bfloat16() for _ in range(2))
    k, v = (torch.randn(160, 2, 64).bfloat16() for _ in range(2))
    cu_q, cu_k = bounds(5, lengths_q), bounds(2, lengths_k)
    check(
        lambda q, k, v: sage_cute.attention_varlen(
            q, k, v, cu_q, cu_k, 70, 100, causal=True, return_lse=True
        ),
        (q, k, v),
        dout,
    )
