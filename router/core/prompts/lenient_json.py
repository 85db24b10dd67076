"""Bodies that Python's JSON parser takes and msgspec does not: in UTF-16 or UTF-32, with NaN, with half a surrogate.

Engines read a body with `json.loads`, which finds the encoding by the first bytes, independent of headers (Starlette's
`Request.json`, for vLLM and SGLang alike). Such a body goes to an engine byte for byte. Its prompt stays unknown; only
the fields that limit its placement are read, by the same parser.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from router.core.prompts import gil_release, sliced_json
from router.core.prompts.json_fields import InvalidBody, flag_of, value_is_true
from router.core.types.requests import RequestSpec

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8
# Longest body that is parsed: Python's parser holds the interpreter for about 10 ms a MiB.
PARSED_BYTES_MAX = 1 << 20

# The beginning of an object in UTF-8, in which a field can be inserted before the last brace.
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{[^\0]")


def is_object(body: bytes) -> bool:
    """True if a body begins as an object in UTF-8, so that fields may be spliced in at its end."""
    return _OBJECT.match(body) is not None


def in_other_encoding(body: bytes) -> bool:
    """True if a body is in UTF-16 or UTF-32: it begins with their mark, or with an ASCII character in them."""
    return b"\0" in body[:2] or body[:2] in (b"\xff\xfe", b"\xfe\xff")


def to_utf8(body: bytes) -> bytes | None:
    """Return a body in UTF-8, as Python's parser decodes it. None for a body that it cannot decode. It is converted in
    slices."""
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    size, parts = sliced_json.SLICE_BYTES, []
    try:
        for at in range(0, len(body), size):
            gil_release.release_gil()
            text = decoder.decode(body[at : at + size], at + size >= len(body))
            parts.append(text.encode("utf-8", "surrogatepass"))
    except UnicodeError:
        return None
    return b"".join(parts)


def ask_of(body: bytes) -> RequestSpec | None:
    """Return the fields that Python reads from a body in UTF-8. A long body is not read. None if it is not a JSON
    object. Raises InvalidBody for a model that is not a string."""
    if len(body) > PARSED_BYTES_MAX:
        return RequestSpec(None)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    model = fields.get("model")
    if model is not None and not (isinstance(model, str) and _is_text(model)):
        raise InvalidBody("invalid_model", "The field 'model' must be a string.")
    response, stored = fields.get("previous_response_id"), fields.get("store")
    return RequestSpec(
        model,
        stream=value_is_true(fields.get("stream")),
        response_id=response if isinstance(response, str) and _is_text(response) else None,
        stored=flag_of(stored),
    )


def _is_text(value: Any) -> bool:  # noqa: ANN401 - a string of JSON
    try:
        value.encode()
    except UnicodeError:  # half a surrogate
        return False
    return True
