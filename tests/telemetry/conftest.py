"""Fixtures of the tests of telemetry."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from router.telemetry import logs, tracing
from tests.telemetry.collector import Collector
from tests.telemetry.log_lines import Pipe


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are sent at once, and not after five seconds."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends sends what is left, however long the machine takes for it."""
    monkeypatch.setattr(tracing, "FLUSH_S", 60.0)


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    """One that is well."""
    async with Collector() as it:
        yield it


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Whatever a test sets up is closed and taken back."""
    root, level, handlers = logging.getLogger(), logging.getLogger().level, logging.getLogger().handlers[:]
    root.handlers.clear()  # not to be closed by `setup`: they are pytest's
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logs.requests_log.setLevel(logging.NOTSET)
    logs._out = None


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    """A pipe, closed at the end."""
    it = Pipe(monkeypatch)
    with it.readable, it.writable:
        yield it
