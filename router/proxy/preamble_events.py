"""Streams that begin with events sent before any GPU work.

Engines send some events as soon as a request has arrived, before they have looked at its prompt. The Responses API
begins with two, and Messages may begin with `message_start` and pings. Normally clients get them at once, which rules
out retries afterwards. A request that waits for another engine's blocks must stay retriable. Its events are therefore
buffered here until the first event that results from GPU work.
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.dialects import errors, sse
from router.http.exchange import UpstreamResponse
from router.http.failures import ClosedBeforeResponse, StreamInterrupted, UpstreamError
from router.http.upstream import Upstream


def is_parsable_stream(answer: UpstreamResponse) -> bool:
    """True if an answer is a stream of events that can be parsed."""
    return answer.streams and answer.status == 200


def label(answer: UpstreamResponse) -> None:
    """Treat an answer as a stream if the client requested one and its body begins like one, regardless of its content
    type. Clients that requested a stream read it as one, and some engines and proxies send another content type or omit
    it."""
    if answer.streams or answer.coded or answer.status != 200 or answer.whole:
        return
    if answer.head.strip() and sse.is_valid_first_event(answer.head):
        answer.streams = answer.unlabelled = True


def says_full(answer: UpstreamResponse) -> bool | None:
    """Return True if an error, as an answer or as the first event of a stream, reports that the engine's queue is full.
    None: it is an internal error of the engine, which may mean the same."""
    error = sse.first_payload(answer.head) if answer.streams else answer.head
    return True if errors.says_full(error) else None if errors.is_error(error) else False


async def wait_for_first_output(
    answer: UpstreamResponse, works: Callable[[bytes], bool], upstream: Upstream
) -> UpstreamResponse | UpstreamError:
    """Buffer a stream up to its first event that results from GPU work, and return it. `works` decides from the bytes
    so far. If the stream breaks first, return the failure; the answer is then released."""
    answer.begun = False  # a request that is found lost, stalled or late can be retried
    try:
        while not (answer.complete or works(answer.head)):
            await answer.read_more()
    except (UpstreamError, StreamInterrupted) as broke:
        upstream.done(answer)
        return broke if isinstance(broke, UpstreamError) else ClosedBeforeResponse(str(broke))
    except BaseException:
        upstream.done(answer)
        raise
    answer.begun = answer.moved = True
    return answer
