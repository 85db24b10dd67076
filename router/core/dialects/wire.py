"""What the dialects share in reading bodies: fields that stay undecoded until they are asked for, and counts.

A body is decoded once, and only as deep as placement needs: Raw fields are neither checked nor copied by msgspec.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Raw

from router.core.dialects.base import BadBody
from router.core.facts import Usage

USAGE_BODY_BYTES_MAX = 4 << 20  # usage is not looked for in larger answers (embeddings)

ABSENT = Raw(b"")
# Raw fields are checked for UTF-8 and for depth (CPython's recursion limit) only when they are decoded.
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)
_T = TypeVar("_T")
# An object with at most one level of objects in it, which is what usage is in every dialect.
_USAGE_AT = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
# Events are named on a line of their own; JSON has no line ends within strings.
_EVENT_NAME = re.compile(rb"^event: ?(\S+)\r?\n", re.MULTILINE)


def decode_body(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """The top level of a request. Raises BadBody when it is not a JSON object."""
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise BadBody("invalid_json", f"The request body is not a JSON object: {error}") from error


def decoded(decode: Callable[[bytes], _T], data: bytes) -> _T | None:
    """What an engine said, or None where it cannot be read."""
    try:
        return decode(data)
    except UNREADABLE:
        return None


def model_of(raw: Raw) -> str | None:
    """The model's name. Raises BadBody when it is there and no string."""
    model = as_type(str, raw)
    if model is None and given(raw):
        raise BadBody("invalid_model", "The field 'model' must be a string.")
    return model


def as_type(type_: type[_T], raw: Raw) -> _T | None:
    """Decode a Raw field if it is of this type; None when absent, null or of another."""
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw, type=type_)
    except UNREADABLE:
        return None


def given(raw: Raw) -> bool:
    """Present and not null. (A Raw never equals bytes.)"""
    return raw is not ABSENT and bool(raw) and bytes(raw) != b"null"


def positive(raw: Raw) -> int | None:
    """A count of at least 1, else None."""
    value = as_type(int, raw)
    return value if value is not None and value > 0 else None


def salt_of(raw: Raw) -> bytes:
    """`cache_salt` as part of the identity."""
    return (as_type(str, raw) or "").encode(errors="surrogatepass")


def counts(prompt_tokens: int, completion_tokens: int | None, cached_tokens: int | None) -> Usage | None:
    """Usage from what an engine reports; counts that cannot be are mended, a negative prompt is no usage."""
    if prompt_tokens < 0:
        return None
    if cached_tokens is not None:
        cached_tokens = min(max(0, cached_tokens), prompt_tokens)
    return Usage(prompt_tokens, max(0, completion_tokens or 0), cached_tokens)


def cut_usage(type_: type[_T], data: bytes) -> _T | None:
    """The last usage object in an event whose beginning is cut off."""
    found = _USAGE_AT.findall(data)
    try:
        return msgspec.json.decode(found[-1], type=type_) if found else None
    except UNREADABLE:
        return None


def has_event_besides(early: frozenset[bytes], chunk: bytes) -> bool:
    """Whether a piece of a stream begins an event that is none of these."""
    return any(name not in early for name in _EVENT_NAME.findall(chunk))
