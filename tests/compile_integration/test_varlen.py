"""Packed batches through the ops: compiled, exported, in autograd, and refused where wrong."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import sage_cute
from sage_cute import support
from sage_cute.compile_integration.flops import visible_pairs
from sage_cute.errors import ArgumentError, DoubleBackwardError, ShapeError, UnsupportedError
from sage_cute.limits import HOPPER, MASKS, NEITHER
from sage_cute.numerics import attention_reference, rel_l2

SAGE = torch.ops.sage
CU_Q = torch.tensor([2, 41, 41, 110], dtype=torch.int32)  # 39, 0 and 69 queries
CU_K = torch.tensor([0, 70, 90, 130], dtype=torch.int32)  # 70, 20 and 40 keys
MEAN = torch.randn(3, 2, 32)
STATIC = None, True, "fast", CU_Q, CU_K, 69, None, 30, -1
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (9, 20), "max_seqlen_q": 69, "max_seqlen_k": 70},
    "mean": {"k_mean": MEAN.bfloat16(), "causal": True},
}


@pytest.fixture(params=OPTIONS)
def options(request):
    return OPTIONS[request.param]


@pytest.fixture(params=["contiguous", "slices of one projection", "last stride 2", "heads first"])
def packed(request):
    return make(request.param)


def make(layout="contiguous", dtype=torch.float32, requires_grad=False, total_q=115, total_k=133):
    """q, k and v with tokens that belong to nobody at the ends."""

    def one(tokens, heads):
        if layout == "slices of one projection":
            return torch.randn(tokens, 2 * heads, 32, dtype=dtype)[:, heads:]
        if layout == "last stride 2":
            return torch.randn(tokens, heads, 32, 2, dtype=dtype)[..., 1]
        if layout == "heads first":
            return torch.randn(heads, tokens, 32, dtype=dtype).transpose(0, 1)
        return torch.randn(tokens, heads, 32, dtype=dtype)

    tensors = one(total_q, 4), one(total_k, 2), one(total_k, 2)
    return tuple(x.requires_grad_(requires_grad) for x in tensors)


def one_by_one(q, k, v, *, k_mean=None, max_seqlen_q=None, max_seqlen_k=None, **options):
    """out and LSE through the dense op, differentiable."""
    out, lse = torch.zeros_like(q), torch.full((4, q.shape[0]), -torch.inf)
    for b in range(3):
        rows, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        one = (x[s].transpose(0, 1)[None] for x, s in ((q, rows), (k, keys), (v, keys)))
        mean = None if k_mean is None else k_mean[b : b + 1]
        o, s = sage_cute.attention(*one, k_mean=mean, return_lse=True, **options)
        out[rows], lse[:, rows] = o[0].transpose(0, 1), s[0]
    return out, lse


def gradients(function, tensors, dout, dlse):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    torch.autograd.backward([out, torch.where(lse.isfinite(), lse, 0.0)], [dout, dlse])
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def varlen(**options):
    return lambda q, k, v: sage_cute.attention_varlen(
        q, k, v, CU_Q, CU_K, return_lse=True, **options
    )


def test_equals_the_dense_op_one_by_one(packed, options) -> None:
    dout, dlse = torch.randn(4, 115, 32).transpose(0, 1), torch.randn(115, 4).T
    got = gradients(varlen(**options), packed, dout, dlse)
    want = gradients(lambda *x: one_by_one(*x, **options), packed, dout, dlse)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert torch.equal(a, b), name


def test_lse_is_that_of_the_original_k() -> None:
    q, k, v = make()
    k = k + 10 * torch.randn(1, 2, 32)
    _, lse = varlen(causal=True)(q, k, v)
    for b in range(3):
        rows, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        one = (x[s].transpose(0, 1)[None] for x, s in ((q, rows), (k, keys), (v, keys)))
        truth = attention_reference(*one, causal=True).lse[0]
        assert torch.equal(lse[:, rows].isinf(), truth.isinf())
        seen = truth.isfinite()
        assert torch.allclose(lse[:, rows][seen].double(), truth[seen], rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["attn_varlen", "attn_varlen_with_lse"])
def test_opcheck_of_public_ops(name) -> None:
    for mean in (None, MEAN):
        opcheck(
            getattr(SAGE, name).default,
            (*make("heads first", requires_grad=True), CU_Q, CU_K, mean),
            {"is_causal": True, "max_seqlen_q": 69},
        )


@pytest.mark.parametrize("policy", ["fast", "sagebwd:smooth_q=true", "fast:qk=16bit,s=16bit"])
def test_opcheck_of_kernel_level_ops(policy) -> None:
    q, k, v = make(dtype=torch.bfloat16)
    static = *STATIC[:2], policy, *STATIC[3:]
    opcheck(SAGE.attn_varlen_infer.default, (q, k, v, *static))
    out, lse, *saved = SAGE.attn_varlen_fwd(q, k, v, *static, MEAN)
    given = torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *saved
    opcheck(SAGE.attn_varlen_backward.default, (*given, *static))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    opcheck(SAGE.attn_varlen_fwd.default, (*leaves, *static, MEAN))


def test_fake_and_real_agree_on_every_output(packed) -> None:
    def described(tensors):
        return [(x.shape, x.stride(), x.dtype) for x in tensors]

    saved = SAGE.attn_varlen_fwd(*packed, *STATIC)
    given = torch.randn_like(saved[0]), None, None, None, packed[2], *saved
    for op, arguments in (
        (SAGE.attn_varlen_fwd, (*packed, *STATIC)),
        (SAGE.attn_varlen_infer, (*packed, *STATIC, MEAN)),
        (SAGE.attn_varlen_backward, (*given, *STATIC)),
    ):
        with FakeTensorMode() as mode:
            is_tensor = lambda x: isinstance(x, torch.Tensor)
            fake = op(*(mode.from_tensor(x) if is_tensor(x) else x for x in arguments))
        assert described(fake) == described(op(*arguments))


def test_inductor_fullgraph_equals_eager(options) -> None:
    tensors, function = make(), varlen(**options)
    dout, dlse = torch.randn(115, 4, 32), torch.randn(4, 115)
    results = (
        gradients(f, tensors, dout, dlse)
        for f in (torch.compile(function, fullgraph=True), function)
    )
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        finite = a.isfinite()
        assert torch.equal(finite, b.isfinite())
        assert rel_l2(a[finite], b[finite]) < (1e-12 if name == "out" else 1e-5), name


def test_lengths_are_inputs_of_the_graph() -> None:
    """Other bounds, totals, and maxima: static once, dynamic once."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sage_cute.attention_varlen, backend=counter, fullgraph=True)
    for total, longest in ((64, 50), (100, 70), (333, 200), (90, 60), (1000, 900)):
        q, k, v = make(total_q=total, total_k=total)
        for last in (total, total - 3):
            cu = torch.tensor([0, longest, longest, last], dtype=torch.int32)
            arguments = q, k, v, cu, cu, longest, longest
            expected = sage_cute.attention_varlen(*arguments, causal=True)
            assert torch.equal(compiled(*arguments, causal=True), expected)
    assert counter.frame_count <= 3


def test_graphs_hold_the_kernel_level_ops_once(graphs_of) -> None:
    function = lambda q, k, v, a, b: sage_cute.attention_varlen(q, k, v, a, b, causal=True)
    assert graphs_of(function, *make(requires_grad=True), CU_Q, CU_K) == [
        ["sage.attn_varlen_fwd.default"],
        ["sage.attn_varlen_backward.default"],
    ]
    assert graphs_of(function, *make(), CU_Q, CU_K) == [["sage.attn_varlen_infer.default"]]


def test_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, q, k, v, cu):
            return sage_cute.attention_varlen(q, k, v, cu, cu, causal=True)

    total, count = torch.export.Dim("total", min=2), torch.export.Dim("count", min=2)
    shapes = *[{0: total}] * 3, {0: count}
    cu = torch.tensor([0, 10, 40], dtype=torch.int32)
    example = *make(total_q=64, total_k=64), cu
    program = torch.export.export(Model(), example, dynamic_shapes=shapes, strict=False)
    other = *make(total_q=99, total_k=99), torch.tensor([3, 3, 50, 99], dtype=torch.int32)
    assert torch.equal(program.module()(*other), Model()(*other))
    assert torch.equal(program.run_decompositions().module()(*other), Model()(*other))


@pytest.mark.parametrize("subset", ["q", "k", "v", "qv", "kv"])
def test_any_subset_may_require_grad_and_dout_any_strides(subset) -> None:
    tensors = make()
    for dout in (torch.ones(1, 1, 32).expand(115, 4, 32), torch.randn(4, 32, 115).permute(2, 0, 1)):
        results = []
        for letters, gradient in (("qkv", dout.contiguous()), (subset, dout)):
            pairs = zip(tensors, "qkv", strict=True)
            leaves = [x.detach().clone().requires_grad_(n in letters) for x, n in pairs]
            sage_cute.attention_varlen(*leaves, CU_Q, CU_K, causal=True).backward(gradient)
            results.append([x.grad for x in leaves])
        for name, whole, some in zip("qkv", *results, strict=True):
            assert torch.equal(whole, some) if name in subset else some is None


def test_what_belongs_to_nobody_reaches_nothing() -> None:
    q, k, v = make()
    with torch.no_grad():
        q[:2] = q[110:] = k[130:] = v[130:] = torch.nan
    dout, dlse = torch.randn(115, 4, 32), torch.randn(4, 115)
    dout[:2] = dout[110:] = torch.nan
    dlse[:, :2] = torch.nan
    out, lse, *grads = gradients(varlen(causal=True), (q, k, v), dout, dlse)
    assert not out[:2].any() and not out[110:].any() and (lse[:, :2] == -torch.inf).all()
    for grad in grads:
        assert grad.isfinite().all()
    assert not grads[0][:2].any() and not grads[0][110:].any() and not grads[1][130:].any()


@pytest.mark.parametrize("sequences", [0, 1, 3])
@pytest.mark.parametrize(("total_q", "total_k"), [(0, 0), (5, 0), (0, 5)])
def test_nothing_to_attend(sequences, total_q, total_k) -> None:
    tensors = make(total_q=total_q, total_k=total_k, requires_grad=True)
    cu_q, cu_k = (
        torch.tensor([0] + [n] * sequences, dtype=torch.int32) for n in (total_q, total_k)
    )
    out, lse = sage_cute.attention_varlen(*tensors, cu_q, cu_k, return_lse=True)
    assert out.shape == (total_q, 4, 32) and lse.shape == (4, total_q)
    assert not out.any() and (lse == -torch.inf).all()
    out.sum().backward()
    assert not any(x.grad.any() for x in tensors)


def test_autocast(options) -> None:
    q, k, v = make()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = varlen(**options)(q, k.bfloat16(), v)
    expected, expected_lse = varlen(**options)(*(x.bfloat16() for x in (q, k, v)))
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("op", ["attn_varlen", "attn_varlen_with_lse"])
def test_double_backward_raises(op) -> None:
    tensors = make(requires_grad=True)
    result = getattr(SAGE, op)(*tensors, CU_Q, CU_K)
    out = result if isinstance(result, torch.Tensor) else result[0]
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="double backward"):
        grads[0].sum().backward()
    outputs = SAGE.attn_varlen_infer(*tensors, *STATIC)
    with pytest.raises(RuntimeError, match="saves nothing for a backward"):
        outputs[0].sum().backward()


def test_flops_are_those_of_equal_lengths() -> None:
    tensors = make(total_q=120, total_k=240, requires_grad=True)
    cu_q, cu_k = (torch.tensor([0, n, 3 * n], dtype=torch.int32) for n in (40, 80))
    product = 2 * 4 * 32 * 2 * visible_pairs(60, 120, True, 9)  # two sequences
    with FlopCounterMode(display=False) as counter:
        out = sage_cute.attention_varlen(*tensors, cu_q, cu_k, causal=True, window=(9, None))
    assert counter.get_total_flops() == 2 * product
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * product


BAD = {
    "four dimensions": (
        ShapeError,
        "must be .tokens, heads, head_dim",
        {"q": torch.ones(1, 1, 4, 32)},
    ),
    "int64": (ShapeError, "cu_seqlens_q must be int32 of shape .sequences", {"cu_q": CU_Q.long()}),
    "none": (ShapeError, "cu_seqlens_k must be int32", {"cu_k": CU_K[:0]}),
    "two counts": (ShapeError, "must have one length, got .4,., .3,.", {"cu_k": CU_K[:3]}),
    "elsewhere": (UnsupportedError, "cu_seqlens_q is on meta", {"cu_q": CU_Q.to("meta")}),
    "head_dim": (ShapeError, "need the same head_dim", {"q": torch.ones(115, 4, 40)}),
    "heads": (ShapeError, "3 query heads are no multiple of 2", {"q": torch.ones(115, 3, 32)}),
    "mean": (ShapeError, "k_mean must be", {"k_mean": MEAN[:2]}),
    "window": (ShapeError, "window 5 must be", {"window": 5}),
    "lengths": (ArgumentError, "attention_varlen: unknown keyword key_lengths", {"key_lengths": 1}),
    "mask": (ArgumentError, "unknown keyword attn_mask; not supported", {"attn_mask": None}),
}


def call_with(change, function=None, convert=lambda x: x):
    q, k, v = make()
    arguments = {"q": q, "k": k, "v": v, "cu_q": CU_Q, "cu_k": CU_K}
    options = {name: x for name, x in change.items() if name not in arguments}
    arguments |= {name: x for name, x in change.items() if name in arguments}
    arguments = {name: convert(x) for name, x in arguments.items()}
    options = {n: convert(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    return (function or sage_cute.attention_varlen)(*arguments.values(), **options)


@pytest.mark.parametrize("name", BAD)
def test_errors_in_eager_fake_and_compiled(name) -> None:
    error, message, change = BAD[name]
    with pytest.raises(error, match=message):
        call_with(change)
    with FakeTensorMode() as mode, pytest.raises(error, match=message):
        call_with(change, convert=mode.from_tensor)
    compiled = torch.compile(sage_cute.attention_varlen, backend="aot_eager")
    with pytest.raises((error, torch._dynamo.exc.TorchRuntimeError), match=message):
        call_with(change, compiled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_q": [0, 50, 40, 110]}, "must not decrease and lie within 0 and the 115 tokens of q"),
        ({"cu_q": [0, 50, 60, 116]}, "lie within 0 and the 115 tokens of q"),
        ({"cu_k": [-1, 50, 60, 70]}, "lie within 0 and the 133 tokens of k"),
        ({"max_seqlen_q": 68}, "max_seqlen_q=68, but a sequence has 69 tokens"),
        ({"max_seqlen_k": 10}, "max_seqlen_k=10, but a sequence has 70 tokens"),
    ],
)
def test_wrong_bounds_are_refused_on_the_cpu(change, message) -> None:
    as_bounds = lambda x: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x
    with pytest.raises(ShapeError, match=message):
        call_with({name: as_bounds(x) for name, x in change.items()})


def test_without_a_kernel_it_is_refused_in_the_fake_rule(monkeypatch) -> None:
    monkeypatch.setitem(HOPPER.masks, "packed", NEITHER)
    support._why_not.cache_clear()
    with FakeTensorMode():
        q = torch.empty(8, 2, 64, device="cuda", dtype=torch.bfloat16)
        cu = torch.empty(3, device="cuda", dtype=torch.int32)
        with pytest.raises(UnsupportedError, match=f"no kernel for a {MASKS['packed']}; move"):
            SAGE.attn_varlen(q, q, q, cu, cu)
    support._why_not.cache_clear()


def test_nested_tensors_come_by_their_values_and_offsets() -> None:
    parts = [torch.randn(n, 2, 32) for n in (5, 0, 40)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(UnsupportedError, match=r"values\(\) and offsets\(\).int\(\)"):
        sage_cute.attention(nested, nested, nested)
    x, cu = nested.values(), nested.offsets().int()
    out = sage_cute.attention_varlen(x, x, x, cu, cu, causal=True)
    for part, result in zip(parts, out.split([5, 0, 40]), strict=True):
        one = part.transpose(0, 1)[None]
        expected = sage_cute.attention(one, one, one, causal=True)[0].transpose(0, 1)
        assert torch.equal(result, expected)
