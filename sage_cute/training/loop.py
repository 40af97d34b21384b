"""Training two models on the same batches, and the record of it. Nothing is rendered here."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from sage_cute.training.errors import SetupError

VALIDATION_BATCHES = 8
_WARMUP = 0.1  # of the steps, linear
_FINAL_LR = 0.1  # of the peak, where the cosine ends


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How both models are trained."""

    steps: int = 200
    tokens_per_step: int = 2048
    seqlen: int = 256
    accumulate: int = 1
    lr: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    device: str = "cpu"
    compile: bool = True

    def __post_init__(self) -> None:
        if self.tokens_per_step % self.seqlen:
            raise SetupError(
                f"--tokens-per-step {self.tokens_per_step} is no multiple of --seqlen "
                f"{self.seqlen}: try {-(-self.tokens_per_step // self.seqlen) * self.seqlen}"
            )
        if self.sequences % self.accumulate:
            raise SetupError(
                f"--accumulate {self.accumulate} does not divide the {self.sequences} sequences of "
                f"a step (--tokens-per-step / --seqlen)"
            )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise SetupError(f"--lr {self.lr}: a positive number")

    @property
    def sequences(self) -> int:
        """Sequences in a step."""
        return self.tokens_per_step // self.seqlen

    @property
    def dtype(self) -> torch.dtype:
        """What attention computes in: on a GPU autocast makes it bfloat16."""
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32


@dataclasses.dataclass
class RunLog:
    """What one model's training has shown so far."""

    name: str
    tokens_per_step: int
    losses: list[float] = dataclasses.field(default_factory=list)
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    validation_loss: float | None = None
    stopped: str | None = None  # why before the end, if it did

    @property
    def seconds_per_step(self) -> float | None:
        """Median over all steps but the first, which compiles; None before the second."""
        return statistics.median(self.seconds[1:]) if len(self.seconds) > 1 else None

    @property
    def tokens_per_second(self) -> float | None:
        """By :attr:`seconds_per_step`."""
        seconds = self.seconds_per_step
        return self.tokens_per_step / seconds if seconds else None


def pick_device(name: str) -> torch.device:
    """The device of a name such as ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        SetupError: no such device on this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SetupError(f"--device {name}: cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise SetupError(f"--device {name}: cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise SetupError(f"--device {name}: this machine has {count} CUDA devices for torch")
    return device


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up to ``config.lr``, then a cosine down to a tenth; ``step`` counts from 0."""
    warmup = max(1, round(_WARMUP * config.steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (_FINAL_LR + (1 - _FINAL_LR) * (1 + math.cos(math.pi * progress)) / 2)


class Trainer:
    """A model, its optimizer and its log.

    Args:
        name: For the log.
        model: Maps tokens (sequences, seqlen + 1) to a loss; moved to the config's device.
        config: How to train.
    """

    def __init__(self, name: str, model: nn.Module, config: TrainConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        self.model = model.to(self.device)
        self.log = RunLog(name, config.tokens_per_step)
        self._loss: Callable[[Tensor], Tensor] = (
            torch.compile(self.model, fullgraph=True) if config.compile else self.model
        )
        matrices = [p for p in model.parameters() if p.dim() > 1]
        gains = [p for p in model.parameters() if p.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": gains, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(0.9, 0.95),
            fused=True,
        )

    def step(self, tokens: Tensor) -> None:
        """One optimizer step on (sequences, seqlen + 1), recorded in the log."""
        start = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.config, len(self.log.losses))
        total = torch.zeros((), device=self.device)
        for part in tokens.to(self.device).chunk(self.config.accumulate):
            loss = self._forward(part) / self.config.accumulate
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._record(total.item(), norm.item(), time.perf_counter() - start)

    def validate(self, tokens: Tensor) -> None:
        """Mean loss over (n * sequences, seqlen + 1), recorded in the log."""
        size = self.config.sequences // self.config.accumulate
        # With gradients on, in the shape of a training step: the graph is there already, while
        # no_grad would have another one compiled.
        parts = tokens.to(self.device).chunk(len(tokens) // size)
        losses = [self._forward(part).item() for part in parts]
        self.log.validation_loss = statistics.fmean(losses)

    def _forward(self, tokens: Tensor) -> Tensor:
        dtype = self.config.dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            return self._loss(tokens)

    def _record(self, loss: float, norm: float, seconds: float) -> None:
        log = self.log
        log.losses.append(loss)
        log.grad_norms.append(norm)
        log.seconds.append(seconds)
        for what, value in (("loss", loss), ("gradient's norm", norm)):
            if not math.isfinite(value):
                log.stopped = f"the {what} is {value} at step {len(log.losses)}"
                return


def train_together(
    trainers: Sequence[Trainer],
    batches: Iterable[Tensor],
    validation: Tensor,
    on_step: Callable[[RunLog], None],
) -> None:
    """Trains every model on every batch, one step each in turn, then validates.

    In turn and not one after the other: the gap shows from the first step on, an interrupted run
    still compares like with like, and a slow spell of the machine falls on both.

    Args:
        trainers: The models; one that stops (a loss that is not finite) lets the others go on.
        batches: As many as there are steps, each (sequences, seqlen + 1).
        validation: (n * sequences, seqlen + 1), held out.
        on_step: Called with a model's log after each of its steps.

    Raises:
        KeyboardInterrupt: and any error of a model, passed on once the logs say so.
    """
    try:
        with _reproducible(trainers[0].device):
            for batch in batches:
                for trainer in _running(trainers):
                    trainer.step(batch)
                    on_step(trainer.log)
            for trainer in _running(trainers):
                trainer.validate(validation)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        for trainer in _running(trainers):
            trainer.log.stopped = "interrupted" if interrupted else type(error).__name__
        raise


def _running(trainers: Sequence[Trainer]) -> list[Trainer]:
    return [trainer for trainer in trainers if trainer.log.stopped is None]


@contextlib.contextmanager
def _reproducible(device: torch.device) -> Iterator[None]:
    """On a CPU, the same run gives the same losses, bit for bit.

    Eager kernels do so anyway; Inductor's sums over repeated tokens in the embedding's gradient
    depend on the order of the threads unless this is asked for. CUDA is left alone: there the
    switch also wants an environment variable and slower kernels.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or device.type == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
