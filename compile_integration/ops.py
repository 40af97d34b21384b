"""The kernel-level ops: ``attn_fwd``, ``attn_infer`` and ``attn_backward``.

Each has one allocator, which its fake rule and its implementations share, so that shapes, strides
and dtypes cannot differ between them. Bodies check, allocate and compute, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_cute.compile.tensors import empty_codes
from sage_cute.compile_integration.schema import LIB, NAMESPACE
from sage_cute.errors import ShapeError
from sage_cute.numerics import (
    Gradients,
    SageForward,
    Saved,
    sage_backward,
    sage_forward,
    saved_shapes,
)
from sage_cute.numerics.visibility import Window
from sage_cute.policies import resolve
from sage_cute.support import (
    check_backward,
    check_forward,
    check_inputs,
    check_k_mean,
    check_key_length_values,
    check_key_lengths,
    check_window,
    extras,
)

Tensors3 = tuple[Tensor, Tensor, Tensor]


def default_scale(q: Tensor, scale: float | None) -> float:
    """The softmax scale, head_dim ** -0.5 unless given: None costs no recompile, a float one."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def window_of(left: int, right: int) -> Window:
    """An op's window, whose -1 is None, for the numerics."""
    return (None if left == -1 else left), (None if right == -1 else right)


class Forward(NamedTuple):
    """The arguments of ``attn_fwd`` and ``attn_infer``."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    is_causal: bool
    policy: str
    key_lengths: Tensor | None = None
    window_left: int = -1
    window_right: int = -1
    k_mean: Tensor | None = None

    def check(self) -> None:
        """Raises what is wrong with the arguments, or is not implemented on their device."""
        check_inputs(self.q, self.k, self.v, self.scale)
        window = self.window_left, self.window_right
        check_window(*window)
        check_key_lengths(self.key_lengths, self.k)
        check_k_mean(self.k_mean, self.k, self.policy)
        more = extras(*window, key_lengths=self.key_lengths, k_mean=self.k_mean)
        check_forward(self.q, self.is_causal, self.policy, more)

    def compute(self) -> SageForward:
        """The reference numerics."""
        check_key_length_values(self.key_lengths, self.k)
        return sage_forward(
            self.q,
            self.k,
            self.v,
            scale=default_scale(self.q, self.scale),
            causal=self.is_causal,
            policy=resolve(self.policy),
            window=window_of(self.window_left, self.window_right),
            key_lengths=self.key_lengths,
            k_mean=self.k_mean,
        )


class Backward(NamedTuple):
    """The arguments of ``attn_backward``."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor | None
    k: Tensor | None
    v: Tensor
    out: Tensor
    lse: Tensor
    q_codes: Tensor
    k_codes: Tensor
    q_scale: Tensor
    k_scale: Tensor
    q_mean: Tensor
    k_mean: Tensor
    scale: float | None
    is_causal: bool
    policy: str
    key_lengths: Tensor | None = None
    window_left: int = -1
    window_right: int = -1

    def check(self) -> None:
        """Raises what is wrong with the arguments, or is not implemented on their device."""
        more = extras(self.window_left, self.window_right, key_lengths=self.key_lengths)
        check_backward(self.v, self.is_causal, self.policy, more)
        check_gradient(self.dout, self.out, self.q, self.k, self.policy)

    def compute(self) -> Gradients:
        """The reference numerics."""
        return sage_backward(
            self.dout,
            self.dlse,
            self.out if self.q is None else self.q,
            self.v if self.k is None else self.k,
            self.v,
            self.out,
            self.lse,
            Saved(self.q_codes, self.k_codes, self.q_scale, self.k_scale, self.q_mean, self.k_mean),
            scale=default_scale(self.out, self.scale),
            causal=self.is_causal,
            policy=resolve(self.policy),
            window=window_of(self.window_left, self.window_right),
            key_lengths=self.key_lengths,
        )


def check_gradient(
    dout: Tensor, out: Tensor, q: Tensor | None, k: Tensor | None, policy: str
) -> None:
    """Raises if a backward lacks something, or its dout is not the gradient of out."""
    if dout.shape != out.shape:
        raise ShapeError(
            f"sage.attn_backward: dout {tuple(dout.shape)} must have the shape of out "
            f"{tuple(out.shape)}"
        )
    mix = resolve(policy)
    if (q is None and not mix.saves_q_codes) or (k is None and not mix.saves_k_codes):
        raise ShapeError(
            f"sage.attn_backward: policy {policy!r} does not save codes of q and k: pass q and k"
        )


def _dense_like(x: Tensor) -> Tensor:
    """A new dense tensor with the shape of x and its order of heads and tokens in memory.

    Not ``empty_like``: fake and real tensors differ there on the strides of dimensions of size 1.
    """
    b, h, s, d = x.shape
    bshd = 0 < x.stride(1) < x.stride(2)
    strides = (s * h * d, d, h * d, 1) if bshd else (h * s * d, s * d, d, 1)
    return x.new_empty_strided((b, h, s, d), strides)


def new_saved(q: Tensor, shapes: dict[str, tuple[int, ...]]) -> Saved:
    """Tensors to save, not filled."""
    return Saved(
        **{
            name: empty_codes(q, shape)
            if "codes" in name
            else q.new_empty(shape, dtype=torch.float32)
            for name, shape in shapes.items()
        }
    )


def _fill(outputs: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for output, value in zip(outputs, values, strict=True):
        output.copy_(value)


def fwd_fake(*inputs: Any) -> tuple[Tensor, ...]:
    """Outputs of ``attn_fwd``, not computed."""
    x = Forward(*inputs)
    x.check()
    q, k = x.q, x.k
    saved = new_saved(q, saved_shapes(q.shape, k.shape, resolve(x.policy)))
    return _dense_like(q), q.new_empty(q.shape[:3], dtype=torch.float32), *saved


def infer_fake(*inputs: Any) -> Tensors3:
    """Outputs of ``attn_infer``, not computed."""
    x = Forward(*inputs)
    x.check()
    q, k = x.q, x.k
    head_dim = k.shape[3] if resolve(x.policy).smooth_k else 0  # as saved_shapes has it
    return (
        _dense_like(q),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty((*k.shape[:2], head_dim), dtype=torch.float32),
    )


def backward_fake(*inputs: Any) -> Tensors3:
    """Outputs of ``attn_backward``, not computed."""
    x = Backward(*inputs)
    x.check()
    return _dense_like(x.out), _dense_like(x.v), _dense_like(x.v)


def register(
    name: str,
    fakes: tuple[Callable[..., tuple[Tensor, ...]], ...],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
) -> None:
    """Registers the three ops of one layout: their fake rules, and the reference on the CPU.

    Args:
        name: that the ops' begin with.
        fakes: of ``_fwd``, ``_infer`` and ``_backward``; they check and allocate.
        forward: the arguments of the first two, with a ``compute``.
        backward: those of the last.
    """
    fwd_fake, infer_fake, backward_fake = fakes

    def fwd(*inputs: Any) -> tuple[Tensor, ...]:
        outputs = fwd_fake(*inputs)
        out, lse, saved = forward(*inputs).compute()
        _fill(outputs, (out, lse, *saved))
        return outputs

    def infer(*inputs: Any) -> tuple[Tensor, ...]:
        outputs = infer_fake(*inputs)
        out, lse, saved = forward(*inputs).compute()
        _fill(outputs, (out, lse, saved.k_mean))
        return outputs

    def gradients(*inputs: Any) -> tuple[Tensor, ...]:
        outputs = backward_fake(*inputs)
        _fill(outputs, backward(*inputs).compute())
        return outputs

    bodies = {"fwd": fwd, "infer": infer, "backward": gradients}
    for fake, (suffix, body) in zip(fakes, bodies.items(), strict=True):
        torch.library.register_fake(f"{NAMESPACE}::{name}_{suffix}", fake, lib=LIB)
        LIB.impl(f"{name}_{suffix}", body, "CPU")


register("attn", (fwd_fake, infer_fake, backward_fake), Forward, Backward)
