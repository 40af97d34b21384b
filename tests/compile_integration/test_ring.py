"""The ring-attention example over two processes: gloo on the CPU, NCCL where there are two GPUs."""

from __future__ import annotations

import os
import pathlib
import runpy
import socket
import subprocess
import sys
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


def run(*command: str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0 and "gradients differ by" in output, output[-4000:]


def test_gradients_equal_those_of_one_process(tmp_path) -> None:
    program = tmp_path / "exact.py"
    program.write_text(EXACT)
    run(str(program), str(EXAMPLE))


def test_the_example_runs() -> None:
    run(str(EXAMPLE))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus() -> None:
    run(str(EXAMPLE))


def test_importing_the_example_starts_nothing() -> None:
    assert callable(runpy.run_path(str(EXAMPLE))["ring_attention"])
