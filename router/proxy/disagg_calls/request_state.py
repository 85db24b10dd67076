"""State of one disaggregated request, and helpers that read the answer of its decode stage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.core.dialects import sse
from router.core.dialects.dialect import Dialect
from router.core.dialects.errors import says_full
from router.core.dialects.tenant_isolation import CHAT
from router.core.types.disagg_types import PrefillStage
from router.core.types.replicas import Replica
from router.http.engine_errors import TransferFailed
from router.http.exchange import UpstreamResponse
from router.http.failures import UpstreamError, UpstreamOverloaded
from router.http.upstream import FULL_S, Upstream
from router.ingress.proxied_request import ProxiedRequest
from router.placement_api import LeaseHandle
from router.proxy.preamble_events import is_parsable_stream, wait_for_first_output

# suffix of a request id for a second request to the same engine, which accepts each id only once at a time
RETRY_ID_SUFFIX = "-alone"


class DisaggRequest:
    """State of one disaggregated request."""

    __slots__ = ("body_bytes", "concluded", "fresh", "id", "lease", "leg", "lines", "question")

    def __init__(
        self,
        question: ProxiedRequest,
        lease: LeaseHandle,
        leg: PrefillStage,
        lines: Sequence[bytes],
        id_: str,
        *,
        fresh: bool = False,
    ) -> None:
        self.question = question
        self.lease = lease
        self.leg = leg
        self.lines = lines
        self.id = id_
        self.fresh = fresh  # use new connections for both stages
        self.body_bytes = len(question.body)
        self.concluded = False  # the end of the prefill stage was reported to the placer

    @property
    def rank(self) -> int | None:
        """Data-parallel rank of the prefill replica."""
        return Replica(self.leg.replica).rank


async def await_transfer(
    answer: UpstreamResponse, path: str, dialect: Dialect, upstream: Upstream
) -> UpstreamResponse | UpstreamError:
    """Return a stream with its first event that results from GPU work, or the failure. Engines send other events
    before. Responses has two before any blocks have arrived. vLLM 0.32 reports missing blocks only after chat's event
    with the role, and after `message_start`, because the message begins with the engine's first output, which is the
    error."""
    if not is_parsable_stream(answer):
        return answer
    came = await wait_for_first_output(answer, lambda head: _works(path, dialect, head), upstream)
    if isinstance(came, UpstreamError):
        return came
    for data in sse.payloads_backwards(answer.head):
        status = dialect.event_error(b"data: " + data) or 0
        if status == 503 and says_full(data):
            upstream.done(answer)
            return UpstreamOverloaded(status, FULL_S, full=True)
        if status >= 500:
            return TransferFailed(answer)
    return answer


def _works(path: str, dialect: Dialect, head: bytes) -> bool:
    """True if one of these events results from GPU work."""
    if path == CHAT and b'"role"' in head and not sse.has_multiple_events(head):
        return False
    return dialect.has_output(head)


def raise_if_failed(came: UpstreamResponse | UpstreamError) -> UpstreamResponse:
    """Return an answer that has begun. Raises UpstreamError."""
    if isinstance(came, UpstreamError):
        raise came
    return came


def has_answer(decode: asyncio.Task[UpstreamResponse | UpstreamError]) -> bool:
    """True if a decode stage has begun to answer without an error."""
    came = decode.result() if decode.done() else None
    return isinstance(came, UpstreamResponse) and came.status < 400


def with_retry_id(lines: Sequence[bytes]) -> list[bytes]:
    """Return the same header lines with another request id."""
    return [
        b"%b%b\r\n" % (line.rstrip(), RETRY_ID_SUFFIX.encode()) if line[:13].lower() == b"x-request-id:" else line
        for line in lines
    ]
