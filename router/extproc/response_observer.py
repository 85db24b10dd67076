"""Observation of an answer that passes through a gateway, and the resulting outcome of its lease.

In the cheap mode only the head and the end of the stream are visible: a status, an endpoint, and the duration. It is
then unknown if the engine finished or the client left. An answer that began well therefore counts as one that ended
well, with an unknown number of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from router.core.dialects import Dialect, errors
from router.core.dialects.usage_filter import UsageFilter
from router.core.types.placements import EndReason, Outcome, Usage
from router.ingress.proxied_request import ProxiedRequest
from router.ingress.token_estimate import estimate_body_tokens, estimate_stream_tokens, validate_usage
from router.placement_api import LEFT

UNOBSERVED = Outcome(EndReason.OK, unobserved=True)
STREAM_BYTES_MAX = 32 << 10  # bytes kept of the end of a stream


class ResponseObserver:
    """Observer of one answer."""

    def __init__(self, question: ProxiedRequest, whole_bytes_max: int, begun: Callable[[], None]) -> None:
        """`whole_bytes_max`: number of bytes kept of an answer that does not stream. `begun`: called once, when a piece
        of a stream shows that its prefill is done."""
        self._question = question
        self._begun: Callable[[], None] | None = begun
        self._whole_bytes_max = whole_bytes_max
        self._usage: UsageFilter | None = None
        self._pieces: deque[bytes] = deque()
        self._kept_bytes = 0
        self.head = b""  # the first piece
        self.status = 0  # 0 before the head
        self.of_gateway = False  # the gateway itself gave the answer, because no replica could
        self.judged = False  # the body is a parseable event stream, regardless of the request
        self.seen = False  # the body passes through the picker
        self.ended = False  # the whole body has passed
        self.events = self.bytes = 0

    @property
    def tail(self) -> bytes:
        """The last pieces that have passed."""
        return b"".join(self._pieces)

    @property
    def usage_unasked(self) -> bool:
        """True if the stream showed that its engine sends usage without a request for it."""
        return self._usage is not None and self._usage.unasked

    def take_usage_out(self) -> None:
        """Remove usage from a stream that has not begun, since only the router requested it."""
        self._usage = UsageFilter(self._question.dialect)

    @property
    def _streams(self) -> bool:
        """True if the answer streams, or if a stream was requested."""
        return self.judged or self._question.wanted.ask.stream

    def take(self, piece: bytes, *, end: bool) -> bytes | None:
        """Take a piece of the body. Return the bytes that replace it for the client, or None to keep it."""
        self.seen, self.ended = True, end
        if piece:
            self._keep(piece)
            if self._begun is not None and self._streams and self._question.dialect.has_output(piece):
                self._begun()
                self._begun = None
        if self._usage is None:
            return None
        kept = self._usage.feed(piece)
        return kept + self._usage.close() if end else kept

    def _keep(self, piece: bytes) -> None:
        self.head = self.head or piece
        self.events += piece.count(b"\n\n") or piece.count(b"\n\r\n")
        self.bytes += len(piece)
        self._pieces.append(piece)
        self._kept_bytes += len(piece)
        bytes_max = STREAM_BYTES_MAX if self._streams else self._whole_bytes_max
        while self._kept_bytes > bytes_max and len(self._pieces) > 1:
            self._kept_bytes -= len(self._pieces.popleft())

    def outcome(self, context_tokens: int, *, heads_told: bool) -> Outcome:
        """Return the outcome of the lease, after the gateway has ended the stream.

        - `context_tokens`: the longest context of the model.
        - `heads_told`: True if this gateway sends heads of answers at all.
        """
        if not self.status:
            return LEFT if heads_told else UNOBSERVED
        if self.status == 503 and errors.says_full(self.tail):
            return Outcome(EndReason.REFUSED_BY_ENGINE)
        if self.status >= 500:
            return Outcome(EndReason.UNREACHED if self.of_gateway else EndReason.FAILED)
        if self.status >= 400:
            return Outcome(EndReason.REFUSED_BY_ENGINE)
        if not self.seen:
            return UNOBSERVED
        if not self.ended:
            return Outcome(EndReason.CLIENT_LEFT, events=self._estimate_output_tokens())
        dialect = self._question.dialect
        if not self.judged:
            usage = self._validate_usage(dialect.usage(self.tail), context_tokens)
            return Outcome(
                EndReason.OK, usage, estimate_body_tokens(self.tail) if usage is None and self._question.metered else 0
            )
        ending = self._find_ending(dialect)
        if ending is not EndReason.OK:
            return Outcome(ending)
        usage = self._validate_usage(dialect.stream_usage(self.tail), context_tokens)
        return Outcome(EndReason.OK, usage, self.events if usage is not None else self._estimate_output_tokens())

    def _find_ending(self, dialect: Dialect) -> EndReason:
        """Return the ending of a stream. An incomplete stream is FAILED."""
        if (status := dialect.event_error(self.head)) is not None:
            return errors.ending_of(status, self.head)
        judge = self._question.judge
        return EndReason.OK if judge is None else judge.find_ending(self.tail) or EndReason.FAILED

    def _estimate_output_tokens(self) -> int:
        return estimate_stream_tokens(self) if self._question.metered else self.events

    def _validate_usage(self, usage: Usage | None, context_tokens: int) -> Usage | None:
        if usage is None:
            return None
        return validate_usage(usage, self._question.wanted.body_bytes, self.bytes, context_tokens)
