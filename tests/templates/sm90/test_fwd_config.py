"""Configurations, constraints and plans of the forward kernel: plain Python."""

from __future__ import annotations

import dataclasses

import pytest

from sage_cute.compile.plan import fwd_plan
from sage_cute.config import (
    ARCHS,
    AttnProblem,
    FwdTileConfig,
    default_fwd_config,
    fwd_smem_bytes,
    supports_fwd,
)
from sage_cute.config.constraints import consumer_registers
from sage_cute.errors import UnsupportedError
from sage_cute.limits import HOPPER
from sage_cute.policies import resolve

ARCH = ARCHS["sm_90a"]
OTHER = {"tile_m": 128, "tile_n": 64, "num_stages": 3, "num_consumer_wgs": 2}


def problem(head_dim=64, policy="fast", **changes):
    built = AttnProblem.of(resolve(policy), head_dim=head_dim, dtype="bfloat16", is_causal=True)
    return dataclasses.replace(built, **changes)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(FwdTileConfig)])
def test_every_field_changes_the_key_or_is_rejected(field):
    config = default_fwd_config(problem())
    value = getattr(config, field)
    other = OTHER.get(field, not value if isinstance(value, bool) else value + 1)
    changed = dataclasses.replace(config, **{field: other})
    if supports_fwd(problem(), changed, ARCH):
        assert fwd_plan(problem(), changed) != fwd_plan(problem(), config)
    else:
        assert supports_fwd(problem(), changed, ARCH).reason


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
@pytest.mark.parametrize("policy", ["fast", "accurate", "sagebwd"])
def test_defaults_fit(head_dim, policy):
    built = problem(head_dim, policy)
    config = default_fwd_config(built)
    assert supports_fwd(built, config, ARCH)
    assert fwd_smem_bytes(built, config) <= ARCH.smem_bytes


@pytest.mark.parametrize("head_dim", [8, 20, 100, 264])
def test_head_dims_without_a_kernel_say_so(head_dim):
    built = problem(head_dim)
    reason = supports_fwd(built, default_fwd_config(built), ARCH).reason
    assert reason.startswith(f"head_dim {head_dim}: NVIDIA Hopper takes 16 to 256 in steps of 8")


@pytest.mark.parametrize("wgs", [1, 2, 3])
def test_setmaxnreg_never_asks_for_more_than_the_launch_gave(wgs):
    threads = 128 * (wgs + 1)
    launched = min(ARCH.registers // threads // 8 * 8, 248) * threads
    assert 128 * (24 + wgs * consumer_registers(wgs, ARCH)) <= launched


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"tile_n": 64}, "tile_n"), ({"num_stages": 9}, "shared memory"), ({"tile_m": 64}, "tile_m")],
)
def test_what_cannot_run_says_why(changes, word):
    built = problem(128)
    config = dataclasses.replace(default_fwd_config(built), **changes)
    with pytest.raises(UnsupportedError, match=word):
        fwd_plan(built, config)


@pytest.mark.parametrize(
    "change",
    ["qk=16bit", "pv=16bit", "smooth_q=true", "smooth_v=true", "k_scale=per_token"],
)
def test_policies_without_a_kernel_say_so(change):
    reason = HOPPER.why_not_policy("forward", resolve(f"fast:{change}"))
    assert reason.startswith(change)
    assert HOPPER.why_not_policy("forward", resolve("fast")) is None
