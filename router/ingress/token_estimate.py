"""Token count of a request if its engine reports none, or an impossible one.

Tenants have rates of tokens (core/admission/rate_limits.py), so neither they nor an engine may choose the count. The
number of a stream's events is no measure. Engines put several tokens into one event with speculative decoding, by
configuration, or if a client reads slowly. So the share of text in the last events is measured in bytes. All bytes of
the stream are assumed to have the same share.
"""

from __future__ import annotations

import re
from typing import Protocol

from router.core.types.placements import Usage

BYTES_PER_TOKEN = 4  # bytes of an answer's text that count as one token
# Fields of every dialect's events and answers that hold the model's text. Quotes within strings have backslashes.
_SAID = re.compile(
    rb'"(?:content|text|delta|arguments|partial_json|reasoning|reasoning_content|thinking|refusal)"\s*:\s*'
    rb'"((?:[^"\\]|\\.)*)'
)


class RelayStats(Protocol):
    """A stream that was relayed, by either frontend."""

    @property
    def events(self) -> int:
        """Events that were relayed."""

    @property
    def tail(self) -> bytes:
        """The last pieces that were relayed."""

    @property
    def bytes(self) -> int:
        """Bytes that were relayed."""


def validate_usage(usage: Usage | None, body_bytes: int, answer_bytes: int, context_tokens: int) -> Usage | None:
    """Return an engine's count, unless it is impossible. A prompt has at most as many tokens as its body has bytes,
    plus those that a template, media or a stored conversation add within the model's context. An answer has at most as
    many tokens as its bytes. Some tokens may not be shown, so the model's context is also accepted."""
    if usage is None or (
        usage.prompt_tokens <= body_bytes + context_tokens
        and usage.completion_tokens <= max(answer_bytes, context_tokens)
    ):
        return usage
    return None


def estimate_stream_tokens(stream: RelayStats) -> int:
    """Estimate the tokens of a stream without usage: at least one for each event."""
    return max(stream.events, _tokens(stream.tail, stream.bytes))


def estimate_body_tokens(answer: bytes) -> int:
    """Estimate the tokens of a complete answer without usage."""
    return _tokens(answer, len(answer))


def _tokens(shown: bytes, size: int) -> int:
    said = sum(map(len, _SAID.findall(shown)))
    return said * size // (BYTES_PER_TOKEN * len(shown)) if shown else 0
