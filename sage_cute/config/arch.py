"""The GPUs that kernels are compiled for."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Arch:
    """What the resource arithmetic needs to know of a compilation target."""

    name: str  # as the compiler spells it
    family: Literal["sm90"]
    smem_bytes: int  # shared memory that one CTA can have
    registers: int = 65536  # of one multiprocessor
    max_registers: int = 240  # a thread, once setmaxnreg has moved them between warpgroups


ARCHS = {"sm_90a": Arch("sm_90a", "sm90", smem_bytes=232448)}
"""By compiler name."""


def arch_of(capability: tuple[int, int]) -> Arch | None:
    """The target for a device's compute capability; None if there is no kernel for it."""
    return ARCHS["sm_90a"] if capability == (9, 0) else None
