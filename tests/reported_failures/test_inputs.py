"""Kinds 14 to 17: inputs as they come, and what is not an input."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor

import sage_cute
from sage_cute.errors import DTypeError, UnsupportedError
from sage_cute.testing import make_inputs

SAGE = torch.ops.sage
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32


def _permuted(x: Tensor, order: tuple[int, ...]) -> Tensor:
    inverse = [order.index(i) for i in range(4)]
    return x.permute(order).contiguous().permute(inverse)


def _in(x: Tensor, *index: object, shape: tuple[int, ...]) -> Tensor:
    """A part of something larger that holds the numbers of x."""
    view = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)[index]
    return view.copy_(x)


def _unit_strides(x: Tensor, stride: int) -> Tensor:
    """Dimensions of size 1 with a stride that means nothing."""
    strides = [stride if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


LAYOUTS = {
    "heads and tokens exchanged": lambda x: _permuted(x, (0, 2, 1, 3)),
    "tokens first": lambda x: _permuted(x, (2, 0, 1, 3)),
    "channels before tokens": lambda x: _permuted(x, (0, 1, 3, 2)),
    "channels first": lambda x: _permuted(x, (3, 1, 0, 2)),
    "of a fused projection": lambda x: _in(
        x.transpose(1, 2), ..., 1, slice(None), slice(None),
        shape=(x.shape[0], x.shape[2], 3, x.shape[1], x.shape[3]),
    ).transpose(1, 2),
    "last stride 2": lambda x: _in(x, ..., 1, shape=(*x.shape, 2)),
    "last stride 3": lambda x: _in(
        x, ..., slice(None, None, 3), shape=(*x.shape[:3], 3 * x.shape[3])
    ),
    "every other token": lambda x: _in(
        x, ..., slice(1, None, 2), slice(None), shape=(*x.shape[:2], 2 * x.shape[2], x.shape[3])
    ),
    "rows with a gap": lambda x: _in(
        x, ..., slice(1, 1 + x.shape[3]), shape=(*x.shape[:3], x.shape[3] + 3)
    ),
    **{
        f"{n} elements off alignment": lambda x, n=n: _in(
            x.flatten(), slice(n, None), shape=(x.numel() + n,)
        ).view(x.shape)
        for n in (1, 2, 4)
    },
    "unit strides of 0": lambda x: _unit_strides(x, 0),
    "unit strides of 7": lambda x: _unit_strides(x, 7),
    "unit strides beyond memory": lambda x: _unit_strides(x, 1_000_003),
}  # fmt: skip


def _results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, **kwargs: object):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = SAGE.attn_with_lse(*leaves, is_causal=True, **kwargs)
    return [out, lse, *torch.autograd.grad([out, lse], leaves, [dout, dlse])]


@pytest.mark.parametrize("policy", ["fast", "sagebwd"])
@pytest.mark.parametrize(
    "sizes", [(2, 4, 2, 20, 30), (1, 1, 1, 20, 30), (2, 2, 1, 1, 20), (1, 3, 1, 9, 1)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_14_any_strides_give_what_contiguous_copies_give(device, layout, sizes, policy) -> None:
    batch, heads, kv_heads, seqlen_q, seqlen_k = sizes
    x = make_inputs(
        "g1", (batch, heads, seqlen_q, 32), kv_heads=kv_heads, seqlen_k=seqlen_k, dtype=BF16
    ).to(device)
    dlse = torch.randn(x.q.shape[:3], device=device)
    want = _results(*x, dlse, policy=policy)
    turn = LAYOUTS[layout]
    for strided in (
        x._replace(q=turn(x.q)),
        x._replace(k=turn(x.k), v=turn(x.v)),
        x._replace(dout=turn(x.dout)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(strided, x, strict=True)), "the test itself"
        for a, b in zip(_results(*strided, dlse, policy=policy), want, strict=True):
            assert torch.equal(a, b)


def test_14_every_tensor_with_strides_of_its_own(device) -> None:
    rng = random.Random(0)
    x = make_inputs("g1", (2, 4, 20, 32), kv_heads=2, seqlen_k=30, dtype=BF16).to(device)
    dlse = torch.randn(x.q.shape[:3], device=device)
    want = _results(*x, dlse)
    for _ in range(20):
        turned = [LAYOUTS[rng.choice(list(LAYOUTS))](t) for t in x]
        odd_dlse = _in(dlse, ..., 0, shape=(*dlse.shape, 2))
        for a, b in zip(_results(*turned, odd_dlse), want, strict=True):
            assert torch.equal(a, b)


def test_14_expanded_tensors(device) -> None:
    """Strides of 0 anywhere: K and V of one head or batch for all, and gradients of a sum."""
    x = make_inputs("g1", (1, 1, 20, 32), seqlen_k=30, dtype=BF16).to(device)
    dlse = torch.randn(2, 4, 20, device=device)
    q, dout = (t.expand(2, 4, -1, -1) for t in (x.q, x.dout))
    for kv_heads in (1, 2, 4):
        k, v = (t.expand(2, kv_heads, -1, -1) for t in (x.k, x.v))
        row = x.k[:, :, :1].expand(2, kv_heads, 30, -1)  # one token again and again
        number = x.v[..., :1, :1].expand(2, kv_heads, 30, 32)
        for given in (
            (q, k, v, dout),
            (q, row, v, dout),
            (q, k, number, dout),
            (q, k, v, dout[..., :1].expand(dout.shape)),
        ):
            want = _results(*(t.contiguous() for t in given), dlse)
            for a, b in zip(_results(*given, dlse), want, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("autocast", [BF16, FP16])
def test_15_autocast_casts_any_mix_and_each_gradient_has_its_inputs_dtype(device, autocast) -> None:
    x = make_inputs("g1", (1, 2, 20, 32), kv_heads=1, dtype=F32).to(device)
    module = sage_cute.nn.SageAttention(32, qk_norm=True, causal=True).to(device)
    for dtypes in itertools.product((F32, BF16, FP16), repeat=3):
        leaves = [t.detach().to(d).requires_grad_() for t, d in zip(x, dtypes, strict=False)]
        with torch.autocast(device, autocast):
            out = sage_cute.attention(*leaves, causal=True)
            _, lse = SAGE.attn_with_lse(*leaves)
            of_module = module(*leaves)
            packed = [t[0].transpose(0, 1) for t in leaves]
            bounds = torch.tensor([0, 20], dtype=torch.int32, device=device)
            of_packed = sage_cute.attention_varlen(*packed, bounds, bounds, causal=True)
        assert out.dtype == of_module.dtype == autocast and lse.dtype == F32
        with torch.no_grad():
            want = sage_cute.attention(*(t.to(autocast) for t in leaves), causal=True)
        assert torch.equal(out, want)
        assert torch.equal(of_packed.transpose(0, 1)[None], want)
        (out.float().sum() + lse.sum() + of_module.float().sum()).backward()
        assert [t.grad.dtype for t in leaves] == list(dtypes)
        assert all(t.grad.isfinite().all() for t in leaves)


def test_15_mixes_outside_of_autocast_are_named(device) -> None:
    q = torch.randn(1, 2, 20, 32, device=device)
    module = sage_cute.nn.SageAttention(32).to(device)
    for dtypes in itertools.product((F32, BF16, FP16), repeat=3):
        if len(set(dtypes)) == 1:
            continue
        mixed = [q.detach().to(d).requires_grad_() for d in dtypes]
        named = ", ".join(map(str, dtypes))
        for call in (sage_cute.attention, SAGE.attn, SAGE.attn_with_lse, module):
            with pytest.raises(TypeError, match=named) as raised:
                call(*mixed)
            assert isinstance(raised.value, DTypeError)
        assert named in sage_cute.is_supported(*mixed).reason


def test_15_a_module_keeps_the_dtype_whatever_its_norm_and_embedding_return(device) -> None:
    module = sage_cute.nn.SageAttention(32, qk_norm=True).to(device)  # gains in float32
    q = torch.randn(1, 2, 20, 32, device=device, dtype=BF16, requires_grad=True)
    out = module(q, q, q, rotary=lambda t: t.float().roll(1, -1))
    out.float().sum().backward()
    assert out.dtype == q.grad.dtype == BF16


@pytest.mark.parametrize(
    "name",
    ["attn_mask", "mask", "dropout_p", "dropout", "is_causal", "enable_gqa", "softcap", "bias"],
)
@pytest.mark.parametrize("value", [None, False, 0.0])
def test_16_unknown_arguments_are_never_ignored(name, value) -> None:
    q = torch.randn(1, 2, 5, 32)
    with pytest.raises(TypeError, match=name):
        sage_cute.attention(q, q, q, **{name: value})
    if name != "is_causal":  # the op's own name for it
        for op in (SAGE.attn, SAGE.attn_with_lse):
            with pytest.raises(RuntimeError, match=name):
                op(q, q, q, **{name: value})
    with pytest.raises(TypeError, match=name):
        sage_cute.nn.SageAttention(32, **{name: value})


def test_16_an_argument_too_many_is_refused() -> None:
    q = torch.randn(1, 2, 5, 32)
    with pytest.raises(TypeError):
        sage_cute.attention(q, q, q, None)


@pytest.mark.parametrize("zero", [0.0, 0, -0.0, np.float32(0), torch.tensor(0.0)])
def test_16_a_scale_of_zero_is_a_uniform_softmax(device, zero) -> None:
    x = make_inputs("g1", (1, 2, 9, 32), kv_heads=1, seqlen_k=20, dtype=BF16).to(device)
    leaves = [t.requires_grad_() for t in x[:3]]
    out, lse = sage_cute.attention(*leaves, scale=zero, return_lse=True)
    torch.testing.assert_close(lse.cpu(), torch.full((1, 2, 9), 20.0).log())
    mean = x.v.float().mean(2, keepdim=True)
    assert (out - mean).abs().max() <= x.v.abs().max() / 127
    out.backward(x.dout)
    assert not leaves[0].grad.any() and not leaves[1].grad.any() and leaves[2].grad.any()


@pytest.mark.parametrize(
    "scale", ["1", 1j, torch.ones(2), torch.tensor(0.1, requires_grad=True), None.__class__]
)
def test_16_what_is_no_scale_is_refused(scale) -> None:
    q = torch.randn(1, 2, 5, 32)
    with pytest.raises(TypeError, match="scale"):
        sage_cute.attention(q, q, q, scale=scale)


def test_16_nested_and_sparse_tensors_are_refused_with_a_remedy() -> None:
    parts = [torch.randn(n, 2, 32) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    for x in (jagged, torch.nested.nested_tensor(parts)):
        with pytest.raises(UnsupportedError, match="nested tensors: "):
            sage_cute.attention(x, x, x)
    x = torch.randn(1, 2, 5, 32).to_sparse()
    with pytest.raises(UnsupportedError, match="to_dense"):
        sage_cute.attention(x, x, x)
    assert "to_dense" in sage_cute.is_supported(x, x, x).reason


def _storages(results: object) -> list[int]:
    tensors = results if isinstance(results, (tuple, list)) else [results]
    return [t.untyped_storage()._cdata for t in tensors if t.numel()]


@pytest.mark.parametrize(
    "layout", ["heads and tokens exchanged", "last stride 2", "unit strides of 0"]
)
@pytest.mark.parametrize("policy", ["fast", "sagebwd", "fast:smooth_k=false"])
def test_17_inputs_stay_untouched_and_outputs_are_new(device, layout, policy) -> None:
    x = make_inputs("kb", (1, 2, 20, 32), kv_heads=1, dtype=BF16).to(device)
    given = [LAYOUTS[layout](t) for t in x]
    before = [t.clone() for t in given]
    versions = [t._version for t in given]
    for needs_grad in (False, True):
        q, k, v = (t.detach().requires_grad_(needs_grad) for t in given[:3])
        calls = [
            sage_cute.attention(q, k, v, policy=policy),
            sage_cute.attention(q, k, v, policy=policy, causal=True, return_lse=True),
            SAGE.attn_with_lse(q, k, v, policy=policy),
            SAGE.attn_fwd(q, k, v, None, True, policy),
            SAGE.attn_infer(q, k, v, None, True, policy),
            sage_cute.nn.SageAttention(32, policy=policy)(q, k, v),
        ]
        if needs_grad:
            calls.append(
                torch.autograd.grad(calls[1], (q, k, v), [given[3], torch.ones_like(calls[1][1])])
            )
        for results in calls:
            storages = _storages(results)
            assert len(set(storages)) == len(storages)
            assert not set(storages) & set(_storages(given))
    assert [t._version for t in given] == versions
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_17_written_outputs_do_not_reach_what_the_backward_needs(device) -> None:
    """In place on out, as fused residual adds do: an error of autograd's, or right; never wrong."""
    x = make_inputs("g1", (1, 2, 20, 32), dtype=BF16).to(device)
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    want = torch.autograd.grad(SAGE.attn(*leaves), leaves, x.dout)
    out = SAGE.attn(*leaves)
    written = out.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(written, leaves, x.dout)
    for a, b in zip(torch.autograd.grad(SAGE.attn(*leaves), leaves, x.dout), want, strict=True):
        assert torch.equal(a, b)
