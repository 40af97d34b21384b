"""``import sage_cute`` is light, and needs neither a GPU nor an importable CuTe DSL."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def python(code: str, *flags: str) -> str:
    result = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light() -> None:
    code = """
        import sys, time
        import torch
        before = set(sys.modules)
        start = time.process_time()  # not the wall clock: the machine may be busy
        import sage_cute
        print(time.process_time() - start)
        heavy = ("cutlass", "tvm_ffi", "torch._inductor", "torch._dynamo", "typer", "matplotlib",
                 "torch.distributed.tensor", "rich", "cuda")
        print([m for m in heavy if m in sys.modules and m not in before])
        print(torch.cuda.is_initialized())
    """
    runs = [python(code).split("\n")[:3] for _ in range(3)]
    assert min(float(seconds) for seconds, _, _ in runs) < 0.1
    assert {(imported, initialized) for _, imported, initialized in runs} == {("[]", "False")}


def test_works_without_the_dsl_and_without_extras() -> None:
    output = python("""
        import sys
        for name in ("cutlass", "tvm_ffi", "cuda", "typer", "rich", "matplotlib"):
            sys.modules[name] = None            # importing it raises ImportError
        import torch, sage_cute
        q = torch.randn(1, 2, 16, 32, requires_grad=True)
        torch.ops.sage.attn(q, q, q).sum().backward()
        print(sage_cute.attention(q, q, q).shape, sorted(sage_cute.policies()))
    """)
    assert "torch.Size([1, 2, 16, 32])" in output and "sagebwd" in output


def test_works_with_asserts_off() -> None:
    python(
        """
        import torch, sage_cute
        q = torch.randn(1, 2, 16, 32)
        try:
            sage_cute.attention(q, q, q[..., :-1])
        except ValueError as error:
            print(error)
        else:
            raise SystemExit("no error")
        """,
        "-O",
    )


def test_importing_twice_registers_once() -> None:
    python("""
        import importlib, sage_cute, torch
        importlib.reload(sage_cute)
        q = torch.randn(1, 2, 16, 32)
        torch.ops.sage.attn(q, q, q)
    """)
