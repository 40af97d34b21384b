"""Launches the backward on CUDA tensors: preprocess, dK and dV, dQ.

Nothing waits. Allocated is the workspace of :func:`workspace_shapes` and nothing else, with
``torch.empty`` from PyTorch's caching allocator; the launches go to PyTorch's current stream.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sage_cute.compile import compiler
from sage_cute.compile.tensors import (
    DTYPES,
    LOG2_E,
    check_output,
    code_rows,
    new_tensors,
    num_sms,
    readable,
)
from sage_cute.compile.visibility import (
    EVERYTHING,
    Layout,
    Packed,
    Static,
    Visibility,
    Window,
    numbers,
    vectors,
)
from sage_cute.config import ARCHS, Arch, Status
from sage_cute.config.bwd import (
    ROW_TILE,
    TILE_K,
    BwdProblem,
    BwdTileConfig,
    default_bwd_config,
    supports_bwd,
)
from sage_cute.config.problem import Lengths
from sage_cute.errors import DTypeError, ShapeError, UnsupportedError
from sage_cute.limits import HOPPER

if TYPE_CHECKING:
    from sage_cute.policies import Policy


WORKSPACE = (
    "q_hat",
    "k_hat",
    "dout8",
    "stats",
    "v_hat",
    "v_scale",
    "q_t",
    "q_t_scale",
    "k_t",
    "k_t_scale",
    "dout_t",
    "dout_t_scale",
    "dout_copy",
)
"""Tensors that the preprocess writes, in the order of its arguments; no policy needs all."""


@dataclasses.dataclass(frozen=True)
class BwdPlan:
    """Everything that the backward kernels are compiled from: hashable, the key of the cache."""

    problem: BwdProblem
    config: BwdTileConfig
    arch: Arch
    # Of concern to the preprocess only:
    block_q: int = 1  # queries per scale of Q
    has_dlse: bool = False
    per_channel: bool = False  # whether Q^T, K^T and dO^T have a scale a channel, or a block

    def attention(self) -> BwdPlan:
        """What the attention kernels depend on."""
        return _attention(self)


@functools.lru_cache(maxsize=1024)
def _attention(plan: BwdPlan) -> BwdPlan:
    return dataclasses.replace(plan, block_q=1, has_dlse=False, per_channel=False)


def bwd_plan(
    problem: BwdProblem,
    config: BwdTileConfig | None = None,
    arch: Arch = ARCHS["sm_90a"],
    *,
    block_q: int = 1,
    per_channel: bool = False,
) -> BwdPlan:
    """The plan for a problem, with the default configuration unless one is given.

    Raises:
        UnsupportedError: the configuration cannot run; the message says why.
    """
    config = config or default_bwd_config(problem)
    if not (status := supports_bwd(problem, config, arch)):
        raise UnsupportedError(status.reason)
    return BwdPlan(problem, config, arch, block_q, per_channel=per_channel)


def supports(
    policy: Policy,
    *,
    head_dim: int,
    dtype: torch.dtype,
    is_causal: bool,
    window: bool = False,
    lengths: Lengths = "dense",
) -> Status:
    """Whether a backward kernel exists for a call; the reason if not."""
    try:
        _plan(policy, head_dim, dtype, Static(is_causal and not window, window, lengths), None)
    except (UnsupportedError, DTypeError) as error:
        return Status(False, str(error))
    return Status(True)


@functools.lru_cache(maxsize=1024)
def workspace_shapes(
    plan: BwdPlan,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    sequences: int | None = None,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the tensors that one backward allocates.

    For a query head and row (a query that sees any key) and head_dim D: 2 D bytes of Q in
    bfloat16 (an INT8 dK: D + 4 D / tile_q), D of dO in INT8 (if dP is), D + 4 D / tile_q more (if
    dV is), 16 of statistics; for a key, 2 D of K in bfloat16 (an INT8 dQ: D + D / 16), and of V
    D + 4 in INT8 (if dP is) or 2 D dequantized (if dP takes it so). Statistics and the transposed
    copies of INT8 products are padded to 128 tokens. A ragged problem (a window, key lengths, a
    packed batch) has 2 D more a query, of dO, where a product of it is in 16 bit, and all of a
    packed batch of ``sequences`` is padded, each to 128 tokens.
    """
    batch, heads, seqlen_q, d = q_shape
    kv_heads, seqlen_k = k_shape[1:3]
    p = plan.problem
    rows = min(seqlen_q, seqlen_k) if p.is_causal and not p.ragged else seqlen_q
    padded, padded_k = (Layout(n, sequences).padded(ROW_TILE) for n in (rows, seqlen_k))
    if sequences is not None:
        rows, seqlen_k = padded, padded_k
    queries, keys = (batch, heads, rows, d), (batch, kv_heads, seqlen_k, d)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "stats": ((batch, heads, padded, 4), torch.float32),
    }

    def transposed(name: str, of: int, tokens: int, block: int) -> None:
        shapes[name] = (batch, of, d, tokens), torch.int8
        shapes[name + "_scale"] = (batch, of, tokens // block, d), torch.float32

    if p.dk_keys:
        transposed("q_t", heads, padded, p.tile_q)
    else:
        shapes["q_hat"] = queries, torch.bfloat16
    if p.dq_rows:
        transposed("k_t", kv_heads, padded_k, TILE_K)
    else:
        shapes["k_hat"] = keys, torch.bfloat16
    if p.dv_keys:
        transposed("dout_t", heads, padded, p.tile_q)
    if p.dp == "int8":
        shapes["dout8"] = queries, torch.int8
        shapes["v_hat"] = keys, torch.int8
        shapes["v_scale"] = (batch, kv_heads, -(-seqlen_k // p.block_v)), torch.float32
    elif p.block_v:
        shapes["v_hat"] = keys, torch.bfloat16 if p.dtype == "bfloat16" else torch.float16
    if p.copies_dout:
        shapes["dout_copy"] = queries, torch.bfloat16 if p.dtype == "bfloat16" else torch.float16
    return shapes


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_codes: Tensor,
    k_codes: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    scale: float,
    is_causal: bool,
    policy: Policy,
    window: Window = EVERYTHING,
    key_lengths: Tensor | None = None,
    packed: Packed | None = None,
    config: BwdTileConfig | None = None,
) -> None:
    """Gradients of INT8 attention into ``dq``, ``dk`` and ``dv``.

    A packed batch comes as tensors of batch 1 that hold all tokens; gradients of tokens of no
    sequence are not written.

    As :func:`sage_cute.numerics.backward.sage_backward` of the same policy on the same codes. The
    bits are the same every time: no sum runs across CTAs.

    Args:
        dout: (batch, heads, seqlen_q, head_dim), bfloat16 or float16. Any strides; if head_dim is
            not contiguous or rows do not start on 16 bytes, a contiguous copy is made.
        dlse: float32 (batch, heads, seqlen_q), the gradient of ``lse``, or None.
        v: (batch, kv_heads, seqlen_k, head_dim), the forward's; strides as of ``dout``.
        out: the forward's output, like ``dout``.
        lse: float32 (batch, heads, seqlen_q): natural log, of the smoothed K.
        q_codes: int8 (batch, heads, seqlen_q, head_dim), head_dim contiguous and rows on 16 bytes
            (else a copy is made).
        k_codes: int8 (batch, kv_heads, seqlen_k, head_dim), likewise, of the smoothed K.
        q_scale: float32, one a query or one for ``block_q`` queries, contiguous like the rest.
        k_scale: float32, one a key or one for ``block_k`` keys.
        dq: like ``dout``, head_dim contiguous, rows on 16 bytes; overwritten.
        dk: like ``v``, likewise.
        dv: like ``v``, likewise.
        scale: softmax scale, any number.
        is_causal: query i sees key j iff j <= i + seqlen_k - seqlen_q.
        policy: the mix.
        window: the forward's (``launch.forward``), like the next two.
        key_lengths: int32 (batch,).
        packed: offsets of a packed batch.
        config: a tile configuration; default: the one for this problem.

    Raises:
        UnsupportedError: no kernel covers the policy, the head_dim or the layout.
    """
    sight = Visibility(is_causal, window, key_lengths, packed)
    plan = _plan(policy, q_codes.shape[-1], dout.dtype, sight.static, config)
    sight.check(q_codes.shape[0], dout.device)
    _check(plan, packed, dout, dlse, v, out, lse, q_codes, k_codes, q_scale, k_scale, dq, dk, dv)
    seqlen_q, seqlen_k = q_codes.shape[2], k_codes.shape[2]
    empty = packed is not None and packed.is_empty
    if q_codes.numel() == 0 or k_codes.numel() == 0 or empty:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    causal = plan.problem.is_causal and not plan.problem.ragged
    if causal and seqlen_q > seqlen_k:  # the first queries see no key
        dq[:, :, : seqlen_q - seqlen_k].zero_()
    num_sms(dout.device.index)  # raises on a GPU without kernels
    dout, out, v = (readable(x, expanded=False) for x in (dout, out, v))  # for TMA
    q_codes, k_codes = code_rows(q_codes), code_rows(k_codes)
    dlse = None if dlse is None else dlse.contiguous()
    sizes = q_codes.shape, k_codes.shape
    shapes = workspace_shapes(plan, *sizes, packed and packed.sequences)
    found = new_tensors(dout, shapes)
    w = {name: found.get(name) for name in WORKSPACE}
    plan = plan if dlse is None else dataclasses.replace(plan, has_dlse=True)
    compiled_preprocess(plan)(
        dout,
        out,
        lse,
        dlse,
        q_codes,
        q_scale,
        k_codes,
        k_scale,
        v if plan.problem.block_v else None,
        *w.values(),
        scale * LOG2_E,
        *sight.bounds(),
        *sight.offsets(),
        packed and packed.max_q,
        packed and packed.max_k,
    )
    p = plan.problem
    dout = dout if w["dout_copy"] is None else w["dout_copy"]
    v_dp = v if w["v_hat"] is None else w["v_hat"]
    compiled_keys(plan)(
        q_codes,
        k_codes,
        v_dp,
        w["q_t"] if p.dk_keys else w["q_hat"],
        w["dout_t"] if p.dv_keys else dout,
        dout if p.dv_keys and p.dp == "16bit" else w["dout8"],
        w["stats"],
        k_scale,
        w["v_scale"],
        w["q_t_scale"],
        w["dout_t_scale"],
        dk,
        dv,
        scale,
        *sight.bounds(),
        *sight.offsets(),
        packed and packed.max_k,
    )
    rows = min(seqlen_q, seqlen_k) if causal else seqlen_q
    compiled_queries(plan)(
        q_codes,
        k_codes,
        v_dp,
        w["k_t"] if p.dq_rows else w["k_hat"],
        dout if w["dout8"] is None else w["dout8"],
        w["stats"],
        k_scale,
        w["v_scale"],
        w["k_t_scale"],
        dq,
        rows if packed is None else packed.max_q,
        scale,
        *sight.bounds(),
        *sight.offsets(),
    )


@functools.lru_cache(maxsize=1024)
def _plan(
    policy: Policy,
    head_dim: int,
    dtype: torch.dtype,
    static: Static,
    config: BwdTileConfig | None,
) -> BwdPlan:
    if dtype not in DTYPES:
        raise DTypeError(f"the backward kernel takes bfloat16 or float16, not {dtype}: cast first")
    if reason := HOPPER.why_not_policy("backward", policy):
        raise UnsupportedError(reason)
    problem = BwdProblem.of(
        policy,
        head_dim=head_dim,
        dtype=DTYPES[dtype],
        **static._asdict(),
    )
    block_q = 1 if policy.q_scale == "per_token" else policy.block_q
    # of no effect, hence no key of another kernel, without an INT8 product that asks
    int8 = problem.tile_q or problem.dq_rows
    per_channel = bool(int8) and policy.transposed_scale == "per_channel"
    return bwd_plan(problem, config, block_q=block_q, per_channel=per_channel)


def _check(plan: BwdPlan, packed: Packed | None, *tensors: Any) -> None:
    dout, dlse, v, out, lse, q_codes, k_codes, q_scale, k_scale, dq, dk, dv = tensors
    expected = _expected(plan, q_codes.shape, k_codes.shape, packed and packed.sequences)
    found = dout, out, dq, v, k_codes, dk, dv, lse, q_scale, k_scale, dlse
    for (name, (shape, dtype)), x in zip(expected.items(), found, strict=True):
        if x is None:
            continue  # dlse
        if x.shape != shape:
            raise ShapeError(f"{name} is {tuple(x.shape)}: expected {shape}")
        if x.dtype != (dtype or dout.dtype):
            raise DTypeError(f"{name} is {x.dtype}: expected {dtype or dout.dtype}")
    for name, x in (("q_scale", q_scale), ("k_scale", k_scale), ("lse", lse)):
        if not x.is_contiguous():
            raise UnsupportedError(f"{name} is not contiguous: the kernel's inputs must be")
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv)):
        check_output(name, x)


@functools.lru_cache(maxsize=1024)
def _expected(
    plan: BwdPlan, q_shape: tuple[int, ...], k_shape: tuple[int, ...], sequences: int | None
) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype (None: that of dout) of the other tensors of a launch."""
    batch, heads, seqlen_q, head_dim = q_shape
    kv_heads, seqlen_k = k_shape[1:3]
    if heads % kv_heads if kv_heads else heads:
        raise ShapeError(f"{heads} query heads for {kv_heads} key heads: not a multiple")
    queries, keys = tuple(q_shape), (batch, kv_heads, seqlen_k, head_dim)
    groups_q = Layout(seqlen_q, sequences).groups(plan.block_q)
    groups_k = Layout(seqlen_k, sequences).groups(plan.problem.block_k)
    return {
        **dict.fromkeys(("dout", "out", "dq"), (queries, None)),
        "v": (keys, None),
        "k_codes": (keys, torch.int8),
        **dict.fromkeys(("dk", "dv"), (keys, None)),
        "lse": (queries[:3], torch.float32),
        "q_scale": ((batch, heads, groups_q), torch.float32),
        "k_scale": ((batch, kv_heads, groups_k), torch.float32),
        "dlse": (queries[:3], torch.float32),
    }


def compiled_preprocess(plan: BwdPlan) -> Any:
    """The kernel that runs before attention, compiled at the first call."""
    return compiler.load("bwd_preprocess", plan, _compile_preprocess)


def compiled_keys(plan: BwdPlan) -> Any:
    """The kernel of dK and dV, compiled at the first call."""
    return compiler.load("bwd_keys", plan.attention(), _compile_keys)


def compiled_queries(plan: BwdPlan) -> Any:
    """The kernel of dQ, compiled at the first call."""
    return compiler.load("bwd_queries", plan.attention(), _compile_queries)


class _Fakes:
    """Tensors to compile with: symbolic sizes and strides, the last dimension contiguous."""

    def __init__(self, plan: BwdPlan) -> None:
        os.environ.setdefault("CUTE_DSL_ARCH", plan.arch.name)

        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

        self.cute, self.cutlass, self._make = cute, cutlass, make_fake_tensor
        self.stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[plan.problem.dtype]
        self.dim = plan.problem.head_dim
        self.batch, self.heads, self.kv_heads = (cute.sym_int() for _ in range(3))
        self.seqlen_q, self.seqlen_k, self.rows = (cute.sym_int() for _ in range(3))
        self.problem = plan.problem
        self.packed = plan.problem.lengths == "packed"
        self.key_rows = cute.sym_int() if self.packed else self.seqlen_k

    def tensor(self, element: Any, *shape: Any, divisible: int = 1, align: int = 4) -> Any:
        strides = [self.cute.sym_int64(divisibility=divisible) for _ in shape[1:]]
        return self._make(element, shape, (*strides, 1), assumed_align=align)

    def queries(self, element: Any, tokens: Any = None) -> Any:
        return self._tokens(element, self.heads, self.seqlen_q if tokens is None else tokens)

    def keys(self, element: Any, tokens: Any = None) -> Any:
        return self._tokens(element, self.kv_heads, self.seqlen_k if tokens is None else tokens)

    def values(self, int8: bool) -> Any:
        """V of dP: as given, or made of it."""
        made = self.key_rows if self.problem.block_v else self.seqlen_k
        return self.keys(self.cutlass.Int8 if int8 else self.dtype, made)

    def dout(self) -> Any:
        """DO of a product in 16 bit."""
        return self.queries(self.dtype, self.rows if self.problem.ragged else self.seqlen_q)

    def sight(self) -> tuple[Any, ...]:
        """(left, right, key_lengths, cu_q, cu_k)."""
        return (*numbers(self.problem.window), *vectors(self.problem.lengths))

    def _tokens(self, element: Any, heads: Any, tokens: Any) -> Any:
        divisible = 128 // element.width
        return self.tensor(
            element, self.batch, heads, tokens, self.dim, divisible=divisible, align=16
        )

    def flat(self, element: Any, heads: Any, size: Any = None, align: int = 4) -> Any:
        size = self.cute.sym_int() if size is None else size
        divisible = align * 8 // element.width
        return self.tensor(element, self.batch, heads, size, divisible=divisible, align=align)

    def compile(self, kernel: Any, *arguments: Any) -> Any:
        return self.cute.compile(kernel, *arguments, self.stream, options="--enable-tvm-ffi")

    def transposed(self, heads: Any) -> tuple[Any, Any]:
        """Codes (batch, heads, head_dim, tokens) and scales (batch, heads, blocks, head_dim)."""
        int8, float32 = self.cutlass.Int8, self.cutlass.Float32
        tokens, blocks = self.cute.sym_int(divisibility=ROW_TILE), self.cute.sym_int()
        codes = self.batch, heads, self.dim, tokens
        scales = self.batch, heads, blocks, self.dim
        return (
            self.tensor(int8, *codes, divisible=16, align=16),
            self.tensor(float32, *scales, divisible=4, align=16),
        )

    def stats(self) -> Any:
        float32 = self.cutlass.Float32
        shape = self.batch, self.heads, self.cute.sym_int(), 4
        return self.tensor(float32, *shape, divisible=4, align=16)


def _compile_preprocess(plan: BwdPlan) -> Any:
    f = _Fakes(plan)

    from sage_cute.templates.quant.bwd_prologue import BwdPrologue

    float32, int8, bfloat16 = f.cutlass.Float32, f.cutlass.Int8, f.cutlass.BFloat16
    p = plan.problem
    int8_dp = p.dp == "int8"
    arguments = (
        f.queries(f.dtype),
        f.queries(f.dtype),
        f.flat(float32, f.heads, f.seqlen_q),
        f.flat(float32, f.heads, f.seqlen_q) if plan.has_dlse else None,
        f.queries(int8),
        f.flat(float32, f.heads),
        f.keys(int8),
        f.flat(float32, f.kv_heads),
        f.keys(f.dtype) if p.block_v else None,
        None if p.dk_keys else f.queries(bfloat16, f.rows),
        None if p.dq_rows else f.keys(bfloat16, f.key_rows),
        f.queries(int8, f.rows) if int8_dp else None,
        f.stats(),
        f.values(int8_dp) if p.block_v else None,
        f.flat(float32, f.kv_heads) if int8_dp else None,
        *(f.transposed(f.heads) if p.dk_keys else (None, None)),
        *(f.transposed(f.kv_heads) if p.dq_rows else (None, None)),
        *(f.transposed(f.heads) if p.dv_keys else (None, None)),
        f.dout() if p.copies_dout else None,
    )
    kernel = BwdPrologue(p, plan.block_q, plan.per_channel)
    return f.compile(kernel, *arguments, float32(0.0), *f.sight(), *numbers(f.packed))


def _compile_keys(plan: BwdPlan) -> Any:
    f = _Fakes(plan)

    from sage_cute.templates.sm90.bwd import SageBwdSm90

    float32, int8, bfloat16 = f.cutlass.Float32, f.cutlass.Int8, f.cutlass.BFloat16
    p = plan.problem
    int8_dp = p.dp == "int8"
    q_t = f.transposed(f.heads) if p.dk_keys else (f.queries(bfloat16, f.rows), None)
    dout_t = f.transposed(f.heads) if p.dv_keys else (f.dout(), None)
    dout_dp = f.queries(int8, f.rows) if int8_dp else f.dout() if p.dv_keys else None
    arguments = (
        f.queries(int8),
        f.keys(int8),
        f.values(int8_dp),
        q_t[0],
        dout_t[0],
        dout_dp,
        f.stats(),
        f.flat(float32, f.kv_heads),
        f.flat(float32, f.kv_heads) if int8_dp else None,
        q_t[1],
        dout_t[1],
        f.keys(f.dtype),
        f.keys(f.dtype),
    )
    max_k, _ = numbers(f.packed)
    return f.compile(SageBwdSm90(p, plan.config), *arguments, float32(0.0), *f.sight(), max_k)


def _compile_queries(plan: BwdPlan) -> Any:
    f = _Fakes(plan)

    from sage_cute.templates.sm90.bwd_dq import SageBwdDqSm90

    float32, int8, bfloat16 = f.cutlass.Float32, f.cutlass.Int8, f.cutlass.BFloat16
    p = plan.problem
    int8_dp = p.dp == "int8"
    k_t = f.transposed(f.kv_heads) if p.dq_rows else (f.keys(bfloat16, f.key_rows), None)
    arguments = (
        f.queries(int8),
        f.keys(int8),
        f.values(int8_dp),
        k_t[0],
        f.queries(int8, f.rows) if int8_dp else f.dout(),
        f.stats(),
        f.flat(float32, f.kv_heads),
        f.flat(float32, f.kv_heads) if int8_dp else None,
        k_t[1],
        f.queries(f.dtype),
    )
    kernel = SageBwdDqSm90(p, plan.config)
    return f.compile(kernel, *arguments, f.cutlass.Int32(0), float32(0.0), *f.sight())
