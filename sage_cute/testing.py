"""Inputs like those of trained models, and attention's results on them: for tests and benchmarks.

>>> x = make_inputs("sink", (1, 8, 512, 64), kv_heads=2)
>>> relative_errors(run_attention(x, policy="fast"), run_reference(x))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_cute.api import attention
from sage_cute.numerics import attention_reference, attention_reference_backward, rel_l2
from sage_cute.numerics.visibility import EVERYTHING, Window
from sage_cute.policies import PRODUCTS

TENSORS = ("out", "dv", "dq", "dk")
"""What accuracy is stated for, in the order of the tables."""


class Inputs(NamedTuple):
    """q and dout (batch, heads, seqlen_q, head_dim), k and v (batch, kv_heads, seqlen_k, ...)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def to(self, *args: Any, **kwargs: Any) -> Inputs:
        """Each tensor's ``to``."""
        return Inputs(*(x.to(*args, **kwargs) for x in self))


class Result(NamedTuple):
    """Output, natural-log LSE of the original K, and the gradients of q, k and v."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def run_attention(
    x: Inputs,
    *,
    policy: str = "default",
    causal: bool = False,
    window: Window = EVERYTHING,
    key_lengths: Tensor | None = None,
    k_mean: Tensor | None = None,
    scale: float | None = None,
    dlse: Tensor | None = None,
) -> Result:
    """Forward and backward through the public op.

    Args:
        x: inputs; left untouched, without gradients.
        policy: policy string.
        causal: bottom-right causal mask.
        window: (left, right) of :func:`sage_cute.attention`.
        key_lengths: (batch,), the keys that are there; None: all.
        k_mean: (batch, kv_heads, head_dim), what K smoothing subtracts; None: the mean of k.
        scale: softmax scale; None: head_dim ** -0.5.
        dlse: (batch, heads, seqlen_q), the gradient of the LSE, or None.
    """
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    out, lse = attention(
        q,
        k,
        v,
        causal=causal,
        window=window,
        key_lengths=key_lengths,
        k_mean=k_mean,
        scale=scale,
        policy=policy,
        return_lse=True,
    )
    outputs, grads = ([out], [x.dout]) if dlse is None else ([out, lse], [x.dout, dlse])
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    return Result(out.detach(), lse.detach(), dq, dk, dv)


def run_reference(
    x: Inputs,
    *,
    causal: bool = False,
    window: Window = EVERYTHING,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
    dlse: Tensor | None = None,
) -> Result:
    """The truth for the same inputs, float64."""
    forward = attention_reference(
        x.q, x.k, x.v, scale=scale, causal=causal, window=window, key_lengths=key_lengths
    )
    grads, _ = attention_reference_backward(
        x.dout,
        x.q,
        x.k,
        x.v,
        dlse=dlse,
        scale=scale,
        causal=causal,
        window=window,
        key_lengths=key_lengths,
    )
    return Result(*forward, *grads)


def relative_errors(result: Result, truth: Result) -> dict[str, float]:
    """|result - truth| / |truth| of out, dv, dq and dk."""
    pairs = {name: (getattr(result, name), getattr(truth, name)) for name in TENSORS}
    return {name: rel_l2(*pair) for name, pair in pairs.items()}


POLICY_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(PRODUCTS, ("int8", "16bit")),
    "block_q": (128, 64, 32),
    "block_k": (64, 128, 48),
    "bwd_block_q": (128, 64),
    "bwd_block_k": (64, 128, 32),
    "q_scale": ("per_block", "per_token"),
    "k_scale": ("per_block", "per_token"),
    "v_scale": ("per_block", "per_token", "per_channel"),
    "p_max": (127, 255),
    "p_scale": ("per_block", "bounded"),
    "p_bwd_scale": ("per_tile", "per_key"),
    "ds_dk_scale": ("per_tile", "per_key"),
    "ds_dq_rows": (0, 1, 8, 16, 64),
    "do_scale": ("per_block", "per_token"),
    "transposed_scale": ("per_block", "per_channel"),
    "dp_v": ("exact", "dequantized"),
    "smooth_k": (True, False),
    "smooth_q": (False, True),
    "smooth_v": (False, True),
}
"""Values of every field of :class:`sage_cute.policies.Policy` to draw mixes from; not every
combination is valid."""


# Input classes

INPUT_CLASSES: dict[str, str] = {"g1": "normal; gN: Q and K with a standard deviation of N"}
"""What :func:`make_inputs` makes, and what is special about each."""


class _Draw:
    """Normal q, k, v and dout, float32, for a maker to change in place.

    q and k have the tokens of the same n positions, the last of which are cut out at the end, so
    that position i of one belongs to position i of the other also for seqlen_q != seqlen_k.
    """

    def __init__(self, shape: tuple[int, int, int, int], kv_heads: int, n: int, seed: int) -> None:
        self.batch, self.heads, seqlen_q, self.head_dim = shape
        self.kv_heads, self.n = kv_heads, n
        self.generator = torch.Generator().manual_seed(seed)
        self.q, self.dout = self.normal(self.heads, n), self.normal(self.heads, n)
        self.k, self.v = self.normal(kv_heads, n), self.normal(kv_heads, n)

    def normal(self, heads: int, tokens: int, dim: int | None = None) -> Tensor:
        size = (self.batch, heads, tokens, self.head_dim if dim is None else dim)
        return torch.randn(size, generator=self.generator)

    def for_queries(self, x: Tensor) -> Tensor:
        """Something of each key head, for its query heads."""
        return x.repeat_interleave(self.heads // max(self.kv_heads, 1), 1)

    def of_first_query_head(self, x: Tensor) -> Tensor:
        """Something of each query head, for the key head: its first query head's."""
        return x[:, :: self.heads // max(self.kv_heads, 1)] if self.kv_heads else x

    def outlier_channels(self, heads: int, one_in: int, low: float, high: float) -> Tensor:
        """(batch, heads, 1, head_dim): +-[low, high] in one of ``one_in`` channels, else 0."""
        count = max(self.head_dim // one_in, 1)
        where = torch.randperm(self.head_dim, generator=self.generator)[:count]
        size = low + (high - low) * torch.rand(count, generator=self.generator)
        bias = torch.zeros(self.batch, heads, 1, self.head_dim)
        bias[..., where] = size * self.normal(heads, 1, count).sign()
        return bias

    def low_rank(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Latents of q (batch, heads, n, rank) and k, and the basis that they share."""
        basis = self.normal(self.kv_heads, rank) / math.sqrt(rank)
        zq, zk = (self.normal(heads, self.n, rank) for heads in (self.heads, self.kv_heads))
        return zq, zk, basis


def make_inputs(
    kind: str,
    shape: tuple[int, int, int, int],
    *,
    kv_heads: int | None = None,
    seqlen_k: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Inputs of a class of :data:`INPUT_CLASSES`, the same on every device.

    Args:
        kind: a name of :data:`INPUT_CLASSES`, or ``"gN"`` with a number N.
        shape: (batch, heads, seqlen_q, head_dim).
        kv_heads: heads of k and v; None: as many as q has.
        seqlen_k: None: seqlen_q. Queries and keys are the last ones of the same sequence.
        dtype: of all four, rounded to from float32.
        device: where to put them.
        seed: of the generator.
    """
    batch, heads, seqlen_q, head_dim = shape
    kv_heads = heads if kv_heads is None else kv_heads
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    draw = _Draw(shape, kv_heads, max(seqlen_q, seqlen_k), seed)
    first_key = draw.n - seqlen_k
    if kind in _MAKERS:
        _MAKERS[kind](draw, first_key)
    elif re.fullmatch(r"g\d+(\.\d+)?", kind):
        sigma = float(kind[1:])
        draw.q *= sigma
        draw.k *= sigma
    else:
        raise ValueError(f"input class {kind!r}; known: {', '.join(INPUT_CLASSES)}")
    first_query = draw.n - seqlen_q
    queries = (x[..., first_query:, :].contiguous() for x in (draw.q, draw.dout))
    keys = (x[..., first_key:, :].contiguous() for x in (draw.k, draw.v))
    (q, dout), (k, v) = queries, keys
    return Inputs(q, k, v, dout).to(device, dtype)


_MAKERS: dict[str, Callable[[_Draw, int], None]] = {}


def _input_class(name: str) -> Callable[[Callable[[_Draw, int], None]], None]:
    def register(maker: Callable[[_Draw, int], None]) -> None:
        _MAKERS[name], INPUT_CLASSES[name] = maker, (maker.__doc__ or "").strip()

    return register


def _rms_norm(x: Tensor) -> Tensor:
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()


def _log(n: int) -> float:
    return math.log(max(n, 1))


@_input_class("qkn")
def _qk_norm(x: _Draw, first_key: int) -> None:
    """QK-norm: RMS-normalized Q and K."""
    x.q, x.k = _rms_norm(x.q), _rms_norm(x.k)


@_input_class("qlr")
def _qk_norm_low_rank(x: _Draw, first_key: int) -> None:
    """QK-norm with low-rank structure: peaked attention, bounded scores."""
    zq, zk, basis = x.low_rank(8)
    zk = 0.5 * zk + 0.5 * x.of_first_query_head(zq).roll(1, 2)
    x.q = _rms_norm(zq @ x.for_queries(basis) + 0.5 * x.q)
    x.k = _rms_norm(zk @ basis + 0.5 * x.k)


def _add_sink(x: _Draw, first_key: int, logit: float) -> None:
    direction = torch.nn.functional.normalize(x.normal(x.kv_heads, 1), dim=-1)
    x.q += 4 * x.for_queries(direction)
    x.k[..., first_key : first_key + 1, :] = direction * (logit * math.sqrt(x.head_dim) / 4)


@_input_class("sink")
def _sink(x: _Draw, first_key: int) -> None:
    """Attention sink: key 0 takes most of the mass, and its value is small."""
    _add_sink(x, first_key, _log(x.n) + 2)
    x.v[..., first_key : first_key + 1, :] *= 0.05


@_input_class("sinkv1")
def _sink_ordinary_value(x: _Draw, first_key: int) -> None:
    """Attention sink with a value of ordinary size."""
    _add_sink(x, first_key, _log(x.n) + 3)


@_input_class("diag")
def _diagonal(x: _Draw, first_key: int) -> None:
    """Queries attend mostly to their own position."""
    own = x.of_first_query_head(x.q)
    x.k = 0.6 * x.k + (_log(x.n) + 2) / math.sqrt(x.head_dim) * own


@_input_class("llm")
def _language_model(x: _Draw, first_key: int) -> None:
    """QK-norm with gains, biased channels, a sink, V outliers, heavy-tailed dO."""
    zq, zk, basis = x.low_rank(16)
    zk = 0.6 * zk + 0.6 * x.of_first_query_head(zq)
    x.q = _rms_norm(zq @ x.for_queries(basis) + 0.7 * x.q)
    x.k = _rms_norm(zk @ basis + 0.7 * x.k)
    x.q *= x.for_queries((0.4 * x.normal(x.kv_heads, 1)).exp())
    x.k *= (0.4 * x.normal(x.kv_heads, 1)).exp()
    bias = x.outlier_channels(x.kv_heads, 16, 8, 8)
    q_bias = bias.abs().div(4) * x.normal(x.kv_heads, 1).sign()
    x.q += x.for_queries(q_bias)
    x.k += bias
    length = q_bias.norm(dim=-1, keepdim=True)
    towards_q = q_bias / length**2 * ((_log(x.n) + 1) * math.sqrt(x.head_dim))
    x.k[..., first_key : first_key + 1, :] = bias + towards_q
    x.v *= (0.5 * x.normal(x.kv_heads, x.n, 1)).exp() * (0.5 * x.normal(x.kv_heads, 1)).exp()
    x.v += 0.5 * x.normal(x.kv_heads, 1)
    x.v[..., first_key : first_key + 1, :] *= 0.05
    x.dout *= x.normal(x.heads, x.n, 1).exp() * (0.5 * x.normal(x.heads, 1)).exp()


@_input_class("kb")
def _k_bias(x: _Draw, first_key: int) -> None:
    """Every channel of K has an offset of 10 to 20 times its spread."""
    x.k += x.outlier_channels(x.kv_heads, 1, 10, 20)


@_input_class("qb")
def _q_bias(x: _Draw, first_key: int) -> None:
    """One channel of Q in eight has an offset of 5 to 10 times its spread."""
    x.q += x.outlier_channels(x.heads, 8, 5, 10)


@_input_class("dotok")
def _dout_tokens(x: _Draw, first_key: int) -> None:
    """The scale of dO varies over tokens by e^(1.5 normal)."""
    x.dout *= (1.5 * x.normal(x.heads, x.n, 1)).exp()


@_input_class("dochan")
def _dout_channels(x: _Draw, first_key: int) -> None:
    """The scale of dO varies over channels by e^normal."""
    x.dout *= x.normal(x.heads, 1).exp()


@_input_class("vm")
def _v_mean(x: _Draw, first_key: int) -> None:
    """Every channel of V has an offset of 3 times a normal."""
    x.v += 3 * x.normal(x.kv_heads, 1)


@_input_class("vch")
def _v_channels(x: _Draw, first_key: int) -> None:
    """V's scale varies over channels by e^normal."""
    x.v *= x.normal(x.kv_heads, 1).exp()
