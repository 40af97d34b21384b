"""The pre-training study at a size that takes seconds: resumed, whole, and reported."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench import pretrain
from bench.pretrain import SCALES, SDPA, Run, Scale
from sage_cute.support import Support
from sage_cute.training import data

TINY = SCALES["tiny"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"for i in range(10):\n    print(i)\n" * 200)
    return path


def arguments(tmp_path: Path, **changes) -> argparse.Namespace:
    out = tmp_path / "runs"
    out.mkdir(exist_ok=True)
    values = {"device": "cpu", "out": out, "checkpoint": 3, "results": tmp_path}
    return argparse.Namespace(**{**values, **changes})


def train(run: Run, text: Path, args: argparse.Namespace, deadline: float = math.inf) -> bool:
    corpus = data.load(text, seqlen=TINY.seqlen)
    return pretrain.train(run, TINY, corpus, args, deadline)


def test_the_study_is_what_the_issue_asks() -> None:
    runs = pretrain.study(SCALES["full"])
    assert len(runs) == len({run.name for run in runs}) == 30
    main = [r for r in runs if r.qk_norm and r.smooth_k]
    for tokens in SCALES["full"].tokens_per_step:
        for attention in (SDPA, "sagebwd", "fast", "accurate"):
            seeds = {
                r.seed for r in main if (r.attention, r.tokens_per_step) == (attention, tokens)
            }
            assert seeds == {0, 1}
            assert any(not r.qk_norm and r.attention == attention for r in runs)
    assert any(not r.smooth_k for r in runs)
    assert all(r.smooth_k for r in runs if r.attention == SDPA)
    places = {run: i for i, run in enumerate(runs)}
    assert all(places[run.baseline] <= places[run] for run in runs)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_scales_fit(scale: Scale) -> None:
    for run in pretrain.study(scale):
        config = pretrain.TrainConfig(
            steps=scale.tokens // run.tokens_per_step,
            tokens_per_step=run.tokens_per_step,
            seqlen=scale.seqlen,
            accumulate=max(1, run.tokens_per_step // scale.micro_tokens),
        )
        assert config.steps >= 4
        assert config.tokens_per_step // config.accumulate <= scale.micro_tokens


def test_full_scale_has_the_size_that_the_issue_names() -> None:
    with torch.device("meta"):
        model = pretrain.Decoder(SCALES["full"].model, seqlen=64, attention=pretrain.sdpa)
    assert 50e6 < sum(p.numel() for p in model.parameters()) < 120e6


def test_a_resumed_run_is_the_uninterrupted_one(text, tmp_path, monkeypatch) -> None:
    run = Run("fast", True, True, 256, 0)
    whole, parts = (arguments(tmp_path / n) for n in ("whole", "parts") if not _make(tmp_path / n))
    assert train(run, text, whole)
    ticks = iter(range(1000))
    monkeypatch.setattr(pretrain.time, "monotonic", lambda: next(ticks))
    assert not train(run, text, parts, deadline=4)  # five steps
    state = torch.load(parts.out / f"{run.name}.pt", weights_only=True)
    assert len(state["log"]["losses"]) == 5 and not list(parts.out.glob("*.json"))
    assert train(run, text, parts, deadline=1000)
    assert not list(parts.out.glob("*.pt"))
    results = [json.loads((a.out / f"{run.name}.json").read_text()) for a in (whole, parts)]
    assert len(results[0]["losses"]) == 16 == results[0]["steps"]
    for name in ("losses", "grad_norms", "validation_loss", "parameters"):
        assert results[0][name] == results[1][name], name


def _make(folder: Path) -> None:
    folder.mkdir()


def test_runs_start_from_the_same_weights_and_differ_where_they_should(text, tmp_path) -> None:
    base = Run(SDPA, True, True, 1024, 0)
    weights = {
        run.name: pretrain.trainer_of(run, TINY, "cpu").model.state_dict()
        for run in (base, dataclasses.replace(base, attention="fast"))
    }
    a, b = weights.values()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    other = pretrain.trainer_of(dataclasses.replace(base, seed=1), TINY, "cpu").model.state_dict()
    assert not torch.equal(a["embed.weight"], other["embed.weight"])
    bare = pretrain.trainer_of(dataclasses.replace(base, qk_norm=False), TINY, "cpu").model
    assert not any("q_norm" in name for name in bare.state_dict())
    unsmoothed = dataclasses.replace(base, attention="fast", smooth_k=False)
    model = pretrain.trainer_of(unsmoothed, TINY, "cpu").model
    assert model.blocks[0].attention.attend.policy == "fast:smooth_k=false"


def test_a_diverging_run_is_a_result(text, tmp_path, monkeypatch) -> None:
    args, run = arguments(tmp_path), Run(SDPA, True, True, 256, 0)
    step = pretrain.Resumable.step

    def diverge(self, tokens) -> None:
        step(self, tokens)
        if len(self.log.losses) == 3:
            self.log.losses[-1] = math.nan
            self.log.stopped = "the loss is nan at step 3"

    monkeypatch.setattr(pretrain.Resumable, "step", diverge)
    assert train(run, text, args)
    results = pretrain.finished(args.out, [run])
    assert math.isnan(results[run]["losses"][2]) and results[run]["validation_loss"] is None
    document = pretrain.summarize(results)
    assert "the loss is nan at step 3" in pretrain.table(document)


def test_gaps_and_seed_noise() -> None:
    def result(loss: float) -> dict:
        return {"losses": [5.0, loss], "grad_norms": [1.0, 2.0], "validation_loss": loss,
                "stopped": None}  # fmt: skip

    base = Run(SDPA, True, True, 256, 0)
    results = {
        base: result(2.0),
        dataclasses.replace(base, seed=1): result(2.25),
        dataclasses.replace(base, attention="fast"): result(2.125),
        dataclasses.replace(base, attention="fast", smooth_k=False): result(3.0),
        dataclasses.replace(base, attention="fast", qk_norm=False): result(4.0),  # no baseline yet
    }
    document = pretrain.summarize(results)
    gaps = [row["gap"] for row in document["rows"]]
    assert gaps == [None, None, 0.125, 1.0, None]
    assert document["seed_noise"] == {"256": 0.25}
    text = pretrain.table(document)
    assert "| fast | yes | no | 256 | 0 |" in text and "+1.0000" in text
    assert "0.2500 at 256 tokens a step" in text


def test_command_line_trains_what_is_missing_and_reports(
    text, tmp_path, monkeypatch, capsys
) -> None:
    def run(*options: str) -> str:
        command = ["--device", "cpu", "--scale", "tiny", "--tokens", "1024", "--data", str(text)]
        command += ["--policies", "fast", "--out", str(tmp_path / "runs")]
        command += ["--results", str(tmp_path), "--only", "1024tps", *options]
        monkeypatch.setattr(sys, "argv", ["bench.pretrain", *command])
        pretrain.main()
        return capsys.readouterr().out

    with pytest.raises(SystemExit, match="no finished run"):
        run("--report")
    first = run()
    assert "fast-1024tps-seed1 step 1/1" in first and "7 of 7 runs" in first
    assert " step 1/1" not in run()  # all done
    document = json.loads((tmp_path / "pretrain-cpu.json").read_text())
    assert len(document["rows"]) == 7 and document["meta"]["finished"] == "7 of 7 runs"
    assert all(r["gap"] is not None for r in document["rows"] if r["attention"] != SDPA)
    assert (tmp_path / "pretrain-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_train_here_says_why(text, tmp_path, monkeypatch, capsys) -> None:
    refused = Support(False, "no kernels for the gradients of this policy")
    monkeypatch.setattr(pretrain, "is_supported", lambda *_, **options: refused)
    command = ["--device", "cpu", "--scale", "tiny", "--tokens", "1024", "--data", str(text)]
    command += ["--policies", "fast", "--out", str(tmp_path), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench.pretrain", *command, "--only", "1024tps-seed0"])
    pretrain.main()
    output = capsys.readouterr().out
    assert "fast-1024tps-seed0 cannot run here: no kernels for the gradients" in output
    assert "2 of 5 runs" in output  # SDPA with and without QK-norm
