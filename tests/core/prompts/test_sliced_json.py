"""JSON that is read in slices is what it is when it is read whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from router.core.prompts import sliced_json
from router.core.prompts.json_fields import UNREADABLE
from router.core.prompts.messages_fields import Block

pytestmark = [
    pytest.mark.finding("2026-11-28/10"),
    pytest.mark.promise(
        "Long strings and lists of ids are read in slices, with turns for others between them.", "clients"
    ),
]

TEXT = st.lists(
    st.sampled_from(["a", "é", "€", "😀", "\\", '"', "\n", "\ud7ff", "\\u0041", '","', "[{", "x" * 40, "\\" * 7]),
    max_size=40,
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXT,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
STYLES: list[dict[str, Any]] = [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]
SIZES = st.integers(16, 80)
decode_any = msgspec.json.Decoder().decode
decode_list = msgspec.json.Decoder(list[Any]).decode


class Body(msgspec.Struct):
    """Fields of several types, as requests have them."""

    messages: list[dict[str, Any]] | None = None
    blocks: list[Block] = []
    model: str | None = None
    prompt: Raw = Raw(b"")
    n: int = 0


decode_body = msgspec.json.Decoder(Body).decode


@contextmanager
def sliced_by(size: int) -> Iterator[None]:
    """All JSON is long, and slices have so many bytes."""
    before = sliced_json.SLICE_BYTES, sliced_json.LONG_BYTES_MIN, sliced_json.FOLDED_BYTES_MIN
    sliced_json.SLICE_BYTES, sliced_json.LONG_BYTES_MIN, sliced_json.FOLDED_BYTES_MIN = size, 0, 0
    try:
        yield
    finally:
        sliced_json.SLICE_BYTES, sliced_json.LONG_BYTES_MIN, sliced_json.FOLDED_BYTES_MIN = before


def outcome(read: Callable[[], object]) -> object:
    """What is read, with undecoded parts as bytes; or that it is not readable."""
    try:
        found = read()
    except UNREADABLE:
        return "unreadable"
    if isinstance(found, msgspec.Struct):
        return {name: _plain(getattr(found, name)) for name in found.__struct_fields__}
    return found


def listed(document: bytes) -> list[Any]:
    """The items of an array."""
    return [each for some in sliced_json.items(decode_list, document) for each in some]


def _plain(value: object) -> object:
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, Block):
        return outcome(lambda: value)
    return [_plain(each) for each in value] if isinstance(value, list) else value


@given(VALUES, st.sampled_from(STYLES), SIZES)
def test_documents(value: object, style: dict[str, Any], size: int) -> None:
    """Strings, names and undecoded parts come out the same, however they are cut."""
    for document in (json.dumps(value, **style).encode(), json.dumps([value] * 3, **style).encode()):
        with sliced_by(size):
            assert sliced_json.read(decode_any, document) == decode_any(document)
            assert sliced_json.value(document) == decode_any(document)


@given(st.lists(st.dictionaries(st.just("content") | TEXT, VALUES, max_size=2), max_size=3), TEXT, VALUES, SIZES)
def test_bodies(messages: list[dict[str, Any]], text: str, prompt: object, size: int) -> None:
    """Typed fields, records within them and undecoded ones."""
    blocks = [{"type": "text", "text": text}, {"type": "image", "source": {"data": text}, "input": prompt}]
    fields = {"messages": messages, "blocks": blocks, "model": text, "other": prompt, "prompt": prompt, "n": 1}
    document = json.dumps(fields, ensure_ascii=False).encode()
    with sliced_by(size):
        assert outcome(lambda: sliced_json.read(decode_body, document)) == outcome(lambda: decode_body(document))


@given(st.lists(VALUES, max_size=20), st.sampled_from(STYLES), SIZES)
def test_arrays(values: list[object], style: dict[str, Any], size: int) -> None:
    """Items in their order, whatever they are."""
    document = json.dumps(values, **style).encode()
    with sliced_by(size):
        assert listed(document) == values


@given(st.lists(st.sampled_from([b'"', b"\\", b"u", b"d8", b"3d", b"\xc3", b"\xa9", b",", b"[", b"]", b"ab"])), SIZES)
def test_what_is_no_json(pieces: list[bytes], size: int) -> None:
    """What cannot be read whole cannot be read in slices, and the other way round."""
    inside = b"".join(pieces)
    for document in (b'["%b"]' % inside, b"[%b]" % inside, inside, b'["%b"]' % (inside * 4)):
        whole = outcome(lambda document=document: decode_list(document))  # type: ignore[misc]
        with sliced_by(size):
            assert outcome(lambda document=document: sliced_json.read(decode_list, document)) == whole  # type: ignore[misc]
            assert outcome(lambda document=document: listed(document)) == whole  # type: ignore[misc]
