"""DTensor: the ops run on each rank's own batches and heads; a sharded sequence is gathered.

Imported only once a DTensor is seen, since ``torch.distributed.tensor`` takes about a second.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from sage_cute.compile_integration.schema import op


def _placements(kv_heads: int, mesh_sizes: tuple[int, ...]) -> list[Any]:
    """Replicated, by batch, or by head if every rank gets whole groups of query heads."""
    whole = all(kv_heads % size == 0 for size in mesh_sizes)
    return [Replicate(), Shard(0), *([Shard(1)] if whole else [])]


def _rule(outputs: int, arguments: tuple[Any, ...], kv: Any) -> list[Any]:
    """By batch everything is split, by head everything but what has no heads: key lengths."""

    def placement(x: Any, p: Any) -> Any:
        if not hasattr(x, "placements"):  # no tensor
            return None
        return Replicate() if len(x.shape) == 1 and p == Shard(1) else p

    return [
        ([p] * outputs, [placement(x, p) for x in arguments])
        for p in _placements(kv.shape[1], tuple(kv.mesh.shape))
    ]


@functools.cache
def register_sharding_rules() -> None:
    """Registers the rules with torch.distributed.tensor, once."""
    register_sharding(op("attn_fwd"))(lambda *x: _rule(8, x, x[1]))
    register_sharding(op("attn_infer"))(lambda *x: _rule(3, x, x[1]))
    register_sharding(op("attn_backward"))(lambda *x: _rule(3, x, x[4]))
