"""The shipped agent sessions as a request log, with a time planted at the top of each system prompt, and what it costs.

The trace knows which blocks of a prompt were the same; its text is made of that (loadtest/common/traces.py), four bytes
a token. What a prompt has in common with an earlier one is found by comparing bytes, once without the time and once
with it: the difference is what the time loses. Sessions share nothing, since their blocks are their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from loadtest.common.traces import BYTES_PER_TOKEN, Request, Session, read_trace
from tests.core.insights.corpus import RECORDED
from tests.core.insights.damage import START
from tests.core.insights.truth import common

SYSTEM_SHARE = 0.8  # of the first request's prompt: tools' and system prompt's, before what the user asked
PATH = "/v1/chat/completions"


@dataclass(slots=True)
class Planted:
    """A log and its truth. Tokens are of prompts, four canonical bytes each; whoever reads the log with another ratio
    compares shares."""

    lines: list[bytes] = field(default_factory=list)  # JSON of requests, in the order of time
    requests: int = 0
    prompt_tokens: int = 0  # with the time in them
    lost_tokens: int = 0  # that an earlier prompt would have had, but for the time
    reused_tokens: int = 0  # that an earlier prompt has all the same

    @property
    def reachable(self) -> float:
        """The share of prompt tokens that an endless cache would have, were the time not there."""
        return (self.lost_tokens + self.reused_tokens) / max(1, self.prompt_tokens)


def shipped(requests_max: int, path: Path = RECORDED) -> Sequence[Session]:
    """The first of the recorded sessions."""
    return read_trace(path, requests_max=requests_max).sessions


def planted(sessions: Sequence[Session], *, stamped: bool = True) -> Planted:
    """All requests of the sessions, one session an hour later than the one before it. Not `stamped`: without the
    time, to compare with; nothing is lost then."""
    made = Planted()
    rows = sorted(_rows(sessions), key=lambda row: row[0])
    earlier: dict[str, list[tuple[bytes, bytes]]] = {}
    for at_s, session, request, system_bytes in rows:
        line = f"Current time: {(START + timedelta(seconds=at_s)).isoformat(timespec='seconds')}\n" if stamped else ""
        messages = _messages(request, system_bytes)
        plain = written(messages)
        messages[0]["content"] = line + messages[0]["content"]
        given = written(messages)
        own = earlier.setdefault(session, [])
        without, with_ = (max((common(old[i], new) for old in own), default=0) for i, new in ((0, plain), (1, given)))
        own.append((plain, given))
        made.lines.append(json.dumps({"model": "m", "messages": messages}, separators=(",", ":")).encode())
        made.requests += 1
        made.prompt_tokens += len(given) // BYTES_PER_TOKEN
        made.lost_tokens += max(0, without - with_) // BYTES_PER_TOKEN
        made.reused_tokens += with_ // BYTES_PER_TOKEN
    return made


def _rows(sessions: Sequence[Session]) -> Iterator[tuple[float, str, Request, int]]:
    for number, session in enumerate(sessions):
        first = session.requests[0].messages()[0]
        for request in session.requests:
            yield 3600.0 * number + request.at_s, session.name, request, int(SYSTEM_SHARE * len(first))


def _messages(request: Request, system_bytes: int) -> list[dict[str, str]]:
    """The system prompt is the beginning of the first message, as it was in the session's first request; where that
    message is shorter (a sub-agent's), four fifths of it are."""
    first, *rest = request.messages()
    at = system_bytes if system_bytes < len(first) else int(SYSTEM_SHARE * len(first))
    texts = [first[at:], *rest]
    return [{"role": "system", "content": first[:at]}, *({"role": "user", "content": text} for text in texts)]


def written(messages: Sequence[dict[str, str]]) -> bytes:
    """Canonical bytes of messages that are texts."""
    return "".join(f"\x1e{message['role']}\x1f{message['content']}" for message in messages).encode()
