"""Records and pipes for tests of logs."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import threading
from typing import Any

import pytest

from router.core.types.placements import EndReason
from router.telemetry import logs
from router.telemetry.request_record import RequestRecord
from tests.support.request_records import make_record

PIPE_BYTES = 4096  # of the smallest pipe


def record(**fields: Any) -> RequestRecord:
    """A request that was answered, but for these fields."""
    plain = {"model": "naïve", "status": 200, "ending": EndReason.OK, "duration_s": 1.23456}
    return make_record('a"b', **{**plain, **fields})


class Pipe:
    """A small pipe to be standard error, which nobody reads before `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.readable, self.writable = os.fdopen(reading), os.fdopen(writing, "w")
        self._monkeypatch = monkeypatch

    def setup(self, level: str = "info", format_: str = "json", *, requests: bool = True) -> None:
        """As the command does, with this pipe in the place of standard error."""
        self._monkeypatch.setattr(sys, "stderr", self.writable)
        logs.setup(level, format_, requests=requests)
        self._monkeypatch.undo()

    def end(self) -> str:
        """Everything that was written until the logging module ended, as it does with the process."""
        read: list[str] = []
        reader = threading.Thread(target=lambda: read.append(self.readable.read()))
        reader.start()
        close_logging()
        self.writable.close()
        reader.join()
        return read[0]

    def lines(self) -> list[dict[str, Any]]:
        """The same as JSON lines."""
        return [json.loads(line) for line in self.end().splitlines()]


def close_logging() -> None:
    """What the logging module does when the process ends."""
    for handler in logging.getLogger().handlers:
        handler.close()
