"""Contents of the files that settings name: keys, tokens, certificates.

They are read once, while the settings are checked and off the event loop, and the contents are noted. A file may be on
a volume that hangs, or be a pipe, which gives its content only once. The router serves with the contents that were
checked and accepted, even if the files have changed since.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from router.config.files import expand_path, read_at_most

PEM_BYTES_MAX = 4 << 20  # bytes of a file of certificates; the machine's authorities have a quarter of a MiB

_handed: Mapping[str, bytes] = {}
_noted: ContextVar[dict[str, bytes] | None] = ContextVar("noted", default=None)


def install(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Use these contents in place of the files at these paths, in this process, from now on. Returns the previous
    contents."""
    global _handed  # a file is a fact of the whole process, as the disk is
    before, _handed = _handed, files
    return before


@contextmanager
def recording() -> Iterator[dict[str, bytes]]:
    """Collect the contents of files that this thread reads in the block, by path. A file is read once, also over a
    block within a block, so that the checked contents are the noted ones."""
    if (outer := _noted.get()) is not None:
        yield outer
        return
    files: dict[str, bytes] = {}
    token = _noted.set(files)
    try:
        yield files
    finally:
        _noted.reset(token)


def key_of(file: str | Path) -> str:
    """Return the key of a file among contents."""
    return str(Path(file))


def content(file: str | Path, bytes_max: int) -> bytes:
    """Return the content of a file, at most `bytes_max` + 1 bytes. Raises OSError."""
    key, files = key_of(file), _noted.get()
    known = _handed.get(key) if files is None else files.get(key)
    if known is not None:
        return known
    read = read_at_most(file, bytes_max)
    if files is not None:
        files[key] = read
    return read


@contextmanager
def materialize_file(file: str) -> Iterator[str]:
    """Yield a path for OpenSSL, which reads only files, with the content of the file. Raises OSError."""
    key = key_of(file)
    if key not in _handed and _noted.get() is None:
        yield str(expand_path(file))
        return
    with _in_memory(content(file, PEM_BYTES_MAX)) as path:
        yield path


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Yield the path of a file that only this process can read. If the system has no files in memory, only the same
    user can read it."""
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
