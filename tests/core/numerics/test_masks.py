"""Windows, padding and a given mean of K: which blocks are visited, and what must not matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sage_cute.numerics import sage_backward, sage_forward
from sage_cute.numerics.reference import visible
from sage_cute.numerics.visibility import Visibility, Window
from sage_cute.policies import PRESETS, resolve
from sage_cute.testing import Inputs, make_inputs, run_attention

MANY = settings.get_profile("numerics_many")
CPU = torch.device("cpu")
SIDES = st.one_of(st.none(), st.sampled_from([0, 1, 2, 17, 63, 64, 100, 127, 128, 400]))
WINDOWS = st.tuples(SIDES, SIDES)
POLICIES = (*PRESETS, "sagebwd:smooth_q=true", "fast:smooth_v=true", "fast:qk=16bit,s=16bit")


@MANY
@given(
    seqlen_q=st.integers(0, 200),
    seqlen_k=st.integers(0, 200),
    length=st.integers(0, 200),
    causal=st.booleans(),
    window=WINDOWS,
    block=st.sampled_from([16, 48, 64, 128]),
    tile=st.sampled_from([1, 64, 128]),
)
def test_blocks_are_the_mask_and_nothing_is_visited_in_vain(
    seqlen_q: int, seqlen_k: int, length: int, causal: bool, window: Window, block: int, tile: int
) -> None:
    length = min(length, seqlen_k)
    expected = visible(seqlen_q, seqlen_k, causal, CPU, window)[:, :length]
    sight = Visibility.of(seqlen_q, seqlen_k, causal, window).padded_from(length)
    mask = torch.zeros_like(expected)
    visited = set()
    for keys, queries, part in sight.blocks(block, tile):
        visited.add(keys.start)
        inside = expected[queries, keys]
        assert inside[-1].any() and inside[queries.start % tile :][:tile].any()
        assert queries.start % tile == 0 or tile == 1
        mask[queries, keys] = True if part is None else part
        assert part is None or not part.all()
        bounded = sight.bounded(keys, block)
        for group in range(0, seqlen_q, 64):
            p = torch.tensor([group, group + 63])[:, None] + seqlen_k - seqlen_q
            key = torch.arange(keys.start, keys.stop)
            left, right = (math.inf if side is None else side for side in window)
            sees = (key >= p - left) & (key <= p + (0 if causal else right))
            whole = keys.stop - keys.start == block and bool(sees.all())
            assert (bounded.start <= group < bounded.stop) == whole
    assert torch.equal(mask, expected)
    seen = range(0, length, block)
    assert visited == {start for start in seen if expected[:, start : start + block].any()}
    seeing = torch.zeros(seqlen_q, dtype=torch.bool)
    seeing[sight.seeing()] = True
    assert torch.equal(seeing, expected.any(1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30, -7.0])
def test_what_padding_holds_does_not_matter(policy: str, poison: float) -> None:
    """Not to a bit, in any output, in the saved tensors, or in the gradients."""
    x = make_inputs("kb", (3, 2, 150, 16), kv_heads=1, seqlen_k=170, dtype=torch.float32, seed=3)
    lengths = torch.tensor([170, 97, 0])
    results = []
    for value in (0.0, poison):
        k, v = x.k.clone(), x.v.clone()
        for b, length in enumerate(lengths.tolist()):
            k[b, :, length:] = v[b, :, length:] = value
        static = {"scale": 0.25, "causal": True, "policy": resolve(policy), "window": (60, None)}
        static["key_lengths"] = lengths
        out, lse, saved = sage_forward(x.q, k, v, **static)
        grads = sage_backward(x.dout, lse * 0 + 1, x.q, k, v, out, lse, saved, **static)
        results.append([out, lse, *saved, *grads])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and not a.isnan().any()


@pytest.mark.parametrize("policy", [*PRESETS, "sagebwd:smooth_q=true"])
@pytest.mark.parametrize("which", ["q", "dout", "dlse"])
def test_what_queries_hold_that_see_no_key_does_not_matter(policy: str, which: str) -> None:
    """The last ones of a padded batch under a window, and the first ones under a causal mask."""
    x = make_inputs("g1", (2, 2, 256, 16), seqlen_k=200, dtype=torch.float32, seed=4)
    inputs = {"q": x.q, "dout": x.dout, "dlse": torch.randn(x.q.shape[:3])}
    masks = {"causal": True, "window": (9, None), "key_lengths": torch.tensor([90, 0])}
    blind = ~visible(256, 200, True, CPU, (9, None))[:, :90].any(1)
    assert blind[:56].all() and blind[160:].all() and not blind[56:155].any()
    results = []
    for value in (0.0, math.nan):
        y = {name: t.clone() for name, t in inputs.items()}
        y[which][0, :, blind] = y[which][1] = value
        part = Inputs(y["q"], x.k, x.v, y["dout"])
        results.append(run_attention(part, policy=policy, dlse=y["dlse"], **masks))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and not a.isnan().any()


@pytest.mark.parametrize("policy", ["fast", "accurate", "int8"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_value_that_is_nan_reaches_the_queries_whose_window_has_it(
    policy: str, causal: bool
) -> None:
    x = make_inputs("g1", (1, 2, 300, 32), dtype=torch.float32, seed=8)
    x.v[:, :, 140] = math.nan
    masks = {"causal": causal, "window": (20, 9)}
    sees = visible(300, 300, causal, CPU, (20, 9))[:, 140]
    out = run_attention(x, policy=policy, **masks).out
    assert torch.equal(out.isnan().any(-1)[0, 0], sees) and out[:, :, ~sees].isfinite().all()


@pytest.mark.parametrize("policy", PRESETS)
def test_whole_lengths_are_no_mask(policy: str) -> None:
    x = make_inputs("g1", (1, 2, 140, 32), seqlen_k=200, seed=5)
    plain = run_attention(x, policy=policy, causal=True)
    padded = run_attention(x, policy=policy, causal=True, key_lengths=torch.tensor([200]))
    wide = run_attention(x, policy=policy, causal=True, window=(500, 300))
    for a, b, c in zip(plain, padded, wide, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    right = run_attention(x, policy=policy, window=(None, 0))
    assert all(torch.equal(a, b) for a, b in zip(plain, right, strict=True))


@pytest.mark.parametrize("policy", [*PRESETS, "fast:qk=16bit,s=16bit,pv=16bit,dp=16bit"])
@pytest.mark.parametrize("length", [128, 256])
@pytest.mark.parametrize("window", [(None, None), (70, None)])
def test_a_given_mean_makes_prefixes_equal_bitwise(
    policy: str, length: int, window: Window
) -> None:
    """Whatever is appended, NaN too; without it the prefix moves with the mean of what follows."""
    x = make_inputs("llm", (1, 4, length, 32), kv_heads=2, dtype=torch.float32, seed=6)
    mean = x.k.mean(2)
    prefix = run_attention(x, policy=policy, causal=True, window=window, k_mean=mean)
    for more in (1, 100, 128):
        for value in (50.0, math.nan):
            longer = Inputs(*(_appended(t, more, value) for t in x))
            masks = {"causal": True, "window": window}
            got = run_attention(longer, policy=policy, k_mean=mean, **masks)
            assert torch.equal(got.out[:, :, :length], prefix.out)
            assert torch.equal(got.lse[:, :, :length], prefix.lse)
            if value == 50.0:
                moved = run_attention(longer, policy=policy, **masks)
                assert not torch.equal(moved.out[:, :, :length], prefix.out)


@pytest.mark.parametrize("policy", PRESETS)
def test_the_mean_itself_may_be_given(policy: str) -> None:
    x = make_inputs("kb", (2, 4, 100, 16), kv_heads=2, dtype=torch.float32, seed=7)
    lengths = torch.tensor([100, 33])
    static = {"scale": 0.25, "causal": False, "policy": PRESETS[policy], "key_lengths": lengths}
    own = sage_forward(x.q, x.k, x.v, **static)
    given_mean = sage_forward(x.q, x.k, x.v, **static, k_mean=own.saved.k_mean.double())
    assert torch.equal(own.out, given_mean.out) and torch.equal(own.lse, given_mean.lse)
    assert all(torch.equal(a, b) for a, b in zip(own.saved, given_mean.saved, strict=True))


def _appended(x: Tensor, tokens: int, value: float) -> Tensor:
    more = torch.full((*x.shape[:2], tokens, x.shape[3]), value, dtype=x.dtype)
    return torch.cat([x, more], 2)
