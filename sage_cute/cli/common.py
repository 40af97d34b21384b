"""What several commands share: options, one-line errors, tables and JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table

from sage_cute.errors import (
    CacheError,
    DiagnosisError,
    DTypeError,
    KernelError,
    PolicyError,
    SettingError,
    ShapeError,
    TuningError,
    UnsupportedError,
)

_EXPECTED = (
    CacheError,
    DiagnosisError,
    DTypeError,
    KernelError,
    PolicyError,
    SettingError,
    ShapeError,
    TuningError,
    UnsupportedError,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N. Default: the GPU if there is one.", show_default=False),
]
Policies = Annotated[
    str,
    typer.Option(metavar="NAMES", help="Policies, separated by commas; with changes: by ';'."),
]


@contextlib.contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """Ends the command with status 2 and one line where the package says what is wrong."""
    try:
        yield
    except _EXPECTED as error:
        fail(command, str(error))


def fail(command: str, message: str) -> NoReturn:
    """One line on standard error, status 2."""
    typer.echo(f"sage-cute {command}: {message}", err=True)
    raise typer.Exit(2)


def split(text: str, command: str, option: str) -> list[str]:
    """The parts of a comma-separated option; policies with changes are separated by ``;``."""
    parts = [part.strip() for part in text.split(";" if ";" in text or ":" in text else ",")]
    if not all(parts):
        fail(command, f"{option} {text!r}: values separated by commas")
    return parts


def numbers(text: str, command: str, option: str) -> list[int]:
    """Integers, separated by commas."""
    parts = split(text, command, option)
    if not all(part.isdecimal() for part in parts):
        fail(command, f"{option} {text!r}: whole numbers separated by commas")
    return [int(part) for part in parts]


def device_of(name: str | None, command: str) -> torch.device:
    """The device that an option names."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        fail(command, f"--device {name}: cpu, cuda or cuda:N")
    if device.type not in ("cpu", "cuda"):
        fail(command, f"--device {name}: cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        fail(command, f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def device_name(device: torch.device) -> str:
    """As a person calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU (the reference implementation, no kernels)"


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table for people."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table)


def show_json(document: Any) -> None:
    """For scripts, on standard output."""
    typer.echo(json.dumps(document, indent=1, default=str))
