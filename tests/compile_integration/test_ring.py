"""The ring-attention example over two processes: gloo on the CPU, NCCL where there are two GPUs."""

from __future__ import annotations

import pathlib
import runpy
import textwrap

import pytest
import torch

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "ring_attention.py"
EXACT = textwrap.dedent("""
    # Against one process that walks the same pieces in the same order: nothing may differ.
    import runpy, sys, torch, torch.distributed as dist
    import sage_cute
    ring = runpy.run_path(sys.argv[1])["ring_attention"]
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for causal in (False, True):
        torch.manual_seed(1)
        whole = [torch.randn(2, h, 96, 32) for h in (4, 2, 2, 4)]
        dlse = torch.randn(2, 4, 96)
        q, k, v = (x.clone().requires_grad_() for x in whole[:3])
        total = 0
        for r in range(size):
            merged = None
            for step in range(size):
                piece = (r - step) % size
                if causal and piece > r:
                    continue
                part = sage_cute.attention(
                    q.chunk(size, 2)[r], k.chunk(size, 2)[piece], v.chunk(size, 2)[piece],
                    causal=causal and step == 0, return_lse=True)
                merged = part if merged is None else sage_cute.merge_attention(*merged, *part)
            total = total + (merged[0] * whole[3].chunk(size, 2)[r]).sum()
            total = total + (merged[1] * dlse.chunk(size, 2)[r]).sum()
        total.backward()
        pieces = [x.chunk(size, 2)[rank].clone().requires_grad_() for x in whole[:3]]
        out, lse = ring(*pieces, causal=causal)
        ((out * whole[3].chunk(size, 2)[rank]).sum()
         + (lse * dlse.chunk(size, 2)[rank]).sum()).backward()
        for piece, x in zip(pieces, (q, k, v)):
            torch.testing.assert_close(piece.grad, x.grad.chunk(size, 2)[rank],
                                       rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()
    print("gradients differ by nothing")
""")


def test_gradients_equal_those_of_one_process(tmp_path, on_two_processes) -> None:
    program = tmp_path / "exact.py"
    program.write_text(EXACT)
    on_two_processes(program, str(EXAMPLE), prints="gradients differ by nothing")


def test_the_example_runs(on_two_processes) -> None:
    on_two_processes(EXAMPLE, prints="gradients differ by")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus(on_two_processes) -> None:
    on_two_processes(EXAMPLE, prints="gradients differ by")


def test_importing_the_example_starts_nothing() -> None:
    assert callable(runpy.run_path(str(EXAMPLE))["ring_attention"])
