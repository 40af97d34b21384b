"""Launches the forward kernel on CUDA tensors: nothing is allocated, nothing waits."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from sage_cute.compile.compiler import compiled
from sage_cute.compile.plan import CompilePlan, fwd_plan
from sage_cute.compile.tensors import DTYPES, LOG2_E, check_output, code_rows, num_sms
from sage_cute.compile.visibility import EVERYTHING, Layout, Packed, Static, Visibility, Window
from sage_cute.config import AttnProblem, FwdTileConfig, Status
from sage_cute.config.problem import Lengths
from sage_cute.errors import DTypeError, ShapeError, UnsupportedError
from sage_cute.limits import HOPPER

if TYPE_CHECKING:
    from sage_cute.policies import Policy

V_SCALE_FORM: Final = "scale"
"""What ``v_scale`` holds, per token too: the dequantization multiplier itself."""


def supports(
    policy: Policy,
    *,
    head_dim: int,
    dtype: torch.dtype,
    is_causal: bool,
    window: bool = False,
    lengths: Lengths = "dense",
) -> Status:
    """Whether a forward kernel exists for a call; the reason if not."""
    try:
        _plan(policy, head_dim, dtype, Static(is_causal and not window, window, lengths), None)
    except (UnsupportedError, DTypeError) as error:
        return Status(False, str(error))
    return Status(True)


def forward(
    q_codes: Tensor,
    q_scale: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    v_t: Tensor,
    v_scale: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    is_causal: bool,
    policy: Policy,
    window: Window = EVERYTHING,
    key_lengths: Tensor | None = None,
    packed: Packed | None = None,
    config: FwdTileConfig | None = None,
) -> None:
    """Attention of quantized tensors into ``out`` and ``lse``.

    A packed batch comes as tensors of batch 1 that hold all tokens; scales of blocks and padded
    keys lie as ``templates.blocks.seqlen`` says, and tokens of no sequence are not written.

    Args:
        q_codes: int8 (batch, heads, seqlen_q, head_dim), head_dim contiguous and rows on 16 bytes
            (else a copy is made).
        q_scale: float32, one a query or one for ``block_q`` queries.
        k_codes: int8 (batch, kv_heads, seqlen_k, head_dim), likewise, of the smoothed K.
        k_scale: float32, one for ``block_k`` keys.
        v_t: uint8 (batch, kv_heads, head_dim, seqlen_k padded to 128): 128 + code, keys permuted
            within 16.
        v_scale: float32, one a padded key or one for ``block_k`` keys.
        out: (batch, heads, seqlen_q, head_dim), bfloat16 or float16, head_dim contiguous, rows on
            16 bytes.
        lse: float32 (batch, heads, seqlen_q), contiguous: natural log, of the smoothed K.
        scale: softmax scale, any number.
        is_causal: query i sees key j iff j <= i + seqlen_k - seqlen_q.
        policy: the mix.
        window: (left, right): query i sees keys from i + seqlen_k - seqlen_q - left to ... + right;
            None: no bound. Both at least 0.
        key_lengths: int32 (batch,): keys from there on do not count; None: all do.
        packed: offsets of a packed batch; None: a dense or padded one.
        config: a tile configuration; default: the one for this problem.

    Raises:
        UnsupportedError: no kernel covers the policy, the head_dim or the layout.
    """
    head_dim, seqlen_k = q_codes.shape[3], k_codes.shape[2]
    sight = Visibility(is_causal, window, key_lengths, packed)
    plan = _plan(policy, head_dim, out.dtype, sight.static, config)
    sight.check(q_codes.shape[0], out.device)
    _check(plan.problem, packed, q_codes, q_scale, k_codes, k_scale, v_t, v_scale, out, lse)
    if out.numel() == 0:
        return
    if seqlen_k == 0 or (packed is not None and packed.is_empty):
        out.zero_()
        lse.fill_(-math.inf)
        return
    q_codes, k_codes = code_rows(q_codes), code_rows(k_codes)
    num_ctas = num_sms(out.device.index) if plan.config.persistent else 1
    compiled(plan)(
        q_codes,
        q_scale,
        k_codes,
        k_scale,
        v_t,
        v_scale,
        out,
        lse,
        scale * LOG2_E,
        num_ctas,
        *sight.bounds(),
        *sight.offsets(),
        packed and packed.max_q,
    )


@functools.lru_cache(maxsize=1024)
def _plan(
    policy: Policy,
    head_dim: int,
    dtype: torch.dtype,
    static: Static,
    config: FwdTileConfig | None,
) -> CompilePlan:
    if dtype not in DTYPES:
        raise DTypeError(f"the forward kernel writes bfloat16 or float16, not {dtype}: cast first")
    if reason := HOPPER.why_not_policy("forward", policy):
        raise UnsupportedError(reason)
    problem = AttnProblem.of(
        policy,
        head_dim=head_dim,
        dtype=DTYPES[dtype],
        **static._asdict(),
    )
    return fwd_plan(problem, config)


def _check(
    problem: AttnProblem,
    packed: Packed | None,
    q_codes: Tensor,
    q_scale: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    v_t: Tensor,
    v_scale: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    shapes = _shapes(problem, q_codes.shape, k_codes.shape, packed and packed.sequences)
    tensors = k_codes, q_scale, k_scale, v_t, v_scale, out, lse
    for (name, shape), x in zip(shapes.items(), tensors, strict=True):
        if x.shape != shape:
            raise ShapeError(f"{name} is {tuple(x.shape)}: expected {shape}")
        if name not in ("out", "k_codes") and not x.is_contiguous():
            raise UnsupportedError(f"{name} is not contiguous: the kernel's inputs must be")
    check_output("out", out)


@functools.lru_cache(maxsize=1024)
def _shapes(
    problem: AttnProblem, q_shape: tuple[int, ...], k_shape: tuple[int, ...], sequences: int | None
) -> dict[str, tuple[int, ...]]:
    """Of the other tensors of a launch."""
    batch, heads, seqlen_q, head_dim = q_shape
    kv_heads, seqlen_k = k_shape[1:3]
    if heads % kv_heads if kv_heads else heads:
        raise ShapeError(f"{heads} query heads for {kv_heads} key heads: not a multiple")
    queries, keys = Layout(seqlen_q, sequences), Layout(seqlen_k, sequences)
    padded, groups = keys.padded(), keys.groups(problem.block_k)
    return {
        "k_codes": (batch, kv_heads, seqlen_k, head_dim),
        "q_scale": (batch, heads, queries.groups(problem.block_q)),
        "k_scale": (batch, kv_heads, groups),
        "v_t": (batch, kv_heads, head_dim, padded),
        "v_scale": (batch, kv_heads, padded if problem.v_scale == "per_token" else groups),
        "out": (batch, heads, seqlen_q, head_dim),
        "lse": (batch, heads, seqlen_q),
    }
