"""Streams whose first events come of no work.

Engines send some events when a request has arrived, before anything is known of its prompt: the Responses API begins
with two, Messages may begin with `message_start` and pings. Clients get them at once, so that behind them nothing can
be tried again. Where an engine waits for another one's blocks that must be possible: then they wait here for the first
event that comes of work.
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.dialects import errors, sse
from router.http.exchange import EngineAnswer
from router.http.failures import BrokeEarly, BrokeMidway, Failure
from router.http.upstream import Upstream


def is_read(answer: EngineAnswer) -> bool:
    """Whether an answer is a stream whose events can be told apart."""
    return answer.streams and answer.status == 200


def label(answer: EngineAnswer) -> None:
    """Treat the answer to a request for a stream as one if its body begins so, whatever its content type is: clients
    that asked for a stream read it as one, and some engines and proxies send another type or none."""
    if answer.streams or answer.coded or answer.status != 200 or answer.whole:
        return
    if answer.head.strip() and sse.begins_well(answer.head):
        answer.streams = answer.unlabelled = True


def says_full(answer: EngineAnswer) -> bool | None:
    """Whether an error, as an answer or as the first event of a stream, says that the engine's queue is full. None: it
    is an error of the engine's own, which may mean that."""
    error = sse.first_payload(answer.head) if answer.streams else answer.head
    return True if errors.says_full(error) else None if errors.is_error(error) else False


async def at_work(answer: EngineAnswer, works: Callable[[bytes], bool], upstream: Upstream) -> EngineAnswer | Failure:
    """A stream with its first event that comes of work, as `works` says of what has come so far; or why there is none,
    and then the answer is over."""
    answer.begun = False  # a request that is found lost, stuck or late can be tried again
    try:
        while not (answer.complete or works(answer.head)):
            await answer.grow()
    except (Failure, BrokeMidway) as broke:
        upstream.done(answer)
        return broke if isinstance(broke, Failure) else BrokeEarly(str(broke))
    except BaseException:
        upstream.done(answer)
        raise
    answer.begun = answer.moved = True
    return answer
