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


def _rule(outputs: int, tensors: tuple[Any, ...], statics: int, kv: Any) -> list[Any]:
    return [
        ([p] * outputs, [None if t is None else p for t in tensors] + [None] * statics)
        for p in _placements(kv.shape[1], tuple(kv.mesh.shape))
    ]


@functools.cache
def register_sharding_rules() -> None:
    """Registers the rules with torch.distributed.tensor, once."""
    register_sharding(op("attn_fwd"))(lambda q, k, v, *rest: _rule(8, (q, k, v), len(rest), k))
    register_sharding(op("attn_infer"))(lambda q, k, v, *rest: _rule(3, (q, k, v), len(rest), k))
    register_sharding(op("attn_backward"))(lambda *args: _rule(3, args[:13], 3, args[4]))
