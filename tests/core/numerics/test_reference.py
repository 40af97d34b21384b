"""The float64 truth against autograd through a naive attention, which shares no line with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sage_cute.numerics import attention_reference, attention_reference_backward
from sage_cute.numerics.reference import visible
from sage_cute.numerics.tolerances import check

NUMERICS = settings.get_profile("numerics")


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One query at a time: the definition, differentiable."""
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    group = q.shape[1] // k.shape[1]
    rows, sums = {}, {}
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = k.shape[2]
                if causal:
                    keys = max(0, min(keys, i + k.shape[2] - q.shape[2] + 1))
                if not keys:
                    continue
                scores = scale * (k[b, h // group, :keys] @ q[b, h, i])
                weights = (scores - scores.max()).exp()
                rows[b, h, i] = weights / weights.sum() @ v[b, h // group, :keys]
                sums[b, h, i] = scores.max() + weights.sum().log()
    if rows:
        index = tuple(torch.tensor(list(rows)).T)
        out = out.index_put(index, torch.stack(list(rows.values())))
        lse = lse.index_put(index, torch.stack(list(sums.values())))
    return out, lse


def make(
    seed: int, heads: tuple[int, int], seqlen_q: int, seqlen_k: int, head_dim: int
) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    q, dout = (normal(2, heads[0], seqlen_q, head_dim) for _ in "qo")
    k, v = (normal(2, heads[1], seqlen_k, head_dim) for _ in "kv")
    return q, k, v, dout, normal(2, heads[0], seqlen_q)


@NUMERICS
@given(
    seed=st.integers(0, 999),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 2), (3, 1)]),
    seqlen_q=st.integers(1, 9),
    seqlen_k=st.integers(1, 9),
    head_dim=st.integers(1, 8),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.0, 0.3, -1.0, 4.0]),
    with_dlse=st.booleans(),
)
def test_equals_autograd_through_the_definition(
    seed: int,
    heads: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    causal: bool,
    scale: float | None,
    with_dlse: bool,
) -> None:
    q, k, v, dout, dlse = make(seed, heads, seqlen_q, seqlen_k, head_dim)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = naive(*leaves, head_dim**-0.5 if scale is None else scale, causal)
    got = attention_reference(q, k, v, scale=scale, causal=causal)
    assert torch.equal(got.lse.isinf(), lse.isinf())
    check("reference", "any", (got.out - out.detach()).abs().max())
    check("reference", "any", (got.lse - lse.detach()).nan_to_num().abs().max())

    seen = torch.where(lse.isinf(), 0.0, lse)
    loss = (out * dout).sum() + ((seen * dlse).sum() if with_dlse else 0)
    want = torch.autograd.grad(loss, leaves) if loss.requires_grad else [q * 0, k * 0, v * 0]
    grads, _ = attention_reference_backward(
        dout, q, k, v, dlse=dlse if with_dlse else None, scale=scale, causal=causal
    )
    for a, b in zip(grads, want, strict=True):
        assert a.shape == b.shape
        check("reference", "any", (a - b).abs().max())


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal: bool) -> None:
    """The formulas against finite differences, which share no algebra either."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(q, k, v)
            return tuple(attention_reference(q, k, v, causal=causal))

        @staticmethod
        def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
            return tuple(
                attention_reference_backward(dout, *ctx.saved_tensors, dlse=dlse, causal=causal)[0]
            )

    q, k, v, _, _ = make(0, (2, 1), 3, 4, 2)
    assert torch.autograd.gradcheck(Function.apply, [t.requires_grad_() for t in (q, k, v)])


def test_equals_scaled_dot_product_attention() -> None:
    q, k, v, dout, _ = make(1, (4, 2), 7, 7, 5)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = sdpa(*leaves, is_causal=True, enable_gqa=True)
    got = attention_reference(q, k, v, causal=True)
    check("reference", "any", (got.out - out.detach()).abs().max())
    grads, _ = attention_reference_backward(dout, q, k, v, causal=True)
    for a, b in zip(grads, torch.autograd.grad(out, leaves, dout), strict=True):
        check("reference", "any", (a - b).abs().max())


def test_causal_is_aligned_bottom_right() -> None:
    """Key j is visible to query i iff j <= i + seqlen_k - seqlen_q."""
    cpu = torch.device("cpu")
    assert visible(2, 4, True, cpu).tolist() == [[True] * 3 + [False], [True] * 4]
    assert visible(3, 1, True, cpu).tolist() == [[False], [False], [True]]
    assert visible(2, 2, False, cpu).all()


@pytest.mark.parametrize("window", [(0, 0), (1, None), (None, 2), (3, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_truth_is_the_definition_on_the_keys_that_are_seen(
    window: tuple[int | None, int | None], causal: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 4, generator=g, dtype=torch.float64) for n in (5, 7, 7))
    lengths = torch.tensor([7, 4])
    got = attention_reference(q, k, v, causal=causal, window=window, key_lengths=lengths)
    for b in range(2):
        for i in range(5):
            p, (left, right) = i + 2, window
            first = 0 if left is None else max(0, p - left)
            last = p if causal else 6 if right is None else p + right
            keys = slice(first, min(last + 1, int(lengths[b])))
            if keys.start >= keys.stop:
                assert not got.out[b, :, i].any() and (got.lse[b, :, i] == -torch.inf).all()
                continue
            one = (x[b : b + 1, :, keys] for x in (k, v))
            out, lse = naive(q[b : b + 1, :, i : i + 1], *one, 0.5, False)
            check("reference", "any", (got.out[b, :, i] - out[0, :, 0]).abs().max())
            check("reference", "any", (got.lse[b, :, i] - lse[0, :, 0]).abs().max())


def test_the_intermediates_are_those_of_the_gradients() -> None:
    q, k, v, dout, dlse = make(2, (2, 2), 5, 6, 4)
    grads, mid = attention_reference_backward(dout, q, k, v, dlse=dlse, scale=0.7)
    torch.testing.assert_close(mid.p.sum(-1), torch.ones_like(mid.p[..., 0]))
    torch.testing.assert_close(mid.ds.sum(-1), dlse)
    torch.testing.assert_close(mid.ds @ k * 0.7, grads.dq)
    torch.testing.assert_close(mid.ds, mid.p * (mid.dp - mid.delta.unsqueeze(-1)))


@pytest.mark.parametrize(
    "shape", [(0, 2, 2, 3, 3), (2, 0, 0, 3, 3), (2, 2, 2, 0, 3), (2, 2, 2, 3, 0)]
)
def test_nothing_to_attend(shape: tuple[int, int, int, int, int]) -> None:
    batch, heads, kv_heads, seqlen_q, seqlen_k = shape
    q, k = torch.ones(batch, heads, seqlen_q, 4), torch.ones(batch, kv_heads, seqlen_k, 4)
    out, lse = attention_reference(q, k, k)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == -torch.inf).all()
    grads, _ = attention_reference_backward(q, q, k, k)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
    assert not any(g.any() for g in grads)
