"""Windows, key lengths, given means and packed batches: the kernels against the CPU."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.emulated(slow=True)]

_PATH = pathlib.Path(__file__).with_name("mask_case.py")
_spec = importlib.util.spec_from_file_location("mask_case", _PATH)
case = importlib.util.module_from_spec(_spec)
sys.modules["mask_case"] = case  # NamedTuple looks its module up
_spec.loader.exec_module(case)

LONG = ((300, 300), (300, 300))
CASES = {
    "window": {"sizes": ((200, 300),), "window": (50, 20)},
    "window of one key": {"sizes": ((200, 200),), "window": (0, 0)},
    "window to the left": {"sizes": ((500, 500),), "window": (100, None)},
    "window to the right": {"sizes": ((150, 300),), "window": (None, 30)},
    "causal window": {"sizes": ((500, 300),), "window": (100, None), "causal": True},
    "rows without keys at both ends": {"sizes": ((300, 100),), "window": (20, 10)},
    "key lengths": {"sizes": ((130, 300),) * 3, "key_lengths": (300, 129, 0)},
    "causal key lengths": {"sizes": LONG, "key_lengths": (280, 1), "causal": True},
    "key lengths and a window": {"sizes": LONG, "key_lengths": (180, 300), "window": (60, 10)},
    "given mean": {"sizes": ((130, 200),) * 2, "given_mean": True},
    "packed": {"sizes": ((130, 200), (5, 17), (0, 40), (70, 300)), "packed": True},
    "causal packed": {
        "sizes": ((130, 200), (50, 17), (64, 0), (70, 300)),
        "packed": True,
        "causal": True,
        "outside": (3, 9),
    },
    "packed with a window": {"sizes": ((130, 200), (300, 170)), "packed": True, "window": (30, 40)},
    "packed with a given mean": {"sizes": LONG, "packed": True, "given_mean": True},
}
CODES, TILES = 5e-3, 8e-3
"""Codes of P and dS that are off by one, as in test_bwd_kernel."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", ["fast", "sagebwd"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward(name, policy, head_dim):
    case.check_forward(case.Case(**CASES[name], policy=policy, head_dim=head_dim))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward(name, head_dim):
    case.check_backward(case.Case(**CASES[name], head_dim=head_dim))


@pytest.mark.parametrize("name", ["causal window", "key lengths and a window", "causal packed"])
@pytest.mark.parametrize(
    ("policy", "limit"),
    [("accurate", 7e-3), ("fast:dp=16bit", 7e-3), ("sagebwd", TILES), ("int8", CODES)],
)
def test_backward_of_other_policies(name, policy, limit):
    case.check_backward(case.Case(**CASES[name], policy=policy), limit)


@pytest.mark.parametrize("head_dim", [16, 40, 72, 136, 256])
@pytest.mark.parametrize("name", ["key lengths and a window", "causal packed"])
def test_other_head_dims(name, head_dim):
    a_case = case.Case(**CASES[name], head_dim=head_dim, dtype=torch.float16)
    case.check_forward(a_case)
    case.check_backward(a_case)


@pytest.mark.parametrize("name", ["key lengths and a window", "causal packed"])
def test_values_of_very_different_norm(name):
    case.check_forward(case.Case(**CASES[name], spread=2.0))
