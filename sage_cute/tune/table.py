"""Tables of tuned configurations: a JSON file a GPU, shipped or the user's own."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from sage_cute import env
from sage_cute.compile.cache import write_whole
from sage_cute.compile.catalog import problem_of
from sage_cute.compile.kernel import sources_hash
from sage_cute.config.bwd import BwdTileConfig
from sage_cute.config.space import SPACES
from sage_cute.config.tile_config import FwdTileConfig
from sage_cute.tune.key import Gpu, TuneKey

log = logging.getLogger("sage_cute")
FORMAT = 1
SHIPPED = Path(__file__).with_name("tables")
CONFIGS: dict[str, type[Any]] = {"fwd": FwdTileConfig, "bwd": BwdTileConfig}
C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class Entry(Generic[C]):
    """The configuration that was the best for a key, and what was measured."""

    key: TuneKey
    config: C
    ms: float  # a call, the median
    default_ms: float  # of the default configuration, in the same rounds
    tried: int  # configurations that were timed
    sources: str  # hash of the templates that were measured: others may prefer something else
    made: dict[str, Any]  # date, versions, command

    def asdict(self) -> dict[str, Any]:
        """Field names and values, JSON-able."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Entry[Any]:
        """The inverse of :meth:`asdict`; TypeError or KeyError if fields are other ones."""
        key = TuneKey(**values["key"])
        return cls(**{**values, "key": key, "config": CONFIGS[key.direction](**values["config"])})


class Table(NamedTuple):
    """The entries of one GPU."""

    path: Path
    gpu: Gpu
    entries: tuple[Entry[Any], ...]

    @property
    def shipped(self) -> bool:
        """Whether it came with the package."""
        return self.path.parent == SHIPPED


class Choice(NamedTuple):
    """A configuration and why it was taken; None is the default one."""

    config: Any | None
    exact: bool  # of this GPU and these buckets
    reason: str


def read(path: Path) -> Table | None:
    """A table; None, and a warning, if the file cannot be read as one."""
    stamp = path.stat()
    return _read(path, stamp.st_mtime_ns, stamp.st_size)


@functools.lru_cache(maxsize=64)
def _read(path: Path, mtime_ns: int, size: int) -> Table | None:
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, this version reads {FORMAT}")
        entries = tuple(_entries(document["entries"]))
        return Table(path, Gpu(**document["gpu"]), entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("tuning table %s is ignored: %s: %s", path, type(error).__name__, error)
        return None


def _entries(rows: Iterable[dict[str, Any]]) -> Iterator[Entry[Any]]:
    """Entries whose fields are those of this version: others are of other templates."""
    for row in rows:
        if row["sources"] == sources_hash():
            yield Entry.from_dict(row)


def user_folder() -> Path:
    """Where the user's tables are."""
    return env.cache_dir() / "tables"


def user_path(gpu: Gpu) -> Path:
    """The user's table of a GPU, which need not exist."""
    name = re.sub(r"\W+", "_", gpu.name).strip("_").lower()
    return user_folder() / f"{name}_{gpu.sm_count}sm.json"


def tables(*, users: bool) -> list[Table]:
    """Every readable table: the user's own first, then the shipped ones."""
    folders = ([user_folder()] if users else []) + [SHIPPED]
    read_all = (read(path) for folder in folders for path in sorted(folder.glob("*.json")))
    return [table for table in read_all if table is not None]


def lookup(key: TuneKey, gpu: Gpu, among: Sequence[Table]) -> Choice:
    """The configuration for a key: of this GPU, else of its family, else the default one.

    Within each, the entry of the nearest sizes, the first table's if several are as near.
    """
    same = [t for t in among if (t.gpu.name, t.gpu.sm_count) == (gpu.name, gpu.sm_count)]
    family = [t for t in among if t not in same and t.gpu.family == gpu.family]
    for group, whose in ((same, "this GPU"), (family, "the same family")):
        found = [(key.distance(e.key), i, e, t) for i, t in enumerate(group) for e in t.entries]
        for distance, _, entry, table in sorted(found, key=lambda item: item[:2]):
            if distance == float("inf"):
                break
            if not _usable(entry, table):
                continue
            nearest = f", nearest sizes ({entry.key})" if distance else ""
            reason = f"{table.path.name} of {table.gpu.name}, {whose}{nearest}"
            return Choice(entry.config, whose == "this GPU" and not distance, reason)
    return Choice(None, False, "no table covers it: the default configuration")


@functools.cache
def _why_not(key: TuneKey, config: Any) -> str:
    space = SPACES[key.direction]
    return space.why_not(problem_of(key.direction, key.call), config)


def _usable(entry: Entry[Any], table: Table) -> bool:
    """Whether an entry may be used: it must run, and leave every result what it is."""
    reason = _why_not(entry.key, entry.config)
    if reason:
        log.warning("entry %s of %s is ignored: %s", entry.key, table.path, reason)
    return not reason


def record(gpu: Gpu, entry: Entry[Any], path: Path | None = None) -> Path:
    """Adds an entry to a table, replacing that of its key; entries of other templates go.

    The caller holds the lock of the file, if others may write.

    Returns:
        The path, by default that of the user's table of the GPU.
    """
    path = path or user_path(gpu)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    old = read(path) if path.exists() else None
    kept = [e for e in old.entries if e.key != entry.key] if old and old.gpu == gpu else []
    rows = sorted((e.asdict() for e in (*kept, entry)), key=lambda row: str(sorted_key(row)))
    document = {"format": FORMAT, "gpu": gpu._asdict(), "entries": rows}
    write_whole(path, (json.dumps(document, indent=1) + "\n").encode())
    return path


def sorted_key(row: dict[str, Any]) -> list[tuple[str, str]]:
    """An order of entries that a diff can be read by."""
    return [(name, f"{value:>12}") for name, value in row["key"].items()]
