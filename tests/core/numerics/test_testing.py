"""The input makers are what they say; the runners run; the table of bounds is sound."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor

from sage_cute.numerics import attention_reference_backward, cosine, rel_l2, tolerances
from sage_cute.numerics.tolerances import BOUNDS, check, check_accuracy, check_at_least
from sage_cute.policies import PRESETS
from sage_cute.testing import (
    INPUT_CLASSES,
    TENSORS,
    Inputs,
    make_inputs,
    relative_errors,
    run_attention,
    run_reference,
)

SHAPE = (1, 2, 512, 64)


def probabilities(x: Inputs, causal: bool) -> Tensor:
    return attention_reference_backward(x.dout, x.q, x.k, x.v, causal=causal)[1].p


def float_inputs(kind: str) -> Inputs:
    return make_inputs(kind, SHAPE, dtype=torch.float32)


@pytest.mark.parametrize("kind", [*INPUT_CLASSES, "g7.5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_dtypes_and_seeds(kind: str, dtype: torch.dtype) -> None:
    def make(seed: int) -> Inputs:
        return make_inputs(kind, (2, 6, 33, 40), kv_heads=2, seqlen_k=50, dtype=dtype, seed=seed)

    x = make(3)
    assert x.q.shape == x.dout.shape == (2, 6, 33, 40)
    assert x.k.shape == x.v.shape == (2, 2, 50, 40)
    for a, same, other in zip(x, make(3), make(4), strict=True):
        assert a.dtype == dtype
        assert a.is_contiguous()
        assert a.isfinite().all()
        assert torch.equal(a, same)
        assert not torch.equal(a, other)


@pytest.mark.parametrize("kind", INPUT_CLASSES)
@pytest.mark.parametrize("shape", [(1, 2, 0, 8), (0, 2, 4, 8), (1, 0, 4, 8), (1, 1, 1, 1)])
def test_small_and_empty(kind: str, shape: tuple[int, int, int, int]) -> None:
    assert make_inputs(kind, shape, seqlen_k=3).q.shape == shape
    assert make_inputs(kind, shape, seqlen_k=0).k.shape == (*shape[:2], 0, shape[3])


@pytest.mark.parametrize("kind", ["nonsense", "gauss", "g", ""])
def test_an_unknown_class_lists_the_known_ones(kind: str) -> None:
    with pytest.raises(ValueError, match="known: g1, .*llm"):
        make_inputs(kind, SHAPE)


def test_normal_inputs_have_their_sigma() -> None:
    for name, sigma in (("g1", 1), ("g3", 3), ("g0.5", 0.5)):
        x = float_inputs(name)
        assert float(x.q.std()) == pytest.approx(sigma, rel=0.02)
        assert float(x.k.std()) == pytest.approx(sigma, rel=0.02)
        assert float(x.v.std()) == pytest.approx(1, rel=0.02)
        assert float(x.dout.std()) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("kind", ["qkn", "qlr"])
def test_qk_norm_bounds_scores(kind: str) -> None:
    x = float_inputs(kind)
    for t in (x.q, x.k):
        assert torch.allclose(t.pow(2).mean(-1), torch.ones(()), atol=1e-5)


def test_low_rank_attention_is_peaked() -> None:
    peaks = {
        kind: probabilities(float_inputs(kind), True).amax(-1).mean() for kind in ("qkn", "qlr")
    }
    assert peaks["qlr"] > 1.5 * peaks["qkn"]


@pytest.mark.parametrize(("kind", "low", "high"), [("sink", 0.6, 0.9), ("sinkv1", 0.8, 0.97)])
def test_sinks_take_the_mass(kind: str, low: float, high: float) -> None:
    x = float_inputs(kind)
    assert low < probabilities(x, True)[..., 0].mean() < high
    norms = x.v.norm(dim=-1)
    assert (norms[..., 0] < 0.1 * norms.mean()).all() == (kind == "sink")


def test_a_sink_is_the_first_key_whatever_the_lengths() -> None:
    for seqlen_q, seqlen_k in ((100, 300), (300, 100)):
        x = make_inputs("sink", (1, 4, seqlen_q, 64), kv_heads=2, seqlen_k=seqlen_k)
        p = probabilities(x, False)
        assert (p[..., 0].mean(-1) > 0.5).all()


def test_diagonal_attends_to_itself() -> None:
    p = probabilities(float_inputs("diag"), True)
    assert 0.7 < p.diagonal(dim1=-2, dim2=-1).mean() < 0.95
    longer = make_inputs("diag", (1, 2, 100, 64), seqlen_k=300, dtype=torch.float32)
    assert probabilities(longer, True).diagonal(200, -2, -1).mean() > 0.6


def test_language_model_like() -> None:
    x = float_inputs("llm")
    assert probabilities(x, True)[..., 0].mean() > 0.2
    mean = x.k.mean(2)
    assert ((mean.abs() > 6).sum(-1) == 64 // 16).all()
    assert x.v[:, :, 0].norm() < 0.2 * x.v.norm(dim=-1).mean()
    assert x.dout.norm(dim=-1).log().std() > 0.7


def test_biases() -> None:
    k = float_inputs("kb").k
    assert (k.mean(2).abs() > 9).all()
    assert (k.std(2) < 1.2).all()
    q = float_inputs("qb").q
    assert ((q.mean(2).abs() > 4).sum(-1) == 64 // 8).all()
    assert (float_inputs("vm").v.mean(2).abs() > 1).float().mean() > 0.5


def test_spreads() -> None:
    def spread(t: Tensor, over: int) -> float:
        return float(t.norm(dim=over).log().std())

    assert spread(float_inputs("dotok").dout, -1) == pytest.approx(1.5, abs=0.2)
    assert spread(float_inputs("dochan").dout, -2) == pytest.approx(1, abs=0.25)
    assert spread(float_inputs("vch").v, -2) == pytest.approx(1, abs=0.25)


def test_runners() -> None:
    x = make_inputs("g1", (1, 4, 40, 16), kv_heads=2, seqlen_k=30)
    before = [t.clone() for t in x]
    dlse = torch.ones(1, 4, 40)
    got = run_attention(x, policy="accurate", causal=True, scale=0.2, dlse=dlse)
    truth = run_reference(x, causal=True, scale=0.2, dlse=dlse)
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))
    assert not any(t.requires_grad for t in (*x, *got))
    assert got.lse.dtype == torch.float32
    assert {t.dtype for t in (got.out, got.dq, got.dk, got.dv)} == {torch.bfloat16}
    assert {t.dtype for t in truth} == {torch.float64}
    errors = relative_errors(got, truth)
    assert tuple(errors) == TENSORS
    assert all(1e-3 < error < 0.05 for error in errors.values())
    without = run_attention(x, policy="accurate", causal=True, scale=0.2)
    assert not torch.equal(without.dq, got.dq)
    assert relative_errors(truth, truth) == dict.fromkeys(TENSORS, 0.0)


def test_metrics() -> None:
    a = torch.tensor([3.0, 4.0])
    assert rel_l2(a, a) == 0
    assert rel_l2(torch.zeros(2), a) == 1
    assert rel_l2(torch.tensor([3.0, 4.5]), a) == pytest.approx(0.1)
    assert rel_l2(torch.zeros(2), torch.zeros(2)) == 0
    assert rel_l2(a, torch.zeros(2)) > 1e200
    assert math.isnan(rel_l2(torch.tensor([torch.nan, 1.0]), a))
    assert cosine(a, 7 * a) == pytest.approx(1)
    assert cosine(a, -a) == pytest.approx(-1)
    assert cosine(torch.tensor([4.0, -3.0]), a) == pytest.approx(0)
    assert cosine(torch.zeros(2), torch.zeros(2)) == 1
    assert cosine(a, torch.zeros(2)) == 0


# The table of bounds


def test_bounds_were_attained_and_are_explained() -> None:
    for (invariant, preset), bound in BOUNDS.items():
        assert preset in (*PRESETS, "any", "study"), invariant
        at_least = invariant == "truth_cosine"
        assert (bound.attained >= bound.limit) if at_least else (bound.attained <= bound.limit)
        assert bound.source


def test_checks_fail_beyond_the_bound_and_on_nan() -> None:
    limit = BOUNDS["sum_p", "fast"].limit
    check("sum_p", "fast", torch.tensor(limit))
    for value in (limit * 1.01, math.nan, math.inf):
        with pytest.raises(AssertionError, match="sum_p of fast"):
            check("sum_p", "fast", value)
    check_at_least("truth_cosine", "fast", 0.9999)
    for value in (0.99, math.nan):
        with pytest.raises(AssertionError, match="truth_cosine of fast"):
            check_at_least("truth_cosine", "fast", value)
    check_accuracy("g1", False, "fast", "out", 0.01)
    for value in (0.03, math.nan):
        with pytest.raises(AssertionError, match="out of fast on g1"):
            check_accuracy("g1", False, "fast", "out", value)
    with pytest.raises(KeyError):
        check("nonsense", "fast", 0.0)


def test_nothing_loosens_a_bound() -> None:
    with pytest.raises(TypeError):
        BOUNDS["sum_p", "fast"] = None  # type: ignore[index]
    with pytest.raises(AttributeError):
        BOUNDS["sum_p", "fast"].limit = 1.0  # type: ignore[misc]
    assert "import os" not in inspect.getsource(tolerances)
