"""Kinds 1 to 13: numbers. On the GPU too, where there is one."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_cute
from sage_cute.errors import ShapeError, UnsupportedError
from sage_cute.numerics import attention_reference, rel_l2
from sage_cute.numerics.tolerances import check
from sage_cute.policies import PRESETS
from sage_cute.testing import Inputs, make_inputs, run_attention, run_reference

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
SAGE = torch.ops.sage
each_preset = pytest.mark.parametrize("policy", PRESETS)


@each_preset
def test_01_zeros_give_zeros_and_the_lse_of_a_uniform_softmax(attend, policy) -> None:
    x = Inputs(*(torch.zeros(1, 2, n, 64, dtype=BF16) for n in (66, 70, 70, 66)))
    dlse = torch.ones(1, 2, 66)
    for causal in (False, True):
        got = attend(x, policy=policy, causal=causal, dlse=dlse)
        assert not any(t.any() for t in (got.out, got.dq, got.dk, got.dv))
        keys = torch.arange(5, 71.0) if causal else torch.full((66,), 70.0)
        torch.testing.assert_close(got.lse, keys.log().expand(1, 2, -1))


@each_preset
def test_01_zero_channels_blocks_and_tokens(agree, policy) -> None:
    x = make_inputs("g1", (1, 2, 260, 64), kv_heads=1, dtype=BF16)
    x.v[..., 3] = 0  # a channel of V
    x.dout[:, :, 128:] = 0  # a masked loss: whole blocks of dO
    x.q[:, :, 64:80] = 0
    x.k[:, :, 130:192] = 0
    x.v[:, :, 192:256] = 0
    got = agree(x, policy=policy)
    assert not got.out[..., 3].any() and not got.dq[:, :, 128:].any()
    without = agree(x._replace(dout=torch.zeros_like(x.dout)), policy=policy)
    assert not any(t.any() for t in without[2:])


@each_preset
def test_02_one_key(attend, policy) -> None:
    for seqlen_q, causal in ((1, True), (70, False), (70, True)):
        x = make_inputs("g1", (2, 4, seqlen_q, 64), kv_heads=2, seqlen_k=1, dtype=BF16)
        got = attend(x, policy=policy, causal=causal)
        seeing = slice(seqlen_q - 1, None) if causal else slice(None)
        v = x.v.repeat_interleave(2, 1).float()
        step = v.abs().amax(-1, keepdim=True) / 127
        error = (got.out[:, :, seeing].float() - v).abs()
        assert (error <= step * (0.5 + torch.finfo(BF16).eps * 127)).all()
        assert not got.out[:, :, : seeing.start or 0].any()
        assert not got.dq.any()
        dout = x.dout[:, :, seeing].float().unflatten(1, (2, 2)).sum((2, 3)).unsqueeze(2)
        check("one_key_dv", policy, rel_l2(got.dv, dout))
        if seqlen_q > 1 and not causal:  # else rounding of a few rows, by nothing to compare with
            size = x.dout.float().norm() * x.v.float().norm() * x.q.float().norm()
            check("one_key_dk", policy, got.dk.float().norm() / size)


LENGTHS = (2, 9, 63, 65, 127, 129)


@each_preset
@pytest.mark.parametrize("seqlen_q", (1, *LENGTHS))
def test_03_ragged_tails(agree, policy, seqlen_q) -> None:
    for i, seqlen_k in enumerate(LENGTHS):
        x = make_inputs("g1", (1, 2, seqlen_q, 32), kv_heads=1, seqlen_k=seqlen_k, dtype=BF16)
        agree(x, policy=policy, causal=seqlen_k >= seqlen_q and i % 2 > 0)


@each_preset
def test_03_long_ragged_and_the_same_bits_50_times(attend, agree, device, policy) -> None:
    x = make_inputs("g1", (1, 2, 1001, 32), kv_heads=1, seqlen_k=1001, dtype=BF16)
    first = agree(x, policy=policy, causal=True)
    for _ in range(49 if device == "cuda" else 2):
        again = attend(x, policy=policy, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@each_preset
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_04_lse_is_that_of_the_original_k_in_every_layout(device, policy, layout) -> None:
    x = make_inputs("g1", (2, 6, 70, 64), kv_heads=2, seqlen_k=129, dtype=BF16)
    k = x.k + 5 * torch.randn(2, 2, 1, 64).bfloat16()
    tensors = [t.to(device) for t in (x.q, k, x.v)]
    if layout == "bshd":
        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
    out, lse = sage_cute.attention(*tensors, policy=policy, return_lse=True, layout=layout)
    assert lse.shape == (2, 6, 70) and lse.dtype == F32
    truth = attention_reference(x.q, k, x.v)
    check("shape_lse", "any", (lse.cpu() - truth.lse).abs().max())
    out = out.transpose(1, 2) if layout == "bshd" else out
    check("reported_out", "any", rel_l2(out.cpu(), truth.out))


@each_preset
def test_04_halves_merge_to_the_whole(device, policy) -> None:
    x = make_inputs("g1", (1, 6, 65, 64), kv_heads=2, seqlen_k=200, dtype=BF16)
    q, k, v = (t.to(device) for t in (x.q, x.k, x.v))
    k = k + torch.linspace(-3, 3, 200, device=device, dtype=BF16)[:, None]  # means that differ
    parts = [
        sage_cute.attention(q, k[:, :, a], v[:, :, a], policy=policy, return_lse=True)
        for a in (slice(0, 77), slice(77, 200))
    ]
    out, lse = sage_cute.merge_attention(*parts[0], *parts[1])
    truth = attention_reference(q.cpu(), k.cpu(), v.cpu())
    check("merged_lse", policy, (lse.cpu() - truth.lse).abs().max())
    check("merged_out", policy, rel_l2(out.cpu(), truth.out))


@each_preset
@pytest.mark.parametrize("lengths", [(70, 200), (200, 70), (1, 129), (129, 1), (65, 64), (64, 65)])
def test_05_causal_is_aligned_bottom_right(agree, policy, lengths) -> None:
    x = make_inputs("g1", (1, 2, lengths[0], 64), seqlen_k=lengths[1], dtype=BF16)
    if lengths[1] == 1:  # dS = 0: dQ and dK are rounding
        x = x._replace(dout=torch.zeros_like(x.dout))
    got = agree(x, policy=policy, causal=True, dlse=torch.zeros(1, 2, lengths[0]))
    blind = max(0, lengths[0] - lengths[1])
    assert not got.out[:, :, :blind].any() and not got.dq[:, :, :blind].any()
    assert (got.lse[:, :, :blind] == -torch.inf).all()
    # One more query at the front changes nothing of the others; nothing of a blind row matters.
    rows = slice(blind, None)
    alone = Inputs(x.q[:, :, rows], x.k, x.v, x.dout[:, :, rows])
    part = agree(alone, policy=policy, causal=True)
    assert rel_l2(part.out, got.out[:, :, rows]) < 1e-2 or not got.out.any()


HEAD_DIMS = (16, 24, 40, 72, 80, 96, 104, 136, 200, 256)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("policy", ["fast", "sagebwd"])
def test_06_head_dims_that_are_no_multiple_of_a_tile(agree, device, head_dim, policy) -> None:
    """Two heads side by side in memory: neither reads or writes the other's columns."""
    x = make_inputs("g1", (1, 3, 70, head_dim), seqlen_k=65, dtype=BF16)
    fused = Inputs(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in x))
    got = agree(fused, policy=policy)
    again = agree(fused, policy=policy, scale=head_dim**-0.5)  # the default: of the true head_dim
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    for h in range(3):
        one = agree(Inputs(*(t[:, h : h + 1] for t in x)), policy=policy)
        for a, b in zip(got, one, strict=True):
            assert rel_l2(a[:, h : h + 1], b) < 1e-3


@pytest.mark.parametrize("head_dim", [0, 1, 7, 12, 17, 257, 264, 512])
def test_06_head_dims_are_right_or_refused_alike_everywhere(device, head_dim) -> None:
    q = torch.randn(1, 1, 9, head_dim, dtype=BF16, device=device)
    status = sage_cute.is_supported(q, q, q)
    if status:
        assert sage_cute.attention(q, q, q).isfinite().all()
        return
    assert f"head_dim {head_dim}" in status.reason
    with pytest.raises(UnsupportedError) as raised:
        SAGE.attn(q, q, q)
    assert str(raised.value) == status.reason
    with FakeTensorMode() as mode, pytest.raises(UnsupportedError) as raised:
        fake = mode.from_tensor(q)
        SAGE.attn(fake, fake, fake)
    assert str(raised.value) == status.reason


@each_preset
@pytest.mark.parametrize("heads", [(8, 1), (7, 1), (6, 2), (21, 3), (4, 4)])
def test_07_groups_of_query_heads(agree, policy, heads) -> None:
    x = make_inputs("g1", (2, heads[0], 66, 32), kv_heads=heads[1], seqlen_k=70, dtype=BF16)
    agree(x, policy=policy, causal=True)


@pytest.mark.parametrize("heads", [(6, 4), (4, 6), (1, 2), (7, 3), (3, 0)])
def test_07_groups_that_do_not_divide_are_refused(device, heads) -> None:
    q, k = (torch.ones(2, h, 5, 32, device=device, dtype=BF16) for h in heads)
    with pytest.raises(ShapeError, match=f"{heads[0]} query heads are no multiple of {heads[1]}"):
        sage_cute.attention(q, k, k)
    assert not sage_cute.is_supported(q, k, k)


def _large(name: str, x: Inputs, device: str) -> Inputs:
    q, k, v, dout = (t.clone() for t in x)
    # Kernels hold scores to about one unit of their codes' product: docs/backward-kernel.md.
    huge = 1e36 if device == "cpu" else 1e3
    if name == "bfloat16 beyond float16":
        v, q, k = v * 1e6, q * 1e-5, k * 1e5
    elif name == "a channel of K at +300":
        k[..., 5] += 300
    elif name == "one token 1000 times the rest":
        q[:, :, 7] *= 1e3
        k[:, :, 11] *= 1e3
        v[:, :, 13] *= 1e3
    elif name == "logits near 1e5":
        q, k = q * 300, k * 300
    elif name == "a single huge query":
        q[:, :, 7] = huge
    elif name == "Q at the end of its range":
        # INT8 gradients have a MAGIC of their unit added on the way: up to 1e33 on a GPU.
        end = 1e37 if device == "cpu" else 1e30
        q, k = q * end, k / end
    elif name == "all queries huge":
        q = q * huge
    elif name == "everything tiny":
        q, k, v, dout = q * 1e-30, k * 1e-30, v * 1e-30, dout * 1e-5
    return Inputs(q, k, v, dout)


LARGE = (
    "bfloat16 beyond float16", "a channel of K at +300", "one token 1000 times the rest",
    "logits near 1e5", "a single huge query", "Q at the end of its range", "all queries huge",
    "everything tiny",
)  # fmt: skip


@each_preset
@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("causal", [False, True])
def test_08_large_magnitudes_are_finite_where_float32_is(
    attend, device, policy, case, causal
) -> None:
    x = make_inputs("g1", (1, 2, 130, 32), kv_heads=1, dtype=F32, seed=2)
    x = _large(case, x, device).to(BF16)
    truth = run_reference(x, causal=causal)
    assert all(t.abs().max() < 1e38 for t in truth), "the case itself overflows"
    got = attend(x, policy=policy, causal=causal)
    assert all(t.isfinite().all() for t in got), [t.isfinite().all().item() for t in got]


@each_preset
def test_08_rows_of_large_logits_keep_the_size_of_their_gradient(attend, device, policy) -> None:
    """One key for each query: dV is dO. P = exp(S - L) is a difference of numbers of this size."""
    x = make_inputs("g1", (1, 1, 128, 64), dtype=F32)
    k = torch.nn.functional.normalize(x.k, dim=-1) * 8
    for size in (1e2, 1e3, 1e5, 1e7, 1e36) if device == "cpu" else (1e2, 1e3):
        y = x._replace(q=k * (size / 8), k=k).to(BF16)
        got = attend(y, policy=policy, causal=True)
        assert got.dq.isfinite().all() and got.dk.isfinite().all()
        check("large", "any", rel_l2(got.dv, y.dout))


@each_preset
def test_09_early_causal_rows(attend, policy) -> None:
    """Row 0 is V[0] to a step of its scale; the first rows are no worse than the others."""
    x = make_inputs("llm", (2, 2, 140, 64), kv_heads=1, dtype=BF16)
    got, truth = attend(x, policy=policy, causal=True), run_reference(x, causal=True)
    block = 1 if sage_cute.policies()[policy].v_scale == "per_token" else 64
    step = x.v[:, :, :block].float().abs().amax((-2, -1), keepdim=True) / 127
    first = (got.out[:, :, :1].float() - x.v[:, :, :1].float()).abs()
    assert (first <= step * 0.501 + x.v[:, :, :1].float().abs() * 2**-8).all()
    for rows in (slice(0, 8), slice(8, 32), slice(32, 140)):
        check("large", "any", rel_l2(got.out[:, :, rows], truth.out[:, :, rows]))


@pytest.mark.parametrize(
    "sizes", [(0, 2, 1, 5, 5), (2, 0, 0, 5, 5), (2, 2, 1, 0, 5), (2, 2, 1, 5, 0)]
)
@each_preset
def test_10_zero_length(attend, policy, sizes) -> None:
    batch, heads, kv_heads, seqlen_q, seqlen_k = sizes
    q = torch.ones(batch, heads, seqlen_q, 32, dtype=BF16)
    k = torch.ones(batch, kv_heads, seqlen_k, 32, dtype=BF16)
    for causal in (False, True):
        got = attend(Inputs(q, k, k, q), policy=policy, causal=causal, dlse=q[..., 0].float())
        assert [t.shape for t in got] == [q.shape, q.shape[:3], q.shape, k.shape, k.shape]
        assert not any(t.any() for t in (got.out, got.dq, got.dk, got.dv))
        assert (got.lse == -torch.inf).all()


@each_preset
def test_10_empty_sequences_in_a_packed_batch(device, poison, policy) -> None:
    """Of queries, of keys, of both; first and last; and tokens that belong to no sequence."""
    queries, keys = (0, 5, 0, 3, 0, 2), (0, 0, 4, 7, 0, 2)
    bounds = [
        torch.tensor([1, *n], device=device).cumsum(0).int() for n in (queries, keys)
    ]  # one token before the first, and one behind the last
    q, k, v, dout = (
        torch.randn(sum(n) + 2, h, 32, device=device, dtype=BF16)
        for n, h in ((queries, 4), (keys, 2), (keys, 2), (queries, 4))
    )
    for t in (q, k, v, dout):
        t[0] = t[-1] = torch.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    poison()
    out, lse = sage_cute.attention_varlen(
        *leaves, *bounds, causal=True, policy=policy, return_lse=True
    )
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert out.shape == q.shape and lse.shape == (4, len(q))
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))
    seeing = torch.zeros(len(q), dtype=torch.bool, device=device)
    seeing[6:11] = True  # the sequences of 3 queries and 7 keys, and of 2 and 2
    assert torch.equal(lse.isfinite(), seeing.expand(4, -1))
    assert (lse[:, ~seeing] == -torch.inf).all()
    assert not out[~seeing].any() and not dq[~seeing].any() and out[seeing].any(-1).all()
    for grad in (dk, dv):
        assert not grad[:5].any() and not grad[14:].any() and grad[5:14].any()


@pytest.mark.parametrize("sequences", [0, 1, 3])
def test_10_a_packed_batch_of_nothing(device, sequences) -> None:
    nothing = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
    q, k, v = (
        torch.randn(0, h, 32, device=device, dtype=BF16, requires_grad=True) for h in (4, 2, 2)
    )
    out, lse = sage_cute.attention_varlen(q, k, v, nothing, nothing, return_lse=True)
    out.sum().backward()
    assert out.shape == q.grad.shape == q.shape and lse.shape == (4, 0)
    assert k.grad.shape == v.grad.shape == k.shape


def _view(x: torch.Tensor, strides: tuple[int, ...], device: str) -> torch.Tensor:
    """The same numbers with other strides; the memory between them is reserved and not touched."""
    y = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=device)
    return y.copy_(x)


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_11_strides_beyond_32_bits(device, dimension) -> None:
    """8 GB of address space: on the CPU only the pages that are written exist."""
    x = make_inputs("g1", (2, 2, 2, 32), dtype=BF16)
    strides = [128, 64, 32, 1]
    strides[dimension] = (1 << 31) + 64
    far = [_view(t, tuple(strides), device).requires_grad_() for t in x[:3]]
    near = [t.to(device).requires_grad_() for t in x[:3]]
    results = []
    for q, k, v in (far, near):
        out, lse = SAGE.attn_with_lse(q, k, v, is_causal=True)
        dout = _view(x.dout, tuple(strides), device) if q is far[0] else x.dout.to(device)
        results.append([out, lse, *torch.autograd.grad(out, (q, k, v), dout)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_11_more_than_2_to_the_31_elements() -> None:
    q = torch.randn(1, 1 << 9, 1 << 16, 64, device="cuda", dtype=BF16)
    k, dout = q[:, :, :200], torch.randn(1, device="cuda", dtype=BF16).expand(q.shape)
    leaves = [t.requires_grad_() for t in (q, k.detach(), k.detach().clone())]
    out = SAGE.attn(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    last = [t.detach()[:, -1:].clone().requires_grad_() for t in leaves]
    want = SAGE.attn(*last)
    assert torch.equal(out[:, -1:], want)
    for a, b in zip(grads, torch.autograd.grad(want, last, dout[:, -1:]), strict=True):
        assert torch.equal(a[:, -1:], b)


@pytest.mark.parametrize("shape", [(65_536, 1), (1, 65_536)])
def test_12_batch_or_heads_of_65536(device, shape) -> None:
    # The CPU implementation pads keys to blocks: of 8 here, for its memory's sake.
    policy = "fast" if device == "cuda" else "fast:block_k=8,bwd_block_k=8,bwd_block_q=8"
    x = make_inputs("g1", (*shape, 1, 16), seqlen_k=2, dtype=BF16, seed=3)
    got, part = run_attention(x.to(device), policy=policy), slice(-64, None)
    last = Inputs(*(t[part] if shape[0] > 1 else t[:, part] for t in x))
    truth = run_reference(last)
    for name in ("out", "dv"):
        t = getattr(got, name).cpu()
        t = t[part] if shape[0] > 1 else t[:, part]
        check(f"reported_{name}", "any", rel_l2(t, getattr(truth, name)))
    assert all(t.isfinite().all() for t in got)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@each_preset
def test_13_nan_and_inf_show_where_they_belong(attend, policy, which, value) -> None:
    x = make_inputs("g1", (1, 2, 150, 32), dtype=BF16)
    getattr(x, which)[0, 1, 100, 3] = value
    got = attend(x, policy=policy, causal=True)
    row = slice(100, 101) if which == "q" else slice(100, 150)
    if which != "dout":
        assert got.out[0, 1, row].isnan().any(-1).all()
    assert not got.dq[0, 1, 100 if which in ("q", "dout") else row].isfinite().all(-1).any()
    keys = slice(0, 101) if which in ("q", "dout") else slice(100, 101)
    assert not got.dk[0, 1, keys].isfinite().all(-1).any()
    for t in got:  # the other head, and rows before the block
        assert t[0, 0].isfinite().all()
    if which in ("k", "v") and sage_cute.policies()[policy].block_k == 64:
        assert got.out[0, 1, :64].isfinite().all()  # they see no key of the block
