"""Configurations, constraints and plans of the backward kernels: plain Python."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_cute.compile import bwd_launch
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
@pytest.mark.parametrize("policy", [FIRST, FIRST + ":dp=16bit", "accurate"])
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


@pytest.mark.parametrize(
    "change", ["s=16bit", "dv=int8", "dk=int8", "dq=int8", "smooth_q=true", "do_scale=per_block"]
)
def test_policies_without_a_kernel_say_so(change):
    reason = HOPPER.why_not_policy("backward", resolve(f"{FIRST}:{change}"))
    assert reason.startswith(change)
    assert HOPPER.why_not_policy("backward", resolve(FIRST)) is None


def test_supports_gives_reasons():
    ask = {"head_dim": 128, "dtype": torch.bfloat16, "is_causal": False}
    assert bwd_launch.supports(resolve(FIRST), **ask)
    assert "dv" in bwd_launch.supports(resolve("sagebwd"), **ask).reason
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
