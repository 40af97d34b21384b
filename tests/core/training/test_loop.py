"""Training side by side, and its record."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sage_cute.training import command, data, loop
from sage_cute.training.errors import SetupError
from sage_cute.training.loop import RunLog, TrainConfig, Trainer
from sage_cute.training.model import ModelConfig, build_pair

MODEL = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16)
CONFIG = TrainConfig(steps=6, tokens_per_step=128, seqlen=32, compile=False)
TEXT = torch.tensor(list(b"def f(x):\n    return x\n" * 40), dtype=torch.uint8)


def _train(config: TrainConfig = CONFIG) -> list[RunLog]:
    models = build_pair(MODEL, seqlen=config.seqlen, policy="default", seed=config.seed)
    trainers = [
        Trainer(name, model, config) for name, model in zip(("sage", "sdpa"), models, strict=True)
    ]
    _together(trainers)
    return [trainer.log for trainer in trainers]


def _together(trainers: list[Trainer]) -> None:
    config = trainers[0].config
    batches = data.batches(TEXT, sequences=config.sequences, seqlen=config.seqlen, seed=config.seed)
    validation = data.windows(TEXT, sequences=2 * config.sequences, seqlen=config.seqlen)
    loop.train_together(
        trainers, itertools.islice(batches, config.steps), validation, lambda log: None
    )


class _Breaks(nn.Module):
    """A loss that does what it is told to at one step."""

    def __init__(self, at: int, what: float | BaseException) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.at, self.what, self.calls = at, what, 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            if isinstance(self.what, BaseException):
                raise self.what
            return self.weight * self.what
        return self.weight


def test_both_learn_and_stay_together() -> None:
    sage, sdpa = _train(
        TrainConfig(steps=40, tokens_per_step=128, seqlen=32, lr=3e-3, compile=False)
    )
    for log in (sage, sdpa):
        assert len(log.losses) == len(log.grad_norms) == len(log.seconds) == 40
        assert log.losses[-1] < log.losses[0] - 1.5
        assert log.validation_loss is not None and log.validation_loss < log.losses[0] - 1.5
        assert log.stopped is None
    # Measured 2e-4; at this size attention matters little, so the models' test is the sharper one.
    assert sage.losses[-1] == pytest.approx(sdpa.losses[-1], abs=0.01)
    assert sage.losses != sdpa.losses


def test_the_same_arguments_give_the_same_losses_bit_for_bit() -> None:
    for a, b in zip(_train(), _train(), strict=True):
        assert (a.losses, a.grad_norms, a.validation_loss) == (
            b.losses,
            b.grad_norms,
            b.validation_loss,
        )
    other = TrainConfig(steps=6, tokens_per_step=128, seqlen=32, compile=False, seed=1)
    assert _train(other)[0].losses != _train()[0].losses


def test_accumulation_changes_the_memory_and_not_the_mathematics() -> None:
    parts = TrainConfig(steps=6, tokens_per_step=128, seqlen=32, compile=False, accumulate=4)
    whole, split = _train()[1], _train(parts)[1]
    # SDPA's run, where nothing is quantized: only the order of sums differs.
    assert split.losses == pytest.approx(whole.losses, rel=1e-4)
    assert split.validation_loss == pytest.approx(whole.validation_loss, rel=1e-4)


def test_compiled_in_one_graph() -> None:
    logs = []
    for compiled in (True, False):
        config = TrainConfig(steps=2, tokens_per_step=64, seqlen=32, compile=compiled)
        model, _ = build_pair(MODEL, seqlen=32, policy="default", seed=0)
        trainer = Trainer("sage", model, config)
        _together([trainer])
        logs.append(trainer.log)
    # Fused kernels round otherwise, and INT8 codes at a tie go to either side.
    assert logs[0].losses == pytest.approx(logs[1].losses, rel=1e-3)
    assert logs[0].validation_loss == pytest.approx(logs[1].validation_loss, rel=1e-3)


def test_a_graph_break_is_an_error() -> None:
    class Breaks(_Breaks):
        def forward(self, tokens: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.weight

    with pytest.raises(torch._dynamo.exc.Unsupported):
        _together([Trainer("x", Breaks(0, 0), TrainConfig(tokens_per_step=64, seqlen=32))])


def test_deterministic_algorithms_are_asked_for_while_training_only() -> None:
    # What Inductor's scatter needs; a race between threads is too rare to be tested for itself.
    seen = []

    class Watches(_Breaks):
        def forward(self, tokens: Tensor) -> Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return self.weight

    _together([Trainer("x", Watches(0, 0), CONFIG)])
    assert seen and all(seen) and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_its_run_alone(value: float) -> None:
    trainers = [Trainer("bad", _Breaks(3, value), CONFIG), Trainer("good", _Breaks(0, 0), CONFIG)]
    _together(trainers)
    bad, good = (trainer.log for trainer in trainers)
    assert len(bad.losses) == 3 and len(good.losses) == CONFIG.steps
    assert bad.stopped == f"the loss is {value} at step 3" and good.stopped is None
    assert good.grad_norms == pytest.approx([1.0] * CONFIG.steps)  # of each step alone
    assert bad.validation_loss is None and good.validation_loss is not None


def test_a_gradient_that_is_not_finite_stops_too() -> None:
    class Steep(_Breaks):
        def forward(self, tokens: Tensor) -> Tensor:
            return (self.weight - 1).sqrt()  # 0 with slope infinity

    trainer = Trainer("steep", Steep(0, 0), CONFIG)
    _together([trainer])
    assert trainer.log.losses == [0.0]
    assert trainer.log.stopped == "the gradient's norm is inf at step 1"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt(), "interrupted"), (torch.OutOfMemoryError(), "OutOfMemoryError")],
)
def test_an_interrupt_keeps_what_is_done_and_is_passed_on(
    error: BaseException, reason: str
) -> None:
    first = Trainer("first", _Breaks(0, 0), CONFIG)
    second = Trainer("second", _Breaks(4, error), CONFIG)
    with pytest.raises(type(error)):
        _together([first, second])
    assert (len(first.log.losses), len(second.log.losses)) == (4, 3)
    assert first.log.stopped == second.log.stopped == reason
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_first_step_does_not_count_in_the_times() -> None:
    log = RunLog("x", tokens_per_step=100, seconds=[60.0])
    assert log.seconds_per_step is None and log.tokens_per_second is None
    log.seconds += [2.0, 4.0, 2.0]
    assert (log.seconds_per_step, log.tokens_per_second) == (2.0, 50.0)


def test_learning_rate() -> None:
    config = TrainConfig(steps=100, lr=1.0)
    rates = [loop.learning_rate(config, step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert loop.learning_rate(TrainConfig(steps=1, lr=1.0), 0) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_per_step": 300, "seqlen": 128}, "try 384"),
        ({"accumulate": 3}, "does not divide"),
        ({"lr": 0.0}, "positive"),
        ({"lr": math.nan}, "positive"),
    ],
)
def test_settings_that_do_not_fit(change: dict[str, int], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        TrainConfig(**change)


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:99", "cpu:x", ""])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(SetupError, match="--device"):
        loop.pick_device(name)


def test_a_gpu_is_asked_for_what_attention_gets_there():
    """Kernels take no float32: asking for it refused every training on a GPU."""
    with FakeTensorMode():
        command._check_supported(ModelConfig(), dataclasses.replace(CONFIG, device="cuda"), "fast")
        command._check_supported(ModelConfig(), CONFIG, "fast")
