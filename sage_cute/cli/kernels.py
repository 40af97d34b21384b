"""``sage-cute compile`` and ``sage-cute cache``: kernels as files."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from sage_cute import env
from sage_cute.cli.common import (
    Json,
    Policies,
    fail,
    numbers,
    one_line_errors,
    show_json,
    show_table,
    split,
)
from sage_cute.compile import catalog
from sage_cute.compile.build import build_all
from sage_cute.compile.cache import KernelCache
from sage_cute.compile.kernel import Kernel
from sage_cute.config.arch import ARCHS
from sage_cute.errors import KernelError
from sage_cute.policies import canonical
from sage_cute.tune import table

_MASKS = {"causal": True, "full": False}


def compile_(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to put the kernels into.")],
    arch: Annotated[str, typer.Option(help="Target, as the compiler spells it.")] = "sm_90a",
    head_dims: Annotated[str, typer.Option(metavar="N,N", help="Sizes of heads.")] = "64,128",
    policies: Policies = "default",
    dtypes: Annotated[str, typer.Option(help="bfloat16, float16 or both.")] = "bfloat16",
    masks: Annotated[str, typer.Option(help="causal, full or both.")] = "causal,full",
    directions: Annotated[str, typer.Option(help="fwd, bwd or both.")] = "fwd,bwd",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Compiling processes. Default: one a core, 8 at most."),
    ] = None,
    json_: Json = False,
) -> None:
    """Builds kernels ahead of time. Needs no GPU; lengths, batch and heads are not compiled in.

    Those of the default configurations, and of what your tuning tables and the shipped ones have.

    Where they are used, SAGE_CUTE_KERNELS=DIR (or sage_cute.compile.aot.use_kernels) names the
    folder: then nothing is compiled there, and the CuTe DSL's Python package is not needed, only
    apache-tvm-ffi and the DSL's runtime library (nvidia-cutlass-dsl-libs-cu13).

    [dim]sage-cute compile --head-dims 64,128 --policies fast,accurate --out kernels[/]
    """
    command = "compile"
    with one_line_errors(command):
        if arch not in ARCHS:
            fail(command, f"--arch {arch}: kernels exist for {', '.join(ARCHS)}")
        choices: dict[str, tuple[list[str], Collection[str]]] = {
            "--dtypes": (split(dtypes, command, "--dtypes"), catalog.DTYPES),
            "--masks": (split(masks, command, "--masks"), _MASKS),
            "--directions": (split(directions, command, "--directions"), catalog.DIRECTIONS),
        }
        for option, (given, known) in choices.items():
            if unknown := [one for one in given if one not in known]:
                fail(command, f"{option} {unknown[0]}: choose {', '.join(known)}")
        calls = [
            catalog.Call(policy, head_dim, dtype, _MASKS[mask])
            for policy, head_dim, dtype, mask in itertools.product(
                split(policies, command, "--policies"),
                numbers(head_dims, command, "--head-dims"),
                choices["--dtypes"][0],
                choices["--masks"][0],
            )
        ]
        kernels = catalog.kernels(calls, choices["--directions"][0])
        kernels = list(dict.fromkeys((*kernels, *_tuned(calls, choices["--directions"][0], arch))))
        start = time.perf_counter()
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(command, f"--out {out}: {error.strerror}")
        results = []
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("compiling", total=len(kernels))
            for built in build_all(kernels, out, workers=workers, arch=arch):
                results.append(built)
                progress.advance(bar)
        rows = [
            {
                "kernel": one.kernel.name,
                "seconds": round(one.seconds, 1),
                "bytes": one.size,
                "error": one.error,
            }
            for one in results
        ]
        if json_:
            show_json({"arch": arch, "folder": str(out.absolute()), "kernels": rows})
        else:
            show_table(
                f"{len(kernels)} kernels for {arch} in {time.perf_counter() - start:.0f} s",
                ("kernel", "seconds", "bytes", "error"),
                [tuple(row.values()) for row in rows],
            )
            typer.echo(f"Use them with SAGE_CUTE_KERNELS={out.absolute()}")
        failed = [one for one in results if one.error]
        if failed:
            raise KernelError(f"{len(failed)} of {len(kernels)} kernels: {failed[0].error}")


def _tuned(calls: list[catalog.Call], directions: list[str], arch: str) -> Iterator[Kernel]:
    """Kernels of what tables have for these calls on GPUs of the target's family."""
    wanted = {call._replace(policy=canonical(call.policy)) for call in calls}
    for one in table.tables(users=True):
        if one.gpu.family == ARCHS[arch].family:
            for entry in one.entries:
                if entry.key.call in wanted and entry.key.direction in directions:
                    yield from catalog.DIRECTIONS[entry.key.direction](entry.key.call, entry.config)


cache_app = typer.Typer(
    no_args_is_help=True,
    help="Compiled kernels that are kept between processes: where, which, and away with them.",
)


def _open() -> KernelCache:
    """The cache as it is, whatever the variables that bypass it say."""
    return KernelCache(env.cache_dir() / "kernels", env.cache_bytes())


@cache_app.command()
def path() -> None:
    """Prints the folder."""
    typer.echo(env.cache_dir() / "kernels")


@cache_app.command(name="list")
def list_(json_: Json = False) -> None:
    """Lists the kernels, the longest unused one first: it is the first to go."""
    with one_line_errors("cache list"):
        cache = _open()
        rows = [
            {
                "kernel": entry.path.stem,
                "toolchain": entry.path.parent.name,
                "bytes": entry.size,
                "used": time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)),
            }
            for entry in cache.entries()
        ]
        if json_:
            show_json({"folder": str(cache.root), "bound": cache.max_bytes, "kernels": rows})
        else:
            total = sum(int(str(row["bytes"])) for row in rows) / 1e6
            title = f"{cache.root}: {len(rows)} kernels, {total:.1f} of {cache.max_bytes / 1e6} MB"
            columns = ("kernel", "toolchain", "bytes", "used")
            show_table(title, columns, [tuple(row.values()) for row in rows])


@cache_app.command()
def clear(json_: Json = False) -> None:
    """Removes all kernels; tuning tables stay. Processes that use some go on."""
    with one_line_errors("cache clear"):
        cache = _open()
        removed = cache.clear()
        if json_:
            show_json({"folder": str(cache.root), "removed": removed})
        else:
            typer.echo(f"Removed {removed} kernels from {cache.root}")
