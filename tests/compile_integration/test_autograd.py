"""Gradients of the public ops: right for any subset of inputs, refused where there are none."""

from __future__ import annotations

import pytest
import torch

import sage_cute
from sage_cute.errors import DoubleBackwardError, UnsupportedError
from sage_cute.numerics import attention_reference, attention_reference_backward, rel_l2

SAGE = torch.ops.sage
BOUND = 0.06  # numerics.md section 5: the loosest bound of `fast` (dQ); a wrong formula is far off


def gradients(q, k, v, dout, dlse, **kwargs):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = SAGE.attn_with_lse(*leaves, **kwargs)
    pairs = [(out, dout), (lse, dlse)]
    torch.autograd.backward(*zip(*[p for p in pairs if p[1] is not None], strict=True))
    return [x.grad for x in leaves]


@pytest.mark.parametrize("use", ["out", "lse", "both"])
@pytest.mark.parametrize("smooth", ["true", "false"])
@pytest.mark.parametrize("lengths", [(70, 70), (40, 100), (100, 40)])
def test_gradients_through_out_and_lse(qkv, use, smooth, lengths) -> None:
    q, k, v = qkv(seqlen_q=lengths[0], seqlen_k=lengths[1])
    k = k + 3 * torch.randn(1, 2, 1, 32)  # a mean to smooth away, and to put back into the LSE
    out = torch.randn_like(q)
    dout = out if use != "lse" else torch.zeros_like(out)
    dlse = torch.randn(q.shape[:3]) if use != "out" else None
    truth, _ = attention_reference_backward(dout, q, k, v, dlse=dlse, causal=True)
    if use == "lse":
        dout = None
    policy = f"fast:smooth_k={smooth}"
    for name, x, y in zip(
        "qkv", gradients(q, k, v, dout, dlse, is_causal=True, policy=policy), truth, strict=True
    ):
        if use == "lse" and name == "v":
            # P is not involved: what is left is the backward's rounding of zero.
            assert x.abs().max() == 0
            continue
        # Without smoothing the mean of K takes most of the INT8 range: 4 times the error.
        assert rel_l2(x, y) < (BOUND if smooth == "true" else 4 * BOUND), name


@pytest.mark.parametrize("subset", ["q", "k", "v", "qk", "qv", "kv"])
def test_any_subset_may_require_grad(qkv, subset) -> None:
    everything = qkv(requires_grad=True)
    SAGE.attn(*everything).sum().backward()
    some = [
        x.detach().clone().requires_grad_(name in subset)
        for name, x in zip("qkv", everything, strict=True)
    ]
    SAGE.attn(*some).sum().backward()
    for name, a, b in zip("qkv", everything, some, strict=True):
        assert torch.equal(a.grad, b.grad) if name in subset else b.grad is None


@pytest.mark.parametrize("op", [SAGE.attn, SAGE.attn_with_lse])
def test_no_grad_and_training_agree(qkv, op) -> None:
    tensors = qkv(requires_grad=True)
    with torch.no_grad():
        expected = op(*tensors, is_causal=True)
    result = op(*tensors, is_causal=True)
    for a, b in zip(
        *(x if isinstance(x, tuple) else (x,) for x in (result, expected)), strict=True
    ):
        assert torch.equal(a, b) and a.requires_grad and not b.requires_grad


def test_attn_fwd_itself_is_differentiable(qkv) -> None:
    direct, public = qkv(requires_grad=True), []
    public = [x.detach().clone().requires_grad_() for x in direct]
    SAGE.attn_fwd(*direct, None, True, "fast")[0].sum().backward()
    SAGE.attn(*public, is_causal=True).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(direct, public, strict=True))


def test_attn_infer_refuses_to_be_differentiated(qkv) -> None:
    out, *_ = SAGE.attn_infer(*qkv(requires_grad=True), None, True, "fast")
    with pytest.raises(RuntimeError, match=r"saves nothing for a backward: call sage\.attn"):
        out.sum().backward()


@pytest.mark.parametrize("op", [SAGE.attn, SAGE.attn_with_lse])
def test_double_backward_raises(qkv, op) -> None:
    tensors = qkv(requires_grad=True)
    result = op(*tensors)
    out = result if isinstance(result, torch.Tensor) else result[0]
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="double backward"):
        grads[0].sum().backward()


def test_forward_mode_raises(qkv) -> None:
    q, k, v = qkv()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            SAGE.attn(dual, k, v)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_functional_gradients_raise_rather_than_vanish(qkv, transform) -> None:
    q, k, v = qkv()
    with pytest.raises(RuntimeError):
        transform(lambda x: SAGE.attn(x, k, v).sum())(q)


def test_stride_zero_and_missing_gradients(qkv) -> None:
    tensors = qkv(requires_grad=True)
    SAGE.attn(*tensors).sum().backward()  # dout has strides 0
    expanded = [x.grad.clone() for x in tensors]
    for x in tensors:
        x.grad = None
    out = SAGE.attn(*tensors)
    out.backward(torch.ones_like(out))
    assert all(torch.equal(x.grad, y) for x, y in zip(tensors, expanded, strict=True))


def test_deterministic_over_30_runs(qkv) -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3])
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(q, k, v, dout, dlse, is_causal=True)
        for _ in range(29):
            again = gradients(q, k, v, dout, dlse, is_causal=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_rows_without_keys_are_safe(qkv) -> None:
    q, k, v = qkv(seqlen_q=100, seqlen_k=40)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = SAGE.attn_with_lse(*leaves, is_causal=True)
    assert (out[:, :, :60] == 0).all() and (lse[:, :, :60] == -torch.inf).all()
    assert lse[:, :, 60:].isfinite().all()
    dlse = torch.randn_like(lse)
    torch.autograd.backward([out, lse], [torch.randn_like(out), dlse])
    assert all(x.grad.isfinite().all() for x in leaves)
    assert (q.grad[:, :, :60] == 0).all()


@pytest.mark.parametrize("policy", ["sagebwd", "int8", "fast", "accurate", "sagebwd:smooth_q=true"])
@pytest.mark.parametrize("which", ["q", "dout", "dlse"])
@pytest.mark.parametrize("value", [100.0, 1e30, torch.inf, torch.nan])
def test_what_rows_without_keys_hold_does_not_matter(qkv, policy, which, value) -> None:
    """It sets no scale and brings no NaN: bit for bit what zeros there give."""
    q, k, v = qkv(seqlen_q=128, seqlen_k=16)
    inputs = {"q": q, "dout": torch.randn_like(q), "dlse": torch.randn(q.shape[:3])}
    results = []
    for blind in (0.0, value):
        x = {name: t.clone() for name, t in inputs.items()}
        x[which][:, :, :112] = blind
        args = x["q"], k, v, x["dout"], x["dlse"]
        results.append(gradients(*args, is_causal=True, policy=policy))
        results[-1] += SAGE.attn_with_lse(x["q"], k, v, is_causal=True, policy=policy)
    for zeros, other in zip(*results, strict=True):
        assert torch.equal(zeros, other)
    truth = attention_reference_backward(
        x["dout"][:, :, 112:], q[:, :, 112:], k, v, causal=True, dlse=x["dlse"][:, :, 112:]
    )[0]
    assert rel_l2(results[1][2], truth.dv) < 0.1  # numerics.md section 5: the loosest, `sagebwd`


@pytest.mark.parametrize("causal", [False, True])
def test_lse_is_that_of_the_original_k(qkv, causal) -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    k = k + 20 * torch.randn(1, 2, 1, 32, dtype=torch.bfloat16)
    _, lse = SAGE.attn_with_lse(q, k, v, is_causal=causal)
    truth = attention_reference(q, k, v, causal=causal)
    assert lse.dtype == torch.float32
    # Scores carry the INT8 error of q and k - mean(k); the mean's part, ~100, comes back exactly.
    assert (lse - truth.lse).abs().max() < 0.05 < truth.lse.abs().max() / 100


def test_halves_of_the_keys_merge_to_the_whole(qkv) -> None:
    q, k, v = qkv(seqlen_k=96, kv_heads=1)
    k = k + torch.cat([torch.zeros(48, 1), torch.full((48, 1), 2.0)])  # halves with other means
    parts = [SAGE.attn_with_lse(q, k[:, :, s], v[:, :, s]) for s in (slice(48), slice(48, 96))]
    (o1, l1), (o2, l2) = parts
    weight = torch.sigmoid(l1 - l2).unsqueeze(-1)
    merged, lse = o1 * weight + o2 * (1 - weight), torch.logaddexp(l1, l2)
    out, whole = SAGE.attn_with_lse(q, k, v)
    assert rel_l2(merged, out) < 0.05 and (lse - whole).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["fast", "accurate", "sagebwd"])
def test_saved_activations_are_smaller_than_those_of_16_bit_attention(qkv, policy, dtype) -> None:
    tensors = qkv(dtype=dtype, seqlen_q=256, seqlen_k=256, kv_heads=4, head_dim=128)
    tensors = [x.requires_grad_() for x in tensors]
    seen: dict[int, int] = {}

    def record(x: torch.Tensor) -> torch.Tensor:
        seen[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        SAGE.attn(*tensors, policy=policy)
    tokens = 2 * 4 * 256
    flash = tokens * (4 * 2 * 128 + 4)  # q, k, v, out and the LSE
    assert sum(seen.values()) < 0.78 * flash  # 6 D + 12 bytes against 8 D + 4, and k_mean


def test_module_trains_and_bounds_scores(qkv) -> None:
    module = sage_cute.nn.SageAttention(32, qk_norm=True, causal=True, policy="accurate")
    assert sorted(module.state_dict()) == ["k_norm.weight", "q_norm.weight"]
    q, k, v = qkv()
    with torch.no_grad():
        module.q_norm.weight.uniform_(0.5, 1.5)
    out = module(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(
        module.q_norm(q), module.k_norm(k), v, is_causal=True, enable_gqa=True
    )
    assert rel_l2(out, expected) < 0.04
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in module.parameters())
    turned = module(q, k, v, rotary=lambda x: x.roll(1, -1))
    assert rel_l2(turned, expected) < 0.04  # the same rotation of q and k changes no score
    assert not list(sage_cute.nn.SageAttention(32).parameters())
    with pytest.raises(sage_cute.errors.PolicyError, match="known policies"):
        sage_cute.nn.SageAttention(32, policy="fastest")
