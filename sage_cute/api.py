"""The Python front door."""

from __future__ import annotations

import numbers
from typing import Literal, overload

import torch
from torch import Tensor

from sage_cute.compile_integration.schema import op
from sage_cute.errors import DTypeError, ShapeError

Layout = Literal["bhsd", "bshd"]
_attn, _attn_with_lse = op("attn"), op("attn_with_lse")


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
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
    scale: float | None = None,
    policy: str = "default",
    return_lse: bool = False,
    layout: Layout = "bhsd",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v with INT8 products, differentiable in q, k, v and through the LSE.

    With K smoothing (every preset) an output row depends, at the level of quantization noise, on
    keys that a causal mask hides from it: through the mean of K. ``policy="fast:smooth_k=false"``
    does without.

    Args:
        q: (batch, heads, seqlen_q, head_dim), float16, bfloat16 or float32; any strides.
        k: (batch, kv_heads, seqlen_k, head_dim); heads is a multiple of kv_heads (GQA, MQA).
        v: like k.
        causal: query i sees key j iff j <= i + seqlen_k - seqlen_q (bottom-right). A query that
            sees no key gets out = 0 and lse = -inf.
        scale: softmax scale; None: head_dim ** -0.5. 0 is valid, and so are negative scales.
        policy: which products are INT8, and how: a name of :func:`sage_cute.policies`, optionally
            with changes, ``"fast:dp=16bit,smooth_k=false"``.
        return_lse: also return the LSE.
        layout: ``"bhsd"`` as above, or ``"bshd"``: q, k, v and out are (batch, seqlen, heads,
            head_dim).

    Returns:
        out, in q's shape and dtype; with ``return_lse`` also the log-sum-exp of the scaled scores
        (natural logarithm, float32, (batch, heads, seqlen_q) in either layout).

    Raises:
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
    if not return_lse:
        out: Tensor = _attn(q, k, v, is_causal=causal, scale=scale, policy=policy)
        return out if layout == "bhsd" else out.transpose(1, 2)
    out, lse = _attn_with_lse(q, k, v, is_causal=causal, scale=scale, policy=policy)
    return (out if layout == "bhsd" else out.transpose(1, 2)), lse


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
