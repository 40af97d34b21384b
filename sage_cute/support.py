"""What the ops take: one place that eager, torch.compile and the fake rules all ask."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from sage_cute.errors import DTypeError, PolicyError, ShapeError, UnsupportedError
from sage_cute.limits import (
    CPU,
    HOPPER,
    REFUSED,
    Direction,
    Family,
    family_of_gpu,
    supported_devices,
    unknown_gpu,
)
from sage_cute.policies import resolve


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether inputs are supported; ``reason`` says why not, and what to do. True if they are."""

    supported: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.supported


def check_dense(*tensors: Tensor) -> None:
    """Raises where a tensor is nested or sparse: torch's own message would name no remedy."""
    for x in tensors:
        if x.layout is not torch.strided or x.is_nested:
            kind = "nested" if x.is_nested else "sparse"
            raise UnsupportedError(f"sage.attn: not supported: {REFUSED[kind]}")


def check_inputs(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
    """Raises the one error that says what is wrong with the inputs of attention, and the remedy.

    Reads sizes, dtypes and devices only, never data: it runs on fake tensors as well.
    """
    check_dense(q, k, v)
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ShapeError(
            "sage.attn: q, k and v must be (batch, heads, seqlen, head_dim), got "
            f"{_shapes(q, k, v)}; add the missing dimensions with unsqueeze"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise DTypeError(
            f"sage.attn: q, k and v have different dtypes ({q.dtype}, {k.dtype}, {v.dtype}); cast "
            "them to one, or call under torch.autocast"
        )
    if not q.device == k.device == v.device:
        raise UnsupportedError(
            f"sage.attn: q, k and v are on different devices ({q.device}, {k.device}, {v.device}); "
            "move them to one"
        )
    batch, heads, _, head_dim = q.shape
    if k.shape != v.shape:
        raise ShapeError(
            f"sage.attn: k {tuple(k.shape)} and v {tuple(v.shape)} must have the same shape; not "
            f"supported: {REFUSED['head_dim of v']}"
        )
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ShapeError(
            f"sage.attn: q, k and v need the same batch and head_dim, got {_shapes(q, k, v)}"
        )
    kv_heads = k.shape[1]
    if heads % kv_heads if kv_heads else heads:
        raise ShapeError(
            f"sage.attn: {heads} query heads are no multiple of {kv_heads} key heads; repeat or "
            "drop heads of k and v"
        )
    if scale is not None and not math.isfinite(scale):
        raise UnsupportedError(f"sage.attn: scale {scale} is not finite; None: head_dim ** -0.5")


def check_forward(q: Tensor, is_causal: bool, policy: str) -> None:
    """Raises where no implementation of the forward covers the device of q and what it holds."""
    _check("forward", q, is_causal, policy)


def check_backward(v: Tensor, is_causal: bool, policy: str) -> None:
    """Raises where no implementation of the backward covers the device of v and what it holds."""
    _check("backward", v, is_causal, policy)


def _check(direction: Direction, x: Tensor, is_causal: bool, policy: str) -> None:
    family = _family(x.device)
    if reason := family.why_not_dtype(str(x.dtype).removeprefix("torch.")):
        raise DTypeError(f"sage.attn: {reason}")
    masks = ("causal",) if is_causal else ()
    reason = family.why_not_head_dim(x.shape[-1]) or _why_not(family, direction, policy, masks)
    if reason:
        raise UnsupportedError(f"sage.attn: {reason}")


@functools.lru_cache(maxsize=1024)
def _why_not(
    family: Family, direction: Direction, policy: str, masks: tuple[str, ...]
) -> str | None:
    return family.why_not(direction, resolve(policy), masks)


def _family(device: torch.device) -> Family:
    if device.type in ("cpu", "meta"):
        return CPU
    if device.type == "cuda":
        # Fake tensors may stand for a GPU on a machine without one: for one that is supported.
        return _family_of_gpu(device.index) if torch.cuda.is_available() else HOPPER
    raise UnsupportedError(
        f"sage.attn: no implementation for device {device}; move q, k and v to one of "
        f"{supported_devices()}"
    )


@functools.cache
def _family_of_gpu(index: int | None) -> Family:
    found = torch.cuda.get_device_properties(index)
    capability = found.major, found.minor
    if (family := family_of_gpu(capability)) is None:
        raise UnsupportedError(f"sage.attn: {unknown_gpu(found.name, capability)}")
    return family


def is_supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    policy: str = "default",
) -> Support:
    """Whether :func:`sage_cute.attention` takes these inputs, and if not, why and what to do.

    Where one of them requires grad (and grad mode is on) that includes the backward.

    Args:
        q: (batch, heads, seqlen_q, head_dim); fake and meta tensors do.
        k: (batch, kv_heads, seqlen_k, head_dim).
        v: like k.
        causal: bottom-right causal mask.
        scale: softmax scale.
        policy: policy string.

    Returns:
        A status that is true or false; its ``reason`` is the message that the op would raise.
    """
    try:
        resolve(policy)
        check_inputs(q, k, v, scale)
        check_forward(q, causal, policy)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            check_backward(v, causal, policy)
    except (DTypeError, PolicyError, ShapeError, UnsupportedError) as error:
        return Support(False, str(error))
    return Support(True)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)
