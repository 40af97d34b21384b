"""Modules for models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sage_cute.api import Layout, attention
from sage_cute.errors import ShapeError
from sage_cute.policies import resolve
from sage_cute.support import Window, window_sizes


class SageAttention(torch.nn.Module):
    """INT8 attention with optional QK-norm, the part of a transformer layer between projections.

    QK-norm is RMSNorm over head_dim with a learned gain, one for q and one for k, shared by heads.
    It bounds the scores and with them the error of INT8 products: SageBwd (arXiv 2603.02170,
    section 4) found it necessary for stable pre-training at large batches.

    Args:
        head_dim: size of a head.
        qk_norm: normalize q and k first.
        causal: bottom-right causal mask.
        window: (left, right), the keys that a query sees on each side of its own; None: all.
        scale: softmax scale; None: head_dim ** -0.5.
        policy: see :func:`sage_cute.attention`.
        layout: ``"bhsd"`` or ``"bshd"``, of q, k, v and the result.
        eps: of the norms.

    Raises:
        PolicyError: unknown policy.
        ShapeError: a window that is none.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        qk_norm: bool = False,
        causal: bool = False,
        window: Window | None = None,
        scale: float | None = None,
        policy: str = "default",
        layout: Layout = "bhsd",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        # What is wrong fails here rather than in the first step.
        resolve(policy)
        window_sizes(window)
        self.head_dim, self.causal, self.window, self.scale = head_dim, causal, window, scale
        self.policy, self.layout = policy, layout
        self.q_norm = torch.nn.RMSNorm(head_dim, eps=eps) if qk_norm else torch.nn.Identity()
        self.k_norm = torch.nn.RMSNorm(head_dim, eps=eps) if qk_norm else torch.nn.Identity()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotary: Callable[[Tensor], Tensor] | None = None,
        key_lengths: Tensor | None = None,
        k_mean: Tensor | None = None,
    ) -> Tensor:
        """Attention of q over k and v, in the shapes of :func:`sage_cute.attention`.

        Args:
            q: (batch, heads, seqlen_q, head_dim), or as ``layout`` says.
            k: (batch, kv_heads, seqlen_k, head_dim).
            v: like k.
            rotary: applied to q and to k between QK-norm and attention, where a rotary position
                embedding belongs.
            key_lengths: (batch,), the keys that are there; None: all.
            k_mean: (batch, kv_heads, head_dim), subtracted from the keys as attention gets them;
                None: their mean.
        """
        if q.shape[-1] != self.head_dim:
            raise ShapeError(
                f"SageAttention: q has head_dim {q.shape[-1]}, the module was made for "
                f"{self.head_dim}"
            )
        normed_q, normed_k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            normed_q, normed_k = rotary(normed_q), rotary(normed_k)
        # Norms and embeddings may return float32: what they were given decides the dtype.
        q, k = normed_q.to(q.dtype), normed_k.to(k.dtype)
        return attention(
            q,
            k,
            v,
            causal=self.causal,
            window=self.window,
            key_lengths=key_lengths,
            k_mean=k_mean,
            scale=self.scale,
            policy=self.policy,
            layout=self.layout,
        )

    def extra_repr(self) -> str:
        """What ``print`` shows of the module."""
        window = "" if self.window is None else f", window={self.window}"
        return f"head_dim={self.head_dim}, causal={self.causal}{window}, policy={self.policy!r}"
