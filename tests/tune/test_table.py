"""Keys and tables: what is found for a call, and what is left alone."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from sage_cute.compile.catalog import Call, problem_of
from sage_cute.config.space import FORWARD, SPACES
from sage_cute.errors import ShapeError
from sage_cute.tune import table
from sage_cute.tune.key import Gpu, Shape, TuneKey, bucket
from sage_cute.tune.table import Entry, lookup, record, tables

CALL = Call("fast", 128, "bfloat16", True)
SHAPE = Shape(2, 16, 4, 4000, 4096)
KEY = TuneKey.of("fwd", CALL, SHAPE)
PROBLEM = problem_of("fwd", CALL)
CONFIGS = FORWARD.configs(PROBLEM)
H100 = Gpu("NVIDIA H100 80GB HBM3", 132, "sm90")
OTHER = Gpu("NVIDIA B200", 148, "sm100")


def entry(key=KEY, config=CONFIGS[1], **changes) -> Entry:
    made = Entry(key, config, 1.0, 1.25, 17, table.sources_hash(), {"date": "2026-01-01"})
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("n", "expected"), [(1, 128), (128, 128), (129, 256), (4000, 4096), (4097, 8192), (0, 128)]
)
def test_buckets(n, expected) -> None:
    assert bucket(n) == expected


def test_a_key_holds_what_decides() -> None:
    assert KEY.gqa_ratio == 4 and KEY.sizes == (32, 4096, 4096)
    assert TuneKey.of("fwd", CALL, SHAPE._replace(seqlen_q=3000)) == KEY
    others = [
        TuneKey.of("bwd", CALL, SHAPE),
        *(
            TuneKey.of("fwd", CALL._replace(**change), SHAPE)
            for change in (
                {"policy": "accurate"},
                {"head_dim": 64},
                {"dtype": "float16"},
                {"is_causal": False},
            )
        ),
        *(
            TuneKey.of("fwd", CALL, SHAPE._replace(**change))
            for change in ({"kv_heads": 16}, {"batch": 8}, {"seqlen_q": 1}, {"seqlen_k": 9000})
        ),
    ]
    assert len({KEY, *others}) == 10
    assert [KEY.distance(o) for o in others] == [float("inf")] * 6 + [2, 5, 2]
    assert TuneKey.of("fwd", CALL._replace(policy="default"), SHAPE) == KEY  # the same mix
    with pytest.raises(ShapeError, match="16 query heads for 3"):
        TuneKey.of("fwd", CALL, SHAPE._replace(kv_heads=3))


def test_written_and_read_again(gpu) -> None:
    path = record(gpu, entry())
    assert path.name == "nvidia_h200_132sm.json" and path.parent == table.user_folder()
    (found,) = tables(users=True)
    assert found.gpu == gpu and found.entries == (entry(),) and not found.shipped
    assert tables(users=False) == []


def test_a_key_has_one_entry_and_others_stay(gpu) -> None:
    far = dataclasses.replace(KEY, seqlen_k=128)
    for one in (entry(), entry(far), entry(config=CONFIGS[2])):
        record(gpu, one)
    (found,) = tables(users=True)
    assert sorted(e.key.seqlen_k for e in found.entries) == [128, 4096]
    assert lookup(KEY, gpu, [found]).config == CONFIGS[2]
    assert lookup(far, gpu, [found]).config == CONFIGS[1]


def test_this_gpu_then_its_family_then_the_default(gpu) -> None:
    assert lookup(KEY, gpu, tables(users=True)) == (None, False, lookup(KEY, gpu, []).reason)
    record(OTHER, entry(config=CONFIGS[3]))
    assert lookup(KEY, gpu, tables(users=True)).config is None
    record(H100, entry(config=CONFIGS[2]))
    choice = lookup(KEY, gpu, tables(users=True))
    assert choice.config == CONFIGS[2] and not choice.exact and "the same family" in choice.reason
    record(gpu._replace(sm_count=66), entry(config=CONFIGS[4]))  # a part of a GPU is another GPU
    assert not lookup(KEY, gpu, tables(users=True)).exact
    record(gpu, entry())
    choice = lookup(KEY, gpu, tables(users=True))
    assert choice.config == CONFIGS[1] and choice.exact and "this GPU" in choice.reason


def test_the_nearest_sizes_of_this_gpu_before_the_same_ones_of_another(gpu) -> None:
    record(H100, entry())
    for length, config in ((1024, CONFIGS[2]), (65536, CONFIGS[3])):
        record(gpu, entry(dataclasses.replace(KEY, seqlen_k=length), config))
    choice = lookup(KEY, gpu, tables(users=True))
    assert choice.config == CONFIGS[2] and not choice.exact and "nearest" in choice.reason


def test_the_users_own_before_the_shipped(gpu, tmp_path) -> None:
    record(gpu, entry(config=CONFIGS[2]), table.SHIPPED / "nvidia_h200.json")
    (shipped,) = tables(users=True)
    assert shipped.shipped and lookup(KEY, gpu, [shipped]).config == CONFIGS[2]
    record(gpu, entry(config=CONFIGS[3]))
    assert lookup(KEY, gpu, tables(users=True)).config == CONFIGS[3]
    assert lookup(KEY, gpu, tables(users=False)).config == CONFIGS[2]


def test_entries_of_other_templates_are_as_if_they_were_not_there(gpu) -> None:
    path = record(gpu, entry(sources="older"))
    (found,) = tables(users=True)
    assert found.entries == ()
    record(gpu, entry(dataclasses.replace(KEY, head_dim=64)))
    assert len(json.loads(path.read_text())["entries"]) == 1  # and go when something is written


@pytest.mark.parametrize(
    ("change", "word"),
    [({"exp_fma_of_8": 3}, "other ones"), ({"num_stages": 9}, "shared memory")],
)
def test_an_entry_by_hand_that_may_not_be_used_is_not(gpu, caplog, change, word) -> None:
    record(gpu, entry(config=dataclasses.replace(CONFIGS[1], **change)))
    assert lookup(KEY, gpu, tables(users=True)).config is None
    assert any(word in r.message for r in caplog.records if r.levelno == logging.WARNING)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99}', "[1, 2", '{"format": 1, "gpu": 3}'])
def test_a_broken_table_is_ignored_with_one_warning(gpu, caplog, text) -> None:
    path = table.user_path(gpu)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    for _ in range(3):
        assert tables(users=True) == []
    assert len([r for r in caplog.records if "is ignored" in r.message]) == 1
    record(gpu, entry())  # and is replaced
    assert lookup(KEY, gpu, tables(users=True)).config == CONFIGS[1]


SHIPPED = sorted((Path(table.__file__).parent / "tables").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_can_be_used(path) -> None:
    shipped = table.read(path)
    assert shipped is not None and path.stem == shipped.gpu.name.replace(" ", "_").lower()
    assert len({entry.key for entry in shipped.entries}) == len(shipped.entries) > 0
    for found in shipped.entries:
        problem = problem_of(found.key.direction, found.key.call)
        assert not SPACES[found.key.direction].why_not(problem, found.config)
        assert "--out sage_cute/tune/tables/" in found.made["command"]  # no path of a machine
