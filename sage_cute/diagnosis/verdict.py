"""What the figures mean, in words: a sentence for each finding, with the figures behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sage_cute.diagnosis.measure import OTHER_SMOOTHING, OUTLIER, QK_NORM, SIXTEEN_BIT
from sage_cute.policies import canonical, resolve

if TYPE_CHECKING:
    from sage_cute.diagnosis.report import Diagnosis, Layer

HOLDS = 0.1
"""Relative L2 of dQ and dK up to which a policy holds. The paper's policy has .05 to .07 in the
setting in which the paper's pre-training matched full precision (QK-norm), .09 in the worst layer
of SmolLM2-135M."""
AT_RISK = 0.3
"""From here on a gradient points elsewhere (cosine below .95). The paper's example of what fails, Q
and K with a standard deviation of 10, is at .68."""
MATTERS = 1.2  # a change of an error by less than this factor is not worth a sentence of advice
SINK = 0.2  # share of the probability mass on one key from which a head has a sink
SMALL_VALUE = 0.5  # of the mean norm of V

GRADIENTS = ("dq", "dk")
NAMES = {"out": "O", "dv": "dV", "dq": "dQ", "dk": "dK"}


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean; without ``statistics``, whose import takes as long as this package's."""
    every = list(values)
    return math.fsum(every) / len(every)


def largest(values: Iterable[float]) -> float:
    """The largest of them; NaN if one is NaN."""
    every = list(values)
    return math.nan if any(map(math.isnan, every)) else max(every)


def worst(layers: Sequence[Layer], column: str) -> tuple[float, str, Layer]:
    """The largest error of a layer's dQ or dK: the error, the tensor and the layer.

    NaN counts as infinite.
    """
    found = [
        (math.inf if math.isnan(error) else error, name, layer)
        for layer in layers
        for name in GRADIENTS
        for error in [layer.errors[column][name].layer_rel_l2]
    ]
    return max(found, key=lambda item: item[0])


def judge(diagnosis: Diagnosis) -> list[str]:
    """Sentences: the policies, then what would help, then what a diagnosis cannot say."""
    return [
        *_policies(diagnosis),
        *_worst_head(diagnosis),
        _smoothing(diagnosis),
        _qk_norm(diagnosis),
        *_sinks(diagnosis),
        *_outliers(diagnosis),
        *_unseen(diagnosis),
        f"Seen: {diagnosis.steps} step{'s' * (diagnosis.steps != 1)}, the weights as they are. "
        "Errors change in training, with the size of Q and K above all: diagnose again later.",
    ]


def level(error: float) -> str:
    """What an error of dQ or dK means: one of "holds", "watch", "at risk"."""
    return "holds" if error <= HOLDS else "watch" if error <= AT_RISK else "at risk"


def _policies(diagnosis: Diagnosis) -> list[str]:
    sentences, holding = [], []
    for policy in diagnosis.policies:
        error, tensor, layer = worst(diagnosis.layers, policy)
        if level(error) == "holds":
            holding.append(policy)
        cosine = layer.errors[policy][tensor].layer_cosine
        sentences.append(
            f"{policy}: {level(error)}. Worst layer {layer.name}: {NAMES[tensor]} off by "
            f"{short(error)} (cosine {cosine:.4f}); dQ over all layers "
            f"{short(_mean(diagnosis, policy, 'dq'))}, in 16 bits "
            f"{short(_mean(diagnosis, SIXTEEN_BIT, 'dq'))}."
        )
    if holding:
        sentences.append(f"Use {holding[0]}.")
    else:
        best = min(diagnosis.policies, key=lambda p: worst(diagnosis.layers, p)[0])
        sentences.append(
            f"No policy keeps dQ and dK of every layer within {short(HOLDS)}: the closest is "
            f"{best}. Bound Q and K first (QK-norm), or keep full precision in the worst layers."
        )
    return sentences


def _worst_head(diagnosis: Diagnosis) -> list[str]:
    """The head of the first policy that is furthest off, if it stands out."""
    first = diagnosis.policies[0]
    heads = [
        (error, layer.errors[first]["dq"].norm[head], head, layer)
        for layer in diagnosis.layers
        for head, error in enumerate(layer.errors[first]["dq"].rel_l2)
    ]
    error, norm, head, layer = max(heads, key=lambda item: item[0])
    if level(error) == "holds":
        return []
    return [
        f"Worst head of {first}: {layer.name} head {head}, dQ off by {short(error)}; it holds "
        f"{norm:.2%} of the layer's squared norm of dQ."
    ]


def _smoothing(diagnosis: Diagnosis) -> str:
    first = diagnosis.policies[0]
    now, other = (_mean(diagnosis, column, "dq") for column in (first, OTHER_SMOOTHING))
    offset = mean(x for layer in diagnosis.layers for x in layer.figures["k_offset"])
    smooth, raw = (now, other) if resolve(first).smooth_k else (other, now)
    advice = _compare(raw, smooth, "keep it on", "it changes little here", "keep it off here")
    return (
        f"K smoothing: {advice}. dQ of {first} is off by {short(smooth)} with it and by "
        f"{short(raw)} without; K's mean is {offset:.2f} times the rest of K (RMS)."
    )


def _compare(without: float, with_it: float, better: str, same: str, worse: str) -> str:
    """What a change of an error amounts to."""
    if not (math.isfinite(without) and math.isfinite(with_it)):
        return "cannot be told, errors are not finite"
    if without > MATTERS * with_it:
        return better
    return worse if with_it > MATTERS * without else same


def _qk_norm(diagnosis: Diagnosis) -> str:
    first = diagnosis.policies[0]
    now, bounded = (_mean(diagnosis, column, "dq") for column in (first, QK_NORM))
    layers = diagnosis.layers
    q, k = (mean(x for la in layers for x in la.figures[name]) for name in ("q_rms", "k_rms"))
    advice = _compare(now, bounded, "would help", "little to gain", "little to gain")
    return (
        f"QK-norm: {advice}. With every token of Q and K normalized, dQ of {first} would be off by "
        f"{short(bounded)} instead of {short(now)}; their RMS is {q:.2f} and {k:.2f} now."
    )


def _sinks(diagnosis: Diagnosis) -> list[str]:
    heads = [
        (mass, value)
        for layer in diagnosis.layers
        for mass, value in zip(layer.figures["sink_mass"], layer.figures["sink_value"], strict=True)
    ]
    sinks = [(mass, value) for mass, value in heads if mass >= SINK]
    if not sinks:
        return []
    value = mean(value for _, value in sinks)
    small = [
        policy
        for policy in diagnosis.policies
        if resolve(policy).v_scale != "per_token" and resolve(policy).pv == "int8"
    ]
    warning = ""
    if small and value < SMALL_VALUE:
        warning = f" {', '.join(small)} would round it away: its scales of V are not per token."
    return [
        f"Attention sinks: {len(sinks)} of {len(heads)} heads put {SINK:.0%} or more of the mass "
        f"on one key ({max(sinks)[0]:.0%} at most), whose value is {value:.2f} of the mean "
        f"norm.{warning}"
    ]


def _outliers(diagnosis: Diagnosis) -> list[str]:
    shares = {
        name: max(x for layer in diagnosis.layers for x in layer.figures[key])
        for name, key in (("Q", "q_outliers"), ("K without its mean", "k_outliers_smoothed"))
    }
    if not any(shares.values()):
        return []
    each = ", ".join(f"{share:.3%} of {name}" for name, share in shares.items())
    return [f"Outliers beyond {OUTLIER:.0f} times the RMS, in the worst head: {each}."]


def _unseen(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.skipped:
        return []
    name, reason = next(iter(diagnosis.skipped.items()))
    return [f"Not examined: {len(diagnosis.skipped)} calls, the first of them {name} ({reason})."]


def _mean(diagnosis: Diagnosis, column: str, tensor: str) -> float:
    return diagnosis.mean[column][tensor]


def short(value: float) -> str:
    """An error with four decimals."""
    return f"{value:.4f}".removeprefix("0") if value < 1 else f"{value:.2f}"


def mixes(policies: Sequence[str]) -> dict[str, str]:
    """The mix of each policy, spelled out."""
    return {policy: f"{canonical(policy)}: {resolve(policy)}" for policy in policies}
