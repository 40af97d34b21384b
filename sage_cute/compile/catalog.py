"""Which kernels a call of attention needs, for those who build or list them beforehand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from sage_cute.compile import bwd_launch, launch, quant_launch, tensors
from sage_cute.compile.compiler import compile_plan
from sage_cute.compile.kernel import Kernel
from sage_cute.compile.visibility import Static
from sage_cute.config import AttnProblem
from sage_cute.config.bwd import BwdProblem
from sage_cute.policies import resolve

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in tensors.DTYPES.items()}


class Call(NamedTuple):
    """What of a call of attention decides about its kernels."""

    policy: str
    head_dim: int
    dtype: str  # a name of DTYPES
    is_causal: bool


def problem_of(direction: str, call: Call) -> AttnProblem | BwdProblem:
    """The static facts of a direction's attention kernel.

    Raises:
        UnsupportedError: no kernel covers it; the message says why.
    """
    make: Any = {"fwd": launch, "bwd": bwd_launch}[direction]
    problem: AttnProblem | BwdProblem = make._plan(*_arguments(call), None).problem
    return problem


def _arguments(call: Call) -> tuple[Any, ...]:
    return resolve(call.policy), call.head_dim, DTYPES[call.dtype], Static(call.is_causal)


def _forward(call: Call, config: Any) -> Iterator[Kernel]:
    policy, head_dim, dtype, _ = _arguments(call)
    spec = quant_launch.quant_spec(policy, dtype, head_dim, launch.V_SCALE_FORM)
    yield Kernel("quantize", spec, quant_launch._compile)
    yield Kernel("fwd", launch._plan(*_arguments(call), config), compile_plan)


def _backward(call: Call, config: Any) -> Iterator[Kernel]:
    plan = bwd_launch._plan(*_arguments(call), config)
    for has_dlse in (False, True):
        whole = dataclasses.replace(plan, has_dlse=has_dlse)
        yield Kernel("bwd_preprocess", whole, bwd_launch._compile_preprocess)
    yield Kernel("bwd_keys", plan.attention(), bwd_launch._compile_keys)
    yield Kernel("bwd_queries", plan.attention(), bwd_launch._compile_queries)


DIRECTIONS: dict[str, Callable[[Call, Any], Iterator[Kernel]]] = {
    "fwd": _forward,
    "bwd": _backward,
}
"""Kernels of a call and a tile configuration (None: the default one), by direction."""


def kernels(calls: Sequence[Call], directions: Sequence[str]) -> list[Kernel]:
    """Every kernel of these calls with the default configuration, each once.

    Raises:
        UnsupportedError: no kernel covers a call; the message says why.
    """
    found = (k for call in calls for d in directions for k in DIRECTIONS[d](call, None))
    return list(dict.fromkeys(found))
