"""What a dialect must know: how to read a request for placement, and how to speak of usage and errors."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, Protocol

from router.core.facts.placements import Ending, Usage
from router.core.facts.requests import Ask, TemplateInput
from router.core.prompts.beginnings import Seen


class Dialect(Protocol):
    """One API family. Pure: bytes in, facts or bytes out."""

    name: str
    says_done: bool  # a `[DONE]` follows the last event of its streams
    seen_as: tuple[bytes, bytes]  # names of its bodies in a `Seen`: not kept, and kept; b"" where none are looked for

    def parse(self, path: str, body: bytes, *, keep: bool = True, seen: Seen | None = None) -> Ask:
        """Read what placement needs. Raises BadBody only for what no engine could take: not JSON, no object.

        `keep`: `template_input` will be asked, so what is decoded is kept for it (`Ask.decoded`). Without it less is
        decoded, and with `seen` only what was not read before. Neither changes what is read.
        """

    def template_input(self, path: str, body: bytes, decoded: object = None) -> TemplateInput | None:
        """What the engine hands to its chat template and tokenizer. None when it cannot be known here, whatever the
        body is: nothing is raised."""

    def usage(self, body: bytes) -> Usage | None:
        """Token counts of an answer that did not stream."""

    def stream_usage(self, tail: bytes) -> Usage | None:
        """Token counts from the last bytes of a stream."""

    def event_error(self, chunk: bytes) -> int | None:
        """Status of the error that a stream's first event carries; None for a healthy event."""

    def aborted(self, head: bytes) -> Abort | None:
        """What an answer, or the first piece of a stream, came to that the engine gave up; None: it did not."""

    def begun(self, chunk: bytes) -> bool:
        """Whether a piece of a stream can only come after prefill: from then on its first token is known."""

    def ended(self, tail: bytes) -> Ending | None:
        """How the stream with these last events ended: OK; REFUSED_BY_ENGINE or FAILED if the engine reports an error,
        of a status below 500 or not. None: the stream is not whole."""

    def with_usage(self, body: bytes, options: dict[str, Any] | None = None) -> bytes:
        """The same request, asking for usage at the end of its stream; spliced, not re-serialised. `options` are those
        that were read of the body (`Ask.stream_options`). Not called when usage will come anyway (`Ask.wants_usage`).
        """

    def is_usage_event(self, event: bytes) -> bool:
        """Whether this event exists only because `with_usage` asked for it."""

    def is_usage_unasked(self, event: bytes) -> bool:
        """Whether this event shows that the engine sends usage whether it is asked or not: `with_usage` asks for none
        of the usage in it."""

    def error(self, status: int, code: str, message: str, param: str | None = None) -> bytes:
        """The dialect's own error body."""

    def error_event(self, status: int, code: str, message: str, tail: bytes) -> bytes:
        """The last event of a stream that is not whole, sent behind these events: an error that official clients
        raise."""


class Abort(Enum):
    """What came of a generation that its engine ended before its time, as an operator may ask for, or its shutdown."""

    PARTIAL = "partial"  # something was generated
    NOTHING = "nothing"
    FAILED = "failed"  # the engine says that it failed, by a status of 500 and above


# Text, calls or ids of a generation, none of them empty; within a string of JSON the quotes have backslashes.
_GENERATED = re.compile(
    rb'"(?:text|content|reasoning|reasoning_content|thinking|arguments)"\s*:\s*"[^"]'
    rb'|"(?:output_ids|token_ids|tool_calls)"\s*:\s*\[\s*[^\s\]]'
)


def abort_of(head: bytes) -> Abort:
    """What came of a generation, by its answer or the first piece of its stream."""
    return Abort.PARTIAL if _GENERATED.search(head) else Abort.NOTHING


class UsageUnasked:
    """A dialect whose streams carry usage whether a request asks for it or not."""

    def with_usage(self, body: bytes, options: dict[str, Any] | None = None) -> bytes:
        """The body as it is."""
        return body

    def is_usage_event(self, event: bytes) -> bool:
        """Never: no event exists only because it was asked for."""
        return False

    def is_usage_unasked(self, event: bytes) -> bool:
        """Never: there is nothing to find out."""
        return False
