"""The search on a simulated GPU."""

from __future__ import annotations

import dataclasses

import pytest
from simulated import SimulatedBench

from sage_cute.compile.catalog import Call, problem_of
from sage_cute.config.space import FORWARD
from sage_cute.errors import TuningError
from sage_cute.tune.tuner import MARGIN, search

PROBLEM = problem_of("fwd", Call("fast", 128, "bfloat16", True))
DEFAULT = FORWARD.default(PROBLEM)


def cost(config) -> float:
    """Prefers two warpgroups, another grid than the default one, overlap, three stages."""
    same = config.persistent == DEFAULT.persistent
    ms = 1.0 + 0.2 * abs(config.num_consumer_wgs - 2) + 0.15 * same
    return ms + 0.1 * (not config.overlap) + 0.05 * abs(config.num_stages - 3)


BEST = min(FORWARD.configs(PROBLEM), key=cost)


@pytest.mark.parametrize("exhaustive", [False, True])
def test_finds_the_fastest(exhaustive) -> None:
    bench = SimulatedBench(cost, noise=0.002)
    found = search(FORWARD, PROBLEM, bench, exhaustive=exhaustive)
    assert cost(found.config) == cost(BEST) < cost(DEFAULT) * (1 - MARGIN)
    assert found.gain == pytest.approx(cost(DEFAULT) / cost(BEST), rel=0.01)
    everything = len(FORWARD.configs(PROBLEM))
    assert found.tried == everything if exhaustive else found.tried < everything // 4


@pytest.mark.parametrize("seed", range(10))
def test_twice_is_the_same_or_within_the_margin(seed) -> None:
    first, second = (
        search(FORWARD, PROBLEM, SimulatedBench(cost, noise=0.01, seed=s))
        for s in (seed, seed + 100)
    )
    assert abs(cost(first.config) / cost(second.config) - 1) <= MARGIN
    again = search(
        FORWARD,
        PROBLEM,
        SimulatedBench(cost, noise=0.01, seed=seed + 200),
        incumbent=first.config,
    )
    assert again.config == first.config or cost(again.config) < cost(first.config)


def test_what_is_in_use_stays_if_others_are_hardly_faster() -> None:
    flat = lambda config: 1.0 if config == DEFAULT else 1.0 - MARGIN / 2
    assert search(FORWARD, PROBLEM, SimulatedBench(flat)).config == DEFAULT
    incumbent = FORWARD.neighbours(PROBLEM, DEFAULT)[0]
    flat = lambda config: 1.0 if config == incumbent else 1.0 - MARGIN / 2
    found = search(FORWARD, PROBLEM, SimulatedBench(flat), incumbent=incumbent)
    assert found.config == incumbent and found.default_ms == flat(DEFAULT)


def test_an_incumbent_that_has_become_slow_goes() -> None:
    incumbent = FORWARD.neighbours(PROBLEM, DEFAULT)[0]
    slow = lambda config: 2.0 if config == incumbent else 1.0
    found = search(FORWARD, PROBLEM, SimulatedBench(slow), incumbent=incumbent)
    assert found.config != incumbent and found.gain == 1.0


def test_nothing_is_timed_before_it_has_the_defaults_bits() -> None:
    wrong = lambda c: (c.overlap, c.persistent) != (DEFAULT.overlap, DEFAULT.persistent)
    bench = SimulatedBench(cost, wrong=wrong)
    found = search(FORWARD, PROBLEM, bench)
    assert not any(map(wrong, [found.config, *bench.of("times")]))
    reasons = {r for c, r in found.rejected.items() if wrong(c)}
    assert reasons == {"out is not the default configuration's, bit for bit"}
    seen: set[object] = set()
    for what, configs in bench.log:
        if what == "outputs":
            seen.update(configs)
        elif what == "times":
            assert set(configs) <= seen


def test_what_fails_is_out_and_the_rest_goes_on() -> None:
    raises, broken = lambda c: not c.overlap, lambda c: c.num_consumer_wgs == 1
    bench = SimulatedBench(cost, raises=raises, broken=broken)
    found = search(FORWARD, PROBLEM, bench)
    assert cost(found.config) == cost(BEST)
    assert "RuntimeError: launch failed" in found.rejected.values()
    assert "does not compile" in found.rejected.values()
    assert not any(broken(c) for c in bench.of("outputs"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": "out is off by 0.5"}, "nothing is tuned: out is off by 0.5"),
        ({"broken": lambda c: True}, "does not compile"),
    ],
)
def test_a_wrong_default_stops_everything(options, message) -> None:
    bench = SimulatedBench(cost, **options)
    with pytest.raises(TuningError, match=message):
        search(FORWARD, PROBLEM, bench)
    assert not bench.of("times")


def test_every_candidate_is_compiled_and_checked_once() -> None:
    bench = SimulatedBench(cost, noise=0.01)
    search(FORWARD, PROBLEM, bench)
    for what in ("prepare", "outputs"):
        assert len(bench.of(what)) == len(set(bench.of(what)))
    assert len([1 for what, _ in bench.log if what == "prepare"]) < 8  # many at once


def test_progress_counts_up() -> None:
    seen: list[tuple[int, int]] = []
    search(FORWARD, PROBLEM, SimulatedBench(cost), on_progress=lambda *n: seen.append(n))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] and all(a <= b for a, b in seen)


def test_an_incumbent_that_would_change_results_is_not_even_tried() -> None:
    other = dataclasses.replace(DEFAULT, exp_fma_of_8=2)
    bench = SimulatedBench(lambda c: 0.1 if c == other else cost(c))
    found = search(FORWARD, PROBLEM, bench, incumbent=other)
    assert other not in bench.of("prepare") and found.config != other
