"""Zeros, large magnitudes, NaN and Inf: right, or not a number where it belongs, never silently
finite. The cases come from failures that users of attention libraries reported.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sage_cute.errors import ShapeError
from sage_cute.numerics import Quantized, quantize, rel_l2
from sage_cute.numerics.quantize import absmax_scale, block_mean, encode
from sage_cute.numerics.tolerances import check
from sage_cute.policies import PRESETS, resolve
from sage_cute.testing import TENSORS, Inputs, make_inputs, run_attention, run_reference

NUMERICS = settings.get_profile("numerics")
F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
each_preset = pytest.mark.parametrize("policy", [*PRESETS, "sagebwd:smooth_q=true,smooth_v=true"])


def finite(*tensors: Tensor) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def poisoned(x: Tensor) -> Tensor:
    """NaN or infinite: an infinity passes through a 16-bit product, and is a NaN as a scale."""
    return ~x.isfinite()


# Zeros


@each_preset
@pytest.mark.parametrize("dtype", [F32, BF16, FP16])
@pytest.mark.parametrize("causal", [False, True])
def test_all_zeros(policy: str, dtype: torch.dtype, causal: bool) -> None:
    """0 / 0 in every scale: exact zeros, and LSE = ln(number of visible keys)."""
    x = Inputs(*(torch.zeros(2, 2, n, 24, dtype=dtype) for n in (70, 130, 130, 70)))
    got = run_attention(x, policy=policy, causal=causal)
    assert not any(t.any() for t in (got.out, got.dq, got.dk, got.dv))
    visible = torch.arange(61, 131) if causal else torch.full((70,), 130)
    assert torch.allclose(got.lse, visible.log().expand_as(got.lse), rtol=0, atol=2e-6)


@each_preset
def test_all_zeros_but_one(policy: str) -> None:
    x = make_inputs("g1", (1, 2, 70, 24), seqlen_k=130, dtype=F32)
    for name in ("q", "k", "v", "dout"):
        got = run_attention(
            x._replace(**{name: x.q * 0 if name in ("q", "dout") else x.k * 0}), policy=policy
        )
        assert finite(*got), name


@each_preset
def test_a_zero_channel_of_v(policy: str) -> None:
    x = make_inputs("g1", (1, 2, 70, 24), dtype=F32)
    x.v[..., 3] = 0
    got = run_attention(x, policy=policy)
    assert finite(*got)
    assert not got.out[..., 3].any()


@each_preset
@pytest.mark.parametrize("rows", [slice(0, 128), slice(128, 256), slice(5, 9), slice(100, 300)])
def test_zero_blocks_of_dout(policy: str, rows: slice) -> None:
    """A masked loss: those rows have dQ = 0 exactly, the others are as without them."""
    x = make_inputs("g1", (1, 2, 300, 24), dtype=F32)
    x.dout[:, :, rows] = 0
    got, truth = run_attention(x, policy=policy), run_reference(x)
    assert finite(*got)
    assert not got.dq[:, :, rows].any()
    for name in TENSORS:
        check("masked_loss", "any", rel_l2(getattr(got, name), getattr(truth, name)))


@each_preset
def test_zero_tokens(policy: str) -> None:
    """Tokens of zeros beside ordinary ones, in every input, as padding leaves them."""
    x = make_inputs("g1", (1, 2, 200, 24), dtype=F32)
    for t, start in zip(x, (0, 60, 130, 190), strict=True):
        t[:, :, start : start + 70] = 0
    got = run_attention(x, policy=policy, causal=True)
    assert finite(*got)


# Empty inputs


@each_preset
@pytest.mark.parametrize(
    "shape", [(0, 2, 2, 5, 5), (2, 0, 0, 5, 5), (2, 2, 1, 0, 5), (2, 2, 1, 5, 0), (2, 2, 1, 0, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty(policy: str, shape: tuple[int, ...], causal: bool) -> None:
    batch, heads, kv_heads, seqlen_q, seqlen_k = shape
    q = torch.ones(batch, heads, seqlen_q, 8)
    k = torch.ones(batch, kv_heads, seqlen_k, 8)
    got = run_attention(Inputs(q, k, k, q), policy=policy, causal=causal, dlse=q[..., 0])
    assert [t.shape for t in got] == [q.shape, q.shape[:3], q.shape, k.shape, k.shape]
    assert not any(t.any() for t in (got.out, got.dq, got.dk, got.dv))
    assert (got.lse == -torch.inf).all()


def test_head_groups_that_do_not_divide_are_refused() -> None:
    q, k = torch.ones(1, 6, 5, 8), torch.ones(1, 4, 5, 8)
    with pytest.raises(ShapeError, match="6 query heads are no multiple of 4 key heads"):
        run_attention(Inputs(q, k, k, q))


# Magnitudes


def scaled(field: str, factor: float) -> Callable[[Inputs], Inputs]:
    return lambda x: x._replace(**{field: getattr(x, field) * factor})


def one_token(field: str, factor: float) -> Callable[[Inputs], Inputs]:
    def change(x: Inputs) -> Inputs:
        t = getattr(x, field).clone()
        t[:, :, 17] *= factor
        return x._replace(**{field: t})

    return change


def k_channel(x: Inputs) -> Inputs:
    k = x.k.clone()
    k[..., 5] += 300
    return x._replace(k=k)


LARGE: dict[str, Callable[[Inputs], Inputs]] = {
    "a channel of K at +300": k_channel,
    "one token of Q 1000 times the rest": one_token("q", 1e3),
    "one token of K 1000 times the rest": one_token("k", 1e3),
    "one token of V 1000 times the rest": one_token("v", 1e3),
    "one token of dO 1000 times the rest": one_token("dout", 1e3),
    "logits near 1e5": lambda x: x._replace(q=x.q * 300, k=x.k * 300),
    "V beyond float16": scaled("v", 1e6),
    "V at 1e30": scaled("v", 1e30),
    "dO at 1e30": scaled("dout", 1e30),
    "dO at 1e-30": scaled("dout", 1e-30),
    "V and dO at 1e15": lambda x: x._replace(v=x.v * 1e15, dout=x.dout * 1e15),
    "K beyond float16, Q small": lambda x: x._replace(k=x.k * 1e6, q=x.q * 1e-6),
    "everything tiny": lambda x: Inputs(*(t * 1e-12 for t in x)),
}


@each_preset
@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("causal", [False, True])
def test_large_magnitudes_stay_finite(
    policy: str, case: str, dtype: torch.dtype, causal: bool
) -> None:
    """Finite where float32 attention is."""
    x = LARGE[case](make_inputs("g1", (1, 2, 150, 32), kv_heads=1, dtype=F32, seed=2)).to(dtype)
    q, k, v = (t.float().requires_grad_() for t in (x.q, x.k, x.v))
    reference = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )
    grads = torch.autograd.grad(reference, (q, k, v), x.dout.float())
    assert finite(reference, *grads), "the case itself overflows"
    assert finite(*run_attention(x, policy=policy, causal=causal))


@each_preset
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("large", "small"), [("q", "k"), ("k", "q"), ("dout", "v")])
def test_scores_and_products_overflow_only_where_they_must(
    policy: str, causal: bool, large: str, small: str
) -> None:
    """One factor at 3e37: an integer product times its scale alone would be infinite."""
    x = make_inputs("g1", (1, 2, 300, 128), kv_heads=1, dtype=F32, seed=2)
    x = x._replace(**{large: getattr(x, large) * 3e37, small: getattr(x, small) * 1e-37})
    got, truth = run_attention(x, policy=policy, causal=causal), run_reference(x, causal=causal)
    check("large", "any", rel_l2(got.out, truth.out))
    for name in ("dv", "dq", "dk") if large == "dout" else ():
        check("large", "any", rel_l2(getattr(got, name), getattr(truth, name)))


@each_preset
@pytest.mark.parametrize("case", ["a channel of K at +300", "V beyond float16", "V at 1e30"])
def test_large_magnitudes_stay_right(policy: str, case: str) -> None:
    x = LARGE[case](make_inputs("g1", (1, 2, 150, 32), dtype=F32, seed=2)).to(BF16)
    got, truth = run_attention(x, policy=policy), run_reference(x)
    # The channel at +300 is rounded to bfloat16's steps of 2: a true part of the input.
    for name in TENSORS:
        check("large", "any", rel_l2(getattr(got, name), getattr(truth, name)))


@each_preset
def test_float16_at_its_end(policy: str) -> None:
    """Inputs up to 60000, whose products are beyond float16 by far, while the gradients are not."""
    x = make_inputs("g1", (1, 2, 150, 32), dtype=F32)
    x = x._replace(v=x.v.clamp(-3, 3) * 2e4, k=x.k * 100, q=x.q / 100, dout=x.dout / 1000).to(FP16)
    got, truth = run_attention(x, policy=policy), run_reference(x)
    assert finite(*got)
    for name in TENSORS:
        check("large", "any", rel_l2(getattr(got, name), getattr(truth, name)))


def test_ds_beyond_float16() -> None:
    """Operands that hold dS are bfloat16 also for float16 inputs."""
    x = make_inputs("g1", (1, 2, 150, 32), dtype=F32)
    x = x._replace(v=x.v.clamp(-3, 3) * 2e4, k=x.k / 1000, q=x.q / 1000, dout=x.dout * 300).to(FP16)
    got = run_attention(x, policy="fast:dq=16bit,dk=16bit")
    assert finite(got.dq, got.dk)
    truth = run_reference(x)
    check("large", "any", rel_l2(got.dq, truth.dq))
    check("large", "any", rel_l2(got.dk, truth.dk))


@each_preset
@pytest.mark.parametrize("causal", [False, True])
def test_the_first_causal_row_is_the_first_value(policy: str, causal: bool) -> None:
    """Row 0 sees key 0 alone: V[0] to within one step of its scale."""
    x = make_inputs("llm", (2, 2, 150, 32), kv_heads=1, dtype=F32)
    out = run_attention(x, policy=policy, causal=True).out[:, :, 0]
    mix = resolve(policy)
    values = x.v - x.v.mean(2, keepdim=True) if mix.smooth_v else x.v
    block = values[:, :, : 1 if mix.v_scale == "per_token" else mix.block_k]
    step = block.abs().amax((-2, -1), keepdim=True)[..., 0] / 127
    assert ((out - x.v[:, :, 0]).abs() <= step * 0.501).all()


# NaN and Inf


POISONS = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("causal", [False, True])
@each_preset
def test_poison_in_q(policy: str, poison: float, causal: bool) -> None:
    x = make_inputs("g1", (1, 2, 300, 16), dtype=F32)
    x.q[0, 1, 200, 3] = poison
    got = run_attention(x, policy=policy, causal=causal)
    assert got.out[0, 1, 200].isnan().all()
    assert got.lse[0, 1, 200].isnan()
    assert got.dq[0, 1, 200].isnan().all()
    seen = slice(0, 201 if causal else 300)
    assert got.dk[0, 1, seen].isnan().all()
    assert got.dv[0, 1, seen].isnan().all()
    assert finite(got.out[0, 0], got.lse[0, 0], got.dq[0, 0], got.dk[0, 0], got.dv[0, 0])
    alone = rows_sharing_a_scale(policy, "q", 200)
    assert finite(got.out[0, 1, ~alone], got.lse[0, 1, ~alone])


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("causal", [False, True])
@each_preset
def test_poison_in_k(policy: str, poison: float, causal: bool) -> None:
    """All queries that see the key; the mean of K leaves the poison out."""
    x = make_inputs("g1", (1, 2, 300, 16), dtype=F32)
    x.k[0, 1, 200, 3] = poison
    got = run_attention(x, policy=policy, causal=causal)
    seeing = slice(200 if causal else 0, 300)
    assert got.out[0, 1, seeing].isnan().all()
    assert got.lse[0, 1, seeing].isnan().all()
    assert got.dq[0, 1, seeing].isnan().all()
    assert got.dk[0, 1, 200].isnan().all()
    assert got.dv[0, 1, 200].isnan().all()
    assert finite(got.out[0, 0], got.lse[0, 0], got.dq[0, 0], got.dk[0, 0], got.dv[0, 0])
    if causal:
        mix = resolve(policy)
        first = 200 if mix.k_scale == "per_token" else 200 // mix.block_k * mix.block_k
        assert finite(got.out[0, 1, :first], got.lse[0, 1, :first])


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("causal", [False, True])
@each_preset
def test_poison_in_v(policy: str, poison: float, causal: bool) -> None:
    x = make_inputs("g1", (1, 2, 300, 16), dtype=F32)
    x.v[0, 1, 200, 3] = poison
    got = run_attention(x, policy=policy, causal=causal)
    seeing = slice(200 if causal else 0, 300)
    assert got.out[0, 1, seeing, 3].isnan().all()
    assert got.dq[0, 1, seeing].isnan().all()
    assert got.dk[0, 1, 200].isnan().all()
    assert finite(got.lse)
    assert finite(got.out[0, 0], got.dq[0, 0], got.dk[0, 0], got.dv[0, 0])
    if causal:
        mix = resolve(policy)
        first = 200 if mix.v_scale == "per_token" else 200 // mix.block_k * mix.block_k
        assert finite(got.out[0, 1, :first])


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("causal", [False, True])
@each_preset
def test_poison_in_dout(policy: str, poison: float, causal: bool) -> None:
    x = make_inputs("g1", (1, 2, 300, 16), dtype=F32)
    x.dout[0, 1, 200, 3] = poison
    got = run_attention(x, policy=policy, causal=causal)
    seen = slice(0, 201 if causal else 300)
    assert poisoned(got.dq[0, 1, 200]).all()
    assert poisoned(got.dk[0, 1, seen]).all()
    assert poisoned(got.dv[0, 1, seen, 3]).all()
    assert finite(got.out, got.lse)
    assert finite(got.dq[0, 0], got.dk[0, 0], got.dv[0, 0])
    alone = rows_sharing_a_scale(policy, "dout", 200)
    assert finite(got.dq[0, 1, ~alone])


def rows_sharing_a_scale(policy: str, tensor: str, row: int) -> Tensor:
    """The queries of 300 that a poisoned one shares a scale with."""
    mix, rows = resolve(policy), torch.arange(300)
    if tensor == "q":
        block = 1 if mix.q_scale == "per_token" else mix.block_q
    else:
        block = (mix.ds_dq_rows or mix.bwd_block_q) if mix.dq == "int8" else 1
        if mix.dp == "int8" and mix.do_scale == "per_block":
            block = max(block, mix.bwd_block_q)
    return rows // block == row // block


@NUMERICS
@given(
    policy=st.sampled_from(list(PRESETS)),
    which=st.sampled_from(["q", "k", "v", "dout"]),
    poison=st.sampled_from(POISONS),
    seqlen_q=st.integers(1, 150),
    seqlen_k=st.integers(1, 150),
    causal=st.booleans(),
    data=st.data(),
)
def test_poison_is_never_silently_finite(
    policy: str,
    which: str,
    poison: float,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    data: st.DataObject,
) -> None:
    """Anywhere, in any shape: each query that sees the poison is poisoned, and so is its dQ."""
    x = make_inputs("g1", (1, 1, seqlen_q, 8), seqlen_k=seqlen_k, dtype=F32)
    t = getattr(x, which)
    row = data.draw(st.integers(0, t.shape[2] - 1))
    t[0, 0, row, data.draw(st.integers(0, 7))] = poison
    got = run_attention(x, policy=policy, causal=causal)
    query, key = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    sees = (key <= query + seqlen_k - seqlen_q) if causal else torch.ones(seqlen_q, seqlen_k) > 0
    if which in ("q", "dout"):
        queries, keys = (query[:, 0] == row) & sees.any(1), sees[row]
    else:
        queries, keys = sees[:, row], (key == row) & sees.any(0)
    if which != "dout":
        assert got.out[0, 0, queries].isnan().any(-1).all()
    assert poisoned(got.dq[0, 0, queries]).any(-1).all()
    assert poisoned(got.dk[0, 0, keys]).any(-1).all()
    if which != "v":
        assert poisoned(got.dv[0, 0, keys]).any(-1).all()
    blind = ~sees.any(1)  # queries without keys: zero, whatever they hold
    assert not got.out[0, 0, blind].any()
    assert (got.lse[0, 0, blind] == -torch.inf).all()


# The quantizer itself


def test_scales_and_codes_of_special_values() -> None:
    assert absmax_scale(torch.tensor([0.0, 127.0, 254.0])).tolist() == [0.0, 1.0, 2.0]
    assert absmax_scale(torch.tensor([torch.inf, torch.nan])).isnan().all()
    one = torch.tensor(1.0)
    ties = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 400.0, -400.0])
    assert encode(ties, one).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -127]
    assert encode(torch.tensor([3.0, -1.0]), torch.tensor(0.0)).tolist() == [0, 0]
    assert encode(torch.tensor([254.6, 255.0]), one, 255).tolist() == [255, 255]


@NUMERICS
@given(
    tokens=st.integers(1, 40),
    block=st.integers(1, 50),
    per_channel=st.booleans(),
    exponent=st.integers(-100, 100),
    seed=st.integers(0, 99),
)
def test_codes_reach_127_and_stay_within_half_a_step(
    tokens: int, block: int, per_channel: bool, exponent: int, seed: int
) -> None:
    x = torch.randn(2, tokens, 5, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    got = quantize(x, block, per_channel=per_channel)
    assert got.codes.dtype == torch.int8
    assert got.codes.shape == x.shape
    groups = -(-tokens // block)
    assert got.scale.shape == ((2, groups, 5) if per_channel else (2, groups))
    assert got.codes.abs().amax() == 127
    assert ((got.dequantize() - x).abs() <= got.token_scale() * 0.50001).all()
    for start in range(0, tokens, block):
        rows = x[:, start : start + block]
        dims = 1 if per_channel else (1, 2)
        assert torch.equal(got.scale[:, start // block], rows.abs().amax(dims) / 127)


def test_a_poisoned_group_loses_its_scale_and_no_other() -> None:
    x = torch.ones(1, 10, 4)
    x[0, 5, 2] = torch.nan
    got = quantize(x, 4)
    assert got.scale.isnan().tolist() == [[False, True, False]]
    assert got.dequantize()[0, 4:8].isnan().all()
    assert Quantized(got.codes, got.scale, 4).dequantize()[0, :4].eq(1).all()


def test_means_leave_poison_out() -> None:
    x = torch.tensor([[1.0], [torch.nan], [3.0], [torch.inf], [8.0]])
    assert block_mean(x, 2).tolist() == [[0.5], [1.5], [8.0]]
    assert torch.equal(block_mean(x, 5), torch.tensor([[12 / 5]]))
