"""``sage-cute tune``: measures tile configurations on this machine's GPU."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import torch
import typer
from filelock import FileLock
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sage_cute.cli.common import (
    Device,
    Json,
    device_of,
    fail,
    one_line_errors,
    show_json,
    show_table,
)
from sage_cute.compile.catalog import DTYPES, Call, problem_of
from sage_cute.config.space import SPACES
from sage_cute.errors import TuningError, UnsupportedError
from sage_cute.tune import select, table
from sage_cute.tune.key import Shape, TuneKey, gpu_of

log = logging.getLogger("sage_cute")
_SIZES = ((32, 1024), (32, 4096), (16, 16384), (8, 32768))
"""batch * heads and length of what is tuned by default: training and long contexts."""


def tune(
    shapes: Annotated[
        Path | None,
        typer.Option(
            "--shapes",
            "--from-model-trace",
            metavar="FILE",
            help="Calls to tune for, one JSON object a line: a run of the model with "
            "SAGE_CUTE_TRACE=FILE writes it. Default: common sizes with head_dim 64 and 128.",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Policy of the default sizes; a file has its own.")
    ] = "default",
    exhaustive: Annotated[
        bool, typer.Option(help="Every configuration, instead of steps from the one in use.")
    ] = False,
    again: Annotated[
        bool, typer.Option(help="Also what the table has already; it stays if in doubt.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Table to write. Default: your own, of this GPU."),
    ] = None,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Finds the fastest tile configurations for your GPU. Results do not change by a bit.

    Takes minutes for each call, most of it compiling. Stop it any time: what is done is kept, and
    running it again goes on. Nothing else should use the GPU meanwhile.

    A line of FILE:
    [dim]{"direction": "fwd", "policy": "fast", "head_dim": 128, "dtype": "bfloat16",
    "is_causal": true, "batch": 2, "heads": 32, "kv_heads": 8, "seqlen_q": 4096,
    "seqlen_k": 4096}[/]
    """
    command = "tune"
    with one_line_errors(command):
        calls = _read(shapes) if shapes else _defaults(policy)
        index = _gpu_index(device)
        gpu = gpu_of(index)
        path = out or table.user_path(gpu)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        with _progress() as progress, FileLock(path.with_suffix(".lock"), mode=0o600):
            bar = progress.add_task("calls", total=len(calls))
            try:
                for key, shape in calls:
                    rows.append(_tune_one(key, shape, index, path, exhaustive, again, progress))
                    progress.advance(bar)
            except KeyboardInterrupt:
                progress.console.print("Interrupted: run it again to go on.")
        if json_:
            show_json({"gpu": gpu._asdict(), "table": str(path), "calls": rows})
        else:
            _show(rows, path)
    if len(rows) < len(calls):
        raise typer.Exit(130)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        *Progress.get_default_columns()[1:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _gpu_index(name: str | None) -> int:
    if not torch.cuda.is_available():
        raise TuningError("no GPU: tune on the machine whose GPU is to be tuned for")
    device = device_of(name or "cuda", "tune")
    if device.type != "cuda":
        raise TuningError(f"--device {name}: kernels run on CUDA devices")
    return torch.cuda.current_device() if device.index is None else device.index


def _defaults(policy: str) -> list[tuple[TuneKey, Shape]]:
    found = []
    for direction in SPACES:
        for head_dim in (64, 128):
            for causal in (True, False):
                call = Call(policy, head_dim, "bfloat16", causal)
                try:
                    problem_of(direction, call)
                except UnsupportedError as error:
                    log.warning("%s of %s is left out: %s", direction, policy, error)
                    continue
                for heads, length in _SIZES:
                    shape = Shape(1, heads, heads, length, length)
                    found.append((TuneKey.of(direction, call, shape), shape))
    return found


def _read(path: Path) -> list[tuple[TuneKey, Shape]]:
    """Calls of a file, each bucket once, the first one's sizes."""
    found: dict[TuneKey, Shape] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        fail("tune", f"--shapes {path}: {error.strerror}")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            call = Call(**{name: row.pop(name) for name in Call._fields})
            direction = row.pop("direction")
            shape = Shape(**row)
            if direction not in SPACES or call.dtype not in DTYPES:
                raise ValueError(f"{direction}, {call.dtype}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fail("tune", f"{path}, line {number}: {type(error).__name__}: {error}; see --help")
        problem_of(direction, call)  # now, and not after an hour
        found.setdefault(TuneKey.of(direction, call, shape), shape)
    if not found:
        fail("tune", f"--shapes {path}: no calls in it")
    return list(found.items())


def _tune_one(
    key: TuneKey,
    shape: Shape,
    device: int,
    path: Path,
    exhaustive: bool,
    again: bool,
    progress: Progress,
) -> dict[str, Any]:
    gpu = gpu_of(device)
    row: dict[str, Any] = {"call": str(key), "gain": None, "ms": None, "note": ""}
    own = table.read(path) if path.exists() else None
    if not again and own is not None and any(entry.key == key for entry in own.entries):
        return {**row, "note": "in the table already"}
    task = progress.add_task(str(key), total=None)
    try:
        entry = select.tune(
            key,
            gpu,
            shape,
            device,
            exhaustive=exhaustive,
            command=shlex.join(["sage-cute", *sys.argv[1:]]),
            on_progress=lambda done, known: progress.update(task, completed=done, total=known),
        )
    except TuningError as error:
        return {**row, "note": str(error)}
    finally:
        progress.remove_task(task)
    table.record(gpu, entry, path)
    gain = entry.default_ms / entry.ms
    return {**row, "gain": gain, "ms": entry.ms, "note": f"{entry.tried} configurations tried"}


def _show(rows: list[dict[str, Any]], path: Path) -> None:
    cells = [
        (
            row["call"],
            f"{row['ms']:.3f}" if row["ms"] else "",
            f"{row['gain']:.3f}" if row["gain"] else "",
            row["note"],
        )
        for row in rows
    ]
    show_table("Tuned", ("call", "ms", "gain over default", ""), cells)
    gains = [row["gain"] for row in rows if row["gain"]]
    if gains:
        typer.echo(f"Gain over the default configurations: {geometric_mean(gains):.3f} x (mean)")
    typer.echo(f"Table: {path}")
