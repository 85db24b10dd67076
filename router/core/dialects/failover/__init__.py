"""Stream failover: another replica continues a broken stream, and the client sees one answer.

A stream can be continued exactly if the engine reports the token ids of its prompt and of every piece of text. The next
replica gets both as a prompt of ids, and its output is appended to the text sent so far, with no text doubled or lost.
If ids are not reported, the text itself is sent to be continued, and may be tokenised differently. That is approximate,
and only done for requests that allow it.

plan           requests that may be continued, and the body of the next request
recorder       text and ids that a stream of OpenAI's APIs has sent so far
stitcher       the next replica's events, rewritten as if the first one had sent them
by_text        chats that are continued by their text
messages_plan  Messages, which become such a chat
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.dialects.failover.by_text import ChatRecorder, ResumedChat
from router.core.dialects.failover.messages_plan import MessagesRecorder, MessagesStitcher, messages_plan
from router.core.dialects.failover.plan import (
    APPROXIMATE,
    EXACT,
    MODES,
    OFF,
    REASONS,
    FailoverPlan,
    FailoverRefused,
    openai_plan,
    with_ids,
)
from router.core.dialects.failover.recorder import AlreadyComplete, FailoverMismatch, StreamRecorder
from router.core.dialects.failover.stitcher import StreamStitcher
from router.core.dialects.tenant_isolation import MESSAGES


def plan_of(
    path: str, body: bytes, engines: frozenset[str], mode: str, *, media: bool, context_tokens: int
) -> FailoverPlan:
    """Return the plan of a streaming request on a model of these kinds of engines. Raises FailoverRefused.

    - `mode`: EXACT or APPROXIMATE.
    - `media`: its prompt has parts that are no text, or cannot be interpreted.
    - `context_tokens`: the context length of the model.
    """
    if path == MESSAGES:
        return messages_plan(body, engines, mode)
    return openai_plan(path, body, engines, mode, media=media, context_tokens=context_tokens)


def carried_of(plan: FailoverPlan, body: Callable[[], bytes]) -> StreamRecorder | MessagesRecorder:
    """Return the object that carries a stream by this plan. `body` returns the request's body again, if the plan is by
    text."""
    if plan.path == MESSAGES:
        return MessagesRecorder(plan, body)
    return ChatRecorder(plan, body) if plan.by_text else StreamRecorder(plan)


def resumed_of(carried: StreamRecorder | MessagesRecorder) -> StreamStitcher | MessagesStitcher:
    """Return the object that rewrites the events of the replica that continues."""
    if isinstance(carried, MessagesRecorder):
        return MessagesStitcher(carried)
    return ResumedChat(carried) if isinstance(carried, ChatRecorder) else StreamStitcher(carried)


__all__ = [
    "APPROXIMATE",
    "EXACT",
    "MODES",
    "OFF",
    "REASONS",
    "AlreadyComplete",
    "FailoverMismatch",
    "FailoverPlan",
    "FailoverRefused",
    "MessagesRecorder",
    "MessagesStitcher",
    "StreamRecorder",
    "StreamStitcher",
    "carried_of",
    "plan_of",
    "resumed_of",
    "with_ids",
]
