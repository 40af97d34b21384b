"""Attention on each device against the truth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sage_cute.numerics import rel_l2
from sage_cute.numerics.tolerances import check
from sage_cute.testing import TENSORS, Inputs, Result, run_attention, run_reference


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, and the GPU where there is one."""
    return str(request.param)


@pytest.fixture
def poison(device: str) -> Callable[[], None]:
    """Leaves NaN (float) and 0x80 (int8) where the GPU's allocator will give memory from."""

    def fill() -> None:
        for size in (1 << 14, 1 << 20) if device == "cuda" else ():
            blocks = [torch.full((size,), torch.nan, device=device) for _ in range(4)]
            blocks += [torch.full((size,), -128, dtype=torch.int8, device=device)]
            del blocks

    return fill


@pytest.fixture
def attend(device: str, poison: Callable[[], None]) -> Callable[..., Result]:
    """Forward and backward on the device; the results, on the CPU."""

    def run(x: Inputs, **kwargs: object) -> Result:
        poison()
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        return Result(*(t.cpu() for t in run_attention(x.to(device), **moved)))  # type: ignore[arg-type]

    return run


@pytest.fixture
def agree(attend: Callable[..., Result]) -> Callable[..., Result]:
    """As ``attend``, and compares with float64 attention: shapes, dtypes, zeros, errors."""

    def run(x: Inputs, *, policy: str, **kwargs: object) -> Result:
        got = attend(x, policy=policy, **kwargs)
        truth = run_reference(x, **kwargs)  # type: ignore[arg-type]
        for name in TENSORS:
            a, b = getattr(got, name), getattr(truth, name)
            assert a.shape == b.shape and a.dtype == x.q.dtype, name
            assert a.isfinite().all(), name
            assert not a[b == 0].any() or b.any(), name
            if b.any():
                check(f"reported_{name}", "any", rel_l2(a, b))
        assert got.lse.dtype == torch.float32
        assert torch.equal(got.lse.isinf(), truth.lse.isinf())
        seen = truth.lse.isfinite()
        if seen.any():
            check("shape_lse", "any", (got.lse[seen] - truth.lse[seen]).abs().max())
        return got

    return run
