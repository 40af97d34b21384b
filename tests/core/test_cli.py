"""The command line from end to end, at a size that takes a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from sage_cute import cli, nn
from sage_cute._version import __version__
from sage_cute.policies import canonical
from sage_cute.training.loop import Trainer

# fmt: off
TINY = [
    "--dim", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--head-dim", "16",
    "--seqlen", "32", "--tokens-per-step", "64", "--no-compile",
]
# fmt: on


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models this small gain nothing from threads, and lose much where others want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes that tests start
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"for i in range(10):\n    print(i)\n" * 100)
    return path


def _train(*arguments: object) -> Result:
    return CliRunner().invoke(cli.build_app(), ["train", *TINY, *map(str, arguments)])


def _run(*arguments: object) -> dict[str, Any]:
    """The JSON of a run that must succeed."""
    result = _train(*arguments)
    assert result.exit_code == 0, result.output
    out = Path(str(arguments[arguments.index("--out") + 1]))
    content: dict[str, Any] = json.loads((out / "run.json").read_text())
    return content


def test_train_leaves_table_json_and_plot(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = _train("--data", text, "--steps", 3, "--out", out)
    assert result.exit_code == 0, result.output
    for part in ("step 3/3", "sage::attn", "SDPA", "gap", "validation loss", "seconds a step"):
        assert part in result.output
    assert sorted(path.name for path in out.iterdir()) == ["loss.png", "run.json"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    run = json.loads((out / "run.json").read_text())
    assert [len(log["losses"]) for log in run["runs"].values()] == [3, 3]
    assert run["policy"]["name"] == "fast" and "qk=int8" in run["policy"]["mix"]
    assert run["versions"]["sage_cute"] == __version__


def test_out_defaults_to_a_folder_named_after_the_time(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _train("--data", text, "--steps", 1).exit_code == 0
    assert len(list(tmp_path.glob("runs/????????-??????/run.json"))) == 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--policy", "sagebwd"], "sagebwd"),
        (["--no-smooth-k"], "fast:smooth_k=false"),
        (["--policy", "accurate", "--no-smooth-k"], "accurate:smooth_k=false"),
        (["--policy", "fast:dp=16bit", "--no-smooth-k"], "fast:dp=16bit,smooth_k=false"),
    ],
)
def test_policy_reaches_the_op(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str
) -> None:
    seen = set()
    attention = nn.attention

    def spy(*tensors: Any, **options: Any) -> Any:
        seen.add(canonical(options["policy"]))
        return attention(*tensors, **options)

    monkeypatch.setattr(nn, "attention", spy)
    run = _run("--data", text, "--steps", 1, "--out", tmp_path, *arguments)
    assert seen == {name} == {run["policy"]["name"]}


def test_qk_norm_is_a_choice(text: Path, tmp_path: Path) -> None:
    runs = [
        _run("--data", text, "--steps", 1, "--out", tmp_path / flag, flag)
        for flag in ("--qk-norm", "--no-qk-norm")
    ]
    assert [run["model"]["qk_norm"] for run in runs] == [True, False]
    assert runs[0]["model"]["parameters"] == runs[1]["model"]["parameters"] + 2 * 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "int7"], "unknown policy 'int7'; known policies: "),
        (["--policy", "fast:dq=int7"], "choose one of"),
        (["--data", "no/such/file"], "no such file"),
        (["--tokens-per-step", "65"], "try 96"),
        (["--kv-heads", "3"], "no multiple"),
        (["--device", "tpu"], "cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--out", os.devnull], "--out"),
    ],
)
def test_a_mistake_is_one_line(text: Path, arguments: list[str], message: str) -> None:
    result = _train("--data", text, "--steps", 1, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("sage-cute train: ") and message in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_no_compiler_is_one_line(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = _train("--data", text, "--steps", 1, "--compile")
    assert result.exit_code == 2
    assert "there is no no-such-compiler" in result.stderr and "--no-compile" in result.stderr


def test_interrupt_keeps_what_is_done(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def interrupted(self: Trainer, tokens: Any) -> None:
        if self.log.name == "SDPA" and len(self.log.losses) == 2:
            raise KeyboardInterrupt
        step(self, tokens)

    monkeypatch.setattr(Trainer, "step", interrupted)
    result = _train("--data", text, "--steps", 9, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert f"Wrote run.json and loss.png to {tmp_path / 'out'}" in result.output
    runs = json.loads((tmp_path / "out" / "run.json").read_text())["runs"]
    assert [len(log["losses"]) for log in runs.values()] == [3, 2]
    assert [log["stopped"] for log in runs.values()] == ["interrupted"] * 2


def test_an_error_keeps_what_is_done(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def fails(self: Trainer, tokens: Any) -> None:
        if len(self.log.losses) == 2:
            raise torch.OutOfMemoryError("no memory")
        step(self, tokens)

    monkeypatch.setattr(Trainer, "step", fails)
    result = _train("--data", text, "--steps", 9, "--out", tmp_path)
    assert isinstance(result.exception, torch.OutOfMemoryError)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["runs"]["sage"]["stopped"] == "OutOfMemoryError"
    assert (tmp_path / "loss.png").exists()


def test_ctrl_c_on_the_real_process(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sage_cute", "train", *TINY]
    command += ["--data", str(text), "--steps", "1000000", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 130, rest
    assert "Traceback" not in rest and "interrupted" in rest
    assert (tmp_path / "out" / "run.json").exists()


def test_divergence_is_reported_and_fails(text: Path, tmp_path: Path) -> None:
    # Weights of 1e30 and more: logits overflow in the second step at the latest.
    result = _train("--data", text, "--steps", 5, "--lr", 1e30, "--out", tmp_path)
    assert result.exit_code == 1
    assert "SDPA stopped: the " in result.output and "at step" in result.output
    run = json.loads((tmp_path / "run.json").read_text())
    assert "at step" in run["runs"]["sdpa"]["stopped"]


def test_help_and_version() -> None:
    runner, app = CliRunner(), cli.build_app()
    assert runner.invoke(app, ["--version"]).output.strip() == __version__
    assert "train" in runner.invoke(app, ["--help"]).output
    text = runner.invoke(app, ["train", "--help"]).output
    for option in ("--data", "--policy", "--no-qk-norm", "--no-smooth-k", "--tokens-per-step"):
        assert option in text


def test_without_the_extra_one_line_says_what_to_install() -> None:
    code = (
        "import sys; import sage_cute, sage_cute.cli\n"
        "loaded = {'typer', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "sys.modules['typer'] = None  # as if it were not installed\n"
        "sage_cute.cli.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == 'sage-cute needs typer: pip install "sage-cute[train]"\n'
