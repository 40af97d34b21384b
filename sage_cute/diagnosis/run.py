"""``sage_cute.diagnose``: steps of a user's model under the recorder."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sage_cute._version import __version__
from sage_cute.diagnosis.measure import Measurement, columns_of, measure
from sage_cute.diagnosis.record import Call, Recorder
from sage_cute.diagnosis.report import Diagnosis, Layer
from sage_cute.errors import DiagnosisError

Loss = Callable[[Any], Tensor]
POLICIES = ("default", "accurate", "sagebwd")


def diagnose(
    model: nn.Module,
    *batches: Any,
    loss: Loss | None = None,
    policies: Sequence[str] = POLICIES,
    sequences: int = 2,
) -> Diagnosis:
    """Whether INT8 attention will hold for a model: its attention calls beside full precision.

    Runs a forward and a backward of the model for each batch, unchanged, and hooks every call of
    ``torch.ops.sage.attn`` (also through :mod:`sage_cute`) and of torch's
    ``scaled_dot_product_attention``, so that a model can be judged before it is switched. When the
    gradient of a call's output arrives, the call's q, k, v and that gradient go through float64
    attention and through every policy, and only sums are kept. Attention by other functions
    (flex_attention, flash_attn, explicit softmax) is not seen.

    The parameters, their ``grad`` and the random state are left as they were; buffers that a
    training step changes (BatchNorm) change. Compiled models run eagerly for this.

    Cost: memory of the model's own step, plus q and k of calls that keep their codes only, plus
    float64 matrices of (query heads of a key head, 512, seqlen_k). Time: float64 attention twice
    and one attention for each policy and three more, for each head of the examined sequences. A
    policy runs where the model is if ``sage::attn`` can run it there, else by the reference on the
    CPU (``Layer.evaluated_on`` says which).

    Args:
        model: any module; it should be in the mode in which it trains. Dropout inside attention
            is not supported.
        batches: one or a few; each what the model is called with: a mapping as keyword arguments,
            a tuple or list as positional ones, anything else as the only argument.
        loss: makes a scalar of what the model returns; None: the model returns a scalar tensor,
            or an object or mapping with a ``loss`` (as those of transformers do).
        policies: policy strings to compare; the first also tells what K smoothing and QK-norm are
            worth. The verdict recommends the first that holds.
        sequences: how many sequences of each batch to examine.

    Returns:
        Figures of every layer and head: ``print`` it, ``write_json``, ``write_heatmap``.

    Raises:
        DiagnosisError: no batch, no loss, or no attention call with a gradient.
        PolicyError: unknown policy.

    Source of the measures: SageBwd (arXiv 2603.02170), sections 4 and 5, appendix C.
    """
    if not batches:
        raise DiagnosisError("diagnose needs a batch: diagnose(model, batch)")
    if not policies:
        raise DiagnosisError("diagnose needs a policy to compare, such as policies=['default']")
    if sequences < 1:
        raise DiagnosisError(f"sequences={sequences}: examine at least 1")
    columns = columns_of(policies)
    measurements: dict[str, Measurement] = {}
    measuring = 0.0

    def on_call(call: Call) -> None:
        nonlocal measuring
        start = time.perf_counter()
        into = measurements.setdefault(call.name, Measurement(call.without_tensors(), columns))
        measure(into, call, columns, sequences)
        measuring += time.perf_counter() - start

    start = time.perf_counter()
    recorder = Recorder(model, on_call)
    losses = []
    with _untouched(model), torch.compiler.set_stance("force_eager"):
        for batch in batches:
            with recorder.step():
                value = _loss_of(_forward(model, batch), loss)
                # From the edge, not from the tensor: as an overridable function of a tensor the
                # backward would run with the recorder off, which then missed what reentrant
                # checkpointing computes again.
                edge = torch.autograd.graph.get_gradient_edge(value)
                torch.autograd.backward(edge, torch.ones_like(value))
            losses.append(value.item())
    if not measurements:
        skipped = "; ".join(f"{name}: {why}" for name, why in recorder.skipped.items())
        raise DiagnosisError(
            "no attention call that can be examined got a gradient"
            + (f" ({skipped})" if skipped else "")
            + ": the model must call sage_cute.attention or scaled_dot_product_attention, with "
            "gradients on"
        )
    seconds = time.perf_counter() - start
    return Diagnosis(
        model=type(model).__name__,
        policies=tuple(dict.fromkeys(policies)),
        layers=[Layer.of(measurements[name]) for name in recorder.in_order(measurements)],
        skipped=recorder.skipped,
        steps=len(batches),
        loss=sum(losses) / len(losses),
        seconds=seconds,
        step_seconds=seconds - measuring,
        versions={
            "sage_cute": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _loss_of(output: Any, loss: Loss | None) -> Tensor:
    if loss is not None:
        value: Any = loss(output)
    elif isinstance(output, Mapping):
        value = output.get("loss")
    else:
        value = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        what = "loss(...)" if loss is not None else "the model"
        raise DiagnosisError(
            f"{what} returned no scalar loss with a gradient: pass loss=, a function that makes "
            "one of what the model returns"
        )
    return value


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Gradients and random state as before, whatever happens inside."""
    grads = [(p, p.grad) for p in model.parameters()]
    devices = sorted({p.device.index or 0 for p, _ in grads if p.device.type == "cuda"})
    for parameter, _ in grads:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
