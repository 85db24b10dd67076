"""Stream failover: another replica continues a broken stream, and the client sees one answer, or an honest error.

The engine reports the token ids of its prompt and of every piece of text. The next replica gets both as a prompt of
ids, and its output is appended to the text sent so far, with no text doubled or lost. A stream that cannot be continued
in this way is not continued.

plan        requests that may be continued, and the body of the next request
recorder    text and ids that a stream has sent so far
stitcher    the next replica's events, rewritten as if the first one had sent them
tool_chat   both for chats that may call tools, which are continued as chats
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.dialects.failover.plan import (
    EXACT,
    OFF,
    REASONS,
    FailoverPlan,
    FailoverRefused,
    plan_of,
    with_ids,
)
from router.core.dialects.failover.recorder import AlreadyComplete, FailoverMismatch, StreamRecorder
from router.core.dialects.failover.stitcher import StreamStitcher
from router.core.dialects.failover.tool_chat import ToolChatRecorder, ToolChatStitcher


def recorder_of(plan: FailoverPlan, body: Callable[[], bytes]) -> StreamRecorder:
    """Return the recorder of a stream with this plan. `body` returns the request's body again, if the plan needs it."""
    return ToolChatRecorder(plan, body) if plan.calls_tools else StreamRecorder(plan)


def stitcher_of(recorder: StreamRecorder) -> StreamStitcher:
    """Return the stitcher of the events of the replica that continues."""
    return ToolChatStitcher(recorder) if isinstance(recorder, ToolChatRecorder) else StreamStitcher(recorder)


__all__ = [
    "EXACT",
    "OFF",
    "REASONS",
    "AlreadyComplete",
    "FailoverMismatch",
    "FailoverPlan",
    "FailoverRefused",
    "StreamRecorder",
    "StreamStitcher",
    "plan_of",
    "recorder_of",
    "stitcher_of",
    "with_ids",
]
