"""The command ``sage-cute``. What its commands need comes with the extra ``train``."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

_NEEDED = ("matplotlib", "rich", "typer")


def build_app() -> typer.Typer:
    """The Typer application, one command a line; imports everything that the commands need."""
    import typer

    from sage_cute._version import __version__
    from sage_cute.cli import bench, diagnose, info, kernels, tune, verify
    from sage_cute.training.command import train

    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(__version__)
            raise typer.Exit

    @app.callback()
    def sage_cute(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print it and exit."
        ),
    ) -> None:
        """Attention that trains in INT8: torch.ops.sage.attn and sage_cute.attention.

        First [bold]info[/], which says what this machine has, then [bold]verify[/], which checks
        results on it. [bold]tune[/] and [bold]compile[/] make first calls and all later ones
        faster; neither is needed.
        """

    for command in (
        info.info,
        verify.verify,
        tune.tune,
        kernels.compile_,
        bench.bench,
        diagnose.diagnose,
        train,
    ):
        app.command(name=command.__name__.rstrip("_"))(command)
    app.add_typer(kernels.cache_app, name="cache")
    return app


def main() -> None:
    """Entry point of ``sage-cute`` and of ``python -m sage_cute``."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f'sage-cute needs {", ".join(missing)}: pip install "sage-cute[train]"',
            file=sys.stderr,
        )
        raise SystemExit(1)
    build_app()(prog_name="sage-cute")
