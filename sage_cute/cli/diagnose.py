"""``sage-cute diagnose``: will INT8 attention hold for your model?"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sage_cute import diagnosis
from sage_cute.cli.common import Json, Policies, one_line_errors, show_json, split
from sage_cute.diagnosis.run import POLICIES
from sage_cute.errors import DiagnosisError

_POLICIES = ",".join(POLICIES)


def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function without arguments that returns (model, batch), or (model, batch, "
            "loss): a module's name or a .py file, a colon, the function.",
        ),
    ],
    policies: Policies = _POLICIES,
    sequences: Annotated[int, typer.Option(help="Sequences of the batch to examine.", min=1)] = 2,
    heads: Annotated[
        bool, typer.Option("--heads", help="A line a head in the table, not a line a layer.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write diagnosis.json and diagnosis.png into it."),
    ] = None,
    json_: Json = False,
) -> None:
    """Tells whether INT8 attention will hold for your model, and what would help it.

    Runs one forward and backward of the model, unchanged, and compares every call of sage::attn or
    of PyTorch's scaled_dot_product_attention with float64, for each policy, in every layer and
    head. The first policy also tells what K smoothing and QK-norm are worth.

    [dim]sage-cute diagnose my_training.py:model_and_batch --out diagnosis[/]
    """
    command = "diagnose"
    with one_line_errors(command):
        model, batch, loss = _made_by(target)
        found = diagnosis.diagnose(
            model,
            batch,
            loss=loss,
            policies=split(policies, command, "--policies"),
            sequences=sequences,
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found.write_json(out / "diagnosis.json")
        found.write_heatmap(out / "diagnosis.png")
    if json_:
        show_json(found.asdict())
        return
    typer.echo(f"{found.table(heads=heads)}\n")
    for sentence in found.verdict:
        typer.echo(f"- {sentence}")
    typer.echo(
        f"- {found.seconds:.1f} s in all, {found.step_seconds:.1f} s of them the model's step."
    )
    if out is not None:
        typer.echo(f"Wrote diagnosis.json and diagnosis.png to {out}")


def _made_by(target: str) -> tuple[Any, Any, Any]:
    made = _load(target)()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise DiagnosisError(
            f"{target} returned {type(made).__name__}: it must return (model, batch) or "
            "(model, batch, loss)"
        )
    return (*made, None)[:3]


def _load(target: str) -> Callable[[], Any]:
    """The function that ``module:function`` or ``file.py:function`` names."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise DiagnosisError(f"{target!r}: write MODULE:FUNCTION or FILE.py:FUNCTION")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise DiagnosisError(f"{place}: there is no such file")
        sys.path.insert(0, str(path.parent.resolve()))  # what it imports from beside itself
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None  # it ends in .py
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise DiagnosisError(f"{target!r}: {error}") from None
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise DiagnosisError(f"{target!r}: {place} has no function {name}")
    return function
