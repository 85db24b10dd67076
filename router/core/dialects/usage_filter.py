"""Takes usage out of a stream that only the router asked for, unless the engine shows that it sends usage unasked."""

from __future__ import annotations

from router.core.dialects.base import Dialect
from router.core.dialects.sse import EventSplitter

USAGE = b'"usage"'  # bytes in every event that has usage; within a string of JSON the quotes have backslashes


class UsageFilter:
    """One stream's events, without those that exist only because the router asked for usage."""

    def __init__(self, dialect: Dialect) -> None:
        self.unasked = False  # the engine sends usage whether it is asked or not, so that nothing is taken out
        self._dialect = dialect
        self._splitter = EventSplitter()

    @property
    def mark(self) -> bytes:
        """Bytes of which a piece that has them must come by here; b"" once no piece has to."""
        return b"" if self.unasked else USAGE

    @property
    def holds(self) -> bool:
        """Whether an event has begun and not ended."""
        return self._splitter.holds

    def feed(self, data: bytes) -> bytes:
        """What is left of these bytes, and of those that were held: whole events, but for what follows the last one."""
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
        """What was still held when the stream ended."""
        return self._splitter.close()
