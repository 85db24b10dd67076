"""Removes usage that only the router requested from a stream, unless the engine turns out to send usage unrequested."""

from __future__ import annotations

from router.core.dialects.dialect import Dialect
from router.core.dialects.sse import EventSplitter

USAGE = b'"usage"'  # bytes in every event that has usage; within a JSON string the quotes have backslashes


class UsageFilter:
    """Events of one stream, without those that exist only because the router requested usage."""

    def __init__(self, dialect: Dialect) -> None:
        self.unasked = False  # the engine sends usage without a request for it, so no event is removed
        self._dialect = dialect
        self._splitter = EventSplitter()

    @property
    def mark(self) -> bytes:
        """Bytes that mark a piece of the stream as one to be passed to `feed`. b"" once no piece has to be."""
        return b"" if self.unasked else USAGE

    @property
    def holds(self) -> bool:
        """True if an event has begun and not ended."""
        return self._splitter.holds

    def feed(self, data: bytes) -> bytes:
        """Return the filtered bytes, including earlier buffered ones: whole events, and the incomplete rest once
        `unasked` is set."""
        if self.unasked or not (self._splitter.holds or not data.endswith(b"\n\n") or USAGE in data):
            return data
        kept = list[bytes]()
        for event in self._splitter.feed(data):
            if USAGE in event and not self.unasked:
                self.unasked = self._dialect.is_usage_unasked(event)
                if self._dialect.is_usage_event(event):
                    continue
            kept.append(event)
        if self.unasked:
            kept.append(self._splitter.close())
        return b"".join(kept)

    def close(self) -> bytes:
        """Return the bytes still buffered when the stream ended."""
        return self._splitter.close()
