"""Every environment variable that this package reads: what it means, its values, its default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, cast, get_args

from sage_cute.errors import SettingError

TuneMode = Literal["off", "lookup", "on-miss"]

VARIABLES = {
    "SAGE_CUTE_CACHE_DIR": "folder of compiled kernels and tuning tables; default: sage_cute in "
    "$XDG_CACHE_HOME or ~/.cache",
    "SAGE_CUTE_CACHE_MB": "bound on the compiled kernels there, in MB; default 1024; 0: keep none",
    "SAGE_CUTE_KERNELS": "folders of kernels built ahead of time, separated by ':'",
    "SAGE_CUTE_TUNE": "off: shipped tables only; lookup (default): the user's tables first; "
    "on-miss: tune at the first call that no table covers",
    "SAGE_CUTE_TRACE": "file to which the sizes of every new call are appended, for sage-cute tune "
    "--shapes",
}
"""Name and meaning, for the documentation and for ``sage-cute info``."""


def cache_dir() -> Path:
    """The user's cache folder; it need not exist."""
    if given := os.environ.get("SAGE_CUTE_CACHE_DIR"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sage_cute"


def cache_bytes() -> int:
    """How much the compiled kernels may take together; 0: nothing is kept.

    Raises:
        SettingError: the variable is no number.
    """
    text = os.environ.get("SAGE_CUTE_CACHE_MB", "1024")
    if not text.isdecimal():
        raise SettingError(f"SAGE_CUTE_CACHE_MB={text!r}: a whole number of MB, 0 to keep none")
    return int(text) * 10**6


def kernel_folders() -> tuple[Path, ...]:
    """Folders of kernels that were built ahead of time, in the order in which they are asked."""
    text = os.environ.get("SAGE_CUTE_KERNELS", "")
    return tuple(Path(part).expanduser() for part in text.split(os.pathsep) if part)


def trace_file() -> Path | None:
    """Where the sizes of new calls are recorded."""
    text = os.environ.get("SAGE_CUTE_TRACE")
    return Path(text).expanduser() if text else None


def tune_mode() -> TuneMode:
    """Where tile configurations come from.

    Raises:
        SettingError: the variable names no mode.
    """
    mode = os.environ.get("SAGE_CUTE_TUNE", "lookup")
    if mode not in get_args(TuneMode):
        raise SettingError(f"SAGE_CUTE_TUNE={mode!r}: choose {', '.join(get_args(TuneMode))}")
    return cast(TuneMode, mode)
