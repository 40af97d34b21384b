"""Kinds 28 to 32: machines. (The kernel cache of 31 has tests of its own: see README.md.)"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sage_cute
from sage_cute import support
from sage_cute.config import ARCHS
from sage_cute.config.bwd import BwdProblem, bwd_smem_bytes
from sage_cute.config.constraints import fwd_smem_bytes
from sage_cute.config.problem import AttnProblem
from sage_cute.config.space import SPACES
from sage_cute.errors import UnsupportedError
from sage_cute.limits import HOPPER
from sage_cute.policies import PRESETS, resolve

ROOT = Path(sage_cute.__file__).parent
SAGE = torch.ops.sage


def python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("how", ["not installed", "broken"])
def test_28_without_the_dsl_all_but_a_launch_works_and_that_says_what_is_missing(how) -> None:
    code = """
        import builtins, sys
        original = builtins.__import__
        def fails(name, *args, **kwargs):
            if name.split(".")[0] in ("cutlass", "tvm_ffi"):
                raise ERROR
            return original(name, *args, **kwargs)
        builtins.__import__ = fails
        import torch, sage_cute
        from sage_cute.compile import catalog, compiler
        from sage_cute.errors import KernelError
        q = torch.randn(1, 2, 9, 32, requires_grad=True)
        sage_cute.attention(q, q, q).sum().backward()
        assert sage_cute.is_supported(q, q, q)
        call = catalog.Call("fast", 64, "bfloat16", True)
        for kernel in catalog.kernels([call], ["fwd", "bwd"]):
            try:
                compiler.load(kernel.kind, kernel.plan, kernel.build)
            except (KernelError, ImportError) as error:
                print(type(error).__name__, error, repr(error.__cause__))
    """
    error = {
        "not installed": "ModuleNotFoundError(f'No module named {name!r}')",
        "broken": "ImportError('libcudart.so.13: cannot open shared object file')",
    }[how]
    output = python(code.replace("ERROR", error))
    original = {"not installed": "No module named 'cutlass'", "broken": "libcudart.so.13: cannot"}
    for line in output.splitlines():
        assert line.startswith("KernelError kernel {") and "pip install 'nvidia-cutlass" in line
        assert line.count(original[how]) == 2  # in the message, and as its cause
    assert len(output.splitlines()) >= 5  # quantization, forward, backward


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (10, 0), (12, 0), (12, 1)])
def test_29_an_unknown_gpu_lists_the_supported_ones(monkeypatch, capability) -> None:
    major, minor = capability
    gpu = SimpleNamespace(name="Some GPU", major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    support._family_of_gpu.cache_clear()
    with pytest.raises(
        UnsupportedError, match=rf"Some GPU.*{major}\.{minor}.*NVIDIA Hopper .*9\.0"
    ):
        support._family(torch.device("cuda", 0))
    support._family_of_gpu.cache_clear()


@pytest.mark.parametrize("policy", PRESETS)
def test_29_default_configurations_fit_their_gpu_and_what_does_not_is_refused(policy) -> None:
    """Before any launch, by arithmetic. (All that a tuner may choose: tests/tune/test_space.py.)"""
    arch, mix = ARCHS["sm_90a"], resolve(policy)
    assert arch.smem_bytes == 227 * 1024
    small = dataclasses.replace(arch, smem_bytes=16 * 1024)
    for head_dim, causal in itertools.product(HOPPER.head_dims, (False, True)):
        static = {"head_dim": head_dim, "dtype": "bfloat16", "is_causal": causal}
        for name, problem, smem in (
            ("fwd", AttnProblem.of(mix, **static), lambda p, c: [fwd_smem_bytes(p, c)]),
            ("bwd", BwdProblem.of(mix, **static), bwd_smem_bytes),
        ):
            config = SPACES[name].default(problem)
            assert SPACES[name].supports(problem, config, arch)
            assert max(smem(problem, config)) <= arch.smem_bytes
            if max(smem(problem, config)) > small.smem_bytes:
                assert "shared memory" in SPACES[name].supports(problem, config, small).reason


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("policy", PRESETS)
def test_30_another_gpu_than_the_current_one(policy) -> None:
    results = []
    for device in ("cuda:0", "cuda:1"):
        generator = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(1, h, 300, 64, generator=generator).bfloat16().to(device).requires_grad_()
            for h in (4, 2, 2)
        ]
        with torch.cuda.device(0):
            out, lse = SAGE.attn_with_lse(*leaves, is_causal=True, policy=policy)
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
            assert torch.cuda.current_device() == 0
        assert {t.device for t in (out, lse, *grads)} == {torch.device(device)}
        results.append([t.cpu() for t in (out, lse, *grads)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_30_tensors_on_different_devices_are_refused(device) -> None:
    q = torch.randn(1, 2, 9, 32, device=device, dtype=torch.bfloat16)
    for mixed in ((q.to("meta"), q, q), (q, q.to("meta"), q), (q, q, q.to("meta"))):
        with pytest.raises(UnsupportedError, match="different devices .*meta"):
            sage_cute.attention(*mixed)


@pytest.mark.parametrize("folder", ["tune", "compile", "config"])
def test_32_tuner_and_cache_know_no_other_ranks(folder) -> None:
    """Ranks may differ in what they have cached: a collective here would wait forever."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [f"torch.{node.attr}" if node.attr == "distributed" else ""]
            else:
                continue
            assert not any(n.startswith("torch.distributed") for n in names), path
