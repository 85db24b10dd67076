"""The model that a multipart form names, where it must not be mistaken: its tenant may not use all.

Forms are read in many ways: of a name given twice some take the first and some the last; a delimiter may stand behind a
bare line feed; names may be escaped, unquoted or in pieces (RFC 7578, RFC 2231). So only a form is taken that nobody
can read otherwise, which is how the usual clients write one.
"""

from __future__ import annotations

import re
from itertools import islice, pairwise

from router.core.prompts.bodies import BadBody

PARTS_MAX, HEAD_BYTES_MAX = 256, 8 << 10  # parts of a form; bytes of the head of a part

_TYPE = re.compile(rb"multipart/form-data; ?boundary=(?:([\w.'+/=-]{1,70})|\"([\w.'+/=-]{1,70})\")", re.IGNORECASE)
_LINE = re.compile(rb"([\w-]+):[ \t]*([^\r\n]*)")
_DISPOSITION = re.compile(
    rb'form-data; ?name="([\w.:\[\]-]*)"(?:; ?filename="[^"\\\r\n]*")?(?:; ?filename\*=[\w!#$&+.^`|~%\'-]+)?',
    re.IGNORECASE,
)
_OF_NAMES = (b"content-disposition", b"content-type", b"content-length")  # others might say how a value is encoded


def form_model(content_type: bytes, body: bytes) -> str | None:
    """The value of the one field `model`; None where there is none. Raises BadBody for what may be read otherwise."""
    typed = _TYPE.fullmatch(content_type)
    if typed is None:
        raise _odd("its content-type has more than a boundary, or none")
    delimiter = b"--" + (typed[1] or typed[2])
    at = [found.start() for found in islice(re.finditer(re.escape(delimiter), body), PARTS_MAX + 2)]
    if len(at) > PARTS_MAX + 1:
        raise _odd("it has too many parts")
    if not at or at[0] or body[at[-1] + len(delimiter) :] not in (b"--", b"--\r\n"):
        raise _odd("it does not begin or end with its boundary")
    models = []
    for start, end in pairwise(at):
        part = body[start + len(delimiter) : end]
        if not part.startswith(b"\r\n") or not part.endswith(b"\r\n"):
            raise _odd("a boundary is not on a line of its own")
        blank = part.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        if blank < 2:
            raise _odd("a part has no head, or too long a one")
        if _is_model(part[2:blank]):
            models.append(part[blank + 4 : -2])
    if len(models) > 1:
        raise _odd("it has more than one field 'model'")
    try:
        return models[0].decode() if models else None
    except UnicodeDecodeError as error:
        raise _odd("its field 'model' is not UTF-8") from error


def _is_model(head: bytes) -> bool:
    """Whether this is the head of that field. Raises BadBody."""
    lines = [_LINE.fullmatch(line) for line in head.split(b"\r\n")]
    names = [line[1].lower() for line in lines if line]
    values = [line[2] for line in lines if line and line[1].lower() == b"content-disposition"]
    named = _DISPOSITION.fullmatch(values[0]) if len(values) == 1 and len(names) == len(lines) else None
    if named is None:
        raise _odd("it has a part whose name is not plain")
    if named[1] != b"model":
        return False
    if not all(name in _OF_NAMES for name in names):
        raise _odd("its field 'model' may be encoded")
    return True


def _odd(why: str) -> BadBody:
    return BadBody("invalid_model", f"Which model this form means could be read in two ways: {why}.")
