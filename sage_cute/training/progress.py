"""How a run shows while it goes on: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sage_cute.training.loop import RunLog

OnStep = Callable[[RunLog], None]
_SECONDS_BETWEEN_LINES = 10.0


def display(
    console: Console, logs: Sequence[RunLog], steps: int, *, compiles: bool
) -> AbstractContextManager[OnStep]:
    """Shows a training while the context lasts: bars if ``console`` is a terminal, else lines.

    Args:
        console: Where to.
        logs: Of all models, in the order in which they take a step.
        steps: How many there will be.
        compiles: Whether the first one compiles, which takes long.

    Returns:
        A context whose value is to be called with a model's log after each of its steps.
    """
    return (_bars if console.is_terminal else _lines)(console, logs, steps, compiles)


@contextmanager
def _bars(console: Console, logs: Sequence[RunLog], steps: int, compiles: bool) -> Iterator[OnStep]:
    """One bar a model: loss, tokens a second, time left."""
    progress = Progress(
        TextColumn("[bold]{task.description:10}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]:26}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        console=console,
        refresh_per_second=4,  # more would take time from a training on the same CPU
    )
    state = "compiling" if compiles else ""
    tasks = {log.name: progress.add_task(log.name, total=steps, state=state) for log in logs}

    def on_step(log: RunLog) -> None:
        state = f"loss {log.losses[-1]:.4f} {_rate(log)}"
        progress.update(tasks[log.name], completed=len(log.losses), state=state)
        if log.stopped:
            console.print(_stop(log))

    with progress:
        yield on_step


@contextmanager
def _lines(
    console: Console, logs: Sequence[RunLog], steps: int, compiles: bool
) -> Iterator[OnStep]:
    """A line with all models every few seconds, for logs."""

    def write(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    last = float("-inf")

    def on_step(log: RunLog) -> None:
        nonlocal last
        if log.stopped:
            write(_stop(log))
        done, now = len(log.losses), time.monotonic()
        # After the last model's step: the line then has the same step of each.
        if log is logs[-1] and (done == steps or now - last >= _SECONDS_BETWEEN_LINES):
            last = now
            models = "  ".join(f"{x.name} {x.losses[-1]:.4f} {_rate(x)}" for x in logs)
            write(
                f"step {done:>{len(str(steps))}}/{steps}  {models}  {_left(logs, steps)}".rstrip()
            )

    if compiles:
        write("compiling (the first step)")
    yield on_step


def _rate(log: RunLog) -> str:
    rate = log.tokens_per_second
    return f"{rate:,.0f} tok/s" if rate else ""


def _left(logs: Sequence[RunLog], steps: int) -> str:
    running = [log for log in logs if log.stopped is None and log.seconds_per_step]
    seconds = sum((steps - len(log.losses)) * (log.seconds_per_step or 0.0) for log in running)
    return f"{seconds:.0f} s left" if seconds else ""


def _stop(log: RunLog) -> str:
    return f"{log.name} stopped: {log.stopped}"
