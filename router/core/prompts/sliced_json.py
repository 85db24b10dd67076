"""Long JSON read in slices, so that other threads have the interpreter in between.

msgspec decodes a document in one call, which keeps the interpreter to its end: 64 MB of escapes for 110 ms, a million
numbers of 60 digits for 160. Two things make a document long, and each has a way to be read in slices.

A long string is folded: whole slices within it are removed from the document, and a mark replaces them. The decoder
reads the shorter document. Each mark is then replaced by its slices, decoded one by one. No slice begins within an
escape, a pair of surrogates or a character. A mark is a digest of the folded document, so no document can contain it.

A long array or object is cut at commas between its items into shorter ones, which are decoded one by one.

Both give the decoder's result for the whole document, and raise the same errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from router.core.prompts import gil_release

LONG_BYTES_MIN = 1 << 20  # shorter JSON is decoded in one go: milliseconds
FOLDED_BYTES_MIN = 4 << 20  # less of long strings is decoded in one go: ten milliseconds at most
SLICE_BYTES = 64 << 10  # read in one go: a fifth of a millisecond
LEVELS_MAX = 16  # nested arrays and objects that are decoded by parts
OTHERS_EVERY = 128  # values that are looked at between two turns of other threads
_DIGITS = 8  # digits of a fold's number after its mark
_SIGNS = re.compile(rb"[][{},]")
_ESCAPE_BYTES_MAX, _CHARACTER_BYTES_MAX = 6, 4
_HIGH = re.compile(rb"\\u[dD][89abAB]")  # begins the escape of the first half of a pair

_T = TypeVar("_T")
_U = TypeVar("_U")
_WHITE = b" \t\r\n"
_BEGIN = re.compile(rb"[ \t\r\n]*([\[{])")
_NO_ITEM = "JSON is malformed: no item between two commas"
_decode = msgspec.json.Decoder().decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_array = msgspec.json.Decoder(list[Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode


def read(decode: Callable[[bytes], _T], document: bytes | Raw) -> _T:
    """Return the result of `decode` for this JSON. Raises the same errors."""
    if len(document) < LONG_BYTES_MIN:
        return decode(document)
    folded = fold(bytes(document))
    return folded.restore(decode(folded.document))


def items(decode: Callable[[bytes], list[_T]], array: bytes | Raw) -> Iterator[list[_T]]:
    """Yield the items of this JSON array in order, a few at a time. Raises the errors of `decode`, which decodes an
    array."""
    if len(array) < LONG_BYTES_MIN:
        yield decode(array)
        return
    folded = fold(bytes(array))
    for batch in _batches(folded.document):
        yield folded.restore(decode(batch))


def object_of(document: bytes | Raw) -> dict[str, Any]:
    """Return this JSON object. Raises UNREADABLE, also for JSON of another type."""
    found = value(document)
    if not isinstance(found, dict):
        raise msgspec.ValidationError("Expected `object`")
    return found


def is_single(array: bytes) -> bool:
    """True if this JSON array has one item. Raises UNREADABLE."""
    if len(array) < LONG_BYTES_MIN:
        return len(_decode_array(array)) == 1
    return sum(1 for _ in islice(_batches(array), 2)) == 1


def value(document: bytes | Raw) -> Any:  # noqa: ANN401 - any JSON
    """Decode this JSON. Raises UNREADABLE."""
    if len(document) < LONG_BYTES_MIN:
        return _decode(document)
    folded = fold(bytes(document))
    return folded.restore(_value(folded.document, LEVELS_MAX))


def _value(document: bytes | Raw, levels: int) -> Any:  # noqa: ANN401 - any JSON
    """Decode it. Long arrays and objects are decoded by parts, down to `levels` levels."""
    if len(document) < LONG_BYTES_MIN or not levels:
        return _decode(document)
    document = bytes(document)
    found = _BEGIN.match(document)
    if found is None:
        return _decode(document)
    if found[1] == b"[":
        listed: list[Any] = []
        for batch in _batches(document):
            whole = len(batch) < LONG_BYTES_MIN
            listed += _decode(batch) if whole else [_value(raw, levels - 1) for raw in _decode_array(batch)]
        return listed
    named: dict[Any, Any] = {}
    for batch in _batches(document):
        whole = len(batch) < LONG_BYTES_MIN
        named |= _decode(batch) if whole else {n: _value(r, levels - 1) for n, r in _decode_object(batch).items()}
    return named


class Folded:
    """A document without the slices within its long strings."""

    def __init__(self, whole: bytes, runs: list[list[tuple[int, int]]]) -> None:
        """`runs` are (start, end) of slices that follow each other within one string."""
        self._whole, self._runs = whole, runs
        kept, at = [], 0
        for run in runs:
            kept.append(memoryview(whole)[at : run[0][0]])
            at = run[-1][1]
        kept.append(memoryview(whole)[at:])
        self.document = whole
        self._mark = ""
        if runs:
            digest = sha256()
            for piece in kept:
                digest.update(piece)
            self._mark = digest.hexdigest()
            marks = [f"{self._mark}{number:0{_DIGITS}}".encode() for number in range(len(runs))]
            self.document = b"".join([part for pair in zip(kept, [*marks, b""], strict=True) for part in pair])
        self._mark_bytes = self._mark.encode()
        self._left, self._looked = len(runs), 0

    def restore(self, value: _T) -> _T:
        """Return the decoded value with its marks replaced, in place if possible."""
        return self._restore(value) if self._runs else value

    def each(self, values: Iterable[_T], decode: Callable[[_T], _U]) -> Iterator[_U]:
        """Yield these values of the folded document, decoded one by one."""
        for one in values:
            yield self.restore(decode(one))
            self._looked += 1
            if not self._looked % OTHERS_EVERY:
                gil_release.release_gil()

    def _restore(self, value: Any) -> Any:  # noqa: ANN401 - any JSON
        self._looked += 1
        if not self._looked % OTHERS_EVERY:
            gil_release.release_gil()
        if isinstance(value, str):
            return self._text(value) if self._mark in value else value
        if isinstance(value, Raw):
            return self._raw(value)
        if isinstance(value, list):
            for at, each in enumerate(value):
                value[at] = self._restore(each)
        elif isinstance(value, dict):
            if any(isinstance(name, str) and self._mark in name for name in value):
                return {self._restore(name): self._restore(each) for name, each in value.items()}
            for name, each in value.items():
                value[name] = self._restore(each)
        elif isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                each = getattr(value, name)
                if isinstance(each, str | Raw | list | dict | msgspec.Struct):
                    setattr(value, name, self._restore(each))
        return value

    def _text(self, text: str) -> str:
        head, _, rest = text.partition(self._mark)
        return "".join([head, *self._decode_run(int(rest[:_DIGITS])), rest[_DIGITS:]])

    def _decode_run(self, number: int) -> Iterator[str]:
        for start, end in self._runs[number]:
            gil_release.release_gil()
            yield _decode_text(b'"%b"' % self._whole[start:end])

    def _raw(self, raw: Raw) -> Raw:
        if len(raw) < len(self._mark):
            return raw
        head, *others = bytes(raw).split(self._mark_bytes)
        if not others:
            return raw
        parts: list[bytes | memoryview] = [head]
        for each in others:
            run = self._runs[int(each[:_DIGITS])]
            parts += (memoryview(self._whole)[run[0][0] : run[-1][1]], each[_DIGITS:])
        gil_release.release_gil()
        return Raw(b"".join(parts))


def fold(document: bytes) -> Folded:
    """Return the document without the slices within its long strings, or the whole document if these are not long
    enough."""
    runs: list[list[tuple[int, int]]] = []
    inside = within = False
    for at, piece in _slices(document) if any(_is_one(piece) for _, piece in _slices(document)) else ():
        gil_release.release_gil()
        quotes = _quotes(piece)
        if inside and not quotes:
            if not within:
                runs.append([])
            runs[-1].append((at, at + len(piece)))
        within = inside and not quotes
        inside ^= bool(quotes & 1)
    long = sum(run[-1][1] - run[0][0] for run in runs)
    return Folded(document, runs if long >= FOLDED_BYTES_MIN else [])


def _is_one(piece: bytes) -> bool:
    """True if no string begins or ends in a slice. In most documents, nearly every slice has a quote that rules this
    out."""
    first = piece.find(b'"')
    gil_release.release_gil()
    return first < 0 or (escapes(piece[:first]) and not _quotes(piece))


def _quotes(piece: bytes) -> int:
    """Count the quotes in a slice at which strings begin or end."""
    if b'"' not in piece:
        return 0
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    return piece.count(b'"')


def _batches(document: bytes) -> Iterator[bytes]:
    """Yield arrays or objects that together have the items of this one. Each is a few slices long, or has one item.
    Raises DecodeError if an item between two commas is missing."""
    opened = _BEGIN.match(document)
    if opened is None:
        yield document
        return
    begin = opened.end()
    shape = b"[%b]" if opened[1] == b"[" else b"{%b}"
    depth, inside, last = 0, False, b""
    for at, piece in _slices(document, begin):
        gil_release.release_gil()
        parts, inside = _outside(piece, inside)
        commas, depth = _commas(parts, depth)
        for comma in sorted(commas):
            last = document[begin : at + comma]
            if not last.strip(_WHITE):
                raise msgspec.DecodeError(_NO_ITEM)
            yield shape % last
            begin = at + comma + 1
    if last and document[begin:].strip(_WHITE) == shape[-1:]:
        raise msgspec.DecodeError(_NO_ITEM)
    yield shape[:-1] % document[begin:]


def _outside(piece: bytes, inside: bool) -> tuple[list[tuple[int, bytes]], bool]:
    """Return ((offset, bytes) of the parts outside of strings, True if the slice ends within a string). `inside`: the
    slice begins within a string."""
    parts: list[tuple[int, bytes]] = []
    at, escaped = 0, False
    inside = not inside
    for part in piece.split(b'"'):
        if not escaped:
            inside = not inside
            if not inside:
                parts.append((at, part))
        escaped = inside and part.endswith(b"\\") and escapes(part)
        at += len(part) + 1
    return parts, inside


def _commas(parts: list[tuple[int, bytes]], depth: int) -> tuple[set[int], int]:
    """Return (offsets of the first and of the last comma at depth 0, depth at the end) of the parts outside of
    strings."""
    outside = b"".join([part for _, part in parts])
    if not any(sign in outside for sign in (b"[", b"]", b"{", b"}")):
        if depth or b"," not in outside:
            return set(), depth
        first = next(at + part.index(b",") for at, part in parts if b"," in part)
        last = next(at + part.rindex(b",") for at, part in reversed(parts) if b"," in part)
        return {first, last}, depth
    found: list[int] = []
    for at, part in parts:
        for sign in _SIGNS.finditer(part):
            if sign[0] != b",":
                depth += 1 if sign[0] in b"[{" else -1
            elif not depth:
                found.append(at + sign.start())
    return {found[0], found[-1]} if found else set(), depth


def _slices(document: bytes, at: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of slices from `at` on. No slice begins within an escape, a character, or a pair of
    surrogates."""
    while at < len(document):
        piece = document[at : at + SLICE_BYTES]
        if at + SLICE_BYTES < len(document):
            piece = piece[: _count_whole_bytes(piece)]
        yield at, piece
        at += len(piece)


def _count_whole_bytes(piece: bytes) -> int:
    """Count the bytes of a slice up to the end of its last whole escape, character or pair. Returns the whole size if
    it has no such end."""
    size = len(piece)
    while (at := piece.rfind(b"\\", max(0, size - _ESCAPE_BYTES_MAX), size)) >= 0:
        if escapes(piece[: at + 1]):  # it begins an escape, and is not the second half of one
            long = _ESCAPE_BYTES_MAX if piece[at + 1 : at + 2] in b"u" else 2
            if at + long < size or (at + long == size and _HIGH.match(piece, at) is None):
                break
            size = at
        else:
            break
    for back in range(1, min(_CHARACTER_BYTES_MAX, size) + 1):
        byte = piece[size - back]
        if byte >= 0xC0:  # begins a character of two bytes or more
            size -= back if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80 or byte >= 0xC0:
            break
    return size or len(piece)


def utf8(text: str) -> bytes:
    """Return the text in UTF-8. A long one is encoded in slices. Raises UnicodeError."""
    if len(text) <= SLICE_BYTES or text.isascii():
        return text.encode()
    size = SLICE_BYTES
    parts = []
    for at in range(0, len(text), size):
        gil_release.release_gil()
        parts.append(text[at : at + size].encode())
    return b"".join(parts)


def escapes(part: bytes) -> bool:
    """True if the byte after this part of a string is escaped."""
    return (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
