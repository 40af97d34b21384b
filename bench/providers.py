"""Attention implementations side by side: ours, and every one that a user could pick instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_cute
from bench.shapes import Shape
from sage_cute.policies import resolve
from sage_cute.testing import Inputs

Run = Callable[[Inputs], Any]


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation.

    ``attend(x, shape)`` returns the output (batch, heads, seqlen, head_dim), differentiable where
    ``trains``. ``prepare`` may instead turn an input set into a callable once, outside the timing;
    then what the callable does alone is timed.
    """

    name: str
    attend: Callable[[Inputs, Shape], Tensor]
    policy: str | None = None
    quant_included: bool = True
    trains: bool = True
    windows: bool = False
    why_not: str = ""  # it cannot run here at all: why
    prepare: Callable[[Inputs, Shape], Callable[[], Tensor]] | None = None


def _sage(policy: str) -> Provider:
    def attend(x: Inputs, shape: Shape) -> Tensor:
        return sage_cute.attention(
            x.q, x.k, x.v, causal=shape.causal, window=(shape.window, None), policy=policy
        )

    return Provider("sage-cute", attend, policy=policy, windows=True)


def _sage_kernel(policy: str, device: str) -> Provider:
    """The attention kernel alone, on inputs that are quantized outside the timing."""

    def prepare(x: Inputs, shape: Shape) -> Callable[[], Tensor]:
        from sage_cute.compile.launch import V_SCALE_FORM, forward
        from sage_cute.compile.quant_launch import output_shapes, quant_spec, quantize
        from sage_cute.compile.tensors import new_tensors

        mix = resolve(policy)
        spec = quant_spec(mix, x.q.dtype, shape.head_dim, V_SCALE_FORM)
        buffers = new_tensors(x.q, output_shapes(spec, x.q.shape, x.k.shape))
        quantize(x.q, x.k, x.v, policy=mix, v_scale_form=V_SCALE_FORM, **buffers)
        out, lse = torch.empty_like(x.q), x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
        names = ("q_codes", "q_scale", "k_codes", "k_scale", "v_t", "v_scale")
        operands = [buffers[name] for name in names]
        scale = shape.head_dim**-0.5

        def run() -> Tensor:
            forward(
                *operands,
                out,
                lse,
                scale=scale,
                is_causal=shape.causal,
                window=(shape.window, None),
                policy=mix,
            )
            return out

        return run

    missing = "needs a CUDA GPU" if device == "cpu" else ""
    return Provider(
        "sage-cute",
        lambda x, shape: prepare(x, shape)(),
        policy=policy,
        quant_included=False,
        trains=False,
        windows=True,
        why_not=missing,
        prepare=prepare,
    )


def _sdpa(name: str, backend: SDPBackend, device: str) -> Provider:
    def attend(x: Inputs, shape: Shape) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                x.q, x.k, x.v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
            )

    missing = "needs a CUDA GPU" if device == "cpu" and backend != SDPBackend.MATH else ""
    return Provider(name, attend, why_not=missing)


def _flash_attention_4() -> Provider:
    try:
        from flash_attn.cute.interface import flash_attn_func
    except Exception as error:
        return Provider("FlashAttention-4", _absent, why_not=f"not importable: {error}")

    def attend(x: Inputs, shape: Shape) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        out = flash_attn_func(q, k, v, causal=shape.causal, window_size=(shape.window, None))
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Provider("FlashAttention-4", attend, windows=True)


def _sage_attention_1() -> Provider:
    try:
        from sageattention import sageattn
    except Exception as error:
        return Provider("SageAttention 1.0.6", _absent, why_not=f"not importable: {error}")

    def attend(x: Inputs, shape: Shape) -> Tensor:
        # Its smoothing writes into K: a copy for it, under 1 % of its time.
        return sageattn(x.q, x.k.clone(), x.v, tensor_layout="HND", is_causal=shape.causal)

    return Provider("SageAttention 1.0.6", attend, trains=False)


def _absent(x: Inputs, shape: Shape) -> Tensor:
    raise RuntimeError("not available")


def providers(policies: list[str], device: str) -> list[Provider]:
    """Ours for each policy, then the others; those that cannot run say why."""
    others = [
        _sdpa("SDPA FlashAttention-2", SDPBackend.FLASH_ATTENTION, device),
        _sdpa("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION, device),
        _flash_attention_4(),
        _sage_attention_1(),
    ]
    if device == "cpu":
        others.append(_sdpa("SDPA math", SDPBackend.MATH, device))
    alone = [_sage_kernel(policy, device) for policy in policies]
    return [*map(_sage, policies), *alone, *others]
