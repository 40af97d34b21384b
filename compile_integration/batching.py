"""vmap: the mapped dimension is folded into the batch, one call for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_cute.compile_integration.schema import LIB, NAMESPACE, op

_TENSOR_ARGUMENTS = {"attn": 3, "attn_with_lse": 3, "attn_infer": 3, "attn_fwd": 3}
_TENSOR_ARGUMENTS["attn_backward"] = 13


def _register(name: str, num_tensors: int) -> None:
    target = op(name)

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **kwargs: Any) -> Any:
        n = info.batch_size

        def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None:
                return None
            mapped = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
            return mapped.flatten(0, 1)

        def unfold(x: Tensor) -> Tensor:
            return x.unflatten(0, (n, x.shape[0] // max(n, 1)))

        tensors = (fold(x, d) for x, d in zip(args[:num_tensors], in_dims, strict=False))
        result = target(*tensors, *args[num_tensors:], **kwargs)
        if isinstance(result, Tensor):
            return unfold(result), 0
        return tuple(unfold(x) for x in result), (0,) * len(result)

    torch.library.register_vmap(f"{NAMESPACE}::{name}", rule, lib=LIB)


for _name, _num in _TENSOR_ARGUMENTS.items():
    _register(_name, _num)
