"""Chooses the tile configuration of a call: once for each set of sizes, a dictionary after that."""

from __future__ import annotations

import datetime
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from sage_cute import env
from sage_cute.compile.catalog import Call, problem_of
from sage_cute.compile.kernel import sources_hash, toolchain
from sage_cute.config.space import SPACES
from sage_cute.errors import TuningError
from sage_cute.tune import table
from sage_cute.tune.key import Gpu, Shape, TuneKey, gpu_of
from sage_cute.tune.table import Choice, Entry
from sage_cute.tune.tuner import Bench, search

log = logging.getLogger("sage_cute")
_LOCK = threading.RLock()
_LOCK_SECONDS = 1800.0  # while another process tunes the same GPU
_chosen: dict[tuple[Any, ...], Any] = {}
_mode: env.TuneMode | None = None


def set_mode(mode: env.TuneMode | None) -> None:
    """Sets where configurations come from in this process; None: ``SAGE_CUTE_TUNE``, again."""
    global _mode
    with _LOCK:
        _mode = mode
        _chosen.clear()


def tile_config(direction: str, call: Call, shape: Shape, device: int) -> Any:
    """The configuration of a call; None for the default one. A dictionary look-up but at first.

    Nothing is measured or waited for while a CUDA graph is being captured.

    Args:
        direction: ``"fwd"`` or ``"bwd"``.
        call: policy, head_dim, dtype, mask.
        shape: its sizes.
        device: index of the GPU.
    """
    key = (direction, call, shape, device)
    try:
        return _chosen[key]
    except KeyError:
        return _first(key, direction, call, shape, device)


def tile_config_of(direction: str, policy: str, q: Tensor, k: Tensor, is_causal: bool) -> Any:
    """:func:`tile_config` of tensors (batch, heads, seqlen_q, head_dim) and (batch, kv_heads, ...).

    ``q`` has the dtype of the output.
    """
    if q.numel() == 0 or k.numel() == 0:
        return None  # no kernel runs
    batch, heads, seqlen_q, head_dim = q.shape
    call = Call(policy, head_dim, str(q.dtype).removeprefix("torch."), is_causal)
    shape = Shape(batch, heads, k.shape[1], seqlen_q, k.shape[2])
    return tile_config(direction, call, shape, q.device.index)


def _first(key: tuple[Any, ...], direction: str, call: Call, shape: Shape, device: int) -> Any:
    with _LOCK:
        if key in _chosen:
            return _chosen[key]
        mode, gpu = _mode or env.tune_mode(), gpu_of(device)
        tune_key = TuneKey.of(direction, call, shape)
        _trace(direction, call, shape)
        choice = choose(tune_key, gpu, mode)
        if mode == "on-miss" and not choice.exact:
            if _capturing():
                log.info("%s: not tuned while a CUDA graph is captured", tune_key)
                return choice.config  # and not remembered: a later call may tune
            try:
                choice = _tune_on_miss(tune_key, gpu, shape, device)
            except TuningError as error:
                log.warning("%s: not tuned: %s", tune_key, error)
        log.info("%s: %s", tune_key, choice.reason)
        _chosen[key] = choice.config
        return choice.config


def choose(key: TuneKey, gpu: Gpu, mode: env.TuneMode) -> Choice:
    """What the tables say: the shipped ones only, if the mode is ``off``."""
    return table.lookup(key, gpu, table.tables(users=mode != "off"))


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _trace(direction: str, call: Call, shape: Shape) -> None:
    """Appends a call to the file that ``SAGE_CUTE_TRACE`` names, for ``sage-cute tune``."""
    path = env.trace_file()
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps({"direction": direction, **call._asdict(), **shape._asdict()}))
            file.write("\n")


def make_bench(direction: str, call: Call, shape: Shape, device: int) -> Bench[Any]:
    """What to measure on; tests put a simulated GPU here."""
    from sage_cute.tune.gpu import BENCHES

    return BENCHES[direction](call, shape, torch.device("cuda", device))


def _tune_on_miss(key: TuneKey, gpu: Gpu, shape: Shape, device: int) -> Choice:
    path = table.user_path(gpu)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS, mode=0o600)
        with lock:
            choice = choose(key, gpu, "on-miss")  # another process may have been faster
            if not choice.exact:
                entry = tune(key, gpu, shape, device)
                table.record(gpu, entry)
                choice = Choice(entry.config, True, f"tuned now: {entry.ms:.3g} ms")
    except (OSError, Timeout) as error:
        raise TuningError(f"{path} cannot be used: {error}") from error
    return choice


def tune(
    key: TuneKey,
    gpu: Gpu,
    shape: Shape,
    device: int,
    *,
    exhaustive: bool = False,
    command: str = "on-miss",
    on_progress: Callable[[int, int], None] = lambda done, known: None,
) -> Entry[Any]:
    """Measures; starts at what a table has for this GPU, which stays if nothing is faster.

    Args:
        key: what to tune.
        gpu: on which the process runs.
        shape: the sizes to measure with: of ``key``'s buckets.
        device: index of the GPU.
        exhaustive: every configuration instead of steps along single axes.
        command: recorded with the result.
        on_progress: called with the numbers of candidates done and known.

    Raises:
        TuningError: the default configuration is wrong, or there is no room.
    """
    before = choose(key, gpu, "lookup")
    bench = make_bench(key.direction, key.call, shape, device)
    found = search(
        SPACES[key.direction],
        problem_of(key.direction, key.call),
        bench,
        incumbent=before.config if before.exact else None,
        exhaustive=exhaustive,
        on_progress=on_progress,
    )
    del bench
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # scratch of another stream, which no one else can use
    for config, reason in found.rejected.items():
        log.debug("%s: %s is out: %s", key, config, reason)
    made = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
        "shape": shape._asdict(),
        "toolchain": toolchain(),
    }
    log.info("%s: %d configurations tried, %.3f x as fast", key, found.tried, found.gain)
    return Entry(key, found.config, found.ms, found.default_ms, found.tried, sources_hash(), made)
