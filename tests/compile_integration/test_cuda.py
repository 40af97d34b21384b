"""The ops on a GPU against the same ops on the CPU, whose numerics they must reproduce."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

import sage_cute
from sage_cute.numerics import attention_reference, rel_l2

pytestmark = pytest.mark.gpu
SAGE = torch.ops.sage
PRESETS = ("fast", "accurate", "sagebwd", "int8")
GRADIENTS = 7e-3  # kernels round P to bfloat16 before dS is made of it, see docs/backward-kernel.md
TIGHT = 5e-3  # numerics.md section 5: kernel against the same quantization, 16-bit outputs


def to_cuda(x):
    """The same strides on the GPU, shared elements too."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).cuda()
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def poison() -> None:
    """Leaves NaN (float) and 0x80 (int8) where the allocator will give memory from."""
    for size in (1 << 14, 1 << 20, 1 << 24):
        blocks = [torch.full((size,), torch.nan, device="cuda") for _ in range(4)]
        blocks += [torch.full((size,), -128, dtype=torch.int8, device="cuda") for _ in range(4)]
        del blocks


def compare(tensors, policy, causal, scale=None, *, bound=TIGHT) -> None:
    poison()
    expected = SAGE.attn_fwd(*tensors, scale, causal, policy)
    actual = [x.cpu() for x in SAGE.attn_fwd(*map(to_cuda, tensors), scale, causal, policy)]
    names = ("out", "lse", "q_codes", "k_codes", "q_scale", "k_scale", "q_mean", "k_mean")
    for name, a, b in zip(names, actual, expected, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype, name
        if a.numel() == 0:
            continue
        if name == "out":
            assert a.isfinite().all() and rel_l2(a, b) < bound
        elif name == "lse":
            assert torch.equal(a.isinf(), b.isinf())
            seen = ~b.isinf()
            torch.testing.assert_close(a[seen], b[seen], rtol=2e-6, atol=2e-5)
        elif 0 in (tensors[0].numel(), tensors[1].numel()):
            continue  # without keys nobody reads what Q became, nor the other way round
        elif name.endswith("codes"):
            # A mean that is summed in another order moves a code at a tie by one.
            difference = (a.int() - b.int()).abs()
            assert difference.max() <= 1 and (difference > 0).float().mean() < 1e-3, name
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    out, _, _ = SAGE.attn_infer(*map(to_cuda, tensors), scale, causal, policy)
    assert torch.equal(out.cpu(), actual[0])


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_head_dims(qkv, policy, causal, head_dim) -> None:
    for dtype, (sq, sk) in itertools.product(
        (torch.bfloat16, torch.float16), ((257, 257), (65, 200), (200, 65))
    ):
        compare(qkv(seqlen_q=sq, seqlen_k=sk, head_dim=head_dim, dtype=dtype), policy, causal)


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_lengths(qkv, policy, causal) -> None:
    lengths = (0, 1, 2, 9, 63, 65, 127, 129, 1001)
    for sq, sk in itertools.product(lengths, lengths):
        if (sq, sk) == (sq, sq) or (sq * 7 + sk) % 3 == 0:
            tensors = qkv(seqlen_q=sq, seqlen_k=sk, head_dim=64, dtype=torch.bfloat16)
            compare(tensors, policy, causal)


@pytest.mark.parametrize("ratio", [1, 2, 3, 7, 8])
def test_gqa(qkv, ratio) -> None:
    tensors = qkv(
        heads=2 * ratio, kv_heads=2, head_dim=128, seqlen_q=130, seqlen_k=300, dtype=torch.bfloat16
    )
    compare(tensors, "fast", True)


def test_layouts(qkv, layout) -> None:
    for policy in ("fast", "sagebwd"):
        compare(qkv(layout, head_dim=64, dtype=torch.bfloat16), policy, True)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scales(qkv, scale) -> None:
    tensors = qkv(head_dim=64, seqlen_q=200, seqlen_k=200, dtype=torch.bfloat16)
    compare(tensors, "fast", True, scale)


@pytest.mark.parametrize("policy", PRESETS)
def test_zeros_and_one_key(qkv, policy) -> None:
    zeros = [torch.zeros_like(x) for x in qkv(head_dim=64, dtype=torch.bfloat16)]
    compare(zeros, policy, False)
    q, k, v = map(to_cuda, qkv(head_dim=64, seqlen_k=1, dtype=torch.bfloat16))
    out = SAGE.attn(q, k, v, policy=policy)
    expected = v.repeat_interleave(2, 1).expand_as(out)
    step, rounding = 1 / 254, 2.0**-8  # of a code, and of bfloat16
    assert (out - expected).abs().max() <= v.abs().max() * (step + rounding)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_stays_where_it_belongs(qkv, where, value) -> None:
    tensors = dict(
        zip("qkv", qkv(head_dim=64, seqlen_q=300, seqlen_k=300, dtype=torch.bfloat16), strict=True)
    )
    tensors[where][0, 0, 150, 3] = value
    out = SAGE.attn(*map(to_cuda, tensors.values()), is_causal=True).cpu()
    expected = SAGE.attn(*tensors.values(), is_causal=True)
    assert torch.equal(out.isfinite().all(-1), expected.isfinite().all(-1))


def test_large_magnitudes(qkv) -> None:
    q, k, v = qkv(head_dim=64, seqlen_q=300, seqlen_k=300, dtype=torch.bfloat16)
    k[..., 5] += 300
    v[0, 0, 7] *= 1e6
    compare((q, k, v), "fast", False)
    # Sums are relative to a reference that lags, and have a MAGIC of their unit added.
    compare((q * 100, k, v * 1e20), "fast", True)


def test_lse_of_the_original_k(qkv) -> None:
    q, k, v = qkv(head_dim=128, seqlen_q=130, seqlen_k=513, dtype=torch.bfloat16)
    k += 20 * torch.randn(1, 2, 1, 128, dtype=torch.bfloat16)
    _, lse = SAGE.attn_with_lse(*map(to_cuda, (q, k, v)), is_causal=True)
    truth = attention_reference(q, k, v, causal=True).lse
    assert (lse.cpu() - truth).abs().max() < 0.05


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bitwise_over_50_runs(qkv, policy, head_dim) -> None:
    tensors = qkv(heads=8, seqlen_q=1001, seqlen_k=1001, head_dim=head_dim, dtype=torch.bfloat16)
    tensors = [to_cuda(x) for x in tensors]
    first = SAGE.attn_fwd(*tensors, None, True, policy)
    for _ in range(49):
        again = SAGE.attn_fwd(*tensors, None, True, policy)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_many_heads_and_batches(qkv) -> None:
    q = torch.randn(1, 65537, 3, 64, device="cuda", dtype=torch.bfloat16)
    for x in (q, q.transpose(0, 1)):
        out = SAGE.attn(x, x, x)
        expected = torch.nn.functional.scaled_dot_product_attention(
            x[-1:, -1:].float(), *(x[-1:, -1:].float(),) * 2
        )
        assert rel_l2(out[-1:, -1:], expected) < 0.04


def test_64_bit_offsets() -> None:
    x = torch.randn(1, 1, 300, 64, device="cuda", dtype=torch.bfloat16)
    wide = torch.empty_strided(
        (1, 2, 300, 64), (0, 1 << 31, 64, 1), device="cuda", dtype=torch.bfloat16
    )
    wide.copy_(x)
    assert torch.equal(SAGE.attn(wide, wide, wide)[:, 1:], SAGE.attn(x, x, x))
    many = torch.randn(1, 1 << 9, 1 << 16, 64, device="cuda", dtype=torch.bfloat16)  # 2^31 elements
    q = many[:, :, -200:]
    out = SAGE.attn(q, many, many)
    last = SAGE.attn(q[:, -1:], many[:, -1:], many[:, -1:])
    assert torch.equal(out[:, -1:], last)


def test_current_stream_and_no_synchronization(qkv) -> None:
    tensors = [
        to_cuda(x) for x in qkv(seqlen_q=500, seqlen_k=500, head_dim=64, dtype=torch.bfloat16)
    ]
    expected = SAGE.attn(*tensors)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.full_like(tensors[0], torch.nan)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(tensors[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = SAGE.attn(late, *tensors[1:])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("policy", PRESETS)
def test_cuda_graph_replays_with_new_inputs(qkv, policy) -> None:
    tensors = [
        to_cuda(x) for x in qkv(seqlen_q=300, seqlen_k=300, head_dim=128, dtype=torch.bfloat16)
    ]
    SAGE.attn_with_lse(*tensors, policy=policy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = SAGE.attn_with_lse(*tensors, policy=policy)
    for x in tensors:
        x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, SAGE.attn_with_lse(*tensors, policy=policy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compile_in_every_mode(qkv, mode) -> None:
    function = lambda q, k, v: sage_cute.attention(q, k, v, causal=True).square()
    compiled = torch.compile(function, fullgraph=True, mode=mode)
    for seqlen in (128, 300):
        tensors = [
            to_cuda(x)
            for x in qkv(seqlen_q=seqlen, seqlen_k=seqlen, head_dim=64, dtype=torch.bfloat16)
        ]
        for _ in range(3):
            assert torch.equal(compiled(*tensors), function(*tensors))


def test_opcheck(qkv) -> None:
    tensors = [to_cuda(x) for x in qkv("packed", head_dim=64, dtype=torch.bfloat16)]
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(SAGE.attn_infer.default, (*tensors, None, True, "fast"))
    torch.library.opcheck(
        SAGE.attn_fwd.default, (*tensors, None, True, "sagebwd"), test_utils=quick
    )


def gradients_differ_by(tensors, dout, dlse, policy, causal, scale=None) -> dict[str, float]:
    """Relative L2 of dq, dk, dv to the CPU's, from the same saved tensors: those of the GPU."""
    q, k, v = map(to_cuda, tensors)
    saved = SAGE.attn_fwd(q, k, v, scale, causal, policy)
    poison()
    static = (scale, causal, policy)
    gradient = None if dlse is None else dlse.cuda()
    actual = SAGE.attn_backward(to_cuda(dout), gradient, None, None, v, *saved, *static)
    expected = SAGE.attn_backward(
        dout, dlse, None, None, tensors[2], *(x.cpu() for x in saved), *static
    )
    errors = {}
    for name, a, b in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype, name
        assert a.isfinite().all(), name
        errors[name] = rel_l2(a.cpu(), b) if b.any() else a.abs().sum().item()
    return errors


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_gradients(qkv, policy, causal, head_dim) -> None:
    for dtype, (sq, sk), with_lse in (
        (torch.bfloat16, (257, 257), True),
        (torch.float16, (65, 200), False),
        (torch.bfloat16, (200, 65), True),
    ):
        tensors = qkv(seqlen_q=sq, seqlen_k=sk, head_dim=head_dim, dtype=dtype)
        dout = torch.randn_like(tensors[0])
        dlse = torch.randn(dout.shape[:3]) if with_lse else None
        errors = gradients_differ_by(tensors, dout, dlse, policy, causal)
        assert max(errors.values()) < GRADIENTS, errors


@pytest.mark.parametrize("sq", [0, 1, 5])
@pytest.mark.parametrize("sk", [0, 1, 130])
def test_gradients_of_short_sequences(qkv, sq, sk) -> None:
    tensors = qkv(seqlen_q=sq, seqlen_k=sk, head_dim=64, dtype=torch.bfloat16)
    errors = gradients_differ_by(tensors, torch.randn_like(tensors[0]), None, "fast", True)
    if sk > 1:  # with one key dS is rounding noise
        assert max(errors.values()) < GRADIENTS, errors


def test_gradients_of_any_strides(qkv, layout) -> None:
    tensors = qkv(layout, head_dim=64, dtype=torch.bfloat16)
    for dout in (
        torch.randn_like(tensors[0]).mT.contiguous().mT,
        torch.randn(1, dtype=torch.bfloat16).expand(tensors[0].shape),
    ):
        assert max(gradients_differ_by(tensors, dout, None, "fast", True).values()) < GRADIENTS


@pytest.mark.parametrize("policy", PRESETS)
def test_gradients_through_autograd_compile_and_graphs(qkv, policy) -> None:
    tensors = qkv(seqlen_q=300, seqlen_k=300, head_dim=64, dtype=torch.bfloat16)
    q, k, v = (to_cuda(x).requires_grad_() for x in tensors)

    def loss(q, k, v):
        out, lse = SAGE.attn_with_lse(q, k, v, is_causal=True, policy=policy)
        return out.float().square().sum() + lse.sin().sum()

    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for _ in range(10):  # no atomics: the same bits every time
        again = torch.autograd.grad(loss(q, k, v), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    truth = attention_reference(*tensors, causal=True)
    assert rel_l2(SAGE.attn(q, k, v, is_causal=True, policy=policy).cpu(), truth.out) < 0.04
    for mode in ("default", "max-autotune"):
        compiled = torch.compile(loss, fullgraph=True, mode=mode)
        for _ in range(3):
            actual = torch.autograd.grad(compiled(q, k, v), (q, k, v))
        for a, b in zip(actual, expected, strict=True):
            assert rel_l2(a.cpu(), b.cpu()) < 1e-2  # the loss around it is fused differently


BUSY = """
import torch
x = torch.ones(8192, 8192, device="cuda").bfloat16()
print("up", flush=True)
while True:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""


@pytest.fixture
def busy_gpu():
    """Another process keeps the GPU busy: kernels are interrupted at any instruction."""
    other = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    other.stdout.readline()
    yield
    other.kill()
    other.wait()


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_while_processes_share_the_gpu(qkv, busy_gpu, policy, head_dim) -> None:
    """Buffers must not be filled again before loads in flight have read them."""
    shape = {"heads": 6, "seqlen_q": 150, "seqlen_k": 201, "head_dim": head_dim}
    q, k, v = (to_cuda(x).requires_grad_() for x in qkv(**shape, dtype=torch.bfloat16))
    dout = torch.randn_like(q)

    def run():
        out = SAGE.attn(q, k, v, is_causal=True, policy=policy)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    want = run()
    for _ in range(200):
        for a, b in zip(run(), want, strict=True):
            assert torch.equal(a, b)


def test_backward_waits_for_nothing_and_graphs_capture_it(qkv) -> None:
    q, k, v = map(to_cuda, qkv(seqlen_q=300, seqlen_k=300, head_dim=128, dtype=torch.bfloat16))
    saved = SAGE.attn_fwd(q, k, v, None, True, "fast")
    dout = torch.randn_like(q)
    arguments = (None, None, None, v, *saved, None, True, "fast")
    expected = SAGE.attn_backward(dout, *arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        SAGE.attn_backward(dout, *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = SAGE.attn_backward(dout, *arguments)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_saved_activations_are_smaller_than_those_of_16_bit_attention(qkv) -> None:
    q, k, v = (to_cuda(x) for x in qkv(seqlen_q=512, seqlen_k=512, head_dim=64))
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    sizes = {}

    def count(x):
        sizes[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        out = SAGE.attn(q, k, v, is_causal=True)
    assert sum(sizes.values()) < sum(x.nbytes for x in (q, k, v, out))
