"""Handler from the logging module to standard error: passes each record, as a line, to the writer's thread.

This file is not compiled (deploy/compiled.py). The logging module keeps weak references to handlers, and a compiled
handler is freed without clearing them, so that the next garbage collection, or a fork, ends the process.
"""

from __future__ import annotations

import logging
from typing import Protocol

from router.telemetry.log_writer import AsyncLogWriter
from router.telemetry.request_record import RequestRecord


class LogStyle(Protocol):
    """Format of lines."""

    def request(self, at_s: float, record: RequestRecord) -> bytes:
        """Return the line of a request."""

    def ordinary(self, record: logging.LogRecord) -> bytes:
        """Return the line or lines of a record of the logging module."""

    def render_dropped(self, at_s: float, lines: int) -> bytes:
        """Return the line that reports how many lines were dropped."""


class LogOutput(logging.Handler):
    """Handler of the logging module's records. Lines of requests go to the same writer directly."""

    def __init__(self, writer: AsyncLogWriter, style: LogStyle, *, requests: bool) -> None:
        super().__init__()
        self.writer, self.style, self.requests = writer, style, requests

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record. A warning or worse is written at once, because the process may be about to end."""
        try:
            self.writer.write(self.style.ordinary(record), urgent=record.levelno >= logging.WARNING)
        except Exception:  # a field cannot be encoded as JSON: do as the logging module's handlers do
            self.handleError(record)

    def close(self) -> None:
        """Write the remaining lines. The logging module calls this when the process ends."""
        super().close()
        self.writer.close()
