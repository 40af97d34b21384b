"""Compiled kernels in the user's cache folder, shared by processes and kept between them.

``<cache folder>/kernels/<toolchain>/<kernel>.so``: the toolchain is a hash over the versions of
DSL, TVM-FFI, Python and CUDA, the kernel's name one over target, plan and sources. Loading a
library runs its code, so folder and files must belong to the user who runs, and no one else may
write there. Whatever is wrong with the folder, attention works: kernels are compiled, and one
message says what is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from sage_cute import env
from sage_cute.compile import binary
from sage_cute.compile.kernel import Kernel, toolchain
from sage_cute.errors import CacheError, KernelError

log = logging.getLogger("sage_cute")
LOCK_SECONDS = 600.0
_BY_PRODUCTS = ("CUTE_DSL_KEEP", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_PRINT_IR", "CUTE_DSL_DRYRUN")
"""Whoever sets one of these wants to see compilations: nothing comes from the disk then."""


class Entry(NamedTuple):
    """A file of the cache."""

    path: Path
    size: int  # bytes
    used: float  # when it was last loaded or written: seconds since the epoch


class KernelCache:
    """A folder of kernels of one toolchain, within a folder of all toolchains."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        """Creates nothing: the first kernel that is stored does (mode 0700).

        Args:
            root: of all toolchains.
            max_bytes: what the files there may take; beyond it the longest unused ones go.

        Raises:
            CacheError: the folder is another user's, or others may write to it.
        """
        self.root, self.max_bytes = root, max_bytes
        key = json.dumps(toolchain(), sort_keys=True)
        self.folder = root / hashlib.sha256(key.encode()).hexdigest()[:16]
        self._check()

    def make(self) -> Path:
        """The folder of this toolchain, made if need be.

        Raises:
            CacheError: it is another user's, or others may write to it.
            OSError: it cannot be made.
        """
        for folder in (self.root.parent, self.root, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check()
        return self.folder

    def _check(self) -> None:
        for folder in (self.root, self.folder):
            _check_owner(folder)

    def path(self, kernel: Kernel) -> Path:
        """Where a kernel is, or would be."""
        return self.folder / (kernel.name + binary.SUFFIX)

    def load(self, kernel: Kernel) -> Any | None:
        """The kernel's function; None if it is not there. A broken file is removed, and said so."""
        path = self.path(kernel)
        try:
            self._check()
        except CacheError as error:
            _say_once(str(error))
            return None
        try:
            if path.stat().st_uid != os.geteuid():
                raise KernelError("it belongs to another user")
            function, _ = binary.load(path)
        except FileNotFoundError:
            return None
        except (KernelError, OSError, ValueError) as error:
            log.warning("%s is compiled again: %s: %s", kernel.name, path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # what is used stays
        log.info("%s: loaded from %s", kernel.name, path)
        return function

    def store(self, kernel: Kernel, function: Any) -> bool:
        """Keeps a compiled function; false, and one message, where that cannot be done."""
        try:
            self.write(kernel, binary.package(kernel, function))
        except (OSError, CacheError, KernelError) as error:
            _say_once(f"compiled kernels are not kept in {self.folder}: {error}")
            return False
        return True

    def write(self, kernel: Kernel, contents: bytes) -> None:
        """Writes a file whole or not at all, then keeps the folder within its bound."""
        self.make()
        write_whole(self.path(kernel), contents)
        self.evict(keep=self.path(kernel))

    @contextlib.contextmanager
    def lock(self, kernel: Kernel) -> Iterator[None]:
        """One process at a time compiles a kernel; without a lock where there can be none."""
        try:
            path = self.make() / f"{kernel.name}.lock"
            lock = FileLock(path, timeout=LOCK_SECONDS, mode=0o600)
            lock.acquire()
        except (OSError, CacheError, NotImplementedError, Timeout) as error:
            log.debug("no lock for %s: %s", kernel.name, error)
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def entries(self) -> list[Entry]:
        """Every kernel of every toolchain, the longest unused one first."""
        return sorted(_entries(self.root), key=lambda entry: entry.used)

    def evict(self, keep: Path | None = None) -> list[Path]:
        """Removes the longest unused kernels until the rest fit the bound; returns what went."""
        entries = self.entries()
        excess, gone = sum(entry.size for entry in entries) - self.max_bytes, []
        for entry in entries:
            if excess <= 0:
                break
            if entry.path == keep:
                continue
            # One that is in use stays loaded: the system keeps what a process has mapped.
            with contextlib.suppress(OSError):
                entry.path.unlink()
                entry.path.with_suffix(".lock").unlink(missing_ok=True)
                gone.append(entry.path)
                excess -= entry.size
        if gone:
            log.info("%s: %d kernels removed to stay within its bound", self.root, len(gone))
        return gone

    def clear(self) -> int:
        """Removes every kernel, lock and empty folder; returns how many kernels there were."""
        entries = self.entries()
        for entry in entries:
            entry.path.unlink(missing_ok=True)
        for path in (*self.root.glob("*/*.lock"), *self.root.glob("*/.*.part")):
            path.unlink(missing_ok=True)
        for folder in self.root.glob("*/"):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return len(entries)


def _entries(root: Path) -> Iterator[Entry]:
    for path in root.glob(f"*/*{binary.SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another process evicts as well
            status = path.stat()
            yield Entry(path, status.st_size, status.st_mtime)


def _check_owner(folder: Path) -> None:
    """Refuses a folder that another user owns or may write to: loading from it runs their code."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise CacheError(f"{folder}: {error}; set SAGE_CUTE_CACHE_DIR to another folder") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"{folder} is no folder: set SAGE_CUTE_CACHE_DIR to another")
    if status.st_uid != os.geteuid():
        raise CacheError(
            f"{folder} belongs to user {status.st_uid}, not to you ({os.geteuid()}): kernels are "
            "not loaded from it; set SAGE_CUTE_CACHE_DIR to a folder of your own"
        )
    if status.st_mode & 0o077:
        try:
            folder.chmod(0o700)
        except OSError as error:
            if status.st_mode & 0o022:
                raise CacheError(
                    f"others may write to {folder}, and that cannot be changed ({error}): set "
                    "SAGE_CUTE_CACHE_DIR to a folder of your own"
                ) from error


def write_whole(path: Path, contents: bytes) -> None:
    """Writes beside the target and renames: readers see the old file, the new one, or none."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def kernel_cache() -> KernelCache | None:
    """The user's cache; None, and one message that says why, where none is to be used."""
    seen = [name for name in _BY_PRODUCTS if os.environ.get(name)]
    if seen:
        _say_once(f"kernels are compiled and not kept: {', '.join(seen)} is set", logging.INFO)
        return None
    max_bytes = env.cache_bytes()
    if not max_bytes:
        return None
    try:
        return _opened(env.cache_dir() / "kernels", max_bytes)
    except CacheError as error:
        _say_once(str(error))
        return None


@functools.lru_cache(maxsize=8)
def _opened(root: Path, max_bytes: int) -> KernelCache:
    return KernelCache(root, max_bytes)


@functools.cache
def _say_once(message: str, level: int = logging.WARNING) -> None:
    log.log(level, message)
