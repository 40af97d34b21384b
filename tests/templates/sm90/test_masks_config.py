"""What of a mask is compiled in, what workspace a packed batch has: plain Python."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_cute.compile import bwd_launch, launch, quant_launch
from sage_cute.compile.visibility import UNBOUNDED, Layout, Packed, Static, Visibility
from sage_cute.config import ARCHS
from sage_cute.config.bwd import BwdProblem, bwd_smem_bytes, default_bwd_config, supports_bwd
from sage_cute.errors import DTypeError, ShapeError, UnsupportedError
from sage_cute.policies import resolve

POLICIES = ("fast", "accurate", "sagebwd", "int8", "fast:dp=16bit")


@pytest.mark.parametrize(
    ("causal", "window", "static", "bounds"),
    [
        (False, (None, None), Static(False), (None, None)),
        (True, (None, None), Static(True), (None, None)),
        (False, (None, 0), Static(True), (None, None)),
        (True, (None, 9), Static(True), (None, None)),
        (True, (9, 5), Static(False, True), (9, 0)),
        (False, (9, None), Static(False, True), (9, UNBOUNDED)),
        (False, (None, 9), Static(False, True), (UNBOUNDED, 9)),
        (False, (1 << 40, 1), Static(False, True), (UNBOUNDED, 1)),
    ],
)
def test_masks_become_few_kernels(causal, window, static, bounds):
    sight = Visibility(causal, window)
    assert sight.static == static
    assert sight.bounds() == bounds
    assert sight.is_dense is not static.window


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"key_lengths": offsets(1, 2, 3)}, ShapeError),
        ({"key_lengths": offsets(1, 2).long()}, DTypeError),
        ({"packed": Packed(offsets(0, 1), offsets(0, 1, 2), 1, 1)}, ShapeError),
        (
            {"key_lengths": offsets(1, 2), "packed": Packed(*[offsets(0, 1)] * 2, 1, 1)},
            UnsupportedError,
        ),
    ],
)
def test_what_kernels_cannot_read_is_refused(change, error):
    with pytest.raises(error):
        Visibility(False, **change).check(2, torch.device("cpu"))


def test_packed_blocks_of_sequences_do_not_overlap():
    lengths, block = [5, 0, 128, 130, 1, 300], 128
    starts = torch.tensor([7, *lengths]).cumsum(0).tolist()
    total = starts[-1] + 11
    layout = Layout(total, len(lengths))
    end = 0
    for b, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        first = start // block + b
        assert first >= end
        end = first + -(-length // block)
    assert end <= layout.groups(block)
    assert layout.padded() == block * layout.groups(block)
    assert layout.groups(1) == total
    assert Layout(total, None).groups(block) == -(-total // block)


@pytest.mark.parametrize("lengths", ["dense", "padded", "packed"])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 136, 256])
def test_every_mask_has_kernels(lengths, window, policy, head_dim):
    ask = {"head_dim": head_dim, "dtype": torch.bfloat16, "is_causal": True}
    for supports in (launch.supports, bwd_launch.supports):
        assert supports(resolve(policy), **ask, window=window, lengths=lengths)
    problem = BwdProblem.of(
        resolve(policy),
        head_dim=head_dim,
        dtype="bfloat16",
        is_causal=True,
        window=window,
        lengths=lengths,
    )
    assert problem.is_causal is not window
    assert problem.ragged == (window or lengths != "dense")
    config = default_bwd_config(problem)
    assert max(bwd_smem_bytes(problem, config)) <= ARCHS["sm_90a"].smem_bytes


def test_tiles_of_a_packed_batch_end_with_the_padding():
    problem = BwdProblem.of(
        resolve("fast"), head_dim=64, dtype="bfloat16", is_causal=True, lengths="packed"
    )
    config = dataclasses.replace(default_bwd_config(problem), tile_m=96)
    assert "packed" in supports_bwd(problem, config, ARCHS["sm_90a"]).reason


def test_workspace_of_a_packed_batch():
    problem = BwdProblem.of(
        resolve("fast"), head_dim=64, dtype="bfloat16", is_causal=True, lengths="packed"
    )
    plan = bwd_launch.bwd_plan(problem)
    shapes = bwd_launch.workspace_shapes(plan, (1, 4, 300, 64), (1, 2, 130, 64), sequences=3)
    rows, keys = 128 * (300 // 128 + 3), 128 * (130 // 128 + 3)
    assert shapes["stats"][0] == (1, 4, rows, 4)
    for name in ("q_hat", "dout8", "dout_copy"):
        assert shapes[name][0] == (1, 4, rows, 64)
    for name in ("k_hat", "v_hat"):
        assert shapes[name][0] == (1, 2, keys, 64)


def test_outputs_of_a_packed_quantization():
    spec = quant_launch.quant_spec(
        resolve("sagebwd"), torch.bfloat16, 64, static=Static(True, lengths="packed")
    )
    assert spec.mask_q
    shapes = quant_launch.output_shapes(spec, (1, 4, 300, 64), (1, 2, 130, 64), 3, 100)
    assert shapes["q_scale"][0] == (1, 4, 300 // spec.block_q + 3)
    assert shapes["k_scale"][0] == (1, 2, 130 // spec.block_k + 3)
    assert shapes["k_mean"][0] == (3, 2, 64)
    assert shapes["v_t"][0] == (1, 2, 64, 128 * (130 // 128 + 3))
