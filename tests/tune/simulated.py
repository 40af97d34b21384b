"""A GPU that is a formula: times with noise, results that depend on what they should not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class SimulatedBench:
    """Configurations take ``cost(config)`` ms, with a relative noise; counts what it is asked."""

    def __init__(
        self,
        cost: Callable[[Any], float],
        *,
        noise: float = 0.0,
        seed: int = 0,
        wrong: Callable[[Any], bool] = lambda config: False,
        raises: Callable[[Any], bool] = lambda config: False,
        broken: Callable[[Any], bool] = lambda config: False,
        reference: str = "",
    ) -> None:
        self.cost, self.noise, self.random = cost, noise, random.Random(seed)
        self.wrong, self.raises, self.broken, self.reference = wrong, raises, broken, reference
        self.log: list[tuple[str, tuple[Any, ...]]] = []

    def prepare(self, configs: Sequence[Any]) -> dict[Any, str]:
        self.log.append(("prepare", tuple(configs)))
        return {c: "does not compile" for c in configs if self.broken(c)}

    def outputs(self, config: Any) -> Mapping[str, Tensor]:
        self.log.append(("outputs", (config,)))
        if self.raises(config):
            raise RuntimeError("launch failed")
        out = torch.linspace(-1, 1, 64).bfloat16()
        if self.wrong(config):
            out.view(torch.int16)[17] ^= 1  # a last bit
        return {"out": out, "lse": torch.tensor([float("nan"), 0.0])}

    def why_wrong(self, outputs: Mapping[str, Tensor]) -> str:
        return self.reference

    def times(self, configs: Sequence[Any], rounds: int) -> dict[Any, list[float]]:
        self.log.append(("times", tuple(configs)))
        once = lambda c: self.cost(c) * (1 + self.noise * self.random.gauss(0, 1))
        return {c: [once(c) for _ in range(rounds)] for c in configs}

    def of(self, what: str) -> list[Any]:
        return [config for name, configs in self.log if name == what for config in configs]
