"""State of one disaggregated request, and helpers that read the answer of its decode stage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.core.dialects import sse
from router.core.dialects.base import Dialect
from router.core.dialects.errors import says_full
from router.core.dialects.tenancy import CHAT
from router.core.facts.legs import PrefillLeg
from router.core.facts.replicas import Replica
from router.edge.early import at_work, is_read
from router.http.engine_failed import BlocksFailed
from router.http.exchange import EngineAnswer
from router.http.failures import EngineShed, Failure
from router.http.upstream import FULL_S, Upstream
from router.placer import Placed
from router.reading.question import Question

# suffix of a request id for a second request to the same engine, which accepts each id only once at a time
AGAIN = "-alone"


class SplitRequest:
    """State of one disaggregated request."""

    __slots__ = ("body_bytes", "concluded", "fresh", "id", "lease", "leg", "lines", "question")

    def __init__(
        self,
        question: Question,
        lease: Placed,
        leg: PrefillLeg,
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


async def with_blocks(answer: EngineAnswer, path: str, dialect: Dialect, upstream: Upstream) -> EngineAnswer | Failure:
    """Return a stream with its first event that results from GPU work, or the failure. Engines send other events
    before. Responses has two before any blocks have arrived. vLLM 0.32 reports missing blocks only after chat's event
    with the role, and after `message_start`, because the message begins with the engine's first output, which is the
    error."""
    if not is_read(answer):
        return answer
    came = await at_work(answer, lambda head: _works(path, dialect, head), upstream)
    if isinstance(came, Failure):
        return came
    for data in sse.payloads_backwards(answer.head):
        status = dialect.event_error(b"data: " + data) or 0
        if status == 503 and says_full(data):
            upstream.done(answer)
            return EngineShed(status, FULL_S, full=True)
        if status >= 500:
            return BlocksFailed(answer)
    return answer


def _works(path: str, dialect: Dialect, head: bytes) -> bool:
    """True if one of these events results from GPU work."""
    if path == CHAT and b'"role"' in head and not sse.several(head):
        return False
    return dialect.begun(head)


def answered(came: EngineAnswer | Failure) -> EngineAnswer:
    """Return an answer that has begun. Raises a Failure."""
    if isinstance(came, Failure):
        raise came
    return came


def answers(decode: asyncio.Task[EngineAnswer | Failure]) -> bool:
    """True if a decode stage has begun to answer without an error."""
    came = decode.result() if decode.done() else None
    return isinstance(came, EngineAnswer) and came.status < 400


def renamed(lines: Sequence[bytes]) -> list[bytes]:
    """Return the same header lines with another request id."""
    return [
        b"%b%b\r\n" % (line.rstrip(), AGAIN.encode()) if line[:13].lower() == b"x-request-id:" else line
        for line in lines
    ]
