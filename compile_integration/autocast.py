"""Autocast: q, k and v become the current autocast dtype, as for torch's own attention.

``torch.library.register_autocast`` fixes one dtype at registration and takes no keyword arguments;
a kernel at the Autocast key reads the dtype of each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_cute.compile_integration.schema import LIB, op


def _register(name: str, device: str) -> None:
    target = op(name)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, "Autocast" + device))

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x

    def kernel(_: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device.lower())
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return target(cast(q, dtype), cast(k, dtype), cast(v, dtype), *rest, **kwargs)

    LIB.impl(name, kernel, "Autocast" + device, with_keyset=True)


for _name in ("attn", "attn_with_lse", "attn_varlen", "attn_varlen_with_lse"):
    for _device in ("CPU", "CUDA"):
        _register(_name, _device)
