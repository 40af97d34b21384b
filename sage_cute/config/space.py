"""The tile configurations that a tuner may choose from, as data.

A configuration is a value for each axis, plus what follows from it. What does not fit is dropped by
the arithmetic that the templates themselves ask (``supports_fwd``, ``supports_bwd``). Fields that
rounding depends on are no axes: they keep the default configuration's value, so that no choice
changes what is computed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from sage_cute.config.arch import ARCHS, Arch
from sage_cute.config.bwd import BwdProblem, BwdTileConfig, default_bwd_config, supports_bwd
from sage_cute.config.constraints import Status, supports_fwd
from sage_cute.config.defaults import default_fwd_config
from sage_cute.config.problem import AttnProblem
from sage_cute.config.tile_config import FwdTileConfig

P = TypeVar("P")
C = TypeVar("C", bound=FwdTileConfig | BwdTileConfig)


@dataclasses.dataclass(frozen=True)
class Space(Generic[P, C]):
    """The configurations of a template, before a problem is known."""

    axes: Mapping[str, tuple[Any, ...]]  # the values of each field that may vary
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]]  # fields that follow from others
    fixed: tuple[str, ...]  # fields that the policy or the mathematics fix
    default: Callable[[P], C]
    supports: Callable[[P, C, Arch], Status]
    rounding: Callable[[P, C], object] = lambda problem, config: None
    """What rounding depends on beside the fixed fields."""

    def configs(self, problem: P, arch: Arch = ARCHS["sm_90a"]) -> list[C]:
        """Every configuration that can run, the default one first."""
        default = self.default(problem)
        found = dict.fromkeys((default,))
        for choice in itertools.product(*self._values(default).values()):
            config = self._with(default, dict(zip(self.axes, choice, strict=True)))
            if not self._why_not(problem, config, default, arch):
                found[config] = None
        return list(found)

    def neighbours(self, problem: P, config: C, arch: Arch = ARCHS["sm_90a"]) -> list[C]:
        """The configurations that can run and differ from one along a single axis."""
        default = self.default(problem)
        around = (
            self._with(config, {axis: value})
            for axis, values in self._values(default).items()
            for value in values
        )
        found = dict.fromkeys(c for c in around if not self._why_not(problem, c, default, arch))
        found.pop(config, None)
        return list(found)

    def why_not(self, problem: P, config: C, arch: Arch = ARCHS["sm_90a"]) -> str:
        """The reason why a configuration (of a table, say) may not be used; empty if it may."""
        return self._why_not(problem, config, self.default(problem), arch)

    def _why_not(self, problem: P, config: C, default: C, arch: Arch) -> str:
        for name in self.fixed:
            if getattr(config, name) != getattr(default, name):
                return f"{name}={getattr(config, name)}: the results would be other ones"
        if self.rounding(problem, config) != self.rounding(problem, default):
            return f"{config}: the results would be other ones"
        return self.supports(problem, config, arch).reason

    def _values(self, default: C) -> dict[str, tuple[Any, ...]]:
        """The values of each axis, the default configuration's own included."""
        found: dict[str, tuple[Any, ...]] = {}
        for axis in self.axes:
            values: tuple[Any, ...] = tuple(self.axes[axis])
            own = getattr(default, axis)
            found[axis] = values if own in values else (*values, own)
        return found

    def _with(self, config: C, changes: Mapping[str, Any]) -> C:
        values = {**dataclasses.asdict(config), **changes}
        follows = {name: rule(values) for name, rule in self.derived.items()}
        return dataclasses.replace(config, **{**changes, **follows})


FORWARD: Space[AttnProblem, FwdTileConfig] = Space(
    axes={
        "num_consumer_wgs": (1, 2, 3),
        "num_stages": (2, 3, 4, 5),
        "overlap": (False, True),
        "pv_slices": (1, 2, 4),
        "pingpong": (False, True),
        "persistent": (False, True),
        "longest_first": (False, True),
    },
    derived={"tile_m": lambda c: 64 * c["num_consumer_wgs"]},
    # exp2 by polynomial and the moment at which the softmax reference moves change last bits.
    fixed=("tile_n", "exp_fma_of_8", "lazy_rescale"),
    default=default_fwd_config,
    supports=supports_fwd,
)

BACKWARD: Space[BwdProblem, BwdTileConfig] = Space(
    axes={
        "tile_m": (32, 48, 64, 80, 96, 128),
        "num_consumer_wgs": (1, 2, 3),
        "num_stages": (1, 2, 3, 4),
        "ahead": (1, 2, 3, 4, 8),
        "column_splits": (1, 2),
        "dq_num_stages": (1, 2, 3),
        "dq_num_consumer_wgs": (1, 2, 3),
    },
    derived={"tile_n": lambda c: 64 * c["num_consumer_wgs"] // c["query_wgs"]},
    # Keys are added up tile after tile, from the last one.
    fixed=("packed_ds", "query_wgs", "dq_tile_n"),
    default=default_bwd_config,
    supports=supports_bwd,
    # A tile with one scale of K has it in the queries' factors.
    rounding=lambda problem, config: problem.block_k % config.tile_n == 0,
)

SPACES: dict[str, Space[Any, Any]] = {"fwd": FORWARD, "bwd": BACKWARD}
"""By direction. The quantization kernels have nothing to tune."""
