"""What the tuner measures on; on the CPU with numerics in place of the kernels."""

from __future__ import annotations

import math

import pytest
import torch

from sage_cute.compile import bwd_launch, launch, quant_launch
from sage_cute.compile.catalog import Call, problem_of
from sage_cute.config.space import SPACES
from sage_cute.errors import TuningError
from sage_cute.numerics import attention_reference_backward, sage_forward
from sage_cute.policies import resolve
from sage_cute.tune import gpu as tune_gpu
from sage_cute.tune.gpu import BENCHES, BackwardBench, ForwardBench
from sage_cute.tune.key import Shape, TuneKey
from sage_cute.tune.tuner import search

CALL = Call("fast", 64, "bfloat16", True)
SHAPE = Shape(1, 4, 2, 200, 200)


@pytest.fixture
def stand_ins(monkeypatch):
    """Kernels of numerics; ``flipped(config)`` says whose output is off by a bit."""
    inputs, results, flipped = {}, {}, {}

    def quantize(spec):
        def run(q, k, v, q_codes, *rest):
            inputs[q_codes.data_ptr()] = q, k, v

        return run

    def forward(plan):
        def run(q_codes, q_scale, k_codes, k_scale, v_t, v_scale, out, lse, scale_log2, *rest):
            key, scale = q_codes.data_ptr(), scale_log2 / math.log2(math.e)
            if key not in results:
                results[key] = sage_forward(
                    *inputs[key],
                    scale=scale,
                    causal=plan.problem.is_causal,
                    policy=resolve("fast"),
                )
            f = results[key]
            out.copy_(f.out)
            lse.copy_(f.lse)
            if flipped.get("all"):
                out.neg_()
            if plan.config.num_stages == flipped.get("num_stages"):
                out.view(torch.int16)[0, 0, 0, 0] ^= 1

        return run

    monkeypatch.setattr(quant_launch, "compiled_quantize", quantize)
    monkeypatch.setattr(launch, "compiled", forward)
    monkeypatch.setattr(launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(tune_gpu, "kernel_cache", lambda: None)
    return flipped


def bench() -> ForwardBench:
    return ForwardBench(CALL, SHAPE, torch.device("cpu"))


def test_right_kernels_pass_the_gate_and_are_timed(stand_ins) -> None:
    problem, space = problem_of("fwd", CALL), SPACES["fwd"]
    configs = space.configs(problem)[:2]
    one = bench()
    first, second = (one.outputs(config) for config in configs)
    assert set(first) == {"out", "lse", "small out", "small lse"}
    assert first["out"].shape == (1, 4, 200, 64) and first["small out"].shape[1] == 2
    assert one.why_wrong(first) == ""
    for name in first:
        assert torch.equal(first[name], second[name]) and first[name] is not second[name]
    times = one.times(configs, rounds=3)
    assert all(len(ms) == 3 and min(ms) > 0 for ms in times.values()) and set(times) == set(configs)


def test_a_wrong_kernel_is_no_baseline(stand_ins) -> None:
    stand_ins["all"] = True
    with pytest.raises(TuningError, match="out is off by"):
        search(SPACES["fwd"], problem_of("fwd", CALL), bench())


def test_the_backward_is_checked_against_float64(stand_ins, monkeypatch) -> None:
    inputs, signs = [], [1, 1, 1]
    original = BackwardBench.make

    def make(self, shape):
        inputs.append(original(self, shape))
        return inputs[-1]

    def backward(dout, dlse, v, out, lse, *rest, scale, is_causal, policy, config):
        (x,) = [x for x in inputs if x["q_codes"] is rest[0]]
        assert out is x["out"] and lse is x["lse"] and not out.isnan().any() and dlse is None
        grads, _ = attention_reference_backward(
            dout, x["q"], x["k"], v, scale=scale, causal=is_causal
        )
        for sign, result, value in zip(signs, rest[4:], grads, strict=True):
            result.copy_(sign * value)

    monkeypatch.setattr(BackwardBench, "make", make)
    monkeypatch.setattr(bwd_launch, "backward", backward)
    one = BackwardBench(CALL, SHAPE, torch.device("cpu"))
    found = one.outputs(None)
    assert set(found) == {p + n for p in ("", "small ") for n in ("dq", "dk", "dv")}
    assert one.why_wrong(found) == ""
    for i, name in enumerate(("dq", "dk", "dv")):
        signs[:] = [-1 if j == i else 1 for j in range(3)]
        assert one.why_wrong(one.outputs(None)).startswith(f"{name} is off by 2")


def test_a_flipped_bit_is_out(stand_ins) -> None:
    problem = problem_of("fwd", CALL)
    stand_ins["num_stages"] = 3
    found = search(SPACES["fwd"], problem, bench())
    assert found.config.num_stages != 3
    assert any(c.num_stages == 3 for c in found.rejected)


def test_candidates_are_compiled_into_the_cache_by_other_processes(stand_ins, monkeypatch) -> None:
    from sage_cute.compile.build import Built
    from sage_cute.compile.cache import kernel_cache

    one = bench()
    configs = SPACES["fwd"].configs(problem_of("fwd", CALL))[:3]
    asked = []

    def build_all(kernels, folder, workers):
        asked.extend(kernels)
        for kernel in kernels:
            failed = kernel.kind == "fwd" and kernel.plan.config == configs[1]
            yield Built(kernel, 1.0, 1, "no registers left" if failed else "")

    monkeypatch.setattr(tune_gpu, "kernel_cache", kernel_cache)
    monkeypatch.setattr(tune_gpu, "build_all", build_all)
    assert one.prepare(configs) == {configs[1]: "no registers left"}
    assert sorted(k.kind for k in asked) == ["fwd"] * 3 + ["quantize"]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("direction", BENCHES)
@pytest.mark.parametrize("policy", ["fast", "accurate"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_neighbour_of_the_default_gives_its_bits(direction, policy, head_dim) -> None:
    call = Call(policy, head_dim, "bfloat16", True)
    problem, space = problem_of(direction, call), SPACES[direction]
    one = BENCHES[direction](call, Shape(2, 4, 2, 1000, 1000), torch.device("cuda", 0))
    default = space.default(problem)
    configs = space.neighbours(problem, default)
    assert not one.prepare([default, *configs])
    expected = one.outputs(default)
    assert one.why_wrong(expected) == ""
    for config in configs:
        for name, value in one.outputs(config).items():
            assert torch.equal(value, expected[name]), (config, name)


@pytest.mark.gpu
def test_tuning_twice_chooses_the_same_or_one_within_two_percent(tmp_path, monkeypatch) -> None:
    call = Call("fast", 128, "bfloat16", False)
    shape = Shape(1, 16, 16, 4096, 4096)
    problem = problem_of("fwd", call)
    one = ForwardBench(call, shape, torch.device("cuda", 0))
    first = search(SPACES["fwd"], problem, one)
    before = torch.cuda.memory_allocated()  # with cuBLAS's workspace, which the reference needs
    second = search(SPACES["fwd"], problem, one)
    assert torch.cuda.memory_allocated() == before  # scratch only
    if first.config != second.config:
        ms = one.times([first.config, second.config], 15)
        a, b = (sorted(values)[7] for values in ms.values())
        assert abs(a / b - 1) <= 0.02
    assert TuneKey.of("fwd", call, shape).sizes == (16, 4096, 4096)
