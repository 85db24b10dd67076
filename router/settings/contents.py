"""Contents of the files that settings name: keys, tokens, certificates.

They are read once, while the settings are checked and off the event loop, and what was read is noted: a file may be on
a volume that hangs, or be a pipe, which gives its content only once. One process hands what it noted to itself; with
several the supervisor hands it to its children with the settings (workers/orders.py). What serves is what was checked
and accepted, whatever has become of the files since, and a child that is started again has the same as all others.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Generic, TypeVar

from router.settings.files import expanded, read_at_most

_T = TypeVar("_T")
PEM_BYTES_MAX = 4 << 20  # bytes of a file of certificates; the machine's authorities have a quarter of a MiB

_handed: Mapping[str, bytes] = {}
_noted: ContextVar[dict[str, bytes] | None] = ContextVar("noted", default=None)


def hand(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Let these contents stand for the files at these paths, in this process, from now on. Returns those that did."""
    global _handed  # a file is a fact of the whole process, as the disk is
    before, _handed = _handed, files
    return before


@contextmanager
def handed(files: Mapping[str, bytes]) -> Iterator[None]:
    """Hand these contents for what the block applies; if it raises, those before stand again."""
    before = hand(files)
    try:
        yield
    except BaseException:
        hand(before)
        raise


@contextmanager
def noted() -> Iterator[dict[str, bytes]]:
    """Note what is read by this thread in the block, by path. A file is read once, so that what was checked is what is
    noted."""
    files: dict[str, bytes] = {}
    token = _noted.set(files)
    try:
        yield files
    finally:
        _noted.reset(token)


class NotedRead(Generic[_T]):
    """Reads with notes: `read()` is what `read` returns, and `read.files` what the last successful call noted."""

    def __init__(self, read: Callable[[], _T]) -> None:
        self._read = read
        self.files: dict[str, bytes] = {}

    def __call__(self) -> _T:
        """Raises what `read` raises."""
        with noted() as files:
            found = self._read()
        self.files = files
        return found


def key_of(file: str | Path) -> str:
    """The name of a file among contents."""
    return str(Path(file))


def content(file: str | Path, bytes_max: int) -> bytes:
    """What is in a file, at most `bytes_max` + 1 bytes. Raises OSError."""
    key, files = key_of(file), _noted.get()
    known = _handed.get(key) if files is None else files.get(key)
    if known is not None:
        return known
    read = read_at_most(file, bytes_max)
    if files is not None:
        files[key] = read
    return read


@contextmanager
def as_path(file: str) -> Iterator[str]:
    """A path that OpenSSL, which reads files only, can read a file's content from. Raises OSError."""
    key = key_of(file)
    if key not in _handed and _noted.get() is None:
        yield str(expanded(file))
        return
    with _in_memory(content(file, PEM_BYTES_MAX)) as path:
        yield path


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """A file of this process alone; where the system has none in memory, one that only its user can read."""
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            yield file.name
        return
    number = os.memfd_create("pem")
    with os.fdopen(number, "wb") as memory:
        memory.write(data)
        memory.flush()
        yield f"/proc/self/fd/{number}"
