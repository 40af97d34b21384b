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

import functools
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sage_cute.compile_integration.ops import default_scale
from sage_cute.compile_integration.schema import LIB, NAMESPACE, op
from sage_cute.errors import DoubleBackwardError, UnsupportedError
from sage_cute.limits import REFUSED
from sage_cute.policies import canonical, resolve
from sage_cute.support import check_backward, check_dense, check_inputs, extras

# Past the ops' own autograd formulas, where the caller is their autograd: 5 us less a call.
_below_autograd = torch._C._AutoDispatchBelowAutograd


class Ops(NamedTuple):
    """The ops of one way to lay out a batch.

    ``fwd`` and ``infer`` take (q, k, v, *rest, k_mean) with the policy third in rest; ``backward``
    takes gradients, (q, k, v) and what fwd returned, and rest.
    """

    fwd: Any
    infer: Any
    backward: Any


DENSE = Ops(op("attn_fwd"), op("attn_infer"), op("attn_backward"))
PACKED = Ops(op("attn_varlen_fwd"), op("attn_varlen_infer"), op("attn_varlen_backward"))
_IS_SAVED = object()  # in the place of a tensor, which autograd keeps


def _save(ctx: Any, ops: Ops, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    q, k, v, *rest, _ = inputs
    policy = resolve(rest[2])
    given = [x for x in rest if isinstance(x, Tensor)]
    ctx.save_for_backward(
        None if policy.saves_q_codes else q,
        None if policy.saves_k_codes else k,
        v,
        *outputs,
        *given,
    )
    ctx.ops, ctx.num_given = ops, len(given)
    ctx.rest = [_IS_SAVED if isinstance(x, Tensor) else x for x in rest]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, *_: None) -> Any:
    none = (None,) * (len(ctx.rest) + 1)
    if dout is None and dlse is None:
        return (None, None, None, *none)
    tensors = list(ctx.saved_tensors)
    given = iter(tensors[len(tensors) - ctx.num_given :])
    q, k, v, out, *saved = tensors[: len(tensors) - ctx.num_given]
    rest = [next(given) if x is _IS_SAVED else x for x in ctx.rest]
    if dout is None:
        dout = torch.zeros_like(out)
    if torch.is_grad_enabled():  # create_graph: through the formula that raises
        grads = ctx.ops.backward(dout, dlse, q, k, v, out, *saved, *rest)
    else:
        with _below_autograd():
            grads = ctx.ops.backward(dout, dlse, q, k, v, out, *saved, *rest)
    return (*grads, *none)


class _SageAttention(torch.autograd.Function):
    """out, differentiable."""

    @staticmethod
    def forward(ctx: Any, ops: Ops, *inputs: Any) -> Tensor:
        with _below_autograd():
            outputs = ops.fwd(*inputs)
        _save(ctx, ops, inputs, outputs)
        out: Tensor = outputs[0]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> Any:
        return None, *_gradients(ctx, dout)


class _SageAttentionWithLse(torch.autograd.Function):
    """(out, lse of the smoothed K, k_mean): the first two differentiable."""

    @staticmethod
    def forward(ctx: Any, ops: Ops, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        with _below_autograd():
            outputs = ops.fwd(*inputs)
        _save(ctx, ops, inputs, outputs)
        ctx.mark_non_differentiable(outputs[-1])
        return outputs[0], outputs[1], outputs[-1]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> Any:
        return None, *_gradients(ctx, dout, dlse)


def _raises(error: Exception) -> Any:
    def backward(ctx: Any, *_: Any) -> None:
        raise error

    return backward


_NO_SECOND = DoubleBackwardError(f"sage.attn: not supported: {REFUSED['double backward']}")
_NO_GRAD = RuntimeError(
    "sage.attn_infer saves nothing for a backward: call sage.attn (it picks this op by itself "
    "where no gradient is needed)"
)


def _register_formulas(name: str, ops: Ops) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, ops, inputs, output)
        ctx.mark_non_differentiable(*output[2:])

    register = functools.partial(torch.library.register_autograd, lib=LIB)
    register(f"{NAMESPACE}::{name}_fwd", _gradients, setup_context=setup)
    # Without these, autograd would trace through the CPU bodies and return gradients that nobody
    # meant.
    register(f"{NAMESPACE}::{name}_backward", _raises(_NO_SECOND))
    register(f"{NAMESPACE}::{name}_infer", _raises(_NO_GRAD))


_register_formulas("attn", DENSE)
_register_formulas("attn_varlen", PACKED)


def _needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)
    ):
        raise UnsupportedError(f"sage.attn: not supported: {REFUSED['forward mode']}")
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _out(ops: Ops, needs_grad: bool, *inputs: Any) -> Tensor:
    if needs_grad:
        out: Tensor = _SageAttention.apply(ops, *inputs)  # type: ignore[no-untyped-call]
    else:
        with _below_autograd():
            out = ops.infer(*inputs)[0]
    return out


def _out_lse_mean(ops: Ops, needs_grad: bool, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    if needs_grad:
        outputs: tuple[Tensor, Tensor, Tensor]
        outputs = _SageAttentionWithLse.apply(ops, *inputs)  # type: ignore[no-untyped-call]
    else:
        with _below_autograd():
            outputs = ops.infer(*inputs)
    return outputs


def _may_be_dtensor(q: Tensor) -> bool:
    """Whether to import DTensor, which takes a second: once a subclass shows up and it is there."""
    return type(q) is not Tensor and "torch.distributed.tensor" in sys.modules


def _know_dtensor(q: Tensor) -> None:
    """Registers sharding rules when they may be needed."""
    if _may_be_dtensor(q):
        from sage_cute.compile_integration.sharding import register_sharding_rules

        register_sharding_rules()


def _check_before_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    is_causal: bool,
    policy: str,
    more: tuple[str, ...],
) -> None:
    """Raises what the backward would, now, not when the loss is known."""
    try:
        check_backward(v, is_causal, policy, more)
    except Exception:
        # What is wrong between the inputs says more than what is wrong with v alone. The forward
        # checks it in any case: not twice where all is well.
        check_inputs(q, k, v, scale, packed="packed" in more)
        raise


def _dense_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    is_causal: bool,
    policy: str,
    key_lengths: Tensor | None,
    left: int,
    right: int,
    k_mean: Tensor | None,
) -> tuple[Any, ...]:
    """(whether gradients are needed, the inputs of the kernel-level op), both checked."""
    check_dense(q, k, v)
    _know_dtensor(q)
    policy = canonical(policy)
    needs_grad = _needs_grad(q, k, v)
    if needs_grad:
        more = extras(left, right, key_lengths=key_lengths)
        _check_before_backward(q, k, v, scale, is_causal, policy, more)
    return needs_grad, q, k, v, scale, is_causal, policy, key_lengths, left, right, k_mean


def _packed_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    is_causal: bool,
    policy: str,
    *rest: Any,
) -> tuple[Any, ...]:
    """The same of a packed batch; rest: (..., window_left, window_right, k_mean)."""
    check_dense(q, k, v)
    if _may_be_dtensor(q):
        from torch.distributed.tensor import DTensor

        if isinstance(q, DTensor):
            raise UnsupportedError(f"sage.attn_varlen: not supported: {REFUSED['packed DTensor']}")
    policy = canonical(policy)
    needs_grad = _needs_grad(q, k, v)
    if needs_grad:
        more = extras(rest[-3], rest[-2], packed=True)
        _check_before_backward(q, k, v, scale, is_causal, policy, more)
    return needs_grad, q, k, v, scale, is_causal, policy, *rest


def _of_the_original_k(lse: Tensor, bias: Tensor, scale: float) -> Tensor:
    """The LSE from that of the smoothed K, and q . mean(K)."""
    # A query that sees no key has lse = -inf whatever q is: no gradient through its bias.
    bias = torch.where(lse == -torch.inf, 0.0, bias)
    return lse + bias * scale


def attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None = None,
    k_mean: Tensor | None = None,
    *,
    is_causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    scale: float | None = None,
    policy: str = "default",
) -> Tensor:
    """``sage::attn``: see :func:`sage_cute.attention`."""
    rest = key_lengths, window_left, window_right, k_mean
    return _out(DENSE, *_dense_call(q, k, v, scale, is_causal, policy, *rest))


def attn_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None = None,
    k_mean: Tensor | None = None,
    *,
    is_causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    scale: float | None = None,
    policy: str = "default",
) -> tuple[Tensor, Tensor]:
    """``sage::attn_with_lse``: LSE is float32, natural log, of the original K; differentiable."""
    rest = key_lengths, window_left, window_right, k_mean
    call = _dense_call(q, k, v, scale, is_causal, policy, *rest)
    out, lse, mean = _out_lse_mean(DENSE, *call)
    if mean.shape[-1]:
        # K's mean takes the query's heads, not q those of K: a DTensor may be split inside a group.
        group = q.shape[1] // max(k.shape[1], 1)
        means = mean.unsqueeze(2).expand(-1, -1, group, -1).flatten(1, 2).unsqueeze(2)
        # Contiguous, since strides decide how torch sums.
        bias = (q.contiguous().float() * means).sum(-1)
        lse = _of_the_original_k(lse, bias, default_scale(q, scale))
    return out, lse


def attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    k_mean: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    scale: float | None = None,
    policy: str = "default",
) -> Tensor:
    """``sage::attn_varlen``: see :func:`sage_cute.attention_varlen`."""
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    rest = *bounds, window_left, window_right, k_mean
    call = _packed_call(q, k, v, scale, is_causal, policy, *rest)
    return _out(PACKED, *call)


def attn_varlen_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    k_mean: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    scale: float | None = None,
    policy: str = "default",
) -> tuple[Tensor, Tensor]:
    """``sage::attn_varlen_with_lse``: LSE (heads, total_q) as that of ``attn_with_lse``."""
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    rest = *bounds, window_left, window_right, k_mean
    call = _packed_call(q, k, v, scale, is_causal, policy, *rest)
    out, lse, mean = _out_lse_mean(PACKED, *call)
    if mean.shape[-1] and mean.shape[0]:
        # Tokens of no sequence have lse = -inf, whichever mean they get here.
        tokens = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
        sequence = torch.searchsorted(cu_seqlens_q[1:], tokens, right=True)
        means = mean[sequence.clamp_max(mean.shape[0] - 1)]
        means = means.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
        bias = (q.contiguous().float() * means).sum(-1).transpose(0, 1)
        lse = _of_the_original_k(lse, bias, default_scale(q, scale))
    return out, lse


LIB.impl("attn", attn, "CompositeImplicitAutograd")
LIB.impl("attn_with_lse", attn_with_lse, "CompositeImplicitAutograd")
LIB.impl("attn_varlen", attn_varlen, "CompositeImplicitAutograd")
LIB.impl("attn_varlen_with_lse", attn_varlen_with_lse, "CompositeImplicitAutograd")
