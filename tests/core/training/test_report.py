"""The table, the JSON and the PNG, of whole and of broken runs."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from sage_cute.training import report
from sage_cute.training.loop import RunLog, TrainConfig
from sage_cute.training.model import ModelConfig
from sage_cute.training.report import Report


def _log(name: str, losses: list[float], stopped: str | None = None) -> RunLog:
    steps = len(losses)
    validation = losses[-1] if losses and stopped is None else None
    return RunLog(
        name, 2048, losses, [1.0] * steps, [9.0, *[0.5] * steps][:steps], validation, stopped
    )


def _report(sage: RunLog, sdpa: RunLog, steps: int = 40) -> Report:
    return Report(
        command="sage-cute train",
        data="text",
        policy="fast:smooth_k=false",
        model=ModelConfig(),
        train=TrainConfig(steps=steps),
        parameters=1_300_000,
        sage=sage,
        sdpa=sdpa,
        started=datetime.datetime(2026, 1, 2, 3, 4, 5),
        seconds=60.0,
    )


WHOLE = _report(
    _log("sage::attn", [5.0 - 0.1 * i for i in range(40)]),
    _log("SDPA", [5.01 - 0.1 * i for i in range(40)]),
)
DIVERGED = _report(
    _log("sage::attn", [5.0, 4.0, math.nan], "the loss is nan at step 3"),
    _log("SDPA", [5.0 - 0.1 * i for i in range(40)]),
)
INTERRUPTED = _report(
    _log("sage::attn", [5.0, 4.0], "interrupted"), _log("SDPA", [5.0], "interrupted")
)
NOTHING = _report(_log("sage::attn", [], "interrupted"), _log("SDPA", [], "interrupted"))
ALL = pytest.mark.parametrize(
    "run", [WHOLE, DIVERGED, INTERRUPTED, NOTHING], ids=["whole", "nan", "interrupted", "nothing"]
)


def _rendered(run: Report) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(report.table(run))
    return capture.get()


def test_summary_averages_the_last_tenth_of_the_steps_that_both_did() -> None:
    rows = report.summary(WHOLE)
    assert rows["train_loss"].label == "train loss, steps 37 to 40"
    assert rows["train_loss"].sage == pytest.approx(5.0 - 0.1 * 37.5)
    assert rows["train_loss"].gap == pytest.approx(-0.01)
    assert rows["validation_loss"].gap == pytest.approx(-0.01)
    assert rows["seconds_per_step"].sage == 0.5  # without the first, which took 9
    assert rows["tokens_per_second"].sage == 4096
    assert report.summary(DIVERGED)["train_loss"].label == "train loss, steps 3 to 3"


def test_table_says_what_the_times_are_worth() -> None:
    text = _rendered(WHOLE)
    assert "40 of 40 steps in 60 s, policy fast:smooth_k=false" in text
    assert "-0.0100" in text and "4,096" in text
    assert "nothing about a kernel's speed" in " ".join(text.split())


@ALL
def test_json_is_strict_and_whole(run: Report, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    report.write_json(run, tmp_path / "run.json")
    content = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert content["policy"]["name"] == "fast:smooth_k=false"
    assert content["policy"]["fields"]["smooth_k"] is False
    assert content["train"]["steps"] == 40 and content["model"]["head_dim"] == 64
    assert content["runs"]["sage"]["stopped"] == run.sage.stopped
    assert len(content["runs"]["sdpa"]["losses"]) == len(run.sdpa.losses)
    assert "kernel" in content["caution"] and content["device"].startswith("cpu")


@ALL
def test_table_and_plot_take_any_run(run: Report, tmp_path: Path) -> None:
    assert "policy" in _rendered(run)
    report.write_plot(run, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
