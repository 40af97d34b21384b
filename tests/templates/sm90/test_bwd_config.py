"""Configurations, constraints and plans of the backward kernels: plain Python."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_cute.compile import bwd_launch
from sage_cute.compile.visibility import Static
from sage_cute.config import ARCHS
from sage_cute.config.bwd import (
    BwdProblem,
    BwdTileConfig,
    bwd_smem_bytes,
    default_bwd_config,
    supports_bwd,
)
from sage_cute.errors import UnsupportedError
from sage_cute.limits import HOPPER
from sage_cute.policies import resolve

ARCH = ARCHS["sm_90a"]
FIRST = "fast"
OTHER = {"tile_m": 96, "tile_n": 192, "num_consumer_wgs": 3, "dq_tile_n": 96}
INT8 = ("int8", "sagebwd", "fast:dv=int8", "accurate:dk=int8", "sagebwd:p_bwd_scale=per_key")


def problem(head_dim=64, policy=FIRST, **changes):
    built = BwdProblem.of(resolve(policy), head_dim=head_dim, dtype="bfloat16", is_causal=True)
    return dataclasses.replace(built, **changes)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(BwdTileConfig)])
def test_every_field_changes_the_key_or_is_rejected(field):
    config = default_bwd_config(problem())
    value = getattr(config, field)
    other = OTHER.get(field, not value if isinstance(value, bool) else value + 1)
    changed = dataclasses.replace(config, **{field: other})
    if supports_bwd(problem(), changed, ARCH):
        plan = bwd_launch.bwd_plan(problem(), changed)
        assert plan != bwd_launch.bwd_plan(problem(), config)
    else:
        assert supports_bwd(problem(), changed, ARCH).reason


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
@pytest.mark.parametrize("policy", [FIRST, FIRST + ":dp=16bit", "accurate", *INT8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_defaults_fit(head_dim, policy, dtype):
    built = problem(head_dim, policy, dtype=dtype)
    config = default_bwd_config(built)
    assert supports_bwd(built, config, ARCH)
    assert max(bwd_smem_bytes(built, config)) <= ARCH.smem_bytes


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"tile_n": 64}, "tile_n"), ({"num_stages": 9}, "shared memory"), ({"tile_m": 72}, "tile_m")],
)
def test_what_cannot_run_says_why(changes, word):
    built = problem(128)
    config = dataclasses.replace(default_bwd_config(built), **changes)
    with pytest.raises(UnsupportedError, match=word):
        bwd_launch.bwd_plan(built, config)


@pytest.mark.parametrize("change", ["s=16bit", "smooth_q=true", "do_scale=per_block"])
def test_policies_without_a_kernel_say_so(change):
    reason = HOPPER.why_not_policy("backward", resolve(f"{FIRST}:{change}"))
    assert reason.startswith(change)
    assert HOPPER.why_not_policy("backward", resolve(FIRST)) is None


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ("bwd_block_q=32", "set bwd_block_q=64 or 128"),
        ("bwd_block_k=128", "set bwd_block_k=64"),
        ("ds_dq_rows=16", "set ds_dq_rows=0 or 1 or 8"),
    ],
)
def test_scales_of_int8_gradients_without_a_kernel_say_so(change, remedy):
    assert remedy in HOPPER.why_not_policy("backward", resolve(f"int8:{change}"))


@pytest.mark.parametrize("policy", [*INT8, "int8:ds_dq_rows=8", f"{FIRST}:bwd_block_k=32"])
def test_mixes_with_int8_gradients_have_a_kernel(policy):
    assert HOPPER.why_not_policy("backward", resolve(policy)) is None


@pytest.mark.parametrize(
    ("policy", "changes", "word"),
    [
        ("int8", {"tile_m": 32}, "bwd_block_q=64"),
        ("int8", {"query_wgs": 2, "tile_n": 64}, "query_wgs"),
        ("sagebwd", {"query_wgs": 1, "tile_n": 128}, "query_wgs"),
        ("sagebwd", {"dq_tile_n": 128}, "bwd_block_k=64"),
        ("sagebwd", {"dq_num_consumer_wgs": 3}, "whole tiles"),
    ],
)
def test_configurations_may_not_change_what_scales_are_for(policy, changes, word):
    built = problem(64, policy)
    config = dataclasses.replace(default_bwd_config(built), **changes)
    with pytest.raises(UnsupportedError, match=word):
        bwd_launch.bwd_plan(built, config)


def test_mixes_that_differ_in_what_no_kernel_does_share_one():
    changes = "bwd_block_q=128,ds_dq_rows=8,transposed_scale=per_block,p_bwd_scale=per_tile"
    assert problem(64, FIRST) == problem(64, f"{FIRST}:{changes}")
    plan = lambda p: bwd_launch._plan(resolve(p), 64, torch.bfloat16, Static(True), None)
    assert plan(FIRST) == plan(f"{FIRST}:{changes}")
    assert plan("int8").per_channel and not plan("sagebwd").per_channel


def test_supports_gives_reasons():
    ask = {"head_dim": 128, "dtype": torch.bfloat16, "is_causal": False}
    assert bwd_launch.supports(resolve(FIRST), **ask)
    assert "smooth_q" in bwd_launch.supports(resolve("sagebwd:smooth_q=true"), **ask).reason
    assert (
        "float32" in bwd_launch.supports(resolve(FIRST), **{**ask, "dtype": torch.float32}).reason
    )
    assert "head_dim" in bwd_launch.supports(resolve(FIRST), **{**ask, "head_dim": 84}).reason


def test_workspace_is_what_the_documentation_says():
    plan = bwd_launch.bwd_plan(problem(128))
    shapes = bwd_launch.workspace_shapes(plan, (2, 4, 300, 128), (2, 2, 130, 128))
    size = {
        n: torch.Size(s).numel() * torch.empty(0, dtype=t).itemsize for n, (s, t) in shapes.items()
    }
    rows, keys = 2 * 4 * 130, 2 * 2 * 130
    assert size["q_hat"] == 2 * 128 * rows
    assert size["dout8"] == 128 * rows
    assert size["stats"] == 16 * 2 * 4 * 256
    assert size["k_hat"] == 2 * 128 * keys
    assert size["v_hat"] + size["v_scale"] == (128 + 4) * keys

    plan = bwd_launch.bwd_plan(problem(128, "int8"))
    shapes = bwd_launch.workspace_shapes(plan, (2, 4, 300, 128), (2, 2, 130, 128))
    size = {
        n: torch.Size(s).numel() * torch.empty(0, dtype=t).itemsize for n, (s, t) in shapes.items()
    }
    rows, keys = 2 * 4 * 384, 2 * 2 * 256  # queries that see no key have rows here
    for name in ("q_t", "dout_t"):
        assert size[name] == 128 * rows and size[name + "_scale"] == 4 * 128 // 64 * rows
    assert size["k_t"] == 128 * keys and size["k_t_scale"] == 4 * 128 // 64 * keys
    assert not {"q_hat", "k_hat"} & set(size)
