"""Medians of interleaved GPU timings.

Every candidate is timed in every round, in an order of the round's own, so that clocks and
temperature drift over all alike and none profits from what always runs before it. A round queues
work behind a call that is not timed and a sleeping kernel: the host, whose first call after a pause
is slow, is ahead before the first event, so that what is measured is the GPU's time. Where a call
is shorter than its host side, ``graph_ms`` (replays of a CUDA graph) is the GPU's time and ``ms``
is not; both are reported.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from statistics import median

import torch

Call = Callable[[], object]
_BACKLOG_CYCLES = 10_000_000  # about 5 ms at 1.9 GHz


def _estimate(call: Call) -> float:
    """Milliseconds of one call, roughly."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _round_gpu(call: Call, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda._sleep(_BACKLOG_CYCLES)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def _round_cpu(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e3


def interleaved_ms(
    calls: Mapping[Hashable, Call], *, on_gpu: bool, rounds: int = 7, round_ms: float = 20.0
) -> dict[Hashable, float]:
    """Milliseconds a call, the median over rounds that visit every candidate in turn."""
    repeats = {}
    for name, call in calls.items():
        call()  # compilation and first-use costs
        one = min(_estimate(call) for _ in range(2)) if on_gpu else _round_cpu(call, 1)
        repeats[name] = max(1, min(200, round(round_ms / max(one, 1e-3))))
    samples: dict[Hashable, list[float]] = {name: [] for name in calls}
    one_round = _round_gpu if on_gpu else _round_cpu
    for n in range(rounds):
        for name in random.Random(n).sample(list(calls), len(calls)):
            samples[name].append(one_round(calls[name], repeats[name]))
    return {name: median(values) for name, values in samples.items()}


def captured(call: Call, repeats: int) -> Call | str:
    """Replays a CUDA graph of ``repeats`` calls; or says why there is none."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
    except Exception as error:
        torch.cuda.synchronize()
        return f"no CUDA graph: {type(error).__name__}: {error}".split("\n")[0]
    return graph.replay
