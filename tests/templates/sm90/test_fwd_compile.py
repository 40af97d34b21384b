"""Every forward kernel compiles with no GPU, and the tuned ones assemble as they should."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs nvidia-cutlass-dsl", allow_module_level=True)

POLICIES = ("fast", "accurate", "sagebwd")  # int8 has the forward of fast: the same kernel
SPILLS = {128: 80, 64: 160}
"""Bytes of local memory that are tolerated: one loop-invariant value is read once a step of the
bounded path at head_dim 128, the rest is in the exact path. Not each kernel was looked at. Wanted
is 0."""


def cases(head_dim, dtypes, **more):
    return [
        {"head_dim": head_dim, "dtype": dtype, "causal": causal, "policy": policy, **more}
        for dtype in dtypes
        for causal in (False, True)
        for policy in POLICIES
    ]


@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 96, 104, 128, 136, 160, 224, 256])
def test_every_kernel_compiles_to_int8_products_only(reports, head_dim):
    every = cases(head_dim, ("bfloat16", "float16"))
    if head_dim not in (64, 128):  # each dtype with one mask: a second of compiling for each kernel
        every = [case for case in every if case["causal"] == (case["dtype"] == "bfloat16")]
    for report in reports(every):
        assert report["int8_products"] > 0, report
        assert report["other_products"] == 0, report


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas on PATH")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tuned_kernels_are_not_serialized_and_do_not_spill(reports, head_dim):
    for report in reports(cases(head_dim, ("bfloat16",), assemble=True)):
        assert report["warnings"] == [], report
        assert report["spill_stores"] <= SPILLS[head_dim], report


MASKS = ({"window": True}, {"lengths": "padded"}, {"lengths": "packed"})
MASKED_SPILLS = {64: 184, 128: 80}
"""As ``SPILLS``, with bounds and offsets beside them; not looked at yet. Wanted is 0."""


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas on PATH")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_of_masks_are_not_serialized(reports, head_dim):
    case = {"head_dim": head_dim, "dtype": "bfloat16", "causal": True, "policy": "fast"}
    for report in reports([{**case, **mask, "assemble": True} for mask in MASKS]):
        assert report["warnings"] == [], report
        assert report["spill_stores"] <= MASKED_SPILLS[head_dim], report
