"""`max_tokens` as clients send it: absent, or one of a few round limits far above any answer.

The limit is the client's choice and not the answer's length, which is unknown until the answer ends. A router that gets
the length as the limit knows the future: its placements are better than any in production.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any
from zlib import crc32

AnswerLimits = tuple[int | None, ...]
"""Limits that clients of a workload use in equal parts; None: the request has no limit."""
COMMON: AnswerLimits = (None, 4_096, 8_192)
FLAG = "--answer-limits"
HELP = "`max_tokens` of requests, in equal parts: numbers, or absent; default: absent 4096 8192"


def answer_limit(limits: AnswerLimits, session: str, longest_tokens: int) -> int | None:
    """Return the `max_tokens` of a session: the same for all of its requests, because one client sends them.

    `longest_tokens` is the length of the workload's longest answer. A smaller limit is left out, because it would cut
    an answer. So the choice does not depend on a single answer.
    """
    if not limits:
        return None
    limit = limits[crc32(session.encode()) % len(limits)]
    return limit if limit is None or limit >= longest_tokens else None


def parse_limits(words: Sequence[str]) -> AnswerLimits:
    """Parse limits of a command line, such as `absent 4096`. Raises ValueError."""
    limits = tuple(None if word == "absent" else int(word) for word in words)
    if any(limit is not None and limit < 1 for limit in limits):
        raise ValueError("a limit must be a number above 0, or absent")
    return limits


class LimitsAction(argparse.Action):
    """Parses the words of FLAG, such as `absent 4096`, into limits."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:  # noqa: ANN401 - argparse's
        """Set the attribute; an invalid word ends the command."""
        try:
            setattr(namespace, self.dest, parse_limits(values))
        except ValueError:
            parser.error(f"{FLAG} {' '.join(values)}: must be numbers above 0, or absent")
