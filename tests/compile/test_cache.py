"""The kernel cache: what it keeps, what it refuses, what it survives."""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from sage_cute import env
from sage_cute.compile import binary, cache, compiler, kernel
from sage_cute.compile.cache import KernelCache, kernel_cache
from sage_cute.errors import CacheError, KernelError, SettingError

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run as someone else")
NOBODY = 65534


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_compiled_once_then_from_memory_then_from_disk(fake, fresh, builds, caplog) -> None:
    caplog.set_level(logging.INFO, logger="sage_cute")
    one = fake(answer=7)
    assert fresh(one)() == 7
    assert compiler.load(one.kind, one.plan, one.build)() == 7
    assert len(builds) == 1
    assert type(fresh(one)).__module__.startswith("tvm_ffi")  # not what was compiled
    assert fresh(one)() == 7 and len(builds) == 1
    assert sum("compiled in" in r.message for r in caplog.records) == 1
    assert fresh(fake(answer=8))() == 8 and len(builds) == 2


def test_memory_needs_no_log_and_no_disk(fake, fresh, caplog, monkeypatch) -> None:
    one = fake()
    fresh(one)
    caplog.clear()
    monkeypatch.setattr(compiler, "kernel_cache", None)  # a call would raise
    compiler.load(one.kind, one.plan, one.build)
    assert not caplog.records


def test_folders_and_files_are_the_users_alone(fake, fresh) -> None:
    fresh(fake())
    found = kernel_cache()
    assert found is not None
    for path in (found.root.parent, found.root, found.folder, found.path(fake())):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_folder_open_to_others_is_closed(fake, fresh) -> None:
    root = env.cache_dir() / "kernels"
    root.mkdir(parents=True)
    root.chmod(0o777)
    fresh(fake())
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@ROOT_ONLY
def test_a_folder_of_someone_else_is_refused(fake, fresh, builds, caplog) -> None:
    fresh(fake())
    cache._opened.cache_clear()
    root = env.cache_dir() / "kernels"
    os.chown(root, NOBODY, -1)
    with pytest.raises(CacheError, match="belongs to user 65534, not to you"):
        KernelCache(root, 10**9)
    caplog.clear()
    assert fresh(fake())() == 42 and fresh(fake())() == 42
    assert len(builds) == 3  # compiled each time, not loaded
    assert len(warnings_of(caplog)) == 1 and "SAGE_CUTE_CACHE_DIR" in warnings_of(caplog)[0]


@ROOT_ONLY
def test_a_file_of_someone_else_is_not_loaded(fake, fresh, builds) -> None:
    fresh(fake())
    os.chown(kernel_cache().path(fake()), NOBODY, -1)
    fresh(fake())
    assert len(builds) == 2


@ROOT_ONLY
@pytest.mark.parametrize("filled", [True, False])
def test_a_read_only_folder_is_read_and_tolerated(tmp_path, filled) -> None:
    # A process that gives up its rights once it has imported what a load needs.
    code = textwrap.dedent("""
        import importlib.util, logging, os, sys
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        spec = importlib.util.spec_from_file_location("conf", sys.argv[1])
        conf = importlib.util.module_from_spec(spec)
        sys.modules["conf"] = conf
        spec.loader.exec_module(conf)
        from sage_cute.compile import compiler

        def load():
            compiler._LOADED.clear()
            assert compiler.load("fake", conf.FakePlan(), conf.FakeFunction)() == 42

        load()
        load()  # from disk
        os.environ["SAGE_CUTE_CACHE_DIR"] = sys.argv[2]
        os.setuid(int(sys.argv[3]))
        print("now", file=sys.stderr)
        load()
    """)
    root = tmp_path / "theirs"
    root.mkdir()
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(0o755)
    os.chown(root, NOBODY, -1)
    command = [sys.executable, "-c", code, str(Path(__file__).with_name("conftest.py"))]

    def run() -> str:
        done = subprocess.run([*command, str(root), str(NOBODY)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stderr.partition("now")[2]

    if filled:
        run()
    else:
        (root / "kernels").mkdir()
        os.chown(root / "kernels", NOBODY, -1)
    for folder in (root, *root.glob("**/*/")):
        folder.chmod(0o500)
    log = run()
    assert ("loaded from" in log) == filled
    assert log.count("not kept in") == (not filled), log


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:3000] + b"\0\1\2\3" + data[3004:],
        lambda data: data[:-60] + b"x" + data[-59:],
    ],
    ids=["half", "last byte", "empty", "code", "description"],
)
def test_a_damaged_file_is_compiled_again_with_one_warning(
    fake, fresh, builds, caplog, damage
) -> None:
    fresh(fake())
    path = kernel_cache().path(fake())
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    caplog.clear()
    assert fresh(fake())() == 42 and len(builds) == 2
    assert len(warnings_of(caplog)) == 1 and str(path) in warnings_of(caplog)[0]
    assert binary.unseal(path.read_bytes())["name"] == fake().name
    assert fresh(fake())() == 42 and len(builds) == 2 and len(warnings_of(caplog)) == 1


def test_a_whole_file_that_is_no_library_is_compiled_again(fake, fresh, builds, caplog) -> None:
    found = kernel_cache()
    found.write(fake(), binary.seal(b"no library", binary.about(fake())))
    assert fresh(fake())() == 42 and len(builds) == 1 and len(warnings_of(caplog)) == 1


def test_another_runtime_is_compiled_again(fake, fresh, builds, monkeypatch) -> None:
    about = binary.about(fake())
    about["toolchain"]["runtime"] = "0.0.1"
    fresh(fake())
    path = kernel_cache().path(fake())
    path.write_bytes(binary.seal(path.read_bytes(), about))
    with pytest.raises(KernelError, match=r"version 0\.0\.1"):
        binary.load(path)
    assert fresh(fake())() == 42 and len(builds) == 2


def test_bound_by_size_the_longest_unused_goes(fake, fresh, monkeypatch) -> None:
    monkeypatch.setenv("SAGE_CUTE_CACHE_MB", "1")
    kernels = [fake(answer=i, size=300_000) for i in range(4)]
    for i, one in enumerate(kernels[:3]):
        fresh(one)
        os.utime(kernel_cache().path(one), (i, i))
    fresh(kernels[0])  # used: now the youngest
    fresh(kernels[3])
    names = {entry.path.stem for entry in kernel_cache().entries()}
    assert names == {kernels[i].name for i in (0, 2, 3)}
    assert not kernel_cache().path(kernels[1]).with_suffix(".lock").exists()


def test_what_was_just_written_stays_even_if_it_is_too_large(fake, fresh, monkeypatch) -> None:
    monkeypatch.setenv("SAGE_CUTE_CACHE_MB", "1")
    for i in range(2):
        fresh(fake(answer=i, size=3_000_000))
    assert [e.path.stem for e in kernel_cache().entries()] == [fake(answer=1, size=3_000_000).name]


def test_none_is_kept_if_the_bound_is_zero(fake, fresh, builds, monkeypatch) -> None:
    monkeypatch.setenv("SAGE_CUTE_CACHE_MB", "0")
    fresh(fake())
    fresh(fake())
    assert len(builds) == 2 and not env.cache_dir().exists()


def test_a_bound_that_is_no_number_says_so(monkeypatch) -> None:
    monkeypatch.setenv("SAGE_CUTE_CACHE_MB", "1 GB")
    with pytest.raises(SettingError, match="whole number of MB"):
        kernel_cache()


def test_who_looks_at_compilations_gets_them(fake, fresh, builds, monkeypatch) -> None:
    fresh(fake())
    monkeypatch.setenv("CUTE_DSL_KEEP", "ptx")
    fresh(fake())
    assert len(builds) == 2


def test_without_a_linker_it_works_and_says_so(fake, fresh, builds, monkeypatch, caplog) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    for _ in range(2):
        assert fresh(fake())() == 42
    assert len(builds) == 2
    assert len(warnings_of(caplog)) == 1 and "install a C compiler" in warnings_of(caplog)[0]


def test_clear_removes_everything(fake, fresh) -> None:
    for i in range(3):
        fresh(fake(answer=i))
    found = kernel_cache()
    assert found.clear() == 3
    assert list(found.root.iterdir()) == []
    assert fresh(fake())() == 42  # the folder comes back


def test_a_process_waits_for_another_that_compiles_the_same(fake, fresh, builds) -> None:
    one, found = fake(), kernel_cache()
    started = threading.Event()

    def other_process() -> None:
        with found.lock(one):
            started.set()
            time.sleep(0.3)
            found.store(one, one.build(one.plan))

    thread = threading.Thread(target=other_process)
    thread.start()
    started.wait()
    assert fresh(one)() == 42
    thread.join()
    assert len(builds) == 1


def test_readers_never_see_half_a_file(tmp_path) -> None:
    path, stop = tmp_path / "file", threading.Event()
    contents = [bytes([i]) * 200_000 for i in range(2)]
    cache.write_whole(path, contents[0])

    def write() -> None:
        while not stop.is_set():
            for data in contents:
                cache.write_whole(path, data)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(200):
            assert path.read_bytes() in contents
    finally:
        stop.set()
        thread.join()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        cache.write_whole(tmp_path / "file", b"x")
    assert list(tmp_path.iterdir()) == []


# What the key covers


def test_the_folder_is_of_a_toolchain(monkeypatch, tmp_path) -> None:
    toolchain = kernel.toolchain()
    assert {"dsl", "runtime", "tvm_ffi", "python", "cuda", "machine"} <= set(toolchain)
    folders = {KernelCache(tmp_path, 1).folder}
    for name in toolchain:
        monkeypatch.setattr(cache, "toolchain", lambda name=name: {**toolchain, name: "other"})
        folders.add(KernelCache(tmp_path, 1).folder)
    assert len(folders) == 1 + len(toolchain)


def test_the_name_is_of_target_plan_and_sources(fake, monkeypatch) -> None:
    names = {fake().name, fake(answer=1).name, dataclasses.replace(fake(), kind="other").name}
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    names.add(fake().name)
    monkeypatch.setattr(kernel, "sources_hash", lambda *files: "other")
    names.add(fake().name)
    assert len(names) == 5


def test_sources_are_templates_configurations_and_the_builder(tmp_path, monkeypatch) -> None:
    read: list[Path] = []
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or original(path))
    one, other = tmp_path / "builder.py", tmp_path / "other.py"
    one.write_text("1")
    other.write_text("2")
    hashes = {kernel.sources_hash.__wrapped__(str(path)) for path in (one, other)}
    assert len(hashes) == 2
    names = {"/".join(path.parts[-2:]) for path in read}
    assert {"sm90/fwd.py", "quant/qkv_prologue.py", "config/tile_config.py"} <= names


def test_variables_that_change_a_compilation_are_in_the_key(monkeypatch) -> None:
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setenv("CUTE_DSL_LIBS", "/somewhere")
    assert kernel.toolchain()["dsl_variables"] == {"CUTE_DSL_LINEINFO": "1"}
