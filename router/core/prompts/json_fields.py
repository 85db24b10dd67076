"""Body decoding shared by the dialects: fields that stay undecoded until they are used, and counts.

A body is decoded once, and only as deep as placement needs: Raw fields are neither checked nor copied by msgspec.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from router.core.prompts import gil_release, sliced_json
from router.core.types.placements import Usage

USAGE_BODY_BYTES_MAX = 4 << 20  # usage is not searched for in larger answers (embeddings)

USAGE_TOKENS_MAX = 1 << 30  # no prompt or answer has more; sums of invented counts would overflow the fields of files
METADATA_BYTES_MAX = 16 << 10  # OpenAI takes sixteen pairs of 64 and 512 characters

# Brackets looked at one by one before the whole body is scanned: at most LOOKS_MAX, or one for each BYTES_A_LOOK bytes.
LOOKS_MAX, BYTES_A_LOOK = 2_048, 128
SLICE_BYTES = 32 << 10  # scanned in one go: half a millisecond at most
QUOTES_MAX = 1_024  # quotes in a slice that are looked at one by one; if there are more, escapes are removed first
PARTS, VALUES, DEPTH = "parts", "values", "depth"  # kinds of excess
_WHITE = b" \t\r\n"
_BEFORE_BRACKET = b"[,:" + _WHITE  # an object or array begins after one of these
# Bytes that may follow the bracket of a non-empty object or array. Quotes within strings are escaped.
_IN_OBJECT = b'"' + _WHITE
_IN_ARRAY = b'"[{-0123456789tfnNI' + _WHITE
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")

ABSENT = Raw(b"")
# Raw fields are checked for UTF-8 and for depth (CPython's recursion limit) only when they are decoded.
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)
_T = TypeVar("_T")
_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))  # pydantic_core, src/input/shared.rs
_FALSE = frozenset(("0", "off", "f", "false", "n", "no"))
# White space that Rust's `trim` removes, and an integer as pydantic reads one in a string (input_python.rs there).
_TRIMMED = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_WHOLE = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?")
WHOLE_CHARS_MAX, NUMBER_BYTES_MAX = 64, 512  # of an integer in a string; of its JSON
_decode_flag = msgspec.json.Decoder(bool | int | float | str | None).decode
_decode_metadata = msgspec.json.Decoder(dict[str, Raw]).decode
# An object with at most one level of objects in it: the form of usage in every dialect.
_USAGE_AT = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
_USAGE_NAME = b'"usage"'
USAGE_OBJECT_BYTES_MAX = 4_096  # of the longest usage object, its name included; engines send about 300
USAGE_NAMES_MAX = 64  # fields of this name that are looked at, from the end: most events have one, which is null
# Events are named on a separate line; JSON has no line ends within strings.
_EVENT_NAME = re.compile(rb"^event: ?(\S+)\r?\n", re.MULTILINE)


def decode_body(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode the top level of a request. Raises InvalidBody if it is not a JSON object."""
    try:
        return sliced_json.read(decoder.decode, body)
    except UNREADABLE as error:
        raise InvalidBody("invalid_json", f"The request body is not a JSON object: {error}") from error


def check_limits(body: bytes, depth_max: int, parts_max: int, values_max: int) -> str:
    """Return the first limit that this JSON exceeds, "" if it exceeds no limit.

    - DEPTH: objects and arrays are nested more than `depth_max` deep.
    - PARTS: more than `parts_max` of them begin (messages, their parts, tools, and everything in these).
    - VALUES: more than `values_max` commas separate values, such as the ids of a prompt.

    Input that is not JSON may yield any of them. The scan takes about 10 us for 200 KB if few objects and arrays may
    begin, strings included. Otherwise it takes about 2 ms a megabyte.
    """
    if _is_plain(body, depth_max, parts_max, values_max):
        return ""
    parts = values = depth = deepest = 0
    for piece in _outside_strings(body):
        parts += piece.count(b"{") + piece.count(b"[")
        values += piece.count(b",")
        # before the depth, which takes far longer if there are many brackets
        if parts > parts_max or values > values_max:
            return PARTS if parts > parts_max else VALUES
        steps = piece.translate(_STEPS, _NO_BRACKETS)
        if not steps:
            continue
        deepest = max(deepest, *accumulate(memoryview(steps).cast("b"), initial=depth))
        depth += 2 * steps.count(b"\x01") - len(steps)
        if deepest > depth_max:
            return DEPTH
    return ""


def _is_plain(body: bytes, depth_max: int, parts_max: int, values_max: int) -> bool:
    """True if a quick check shows that no limit is exceeded. Brackets are found one by one: counting them looks at each
    byte, and takes five times as long if brackets are few."""
    size = len(body)
    if size <= 2 * depth_max and size <= parts_max and size <= 2 * values_max:
        return True
    if size > 2 * values_max or depth_max < 2:  # a value and its comma take two bytes at least
        return False
    # The number that may still begin. The outermost one has no byte before it, and the innermost one may be empty.
    begin = depth_max - 2
    looks_max = max(LOOKS_MAX, size // BYTES_A_LOOK)
    parts = min(parts_max, 2 * looks_max)
    for bracket, inside in ((b"[", _IN_ARRAY), (b"{", _IN_OBJECT)):
        at, find = body.find(bracket), body.find
        most = min(looks_max, parts + 1)
        for looks in range(most):
            if at < 0:
                parts -= looks
                break
            before = body[at - 1]
            if before in _BEFORE_BRACKET and body[at + 1 : at + 2] in inside:
                # Code and prose in strings have brackets after a blank. Before that blank is a word or a sign.
                begin -= before not in _WHITE or body[at - 2] in _BEFORE_BRACKET
                if begin < 0:
                    return False
            at = find(bracket, at + 1)
        else:
            return False
    return True


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """Yield the bytes outside of strings, in slices of the body. Other threads may run between two slices."""
    at = inside = 0
    while at < len(body):
        piece = body[at : at + SLICE_BYTES]
        if sliced_json.escapes(piece):  # an escape stays whole
            piece = body[at : at + SLICE_BYTES + 1]
        at += len(piece)
        gil_release.release_gil()
        parts = piece.split(b'"')
        if len(parts) <= QUOTES_MAX:
            parts = _drop_escaped_parts(parts, inside)
        else:
            parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= ~len(parts) & 1


def _drop_escaped_parts(parts: list[bytes], inside: int) -> list[bytes]:
    """Return the parts between quotes, with parts dropped that an escaped quote separates from the part before. The
    remaining parts are outside and inside of strings alternately. The first one is inside of a string if `inside` is
    set."""
    kept: list[bytes] = []
    outside, escaped = bool(inside), False
    for part in parts:
        if not escaped:
            kept.append(part)
            outside = not outside
        escaped = not outside and part.endswith(b"\\") and sliced_json.escapes(part)
    return kept


def decode_or_none(decode: Callable[[bytes], _T], data: bytes) -> _T | None:
    """Decode a response of an engine. None if it cannot be read."""
    try:
        return decode(data)
    except UNREADABLE:
        return None


def model_of(raw: Raw) -> str | None:
    """Return the model's name. None if it is absent or empty; engines take an empty name for their base model too.
    Raises InvalidBody if the field is present and not a string."""
    model = decode_as(str, raw)
    if model is None and has_value(raw):
        raise InvalidBody("invalid_model", "The field 'model' must be a string.")
    return model or None


def adapter_of(raw: Raw) -> tuple[str, bytes]:
    """Return (the LoRA adapter of `lora_path`, bytes that also separate caches). A batch may have one adapter for each
    prompt."""
    if not has_value(raw):
        return "", b""
    adapter = decode_as(str, raw)
    return ("", b"\x1flora_path\x1f" + bytes(raw)) if adapter is None else (adapter, b"")


def decode_as(type_: type[_T], raw: Raw) -> _T | None:
    """Decode a Raw field if it is of this type. None if it is absent, null or of another type."""
    if not raw:
        return None
    try:
        if len(raw) < sliced_json.LONG_BYTES_MIN:
            return msgspec.json.decode(raw, type=type_)
        if type_ is not dict and type_ is not list:
            found: _T = sliced_json.read(partial(msgspec.json.decode, type=type_), raw)
            return found
        value = sliced_json.value(raw)
    except UNREADABLE:
        return None
    return value if isinstance(value, type_) else None


def is_true(raw: Raw) -> bool:
    """True for values that pydantic takes for true, as engines read a flag: `true`, 1 and 1.0, and words such as
    "yes"."""
    return flag(raw) is True


def flag(raw: Raw) -> bool | None:
    """Return the flag that pydantic reads from this field. None for null, and for values that it refuses."""
    return flag_of(decode_or_none(_decode_flag, bytes(raw)) if raw else None)


def flag_of(value: object) -> bool | None:
    """Return the same for a decoded value."""
    if value_is_true(value):
        return True
    is_false = value.lower() in _FALSE if isinstance(value, str) else value is not None and value == 0
    return False if is_false else None


def value_is_true(value: object) -> bool:
    """True if a decoded value is true for pydantic."""
    return word_is_true(value) if isinstance(value, str) else value == 1


def word_is_true(word: str) -> bool:
    """True for a word that pydantic takes for true, as engines read a flag in a form."""
    return word.lower() in _TRUE


def has_value(raw: Raw) -> bool:
    """True if the field is present and not null. (A Raw never equals bytes.)"""
    return raw is not ABSENT and bool(raw) and bytes(raw) != b"null"


def is_text(raw: Raw) -> bool:
    """True if the field is a string."""
    return bytes(memoryview(raw)[:1]) == b'"'


def wants_usage(options: dict[str, Any] | None) -> bool:
    """True if the options of a stream stay as they are: they request usage at its end, or in every event. SGLang sends
    the latter without the former."""
    if options is None:
        return False
    return value_is_true(options.get("include_usage")) or value_is_true(options.get("continuous_usage_stats"))


def parse_integer(value: object) -> int | None:
    """Return the integer that pydantic reads from a decoded value: integers, floats without a fraction, flags and
    strings such as "9", " +1_000 " and "9.0". None for null, and for values that it refuses."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1 << 63 else None
    if not isinstance(value, str) or len(value) > WHOLE_CHARS_MAX:
        return None
    text = value.strip(_TRIMMED)
    return int(text.partition(".")[0]) if _WHOLE.fullmatch(text) else None


def number(raw: Raw) -> int | None:
    """Return the same for a field that is not decoded."""
    return parse_integer(decode_or_none(_decode_flag, bytes(raw))) if 0 < len(raw) <= NUMBER_BYTES_MAX else None


def positive(raw: Raw) -> int | None:
    """Return a count of at least 1, else None."""
    value = number(raw)
    return value if value is not None and value > 0 else None


def salt_of(raw: Raw) -> bytes:
    """Return `cache_salt` as part of the identity."""
    return (decode_as(str, raw) or "").encode(errors="surrogatepass")


def metadata_of(raw: Raw) -> bytes:
    """Return a body's metadata as JSON. Empty if it has more than METADATA_BYTES_MAX bytes."""
    return bytes(raw) if len(raw) <= METADATA_BYTES_MAX else b""


def step_of(metadata: bytes, field: str) -> str:
    """Return the agent step that a request's metadata names. "" if they name no step."""
    if not metadata or not field:
        return ""
    try:
        step = _decode_metadata(metadata).get(field)
        return msgspec.json.decode(step, type=str) if step is not None else ""
    except UNREADABLE:
        return ""


def counts(prompt_tokens: int, completion_tokens: int | None, cached_tokens: int | None) -> Usage | None:
    """Return usage from the counts of an engine. Impossible counts are clamped. A prompt or answer count beyond
    USAGE_TOKENS_MAX, or a negative prompt count, yields None."""
    if not 0 <= prompt_tokens <= USAGE_TOKENS_MAX or (completion_tokens or 0) > USAGE_TOKENS_MAX:
        return None
    if cached_tokens is not None:
        cached_tokens = min(max(0, cached_tokens), prompt_tokens)
    return Usage(prompt_tokens, max(0, completion_tokens or 0), cached_tokens)


def cut_usage(type_: type[_T], data: bytes) -> _T | None:
    """Return the last usage object in an event without its beginning. None if it has no usage. For any length of the
    event, at most USAGE_NAMES_MAX places are read, of USAGE_OBJECT_BYTES_MAX each."""
    at, found = len(data), None
    for _ in range(USAGE_NAMES_MAX):
        at = data.rfind(_USAGE_NAME, 0, at)
        if at < 0:
            break
        found = _USAGE_AT.match(data, at, at + USAGE_OBJECT_BYTES_MAX)
        if found is not None:
            break
    try:
        return msgspec.json.decode(found[1], type=type_) if found is not None else None
    except UNREADABLE:
        return None


def has_event_besides(early: frozenset[bytes], chunk: bytes) -> bool:
    """True if a piece of a stream begins an event that is not one of these."""
    return any(name not in early for name in _EVENT_NAME.findall(chunk))


class InvalidBody(ValueError):
    """The body cannot be a request of this dialect. `code` is stable, the message is for humans."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
