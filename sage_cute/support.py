"""What the ops take: one place that eager, torch.compile and the fake rules all ask."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator

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

Window = tuple[int | None, int | None]


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


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, packed: bool = False
) -> None:
    """Raises the one error that says what is wrong with the inputs of attention, and the remedy.

    Reads sizes, dtypes and devices only, never data: it runs on fake tensors as well. ``packed``:
    sequences follow each other in the first dimension, which is tokens.
    """
    if not q.dim() == k.dim() == v.dim() == (3 if packed else 4):
        shape = "(batch, heads, seqlen, head_dim)"
        remedy = "add the missing dimensions with unsqueeze"
        if packed:
            shape, remedy = "(tokens, heads, head_dim)", "put the sequences one after the other"
        raise ShapeError(f"sage.attn: q, k and v must be {shape}, got {_shapes(q, k, v)}; {remedy}")
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
    if k.shape != v.shape:
        raise ShapeError(
            f"sage.attn: k {tuple(k.shape)} and v {tuple(v.shape)} must have the same shape; not "
            f"supported: {REFUSED['head_dim of v']}"
        )
    if (not packed and q.shape[0] != k.shape[0]) or q.shape[-1] != k.shape[-1]:
        same = "head_dim" if packed else "batch and head_dim"
        raise ShapeError(f"sage.attn: q, k and v need the same {same}, got {_shapes(q, k, v)}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % kv_heads if kv_heads else heads:
        raise ShapeError(
            f"sage.attn: {heads} query heads are no multiple of {kv_heads} key heads; repeat or "
            "drop heads of k and v"
        )
    if scale is not None and not math.isfinite(scale):
        raise UnsupportedError(f"sage.attn: scale {scale} is not finite; None: head_dim ** -0.5")


def window_sizes(window: Window | None) -> tuple[int, int]:
    """A user's window as the ops take it: (left, right), -1 for None."""
    if window is None:
        return -1, -1
    try:
        left, right = (-1 if side is None else operator.index(side) for side in window)
        if all(side is None or side >= 0 for side in window):
            return left, right
    except (TypeError, ValueError):
        pass
    raise ShapeError(
        f"sage.attn: window {window!r} must be (left, right): how many keys a query sees on each "
        "side of its own, 0 or more, or None for all of them"
    )


def check_window(left: int, right: int) -> None:
    """Raises if an op's window is none."""
    if left < -1 or right < -1:
        raise ShapeError(
            f"sage.attn: window_left={left}, window_right={right}: each must be a number of keys, "
            "0 or more, or -1 for all of them"
        )


def check_key_lengths(key_lengths: Tensor | None, k: Tensor) -> None:
    """Raises if key lengths are not what attention takes; does not read them."""
    if key_lengths is None:
        return
    if key_lengths.dtype not in (torch.int32, torch.int64) or key_lengths.shape != k.shape[:1]:
        raise ShapeError(
            "sage.attn: key_lengths must be int32 or int64 of shape (batch,) = "
            f"({k.shape[0]},), got {key_lengths.dtype} {tuple(key_lengths.shape)}; of a padding "
            "mask (batch, seqlen_k) with the padding at the end pass mask.sum(-1)"
        )
    _check_same_device("key_lengths", key_lengths, k)


def check_key_length_values(key_lengths: Tensor | None, k: Tensor) -> None:
    """Raises for a length that is no number of keys. Reads them: for CPU tensors only."""
    if key_lengths is None or not key_lengths.numel():
        return
    least, largest = (int(x) for x in key_lengths.aminmax())
    if least < 0 or largest > k.shape[2]:
        raise ShapeError(
            f"sage.attn: key_lengths are {least} to {largest}; k has {k.shape[2]} tokens, so each "
            "must be 0 to that"
        )


def check_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> None:
    """Raises if the bounds of packed sequences are not what attention takes; does not read them."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.dtype != torch.int32 or x.dim() != 1 or not x.shape[0]:
            raise ShapeError(
                f"sage.attn: {name} must be int32 of shape (sequences + 1,), 0 and the running sum "
                f"of the lengths, got {x.dtype} {tuple(x.shape)}"
            )
        _check_same_device(name, x, q)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ShapeError(
            "sage.attn: cu_seqlens_q and cu_seqlens_k must have one length, got "
            f"{_shapes(cu_seqlens_q, cu_seqlens_k)}; give a sequence without tokens the length 0"
        )


def check_cu_seqlens_values(
    name: str, cu_seqlens: Tensor, tokens: int, max_seqlen: int | None
) -> None:
    """Raises for bounds of no sequences. Reads them: for CPU tensors only."""
    bounds = cu_seqlens.tolist()
    if sorted(bounds) != bounds or bounds[0] < 0 or bounds[-1] > tokens:
        raise ShapeError(
            f"sage.attn: cu_seqlens_{name} {bounds} must not decrease and lie within 0 and the "
            f"{tokens} tokens of {name}"
        )
    longest = max((b - a for a, b in itertools.pairwise(bounds)), default=0)
    if max_seqlen is not None and longest > max_seqlen:
        raise ShapeError(
            f"sage.attn: max_seqlen_{name}={max_seqlen}, but a sequence has {longest} tokens; give "
            "the longest length, or None"
        )


def check_k_mean(
    k_mean: Tensor | None, k: Tensor, policy: str, sequences: int | None = None
) -> None:
    """Raises if a given mean of K is not what attention takes.

    ``sequences`` is the number of those that k packs; None: k is (batch, kv_heads, ...).
    """
    if k_mean is None:
        return
    if not resolve(policy).smooth_k:
        raise UnsupportedError(
            f"sage.attn: k_mean is given, but policy {policy!r} has smooth_k=false and subtracts "
            "none; drop one of the two"
        )
    shape = (k.shape[0] if sequences is None else sequences, k.shape[1], k.shape[-1])
    if k_mean.shape != shape or not k_mean.is_floating_point():
        raise ShapeError(
            "sage.attn: k_mean must be floating point, (batch, kv_heads, head_dim) = "
            f"{shape}, got {k_mean.dtype} {tuple(k_mean.shape)}"
        )
    _check_same_device("k_mean", k_mean, k)


def _check_same_device(name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise UnsupportedError(f"sage.attn: {name} is on {x.device}; move it to {like.device}")


def extras(
    left: int,
    right: int,
    *,
    key_lengths: Tensor | None = None,
    k_mean: Tensor | None = None,
    packed: bool = False,
) -> tuple[str, ...]:
    """What a call asks of an implementation beyond plain and causal attention, by name."""
    if left == right == -1 and key_lengths is None and k_mean is None and not packed:
        return ()  # most calls, several times each
    asked = {
        "window": left != -1 or right != -1,
        "key_lengths": key_lengths is not None,
        "k_mean": k_mean is not None,
        "packed": packed,
    }
    return tuple(name for name, value in asked.items() if value)


def check_forward(q: Tensor, is_causal: bool, policy: str, more: tuple[str, ...] = ()) -> None:
    """Raises where no implementation of the forward covers the device of q and what it holds.

    ``more`` are :func:`extras`.
    """
    _check("forward", q, is_causal, policy, more)


def check_backward(v: Tensor, is_causal: bool, policy: str, more: tuple[str, ...] = ()) -> None:
    """Raises where no implementation of the backward covers the device of v and what it holds.

    ``more`` are :func:`extras`.
    """
    _check("backward", v, is_causal, policy, more)


def _check(
    direction: Direction, x: Tensor, is_causal: bool, policy: str, more: tuple[str, ...]
) -> None:
    family = _family(x.device)
    if reason := _why_not_dtype(family, x.dtype):
        raise DTypeError(f"sage.attn: {reason}")
    masks = ("causal", *more) if is_causal else more
    reason = family.why_not_head_dim(x.shape[-1]) or _why_not(family, direction, policy, masks)
    if reason:
        raise UnsupportedError(f"sage.attn: {reason}")


@functools.cache
def _why_not_dtype(family: Family, dtype: torch.dtype) -> str | None:
    return family.why_not_dtype(str(dtype).removeprefix("torch."))


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
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    k_mean: Tensor | None = None,
    scale: float | None = None,
    policy: str = "default",
) -> Support:
    """Whether :func:`sage_cute.attention` takes these inputs, and if not, why and what to do.

    Where one of them requires grad (and grad mode is on) that includes the backward. Reads no data,
    so it does not see a key length that is too large.

    Args:
        q: (batch, heads, seqlen_q, head_dim); fake and meta tensors do.
        k: (batch, kv_heads, seqlen_k, head_dim).
        v: like k.
        causal: bottom-right causal mask.
        window: (left, right), the keys on each side of its own that a query sees.
        key_lengths: (batch,), the keys that are there.
        k_mean: (batch, kv_heads, head_dim), the mean of K to subtract.
        scale: softmax scale.
        policy: policy string.

    Returns:
        A status that is true or false; its ``reason`` is the message that the op would raise.
    """
    try:
        resolve(policy)
        sizes = window_sizes(window)
        check_dense(q, k, v)
        check_inputs(q, k, v, scale)
        check_key_lengths(key_lengths, k)
        check_k_mean(k_mean, k, policy)
        more = extras(*sizes, key_lengths=key_lengths, k_mean=k_mean)
        check_forward(q, causal, policy, more)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            check_backward(v, causal, policy, more)
    except (DTypeError, PolicyError, ShapeError, UnsupportedError) as error:
        return Support(False, str(error))
    return Support(True)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)
