"""Checks of attention's results on a device: accuracy against float64, and laws that must hold.

Bounds are those of :mod:`sage_cute.numerics.tolerances`. Where results are of 16 bits, their own
rounding is added to them in quadrature: half a unit in the last place of each element at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sage_cute.numerics import rel_l2
from sage_cute.numerics.tolerances import ACCURACY, ACCURACY_MARGIN, BOUNDS
from sage_cute.testing import (
    TENSORS,
    Inputs,
    make_inputs,
    relative_errors,
    run_attention,
    run_reference,
)

_LENGTH, _HEAD_DIM = 512, 128  # of the tables


class Check(NamedTuple):
    """A figure and the largest that it may be."""

    name: str
    policy: str
    value: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether it is within its limit; NaN is not."""
        return self.value <= self.limit


def accuracy(
    policies: Sequence[str],
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    kinds: Sequence[str] | None = None,
) -> Iterator[Check]:
    """Relative L2 errors of O, dV, dQ and dK against float64, one check each.

    Args:
        policies: names of presets.
        device: where attention runs.
        dtype: of the inputs.
        kinds: input classes of :data:`sage_cute.testing.INPUT_CLASSES`; None: all of the table.
    """
    for kind, causal in ACCURACY:
        if kinds is not None and kind not in kinds:
            continue
        heads = 8 if kind == "g5" else 2
        shape = (1, heads, _LENGTH, _HEAD_DIM)
        x = make_inputs(kind, shape, dtype=dtype, seed=1, device=device)
        truth = run_reference(x, causal=causal)
        for policy in policies:
            errors = relative_errors(run_attention(x, policy=policy, causal=causal), truth)
            for name, measured in zip(TENSORS, ACCURACY[kind, causal][policy], strict=True):
                limit = math.hypot(ACCURACY_MARGIN * measured, _rounding(dtype))
                mask = "causal" if causal else "full"
                yield Check(f"error of {name}, {kind} {mask}", policy, errors[name], limit)


def invariants(
    policies: Sequence[str],
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Check]:
    """Laws of attention that hold for every input, each by a bound.

    Args:
        policies: names of presets.
        device: where attention runs.
        dtype: of the inputs.
    """
    # A length that is no multiple of any tile, and several query heads a key head.
    x = make_inputs("g1", (2, 4, 333, 64), kv_heads=2, dtype=dtype, seed=2, device=device)
    for policy in policies:
        a = run_attention(x, policy=policy)
        b = run_attention(x, policy=policy)
        differing = sum(int((one != other).sum()) for one, other in zip(a, b, strict=True))
        yield Check("elements that differ when run again", policy, differing, 0)

        none = run_attention(x._replace(dout=torch.zeros_like(x.dout)), policy=policy)
        nonzero = sum(int(grad.count_nonzero()) for grad in none[2:])
        yield Check("gradients of dO = 0 that are not 0", policy, nonzero, 0)

        triple = run_attention(x._replace(dout=3 * x.dout), policy=policy)
        rounding = math.sqrt(3) * _rounding(dtype)  # of 3 dO, and of both results
        limit = math.hypot(BOUNDS["scaled_dout", policy].limit, rounding)
        for name in ("dq", "dk", "dv"):
            value = rel_l2(getattr(triple, name), 3 * getattr(a, name).double())
            yield Check(f"{name} of 3 dO against 3 {name}", policy, float(value), limit)

        yield _bounded("sum_dv", "sum of dV against sum of dO", policy, _sum_of_dv(a.dv, x))
        v_law = abs(_inner(x.dout, a.out) - _inner(a.dv, x.v)) / (_norm(x.dout) * _norm(a.out))
        yield _bounded("euler_v", "<dO, O> against <dV, V>", policy, v_law)
        k = x.k.double() - x.k.double().mean(2, keepdim=True)
        qk_law = abs(_inner(a.dq, x.q) - _inner(a.dk, k)) / (_norm(a.dq) * _norm(x.q))
        yield _bounded("euler_qk", "<dQ, Q> against <dK, K>", policy, qk_law)


def _bounded(invariant: str, name: str, policy: str, value: float) -> Check:
    return Check(name, policy, value, BOUNDS[invariant, policy].limit)


def _sum_of_dv(dv: Tensor, x: Inputs) -> float:
    """Rows of P sum to 1, so dV = P^T dO summed over keys is dO summed over queries."""
    batch, heads, _, head_dim = x.dout.shape
    groups = x.dout.double().view(batch, dv.shape[1], heads // dv.shape[1], -1, head_dim)
    difference = dv.double().sum(2) - groups.sum((2, 3))
    return float(difference.norm() / x.dout.double().norm())


def _inner(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _norm(x: Tensor) -> float:
    return float(x.double().norm())


def _rounding(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to a dtype."""
    return torch.finfo(dtype).eps / 2
