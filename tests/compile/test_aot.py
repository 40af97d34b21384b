"""Kernels built ahead of time: made without a GPU, loaded without the DSL."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sage_cute.compile import aot, binary, catalog, kernel
from sage_cute.compile.build import build_all
from sage_cute.compile.cache import kernel_cache
from sage_cute.compile.catalog import Call
from sage_cute.errors import KernelError, UnsupportedError

CALL = Call("fast", 64, "bfloat16", True)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The forward's two kernels, compiled by processes of their own."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl")
    folder = tmp_path_factory.mktemp("kernels")
    results = list(build_all(catalog.kernels([CALL], ["fwd"]), folder, workers=2))
    assert [r.error for r in results] == ["", ""] and all(r.size > 10_000 for r in results)
    return folder


def test_files_say_what_they_are(built) -> None:
    found = {one["kind"]: one for one in aot.describe(built)}
    assert set(found) == {"quantize", "fwd"}
    assert found["fwd"]["plan"]["problem"]["head_dim"] == 64 and found["fwd"]["arch"] == "sm_90a"
    assert found["fwd"]["toolchain"]["dsl"] == kernel.version("nvidia-cutlass-dsl")
    names = {path.stem for path in built.iterdir()}
    assert names == {k.name for k in catalog.kernels([CALL], ["fwd"])}


LOAD = textwrap.dedent("""
    import sys
    for name in ("cutlass", "cuda"):
        sys.modules[name] = None  # importing it raises ImportError
    import time, torch, tvm_ffi
    from sage_cute.compile import catalog, compiler, launch, quant_launch
    from sage_cute.compile.catalog import Call
    from sage_cute.errors import KernelError

    start = time.perf_counter()
    kernels = catalog.kernels([Call("fast", 64, "bfloat16", True)], ["fwd"])
    loaded = {k.kind: compiler.load(k.kind, k.plan, k.build) for k in kernels}
    print("seconds", time.perf_counter() - start)
    for kind, function in loaded.items():
        try:
            function(*[torch.zeros(1, 2, 128, 64, dtype=torch.int8)] * 10)
        except (ValueError, TypeError) as error:
            print(kind, str(error).replace("\\n", " "))
    (missing,) = [k for k in catalog.kernels([Call("sagebwd", 64, "bfloat16", True)], ["fwd"])
                  if k.kind == "fwd"]
    try:
        compiler.load(missing.kind, missing.plan, missing.build)
    except KernelError as error:
        print("missing:", error)
""")


def without_the_dsl(folder: Path | str, cache: Path) -> str:
    environment = {
        **os.environ,
        "SAGE_CUTE_KERNELS": str(folder),
        "SAGE_CUTE_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(cache.rglob("*.so"))
    return done.stdout


def test_loads_without_the_dsl_and_fast(built, tmp_path) -> None:
    runs = [without_the_dsl(built, tmp_path / "cache") for _ in range(2)]
    # The kernel's own checks of its arguments answer: it is the code that was compiled.
    for kind in ("fwd", "quantize"):
        assert f"{kind} " in runs[0] and "q_codes: Tensor(" in runs[0]
    assert min(float(run.split("seconds ")[1].split("\n")[0]) for run in runs) < 0.1
    assert "missing: kernel" in runs[0] and "sage-cute compile" in runs[0]
    assert "2 other kernels there" in runs[0]


def test_the_cache_and_a_folder_hold_the_same_files(built, tmp_path, fresh) -> None:
    one = next(k for k in catalog.kernels([CALL], ["fwd"]) if k.kind == "fwd")
    found = kernel_cache()
    found.write(one, (built / f"{one.name}.so").read_bytes())
    start = time.perf_counter()
    function = fresh(one)
    assert time.perf_counter() - start < 10 and "16 parameters" in _error(function)


def _error(function) -> str:
    with pytest.raises(TypeError) as caught:
        function(1)
    return str(caught.value)


def test_a_function_chooses_a_folder(fake, fresh, builds, tmp_path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    one = fake(answer=5)
    (folder / f"{one.name}.so").write_bytes(binary.package(one, one.build(one.plan)))
    assert aot.use_kernels(folder) == 1 and aot.folders() == (folder,)
    assert fresh(one)() == 5 and len(builds) == 1  # the one above


def test_an_empty_folder_and_another_version_are_errors(fake, tmp_path, monkeypatch) -> None:
    with pytest.raises(KernelError, match="no kernels there"):
        aot.use_kernels(tmp_path)
    one = fake()
    about = {**binary.about(one), "sources": "older", "sage_cute": "0.0.9"}
    (tmp_path / "fake_1.so").write_bytes(binary.seal(b"", about))
    with pytest.raises(KernelError, match=r"other sources of sage_cute \(0\.0\.9\)"):
        aot.use_kernels(tmp_path)


def test_a_broken_file_is_an_error_and_not_replaced(fake, fresh, tmp_path, monkeypatch) -> None:
    one = fake()
    path = tmp_path / f"{one.name}.so"
    path.write_bytes(binary.package(one, one.build(one.plan))[:-1])
    monkeypatch.setenv("SAGE_CUTE_KERNELS", str(tmp_path))
    with pytest.raises(KernelError, match="cut short.*build it again with sage-cute compile"):
        fresh(one)
    assert path.exists()


def test_a_missing_kernel_is_compiled_with_one_warning(
    fake, fresh, builds, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("SAGE_CUTE_KERNELS", f"{tmp_path}{os.pathsep}{tmp_path / 'none'}")
    for answer in (1, 2):
        assert fresh(fake(answer=answer))() == answer
    found = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(found) == 1 and "compiled now" in found[0]


def test_kernels_that_do_not_compile_are_reported_each(tmp_path) -> None:
    problem = catalog.problem_of("fwd", CALL)
    bad = [kernel.Kernel(kind, problem, json.loads) for kind in ("one", "two")]
    results = list(build_all(bad, tmp_path, workers=1))
    assert [r.kernel for r in results] == bad and not list(tmp_path.iterdir())
    assert all(r.error.startswith("TypeError: the JSON object must be") for r in results)


def test_a_process_that_dies_is_an_error(tmp_path) -> None:
    bad = kernel.Kernel("dies", 1, os._exit)
    with pytest.raises(KernelError, match="died"):
        list(build_all([bad], tmp_path, workers=1))


def test_what_has_no_kernel_says_why() -> None:
    with pytest.raises(UnsupportedError, match="head_dim 84"):
        catalog.kernels([CALL._replace(head_dim=84)], ["fwd"])


def test_every_direction_lists_its_kernels_once() -> None:
    calls = [Call(policy, 64, "bfloat16", True) for policy in ("fast", "int8", "accurate")]
    names = [k.name for k in catalog.kernels(calls, ["fwd"])]
    assert len(set(names)) == len(names)
    # fast and int8 share the forward, all three share the quantization.
    assert sorted(name.partition("_")[0] for name in names) == ["fwd", "fwd", "quantize"]
