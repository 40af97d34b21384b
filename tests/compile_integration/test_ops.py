"""Every op against its own fake rule, over the shapes and strides of real models."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import sage_cute  # noqa: F401  registers the ops
from sage_cute.policies import resolve

SAGE = torch.ops.sage
# One preset of each set of saved tensors, and mixes that save q or k themselves, not codes.
POLICIES = {
    "fast": torch.bfloat16,
    "sagebwd": torch.float16,
    "fast:qk=16bit,s=16bit": torch.bfloat16,
    "sagebwd:smooth_q=true,smooth_k=false": torch.float32,
}


def backward_arguments(q, k, v, policy, *, dlse, causal=True):
    out, lse, *saved = SAGE.attn_fwd(q, k, v, None, causal, policy)
    mix = resolve(policy)
    return (
        torch.randn_like(out),
        torch.randn_like(lse) if dlse else None,
        None if mix.saves_q_codes else q,
        None if mix.saves_k_codes else k,
        v,
        out,
        lse,
        *saved,
        None,
        causal,
        policy,
    )


def described(tensors):
    return [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in tensors]


# opcheck's dynamic-shape AOT test takes seconds: everywhere once, the others over the whole grid.
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("name", ["attn", "attn_with_lse"])
def test_opcheck_of_public_ops(qkv, name) -> None:
    op = getattr(SAGE, name).default
    tensors = qkv("bshd", seqlen_q=65, seqlen_k=130, requires_grad=True)
    opcheck(op, tensors, {"is_causal": True})
    for subset in ("", "q", "kv"):
        for tensor, letter in zip(tensors, "qkv", strict=True):
            tensor.requires_grad_(letter in subset)
        opcheck(op, tensors, {"is_causal": True}, test_utils=QUICK)


@pytest.mark.parametrize("policy", ["fast", "sagebwd:smooth_q=true,smooth_k=false"])
def test_opcheck_of_kernel_level_ops(qkv, policy) -> None:
    q, k, v = qkv("packed", dtype=torch.bfloat16)
    opcheck(SAGE.attn_infer.default, (q, k, v, 0.3, False, policy))
    # On leaves that need no gradient: of a gradient's gradient opcheck would find the refusal.
    opcheck(SAGE.attn_backward.default, backward_arguments(q, k, v, policy, dlse=True))
    q, k, v = (x.requires_grad_() for x in qkv("bshd", seqlen_q=65, seqlen_k=130))
    opcheck(SAGE.attn_fwd.default, (q, k, v, None, True, policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_opcheck_over_layouts_and_policies(qkv, layout, policy) -> None:
    q, k, v = qkv(layout, dtype=POLICIES[policy])
    for op, arguments in (
        (SAGE.attn_fwd, (q, k, v, None, True, policy)),
        (SAGE.attn_infer, (q, k, v, 0.3, False, policy)),
        (SAGE.attn_backward, backward_arguments(q, k, v, policy, dlse=False)),
    ):
        opcheck(op.default, arguments, test_utils=QUICK)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [(70, 70), (1, 1), (3, 200), (129, 64), (0, 5), (5, 0)])
def test_fake_and_real_agree_on_every_output(qkv, layout, policy, lengths) -> None:
    if layout == "packed" and lengths[0] != lengths[1]:
        return  # one length by construction
    q, k, v = qkv(layout, seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=24)
    arguments = backward_arguments(q, k, v, policy, dlse=True)
    for name, args in (
        ("attn_fwd", (q, k, v, None, True, policy)),
        ("attn_infer", (q, k, v, None, True, policy)),
        ("attn_backward", arguments),
        ("attn_with_lse", (q, k, v)),
    ):
        op = getattr(SAGE, name).default
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
            expected = described(op(*fakes))
        assert described(op(*args)) == expected, name


def test_outputs_alias_nothing_and_inputs_stay_untouched(qkv, layout) -> None:
    q, k, v = qkv(layout, dtype=torch.bfloat16)
    before = [x.clone() for x in (q, k, v)]
    versions = [x._version for x in (q, k, v)]
    results = [
        *SAGE.attn_fwd(q, k, v, None, True, "fast"),
        *SAGE.attn_infer(q, k, v, None, True, "fast"),
        *SAGE.attn_backward(*backward_arguments(q, k, v, "fast", dlse=True)),
    ]
    storages = [x.untyped_storage()._cdata for x in (q, k, v, *results)]
    assert len(set(storages)) == len({*storages[:3]}) + len(results)
    assert [x._version for x in (q, k, v)] == versions
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


def test_any_layout_gives_what_contiguous_copies_give(qkv, layout) -> None:
    tensors = qkv(layout, dtype=torch.bfloat16)
    copies = [x.contiguous().clone().requires_grad_() for x in tensors]
    views = [x.detach().requires_grad_() for x in tensors]
    dout = torch.randn(2, 70, 4, 32, dtype=torch.bfloat16).transpose(1, 2)
    results = []
    for q, k, v in (views, copies):
        out, lse = SAGE.attn_with_lse(q, k, v, is_causal=True)
        torch.autograd.backward([out, lse], [dout, lse.detach()])
        results.append([out, lse, q.grad, k.grad, v.grad])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_policy_strings_of_one_mix_give_one_result(qkv) -> None:
    q, k, v = qkv()
    assert torch.equal(SAGE.attn(q, k, v), SAGE.attn(q, k, v, policy="default"))
    assert torch.equal(
        SAGE.attn(q, k, v, policy="accurate"),
        SAGE.attn(q, k, v, policy="fast:dp=16bit,dp_v=dequantized,p_scale=per_block"),
    )
    assert not torch.equal(SAGE.attn(q, k, v, policy="sagebwd"), SAGE.attn(q, k, v))


def test_meta_tensors_have_shapes(qkv) -> None:
    q, k, v = (x.to("meta") for x in qkv("bshd", seqlen_k=33))
    out, lse = SAGE.attn_with_lse(q, k, v)
    assert out.shape == q.shape and out.stride() == q.stride() and lse.shape == q.shape[:3]
