"""Text, what is held out of it, and the batches of a seed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sage_cute.training import data
from sage_cute.training.errors import SetupError

TEXT = b"the quick brown fox jumps over the lazy dog\n" * 50


def test_default_is_the_standard_library_without_its_tests() -> None:
    corpus = data.load(None, seqlen=256)
    assert "standard library" in corpus.source
    assert len(corpus.train) > 1 << 20
    assert torch.equal(corpus.train, data.load(None, seqlen=256).train)
    text = bytes(corpus.train.tolist()) + bytes(corpus.held_out.tolist())
    assert b"def " in text and b"import " in text
    root = Path(os.__file__).parent
    names = {path.relative_to(root).parts for path in data._walk(root)}
    assert ("os.py",) in names
    assert not {part for parts in names for part in parts[:-1]} & {"site-packages", "test", "tests"}


def test_held_out_text_is_never_trained_on(tmp_path: Path) -> None:
    pieces = [bytes([ord("A") + i]) * 100 for i in range(20)]
    (tmp_path / "text").write_bytes(b"".join(pieces))
    corpus = data.load(tmp_path / "text", seqlen=16)
    assert bytes(corpus.held_out.tolist()) == pieces[9] + pieces[19]
    assert not set(corpus.train.tolist()) & set(corpus.held_out.tolist())
    assert len(corpus.train) + len(corpus.held_out) == 2000


def test_folder_is_read_in_order_and_recursively_and_only_its_text(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": TEXT,
        "a/deep/first.md": b"FIRST" + TEXT,
        "image.png": b"\x89PNG\0\0" + TEXT,
        ".hidden": b"SECRET" * 100,
        ".git/config": b"SECRET" * 100,
        "empty.txt": b"",
        "latin-1.txt": b"caf\xe9 " * 100,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    text, files = data._read_folder(tmp_path, suffix="", limit=1 << 20)
    # A folder's own files come before those of the folders in it.
    assert text == b"\n".join((TEXT, b"caf\xe9 " * 100, b"FIRST" + TEXT))
    assert files == 3
    assert data.load(tmp_path, seqlen=64).source.endswith("(3 text files)")


def test_folder_stops_at_the_limit(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(TEXT)
    text, files = data._read_folder(tmp_path, suffix="", limit=len(TEXT) + 10)
    assert (text, files) == (TEXT + b"\n" + TEXT[:10], 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.touch(), "empty"),
        (lambda path: path.mkdir(), "no files"),
        (lambda path: path.write_bytes(b"ELF\0\1\2" * 500), "binary"),
        (lambda path: path.write_bytes(TEXT[:100]), "need at least"),
        (lambda path: os.mkfifo(path), "neither a file nor a folder"),
    ],
    ids=["missing", "empty", "empty-folder", "binary", "short", "fifo"],
)
def test_data_that_will_not_do(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "data"
    make(path)  # type: ignore[operator]
    with pytest.raises(SetupError, match=message) as error:
        data.load(path, seqlen=256)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_folder_of_binaries(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.bin").write_bytes(bytes(1000))
    with pytest.raises(SetupError, match="none of its 3 files is readable text"):
        data.load(tmp_path, seqlen=16)


def test_shortest_text_that_is_taken_fills_a_batch(tmp_path: Path) -> None:
    seqlen = 33
    for size in range(300, 500):
        (tmp_path / "text").write_bytes(b"x" * size)
        try:
            corpus = data.load(tmp_path / "text", seqlen=seqlen)
        except SetupError:
            continue
        batch = next(data.batches(corpus.train, sequences=4, seqlen=seqlen, seed=0))
        assert batch.shape == (4, seqlen + 1)
        assert data.windows(corpus.held_out, sequences=4, seqlen=seqlen).shape == batch.shape
        return
    pytest.fail("no length was taken")


def test_batches_are_those_of_the_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)

    def first(seed: int) -> list[torch.Tensor]:
        stream = data.batches(text, sequences=3, seqlen=10, seed=seed)
        return [next(stream) for _ in range(5)]

    for a, b in zip(first(1), first(1), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(torch.stack(first(1)), torch.stack(first(2)))
    assert not torch.equal(first(1)[0], first(1)[1])
    # Windows of consecutive bytes: here each is one more than the last.
    assert (first(1)[0].diff(dim=1) == 1).all()
    assert first(1)[0].dtype == torch.int64


def test_windows_reach_from_end_to_end() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    found = data.windows(text, sequences=4, seqlen=9)
    assert found[0, 0] == 0 and found[-1, -1] == 99
