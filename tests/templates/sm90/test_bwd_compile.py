"""Every backward kernel compiles with no GPU, and the tuned ones assemble as they should."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs nvidia-cutlass-dsl", allow_module_level=True)

from sage_cute.config.bwd import BwdProblem, default_bwd_config
from sage_cute.policies import resolve

POLICIES = ("fast", "fast:k_scale=per_token", "fast:dp=16bit", "accurate")
INT8 = ("int8", "sagebwd", "fast:dv=int8", "accurate:dk=int8")


def kernels(head_dim, dtype, causal, policy, **more):
    case = {"head_dim": head_dim, "dtype": dtype, "causal": causal, "policy": policy, **more}
    return [{**case, "kernel": kernel} for kernel in ("keys", "queries")]


@pytest.mark.parametrize("head_dim", [24, 64, 128, 200, 256])
def test_every_kernel_compiles_to_the_products_of_its_policy(reports, head_dim):
    cases = [
        case
        for dtype, causal in (("bfloat16", True), ("float16", False))
        for policy in ("fast", "fast:dp=16bit")
        for case in kernels(head_dim, dtype, causal, policy)
    ]
    for report in reports(cases):
        case, keys = report["case"], report["case"]["kernel"] == "keys"
        problem = BwdProblem.of(
            resolve(case["policy"]),
            head_dim=head_dim,
            dtype=case["dtype"],
            is_causal=case["causal"],
        )
        c, d = default_bwd_config(problem), problem.padded_dim
        stages = c.num_stages if keys else c.dq_num_stages
        int8_dp = problem.dp == "int8"
        int8 = d // 32 * (2 if int8_dp else 1)
        other = (2 * c.tile_m if keys else c.dq_tile_n) // 16 + (0 if int8_dp else d // 16)
        steps, rest = divmod(report["int8_products"], int8)
        # the first group, those with a mask (which a compiler may find empty) and the others
        assert steps in (2 * stages, 3 * stages), report
        assert rest == 0, report
        assert report["other_products"] == steps * other, report


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_int8_kernel_compiles_to_the_products_of_its_policy(reports, head_dim):
    cases = [
        case
        for policy in INT8
        for case in kernels(head_dim, "bfloat16", True, policy)
        if case["kernel"] == "keys" or policy in ("int8", "sagebwd")
    ]
    for report in reports(cases):
        case, keys = report["case"], report["case"]["kernel"] == "keys"
        policy = resolve(case["policy"])
        problem = BwdProblem.of(policy, head_dim=head_dim, dtype="bfloat16", is_causal=True)
        c, d = default_bwd_config(problem), problem.padded_dim
        columns = d // c.column_splits if keys else d
        products = ["int8", policy.dp, *([policy.dv, policy.dk] if keys else [policy.dq])]
        contracted = [d, d, 64, 64]
        slices = [1, 1, columns // 64, columns // 64]
        # of a step, with a mask and without, for each buffer
        steps = 2 * (c.num_stages if keys else c.dq_num_stages)
        int8 = sum(
            k // 32 * n
            for p, k, n in zip(products, contracted, slices, strict=False)
            if p == "int8"
        )
        other = sum(k // 16 for p, k in zip(products, contracted, strict=False) if p != "int8")
        assert report["int8_products"] == steps * int8, report
        assert report["other_products"] == steps * other, report


@pytest.mark.parametrize("head_dim", [24, 64, 128, 256])
def test_the_preprocess_compiles(reports, head_dim):
    cases = [
        {
            "head_dim": head_dim,
            "dtype": "bfloat16",
            "causal": False,
            "policy": policy,
            "kernel": "preprocess",
        }
        for policy in (*POLICIES, *INT8)
    ]
    assert all(report["other_products"] == 0 for report in reports(cases))


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas on PATH")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tuned_kernels_are_not_serialized_and_do_not_spill(reports, head_dim):
    cases = [
        case
        for causal in (False, True)
        for policy in POLICIES
        for case in kernels(head_dim, "bfloat16", causal, policy, assemble=True)
    ]
    for report in reports(cases):
        assert report["warnings"] == [], report
        case = report["case"]
        odd = case["policy"] == "fast:k_scale=per_token" and case["causal"] and head_dim == 128
        # What releasing behind a fence costs the one mix whose registers are full. Wanted is 0.
        assert report["spill_stores"] <= (16 if odd else 0), report


SPILLS = {"int8": {64: 284, 128: 268}, "sagebwd": {64: 208, 128: 332}}
"""Bytes of stores of the key kernel, a few of them a step (docs/backward-kernel.md): 24, 128, 144
and 240 before buffers were released behind a fence, which a race needed."""
MASKS = ({"window": True}, {"lengths": "padded"}, {"lengths": "packed"})
MASKED_SPILLS = {"keys": 32, "queries": 0}
"""Bytes of local memory that are tolerated, not looked at yet: wanted is 0."""


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas on PATH")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("policy", SPILLS)
def test_int8_gradients_are_not_serialized_and_hardly_spill(reports, head_dim, policy):
    cases = [
        case
        for causal in (False, True)
        for case in kernels(head_dim, "bfloat16", causal, policy, assemble=True)
    ]
    for report in reports(cases):
        keys = report["case"]["kernel"] == "keys"
        assert report["warnings"] == [], report
        assert report["spill_stores"] <= (SPILLS[policy][head_dim] if keys else 4), report


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas on PATH")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_of_masks_are_not_serialized(reports, head_dim):
    cases = [
        {**case, **mask}
        for mask in MASKS
        for case in kernels(head_dim, "bfloat16", True, "fast", assemble=True)
    ]
    for report in reports(cases):
        assert report["warnings"] == [], report
        assert report["spill_stores"] <= MASKED_SPILLS[report["case"]["kernel"]], report
