"""Fields of forms: the model, and the flag for a stream.

Parsers read multipart forms in many ways. Of a name given twice some take the first and some the last. A delimiter may
follow a bare line feed. Names may be escaped, unquoted or in pieces (RFC 7578, RFC 2231). The model must not be
mistaken if its tenant may not use all models. In that case only a form that every parser reads the same way is accepted
(`form_model`). The usual clients write such forms: curl, Python, Node, Go and browsers. So do .NET, which quotes no
names, and Java's clients, which send a type, a length and an encoding with each part. In all other cases any form is
accepted (`any_form_model`), and the last field counts, as it does for engines (starlette).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from itertools import islice, pairwise
from typing import NamedTuple
from urllib.parse import parse_qsl

from router.core.prompts.json_fields import InvalidBody, word_is_true

PARTS_MAX, HEAD_BYTES_MAX = 256, 8 << 10  # parts of a form; bytes of the head of a part

_TYPE = re.compile(rb"multipart/form-data; ?boundary=(?:([\w.'+/=-]{1,70})|\"([\w.'+/=-]{1,70})\")", re.IGNORECASE)
_LINE = re.compile(rb"([\w-]+):[ \t]*([^\r\n]*)")
_DISPOSITION = re.compile(
    rb'form-data; ?name=(?:"([\w.:\[\]-]*)"|([\w.-]+))(?:; ?filename=(?:"[^"\\\r\n]*"|[\w.-]+))?'
    rb"(?:; ?filename\*=[\w!#$&+.^`|~%'-]+)?",
    re.IGNORECASE,
)
# other headers might change the encoding of a value
_OF_NAMES = (b"content-disposition", b"content-type", b"content-length")
_ENCODING, _AS_IT_IS = b"content-transfer-encoding", (b"7bit", b"8bit", b"binary")
_BOUNDARY = re.compile(rb';\s*boundary\s*=\s*(?:"((?:[^"\\]|\\.){1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_LINES = re.compile(rb"\r?\n(?![ \t])")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_NAME = re.compile(rb';\s*name\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))', re.IGNORECASE)
VALUE_BYTES_MAX = 1_024  # longest value of a field that is read


def form_streams(content_type: bytes, body: bytes) -> bool:
    """True if a multipart form, in any spelling, requests a stream."""
    return word_is_true(_last(content_type, body, b"stream").decode("latin-1"))


def url_form(body: bytes, *, sure: bool) -> tuple[str | None, bool]:
    """Return the model in a form encoded like a URL's query, or None, and the flag for a stream. Of a field given twice
    the last counts, as engines read it. If the model must be `sure`, two fields raise InvalidBody."""
    pairs = _url_pairs(body)
    models = [value for name, value in pairs if name == "model"]
    if sure and len(models) > 1:
        raise _odd("the form has more than one field 'model'")
    streams = [value for name, value in pairs if name == "stream"]
    return (models[-1] if models else None), bool(streams) and word_is_true(streams[-1])


def _url_pairs(body: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=PARTS_MAX)
    except ValueError as error:
        raise InvalidBody("invalid_form", "The form has too many fields, or is not UTF-8.") from error


def form_model(content_type: bytes, body: bytes) -> str | None:
    """Return the value of the one field `model`. None if it is absent or empty. Raises InvalidBody for a form that
    parsers may read in different ways."""
    models = [_plain_value(part, "model") for part in _parts(content_type, body) if part.name == b"model"]
    if len(models) > 1:
        raise _odd("the form has more than one field 'model'")
    try:
        return (models[0].decode() or None) if models else None
    except UnicodeDecodeError as error:
        raise _odd("the field 'model' is not UTF-8") from error


def plain_fields(content_type: bytes, body: bytes, names: Container[str]) -> list[tuple[str, bytes]]:
    """Return the fields of these names, with their values, of a multipart form that can be read in one way only. Raises
    InvalidBody for any other form."""
    named = [(part.name.decode("latin-1"), part) for part in _parts(content_type, body)]
    return [(name, _plain_value(part, name)) for name, part in named if name in names]


def url_fields(body: bytes, names: Container[str]) -> list[tuple[str, bytes]]:
    """Return the same for a form encoded like a URL's query. Raises InvalidBody."""
    return [(name, value.encode()) for name, value in _url_pairs(body) if name in names]


class _Part(NamedTuple):
    name: bytes
    head: bytes  # the lines of its headers
    value: bytes


def _parts(content_type: bytes, body: bytes) -> Iterator[_Part]:
    """Yield the parts of a multipart form that can be read in one way only. Raises InvalidBody for any other form."""
    typed = _TYPE.fullmatch(content_type)
    if typed is None:
        raise _odd("the content type must have a boundary and no other parameter")
    delimiter = b"--" + (typed[1] or typed[2])
    at = [found.start() for found in islice(re.finditer(re.escape(delimiter), body), PARTS_MAX + 2)]
    if len(at) > PARTS_MAX + 1:
        raise _odd("the form has too many parts")
    if not at or at[0] or body[at[-1] + len(delimiter) :] not in (b"--", b"--\r\n"):
        raise _odd("the form does not begin and end with its boundary")
    for start, end in pairwise(at):
        part = body[start + len(delimiter) : end]
        if not part.startswith(b"\r\n") or not part.endswith(b"\r\n"):
            raise _odd("a boundary is not on a separate line")
        blank = part.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        if blank < 2:
            raise _odd("the head of a part is missing or too long")
        head = part[2:blank]
        yield _Part(_plain_name(head), head, part[blank + 4 : -2])


def _plain_name(head: bytes) -> bytes:
    """Return the name of a part with this head. Raises InvalidBody if it can be read in another way."""
    lines = [_LINE.fullmatch(line) for line in head.split(b"\r\n")]
    values = [line[2] for line in lines if line and line[1].lower() == b"content-disposition"]
    named = _DISPOSITION.fullmatch(values[0]) if len(values) == 1 and all(lines) else None
    if named is None:
        raise _odd("a part has an unusual name")
    return named[1] if named[1] is not None else named[2]


def _plain_value(part: _Part, name: str) -> bytes:
    """Return the value of a part. Raises InvalidBody if it may be encoded."""
    lines = [_LINE.fullmatch(line) for line in part.head.split(b"\r\n")]
    if not all(_is_plain(line[1].lower(), line[2]) for line in lines if line):
        raise _odd(f"the field '{name}' may be encoded")
    return part.value


def _is_plain(name: bytes, value: bytes) -> bool:
    """True if a part's header leaves its value unchanged."""
    return name in _OF_NAMES or (name == _ENCODING and value.strip().lower() in _AS_IT_IS)


def any_form_model(content_type: bytes, body: bytes) -> str | None:
    """Return the value of the last field `model` of a form in any spelling. None if it is absent or empty."""
    return _last(content_type, body, b"model").decode(errors="replace") or None


def _last(content_type: bytes, body: bytes, field: bytes) -> bytes:
    """Return the value of the last field of this name, without white space around it. b"" if it is absent."""
    typed = _BOUNDARY.search(content_type)
    if typed is None:
        return b""
    delimiter = b"--" + (re.sub(rb"\\(.)", rb"\1", typed[1]) if typed[1] is not None else typed[2])
    found, at = b"", body.find(delimiter)
    for _ in range(PARTS_MAX):
        if at < 0:
            break
        start = at + len(delimiter)
        end = _next(body, delimiter, start)
        value = _value_in(body, start, len(body) if end < 0 else end, field)
        found, at = found if value is None else value, end
    return found.strip()


def _next(body: bytes, delimiter: bytes, start: int) -> int:
    """Return the start of the next delimiter, which stands at the beginning of a line. -1 if it is absent."""
    at = body.find(b"\n" + delimiter, start)
    return at + 1 if at >= 0 else -1


def _value_in(body: bytes, start: int, end: int, field: bytes) -> bytes | None:
    """Return the value of a part if it is the field of this name."""
    head_end = _HEAD_END.search(body, start, min(end, start + HEAD_BYTES_MAX))
    if head_end is None or end - head_end.end() > VALUE_BYTES_MAX:
        return None
    for line in _LINES.split(body[start : head_end.start()]):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            named = _NAME.search(value)
            if named is not None and (named[1] if named[1] is not None else named[2]) == field:
                return body[head_end.end() : end].rstrip(b"\r\n")
    return None


def _odd(why: str) -> InvalidBody:
    return InvalidBody("invalid_model", f"The form is ambiguous: {why}.")
