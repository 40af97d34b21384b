"""The search for the fastest tile configuration, apart from what it is measured on.

1. The default configuration's results must be right, or nothing is tuned.
2. A candidate must give the same bits. So a choice changes no result, whatever it is.
3. Candidates are timed in turns (clocks and temperature drift over all alike); medians count.
4. What is in use stays, unless something is more than :data:`MARGIN` faster: running again chooses
   the same, or something that close.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from sage_cute.config.space import Space
from sage_cute.errors import TuningError

C = TypeVar("C")
MARGIN = 0.02
QUICK_ROUNDS, FINAL_ROUNDS = 5, 15


class Bench(Protocol[C]):
    """What configurations are tried on: a GPU with scratch tensors, or a simulated one."""

    def prepare(self, configs: Sequence[C]) -> Mapping[C, str]:
        """Compiles configurations; the reasons of those that cannot be."""
        ...

    def outputs(self, config: C) -> Mapping[str, Tensor]:
        """Every result of a call, by name, into tensors of its own."""
        ...

    def why_wrong(self, outputs: Mapping[str, Tensor]) -> str:
        """What is wrong with results, compared with the reference; empty if nothing is."""
        ...

    def times(self, configs: Sequence[C], rounds: int) -> Mapping[C, Sequence[float]]:
        """Milliseconds a call, one number a round; every round visits all configurations."""
        ...


@dataclasses.dataclass(frozen=True)
class Result(Generic[C]):
    """What a search found."""

    config: C
    ms: float
    default_ms: float
    tried: int
    rejected: Mapping[C, str]  # with the reason

    @property
    def gain(self) -> float:
        """How many times as fast as the default configuration."""
        return self.default_ms / self.ms


def search(
    space: Space[Any, Any],
    problem: Any,
    bench: Bench[C],
    *,
    incumbent: C | None = None,
    exhaustive: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, known: None,
) -> Result[C]:
    """Finds a configuration: step by step along single axes, or among all of them.

    Args:
        space: of the direction.
        problem: its static facts.
        bench: to compile, check and time on.
        incumbent: what an earlier search has chosen; where to start, and what stays if in doubt.
        exhaustive: try every configuration of the space.
        on_progress: called with the number of candidates done and known so far.

    Raises:
        TuningError: the default configuration's results are wrong, or it cannot run.
    """
    default = space.default(problem)
    if incumbent is None or space.why_not(problem, incumbent):
        incumbent = default
    trial = _Trial(bench, default, on_progress)
    trial.admit([incumbent])
    best = incumbent if incumbent not in trial.rejected else default
    start = best
    if exhaustive:
        best = trial.fastest(best, space.configs(problem))
    else:
        while (faster := trial.fastest(best, space.neighbours(problem, best))) != best:
            best = faster
    final = trial.medians(list(dict.fromkeys((default, start, best))), FINAL_ROUNDS)
    fastest = min(final, key=lambda c: final[c])
    choice = fastest if final[fastest] < final[start] * (1 - MARGIN) else start
    return Result(choice, final[choice], final[default], len(trial.admitted), trial.rejected)


class _Trial(Generic[C]):
    """The candidates of one search: which may run, and how long they take."""

    def __init__(
        self, bench: Bench[C], default: C, on_progress: Callable[[int, int], None]
    ) -> None:
        self.bench, self.on_progress = bench, on_progress
        self.admitted: list[C] = [default]
        self.rejected: dict[C, str] = {}
        if reason := bench.prepare([default]).get(default):
            raise TuningError(f"the default configuration does not compile: {reason}")
        self.expected = bench.outputs(default)
        if reason := bench.why_wrong(self.expected):
            raise TuningError(f"the default configuration is wrong, nothing is tuned: {reason}")

    def admit(self, configs: Sequence[C]) -> None:
        """Compiles what is new and compares its results with the default configuration's."""
        known = set(self.admitted) | set(self.rejected)
        new = [config for config in dict.fromkeys(configs) if config not in known]
        total = len(known) + len(new)
        broken = self.bench.prepare(new) if new else {}
        for config in new:
            reason = broken.get(config) or self._why_not(config)
            if reason:
                self.rejected[config] = reason
            else:
                self.admitted.append(config)
            self.on_progress(len(self.admitted) + len(self.rejected), total)

    def _why_not(self, config: C) -> str:
        try:
            outputs = self.bench.outputs(config)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        for name, expected in self.expected.items():
            if not _same_bits(outputs[name], expected):
                return f"{name} is not the default configuration's, bit for bit"
        return ""

    def fastest(self, best: C, candidates: Sequence[C]) -> C:
        """The fastest of the candidates if it beats ``best`` clearly, else ``best``."""
        self.admit(candidates)
        field = [c for c in dict.fromkeys((best, *candidates)) if c not in self.rejected]
        ms = self.medians(field, QUICK_ROUNDS)
        winner = min(ms, key=lambda c: ms[c])
        return winner if ms[winner] < ms[best] * (1 - MARGIN) else best

    def medians(self, configs: Sequence[C], rounds: int) -> dict[C, float]:
        """Milliseconds of each."""
        return {config: median(ms) for config, ms in self.bench.times(configs, rounds).items()}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of storage: of NaN too, and of the sign of zero."""
    return a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)
