"""Kernels from files, on a GPU: the same bits as compiled ones, and a fast start."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from sage_cute import attention
from sage_cute.tune import select

pytestmark = pytest.mark.gpu

CALL = textwrap.dedent("""
    import sys, time
    if "without-dsl" in sys.argv:
        sys.modules["cutlass"] = None  # importing it raises ImportError
    import torch, tvm_ffi, sage_cute
    import sage_cute.compile.bwd_launch, sage_cute.compile.quant_launch, sage_cute.tune.select

    rng = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(2, 4, 1000, 64, generator=rng, device="cuda").bfloat16()
                     for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        start = time.perf_counter()
        out = sage_cute.attention(q, k, v, causal=True, policy="fast")
        print("seconds", time.perf_counter() - start)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        torch.save([x.cpu() for x in (out.detach(), *grads)], sys.argv[1])
    print("dsl", "cutlass" in sys.modules and sys.modules["cutlass"] is not None)
""")


def call(tmp_path, name: str, *flags: str, **variables: str) -> tuple[list[torch.Tensor], str]:
    path = tmp_path / name
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(path), *flags],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path), done.stdout


def test_built_without_a_gpu_and_run_without_the_dsl(tmp_path) -> None:
    compiled, _ = call(tmp_path, "a", SAGE_CUTE_CACHE_MB="0")
    command = [sys.executable, "-m", "sage_cute", "compile", "--head-dims", "64"]
    command += ["--policies", "fast", "--masks", "causal", "--out", str(tmp_path / "kernels")]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    ahead, log = call(
        tmp_path,
        "b",
        "without-dsl",
        SAGE_CUTE_KERNELS=str(tmp_path / "kernels"),
        SAGE_CUTE_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert "dsl False" in log and not list((tmp_path / "cache").rglob("*.so"))
    assert all(torch.equal(a, b) for a, b in zip(compiled, ahead, strict=True))


def test_a_warm_start_is_fast_and_has_the_same_bits(tmp_path) -> None:
    runs = [call(tmp_path, str(i), SAGE_CUTE_CACHE_DIR=str(tmp_path / "cache")) for i in range(3)]
    for results, log in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0][0], results, strict=True))
        assert "dsl False" in log
    # Two kernels, from the first line of the op to the return of the launches.
    assert min(float(log.split()[1]) for _, log in runs[1:]) < 0.1


def test_nothing_is_tuned_while_a_graph_is_captured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(select, "tune", None)  # a call would raise
    q = torch.randn(1, 2, 500, 64, device="cuda", dtype=torch.bfloat16)
    expected = attention(q, q, q, policy="fast")
    select.set_mode("on-miss")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(q, q, q, policy="fast")
        graph.replay()
        assert torch.equal(out, expected)
    finally:
        select.set_mode(None)
