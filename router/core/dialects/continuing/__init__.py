"""Going on with a stream that broke, on another replica, so that its client sees one answer.

A stream can be continued exactly where the engine tells the token ids of its prompt and of every piece of text: the
next replica gets both as a prompt of ids, and what it says stands behind what was said, with nothing doubled or lost.
Where ids are not told, the text itself is given to be continued, which may be cut into other tokens: that is
approximate, and only done for whoever asks for it.

plan      which requests may be continued and why others may not; what the next request is made of
carried   what a stream of OpenAI's APIs has said so far, and its events without the ids
resumed   the next replica's events, as if the first one had sent them
by_text   chats that are continued by their text
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.dialects.continuing.by_text import CarriedChat, ResumedChat
from router.core.dialects.continuing.carried import CarriedStream, SaidToEnd, StreamDiffers
from router.core.dialects.continuing.plan import (
    APPROXIMATE,
    EXACT,
    MODES,
    OFF,
    REASONS,
    ContinuationPlan,
    NotContinued,
    plan_of,
    with_ids,
)
from router.core.dialects.continuing.resumed import ResumedStream


def carried_of(plan: ContinuationPlan, body: Callable[[], bytes]) -> CarriedStream:
    """What carries a stream by this plan. `body` gives its request's body once more, where the plan is by text."""
    return CarriedChat(plan, body) if plan.by_text else CarriedStream(plan)


def resumed_of(carried: CarriedStream) -> ResumedStream:
    """What rewrites the events of the replica that goes on."""
    return ResumedChat(carried) if isinstance(carried, CarriedChat) else ResumedStream(carried)


__all__ = [
    "APPROXIMATE",
    "EXACT",
    "MODES",
    "OFF",
    "REASONS",
    "CarriedStream",
    "ContinuationPlan",
    "NotContinued",
    "ResumedStream",
    "SaidToEnd",
    "StreamDiffers",
    "carried_of",
    "plan_of",
    "resumed_of",
    "with_ids",
]
