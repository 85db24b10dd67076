"""One request in two legs, and what is read of the answer of its decode leg."""

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

AGAIN = "-alone"  # put behind a request's id where its engine has just been sent it: none may have one twice at a time


class SplitRequest:
    """One request in two legs."""

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
        self.fresh = fresh  # new connections for both legs
        self.body_bytes = len(question.body)
        self.concluded = False  # the placer was told of the prefill leg's end

    @property
    def rank(self) -> int | None:
        """Data-parallel rank of the replica that prefills."""
        return Replica(self.leg.replica).rank


async def with_blocks(answer: EngineAnswer, path: str, dialect: Dialect, upstream: Upstream) -> EngineAnswer | Failure:
    """A stream with its first event that comes of work, or why there is none. Engines send others before: Responses has
    two before any blocks have come, and vLLM 0.32 says that none came behind chat's event with the role, and behind
    `message_start`, since the message begins with the engine's first word, which is that it failed."""
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
    """Whether one of these events comes of work."""
    if path == CHAT and b'"role"' in head and not sse.several(head):
        return False
    return dialect.begun(head)


def answered(came: EngineAnswer | Failure) -> EngineAnswer:
    """An answer that has begun. Raises a Failure."""
    if isinstance(came, Failure):
        raise came
    return came


def answers(decode: asyncio.Task[EngineAnswer | Failure]) -> bool:
    """Whether a decode leg has begun to answer, and with no error."""
    came = decode.result() if decode.done() else None
    return isinstance(came, EngineAnswer) and came.status < 400


def renamed(lines: Sequence[bytes]) -> list[bytes]:
    """The same header lines, with another id of the request."""
    return [
        b"%b%b\r\n" % (line.rstrip(), AGAIN.encode()) if line[:13].lower() == b"x-request-id:" else line
        for line in lines
    ]
