"""The Python front door."""

from __future__ import annotations

import numbers
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from sage_cute.compile_integration.schema import op
from sage_cute.errors import ArgumentError, DTypeError, ShapeError
from sage_cute.limits import REFUSED
from sage_cute.support import Window, window_sizes

Layout = Literal["bhsd", "bshd"]
_attn, _attn_with_lse = op("attn"), op("attn_with_lse")
_varlen, _varlen_with_lse = op("attn_varlen"), op("attn_varlen_with_lse")


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    key_lengths: Tensor | None = ...,
    k_mean: Tensor | None = ...,
    scale: float | None = ...,
    policy: str = ...,
    return_lse: Literal[False] = ...,
    layout: Layout = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    key_lengths: Tensor | None = ...,
    k_mean: Tensor | None = ...,
    scale: float | None = ...,
    policy: str = ...,
    return_lse: Literal[True],
    layout: Layout = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
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
    return_lse: bool = False,
    layout: Layout = "bhsd",
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v with INT8 products, differentiable in q, k, v and through the LSE.

    With K smoothing (every preset) the mean of K is subtracted from K first. It is over all keys,
    so an output row depends, at the level of quantization noise, also on keys that a mask hides
    from it. Training does not mind. A decoder that must give a prefix the same results with and
    without what follows passes ``k_mean``, for example the mean of the prompt's keys: then, under a
    causal mask, the first n tokens give the same out and LSE bit for bit whatever comes behind
    them, if n is a multiple of 128.

    Args:
        q: (batch, heads, seqlen_q, head_dim), float16, bfloat16 or float32; any strides.
        k: (batch, kv_heads, seqlen_k, head_dim); heads is a multiple of kv_heads (GQA, MQA).
        v: like k.
        causal: query i sees key j iff j <= p with p = i + seqlen_k - seqlen_q (bottom-right). A
            query that sees no key gets out = 0 and lse = -inf.
        window: (left, right), each 0 or more, or None for no limit: query i sees key j iff
            p - left <= j <= p + right. With ``causal`` the right side is 0.
        key_lengths: (batch,) int32 or int64, 0 to seqlen_k: keys from there on are padding. They
            contribute to nothing, whatever they hold, and have dk = dv = 0. The diagonal stays that
            of seqlen_k, and queries are not masked: those of padding have rows like others, to be
            left out of the loss. Not read on the host for CUDA tensors, so a length beyond seqlen_k
            is an error on the CPU only.
        k_mean: (batch, kv_heads, head_dim), any floating dtype, used as float32: what K smoothing
            subtracts; None: the mean over the keys that are there. Results do not depend on it but
            for rounding, so it has no gradient.
        scale: softmax scale; None: head_dim ** -0.5. 0 is valid, and so are negative scales.
        policy: which products are INT8, and how: a name of :func:`sage_cute.policies`, optionally
            with changes, ``"fast:dp=16bit,smooth_k=false"``.
        return_lse: also return the LSE.
        layout: ``"bhsd"`` as above, or ``"bshd"``: q, k, v and out are (batch, seqlen, heads,
            head_dim).
        **unknown: other keywords are refused, with what to use instead.

    Returns:
        out, in q's shape and dtype; with ``return_lse`` also the log-sum-exp of the scaled scores
        (natural logarithm, float32, (batch, heads, seqlen_q) in either layout).

    Raises:
        ArgumentError: (a TypeError) an unknown keyword, such as attn_mask.
        DTypeError: (a TypeError) dtypes differ or are not supported.
        ShapeError: (a ValueError) shapes do not fit together.
        UnsupportedError: (a ValueError) no implementation for this device or head_dim.
        PolicyError: (a ValueError) unknown policy.

    Source: SageAttention3 (arXiv 2505.11594), SageBwd (arXiv 2603.02170).
    """
    if scale is not None and type(scale) is not float:
        scale = _as_float(scale)
    if layout == "bshd":
        q, k, v = (_swap_heads(x) for x in (q, k, v))
    elif layout != "bhsd":
        raise ShapeError(f"layout {layout!r}: 'bhsd' or 'bshd'")
    if unknown:
        raise _unknown("attention", (*_KEYWORDS, "key_lengths", "layout"), *unknown)
    left, right = window_sizes(window)
    result: Any = (_attn_with_lse if return_lse else _attn)(
        q,
        k,
        v,
        key_lengths,
        k_mean,
        is_causal=causal,
        window_left=left,
        window_right=right,
        scale=scale,
        policy=policy,
    )
    if layout == "bshd":
        result = (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)
    return cast("Tensor | tuple[Tensor, Tensor]", result)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    k_mean: Tensor | None = ...,
    scale: float | None = ...,
    policy: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    k_mean: Tensor | None = ...,
    scale: float | None = ...,
    policy: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    k_mean: Tensor | None = None,
    scale: float | None = None,
    policy: str = "default",
    return_lse: bool = False,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` of a packed batch: each sequence alone, whatever its length, no padding.

    Sequence b has the tokens cu_seqlens[b] to cu_seqlens[b + 1], which may be none. Results are
    those of running the sequences one by one (on the CPU to the bit), the mean of K that K
    smoothing subtracts included. Tokens before the first and after the last sequence belong to
    nobody: their out and gradients are 0, their LSE is -inf.

    Args:
        q: (total_q, heads, head_dim), float16, bfloat16 or float32; any strides.
        k: (total_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: like k.
        cu_seqlens_q: (sequences + 1,) int32 on q's device, not decreasing, within 0 and total_q:
            where the queries of each sequence start, and where the last ones end. Not read on the
            host for CUDA tensors, so wrong bounds are an error on the CPU only.
        cu_seqlens_k: the same of the keys.
        max_seqlen_q: the largest number of queries of a sequence, or more; None: total_q. On a GPU
            a tight number saves launching thread blocks that have nothing to do.
        max_seqlen_k: the same of the keys.
        causal: as in :func:`attention`, with the lengths of each sequence.
        window: as in :func:`attention`.
        k_mean: (sequences, kv_heads, head_dim), as in :func:`attention`.
        scale: softmax scale; None: head_dim ** -0.5.
        policy: as in :func:`attention`.
        return_lse: also return the LSE.
        **unknown: other keywords are refused, with what to use instead.

    Returns:
        out, in q's shape and dtype; with ``return_lse`` also the log-sum-exp of the scaled scores
        (natural logarithm, float32, (heads, total_q)).

    Raises:
        ArgumentError: (a TypeError) an unknown keyword.
        DTypeError: (a TypeError) dtypes differ or are not supported.
        ShapeError: (a ValueError) shapes do not fit together.
        UnsupportedError: (a ValueError) no implementation for this device or head_dim.
        PolicyError: (a ValueError) unknown policy.
    """
    if scale is not None and type(scale) is not float:
        scale = _as_float(scale)
    if unknown:
        raise _unknown("attention_varlen", _KEYWORDS, *unknown)
    left, right = window_sizes(window)
    result: Tensor | tuple[Tensor, Tensor] = (_varlen_with_lse if return_lse else _varlen)(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        k_mean,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        is_causal=causal,
        window_left=left,
        window_right=right,
        scale=scale,
        policy=policy,
    )
    return result


_KEYWORDS = ("causal", "window", "k_mean", "scale", "policy", "return_lse")
_INSTEAD = {
    **dict.fromkeys(("attn_mask", "mask", "key_padding_mask"), REFUSED["attn_mask"]),
    "dropout_p": REFUSED["dropout"],
    "is_causal": "a causal mask aligned top-left: causal=True is aligned bottom-right",
    "enable_gqa": "the keyword alone: k and v may always have fewer heads than q",
}


def _unknown(function: str, known: tuple[str, ...], name: str, *_: str) -> ArgumentError:
    instead = f"it takes {', '.join(known)}"
    if name in _INSTEAD:
        instead = f"not supported: {_INSTEAD[name]}"
    return ArgumentError(f"sage_cute.{function}: unknown keyword {name}; {instead}")


def _swap_heads(x: Tensor) -> Tensor:
    if x.dim() != 4:
        raise ShapeError(
            f"layout 'bshd': expected (batch, seqlen, heads, head_dim), got {tuple(x.shape)}"
        )
    return x.transpose(1, 2)


def _as_float(scale: object) -> float:
    """A number of any library as a float; 0-d CPU tensors count, CUDA ones would synchronize."""
    if isinstance(scale, numbers.Real):
        return float(scale)
    if isinstance(scale, Tensor):
        if scale.requires_grad:
            raise DTypeError("scale is not differentiable: pass scale.item(), or scale q instead")
        if torch.compiler.is_compiling():
            raise DTypeError("scale is a tensor: inside torch.compile pass a number, or scale q")
        if scale.dim() == 0 and scale.device.type == "cpu":
            return float(scale)
    raise DTypeError(f"scale must be a number, got {type(scale).__name__}; pass float(scale)")
