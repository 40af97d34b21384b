"""The tables of README.md and docs/evidence.md, made from result files: ``make report``.

    python -m bench.readme            writes them
    python -m bench.readme --check    fails if a file holds something else

Between ``<!-- NAME: bench.MODULE -->`` and ``<!-- end -->`` stands what the newest result files of
that module say, with device, versions, date and command; where there is none, what to run. What is
supported comes from ``sage_cute.limits``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import accuracy, pretrain, real_model
from bench import report as speed
from bench.paper import intermediates, magnitudes, sigma, smoothing, throughput
from bench.result_files import RESULTS, source
from sage_cute import limits

ROOT = Path(__file__).resolve().parents[1]
FILES = (ROOT / "README.md", ROOT / "docs" / "evidence.md")
Document = dict[str, Any]
_MARKER = re.compile(r"(<!-- ([\w-]+): ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _with_source(table: Callable[[Document], str]) -> Callable[[Document], str]:
    return lambda document: f"{table(document)}\n\n{source(document['meta'])}"


def _sized(table: Callable[[Document], str]) -> Callable[[Document], str]:
    def text(document: Document) -> str:
        size = document["meta"]["size"]
        shape = [1, size["heads"], size["seqlen"], size["head_dim"]]
        return (
            f"{table(document)}\n\nbfloat16 inputs {shape}, {size['seeds']} seeds. "
            f"{source(document['meta'])}"
        )

    return text


def _accuracy(document: Document) -> str:
    return f"{accuracy.table(document['rows'])}\n\n{accuracy.describe(document['meta'])}"


def _real_model(document: Document) -> str:
    meta = document["meta"]
    return (
        f"{real_model.table(document)}\n\n{meta['model']}, {meta['layers']} layers, "
        f"{meta['seqlen']} tokens; the first loss is SDPA's. {source(meta)}"
    )


def _tuning(document: Document) -> str | None:
    if "tuning" not in document:
        return None
    how = real_model.describe_tuning(document)
    return f"{real_model.tuning_table(document['tuning'])}\n\n{how} {source(document['meta'])}"


def _files(pattern: str) -> Iterator[Document]:
    """Result files of a name, those of GPUs first."""
    paths = sorted(RESULTS.glob(pattern), key=lambda path: (path.stem.endswith("-cpu"), path.name))
    return (json.loads(path.read_text()) for path in paths)


def _benchmarks() -> Iterator[Document]:
    try:
        return (json.loads(path.read_text()) for path in throughput.find(RESULTS))
    except throughput.NoResults:
        return iter(())


SECTIONS: dict[str, tuple[Callable[[], Iterator[Document]], Callable[[Document], str | None]]] = {
    "accuracy": (lambda: itertools.islice(_files("accuracy-*.json"), 1), _accuracy),
    "speed": (_benchmarks, speed.markdown),
    "sigma": (lambda: _files("paper/sigma-*.json"), _sized(sigma.table)),
    "intermediates": (lambda: _files("paper/intermediates-*.json"), _sized(intermediates.table)),
    "dominant": (
        lambda: _files("paper/intermediates-*.json"),
        _sized(intermediates.dominant_table),
    ),
    "magnitudes": (lambda: _files("paper/magnitudes-*.json"), _sized(magnitudes.table)),
    "smoothing": (lambda: _files("paper/smoothing-*.json"), _sized(smoothing.table)),
    "real-model": (lambda: _files("real-model-*.json"), _real_model),
    "tuning": (lambda: _files("real-model-*.json"), _tuning),
    "pretrain": (lambda: _files("pretrain-*.json"), _with_source(pretrain.table)),
    "supported": (lambda: iter([{"meta": {}}]), lambda _: limits.markdown()),
}
"""By the name in a marker: the result files, and the text of one (None: it has none)."""


def section(name: str, module: str) -> str:
    """What stands between the markers of a section.

    Raises:
        KeyError: there is no such section.
    """
    documents, text = SECTIONS[name]
    texts = [t for t in map(text, (d for d in documents() if "meta" in d)) if t]
    if not texts:
        return f"Not measured yet: `python -m {module}` on a GPU, then `make report`."
    return "\n\n".join(texts)


def filled(content: str) -> str:
    """A file's content with every section as the result files have it."""
    return _MARKER.sub(lambda m: f"{m[1]}{section(m[2], m[3])}\n{m[4]}", content)


def update() -> list[Path]:
    """Writes what has changed; returns those files."""
    changed = [path for path in FILES if filled(path.read_text()) != path.read_text()]
    for path in changed:
        path.write_text(filled(path.read_text()))
    return changed


def main() -> None:
    """Writes or checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    args = parser.parse_args()
    if args.check:
        stale = [path.name for path in FILES if filled(path.read_text()) != path.read_text()]
        if stale:
            raise SystemExit(f"{', '.join(stale)}: not what the result files say; make report")
        return
    for path in update():
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
