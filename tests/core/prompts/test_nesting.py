"""How deep JSON may nest, found without decoding it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.prompts import json_fields
from router.core.prompts.json_fields import DEPTH, PARTS, check_limits

pytestmark = pytest.mark.promise(
    "JSON of any depth ends in 400, never in a crash of the router or an engine.", "clients"
)

TEXT = st.text(st.sampled_from('[]{}"\\:, \né\u2028x'), max_size=20)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)
STYLES: list[dict[str, Any]] = [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]


def nests_deeper(body: bytes, depth_max: int) -> bool:
    """Whether this JSON is too deep, of however many parts."""
    return check_limits(body, depth_max, len(body), len(body)) == DEPTH


def depth(value: object) -> int:
    """By recursion."""
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def parts(value: object) -> int:
    """Objects and arrays, by recursion."""
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    return 0 if inner is None else 1 + sum(map(parts, inner))


def commas(value: object) -> int:
    """Commas between values, by recursion."""
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    return max(0, len(inner) - 1) + sum(map(commas, inner))


@contextmanager
def scanned_in(slice_bytes: int, quotes_max: int) -> Iterator[None]:
    """Bodies are scanned in slices of so many bytes, in which so many quotes are looked at one by one."""
    before = json_fields.SLICE_BYTES, json_fields.QUOTES_MAX
    json_fields.SLICE_BYTES, json_fields.QUOTES_MAX = slice_bytes, quotes_max
    try:
        yield
    finally:
        json_fields.SLICE_BYTES, json_fields.QUOTES_MAX = before


SCANS = st.builds(scanned_in, st.integers(1, 64), st.sampled_from([0, 1_024]))


@given(VALUES, st.integers(1, 12), st.integers(0, 30), st.sampled_from(STYLES), SCANS)
def test_depth(
    value: object, depth_max: int, more: int, style: dict[str, Any], scan: AbstractContextManager[None]
) -> None:
    """Exactly the JSON that nests deeper is found, whatever its strings hold, and wherever it is cut in slices."""
    for _ in range(more):
        value = {"a]": value} if more % 2 else ["[", value]
    body = json.dumps(value, **style).encode()
    with scan:
        assert nests_deeper(body, depth_max) == (depth(value) > depth_max)


@given(VALUES, st.integers(1, 12), st.sampled_from(STYLES), SCANS)
def test_parts(value: object, parts_max: int, style: dict[str, Any], scan: AbstractContextManager[None]) -> None:
    """Exactly the JSON of more objects and arrays is found, likewise."""
    body = json.dumps(value, **style).encode()
    with scan:
        assert (check_limits(body, len(body), parts_max, len(body)) == PARTS) == (parts(value) > parts_max)


@given(VALUES, st.integers(1, 12), st.sampled_from(STYLES), SCANS)
def test_values(value: object, values_max: int, style: dict[str, Any], scan: AbstractContextManager[None]) -> None:
    """Exactly the JSON of more commas between values is found, likewise."""
    body = json.dumps(value, **style).encode()
    with scan:
        assert (check_limits(body, len(body), len(body), values_max) == json_fields.VALUES) == (
            commas(value) > values_max
        )


@given(st.binary(max_size=2_000) | st.text('[]{}"\\:, \n', max_size=2_000).map(str.encode), st.integers(1, 20))
def test_any_bytes(body: bytes, depth_max: int) -> None:
    """What is no JSON is looked at without an error."""
    nests_deeper(body, depth_max)


def test_long_bodies() -> None:
    """Depth is found behind megabytes of text with brackets, and such text is no depth."""
    text = json.dumps("x[0] = {'a': [1, \"b\"]}; " * 100_000)
    for levels, found in ((255, False), (256, True), (100_000, True)):
        body = f'{{"a":{text},"b":{"[" * levels}{"]" * levels}}}'.encode()
        assert nests_deeper(body, 256) == found


def test_code_in_strings_is_not_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets of a program's text are told from those of JSON by what stands beside them."""
    lines = "x[0] = {'a': z[1]}\ny = [y for y in z]\nif (a) { return [b]; }\n"
    code = (lines + "# what that does, in words\n" * 40) * 5
    said = [{"role": "user", "content": code} for _ in range(100)]
    monkeypatch.setattr(json_fields, "_outside_strings", lambda *_: 1 / 0)
    for style in STYLES:
        assert not nests_deeper(json.dumps({"messages": said}, **style).encode(), 256)
