"""Compiles many kernels at once, each process one at a time: the DSL is not thread-safe.

``python -m sage_cute.compile.build`` is such a process: pickled kernels come in, one line of JSON
goes out for each. Processes of :mod:`multiprocessing` would import the user's script again.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sage_cute.compile import binary
from sage_cute.compile.cache import write_whole
from sage_cute.compile.kernel import ARCH_VARIABLE, Kernel
from sage_cute.errors import KernelError


class Built(NamedTuple):
    """What became of a kernel."""

    kernel: Kernel
    seconds: float
    size: int  # bytes of the file
    error: str  # empty if it was built


def default_workers() -> int:
    """One process a core that this process may use, 8 at most: each takes about 1 GB."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def build_all(
    kernels: Sequence[Kernel],
    folder: Path,
    *,
    workers: int | None = None,
    arch: str | None = None,
) -> Iterator[Built]:
    """Compiles kernels into a folder, in parallel; yields each as it is done.

    Args:
        kernels: what to compile; names are those of ``arch``.
        folder: where files go, made if need be.
        workers: processes; None: :func:`default_workers`.
        arch: the target; None: that of this process.

    Raises:
        KernelError: a compiling process died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    todo: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
    done: queue.SimpleQueue[Built | BaseException] = queue.SimpleQueue()
    for kernel in kernels:
        todo.put(kernel)
    environment = {**os.environ, **({ARCH_VARIABLE: arch} if arch else {})}
    n = min(workers or default_workers(), len(kernels))
    for _ in range(n):
        target: Callable[..., None] = _feed
        threading.Thread(target=target, args=(todo, done, folder, environment), daemon=True).start()
    for _ in kernels:
        result = done.get()
        if isinstance(result, BaseException):
            raise result
        yield result


def _feed(
    todo: queue.SimpleQueue[Kernel],
    done: queue.SimpleQueue[Built | BaseException],
    folder: Path,
    environment: dict[str, str],
) -> None:
    """Runs one process and gives it kernels until there are none left."""
    command = [sys.executable, "-m", __spec__.name, str(folder)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        while True:
            try:
                kernel = todo.get_nowait()
            except queue.Empty:
                break
            process.stdin.write(base64.b64encode(pickle.dumps(kernel)).decode() + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise KernelError(f"the process that compiled {kernel.kind} {kernel.plan} died")
            done.put(Built(kernel, **json.loads(line)))
    except BaseException as error:
        done.put(error)
    finally:
        process.stdin.close()
        process.wait()


def _build_one(kernel: Kernel, folder: Path) -> dict[str, Any]:
    start, size, error = time.perf_counter(), 0, ""
    try:
        contents = binary.package(kernel, kernel.build(kernel.plan))
        write_whole(folder / (kernel.name + binary.SUFFIX), contents)
        size = len(contents)
    except Exception as problem:  # of any kind: the DSL raises its own, and the others go on
        error = f"{type(problem).__name__}: {problem}".strip()
    return {"seconds": time.perf_counter() - start, "size": size, "error": error}


def main() -> None:
    """Compiles what comes in on standard input into the folder that the argument names."""
    folder = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print must not mix with the answers
    for line in sys.stdin:
        kernel = pickle.loads(base64.b64decode(line))
        print(json.dumps(_build_one(kernel, folder)), file=answers, flush=True)


if __name__ == "__main__":
    main()
