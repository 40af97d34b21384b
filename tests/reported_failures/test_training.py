"""Kinds 26 and 27: the training contract."""

from __future__ import annotations

import itertools

import pytest
import torch

import sage_cute
from sage_cute.errors import DoubleBackwardError, DTypeError
from sage_cute.numerics import rel_l2
from sage_cute.numerics.tolerances import check
from sage_cute.policies import PRESETS
from sage_cute.testing import make_inputs, run_reference

SAGE = torch.ops.sage
BF16 = torch.bfloat16
SUBSETS = [set(s) for n in (1, 2, 3) for s in itertools.combinations("qkv", n)]
ENTRIES = {
    "attention": lambda q, k, v: sage_cute.attention(q, k, v, causal=True),
    "attention bshd": lambda q, k, v: sage_cute.attention(
        *(t.transpose(1, 2) for t in (q, k, v)), causal=True, layout="bshd"
    ).transpose(1, 2),
    "attention_varlen": lambda q, k, v: sage_cute.attention_varlen(
        *(t[0].transpose(0, 1) for t in (q, k, v)),
        *(torch.tensor([0, 40], dtype=torch.int32, device=q.device) for _ in "qk"),
        causal=True,
    ).transpose(0, 1)[None],
    "attn": lambda q, k, v: SAGE.attn(q, k, v, is_causal=True),
    "attn_with_lse": lambda q, k, v: SAGE.attn_with_lse(q, k, v, is_causal=True)[0],
    "attn_fwd": lambda q, k, v: SAGE.attn_fwd(q, k, v, None, True, "fast")[0],
    "module": lambda q, k, v: sage_cute.nn.SageAttention(32, causal=True)(q, k, v),
}


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join(sorted(s)))
@pytest.mark.parametrize("entry", ENTRIES)
def test_26_every_entry_is_differentiable_in_any_subset(device, entry, subset) -> None:
    x = make_inputs("g1", (1, 4, 40, 32), kv_heads=2, dtype=BF16)
    q, k, v, dout = x.to(device)
    leaves = {n: t.requires_grad_(n in subset) for n, t in zip("qkv", (q, k, v), strict=True)}
    out = ENTRIES[entry](*leaves.values())
    assert out.requires_grad
    wanted = [t for n, t in leaves.items() if n in subset]
    truth = run_reference(x, causal=True)
    for name, grad in zip(
        [n for n in leaves if n in subset], torch.autograd.grad(out, wanted, dout), strict=True
    ):
        check(f"reported_d{name}", "any", rel_l2(grad.cpu(), getattr(truth, f"d{name}")))


@pytest.mark.parametrize("policy", PRESETS)
def test_26_the_gradient_of_the_lse_is_not_dropped(device, policy) -> None:
    """Also where out is not used at all, and for K with a mean, which the op puts back."""
    x = make_inputs("g1", (1, 4, 60, 32), kv_heads=2, dtype=BF16)
    x = x._replace(k=x.k + 2 * torch.randn(1, 2, 1, 32).bfloat16(), dout=torch.zeros_like(x.dout))
    dlse = torch.randn(1, 4, 60)
    truth = run_reference(x, dlse=dlse)
    leaves = [t.to(device).requires_grad_() for t in x[:3]]
    _, lse = sage_cute.attention(*leaves, policy=policy, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse, leaves, dlse.to(device), materialize_grads=True)
    check("reported_dq", "any", rel_l2(dq.cpu(), truth.dq))
    check("reported_dk", "any", rel_l2(dk.cpu(), truth.dk))
    assert not dv.any()


def test_26_what_is_not_differentiable_raises(device) -> None:
    q = torch.randn(1, 2, 20, 32, device=device, dtype=BF16, requires_grad=True)
    infer = SAGE.attn_infer(q, q, q, None, True, "fast")
    with pytest.raises(RuntimeError, match="saves nothing for a backward"):
        infer[0].sum().backward()
    scale = torch.tensor(0.1, requires_grad=True)
    with pytest.raises(DTypeError, match="not differentiable"):
        sage_cute.attention(q, q, q, scale=scale)
    saved = SAGE.attn_fwd(q, q, q, None, True, "fast")
    assert not any(t.requires_grad for t in saved[2:])  # codes and scales: of no use to autograd


@pytest.mark.parametrize("op", ["attn", "attn_with_lse"])
@pytest.mark.parametrize("compiled", [False, True])
def test_26_double_backward_raises(op, compiled) -> None:
    q = torch.randn(1, 2, 20, 32, requires_grad=True)
    function = lambda t: getattr(SAGE, op)(t, t, t)
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    result = function(q)
    out = result[0] if isinstance(result, tuple) else result
    with pytest.raises((DoubleBackwardError, RuntimeError), match="double backward"):
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        grad.sum().backward()


@pytest.mark.parametrize("policy", PRESETS)
def test_27_deterministic_algorithms_give_the_same_bits(device, policy) -> None:
    """30 runs on a GPU, where CTAs race; the mode must not raise, nor what it fills memory with
    reach a result."""
    x = make_inputs("llm", (2, 6, 150, 64), kv_heads=2, seqlen_k=201, dtype=BF16).to(device)

    def run():
        leaves = [t.detach().requires_grad_() for t in x[:3]]
        out, lse = SAGE.attn_with_lse(*leaves, is_causal=True, policy=policy)
        return [out, lse, *torch.autograd.grad([out, lse], leaves, [x.dout, torch.ones_like(lse)])]

    want = run()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(30 if device == "cuda" else 2):
            for a, b in zip(run(), want, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)
