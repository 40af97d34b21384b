"""Inputs in the memory layouts that models produce."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Make = Callable[..., tuple[Tensor, Tensor, Tensor]]


def make_qkv(
    layout: str = "contiguous",
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seqlen_q: int = 70,
    seqlen_k: int = 70,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, logically (batch, heads, seqlen, head_dim)."""

    def one(h: int, s: int) -> Tensor:
        if layout == "bshd":
            return torch.randn(batch, s, h, head_dim, dtype=dtype).transpose(1, 2)
        if layout == "last_stride_2":
            return torch.randn(batch, h, s, head_dim, 2, dtype=dtype)[..., 0]
        if layout == "unaligned":
            flat = torch.randn(batch * h * s * head_dim + 1, dtype=dtype)
            return flat[1:].view(batch, h, s, head_dim)
        if layout == "expanded":
            return torch.randn(1, 1, s, head_dim, dtype=dtype).expand(batch, h, s, head_dim)
        return torch.randn(batch, h, s, head_dim, dtype=dtype)

    if layout == "packed":
        assert seqlen_q == seqlen_k
        fused = torch.randn(batch, seqlen_q, heads + 2 * kv_heads, head_dim, dtype=dtype)
        qkv = [x.transpose(1, 2) for x in fused.split([heads, kv_heads, kv_heads], 2)]
    else:
        qkv = [one(heads, seqlen_q), one(kv_heads, seqlen_k), one(kv_heads, seqlen_k)]
    q, k, v = (x.requires_grad_() if requires_grad else x for x in qkv)
    return q, k, v


LAYOUTS = ("contiguous", "bshd", "packed", "last_stride_2", "unaligned", "expanded")


@pytest.fixture
def qkv() -> Make:
    """The maker of inputs."""
    return make_qkv


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Each memory layout."""
    return str(request.param)


@pytest.fixture
def graphs_of() -> Callable[..., list[list[str]]]:
    """Compiles, runs and differentiates a function: our ops in its forward and backward graph."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def graphs(function: Callable[..., Tensor], *args: Tensor) -> list[list[str]]:
        seen: list[list[str]] = []

        def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            seen.append([str(n.target) for n in graph.graph.nodes if "sage" in str(n.target)])
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
        out = torch.compile(function, backend=backend, fullgraph=True)(*args)
        if out.requires_grad:
            out.sum().backward()
        return seen

    return graphs


@pytest.fixture
def on_two_processes() -> Callable[..., None]:
    """Runs a program as two ranks; each must end well and print a text."""

    def run(program: pathlib.Path, *arguments: str, prints: str) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [
            subprocess.Popen(
                [sys.executable, str(program), *arguments],
                env={**os.environ, **world, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        for process in processes:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0 and prints in output, output[-4000:]

    return run
