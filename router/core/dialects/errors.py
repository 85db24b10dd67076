"""Statuses of errors that engines report inside an answer of status 200, and the errors that only mean "full".

An error object has a number (`code`), words (`type`, or `code` if that is no number), or neither. The number decides.
Without a number the words decide, in the spellings of vLLM, SGLang, OpenAI and Anthropic. An error without either
counts as 500. Below 500 the request itself is at fault, and neither a retry nor a breaker would help.
"""

from __future__ import annotations

import re
from http import HTTPStatus

import msgspec
from msgspec import Raw

from router.core.prompts import json_fields
from router.core.prompts.json_fields import ABSENT
from router.core.types.placements import EndReason

WORD_CHARS_MAX = 128  # a longer word is not an error type


class ErrorFields(msgspec.Struct):
    """Fields that the error objects of all APIs have."""

    type: Raw = ABSENT
    code: Raw = ABSENT


_NO_LETTER = re.compile("[^a-z0-9]+")
# The words of each status, without case, punctuation, "error" and "exception" ("BAD_REQUEST", "BadRequestError").
_WORDS = {_NO_LETTER.sub("", status.phrase.lower()): status.value for status in HTTPStatus if status >= 400}
_WORDS |= {_NO_LETTER.sub("", status.name.lower()): status.value for status in HTTPStatus if status >= 400}
_WORDS |= {
    "server": 500,
    "internal": 500,
    "api": 500,
    "overloaded": 503,
    "timeout": 504,
    "authentication": 401,
    "permission": 403,
    "permissiondenied": 403,
    "billing": 403,
    "ratelimit": 429,
    "ratelimitexceeded": 429,
    "insufficientquota": 429,
    "requesttoolarge": 413,
    "requesttimeout": 408,
    "value": 400,
    "type": 400,
}
# Parts of words; the first match counts: `context_length_exceeded`, `VLLMValidationError`, `model_not_found`.
_PARTS = (
    ("notfound", 404),
    ("invalid", 400),
    ("badrequest", 400),
    ("validation", 400),
    ("unprocessable", 422),
    ("unsupported", 400),
    ("contextlength", 400),
    ("contextwindow", 400),
    ("toolong", 400),
    ("toolarge", 413),
    ("contentfilter", 400),
    ("contentpolicy", 400),
    ("image", 400),
    ("ratelimit", 429),
    ("toomany", 429),
    ("quota", 429),
    ("unauthorized", 401),
    ("forbidden", 403),
    ("overloaded", 503),
    ("unavailable", 503),
    ("timeout", 504),
)
# Messages of engines with a full queue: SGLang 0.5.23 (managers/scheduler.py; its Messages API hides the message behind
# the type), and vLLM 0.32 while it changes its number of ranks (serve/elastic_ep/middleware.py).
_FULL = re.compile(
    rb"request queue is full|aborted by a higher priority request|request (?:waiting|running) timeout reached"
    rb'|currently scaling|"type"\s*:\s*"overloaded_error"',
    re.IGNORECASE,
)
FULL_BYTES_MAX = 16 << 10  # a longer body is not such an error
_decode_flat = msgspec.json.Decoder(ErrorFields).decode


def status_of(error: ErrorFields) -> int:
    """Return the status that an error object stands for, 400 to 599."""
    for raw in (error.code, error.type):
        number = _number(raw)
        if number is not None and 400 <= number < 600:
            return number
    return _parse_status_words(error.type) or _parse_status_words(error.code) or 500


def status_of_raw(error: Raw) -> int:
    """Return the same for an undecoded error, which may not be an object."""
    return status_of(json_fields.decode_or_none(_decode_flat, bytes(error)) or ErrorFields())


def ending_of(status: int, event: bytes) -> EndReason:
    """Return the ending of a stream with an error of this status in this event."""
    return EndReason.FAILED if status >= 500 and not says_full(event) else EndReason.REFUSED_BY_ENGINE


def says_full(body: bytes) -> bool:
    """True if an error, of any API, means that the engine is healthy but accepts no more requests at present."""
    return len(body) <= FULL_BYTES_MAX and _FULL.search(body) is not None


def is_error(body: bytes) -> bool:
    """True if the body is an error object of an engine: JSON with an `error`, or SGLang's flat form."""
    if len(body) > FULL_BYTES_MAX:
        return False
    fields = json_fields.decode_or_none(_decode_any, body)
    return fields is not None and (json_fields.has_value(fields.error) or fields.object == "error")


class _Any(msgspec.Struct):
    error: Raw = ABSENT
    object: str = ""


_decode_any = msgspec.json.Decoder(_Any).decode


def _number(raw: Raw) -> int | None:
    number = json_fields.decode_as(int, raw)
    if number is not None:
        return number
    text = json_fields.decode_as(str, raw)
    return int(text) if text is not None and len(text) == 3 and text.isascii() and text.isdigit() else None


def _parse_status_words(raw: Raw) -> int:
    """Return the status that the words stand for, 0 if they are unknown."""
    text = json_fields.decode_as(str, raw)
    if text is None or len(text) > WORD_CHARS_MAX:
        return 0
    word = _NO_LETTER.sub("", text.lower()).removesuffix("exception").removesuffix("error")
    known = _WORDS.get(word)
    if known is not None:
        return known
    return next((status for part, status in _PARTS if part in word), 0)
