"""The quantization kernels give the CPU formula's codes and scales, bit for bit."""

import math

import pytest
import torch

from sage_cute.compile.quant_launch import output_shapes, quant_spec, quantize
from sage_cute.numerics.quantize import quantize as quantize_cpu
from sage_cute.numerics.quantize import token_mean
from sage_cute.policies import resolve

pytestmark = [pytest.mark.gpu, pytest.mark.emulated(slow=True)]

TOKEN, PAPER = resolve("fast:k_scale=per_token"), resolve("sagebwd")
MIXED = resolve("fast")  # scales of Q and V per token, of K per 128
POISON = {
    torch.int8: -128,
    torch.uint8: 0,  # of V^T, which holds 128 + code
    torch.float32: math.nan,
    torch.float64: math.nan,
}
GUARD = 4096  # bytes that must stay poisoned on each side of an output


class Guarded:
    """A tensor inside poisoned memory; codes with rows on 16 bytes, like ``empty_codes``."""

    def __init__(self, shape, dtype):
        last = -(-shape[-1] // 16) * 16 if dtype == torch.int8 else shape[-1]
        numel = math.prod((*shape[:-1], last))
        pad = GUARD // dtype.itemsize
        self.memory = torch.full((numel + 2 * pad,), POISON[dtype], dtype=dtype, device="cuda")
        self.tensor = self.memory[pad : pad + numel].view(*shape[:-1], last)[..., : shape[-1]]
        self.pad = pad

    def assert_intact(self, name):
        for side in (self.memory[: self.pad], self.memory[len(self.memory) - self.pad :]):
            poison = side.isnan() if side.is_floating_point() else side == POISON[side.dtype]
            assert bool(poison.all()), f"{name}: written outside"


def run(policy, q, k, v, **options):
    """Outputs of the kernels on poisoned memory."""
    spec = quant_spec(policy, q.dtype, q.shape[-1], **options)
    shapes = output_shapes(spec, q.shape, k.shape)
    guarded = {name: Guarded(*value) for name, value in shapes.items()}
    outputs = {name: g.tensor for name, g in guarded.items()}
    quantize(q, k, v, policy=policy, **outputs, **options)
    torch.cuda.synchronize()
    for name, g in guarded.items():
        g.assert_intact(name)
    outputs.pop("mean_partials", None)
    return {name: x.cpu() for name, x in outputs.items()}


def key_order(n):
    """Key that each position of V^T holds."""
    order = [8 * b + 2 * q + c for q in range(4) for b in range(2) for c in range(2)]
    return torch.arange(n) // 16 * 16 + torch.tensor(order)[torch.arange(n) % 16]


def expected(policy, q, k, v, v_scale_form="scale"):
    """The same from the CPU implementation."""
    q, k, v = (x.cpu().float() for x in (q, k, v))
    out = {}
    mean = token_mean(k) if k.shape[2] else torch.zeros(k.shape[0], k.shape[1], k.shape[3])
    if policy.smooth_k:
        out["k_mean"] = mean
        k = k - mean.unsqueeze(2)
    q8 = quantize_cpu(q, 1 if policy.q_scale == "per_token" else policy.block_q)
    k8 = quantize_cpu(k, 1 if policy.k_scale == "per_token" else policy.block_k)
    v8 = quantize_cpu(v, 1 if policy.v_scale == "per_token" else policy.block_k)
    padded = -(-v.shape[2] // 128) * 128
    codes = torch.nn.functional.pad(v8.codes, (0, 0, 0, padded - v.shape[2]))
    scale = v8.scale
    if policy.v_scale == "per_token":
        scale = torch.nn.functional.pad(scale, (0, padded - v.shape[2]))
        scale = scale.log2() if v_scale_form == "log2" else scale
    return out | {
        "q_codes": q8.codes,
        "q_scale": q8.scale,
        "k_codes": k8.codes,
        "k_scale": k8.scale,
        "v_t": (codes.int() + 128).to(torch.uint8)[:, :, key_order(padded)].transpose(2, 3),
        "v_scale": scale,
    }


def assert_same(got, want, v_scale_form="scale"):
    assert got.keys() == want.keys()
    if v_scale_form == "log2":  # approximate, unlike the rest
        x, y = (values.pop("v_scale") for values in (got, want))
        torch.testing.assert_close(x, y, rtol=3e-7, atol=3e-7, equal_nan=True)
    for name, x in got.items():
        y = want[name]
        assert x.shape == y.shape and x.dtype == y.dtype, name
        different = (x != y) & ~(x.isnan() & y.isnan())
        where = different.nonzero()[:4].tolist()
        assert not where, (
            f"{name}: {int(different.sum())} of {x.numel()} differ, first {where}: "
            + str([(x[tuple(i)].item(), y[tuple(i)].item()) for i in where])
        )


def inputs(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q = normal(batch, heads, seqlen_q, head_dim) * 2
    k = normal(batch, kv_heads, seqlen_k, head_dim) + 5 * normal(batch, kv_heads, 1, head_dim)
    v = normal(batch, kv_heads, seqlen_k, head_dim) * normal(batch, kv_heads, seqlen_k, 1).exp()
    return [x.to("cuda", dtype) for x in (q, k, v)]


def check(policy, x, **options):
    got = run(policy, *x, **options)
    assert_same(dict(got), expected(policy, *x, **options), **options)
    return got


@pytest.mark.parametrize("policy", [TOKEN, MIXED, PAPER], ids=["token", "mixed", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [16, 24, 32, 40, 64, 72, 96, 104, 128, 136, 200, 256])
def test_head_dims(policy, dtype, head_dim):
    check(policy, inputs(2, 4, 2, 333, 451, head_dim, dtype))


@pytest.mark.emulated
@pytest.mark.parametrize("policy", [TOKEN, MIXED, PAPER], ids=["token", "mixed", "block"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [
        (1, 1),
        (63, 127),
        (128, 128),
        (129, 65),
        (1000, 17),
        (7, 1000),
        (0, 100),
        (100, 0),
        (256, 4096),
    ],
)
def test_lengths(policy, seqlen_q, seqlen_k):
    check(policy, inputs(2, 3, 3, seqlen_q, seqlen_k, 64))


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_block_sizes(block):
    policy = PAPER.replace(block_q=block, block_k=block)
    check(policy, inputs(1, 2, 1, 777, 555, 128))


def test_options():
    x = inputs(1, 4, 2, 300, 300, 128)
    got = check(TOKEN, x, v_scale_form="log2")
    assert (got["v_scale"][:, :, 300:] == -math.inf).all()
    check(TOKEN.replace(smooth_k=False), x)
    check(TOKEN.replace(q_scale="per_block"), x)
    q = run(TOKEN.replace(pv="16bit", dp="16bit", dp_v="exact"), *x)
    v = run(TOKEN.replace(qk="16bit"), *x)
    assert_same({**q, **v}, expected(TOKEN, *x))


@pytest.mark.parametrize("policy", [TOKEN, MIXED, PAPER], ids=["token", "mixed", "block"])
def test_layouts(policy):
    q, k, v = inputs(2, 4, 4, 200, 200, 64)
    want = expected(policy, q, k, v)
    bshd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2)  # (b, s, 3, h, d)
    packed = [x.transpose(1, 2) for x in packed.unbind(2)]
    sliced = [torch.nn.functional.pad(x, (8, 24, 3, 2))[:, :, 3:-2, 8:-24] for x in (q, k, v)]
    heads_last = [x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for x in (q, k, v)]
    for layout in (bshd, packed, sliced, heads_last):
        assert not layout[0].is_contiguous()
        assert_same(run(policy, *layout), want)


def test_expanded_and_odd_unit_strides():
    q, k, v = inputs(1, 4, 1, 100, 130, 64)
    want = expected(TOKEN, q, k, v)
    odd = [x.as_strided(x.shape, (12345, *x.stride()[1:])) for x in (q, k, v)]
    assert_same(run(TOKEN, *odd), want)
    shared = k.expand(3, 2, -1, -1)
    assert_same(run(TOKEN, shared, shared, shared), expected(TOKEN, shared, shared, shared))


@pytest.mark.parametrize("policy", [TOKEN, MIXED, PAPER], ids=["token", "mixed", "block"])
def test_zeros(policy):
    x = [torch.zeros_like(t) for t in inputs(1, 2, 2, 130, 130, 64)]
    got = check(policy, x)
    assert not any(got[name].any() for name in ("q_codes", "q_scale", "k_codes", "k_scale"))
    assert (got["v_t"] == 128).all()
    x = inputs(1, 2, 2, 300, 300, 64)
    for t in x:
        t[:, :, 10:150] = 0
    check(policy, x)


@pytest.mark.emulated
@pytest.mark.parametrize("policy", [TOKEN, MIXED, PAPER], ids=["token", "mixed", "block"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(policy, value):
    x = inputs(1, 2, 2, 700, 700, 64)
    for t in x:
        t[0, 0, 5, 7] = value
        t[0, 1, 650:660] = value
    got = check(policy, x)
    assert got["k_mean"].isfinite().all()
    assert got["q_scale"][0, 0, 0 if policy is PAPER else 5].isnan()


@pytest.mark.parametrize("policy", [TOKEN, MIXED, PAPER], ids=["token", "mixed", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_extreme_magnitudes(policy, dtype):
    """Subnormal steps, subnormal values, and the largest."""
    x = inputs(1, 2, 2, 640, 640, 64, dtype)
    exponents = (
        torch.linspace(-150, 127, 640) if dtype == torch.bfloat16 else torch.linspace(-26, 12, 640)
    )
    for t in x:
        values = t.double().cpu().clamp(-3, 3) * exponents.double().exp2()[:, None]
        largest = torch.finfo(dtype).max
        t.copy_(values.clamp(-largest, largest).to(dtype))
    check(policy, x)
    check(policy.replace(smooth_k=False), x)


def test_ties():
    """Values half way between two codes round to even, also where x / scale is not exact."""
    scales = torch.tensor([1.0, 2.0**-20, 3.0, 1 / 3, 1.5e-5, 0.7])
    steps = torch.arange(-127, 128, dtype=torch.float32) / 2
    for dtype in (torch.bfloat16, torch.float16):
        rows = []
        for scale in scales:
            row = torch.zeros(256)
            row[:255] = steps * scale
            row[255] = 127 * scale
            rows.append(row)
        q = torch.stack(rows * 20)[None, None].to("cuda", dtype)
        check(TOKEN, [q, q, q])
        check(TOKEN.replace(smooth_k=False), [q, q, q])


def test_many_heads():
    """More heads than a grid dimension other than the first can count."""
    check(TOKEN, inputs(700, 100, 100, 1, 3, 32))


def test_offsets_beyond_32_bits():
    """The second batch starts past 2^32 bytes and past 2^31 elements."""
    q, k, v = inputs(2, 1, 1, 130, 200, 64)
    far = torch.empty(2**31 + 2**20, dtype=q.dtype, device="cuda")
    placed = []
    for i, x in enumerate((q, k, v)):
        strides = (2**31 + 1024, 0, 64 * 8, 1)
        view = far.as_strided(x.shape, strides, storage_offset=i * 64)
        view.copy_(x)
        placed.append(view)
    assert_same(run(TOKEN, *placed), expected(TOKEN, q, k, v))


@pytest.mark.parametrize("policy", [TOKEN, MIXED, PAPER], ids=["token", "mixed", "block"])
def test_repeatable(policy):
    """Fifty runs, the same bits: with other work before them and behind."""
    x = inputs(2, 4, 4, 3000, 3000, 128)
    first = run(policy, *x)
    for _ in range(50):
        again = run(policy, *x)
        for name, value in again.items():
            assert value.view(torch.uint8).equal(first[name].view(torch.uint8)), name


def test_long_sequence():
    """Many chunks of the mean; every code of 32k tokens."""
    check(TOKEN, inputs(1, 2, 1, 129, 32768 + 77, 128))


def test_cuda_graph():
    x = inputs(1, 2, 2, 500, 500, 64)
    want = run(TOKEN, *x)
    spec = quant_spec(TOKEN, x[0].dtype, 64)
    shapes = output_shapes(spec, x[0].shape, x[1].shape)
    out = {n: torch.empty(s, dtype=d, device="cuda") for n, (s, d) in shapes.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize(*x, policy=TOKEN, **out)
    for t in out.values():
        t.zero_()
    graph.replay()
    for name, value in want.items():
        torch.testing.assert_close(out[name].cpu(), value, rtol=0, atol=0, equal_nan=True)
