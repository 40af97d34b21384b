"""Where a call's configuration comes from: modes, capture, other processes, traces."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from filelock import FileLock
from simulated import SimulatedBench

from sage_cute import env
from sage_cute.compile.catalog import Call, problem_of
from sage_cute.config.space import FORWARD
from sage_cute.errors import SettingError
from sage_cute.tune import select, table
from sage_cute.tune.key import Shape, TuneKey
from sage_cute.tune.select import tile_config
from sage_cute.tune.table import Entry

CALL = Call("fast", 128, "bfloat16", True)
SHAPE = Shape(1, 8, 8, 1000, 1000)
KEY = TuneKey.of("fwd", CALL, SHAPE)
DEFAULT = FORWARD.default(problem_of("fwd", CALL))


def cost(config) -> float:
    """Prefers two warpgroups, and another grid than the default one."""
    same = config.persistent == DEFAULT.persistent
    return 1.0 + 0.2 * abs(config.num_consumer_wgs - 2) + 0.3 * same


@pytest.fixture
def benches(monkeypatch) -> list[SimulatedBench]:
    """Every bench that was made."""
    made: list[SimulatedBench] = []

    def make(direction, call, shape, device):
        made.append(SimulatedBench(cost))
        return made[-1]

    monkeypatch.setattr(select, "make_bench", make)
    return made


def test_lookup_is_the_default_mode_and_measures_nothing(benches) -> None:
    assert env.tune_mode() == "lookup"
    assert tile_config("fwd", CALL, SHAPE, 0) is None and not benches


def test_on_miss_tunes_once_and_records(benches, monkeypatch, gpu) -> None:
    monkeypatch.setenv("SAGE_CUTE_TUNE", "on-miss")
    config = tile_config("fwd", CALL, SHAPE, 0)
    assert cost(config) < cost(DEFAULT) and len(benches) == 1
    assert tile_config("fwd", CALL, SHAPE, 0) == config
    # Other sizes of the same buckets, and another process: from the table.
    assert tile_config("fwd", CALL, SHAPE._replace(seqlen_q=513), 0) == config
    select._chosen.clear()
    assert tile_config("fwd", CALL, SHAPE, 0) == config and len(benches) == 1
    tile_config("fwd", CALL, SHAPE._replace(seqlen_k=5000), 0)
    assert len(benches) == 2
    (found,) = table.tables(users=True)
    assert found.gpu == gpu and len(found.entries) == 2
    one = found.entries[0]
    assert one.made["command"] == "on-miss" and one.made["toolchain"]["tvm_ffi"] and one.tried > 1
    # What was tuned is used in the default mode too, and not with ``off``.
    for mode, expected in (("lookup", config), ("off", None)):
        monkeypatch.setenv("SAGE_CUTE_TUNE", mode)
        select._chosen.clear()
        assert tile_config("fwd", CALL, SHAPE, 0) == expected
    assert len(benches) == 2


def test_nothing_is_measured_during_capture_and_later_it_is(benches, monkeypatch) -> None:
    select.set_mode("on-miss")
    monkeypatch.setattr(select, "_capturing", lambda: True)
    assert tile_config("fwd", CALL, SHAPE, 0) is None and not benches
    monkeypatch.setattr(select, "_capturing", lambda: False)
    assert tile_config("fwd", CALL, SHAPE, 0) is not None and len(benches) == 1


def test_a_failed_tuning_is_the_default_one_with_one_warning(benches, monkeypatch, caplog) -> None:
    select.set_mode("on-miss")
    monkeypatch.setattr(
        select, "make_bench", lambda *a: SimulatedBench(cost, reference="out is off by 1")
    )
    for _ in range(3):
        assert tile_config("fwd", CALL, SHAPE, 0) is None
    found = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(found) == 1 and "out is off by 1" in found[0]
    assert table.tables(users=True) == []


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(
    benches, monkeypatch, tmp_path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAGE_CUTE_CACHE_DIR", str(tmp_path / "file"))
    select.set_mode("on-miss")
    assert tile_config("fwd", CALL, SHAPE, 0) is None


def test_threads_tune_a_key_once(benches) -> None:
    select.set_mode("on-miss")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(tile_config("fwd", CALL, SHAPE, 0)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(benches) == 1 and len(set(found)) == 1 and len(found) == 4


def test_what_another_process_has_tuned_meanwhile_is_taken(benches, gpu) -> None:
    select.set_mode("on-miss")
    tile_config("fwd", CALL, SHAPE._replace(seqlen_k=9000), 0)  # makes the table
    path = table.user_path(gpu)
    config = FORWARD.configs(problem_of("fwd", CALL))[5]
    entry = Entry(KEY, config, 1.0, 1.1, 3, table.sources_hash(), {})
    found = []
    thread = threading.Thread(target=lambda: found.append(tile_config("fwd", CALL, SHAPE, 0)))
    with FileLock(path.with_suffix(".lock")):
        thread.start()
        thread.join(0.3)
        assert not found  # it waits
        table.record(gpu, entry)
    thread.join()
    assert found == [config] and len(benches) == 1


def test_said_once_and_not_on_the_hot_path(benches, caplog) -> None:
    caplog.set_level(logging.INFO, logger="sage_cute")
    for _ in range(5):
        tile_config("fwd", CALL, SHAPE, 0)
    assert len(caplog.records) == 1 and "the default configuration" in caplog.records[0].message


def test_a_mode_that_is_none_says_so(monkeypatch) -> None:
    monkeypatch.setenv("SAGE_CUTE_TUNE", "always")
    with pytest.raises(SettingError, match="off, lookup, on-miss"):
        tile_config("fwd", CALL, SHAPE, 0)


def test_calls_are_traced_once_each(monkeypatch, tmp_path) -> None:
    path = tmp_path / "trace"
    monkeypatch.setenv("SAGE_CUTE_TRACE", str(path))
    for shape in (SHAPE, SHAPE, SHAPE._replace(batch=2)):
        tile_config("fwd", CALL, shape, 0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"direction": "fwd", **CALL._asdict(), **SHAPE._asdict()}
    assert [row["batch"] for row in rows] == [1, 2]
