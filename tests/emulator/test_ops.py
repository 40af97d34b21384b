"""The ops' CUDA implementations, kernels emulated, against the CPU's: forward and gradients."""

from __future__ import annotations

import pytest
import torch

import sage_cute
from sage_cute.numerics import rel_l2

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import emulator  # noqa: E402

FORWARD, GRADIENTS = 5e-3, 7e-3  # as tests/compile_integration/test_cuda.py has them for a GPU
CALLS = {  # policy, head_dim, dtype, causal
    "fast": ("fast", 128, torch.bfloat16, True),
    "accurate": ("accurate", 64, torch.float16, False),
    "sagebwd": ("sagebwd", 64, torch.bfloat16, True),
    "int8": ("int8", 64, torch.bfloat16, False),
}


def attend(tensors, dout, dlse, **kwargs):
    """(out, lse, dq, dk, dv)."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = sage_cute.attention(*leaves, return_lse=True, **kwargs)
    seen = lse.isfinite()
    grads = torch.autograd.grad(
        (out, torch.where(seen, lse, 0.0)), leaves, (dout, torch.where(seen, dlse, 0.0))
    )
    return out.detach(), lse.detach(), *grads


@pytest.mark.parametrize("name", CALLS)
def test_training_calls(name) -> None:
    policy, head_dim, dtype, causal = CALLS[name]
    kwargs = {"policy": policy, "causal": causal}
    for seqlen_q, seqlen_k in ((150, 300), (200, 130)):
        shapes = ((2, 4, seqlen_q), (2, 2, seqlen_k), (2, 2, seqlen_k))
        tensors = [torch.randn(*shape, head_dim).to(dtype) for shape in shapes]
        tensors[1] = tensors[1].transpose(1, 2).contiguous().transpose(1, 2)
        dout, dlse = torch.randn_like(tensors[0]), torch.randn(2, 4, seqlen_q)
        expected = attend(tensors, dout, dlse, **kwargs)
        runs = []
        for seed in (0, 1, 2):
            with emulator.emulated_gpu(), emulator.seeded(seed):
                runs.append(attend(tensors, dout, dlse, **kwargs))
                inferred = sage_cute.attention(*tensors, **kwargs)
            assert torch.equal(inferred, runs[0][0])
        for run in runs[1:]:  # deterministic, whatever the order of events
            assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
        bounds = (FORWARD, 1e-5, GRADIENTS, GRADIENTS, GRADIENTS)
        for label, a, b, bound in zip(
            ("out", "lse", "dq", "dk", "dv"), runs[0], expected, bounds, strict=True
        ):
            assert a.dtype == b.dtype and a.stride() == b.stride(), label
            seen = b.isfinite()
            assert torch.equal(a.isfinite(), seen), label
            assert rel_l2(a[seen], b[seen]) < bound, (label, rel_l2(a[seen], b[seen]))
