"""Records of a log, one by one: lines, or the objects of a JSON array. A file is never in memory as a whole."""

from __future__ import annotations

import gzip
import importlib
import io
import re
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
OBJECTS_MAX, DEPTH_MAX = 1 << 20, 1_000  # objects within one record, and their nesting
DAMAGED = (OSError, EOFError, zlib.error)  # errors of a damaged file; zstandard's own becomes an OSError
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_QUOTE, _BACKSLASH, _OPEN = b'"\\{'
# A JSON array of objects, or an object with nothing but its bracket in the first line.
_NO_LINES = re.compile(rb"\s*+(?:\[\s*+[{\]]|[\[{]\s*?\n)")
_OUTSIDE_STRING = re.compile(rb'[^"{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}]*+)*+', re.DOTALL)
_WITHIN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)


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


def records_of(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a file, or its outermost objects if it is a JSON array or indented JSON. None stands for a
    record that is longer than LINE_BYTES_MAX. Raises the errors in DAMAGED."""
    head = cast("io.BufferedReader", file).peek(1).removeprefix(_BYTE_ORDER_MARK)
    return _objects_of(file) if _NO_LINES.match(head) else lines_of(file)


def _objects_of(file: BinaryIO) -> Iterator[bytes | None]:
    record, within_string, is_escaped = bytearray(), False, False
    depth = objects = size = 0  # of the current record
    while chunk := file.read(BUFFER_BYTES):
        start, at, is_escaped = 0, int(is_escaped), False
        while at < len(chunk):
            found = _WITHIN_STRING.match(chunk, at) if within_string else _OUTSIDE_STRING.match(chunk, at)
            at = found.end() if found is not None else at
            if at == len(chunk):
                break
            byte, at = chunk[at], at + 1
            if within_string:  # its end, or an escape that continues in the next chunk
                within_string, is_escaped = byte != _QUOTE, byte == _BACKSLASH
            elif byte == _QUOTE:  # a string that continues in the next chunk
                within_string = True
            elif byte == _OPEN:
                start = start if depth else at - 1
                depth, objects = depth + 1, objects + 1
                if depth > DEPTH_MAX or objects > OBJECTS_MAX:
                    raise OSError("a record consists of too many objects")
            elif depth:
                depth -= 1
                if not depth:
                    size += at - start
                    yield bytes(record) + chunk[start:at] if size <= LINE_BYTES_MAX else None
                    record.clear()
                    size = objects = 0
        if depth:
            size += len(chunk) - start
            record += chunk[start:] if size <= LINE_BYTES_MAX else b""
    if depth:
        yield bytes(record) if size <= LINE_BYTES_MAX else None


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
