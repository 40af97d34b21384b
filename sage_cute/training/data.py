"""Text as bytes: where it comes from, what is held out, and the batches of a seed."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sage_cute.training.errors import SetupError

VOCABULARY = 256  # a token is a byte

STDLIB_LIMIT = 16 << 20  # more than the standard library has: a guard, not a choice
USER_LIMIT = 1 << 30  # the text is held in memory, with one copy while it is joined

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "node_modules", "site-packages", "test", "tests"}
)
_PIECES = 20  # the text is cut into 20 pieces ...
_HELD_OUT = (9, 19)  # ... of which the 10th and the 20th are never trained on


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text to train on and text held out, as uint8 tensors of shape (bytes,)."""

    train: Tensor
    held_out: Tensor
    source: str

    def __str__(self) -> str:
        return f"{self.source}: {len(self.train):,} bytes, {len(self.held_out):,} held out"


def load(path: Path | None, *, seqlen: int) -> Corpus:
    """Reads text and holds a tenth of it out, always the same tenth.

    Args:
        path: A text file, or a folder whose text files are read recursively (hidden ones, binary
            ones and files that may not be read are passed over). None: the Python standard
            library's own source, which every machine has.
        seqlen: Tokens in a sequence; both parts hold at least one sequence and its next byte.

    Raises:
        SetupError: ``path`` is missing, holds no text, or not enough of it.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        text, files = _read_folder(root, suffix=".py", limit=STDLIB_LIMIT)
        source = f"Python's standard library ({files} files of {root})"
    elif path.is_dir():
        text, files = _read_folder(path, suffix="", limit=USER_LIMIT)
        source = f"{path} ({files} text file{'s' if files != 1 else ''})"
    else:
        text, source = _read_file(path), str(path)

    needed = _PIECES // len(_HELD_OUT) * (seqlen + 1) + _PIECES
    if len(text) < needed:
        raise SetupError(
            f"{source}: {len(text):,} bytes of text; sequences of {seqlen} need at least "
            f"{needed:,}: give more with --data, or lower --seqlen"
        )
    return Corpus(*_split(text), source)


def batches(text: Tensor, *, sequences: int, seqlen: int, seed: int) -> Iterator[Tensor]:
    """Endless random windows of ``text``; the same seed gives the same ones.

    Args:
        text: (bytes,) uint8, longer than ``seqlen``.
        sequences: Windows in a batch.
        seqlen: Tokens to predict in a window.
        seed: Of the windows' places.

    Yields:
        (sequences, seqlen + 1) int64: the inputs and, one further, their targets.
    """
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(seqlen + 1)
    while True:
        starts = torch.randint(len(text) - seqlen, (sequences, 1), generator=generator)
        yield text[starts + places].long()


def windows(text: Tensor, *, sequences: int, seqlen: int) -> Tensor:
    """Evenly spaced windows of ``text``: (sequences, seqlen + 1) int64."""
    starts = torch.linspace(0, len(text) - seqlen - 1, sequences).long()
    return text[starts[:, None] + torch.arange(seqlen + 1)].long()


def _split(text: bytes) -> tuple[Tensor, Tensor]:
    # Pieces from all over the text, not its tail: the files of a folder differ from A to Z.
    every = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    pieces = every.tensor_split(_PIECES)
    train = torch.cat([piece for i, piece in enumerate(pieces) if i not in _HELD_OUT])
    return train, torch.cat([pieces[i] for i in _HELD_OUT])


def _read_file(path: Path) -> bytes:
    if not path.is_file():
        reason = "neither a file nor a folder" if path.exists() else "there is no such file"
        raise SetupError(f"{path}: {reason}")
    try:
        with path.open("rb") as file:
            content = file.read(USER_LIMIT)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from None
    if not content:
        raise SetupError(f"{path}: the file is empty")
    if not _is_text(content):
        raise SetupError(f"{path}: binary, not text (it holds zero bytes)")
    return content


def _read_folder(root: Path, *, suffix: str, limit: int) -> tuple[bytes, int]:
    """The text of a folder's files in the order of their names, and how many there were."""
    contents: list[bytes] = []
    size = seen = 0
    for path in _walk(root):
        if not path.name.endswith(suffix):
            continue
        seen += 1
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if content and _is_text(content):
            contents.append(content[: limit - size])
            size += len(contents[-1])
        if size >= limit:
            break
    if not contents:
        found = f"none of its {seen} files is" if seen else "no files, so nothing that is"
        raise SetupError(f"{root}: {found} readable text; name text with --data")
    return b"\n".join(contents), len(contents)


def _walk(root: Path) -> Iterator[Path]:
    """Regular files below ``root``, sorted, without hidden ones and folders of tests."""
    for folder, folders, names in os.walk(root):
        # Sorted in place: os.walk goes down in this order, on every file system the same.
        folders[:] = sorted(f for f in folders if f[0] != "." and f not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            if name[0] != "." and path.is_file():
                yield path


def _is_text(content: bytes) -> bool:
    return b"\0" not in content
