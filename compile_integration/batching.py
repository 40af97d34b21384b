"""vmap: the mapped dimension is folded into the batch, one call for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_cute.compile_integration.schema import LIB, NAMESPACE, op


def _register(name: str) -> None:
    target = op(name)

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **kwargs: Any) -> Any:
        n = info.batch_size

        def fold(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            mapped = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
            return mapped.flatten(0, 1)

        def unfold(x: Tensor) -> Tensor:
            return x.unflatten(0, (n, x.shape[0] // max(n, 1)))

        # Every tensor has the batch in front. (Arguments that are left out have no entry.)
        result = target(*map(fold, args, in_dims), **kwargs)
        if isinstance(result, Tensor):
            return unfold(result), 0
        return tuple(unfold(x) for x in result), (0,) * len(result)

    torch.library.register_vmap(f"{NAMESPACE}::{name}", rule, lib=LIB)


for _name in ("attn", "attn_with_lse", "attn_infer", "attn_fwd", "attn_backward"):
    _register(_name)
