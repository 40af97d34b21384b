"""Launches the quantization kernels (``sage_cute.templates.quant``) on CUDA tensors.

Nothing is allocated and nothing waits: outputs and workspace are the caller's, the launch goes to
PyTorch's current stream, and CUDA graphs can capture it. The kernels are compiled at the first use
of a (dtype, head_dim, block sizes, smoothing) and take any shapes and strides afterwards.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from sage_cute.compile import compiler
from sage_cute.compile.tensors import DTYPES, check_codes, code_rows, rows_on_16_bytes
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
from sage_cute.errors import DTypeError, ShapeError, UnsupportedError
from sage_cute.policies import Policy
from sage_cute.templates.quant.spec import (
    TILE,
    QuantSpec,
    VScaleForm,
    mean_chunks,
)

DENSE = Static(is_causal=False)
OUTPUTS = ("q_codes", "q_scale", "k_codes", "k_scale", "k_mean", "v_t", "v_scale", "mean_partials")


@functools.lru_cache(maxsize=1024)
def quant_spec(
    policy: Policy,
    dtype: torch.dtype,
    head_dim: int,
    v_scale_form: VScaleForm = "scale",
    static: Static = DENSE,
    *,
    mean_given: bool = False,
) -> QuantSpec:
    """The kernel that a policy needs.

    Args:
        policy: the mix; what it keeps in 16 bit is not quantized.
        dtype: of Q, K and V.
        head_dim: of Q, K and V.
        v_scale_form: what ``v_scale`` holds: the scale, or (per token only) its log2.
        static: which keys queries see, as far as it is compiled in.
        mean_given: ``k_mean`` is an input.

    Raises:
        UnsupportedError: no kernel covers it; the message says why.
    """
    if dtype not in DTYPES:
        raise DTypeError(f"quantization kernels take bfloat16 or float16, not {dtype}: cast first")
    if policy.smooth_q or policy.smooth_v:
        raise UnsupportedError(
            "no quantization kernel smooths Q or V: set smooth_q=false and smooth_v=false"
        )
    qk, pv = policy.qk == "int8", policy.pv == "int8"
    if pv and policy.v_scale == "per_channel":
        raise UnsupportedError(
            "no quantization kernel scales V per channel: set v_scale=per_token or per_block"
        )
    spec = QuantSpec(
        dtype=DTYPES[dtype],
        head_dim=head_dim,
        block_q=(1 if policy.q_scale == "per_token" else policy.block_q) if qk else 0,
        block_k=(1 if policy.k_scale == "per_token" else policy.block_k) if qk else 0,
        block_v=(1 if policy.v_scale == "per_token" else policy.block_k) if pv else 0,
        smooth_k=policy.smooth_k and qk,
        v_scale_form=v_scale_form,
        lengths=static.lengths,
        # With a dense causal mask the caller zeroes the queries that see no key.
        mask_q=qk
        and policy.q_scale == "per_block"
        and (static.window or (static.is_causal and static.lengths != "dense")),
        mean_given=mean_given and policy.smooth_k and qk,
    )
    if reason := spec.why_not():
        raise UnsupportedError(reason)
    return spec


@functools.lru_cache(maxsize=1024)
def output_shapes(
    spec: QuantSpec,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    sequences: int | None = None,
    max_k: int | None = None,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor that :func:`quantize` writes, workspace included.

    And of a ``k_mean`` that is given. ``sequences`` and ``max_k`` are those of a packed batch.

    The workspace (``mean_partials``) is batch * kv heads * chunks * head_dim float64 numbers, with
    at most 32 chunks a head and about 384 in all: at most 128 kB a head.
    """
    batch, heads, seqlen_q, head_dim = q_shape
    _, kv_heads, seqlen_k, _ = k_shape
    queries, keys = Layout(seqlen_q, sequences), Layout(seqlen_k, sequences)
    means = batch if sequences is None else sequences
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if spec.block_q:
        groups_q, groups_k = queries.groups(spec.block_q), keys.groups(spec.block_k)
        shapes["q_codes"] = tuple(q_shape), torch.int8
        shapes["q_scale"] = (batch, heads, groups_q), torch.float32
        shapes["k_codes"] = tuple(k_shape), torch.int8
        shapes["k_scale"] = (batch, kv_heads, groups_k), torch.float32
    if spec.smooth_k:
        shapes["k_mean"] = (means, kv_heads, head_dim), torch.float32
    if spec.computes_mean:
        chunks = mean_chunks(means * kv_heads, seqlen_k if max_k is None else max_k)
        shapes["mean_partials"] = (means * kv_heads, chunks, head_dim), torch.float64
    if spec.block_v:
        groups = keys.padded() if spec.block_v == 1 else keys.groups(spec.block_v)
        shapes["v_t"] = (batch, kv_heads, head_dim, keys.padded()), torch.uint8
        shapes["v_scale"] = (batch, kv_heads, groups), torch.float32
    return shapes


def quantize(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    *,
    policy: Policy,
    q_codes: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_codes: Tensor | None = None,
    k_scale: Tensor | None = None,
    k_mean: Tensor | None = None,
    v_t: Tensor | None = None,
    v_scale: Tensor | None = None,
    mean_partials: Tensor | None = None,
    v_scale_form: VScaleForm = "scale",
    is_causal: bool = False,
    window: Window = EVERYTHING,
    key_lengths: Tensor | None = None,
    packed: Packed | None = None,
    mean_given: bool = False,
) -> None:
    """Quantizes q, k and v (batch, heads, seqlen, head_dim) into the given tensors.

    Keys behind a key length count as zeros, and queries that see no key do in a scale that they
    share with others (of a dense causal batch the caller has to see to it).

    Outputs are those of :func:`output_shapes` for ``quant_spec(policy, ...)``, contiguous (codes of
    Q and K: as ``tensors.empty_codes`` makes them); give None for the others. ``mean_partials`` is
    scratch.

    Args:
        q: queries, bfloat16 or float16, any strides with head_dim contiguous and rows on 16 bytes.
            q and k are only read (and may be None otherwise) if the policy's ``qk`` is INT8.
        k: keys.
        v: values, likewise for ``pv``.
        policy: which of them are quantized, and how finely.
        q_codes: int8, as q.
        q_scale: float32, one a token or one a block.
        k_codes: int8, as k, of k minus its mean if the policy smooths k.
        k_scale: float32, one a token or one a block.
        k_mean: float32 (batch, kv heads, head_dim), over finite values; an input if it is given.
        v_t: uint8 (batch, kv heads, head_dim, seqlen padded to 128): 128 + code, keys permuted
            within 16.
        v_scale: float32, one a padded token or one a block.
        mean_partials: float64 scratch.
        v_scale_form: as for :func:`quant_spec`.
        is_causal: as for the forward kernel (``launch.forward``), like the next three.
        window: bounds around the diagonal.
        key_lengths: int32 (batch,).
        packed: offsets of a packed batch, in tensors of batch 1.
        mean_given: ``k_mean`` is what smoothing takes off, and is not computed.

    Raises:
        UnsupportedError: no kernel covers the policy, the head_dim or the layout.
    """
    first = v if q is None else q
    if first is None:
        raise ShapeError("nothing to quantize: give q and k, v or all three")
    sight = Visibility(is_causal, window, key_lengths, packed)
    spec = quant_spec(
        policy, first.dtype, first.shape[-1], v_scale_form, sight.static, mean_given=mean_given
    )
    sight.check(first.shape[0], first.device)
    if not spec.block_q:
        q = k = None
    if not spec.block_v:
        v = None
    q, k, v = (
        _checked_input(spec, "q", q),
        _checked_input(spec, "k", k),
        _checked_input(spec, "v", v),
    )
    keys = v if k is None else k
    assert keys is not None  # a spec quantizes something, and what it quantizes was given
    queries = keys if q is None else q
    if v is not None and v.shape != keys.shape:
        raise ShapeError(f"v is {tuple(v.shape)} and k {tuple(keys.shape)}: they must be alike")
    outputs: tuple[Tensor | None, ...]
    outputs = (q_codes, q_scale, k_codes, k_scale, k_mean, v_t, v_scale, mean_partials)
    sizes = (None, None) if packed is None else (packed.sequences, packed.max_k)
    expected = output_shapes(spec, queries.shape, keys.shape, *sizes)
    for name, out in zip(OUTPUTS, outputs, strict=True):
        _check_output(name, out, expected.get(name))
    if packed is not None and (packed.sequences == 0 or packed.max_q == packed.max_k == 0):
        if k_mean is not None and not mean_given:
            k_mean.zero_()
        return
    if keys.numel() == 0:
        if queries.numel() == 0:
            if k_mean is not None and not mean_given:
                k_mean.zero_()  # of no tokens, as the kernel says where there are queries
            return
        if keys.shape[1] == 0:
            raise ShapeError(f"{queries.shape[1]} query heads, but no key heads")
        if v_t is not None:  # no elements, and strides that are no multiples of 16
            outputs = (*outputs[:5], v_t.as_strided(v_t.shape, (16, 16, 16, 1)), *outputs[6:])
    if q_codes is not None and k_codes is not None:
        q_codes, k_codes = code_rows(q_codes), code_rows(k_codes)
        outputs = (q_codes, q_scale, k_codes, *outputs[3:])
    compiled_quantize(spec)(
        q,
        k,
        v,
        *outputs,
        *(sight.reach() if spec.mask_q else (None, None)),
        *sight.offsets(),
        packed and packed.max_q,
        packed and packed.max_k,
    )


def _checked_input(spec: QuantSpec, name: str, x: Tensor | None) -> Tensor | None:
    """The tensor as the kernel takes it: strides of 8 where dimensions of size 1 hold anything."""
    if x is None:
        if getattr(spec, f"block_{name}"):
            raise ShapeError(f"the policy quantizes {name}: it must be given")
        return None
    if x.dim() != 4 or x.shape[3] != spec.head_dim or DTYPES.get(x.dtype) != spec.dtype:
        raise ShapeError(
            f"{name} is {tuple(x.shape)} {x.dtype}: expected (batch, heads, seqlen, "
            f"{spec.head_dim}) in {spec.dtype}"
        )
    rows = rows_on_16_bytes(x)
    if rows is None:
        raise UnsupportedError(
            f"{name} has strides {x.stride()} and starts {x.data_ptr() % 16} bytes behind a "
            "multiple of 16: quantization reads 16 bytes at a time, so head_dim must be contiguous "
            f"and every row start on 16 bytes: pass {name}.contiguous(), or a clone of what is "
            "contiguous but starts elsewhere"
        )
    return rows


def _check_output(name: str, out: Tensor | None, expected: Any) -> None:
    if expected is None or out is None:
        if expected is not out:
            why = "not written by this policy" if expected is None else "needed by this policy"
            raise ShapeError(f"{name} is {why}")
        return
    shape, dtype = expected
    if out.shape != shape or out.dtype != dtype:
        raise ShapeError(f"{name} is {tuple(out.shape)} {out.dtype}: expected {shape} {dtype}")
    if name in ("q_codes", "k_codes"):
        check_codes(name, out)
    elif not out.is_contiguous():
        raise UnsupportedError(f"{name} is not contiguous: allocate it with torch.empty")


def compiled_quantize(spec: QuantSpec) -> Any:
    """The kernels of ``spec``, compiled at the first call."""
    return compiler.load("quantize", spec, _compile)


def _compile(spec: QuantSpec) -> Any:
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from sage_cute.templates.quant.qkv_prologue import QuantizePrologue

    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.dtype]
    batch, heads, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
    seqlen_q, seqlen_k = cute.sym_int(), cute.sym_int()

    def fake(element: Any, *shape: Any, align: int = 16, divisibility: int = 1) -> Any:
        strides = [cute.sym_int64(divisibility=divisibility) for _ in shape[1:]]
        return make_fake_tensor(element, shape, (*strides, 1), assumed_align=align)

    def rows(element: Any, n_heads: Any, tokens: Any) -> Any:
        return fake(element, batch, n_heads, tokens, spec.head_dim, divisibility=8)

    def scales(n_heads: Any) -> Any:
        return fake(cutlass.Float32, batch, n_heads, cute.sym_int(), align=4)

    int8, none = cutlass.Int8, None
    qk, v, mean = bool(spec.block_q), bool(spec.block_v), spec.smooth_k
    packed, means = spec.lengths == "packed", cute.sym_int()
    padded = cute.sym_int(divisibility=TILE)
    arguments = (
        rows(dtype, heads, seqlen_q) if qk else none,
        rows(dtype, kv_heads, seqlen_k) if qk else none,
        rows(dtype, kv_heads, seqlen_k) if v else none,
        rows(int8, heads, seqlen_q) if qk else none,
        scales(heads) if qk else none,
        rows(int8, kv_heads, seqlen_k) if qk else none,
        scales(kv_heads) if qk else none,
        fake(cutlass.Float32, means if packed else batch, kv_heads, spec.head_dim, align=4)
        if mean
        else none,
        fake(cutlass.Uint8, batch, kv_heads, spec.head_dim, padded, divisibility=16) if v else none,
        scales(kv_heads) if v else none,
        fake(cutlass.Float64, cute.sym_int(), cute.sym_int(), spec.head_dim, align=8)
        if spec.computes_mean
        else none,
        *numbers(spec.mask_q),
        *vectors(spec.lengths),
        *numbers(packed),
    )
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(QuantizePrologue(spec), *arguments, stream, options="--enable-tvm-ffi")
