"""Hypothesis profiles of the numerics tests: examples, and nothing that a bound depends on.

``SAGE_HYPOTHESIS_PROFILE`` picks one: ``numerics`` (the default), ``stress`` (25 times as many),
``mutation`` (the same every time, and no search for a smaller failure).
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, Phase, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

_BASE = settings(
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
_PROFILES = {
    "numerics": _BASE,
    "stress": settings(_BASE, max_examples=300),
    "mutation": settings(
        _BASE, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
    ),
}
_CHOSEN = _PROFILES[os.environ.get("SAGE_HYPOTHESIS_PROFILE", "numerics")]
# Registered, not loaded: test modules name them, and those of other folders are left alone.
settings.register_profile("numerics", _CHOSEN)
settings.register_profile("numerics_many", settings(_CHOSEN, max_examples=4 * _CHOSEN.max_examples))
