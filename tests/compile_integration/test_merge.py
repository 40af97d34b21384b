"""Attention over parts of the keys, merged, against attention over all of them."""

from __future__ import annotations

import pytest
import torch

import sage_cute
from sage_cute.errors import ShapeError
from sage_cute.numerics import attention_reference, rel_l2


def exact(q, k, v):
    """Attention and LSE in float64, by torch's autograd."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    return s.softmax(-1) @ v, s.logsumexp(-1)


def inputs(*lengths, dtype=torch.float64, head_dim=16):
    torch.manual_seed(0)
    return [torch.randn(1, 2, n, head_dim, dtype=dtype, requires_grad=True) for n in lengths]


def test_values_and_gradients_are_those_of_the_whole():
    q, k, v, dout = inputs(5, 12, 12, 5)
    dlse = torch.randn(1, 2, 5, dtype=torch.float64)
    out, lse = exact(q, k, v)
    expected = torch.autograd.grad([out, lse], (q, k, v), [dout, dlse])
    parts = [exact(q, k[:, :, a], v[:, :, a]) for a in (slice(0, 4), slice(4, 5), slice(5, 12))]
    merged = parts[0]
    for part in parts[1:]:
        merged = sage_cute.merge_attention(*merged, *part)
    torch.testing.assert_close(merged[0], out)
    torch.testing.assert_close(merged[1], lse)
    actual = torch.autograd.grad(merged, (q, k, v), [dout, dlse])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_part_without_keys_contributes_nothing(order):
    q, k, v = inputs(5, 7, 7)
    seen = exact(q, k, v)
    nothing = (
        torch.full_like(seen[0], torch.nan, requires_grad=True),
        torch.full_like(seen[1], -torch.inf, requires_grad=True),
    )
    parts = [seen, nothing]
    out, lse = sage_cute.merge_attention(*parts[order[0]], *parts[order[1]])
    assert torch.equal(out, seen[0]) and torch.equal(lse, seen[1])
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, *nothing))
    assert all(g.isfinite().all() for g in grads)
    assert not any(g.any() for g in grads[3:])


def test_no_part_with_keys():
    out = torch.full((1, 2, 3, 4), torch.nan, requires_grad=True)
    lse = torch.full((1, 2, 3), -torch.inf, requires_grad=True)
    merged, merged_lse = sage_cute.merge_attention(out, lse, out, lse)
    assert not merged.any() and torch.isneginf(merged_lse).all()
    grads = torch.autograd.grad(merged.sum(), (out, lse), retain_graph=True)
    assert not any(g.any() for g in grads)


def test_nan_is_not_hidden():
    out = torch.zeros(1, 1, 2, 4)
    lse = torch.tensor([[[torch.nan, 0.0]]])
    merged, merged_lse = sage_cute.merge_attention(out, lse, out, torch.zeros(1, 1, 2))
    assert merged[0, 0, 0].isnan().all() and merged_lse[0, 0, 0].isnan()
    assert merged[0, 0, 1].isfinite().all()


def test_large_lse_does_not_overflow():
    q, k, v = inputs(5, 7, 7, dtype=torch.float32)
    out, lse = exact(q, k, v)
    merged, merged_lse = sage_cute.merge_attention(out, lse + 1000, out, lse + 1000)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse + 1000 + torch.tensor(2.0).log())


def test_compiles_whole_and_checks_shapes():
    q, k, v = inputs(5, 8, 8, dtype=torch.float32)
    part = exact(q, k, v)
    compiled = torch.compile(sage_cute.merge_attention, fullgraph=True)
    for a, b in zip(compiled(*part, *part), sage_cute.merge_attention(*part, *part), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ShapeError, match="transpose lse"):
        sage_cute.merge_attention(part[0], part[1].mT, *part)


@pytest.mark.parametrize("policy", ["fast", "accurate", "sagebwd"])
def test_int8_parts_are_as_good_as_the_whole(policy):
    """Each part smooths its own K: the LSE that is merged by is that of the original K."""
    q, k, v = (
        x.detach().bfloat16() for x in inputs(64, 300, 300, dtype=torch.float32, head_dim=64)
    )
    k = k + 5 * torch.randn(1, 2, 1, 64).bfloat16()
    parts = [
        sage_cute.attention(q, k[:, :, a], v[:, :, a], policy=policy, return_lse=True)
        for a in (slice(0, 130), slice(130, 300))
    ]
    out, lse = sage_cute.merge_attention(*parts[0], *parts[1])
    truth = attention_reference(q, k, v, causal=False)
    assert rel_l2(out, truth.out) < 0.04  # the bound for one call
    assert (lse - truth.lse).abs().max() < 0.05
