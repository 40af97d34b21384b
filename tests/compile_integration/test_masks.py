"""Windows, key lengths and a given mean of K through the ops: compiled, exported, in autograd."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import sage_cute
from sage_cute.numerics import attention_reference_backward, rel_l2

SAGE = torch.ops.sage
LENGTHS = torch.tensor([70, 31])
MEAN = torch.randn(2, 2, 32)
CASES = {
    "window": {"window": (9, 20)},
    "causal window": {"causal": True, "window": (9, None)},
    "lengths": {"key_lengths": LENGTHS},
    "int32 lengths, strided": {"key_lengths": LENGTHS.int().repeat_interleave(2)[::2]},
    "mean": {"causal": True, "k_mean": MEAN.bfloat16()},
    "all": {"causal": True, "window": (12, 5), "key_lengths": LENGTHS, "k_mean": MEAN.double()},
}


@pytest.fixture(params=CASES)
def masks(request):
    return CASES[request.param]


def run(function, tensors, douts=None):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    loss = out.sum() if douts is None else (out * douts[0]).sum()
    (loss + torch.where(lse.isfinite(), lse, 0.0).sin().sum()).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def attention(masks, policy="default"):
    return lambda q, k, v: sage_cute.attention(q, k, v, policy=policy, return_lse=True, **masks)


@pytest.mark.parametrize("op", ["attn", "attn_with_lse"])
def test_opcheck_of_public_ops(qkv, op) -> None:
    q, k, v = qkv("bshd", requires_grad=True)
    more = {"window_left": 9, "is_causal": True}
    opcheck(getattr(SAGE, op).default, (q, k, v, LENGTHS, MEAN), more)
    opcheck(getattr(SAGE, op).default, (q, k, v, None, MEAN), {"window_right": 3})


@pytest.mark.parametrize("policy", ["fast", "sagebwd:smooth_q=true", "fast:qk=16bit,s=16bit"])
def test_opcheck_of_kernel_level_ops(qkv, policy) -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    shared = None, True, policy, LENGTHS, 9, -1
    opcheck(SAGE.attn_infer.default, (q, k, v, *shared, MEAN))
    out, lse, *saved = SAGE.attn_fwd(q, k, v, *shared, MEAN)
    assert torch.equal(saved[-1], MEAN)
    arguments = torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *saved, *shared
    opcheck(SAGE.attn_backward.default, arguments)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    opcheck(SAGE.attn_fwd.default, (q, k, v, *shared, MEAN))


@pytest.mark.parametrize("policy", ["fast", "sagebwd"])
def test_inductor_fullgraph_equals_eager(qkv, masks, policy) -> None:
    tensors, function = qkv("bshd"), attention(masks, policy)
    results = (run(f, tensors) for f in (torch.compile(function, fullgraph=True), function))
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        if name == "out":
            assert torch.equal(a, b)
        else:  # the bias of the LSE is fused, and its gradient: a code at a tie may flip
            finite = a.isfinite()
            assert torch.equal(finite, b.isfinite())
            assert rel_l2(a[finite], b[finite]) < 1e-3, name


def test_lengths_and_means_are_inputs_of_the_graph(qkv) -> None:
    """Other values and other windows of the same kind run the same graph; None is another one."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sage_cute.attention, backend=counter, fullgraph=True)
    q, k, v = qkv()
    for lengths in (LENGTHS, torch.tensor([0, 1]), torch.tensor([70, 70])):
        for mean in (MEAN, -MEAN):
            masks = {"key_lengths": lengths, "k_mean": mean, "window": (9, None)}
            expected = sage_cute.attention(q, k, v, **masks)
            assert torch.equal(compiled(q, k, v, **masks), expected)
    assert counter.frame_count == 1


def test_graphs_hold_the_kernel_level_ops_once(qkv, graphs_of) -> None:
    function = lambda q, k, v, lengths, mean: sage_cute.attention(
        q, k, v, key_lengths=lengths, k_mean=mean, window=(3, 3)
    )
    more = LENGTHS, MEAN
    assert graphs_of(function, *qkv(requires_grad=True), *more) == [
        ["sage.attn_fwd.default"],
        ["sage.attn_backward.default"],
    ]
    assert graphs_of(function, *qkv(), *more) == [["sage.attn_infer.default"]]


def test_export_with_lengths_as_an_input(qkv) -> None:
    class Model(torch.nn.Module):
        def forward(self, q, k, v, lengths, mean):
            return sage_cute.attention(q, k, v, key_lengths=lengths, k_mean=mean, window=(9, 0))

    tensors = *qkv(), LENGTHS, MEAN
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    shapes = *[{2: seqlen}] * 3, None, None
    program = torch.export.export(Model(), tensors, dynamic_shapes=shapes, strict=False)
    other = *qkv(seqlen_q=131, seqlen_k=131), torch.tensor([131, 2]), MEAN + 1
    assert torch.equal(program.module()(*other), Model()(*other))
    decomposed = program.run_decompositions().module()
    assert torch.equal(decomposed(*other), Model()(*other))


def test_fake_and_real_agree(qkv, layout) -> None:
    tensors = *qkv(layout), LENGTHS, MEAN
    with FakeTensorMode() as mode:
        fake = SAGE.attn_with_lse(*map(mode.from_tensor, tensors), window_left=3)
    real = SAGE.attn_with_lse(*tensors, window_left=3)
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("subset", ["q", "k", "v", "qk", "qv", "kv"])
def test_any_subset_may_require_grad_and_dout_any_strides(qkv, masks, subset) -> None:
    tensors = qkv()
    douts = (
        torch.randn(2, 70, 32, 4).permute(0, 3, 1, 2),
        torch.randn(1, 1, 1, 32).expand(2, 4, 70, 32),
    )
    for dout in douts:
        results = []
        for letters, gradient in (("qkv", dout.contiguous()), (subset, dout)):
            pairs = zip(tensors, "qkv", strict=True)
            leaves = [x.detach().clone().requires_grad_(n in letters) for x, n in pairs]
            out = sage_cute.attention(*leaves, **masks)
            out.backward(gradient)
            results.append({n: x.grad for n, x in zip("qkv", leaves, strict=True)})
        for name in "qkv":
            whole, some = (result[name] for result in results)
            assert torch.equal(whole, some) if name in subset else some is None


def test_the_lse_and_its_gradient_are_those_of_the_original_k(qkv) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    masks = {"causal": True, "window": (12, None), "key_lengths": LENGTHS}
    dlse = torch.randn(2, 4, 70)
    _, lse = sage_cute.attention(q, k, v, k_mean=MEAN, return_lse=True, **masks)
    lse.backward(dlse)
    truth, _ = attention_reference_backward(torch.zeros_like(q), q, k, v, dlse=dlse, **masks)
    assert rel_l2(q.grad, truth.dq) < 0.06 and rel_l2(k.grad, truth.dk) < 0.06
    assert not v.grad.any() and q.grad.isfinite().all()


def test_a_mean_has_no_gradient(qkv) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    mean = MEAN.clone().requires_grad_()
    sage_cute.attention(q, k, v, k_mean=mean).sum().backward()
    assert mean.grad is None and k.grad is not None
    out = sage_cute.attention(q.detach(), k.detach(), v.detach(), k_mean=mean)
    assert not out.requires_grad


def test_autocast_leaves_lengths_and_means_alone(qkv) -> None:
    q, k, v = qkv()
    masks = {"key_lengths": LENGTHS, "k_mean": MEAN}
    with torch.autocast("cpu", torch.bfloat16):
        out = sage_cute.attention(q, k.bfloat16(), v, **masks)
    expected = sage_cute.attention(*(x.bfloat16() for x in (q, k, v)), **masks)
    assert torch.equal(out, expected)


def test_double_backward_raises(qkv, masks) -> None:
    tensors = qkv(requires_grad=True)
    out = sage_cute.attention(*tensors, **masks)
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    with pytest.raises(sage_cute.errors.DoubleBackwardError, match="double backward"):
        grads[0].sum().backward()


def test_inputs_stay_untouched_and_nothing_is_aliased(qkv) -> None:
    tensors = *qkv(dtype=torch.bfloat16), LENGTHS.clone(), MEAN.clone()
    before = [x.clone() for x in tensors]
    q, k, v, lengths, mean = tensors
    outputs = SAGE.attn_fwd(q, k, v, None, True, "fast", lengths, 5, -1, mean)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    storages = {x.untyped_storage()._cdata for x in (*tensors, *outputs)}
    assert len(storages) == len(tensors) + len(outputs)


def test_layout_bshd_and_the_module_take_them(qkv) -> None:
    q, k, v = qkv()
    masks = {"key_lengths": LENGTHS, "k_mean": MEAN}
    expected = sage_cute.attention(q, k, v, causal=True, window=(7, None), **masks)
    transposed = (x.transpose(1, 2) for x in (q, k, v))
    out = sage_cute.attention(*transposed, causal=True, window=(7, None), layout="bshd", **masks)
    assert torch.equal(out.transpose(1, 2), expected)
    module = sage_cute.nn.SageAttention(32, causal=True, window=(7, None))
    assert torch.equal(module(q, k, v, **masks), expected)
    assert "window=(7, None)" in repr(module)
    with pytest.raises(sage_cute.errors.ShapeError, match="window"):
        sage_cute.nn.SageAttention(32, window=(-3, 0))
