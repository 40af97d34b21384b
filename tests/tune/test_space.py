"""The configuration space: what is in it runs, and nothing in it changes a result."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_cute.compile.catalog import DIRECTIONS, Call, problem_of
from sage_cute.compile.kernel import Kernel
from sage_cute.compile.quant_launch import _compile, quant_spec
from sage_cute.config import ARCHS, Status
from sage_cute.config.space import BACKWARD, FORWARD, SPACES
from sage_cute.errors import UnsupportedError
from sage_cute.policies import resolve
from sage_cute.tune.table import CONFIGS

ARCH = ARCHS["sm_90a"]
CASES = [
    (direction, Call(policy, head_dim, "bfloat16", causal))
    for direction in SPACES
    for policy in ("fast", "accurate", "sagebwd", "int8")
    for head_dim in (64, 128, 256)
    for causal in (False, True)
]
ids = lambda case: case if isinstance(case, str) else "-".join(map(str, case))


@pytest.mark.parametrize(("direction", "call"), CASES, ids=ids)
def test_what_is_in_the_space_runs_and_the_default_is_first(direction, call) -> None:
    space, problem = SPACES[direction], problem_of(direction, call)
    configs = space.configs(problem)
    assert configs[0] == space.default(problem) and len(set(configs)) == len(configs) >= 10
    for config in configs:
        assert space.why_not(problem, config) == ""
        for name in space.fixed:
            assert getattr(config, name) == getattr(configs[0], name)


@pytest.mark.parametrize(("direction", "call"), CASES[::3], ids=ids)
def test_neighbours_are_one_axis_away_and_in_the_space(direction, call) -> None:
    space, problem = SPACES[direction], problem_of(direction, call)
    configs = set(space.configs(problem))
    near = space.neighbours(problem, space.default(problem))
    assert near and set(near) <= configs
    for config in near:
        different = [a for a in space.axes if getattr(config, a) != getattr(near[0], a)]
        assert len(different) <= 2
        changed = [
            a for a in space.axes if getattr(config, a) != getattr(space.default(problem), a)
        ]
        assert len(changed) == 1


def test_a_default_off_the_grid_is_a_value_of_its_axes() -> None:
    problem = problem_of("fwd", Call("fast", 64, "bfloat16", False))
    off = dataclasses.replace(FORWARD.default(problem), num_stages=7)
    space = dataclasses.replace(FORWARD, default=lambda problem: off, axes={**FORWARD.axes})
    space = dataclasses.replace(space, supports=lambda *arguments: Status(True))
    assert {c.num_stages for c in space.configs(problem)} == {2, 3, 4, 5, 7}
    near = space.neighbours(problem, space.configs(problem)[1])
    assert set(near) <= set(space.configs(problem))


@pytest.mark.parametrize("direction", SPACES)
def test_every_field_is_an_axis_follows_from_one_or_is_fixed(direction) -> None:
    space = SPACES[direction]
    named = [*space.axes, *space.derived, *space.fixed]
    assert sorted(named) == sorted(f.name for f in dataclasses.fields(CONFIGS[direction]))


@pytest.mark.parametrize(
    ("direction", "field"),
    [(d, f.name) for d in SPACES for f in dataclasses.fields(CONFIGS[d])],
)
def test_every_field_changes_a_key_or_is_rejected(direction, field) -> None:
    call = Call("fast", 64, "bfloat16", True)
    space, problem = SPACES[direction], problem_of(direction, call)
    default = space.default(problem)
    names = {k.name for k in DIRECTIONS[direction](call, default)}
    value = getattr(default, field)
    others = [not value] if isinstance(value, bool) else [value + 1, value + 16, value + 64]
    for other in (*others, *space.axes.get(field, ())):
        if other == value:
            continue
        config = dataclasses.replace(default, **{field: other})
        if space.supports(problem, config, ARCH):
            assert {k.name for k in DIRECTIONS[direction](call, config)} != names
        else:
            with pytest.raises(UnsupportedError):
                list(DIRECTIONS[direction](call, config))


@pytest.mark.parametrize("direction", SPACES)
def test_every_field_of_a_problem_changes_the_key(direction) -> None:
    call = Call("fast", 64, "bfloat16", True)
    kernels = list(DIRECTIONS[direction](call, None))
    attention = next(k for k in kernels if k.kind in ("fwd", "bwd_keys"))
    problem = attention.plan.problem
    names = {attention.name}
    for field in dataclasses.fields(problem):
        other = dataclasses.replace(problem, **{field.name: "other"})
        plan = dataclasses.replace(attention.plan, problem=other)
        names.add(Kernel(attention.kind, plan, attention.build).name)
    assert len(names) == 1 + len(dataclasses.fields(problem))


def test_every_field_of_a_quantization_changes_the_key() -> None:
    spec = quant_spec(resolve("fast"), torch.bfloat16, 64)
    names = {Kernel("quantize", spec, _compile).name}
    for field in dataclasses.fields(spec):
        other = dataclasses.replace(spec, **{field.name: "other"})
        names.add(Kernel("quantize", other, _compile).name)
    assert len(names) == 1 + len(dataclasses.fields(spec))


def test_tile_n_is_the_policys_whatever_the_tuner_says() -> None:
    for policy, block_k in (("fast", 128), ("sagebwd", 64)):
        problem = problem_of("fwd", Call(policy, 64, "bfloat16", False))
        assert {c.tile_n for c in FORWARD.configs(problem)} == {block_k}


def test_tiles_of_int8_gradients_are_the_policys_whatever_the_tuner_says() -> None:
    for policy, tile_m in (("int8", 64), ("sagebwd", 128)):
        problem = problem_of("bwd", Call(policy, 64, "bfloat16", False))
        configs = BACKWARD.configs(problem)
        assert {(c.tile_m, c.query_wgs, c.dq_tile_n) for c in configs} == {
            (tile_m, tile_m // 64, 64)
        }


@pytest.mark.parametrize(
    ("space", "direction", "change"),
    [
        (FORWARD, "fwd", {"exp_fma_of_8": 1}),
        (FORWARD, "fwd", {"lazy_rescale": False}),
        (BACKWARD, "bwd", {"packed_ds": False}),
    ],
)
def test_what_changes_last_bits_is_refused(space, direction, change) -> None:
    problem = problem_of(direction, Call("fast", 64, "bfloat16", False))
    config = dataclasses.replace(space.default(problem), **change)
    assert "the results would be other ones" in space.why_not(problem, config)
