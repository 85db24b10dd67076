"""Lines of a log, one by one: a file is never in memory as a whole."""

from __future__ import annotations

import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from router.cli.optional_deps import describe_missing_extra

LINE_BYTES_MAX = 64 << 20  # a request with images in it may have tens of megabytes
BUFFER_BYTES = 1 << 20
STDIN = "-"
DAMAGED = (OSError, EOFError, zlib.error)  # errors of a damaged file; zstandard's own becomes an OSError


class LogOpenError(Exception):
    """Raised if a file cannot be opened; the message names it."""


@contextmanager
def open_log(name: str) -> Iterator[BinaryIO]:
    """Open a file, unpacked if it is a `.gz` or `.zst`; `-` is standard input. Raises LogOpenError."""
    if name == STDIN:
        yield sys.stdin.buffer
        return
    try:
        file = _open(Path(name))
    except OSError as error:
        raise LogOpenError(f"{name}: {error.strerror or error}") from error
    with file:
        yield file


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast("BinaryIO", io.BufferedReader(cast("io.RawIOBase", gzip.open(path)), BUFFER_BYTES))
    if path.suffix == ".zst":
        try:
            zstandard = importlib.import_module("zstandard")
        except ModuleNotFoundError as error:
            raise LogOpenError(f"{path}: {describe_missing_extra('a .zst file', 'zstandard', 'audit')}") from error
        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
        return cast("BinaryIO", io.BufferedReader(_Unpacked(reader, zstandard.ZstdError), BUFFER_BYTES))
    return path.open("rb", BUFFER_BYTES)


class _Unpacked(io.RawIOBase):
    """A zstandard stream that raises its errors as OSError, as files do."""

    def __init__(self, reader: BinaryIO, error: type[Exception]) -> None:
        self._reader, self._error = reader, error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            data = self._reader.read(len(buffer))
        except self._error as error:
            raise OSError(str(error)) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._reader.close()
        super().close()


def lines_of(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield lines with their ends; None for one longer than LINE_BYTES_MAX. Raises the errors in DAMAGED."""
    while line := file.readline(LINE_BYTES_MAX + 1):
        if len(line) <= LINE_BYTES_MAX or line.endswith(b"\n"):
            yield line
            continue
        while rest := file.readline(BUFFER_BYTES):
            if rest.endswith(b"\n"):
                break
        yield None
