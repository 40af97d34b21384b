"""What all launches ask of their tensors and of the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from sage_cute.config.arch import arch_of
from sage_cute.errors import UnsupportedError
from sage_cute.limits import unknown_gpu

LOG2_E: Final = math.log2(math.e)
DTYPES: Final[dict[torch.dtype, Literal["bfloat16", "float16"]]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@functools.cache
def num_sms(device: int) -> int:
    """Multiprocessors of a GPU that there are kernels for.

    Raises:
        UnsupportedError: there are none for it.
    """
    properties = torch.cuda.get_device_properties(device)
    if arch_of((properties.major, properties.minor)) is None:
        raise UnsupportedError(unknown_gpu(properties.name, (properties.major, properties.minor)))
    return properties.multi_processor_count


def empty_codes(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A new int8 tensor (..., tokens, head_dim) on the device of x whose rows start on 16 bytes.

    Contiguous if head_dim is a multiple of 16; else a row is 8 bytes further from the next.
    """
    if shape[-1] % 16 == 0:
        return x.new_empty(tuple(shape), dtype=torch.int8)
    strides = [1]
    for n in reversed((*shape[1:-1], -(-shape[-1] // 16) * 16)):
        strides.insert(0, strides[0] * n)
    return x.new_empty_strided(tuple(shape), tuple(strides), dtype=torch.int8)


def new_tensors(
    like: Tensor, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Any]:
    """Tensors of these shapes and dtypes on the device of one, not filled: int8 as codes."""
    return {
        name: empty_codes(like, shape)
        if dtype == torch.int8
        else torch.empty(shape, dtype=dtype, device=like.device)
        for name, (shape, dtype) in shapes.items()
    }


def _rows_start_on(x: Tensor, elements: int) -> bool:
    """Whether the last dimension is contiguous and all other strides are multiples. Quick."""
    *strides, last = x.stride()
    bits = 0
    for s in strides:
        bits |= s
    return last == 1 and bits % elements == 0


def check_codes(name: str, x: Tensor) -> None:
    """Raises where a kernel cannot write codes."""
    if _rows_start_on(x, 16) and x.data_ptr() % 16 == 0:
        return
    strides = (s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
    if x.stride(-1) != 1 or any(s % 16 for s in strides) or x.data_ptr() % 16:
        raise UnsupportedError(
            f"{name} has strides {x.stride()}: head_dim must be contiguous and rows start on 16 "
            "bytes; allocate it with empty_codes"
        )


def code_rows(x: Tensor) -> Tensor:
    """Codes (..., head_dim) as kernels read them; a copy if rows do not start on 16 bytes.

    Dimensions of size 1 may have any stride; it becomes 16.
    """
    if _rows_start_on(x, 16) and x.data_ptr() % 16 == 0:
        return x
    *strides, last = x.stride()
    strides = [16 if n == 1 else s for n, s in zip(x.shape, strides, strict=False)]
    if last != 1 or any(s % 16 for s in strides) or x.data_ptr() % 16:
        return empty_codes(x, x.shape).copy_(x)
    return x.as_strided(x.shape, (*strides, 1))


def rows_on_16_bytes(x: Tensor) -> Tensor | None:
    """X (..., head_dim), 16-bit, as kernels read it, or None if it must be copied for that.

    They read 16 bytes at a time: head_dim must be contiguous and every row start on 16 bytes.
    Dimensions of size 1 may have any stride; it becomes 8: kernels are compiled for its multiples.
    """
    if _rows_start_on(x, 8) and x.data_ptr() % 16 == 0:
        return x
    *strides, last = x.stride()
    strides = [8 if n == 1 else s for n, s in zip(x.shape, strides, strict=False)]
    if last != 1 or any(s % 8 for s in strides) or x.data_ptr() % 16:
        return None
    return x.as_strided(x.shape, (*strides, 1))


def readable(x: Tensor, *, expanded: bool = True) -> Tensor:
    """X as kernels read it, a copy if it must be; also, unless ``expanded``, if strides are 0."""
    rows = rows_on_16_bytes(x)
    repeats = 0 in x.stride() and any(
        s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)
    )
    if rows is None or (repeats and not expanded):
        # Not contiguous(): that returns a contiguous tensor wherever it starts.
        return x.clone(memory_format=torch.contiguous_format)
    return rows


def check_output(name: str, x: Tensor) -> None:
    """Raises where a kernel cannot write rows of a 16-bit output."""
    if _rows_start_on(x, 8):
        return
    strides = (s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
    if x.stride(-1) != 1 or any(s % 8 for s in strides):
        raise UnsupportedError(
            f"{name} has strides {x.stride()}: head_dim must be contiguous and rows start on 16 "
            "bytes; allocate it with torch.empty"
        )
