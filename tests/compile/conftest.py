"""Kernels that compile in milliseconds: C instead of CuTe DSL, but files and loading are real."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sage_cute.compile import aot, cache, compiler
from sage_cute.compile.kernel import Kernel

SOURCE = """
#include <stdint.h>
typedef struct {{ int32_t type_index; uint32_t padding; int64_t value; }} Any;
int __tvm_ffi_{name}(void* self, const Any* args, int32_t count, Any* result) {{
    result->type_index = 1;  /* an integer */
    result->value = {answer};
    return 0;
}}
"""


@dataclasses.dataclass(frozen=True)
class FakePlan:
    """A function without arguments that returns ``answer``."""

    answer: int = 42
    size: int = 1


class FakeFunction:
    """What the DSL returns: something to call, and to export as an object file."""

    def __init__(self, plan: FakePlan) -> None:
        self.plan = plan

    def __call__(self) -> int:
        return self.plan.answer

    def export_to_c(self, path: str, name: str) -> None:
        source = Path(path).with_suffix(".c")
        padding = f"\nconst char {name}_padding[{self.plan.size}] = {{1}};\n"
        source.write_text(SOURCE.format(name=name, answer=self.plan.answer) + padding)
        subprocess.run(["cc", "-fPIC", "-c", str(source), "-o", path], check=True)


@pytest.fixture
def builds() -> list[FakePlan]:
    """The plans that were compiled, in order."""
    return []


@pytest.fixture
def fake(builds: list[FakePlan]) -> Callable[..., Kernel]:
    """Makes kernels that are C."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")

    def build(plan: FakePlan) -> FakeFunction:
        builds.append(plan)
        return FakeFunction(plan)

    return lambda **fields: Kernel("fake", FakePlan(**fields), build)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of the test's own, and nothing loaded."""
    monkeypatch.setenv("SAGE_CUTE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("SAGE_CUTE_KERNELS", "SAGE_CUTE_CACHE_MB", "CUTE_DSL_KEEP", "CUTE_DSL_DUMP_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(aot, "_chosen", [])
    monkeypatch.setattr(aot, "_warned", set())
    monkeypatch.setattr(compiler, "_LOADED", {})
    cache._say_once.cache_clear()
    cache._opened.cache_clear()
    yield
    cache._opened.cache_clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], Any]:
    """Loads a kernel as a new process would."""

    def load(kernel: Kernel) -> Any:
        compiler._LOADED.clear()
        return compiler.load(kernel.kind, kernel.plan, kernel.build)

    return load
