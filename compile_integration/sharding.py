"""DTensor: the ops run on each rank's own batches and heads; a sharded sequence is gathered.

Imported only once a DTensor is seen, since ``torch.distributed.tensor`` takes about a second.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard
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


def _register(name: str, outputs: int, kv: int) -> None:
    """Registers the rule of an op whose key heads are those of its argument ``kv``."""
    overload = op(name)
    register_sharding(overload)(lambda *x: _rule(outputs, x, x[kv]))
    # DTensor keeps what it has found by the arguments from the first integer on: it would take the
    # shapes of one policy's outputs for those of another.
    arguments = overload._schema.arguments
    first = next(i for i, x in enumerate(arguments) if "Tensor" not in str(x.type))
    found = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    found[overload] = dataclasses.replace(found[overload], static_argnum=first)


@functools.cache
def register_sharding_rules() -> None:
    """Registers the rules with torch.distributed.tensor, once."""
    _register("attn_fwd", 8, 1)
    _register("attn_infer", 3, 1)
    _register("attn_backward", 3, 4)
