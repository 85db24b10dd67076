"""How many tokens a request has used, where its engine does not say so, or says what cannot be.

Tenants have rates of tokens (core/admission/rates.py), so neither they nor an engine may choose what is counted.
A stream's events are no measure: engines put several tokens into one where they guess ahead, where they are told to, or
where a client reads slowly. So the text in the last events that have passed is set against their bytes, and all bytes
that have passed are taken to hold as much of it.
"""

from __future__ import annotations

import re
from typing import Protocol

from router.core.facts.placements import Usage

BYTES_PER_TOKEN = 4  # bytes of an answer's text that are taken for one token
# Fields of every dialect's events and answers that hold what the model said. Quotes within strings have backslashes.
_SAID = re.compile(
    rb'"(?:content|text|delta|arguments|partial_json|reasoning|reasoning_content|thinking|refusal)"\s*:\s*'
    rb'"((?:[^"\\]|\\.)*)'
)


class PassedStream(Protocol):
    """A stream that has passed, whoever passed it on."""

    @property
    def events(self) -> int:
        """Events that have passed."""

    @property
    def tail(self) -> bytes:
        """The last pieces that have passed."""

    @property
    def bytes(self) -> int:
        """Bytes that have passed."""


def believed(usage: Usage | None, body_bytes: int, answer_bytes: int, context_tokens: int) -> Usage | None:
    """What an engine counted, unless it cannot be: a prompt has no more tokens than its body has bytes, besides what a
    template, media or a stored conversation add within the model's context; an answer no more than its bytes, besides
    what is not shown of it."""
    if usage is None or (
        usage.prompt_tokens <= body_bytes + context_tokens
        and usage.completion_tokens <= max(answer_bytes, context_tokens)
    ):
        return usage
    return None


def tokens_of(stream: PassedStream) -> int:
    """Tokens of a stream of which no usage is known: at least one for each event."""
    return max(stream.events, _tokens(stream.tail, stream.bytes))


def tokens_in(answer: bytes) -> int:
    """Tokens of a whole answer of which no usage is known."""
    return _tokens(answer, len(answer))


def _tokens(shown: bytes, size: int) -> int:
    said = sum(map(len, _SAID.findall(shown)))
    return said * size // (BYTES_PER_TOKEN * len(shown)) if shown else 0
