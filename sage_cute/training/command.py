"""The command ``sage-cute train``: options in, a training, a report out."""

from __future__ import annotations

import datetime
import itertools
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from sage_cute.errors import PolicyError, UnsupportedError
from sage_cute.policies import canonical, resolve
from sage_cute.support import is_supported
from sage_cute.training import data, loop, report
from sage_cute.training.errors import SetupError
from sage_cute.training.loop import TrainConfig, Trainer
from sage_cute.training.model import ModelConfig, build_pair
from sage_cute.training.progress import display

_INTERRUPTED = 130  # 128 + SIGINT, what a shell makes of Ctrl-C
_MODEL, _TRAIN = ModelConfig(), TrainConfig()


def _option(help_: str, panel: str, *, at_least: int | None = None) -> typer.models.OptionInfo:
    option = typer.Option(help=help_, rich_help_panel=panel, min=at_least)
    assert isinstance(option, typer.models.OptionInfo)
    return option


def train(
    data_path: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE-OR-FOLDER",
            help="Text to train on, byte by byte; of a folder, all text files in it. "
            "Default: the source of Python's standard library.",
            rich_help_panel="Data and output",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where run.json and loss.png go (and are replaced). Default: runs/<date-time>.",
            rich_help_panel="Data and output",
        ),
    ] = None,
    policy: Annotated[
        str,
        _option(
            "What is INT8, and how finely scaled: a preset (default, sagebwd, fast, accurate, "
            "int8), if need be with changes: fast:dp=16bit,smooth_v=true.",
            "Attention",
        ),
    ] = "default",
    qk_norm: Annotated[
        bool,
        typer.Option(
            "--qk-norm/--no-qk-norm",
            help="RMSNorm of Q and K, in both models: bounds the scores, which helps INT8.",
            rich_help_panel="Attention",
        ),
    ] = _MODEL.qk_norm,
    smooth_k: Annotated[
        bool,
        typer.Option(
            "--smooth-k/--no-smooth-k",
            help="--no-smooth-k quantizes K without subtracting its mean: same as the policy "
            "change smooth_k=false.",
            rich_help_panel="Attention",
        ),
    ] = True,
    steps: Annotated[int, _option("Optimizer steps.", "Training", at_least=1)] = _TRAIN.steps,
    tokens_per_step: Annotated[
        int, _option("Tokens in a step: a multiple of --seqlen.", "Training", at_least=1)
    ] = _TRAIN.tokens_per_step,
    seqlen: Annotated[
        int, _option("Tokens in a sequence.", "Training", at_least=1)
    ] = _TRAIN.seqlen,
    accumulate: Annotated[
        int,
        _option(
            "Parts that a step is computed in, one after the other, if it does not fit in memory.",
            "Training",
            at_least=1,
        ),
    ] = _TRAIN.accumulate,
    lr: Annotated[
        float, _option("Peak learning rate: AdamW, warm-up, cosine.", "Training")
    ] = _TRAIN.lr,
    seed: Annotated[
        int,
        typer.Option(
            help="Of the weights and the batches.", rich_help_panel="Training", min=0, max=2**63 - 1
        ),
    ] = _TRAIN.seed,
    device: Annotated[
        str, _option("cpu (float32), cuda or cuda:N (bfloat16 autocast).", "Training")
    ] = _TRAIN.device,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="torch.compile(fullgraph=True) of each model, loss included.",
            rich_help_panel="Training",
        ),
    ] = _TRAIN.compile,
    dim: Annotated[int, _option("Width of the residual stream.", "Model", at_least=1)] = _MODEL.dim,
    layers: Annotated[int, _option("Layers.", "Model", at_least=1)] = _MODEL.layers,
    heads: Annotated[int, _option("Query heads.", "Model", at_least=1)] = _MODEL.heads,
    kv_heads: Annotated[
        int, _option("Key and value heads: divides --heads.", "Model", at_least=1)
    ] = _MODEL.kv_heads,
    head_dim: Annotated[int, _option("Width of a head.", "Model", at_least=2)] = _MODEL.head_dim,
) -> None:
    """Train a small decoder by INT8 attention and by SDPA, and compare.

    Two models with the same initial weights see the same batches of text.
    One attends with sage::attn (INT8, forward and backward), the other with
    PyTorch's SDPA. At the end there are a table of losses and times, loss.png
    with both curves, and run.json with every step.

    Ctrl-C stops early and keeps what is done (exit status 130). A loss that
    is not finite ends the training of its model (exit status 1).

    Under 5 minutes on 2 CPU cores:

        sage-cute train

    The paper's mix of precisions, without QK-norm:

        sage-cute train --policy sagebwd --no-qk-norm

    Your own text:

        sage-cute train --data my-project/ --steps 500

    On a CPU that other work keeps busy (threads that wait then sleep, not spin):

        OMP_WAIT_POLICY=passive sage-cute train
    """
    if not smooth_k:
        preset, _, changes = policy.partition(":")
        policy = f"{preset}:{changes},smooth_k=false" if changes else f"{preset}:smooth_k=false"
    try:
        resolve(policy)
        model_config = ModelConfig(
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
        )
        train_config = TrainConfig(
            steps=steps,
            tokens_per_step=tokens_per_step,
            seqlen=seqlen,
            accumulate=accumulate,
            lr=lr,
            seed=seed,
            device=device,
            compile=compile_,
        )
        _check_compiler(train_config)
        status = _run(data_path, out, policy, model_config, train_config)
    except (PolicyError, SetupError, UnsupportedError) as error:
        typer.echo(f"sage-cute train: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _run(
    data_path: Path | None,
    out: Path | None,
    policy: str,
    model_config: ModelConfig,
    train_config: TrainConfig,
) -> int:
    """Trains and reports; returns the exit status."""
    started = datetime.datetime.now()
    device = report.device_name(train_config.device)
    _check_supported(model_config, train_config, policy)
    corpus = data.load(data_path, seqlen=train_config.seqlen)
    out = _make_folder(out or Path("runs", started.strftime("%Y%m%d-%H%M%S")))
    models = build_pair(
        model_config, seqlen=train_config.seqlen, policy=policy, seed=train_config.seed
    )
    sage, sdpa = (
        Trainer(name, model, train_config)
        for name, model in zip(("sage::attn", "SDPA"), models, strict=True)
    )
    console = Console()
    for line in (str(corpus), device, f"policy {canonical(policy)}: {resolve(policy)}"):
        console.print(line, soft_wrap=True, highlight=False)

    status = 0
    try:
        _train(console, [sage, sdpa], corpus)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    finally:  # also before a traceback: what is done is kept
        result = report.Report(
            command=shlex.join(["sage-cute", *sys.argv[1:]]),
            data=str(corpus),
            policy=policy,
            model=model_config,
            train=train_config,
            parameters=sum(p.numel() for p in models[0].parameters()),
            sage=sage.log,
            sdpa=sdpa.log,
            started=started,
            seconds=(datetime.datetime.now() - started).total_seconds(),
        )
        _save(result, out, console)
    return status or int(any(log.stopped for log in (sage.log, sdpa.log)))


def _train(console: Console, trainers: list[Trainer], corpus: data.Corpus) -> None:
    config = trainers[0].config
    batches = data.batches(
        corpus.train, sequences=config.sequences, seqlen=config.seqlen, seed=config.seed
    )
    validation = data.windows(
        corpus.held_out,
        sequences=loop.VALIDATION_BATCHES * config.sequences,
        seqlen=config.seqlen,
    )
    logs = [trainer.log for trainer in trainers]
    with display(console, logs, config.steps, compiles=config.compile) as show:
        loop.train_together(trainers, itertools.islice(batches, config.steps), validation, show)


def _save(result: report.Report, out: Path, console: Console) -> None:
    report.write_json(result, out / "run.json")
    written = "run.json"
    (out / "loss.png").unlink(missing_ok=True)  # of an earlier run, should this one have no curve
    if result.steps:
        report.write_plot(result, out / "loss.png")
        written += " and loss.png"
        console.print(report.table(result))
    for log in (result.sage, result.sdpa):
        if log.stopped:
            console.print(f"{log.name} stopped: {log.stopped}", soft_wrap=True, highlight=False)
    console.print(f"Wrote {written} to {out}", soft_wrap=True, highlight=False)


def _make_folder(out: Path) -> Path:
    # Before the training: a path that cannot be written should not cost one.
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"--out {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise SetupError(f"--out {out}: the folder may not be written to")
    return out


def _check_supported(model: ModelConfig, config: TrainConfig, policy: str) -> None:
    """Before anything is compiled: Dynamo would bury the op's own error in its frames."""
    q, k = (
        torch.empty(1, heads, 1, model.head_dim, device=config.device, dtype=config.dtype)
        for heads in (model.heads, model.kv_heads)
    )
    if not (status := is_supported(q, k, k, policy=policy)):
        raise UnsupportedError(status.reason)


def _check_compiler(config: TrainConfig) -> None:
    """Inductor's C++ compiler, looked for where Inductor does: else its traceback is long."""
    if not config.compile or not config.device.startswith("cpu"):
        return
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    name = os.environ.get("CXX", usual)
    if shutil.which(name) is None:
        raise SetupError(
            f"torch.compile needs a C++ compiler and there is no {name}: install one, or pass "
            "--no-compile"
        )
