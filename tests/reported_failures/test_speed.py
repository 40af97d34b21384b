"""Kinds 33 to 35: speed and memory as users see them. The figures are the benchmark's."""

from __future__ import annotations

import time

import pytest
import torch

import sage_cute
from bench.providers import providers
from bench.report import label
from bench.shapes import PRESETS as SHAPES
from sage_cute.policies import PRESETS

SAGE = torch.ops.sage
BUDGET_US = {"no grad": 250.0, "forward": 320.0, "forward + backward": 1000.0}
"""Of a call, launches included: 1.5 times what was measured on the host of an H200 (155, 202, 688).
Whoever is bound by it takes a CUDA graph."""


def test_33_short_sequences_and_small_batches_are_among_what_is_published() -> None:
    sizes = [(s.batch * s.heads, s.seqlen) for s in SHAPES["main"]]
    assert any(n <= 1024 for _, n in sizes) and any(heads <= 16 for heads, _ in sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", BUDGET_US)
def test_33_the_host_time_of_a_call_is_within_its_budget(mode) -> None:
    q, k, v = (
        torch.randn(
            1, 2, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=mode != "no grad"
        )
        for _ in range(3)
    )
    dout = torch.randn_like(q)

    def call() -> None:
        out = SAGE.attn(q, k, v, is_causal=True)
        if mode == "forward + backward":
            torch.autograd.grad(out, (q, k, v), dout)

    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - start) / 20 * 1e6)
    assert min(times) < BUDGET_US[mode]


def test_34_quantization_is_inside_every_figure_that_does_not_say_otherwise() -> None:
    """What gets its inputs quantized outside of the timing is named so, in every table."""
    found = providers(list(PRESETS), "cpu")
    assert any(not p.quant_included for p in found)
    for provider in found:
        assert provider.quant_included == (provider.prepare is None)
        row = {"provider": provider.name, "policy": provider.policy, "mode": "fwd"}
        shown = label(row | {"quant_included": provider.quant_included})
        assert ("kernel alone" in shown) == (not provider.quant_included)


def test_35_out_of_memory_stays_a_catchable_error(device) -> None:
    huge = torch.zeros(1, 1, 1, 64, device=device, dtype=torch.bfloat16)
    huge = huge.expand(1 << 12, 1 << 12, 1 << 14, 64)
    with pytest.raises(RuntimeError, match="(?i)memory|alloc"):
        sage_cute.attention(huge, huge, huge)
    q = torch.randn(1, 2, 9, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    sage_cute.attention(q, q, q).sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", PRESETS)
def test_35_peak_memory_is_what_is_documented(policy) -> None:
    """Forward: outputs, saved tensors, V^T in INT8 and its scales. (README.md, Memory.)"""
    batch, heads, n, d = 1, 8, 4096, 128
    q, k, v = (
        torch.randn(batch, heads, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    out = SAGE.attn(q, k, v, policy=policy)  # kernels and their lazy state
    out.backward(out.detach())
    del out
    q.grad = k.grad = v.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, rows = torch.cuda.memory_allocated(), batch * heads * n
    out = SAGE.attn(q, k, v, policy=policy)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= rows * (4 * d + 12) + (1 << 20)  # out 2 D, codes 2 D, scales and LSE
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= kept + rows * (d + 8) + (4 << 20)  # V^T with scales, sums of the mean
    torch.cuda.reset_peak_memory_stats()
    dout = torch.ones_like(out)
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, (q, k, v), dout)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= rows * (6 * d + 10 * d + 64) + (4 << 20)  # gradients, and operands of products
