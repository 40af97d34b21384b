"""Packed batches: bitwise what their sequences give alone, and nothing for tokens of nobody."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_cute.numerics import (
    Saved,
    sage_backward,
    sage_backward_varlen,
    sage_forward,
    sage_forward_varlen,
    saved_shapes_varlen,
)
from sage_cute.policies import PRESETS, resolve

MANY = settings.get_profile("numerics_many")
POLICIES = (*PRESETS, "sagebwd:smooth_q=true,block_q=64", "fast:qk=16bit,s=16bit,smooth_k=false")
LENGTHS = st.sampled_from([0, 0, 1, 2, 17, 63, 64, 65, 127, 128, 129, 150])


def bounds(lengths: list[int], first: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).add(first).int()


@MANY
@given(
    policy=st.sampled_from(POLICIES),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    lengths=st.lists(st.tuples(LENGTHS, LENGTHS), max_size=5),
    before=st.sampled_from([0, 1, 64, 70]),
    after=st.sampled_from([0, 3, 130]),
    causal=st.booleans(),
    window=st.sampled_from([(None, None), (20, 3), (0, None), (None, 64)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    with_dlse=st.booleans(),
    given_mean=st.booleans(),
    seed=st.integers(0, 999),
)
def test_equal_to_the_sequences_one_by_one(
    policy: str,
    heads: tuple[int, int],
    lengths: list[tuple[int, int]],
    before: int,
    after: int,
    causal: bool,
    window: tuple[int | None, int | None],
    dtype: torch.dtype,
    with_dlse: bool,
    given_mean: bool,
    seed: int,
) -> None:
    """Outputs, what is saved, where it lies, and gradients; what lies between may be NaN."""
    mix, generator = resolve(policy), torch.Generator().manual_seed(seed)
    cu_q, cu_k = bounds([n for n, _ in lengths], before), bounds([n for _, n in lengths], before)

    def packed(cu: torch.Tensor, num_heads: int) -> torch.Tensor:
        x = torch.randn(int(cu[-1]) + after, num_heads, 16, generator=generator)
        x[: cu[0]] = x[cu[-1] :] = math.nan
        return x.to(dtype)

    q, dout = packed(cu_q, heads[0]), packed(cu_q, heads[0])
    k, v = packed(cu_k, heads[1]), packed(cu_k, heads[1])
    dlse = packed(cu_q, heads[0])[..., 0].T.float() if with_dlse else None
    mean = torch.randn(len(lengths), heads[1], 16, generator=generator)
    means = mean if given_mean and mix.smooth_k else None
    static = {"scale": 0.25, "causal": causal, "policy": mix, "window": window}
    out, lse, saved = sage_forward_varlen(q, k, v, cu_q, cu_k, **static, k_mean=means)
    grads = sage_backward_varlen(dout, dlse, q, k, v, out, lse, saved, cu_q, cu_k, **static)

    shapes = saved_shapes_varlen(q.shape, k.shape, len(lengths), mix)
    assert {name: tuple(x.shape) for name, x in saved._asdict().items()} == shapes
    owned = torch.zeros(q.shape[0], dtype=torch.bool)
    owned[cu_q[0] : cu_q[-1]] = True
    assert not out[~owned].any() and (lse[:, ~owned] == -torch.inf).all()
    assert not any(x.isnan().any() for x in (out, lse, *saved, *grads))
    for grad, cu in zip(grads, (cu_q, cu_k, cu_k), strict=True):
        assert not grad[: cu[0]].any() and not grad[cu[-1] :].any()

    for b in range(len(lengths)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one_q, one_dout = (x[rows].transpose(0, 1)[None].contiguous() for x in (q, dout))
        one_k, one_v = (x[keys].transpose(0, 1)[None].contiguous() for x in (k, v))
        one = sage_forward(
            *(one_q, one_k, one_v), **static, k_mean=None if means is None else means[b : b + 1]
        )
        assert torch.equal(out[rows], one.out[0].transpose(0, 1))
        assert torch.equal(lse[:, rows], one.lse[0])
        n = {name: x.shape[2] for name, x in one.saved._asdict().items() if name != "k_mean"}
        q_block = 1 if mix.q_scale == "per_token" else mix.block_q
        first_q = cu_q[b] if q_block == 1 else cu_q[b] // q_block + b
        first_k = cu_k[b] // mix.block_k + b  # of presets, with scales of K per block
        first_mean = cu_q[b] // mix.block_q + b
        for name, view in {
            "q_codes": saved.q_codes[rows].transpose(0, 1),
            "k_codes": saved.k_codes[keys].transpose(0, 1),
            "q_scale": saved.q_scale[:, first_q : first_q + n["q_scale"]],
            "k_scale": saved.k_scale[:, first_k : first_k + n["k_scale"]],
            "q_mean": saved.q_mean[:, first_mean : first_mean + n["q_mean"]],
            "k_mean": saved.k_mean[b],
        }.items():
            assert torch.equal(view, getattr(one.saved, name)[0]), name
        one_grads = sage_backward(
            *(one_dout, None if dlse is None else dlse[None, :, rows], one_q, one_k, one_v),
            *one,
            **static,
        )
        for grad, tokens, part in zip(grads, (rows, keys, keys), one_grads, strict=True):
            assert torch.equal(grad[tokens], part[0].transpose(0, 1))


@pytest.mark.parametrize("block", [7, 32, 128])
def test_scales_of_neighbours_do_not_overlap(block: int) -> None:
    """The last slot that a sequence needs lies before the first one of the next, whatever ends."""
    for start in range(0, 2 * block + 1):
        for length in range(0, 2 * block + 2):
            used = start // block + -(-length // block)
            assert used <= (start + length) // block + 1


def test_a_sequence_does_not_see_its_neighbours_values() -> None:
    q, k, v = (torch.randn(200, 2, 16) for _ in range(3))
    cu = torch.tensor([0, 70, 130, 200], dtype=torch.int32)
    static = {"scale": 0.25, "causal": False, "policy": PRESETS["sagebwd"]}
    results = []
    for value in (0.0, math.nan):
        for x in (q, k, v):
            x[:70] = x[130:] = value
        out, lse, saved = sage_forward_varlen(q, k, v, cu, cu, **static)
        grads = sage_backward_varlen(out, lse, q, k, v, out, lse, Saved(*saved), cu, cu, **static)
        results.append([out[70:130], lse[:, 70:130], *(g[70:130] for g in grads)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and not a.isnan().any()
