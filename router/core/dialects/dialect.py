"""Interface of a dialect: reads requests for placement, and reads and writes usage and errors."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, Protocol

from router.core.prompts.incremental_parse import BodyPrefixCache
from router.core.types.placements import EndReason, Usage
from router.core.types.requests import RequestSpec, TemplateInput


class Dialect(Protocol):
    """One API family. Pure: bytes in, facts or bytes out."""

    name: str
    says_done: bool  # a `[DONE]` follows the last event of its streams
    # names of its bodies in a `BodyPrefixCache`, not kept and kept; b"" if its bodies are not indexed
    seen_as: tuple[bytes, bytes]

    def parse(self, path: str, body: bytes, *, keep: bool = True, seen: BodyPrefixCache | None = None) -> RequestSpec:
        """Read the fields that placement needs. Raises InvalidBody only for a body that no engine could take: not JSON,
        or not an object.

        - `keep`: `template_input` will be called, so decoded fields are kept for it (`RequestSpec.decoded`). Otherwise
          less is decoded.
        - `seen`: only the part of the body that was not read before is decoded.

        Neither parameter changes the result for placement.
        """

    def template_input(self, path: str, body: bytes, decoded: object = None) -> TemplateInput | None:
        """Return the input of the engine's chat template and tokenizer. None if it cannot be determined here. Never
        raises, for any body."""

    def usage(self, body: bytes) -> Usage | None:
        """Return the token counts of an answer that did not stream."""

    def stream_usage(self, tail: bytes) -> Usage | None:
        """Return the token counts in the last bytes of a stream."""

    def event_error(self, chunk: bytes) -> int | None:
        """Return the status of the error in a stream's first event. None for a healthy event."""

    def find_abort(self, head: bytes) -> Abort | None:
        """Return the outcome of a generation that the engine aborted, from the answer or the first piece of the stream.
        None if it was not aborted."""

    def has_output(self, chunk: bytes) -> bool:
        """True if a piece of a stream can only come after prefill. Its first token is known by then."""

    def find_ending(self, tail: bytes) -> EndReason | None:
        """Return the outcome of the stream with these last events. OK: it is whole. FAILED: the engine reports an error
        of status 500 or above. REFUSED_BY_ENGINE: it reports an error of a status below 500. None: the stream is not
        whole."""

    def with_usage(self, body: bytes, options: dict[str, Any] | None = None) -> bytes:
        """Return the same request with usage requested at the end of its stream; spliced, not re-serialised. `options`
        are the ones read from the body (`RequestSpec.stream_options`). Not called if the stream has usage anyway
        (`RequestSpec.wants_usage`)."""

    def is_usage_event(self, event: bytes) -> bool:
        """True if this event exists only because `with_usage` requested it."""

    def is_usage_unasked(self, event: bytes) -> bool:
        """True if this event shows that the engine sends usage even without a request for it: none of the usage in it
        is due to `with_usage`."""

    def error(self, status: int, code: str, message: str, param: str | None = None) -> bytes:
        """Return the dialect's own error body."""

    def error_event(self, status: int, code: str, message: str, tail: bytes) -> bytes:
        """Return the last event of a stream that is not whole, to be sent after these events: an error that official
        clients raise."""


class Abort(Enum):
    """Outcome of a generation that its engine ended early, for example at an operator's request or at shutdown."""

    PARTIAL = "partial"  # a part of the answer was generated
    NOTHING = "nothing"
    FAILED = "failed"  # the engine reports a failure, by a status of 500 and above


# Text, calls or ids of a generation, none of them empty. Within a JSON string the quotes have backslashes.
_GENERATED = re.compile(
    rb'"(?:text|content|reasoning|reasoning_content|thinking|arguments)"\s*:\s*"[^"]'
    rb'|"(?:output_ids|token_ids|tool_calls)"\s*:\s*\[\s*[^\s\]]'
)


def abort_of(head: bytes) -> Abort:
    """Return the outcome of an aborted generation, from its answer or the first piece of its stream."""
    return Abort.PARTIAL if _GENERATED.search(head) else Abort.NOTHING


class NoUsageRequest:
    """A dialect with usage in all streams, requested or not."""

    def with_usage(self, body: bytes, options: dict[str, Any] | None = None) -> bytes:
        """Return the body unchanged."""
        return body

    def is_usage_event(self, event: bytes) -> bool:
        """Always False: no event exists only because usage was requested."""
        return False

    def is_usage_unasked(self, event: bytes) -> bool:
        """Always False: no detection is needed."""
        return False
