"""Going on with a stream that broke, on another replica, so that its client sees one answer.

A stream can be continued exactly where the engine tells the token ids of its prompt and of every piece of text: the
next replica gets both as a prompt of ids, and what it says stands behind what was said, with nothing doubled or lost.
Where ids are not told, the text itself is given to be continued, which may be cut into other tokens: that is
approximate, and only done for whoever asks for it.

plan      which requests may be continued and why others may not; what the next request is made of
carried   what a stream of OpenAI's APIs has said so far, and its events without the ids
resumed   the next replica's events, as if the first one had sent them
by_text   chats that are continued by their text
messages  Messages, which become such a chat
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.dialects.continuing.by_text import CarriedChat, ResumedChat
from router.core.dialects.continuing.carried import CarriedStream, SaidToEnd, StreamDiffers
from router.core.dialects.continuing.messages import CarriedMessages, ResumedMessages, messages_plan
from router.core.dialects.continuing.plan import (
    APPROXIMATE,
    EXACT,
    MODES,
    OFF,
    REASONS,
    ContinuationPlan,
    NotContinued,
    openai_plan,
    with_ids,
)
from router.core.dialects.continuing.resumed import ResumedStream
from router.core.dialects.tenancy import MESSAGES


def plan_of(
    path: str, body: bytes, engines: frozenset[str], mode: str, *, media: bool, context_tokens: int
) -> ContinuationPlan:
    """The plan of a streaming request on a model of these kinds of engines. `mode` is EXACT or APPROXIMATE; `media`:
    its prompt has parts that are no text, or is not understood; `context_tokens`: those that the model has room for.
    Raises NotContinued."""
    if path == MESSAGES:
        return messages_plan(body, engines, mode)
    return openai_plan(path, body, engines, mode, media=media, context_tokens=context_tokens)


def carried_of(plan: ContinuationPlan, body: Callable[[], bytes]) -> CarriedStream | CarriedMessages:
    """What carries a stream by this plan. `body` gives its request's body once more, where the plan is by text."""
    if plan.path == MESSAGES:
        return CarriedMessages(plan, body)
    return CarriedChat(plan, body) if plan.by_text else CarriedStream(plan)


def resumed_of(carried: CarriedStream | CarriedMessages) -> ResumedStream | ResumedMessages:
    """What rewrites the events of the replica that goes on."""
    if isinstance(carried, CarriedMessages):
        return ResumedMessages(carried)
    return ResumedChat(carried) if isinstance(carried, CarriedChat) else ResumedStream(carried)


__all__ = [
    "APPROXIMATE",
    "EXACT",
    "MODES",
    "OFF",
    "REASONS",
    "CarriedMessages",
    "CarriedStream",
    "ContinuationPlan",
    "NotContinued",
    "ResumedMessages",
    "ResumedStream",
    "SaidToEnd",
    "StreamDiffers",
    "carried_of",
    "plan_of",
    "resumed_of",
    "with_ids",
]
