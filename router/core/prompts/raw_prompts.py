"""Prompts that a request gives directly: a text, texts, token ids, or lists of ids.

Several prompts are chained one after the other. Of a long array, about a thousand items are decoded at a time: no list
of all of them is made.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from router.core.prompts import gil_release, sliced_json
from router.core.prompts.canonical import RS
from router.core.prompts.json_fields import is_text
from router.core.prompts.sliced_json import utf8

TOKEN_ID_BYTES = 4

_NESTED = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*\[")
_TEXTS = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*\"")
_WHITE = b" \t\r\n"

decode_items = msgspec.json.Decoder(list[str | int | list[int]]).decode
decode_ids = msgspec.json.Decoder(list[int | list[int]]).decode
decode_texts = msgspec.json.Decoder(list[str]).decode
decode_text = msgspec.json.Decoder(str).decode
_decode_flat = msgspec.json.Decoder(list[int]).decode


class Given:
    """Collects the texts and token ids of a prompt field."""

    def __init__(self, *, one_kind: bool = False) -> None:
        """`one_kind`: lists of ids are left out if there are ids outside of lists, as in SGLang."""
        self.texts, self.flat, self.lists = 0, 0, 0  # counts of texts, of ids outside of lists, and of lists of ids
        self.first_text_bytes = 0
        self.ids = array("I")
        self._joined: list[bytes] = []
        self._one_kind = one_kind
        self._misfit: OverflowError | None = None  # an id is negative, or has more than 32 bits

    def read(self, raw: Raw, decode: Callable[[bytes], list[Any]]) -> None:
        """Add the items of an array. Raises UNREADABLE."""
        inner = _inner(raw) if decode is not decode_texts else None
        if inner is None:
            for items in sliced_json.items(decode, raw):
                self._add(items)
            return
        self.lists = 1
        for ids in sliced_json.items(_decode_flat, inner):
            self._extend(ids)

    def text(self) -> bytes:
        """Return the texts, RS between any two."""
        gil_release.release_gil()
        return RS.join(self._joined)

    def id_bytes(self) -> bytes:
        """Return the ids, TOKEN_ID_BYTES each, little-endian. Raises OverflowError if an id does not fit."""
        if self._misfit is not None:
            raise self._misfit
        ids = self.ids
        if sys.byteorder == "big":
            ids = ids[:]
            ids.byteswap()
        return ids.tobytes()

    def _add(self, items: list[Any]) -> None:
        texts = [utf8(item) for item in items if isinstance(item, str)]
        if texts:
            if not self._joined:
                self.first_text_bytes = len(texts[0])
            self.texts += len(texts)
            self._joined.append(RS.join(texts))
        if len(texts) < len(items):
            self._add_ids(items)

    def _add_ids(self, items: list[Any]) -> None:
        flat = [item for item in items if isinstance(item, int)]
        if self._one_kind and flat and not self.flat:
            self.ids, self._misfit = array("I"), None
        self.flat += len(flat)
        if len(flat) == len(items) or (self._one_kind and self.flat):
            self._extend(flat)
            return
        for item in items:
            if isinstance(item, list):
                self.lists += 1
                self._extend(item)
            elif isinstance(item, int):
                self._extend([item])

    def _extend(self, ids: list[int]) -> None:
        try:
            self.ids.extend(array("I", ids))
        except OverflowError as error:
            self._misfit = error


def only_text(raw: Raw) -> str | None:
    """Return the text if exactly one is given, as a string or in a list. Raises UNREADABLE."""
    if is_text(raw):
        return sliced_json.read(decode_text, raw)
    found: str | None = None
    if _TEXTS.match(memoryview(raw)) is None:
        return None
    for texts in sliced_json.items(decode_texts, raw):
        if found is not None or len(texts) > 1:
            return None
        found = texts[0]
    return found


def _inner(raw: Raw) -> bytes | None:
    """Return the only list of a long list of lists, which is read as a separate list. None for any other input."""
    if len(raw) < sliced_json.LONG_BYTES_MIN or (begin := _NESTED.match(memoryview(raw))) is None:
        return None
    document = bytes(raw)
    if document.count(b"[") > 2 or document.count(b"]") > 2:
        return None
    end = document.find(b"]")
    return document[begin.end() - 1 : end + 1] if document[end + 1 :].strip(_WHITE) == b"]" else None
