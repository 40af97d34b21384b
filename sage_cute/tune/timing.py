"""Medians of interleaved timings of short GPU calls, each with a cold L2 cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)
_BACKLOG_CYCLES = 200_000  # about 0.1 ms: the host is ahead when the first event comes
_ROUND_MS = 5.0  # of each call in each round, its repetitions together


def interleaved_ms(
    calls: Mapping[K, Callable[[], object]], *, rounds: int, device: torch.device
) -> dict[K, list[float]]:
    """Milliseconds a call, one number a round; every round visits all calls in turn.

    On a GPU a number is the mean over repetitions, before each of which a buffer of twice the L2
    cache is overwritten, which is not timed: kernels find their inputs in memory, as in a model.
    Nothing allocates between the events. On the CPU, for what runs there, it is the wall clock.
    """
    once = _gpu_ms if device.type == "cuda" else _cpu_ms
    flush = _flusher(device)
    for call in calls.values():
        call()  # first-use costs
    repeats = {
        k: max(1, min(20, int(_ROUND_MS / max(once(c, flush, 1), 1e-3)))) for k, c in calls.items()
    }
    samples: dict[K, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            samples[key].append(once(call, flush, repeats[key]))
    return samples


def _flusher(device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return lambda: None
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(size, dtype=torch.uint8, device=device).zero_


def _gpu_ms(call: Callable[[], object], flush: Callable[[], object], repeats: int) -> float:
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in pairs:
        torch.cuda._sleep(_BACKLOG_CYCLES)
        flush()
        start.record()
        call()
        end.record()
    torch.cuda.current_stream().synchronize()
    return sum(start.elapsed_time(end) for start, end in pairs) / repeats


def _cpu_ms(call: Callable[[], object], flush: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e3
