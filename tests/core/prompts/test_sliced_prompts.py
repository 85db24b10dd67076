"""Prompts that are read in slices have the keys that they have when they are read whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects import PATHS, InvalidBody
from router.core.prompts import gil_release, sliced_json
from router.core.prompts.block_keys import chain_of
from router.core.prompts.json_fields import check_limits
from router.core.prompts.lenient_json import to_utf8
from tests.core.prompts.test_sliced_json import sliced_by
from tests.support.examples import examples

pytestmark = [
    pytest.mark.finding("2026-11-28/10"),
    pytest.mark.promise(
        "Long strings and lists of ids are read in slices, with turns for others between them.", "clients"
    ),
]

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, GENERATE = "/v1/responses", "/generate"
WORDS = st.lists(st.sampled_from(["a", "é", "😀", "\\", '"', "\n", "],[", "x" * 50]), max_size=30).map("".join)
IDS = st.lists(st.integers(0, 200_000), max_size=40)
ODD = IDS | st.just([1, -1]) | st.just([1 << 40]) | st.just([1, [2, 3], 4]) | st.just([[1], 2]) | st.just(["a", 1])
GIVEN = (
    WORDS | st.lists(WORDS, max_size=5) | st.lists(IDS, max_size=4) | st.lists(st.lists(st.integers(0, 9)), max_size=1)
)
PARTS = st.lists(WORDS.map(lambda text: {"type": "text", "text": text}), max_size=3)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": WORDS | PARTS}),
    max_size=4,
)
IMAGE = WORDS.map(lambda data: {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data}}]})
CALL = WORDS.map(
    lambda text: {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
        ],
    }
)
TOOLS = WORDS.map(lambda text: [{"type": "function", "function": {"name": "f", "description": text}}])
BODIES = st.one_of(
    st.tuples(st.sampled_from([COMPLETIONS, "/v1/embeddings"]), (GIVEN | ODD).map(lambda p: {"prompt": p, "input": p})),
    st.tuples(st.just(GENERATE), GIVEN.map(lambda text: {"text": text})),
    st.tuples(st.just(GENERATE), (GIVEN | ODD).map(lambda ids: {"input_ids": ids})),
    st.tuples(st.just(CHAT), st.fixed_dictionaries({"messages": TURNS}, optional={"tools": TOOLS, "n": st.just(1)})),
    st.tuples(st.just(CHAT), st.lists(IMAGE | CALL, max_size=3).map(lambda turns: {"messages": turns})),
    st.tuples(st.just(MESSAGES), TURNS.map(lambda turns: {"messages": turns, "system": "s", "max_tokens": 5})),
    st.tuples(st.just(RESPONSES), (WORDS | TURNS).map(lambda given: {"input": given, "instructions": "be brief"})),
)


def told(path: str, body: bytes, *, keep: bool) -> object:
    """All that is read of a body: the request, its keys, and what a template or tokenizer would get."""
    dialect = PATHS[path]
    try:
        ask = dialect.parse(path, body, keep=keep)
    except InvalidBody as error:
        return error.code
    made = dialect.template_input(path, body, ask.decoded)
    chain = chain_of(ask, "m")
    keys = (chain.keys, chain.end_key, chain.spans, chain.first_user_key) if chain is not None else None
    return ask, keys, asdict(made) if made is not None else None


@settings(max_examples=examples(200))
@given(BODIES, st.integers(16, 64), st.booleans(), st.booleans())
def test_sliced_is_whole(given_: tuple[str, dict[str, Any]], size: int, keep: bool, ascii_: bool) -> None:
    """Whatever the dialect, the prompt's form and the cuts."""
    path, fields = given_
    body = json.dumps({"model": "m", **fields}, ensure_ascii=ascii_).encode()
    whole = told(path, body, keep=keep)
    with sliced_by(size):
        assert told(path, body, keep=keep) == whole


@given(
    st.text(st.sampled_from("aé€😀\ud83d\ude00\ufeff")) | st.binary(max_size=40),
    st.sampled_from(["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]),
    st.integers(1, 9),
)
def test_other_encodings_are_converted_in_slices(text: str | bytes, encoding: str, size: int) -> None:
    """As Python converts them whole, half surrogates and what is no text included."""
    body = text if isinstance(text, bytes) else text.encode(encoding, "surrogatepass")
    try:
        whole = body.decode(json.detect_encoding(body), "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeError:
        whole = None
    if json.detect_encoding(body) != "utf-8":
        with sliced_by(size):
            assert to_utf8(body) == whole


def _chat(content: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":%b}]}' % content


MANY = 800_000
LONG: dict[str, tuple[str, Callable[[], bytes]]] = {
    "escapes": (CHAT, lambda: _chat(b'"%b"' % (b"\\u0041" * MANY))),
    "characters": (CHAT, lambda: _chat(b'"%b"' % ("é".encode() * MANY * 2))),
    "image": (CHAT, lambda: _chat(b'[{"type":"image_url","image_url":{"url":"%b"}}]' % (b"A" * 6 * MANY))),
    "values": (CHAT, lambda: _chat(b'["%b"]' % b'","'.join([b"ab"] * MANY))),
    "messages": (
        CHAT,
        lambda: b'{"messages":[%b]}' % b",".join([b'{"role":"user","content":"%b"}' % (b"x" * 50)] * 40_000),
    ),
    "ids": (COMPLETIONS, lambda: b'{"prompt":[%b]}' % b",".join([b"12345"] * MANY)),
    "ids in a list": (COMPLETIONS, lambda: b'{"prompt":[[%b]]}' % b",".join([b"12345"] * MANY)),
    "strings": (COMPLETIONS, lambda: b'{"prompt":[%b]}' % b",".join([b'"abc"'] * MANY)),
    "text": (COMPLETIONS, lambda: b'{"prompt":"%b"}' % (b"\\n" * 3 * MANY)),
    "SGLang's ids": (GENERATE, lambda: b'{"input_ids":[%b]}' % b",".join([b"12345"] * MANY)),
    "Responses": (RESPONSES, lambda: b'{"input":"%b"}' % (b"\\n" * 3 * MANY)),
    "Messages": (
        MESSAGES,
        lambda: b'{"max_tokens":1,"messages":[{"role":"user","content":"%b"}]}' % (b"\\n" * 3 * MANY),
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_long_prompts_are_read_with_turns_for_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of megabytes is never decoded in one call: none gets more than a few slices of it, and others have a turn
    for each slice."""
    taken: list[int] = []
    monkeypatch.setattr(gil_release, "release_gil", lambda: taken.append(1))
    path, make = LONG[name]
    body = make()
    assert check_limits(body, 256, 65_536, 1 << 20) == ""
    taken.clear()
    ask = PATHS[path].parse(path, body, keep=False)
    assert ask.prompt is not None or name == "values"  # a content of bare strings is a list of odd parts
    assert len(taken) >= 2 * (len(body) // sliced_json.SLICE_BYTES)


def test_a_message_of_many_parts_has_all_of_them() -> None:
    """Its pieces are joined some thousand at a time."""
    words = [f"w{n}" for n in range(10_000)]
    ask = PATHS[CHAT].parse(CHAT, _chat(json.dumps(words).encode()), keep=False)
    assert ask.prompt is not None
    assert ask.prompt.text == b"\x1euser\x1f" + "\n".join(words).encode()
