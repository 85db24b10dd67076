"""Bounded buffer of lines, and the thread that writes them.

Logging only appends a line to the buffer. The thread writes the buffered lines after at most FLUSH_S, and at once if
they are many or urgent. A slow reader therefore does not delay the event loop, and a busy router makes one write for
hundreds of lines. Lines that do not fit into the buffer are dropped and counted, and their number is logged once
writing works again.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

FLUSH_S = 0.1
PIECE_BYTES_MAX = 1 << 16  # a Linux pipe takes this many bytes at once
BUFFER_BYTES_MAX = 1 << 22
CLOSE_S = 1.0


class AsyncLogWriter:
    """Bounded buffer of lines with the thread that empties it. `write` never waits for a reader."""

    def __init__(
        self,
        sink: Callable[[bytes], None],
        notice: Callable[[int], bytes],
        *,
        bytes_max: int = BUFFER_BYTES_MAX,
    ) -> None:
        """`sink`: writes all of its argument, however long that takes, or raises OSError. `notice`: makes the line that
        reports how many lines were dropped."""
        self.dropped = 0
        self._sink, self._notice, self._bytes_max = sink, notice, bytes_max
        self._lock = threading.RLock()  # a finaliser that logs may run while its thread is in `write`
        self._lines: list[bytes] = []
        self._bytes = 0  # bytes in the buffer or being written
        self._unsaid = 0
        self._closing = False
        self._some, self._soon = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, *lines: bytes, urgent: bool = False) -> None:
        """Buffer lines, without line ends, to be written soon; urgent lines are written at once. A full buffer drops
        them."""
        with self._lock:
            first = not self._lines
            for line in lines:
                if self._closing or self._bytes + len(line) >= self._bytes_max:
                    self.dropped += 1
                    self._unsaid += 1
                else:
                    self._lines.append(line)
                    self._bytes += len(line) + 1
        if first:
            self._wake()
        if (urgent or self._bytes >= PIECE_BYTES_MAX) and not self._soon.is_set():
            self._soon.set()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the remaining lines, for at most `timeout_s` seconds."""
        self._closing = True
        self._soon.set()
        self._some.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log", daemon=True)
            self._thread.start()
        if not self._some.is_set():  # while the event is set, the thread has yet to take the buffer
            self._some.set()

    def _run(self) -> None:
        last = False
        while not last:
            self._some.wait()
            self._soon.wait(FLUSH_S)  # wait for more lines, to write them together
            self._some.clear()
            self._soon.clear()
            with self._lock:
                last = self._closing
                lines, self._lines = self._lines, []
                taken = self._bytes
                unsaid, self._unsaid = self._unsaid, 0
            lost = sum(len(piece) for piece in _pieces(lines, PIECE_BYTES_MAX) if not self._put(piece))
            if unsaid and self._put([self._notice(unsaid)]):  # the dropped lines came after the lines taken
                unsaid = 0
            with self._lock:
                self._bytes -= taken
                self.dropped += lost
                self._unsaid += lost + unsaid

    def _put(self, lines: list[bytes]) -> bool:
        try:
            self._sink(b"\n".join(lines) + b"\n")
        except (OSError, ValueError):  # the reader is gone, the disk is full, or the stream is closed
            return False
        return True


def _pieces(lines: list[bytes], bytes_max: int) -> Iterator[list[bytes]]:
    """Yield whole lines in pieces of at most `bytes_max` bytes."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        if piece and size + len(line) + 1 > bytes_max:
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
