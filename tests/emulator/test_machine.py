"""The emulator finds what it is there to find: kernels with one instruction changed go wrong."""

from __future__ import annotations

import math
import re
from unittest import mock

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import emulator  # noqa: E402
from sage_cute.compile import compiler, launch  # noqa: E402
from sage_cute.policies import resolve  # noqa: E402

SEQLEN, HEAD_DIM = 700, 64


class Forward:
    """The forward kernel on random codes, from its PTX or from a changed one."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)

        def codes(*shape: int) -> torch.Tensor:
            return torch.randint(-127, 128, shape, generator=rng, dtype=torch.int8)

        def scales(*shape: int) -> torch.Tensor:
            return (torch.rand(shape, generator=rng) + 0.5) / 100

        padded = math.ceil(SEQLEN / 128) * 128
        self.arguments = (
            codes(1, 2, SEQLEN, HEAD_DIM),
            scales(1, 2, SEQLEN),
            codes(1, 1, SEQLEN, HEAD_DIM),
            scales(1, 1, padded // 128),
            codes(1, 1, HEAD_DIM, padded),
            scales(1, 1, padded),
        )
        emulator.kernel.keep_ptx()
        self.launch(self.compile, 0)

    def compile(self, plan) -> emulator.Emulated:
        self.function = compiler.compile_plan(plan)
        self.ptx = self.function.__ptx__
        return self.kernel(self.ptx)

    def kernel(self, ptx: str) -> emulator.Emulated:
        return emulator.Emulated(self.function, ptx)

    def launch(self, compiled, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full((1, 2, SEQLEN, HEAD_DIM), torch.nan, dtype=torch.bfloat16)
        lse = torch.full((1, 2, SEQLEN), torch.nan)
        with mock.patch.object(launch, "compiled", compiled), emulator.seeded(seed):
            launch.forward(
                *self.arguments, out, lse, scale=0.1, is_causal=False, policy=resolve("fast")
            )
        return out, lse

    def run(self, kernel: emulator.Emulated, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.launch(lambda plan: kernel, seed)


@pytest.fixture(scope="module")
def forward() -> Forward:
    return Forward()


@pytest.fixture(scope="module")
def expected(forward) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = forward.run(forward.kernel(forward.ptx), 0)
    assert out.isfinite().all() and lse.isfinite().all()
    return out, lse


def replaced(text: str, pattern: str, by: str, which: int) -> str:
    """The text with one match of a pattern replaced; -1: the last."""
    found = list(re.finditer(pattern, text))
    assert found, pattern
    m = found[which]
    return text[: m.start()] + m.expand(by) + text[m.end() :]


def outcomes(forward, expected, ptx: str, seeds=range(8)) -> list[str]:
    """Of a kernel, run with several seeds: right, wrong, or the message of its fault."""
    kernel, found = forward.kernel(ptx), []
    for seed in seeds:
        try:
            out, lse = forward.run(kernel, seed)
        except emulator.EmulatorError as error:
            found.append(str(error))
            continue
        right = torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        found.append("right" if right else "wrong")
    return found


def test_the_order_of_events_changes_nothing(forward, expected) -> None:
    assert outcomes(forward, expected, forward.ptx) == ["right"] * 8


def test_reading_before_the_data_has_arrived(forward, expected) -> None:
    """A consumer that does not wait for K: right if copies are instant, wrong if they are not."""
    wait = r"(mbarrier\.try_wait\.parity\.shared\.b64 P1, \[[^\]]*\], [^,;]+), 10000000; "
    loops = len(re.findall(wait, forward.ptx))
    caught = 0
    for which in range(loops):
        # Without the hint of a loop the instruction asks once; its loop is cut.
        ptx = replaced(
            forward.ptx, wait + r"(\s+)@P1 bra\.uni DONE; ", r"\1;\2bra.uni DONE; ", which
        )
        results = outcomes(forward, expected, ptx, range(1, 13))
        caught += any(result != "right" for result in results)
    # Waits for a slot to be free of data that is long consumed may never matter on so few blocks.
    assert caught >= loops // 2, (caught, loops)


def test_waiting_for_what_never_comes(forward, expected) -> None:
    ptx = replaced(forward.ptx, r"mbarrier\.arrive\.expect_tx[^;]*;", "", 0)
    results = outcomes(forward, expected, ptx, (0, 1))
    assert all("deadlock" in result and "mbarrier" in result for result in results), results


def test_reading_accumulators_before_the_product_is_done(forward, expected) -> None:
    ptx = re.sub(r"wgmma\.wait_group\.sync\.aligned\s+0;", "", forward.ptx)
    results = outcomes(forward, expected, ptx, range(1, 5))
    assert all(result != "right" for result in results), results


def test_writing_outside_of_the_output(forward, expected) -> None:
    ptx = replaced(forward.ptx, r"st\.global\.b32\s+\[(%rd\d+)", r"st.global.b32 [\1+1000000", 0)
    (result,) = outcomes(forward, expected, ptx, (0,))
    assert "is in no tensor" in result and "st.global.b32" in result


def test_an_instruction_that_it_does_not_know_is_named(forward) -> None:
    ptx = forward.ptx.replace("fma.rn.f32", "fma.rz.f32", 1)
    with pytest.raises(emulator.ptx.PtxError, match="line .*fma.rz.f32"):
        forward.kernel(ptx)


def test_two_kernels_of_one_name(forward, expected) -> None:
    """Each library runs its own."""
    other = forward.kernel(forward.ptx.replace("ex2.approx.ftz.f32", "lg2.approx.ftz.f32"))
    again = forward.kernel(forward.ptx)
    assert not torch.equal(forward.run(other, 0)[0], expected[0])
    assert torch.equal(forward.run(again, 0)[0], expected[0])
