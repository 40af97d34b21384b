"""The public ops and their gradients.

What a training call keeps for its backward, per token and head (D = head_dim, 2-byte inputs):

    q_codes, k_codes   D bytes each             out, v        2 D bytes each
    q_scale, k_scale   4 bytes (per token) or 4 / block       lse   4 bytes

so 6 D + 12 bytes, where 16-bit attention keeps 8 D + 4 (q, k, v, out, lse). Policies with a 16-bit
``qk`` or with ``smooth_q`` keep q or k themselves instead of codes.

``torch.autograd.Function`` in its ctx style sits outside the dispatcher because it is the cheapest
form (a setup_context style costs 35 us a call more); ``register_autograd`` serves those who call
``attn_fwd`` itself.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sage_cute.compile_integration.ops import default_scale
from sage_cute.compile_integration.schema import LIB, NAMESPACE, op
from sage_cute.errors import DoubleBackwardError, UnsupportedError
from sage_cute.limits import REFUSED
from sage_cute.policies import canonical, resolve
from sage_cute.support import check_backward, check_dense

_fwd, _infer, _backward = op("attn_fwd"), op("attn_infer"), op("attn_backward")
# Past the ops' own autograd formulas, where the caller is their autograd: 5 us less a call.
_below_autograd = torch._C._AutoDispatchBelowAutograd


def _save(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor, float | None, bool, str],
    outputs: tuple[Tensor, ...],
) -> None:
    q, k, v, *ctx.static = inputs
    policy = resolve(inputs[5])
    ctx.save_for_backward(
        None if policy.saves_q_codes else q, None if policy.saves_k_codes else k, v, *outputs
    )
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, *_: None) -> Any:
    if dout is None and dlse is None:
        return (None,) * 6
    q, k, v, out, *saved = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    if torch.is_grad_enabled():  # create_graph: through the formula that raises
        grads = _backward(dout, dlse, q, k, v, out, *saved, *ctx.static)
    else:
        with _below_autograd():
            grads = _backward(dout, dlse, q, k, v, out, *saved, *ctx.static)
    return (*grads, None, None, None)


class _SageAttention(torch.autograd.Function):
    """out, differentiable."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        with _below_autograd():
            outputs = _fwd(*inputs)
        _save(ctx, inputs, outputs)
        out: Tensor = outputs[0]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> Any:
        return _gradients(ctx, dout)


class _SageAttentionWithLse(torch.autograd.Function):
    """(out, lse of the smoothed K, k_mean): the first two differentiable."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        with _below_autograd():
            outputs = _fwd(*inputs)
        _save(ctx, inputs, outputs)
        ctx.mark_non_differentiable(outputs[-1])
        return outputs[0], outputs[1], outputs[-1]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> Any:
        return _gradients(ctx, dout, dlse)


def _setup_fwd(ctx: Any, inputs: Any, output: Any) -> None:
    _save(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[2:])


def _raises(error: Exception) -> Any:
    def backward(ctx: Any, *_: Any) -> None:
        raise error

    return backward


_NO_SECOND = DoubleBackwardError(f"sage.attn: not supported: {REFUSED['double backward']}")
_NO_GRAD = RuntimeError(
    "sage.attn_infer saves nothing for a backward: call sage.attn (it picks this op by itself "
    "where no gradient is needed)"
)
torch.library.register_autograd(
    f"{NAMESPACE}::attn_fwd", _gradients, setup_context=_setup_fwd, lib=LIB
)
# Without these, autograd would trace through the CPU bodies and return gradients that nobody meant.
torch.library.register_autograd(f"{NAMESPACE}::attn_backward", _raises(_NO_SECOND), lib=LIB)
torch.library.register_autograd(f"{NAMESPACE}::attn_infer", _raises(_NO_GRAD), lib=LIB)


def _needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)
    ):
        raise UnsupportedError(f"sage.attn: not supported: {REFUSED['forward mode']}")
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _attn_infer(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    with _below_autograd():
        outputs: tuple[Tensor, Tensor, Tensor] = _infer(*inputs)
    return outputs


def _know_dtensor(q: Tensor) -> None:
    """Registers sharding rules once a subclass shows up and DTensor is there (it takes ~1 s)."""
    if type(q) is not Tensor and "torch.distributed.tensor" in sys.modules:
        from sage_cute.compile_integration.sharding import register_sharding_rules

        register_sharding_rules()


def attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    policy: str = "default",
) -> Tensor:
    """``sage::attn``: see :func:`sage_cute.attention`."""
    check_dense(q, k, v)
    _know_dtensor(q)
    policy = canonical(policy)
    if _needs_grad(q, k, v):
        check_backward(v, is_causal, policy)  # now, not when the loss is known
        out: Tensor = _SageAttention.apply(q, k, v, scale, is_causal, policy)  # type: ignore[no-untyped-call]
        return out
    return _attn_infer(q, k, v, scale, is_causal, policy)[0]


def attn_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    policy: str = "default",
) -> tuple[Tensor, Tensor]:
    """``sage::attn_with_lse``: LSE is float32, natural log, of the original K; differentiable."""
    check_dense(q, k, v)
    _know_dtensor(q)
    policy = canonical(policy)
    function = _attn_infer
    if _needs_grad(q, k, v):
        check_backward(v, is_causal, policy)
        function = _SageAttentionWithLse.apply
    out, lse, k_mean = function(q, k, v, scale, is_causal, policy)
    if k_mean.shape[-1]:
        # K's mean takes the query's heads, not q those of K: a DTensor may be split inside a group.
        group = q.shape[1] // max(k.shape[1], 1)
        means = k_mean.unsqueeze(2).expand(-1, -1, group, -1).flatten(1, 2).unsqueeze(2)
        # Contiguous, since strides decide how torch sums.
        bias = (q.contiguous().float() * means).sum(-1)
        # A query that sees no key has lse = -inf whatever q is: no gradient through its bias.
        bias = torch.where(lse == -torch.inf, 0.0, bias)
        lse = lse + bias * default_scale(q, scale)
    return out, lse


LIB.impl("attn", attn, "CompositeImplicitAutograd")
LIB.impl("attn_with_lse", attn_with_lse, "CompositeImplicitAutograd")
