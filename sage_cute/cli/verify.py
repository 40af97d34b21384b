"""``sage-cute verify``: are results right on this machine?"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from sage_cute import verify as checks
from sage_cute.cli.common import (
    Device,
    Json,
    Policies,
    device_name,
    device_of,
    fail,
    one_line_errors,
    show_json,
    show_table,
    split,
)
from sage_cute.numerics.tolerances import ACCURACY
from sage_cute.policies import PRESETS, canonical
from sage_cute.testing import INPUT_CLASSES

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def verify(
    policies: Policies = "fast,accurate",
    inputs: Annotated[
        str,
        typer.Option(help="Classes of inputs, separated by commas (g1, qkn, sink, ...), or all."),
    ] = "all",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    device: Device = None,
    json_: Json = False,
) -> None:
    """Checks results on your GPU: errors against float64, and laws of attention. Pass or fail.

    Every figure is shown with its bound. The exit status is 0 if all pass, else 1.

    [dim]sage-cute verify --policies sagebwd --inputs g1,sink[/]
    """
    command = "verify"
    with one_line_errors(command):
        where = device_of(device, command)
        names = [canonical(name) for name in split(policies, command, "--policies")]
        if unknown := [name for name in names if name not in PRESETS]:
            fail(command, f"--policies {unknown[0]}: bounds exist for {', '.join(PRESETS)}")
        kinds = None if inputs == "all" else split(inputs, command, "--inputs")
        for kind in kinds or ():
            if kind not in {kind for kind, _ in ACCURACY}:
                known = ", ".join(dict.fromkeys(kind for kind, _ in ACCURACY))
                fail(command, f"--inputs {kind}: choose {known}")
        if dtype not in _DTYPES:
            fail(command, f"--dtype {dtype}: choose {', '.join(_DTYPES)}")
        found = []
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("checking", total=None)
            runs = (
                checks.invariants(names, device=where, dtype=_DTYPES[dtype]),
                checks.accuracy(names, device=where, dtype=_DTYPES[dtype], kinds=kinds),
            )
            for run in runs:
                for check in run:
                    found.append(check)
                    progress.advance(bar)
    failed = [check for check in found if not check.ok]
    if json_:
        rows = [{**check._asdict(), "ok": check.ok} for check in found]
        show_json({"device": device_name(where), "passed": not failed, "checks": rows})
    else:
        cells = [
            (c.policy, c.name, f"{c.value:.3g}", f"{c.limit:.3g}", "pass" if c.ok else "FAIL")
            for c in found
        ]
        show_table(device_name(where), ("policy", "figure", "is", "may be", ""), cells)
        if kinds:
            for kind in kinds:
                typer.echo(f"{kind}: {INPUT_CLASSES.get(kind, INPUT_CLASSES['g1'])}")
        typer.echo(f"{len(found) - len(failed)} of {len(found)} checks pass")
    raise typer.Exit(int(bool(failed)))
