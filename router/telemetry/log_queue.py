"""Queue of log lines between the callers of logging and a thread that writes them: the standard library's QueueHandler
and QueueListener, with a bound and with batches.

A caller only puts a line into the queue. The thread writes the waiting lines together after at most FLUSH_S, and at
once if they are many or urgent: a write and a thread switch per line would take 30 us of each request. A slow reader
delays the thread alone. Lines that do not fit into the bound are dropped and counted, and their number is logged once
writing works again.

This file is not compiled (deploy/compiled.py). The logging module keeps weak references to handlers, and a compiled
handler is freed without clearing them, so that the next garbage collection, or a fork, ends the process.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from queue import Empty, SimpleQueue
from typing import Protocol, TextIO

from router.telemetry.request_record import RequestRecord

FLUSH_S = 0.1
PIECE_BYTES_MAX = 1 << 16  # a Linux pipe takes this many bytes at once
BUFFER_BYTES_MAX = 1 << 22
CLOSE_S = 1.0
DROPPED = "log_lines_dropped"


class LogStyle(Protocol):
    """Format of lines."""

    def request(self, at_s: float, record: RequestRecord) -> bytes:
        """Return the line of a request."""

    def ordinary(self, record: logging.LogRecord) -> bytes:
        """Return the line or lines of a record of the logging module."""


class LogQueue(QueueHandler):
    """Handler of the logging module's records. Lines of requests enter the same queue directly."""

    def __init__(
        self,
        sink: Callable[[bytes], None],
        style: LogStyle,
        *,
        requests: bool = True,
        bytes_max: int = BUFFER_BYTES_MAX,
    ) -> None:
        """`sink`: writes all of its argument, however long that takes, or raises OSError. `requests`: requests have
        lines."""
        lines = SimpleQueue[list[bytes] | None]()  # may be entered again by a finaliser that logs
        super().__init__(lines)
        self.style, self.requests = style, requests
        self._bytes_max, self._bytes, self._full, self._ended = bytes_max, 0, 0, False
        self._writer = _Writer(lines, sink, lambda: self._full, style)
        self._writer.start()

    @property
    def dropped(self) -> int:
        """Lines that did not fit into the queue or that the sink did not take."""
        return self._full + self._writer.lost

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record as it is: `enqueue` formats it in this thread, so that no argument changes until then."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record's line. A warning or worse is written at once, because the process may be about to end."""
        self.write(self.style.ordinary(record), urgent=record.levelno >= logging.WARNING)

    def write(self, *lines: bytes, urgent: bool = False) -> None:
        """Queue lines, without line ends. A full queue drops them."""
        self.acquire()
        try:
            fitting = list[bytes]()
            for line in lines:
                if self._ended or self._bytes - self._writer.done + len(line) >= self._bytes_max:
                    self._full += 1
                else:
                    self._bytes += len(line) + 1
                    fitting.append(line)
            waiting = self._bytes - self._writer.done
            if fitting or not waiting:  # without lines the thread, which is idle, reports the dropped ones
                self.queue.put_nowait(fitting)
        finally:
            self.release()
        if (urgent or waiting >= PIECE_BYTES_MAX) and not self._writer.soon.is_set():
            self._writer.soon.set()

    def close(self) -> None:
        """Write the waiting lines, for at most CLOSE_S. The logging module calls this when the process ends."""
        super().close()
        if not self._ended:
            self._ended = True
            self._writer.stop()


class _Writer(QueueListener):
    """Thread that writes lines."""

    def __init__(
        self,
        lines: SimpleQueue[list[bytes] | None],
        sink: Callable[[bytes], None],
        count_full: Callable[[], int],
        style: LogStyle,
    ) -> None:
        super().__init__(lines)
        self._lines, self._sink, self._count_full, self._style = lines, sink, count_full, style
        self.done = 0  # bytes of the lines that no longer wait
        self.lost = 0  # lines that the sink did not take
        self._reported = 0  # lines of which a notice was written
        self.soon = threading.Event()

    def handle(self, record: list[bytes]) -> None:  # type: ignore[override]  # lines instead of a record
        """Write lines, and all lines that follow them within FLUSH_S."""
        self.soon.wait(FLUSH_S)
        self.soon.clear()
        lines, full = [*record, *self._take()], 0
        while lines or self._count_full() > full:
            full = self._count_full()
            dropped = full + self.lost  # these came after the lines that are written now
            self.lost += sum(len(piece) for piece in _pieces(lines) if not self._try_write(piece))
            self.done += sum(map(len, lines)) + len(lines)
            if dropped > self._reported and self._try_write([self._notice(dropped - self._reported)]):
                self._reported = dropped
            lines = self._take()

    def stop(self) -> None:
        """Write the waiting lines, for at most CLOSE_S, and end the thread."""
        self.enqueue_sentinel()
        self.soon.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _take(self) -> list[bytes]:
        """Return the waiting lines."""
        lines = list[bytes]()
        with suppress(Empty):
            while (some := self._lines.get_nowait()) is not None:
                lines += some
            self.enqueue_sentinel()  # the end, for which the base class waits
        return lines

    def _try_write(self, lines: list[bytes]) -> bool:
        try:
            self._sink(b"\n".join(lines) + b"\n")
        except (OSError, ValueError):  # the reader is gone, the disk is full, or the stream is closed
            return False
        return True

    def _notice(self, lines: int) -> bytes:
        about = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": "log lines dropped"}
        return self._style.ordinary(logging.makeLogRecord({**about, "event": DROPPED, "fields": {"lines": lines}}))


def _pieces(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Yield whole lines in pieces of at most PIECE_BYTES_MAX bytes."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        if piece and size + len(line) + 1 > PIECE_BYTES_MAX:
            yield piece
            piece, size = [], 0
        piece.append(line)
        size += len(line) + 1
    if piece:
        yield piece


def sink(stream: TextIO | None) -> Callable[[bytes], None]:
    """Return a function that writes bytes to a stream. It bypasses the stream's buffer if the stream is a file, a pipe
    or a terminal. None stands for a process without standard error: the function then discards its argument."""
    if stream is None:
        return lambda data: None
    try:
        number = stream.fileno()
    except OSError:  # a stream in memory has no file descriptor
        return lambda data: print(data.decode(), end="", file=stream, flush=True)

    def put(data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(number, left) :]
            except BlockingIOError:  # another process that shares the stream made it non-blocking
                ready = select.poll()
                ready.register(number, select.POLLOUT)
                ready.poll()

    return put
