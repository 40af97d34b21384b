"""A plan is everything that a kernel is compiled from; it is the key of every cache."""

from __future__ import annotations

import dataclasses

from sage_cute.config import (
    ARCHS,
    Arch,
    AttnProblem,
    FwdTileConfig,
    default_fwd_config,
    supports_fwd,
)
from sage_cute.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class CompilePlan:
    """Problem, configuration and target of the forward kernel: hashable, nothing else counts."""

    problem: AttnProblem
    config: FwdTileConfig
    arch: Arch


def fwd_plan(
    problem: AttnProblem, config: FwdTileConfig | None = None, arch: Arch = ARCHS["sm_90a"]
) -> CompilePlan:
    """The plan for a problem, with the default configuration unless one is given.

    Raises:
        UnsupportedError: the configuration cannot run; the message says why.
    """
    config = config or default_fwd_config(problem)
    if not (status := supports_fwd(problem, config, arch)):
        raise UnsupportedError(status.reason)
    return CompilePlan(problem, config, arch)
