"""What a tuned configuration belongs to: a GPU, and a call with its sizes rounded to buckets."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from sage_cute.compile.catalog import Call
from sage_cute.config.arch import arch_of
from sage_cute.errors import ShapeError
from sage_cute.policies import canonical


class Gpu(NamedTuple):
    """A model of GPU."""

    name: str
    sm_count: int
    family: str  # whose tables it may use: "sm90"


@functools.cache
def gpu_of(device: int) -> Gpu:
    """The GPU with an index of torch's."""
    found = torch.cuda.get_device_properties(device)
    arch = arch_of((found.major, found.minor))
    return Gpu(
        found.name, found.multi_processor_count, arch.family if arch else f"sm{found.major}x"
    )


class Shape(NamedTuple):
    """The sizes of a call: (batch, heads, seqlen_q, ...) and (batch, kv_heads, seqlen_k, ...)."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int


@dataclasses.dataclass(frozen=True)
class TuneKey:
    """A call as tables know it. Sizes are powers of two: the next one that is no smaller."""

    direction: str
    policy: str  # canonical
    head_dim: int
    dtype: str
    is_causal: bool
    gqa_ratio: int  # query heads a key head
    batch_heads: int  # bucket of batch * heads
    seqlen_q: int  # bucket
    seqlen_k: int  # bucket

    @classmethod
    def of(cls, direction: str, call: Call, shape: Shape) -> TuneKey:
        """The key of a call with these sizes.

        Raises:
            ShapeError: query heads are no multiple of key heads.
        """
        if shape.kv_heads < 1 or shape.heads % shape.kv_heads:
            raise ShapeError(f"{shape.heads} query heads for {shape.kv_heads} key heads")
        return cls(
            direction=direction,
            policy=canonical(call.policy),
            head_dim=call.head_dim,
            dtype=call.dtype,
            is_causal=call.is_causal,
            gqa_ratio=shape.heads // shape.kv_heads,
            batch_heads=bucket(shape.batch * shape.heads, 1),
            seqlen_q=bucket(shape.seqlen_q),
            seqlen_k=bucket(shape.seqlen_k),
        )

    @property
    def call(self) -> Call:
        """The call without its sizes."""
        return Call(self.policy, self.head_dim, self.dtype, self.is_causal)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What is bucketed, and may differ a little from a table's."""
        return self.batch_heads, self.seqlen_q, self.seqlen_k

    def distance(self, other: TuneKey) -> float:
        """Factors of two between the sizes of two keys; infinite if they differ in more."""
        if self.static() != other.static():
            return float("inf")
        pairs = zip(self.sizes, other.sizes, strict=True)
        return sum(abs(a.bit_length() - b.bit_length()) for a, b in pairs)

    def static(self) -> TuneKey:
        """This key without sizes: what must be the same for a configuration to be of use."""
        return dataclasses.replace(self, batch_heads=0, seqlen_q=0, seqlen_k=0)

    def asdict(self) -> dict[str, Any]:
        """Field names and values, JSON-able."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        causal = " causal" if self.is_causal else ""
        return (
            f"{self.direction} {self.policy} d{self.head_dim} {self.dtype}{causal} "
            f"gqa {self.gqa_ratio}, batch * heads {self.batch_heads}, "
            f"{self.seqlen_q} x {self.seqlen_k}"
        )


def bucket(n: int, smallest: int = 128) -> int:
    """The next power of two that is no smaller: one configuration serves what lies between two."""
    return max(smallest, 1 << max(0, n - 1).bit_length())
