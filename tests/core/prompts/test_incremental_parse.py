"""What is read with a memory of earlier bodies is what is read without."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects import ANTHROPIC, OPENAI, PATHS, Dialect, InvalidBody
from router.core.prompts.block_keys import SPANS_MAX, chain_of, ring_key
from router.core.prompts.incremental_parse import BodyPrefixCache
from router.core.types.requests import RequestSpec
from tests.support.examples import examples

CHAT, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/completions"
CELL = 64  # so small that short bodies have many
TOOLS = {
    CHAT: [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"messages": {"a": [1]}}}}}],
    MESSAGES: [{"name": "look", "input_schema": {"properties": {"messages": {"a": [1]}}}}],
}


def memory(bytes_max: int = 1 << 20) -> BodyPrefixCache:
    """An empty memory with small cells."""
    return BodyPrefixCache(bytes_max=bytes_max, seed=7, cell_bytes=CELL)


def told(ask: RequestSpec, model: str | None = None) -> object:
    """All that placement makes of a request."""
    chain, prompt = chain_of(ask, model or ask.model or ""), ask.prompt
    key = ring_key(ask, chain, None, b"body")
    fields = (ask.model, ask.stream, ask.salt, ask.session, ask.output_tokens_max, ask.stored, ask.response_id)
    if prompt is None:
        return fields, ask.wants_usage, key
    spans = prompt.assistant_spans[-SPANS_MAX:]
    facts = (prompt.size, prompt.first_user_end, spans, prompt.opaque_bytes, prompt.bytes_per_token)
    facts = (*facts, prompt.arguments, prompt.fewer_tools)
    return fields, ask.wants_usage, key, facts, chain


def read(path: str, body: bytes, seen: BodyPrefixCache | None, *, keep: bool = False) -> object:
    """What is told of a body, or why it is refused."""
    try:
        return told(PATHS[path].parse(path, body, keep=keep, seen=seen))
    except InvalidBody as error:
        return error.code, str(error)


def kept(path: str, body: bytes, seen: BodyPrefixCache | None) -> object:
    """What is told of a body that is kept, and what a template is rendered with, the order of keys included."""
    try:
        ask = PATHS[path].parse(path, body, seen=seen)
    except InvalidBody as error:
        return error.code, str(error)
    return told(ask), repr(PATHS[path].template_input(path, body, ask.decoded))


JUNK = st.recursive(
    st.sampled_from([None, True, 0, 3.0, 10**30, "", "x", "\x7f", "user"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "role"]), inner),
    max_leaves=4,
)
TEXT = st.builds(
    lambda part, times: part * times, st.text('aé中😀\x1e"\\\n\x7f', max_size=6), st.sampled_from([1, 9, 40])
)
ROLES = st.sampled_from(["user", "assistant", "system"])
PLAIN = st.builds(lambda role, text: {"role": role, "content": text}, ROLES, TEXT)
OTHER = {
    CHAT: st.one_of(
        st.just({"role": "user", "content": [{"type": "image_url", "image_url": "http://x/1.png"}]}),
        st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, TEXT),
        st.just({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}),
    ),
    MESSAGES: st.one_of(
        st.builds(lambda text: {"role": "user", "content": [{"type": "text", "text": text}]}, TEXT),
        st.just({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]}),
        st.just({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "found"}]}),
    ),
}
FIELDS = {
    "model": st.sampled_from(["m", "n"]),
    "cache_salt": st.sampled_from(["s", "t"]),
    "system": TEXT,
    "stream": st.booleans(),
    "max_tokens": st.integers(-1, 9),
    "prompt_cache_key": TEXT,
    "chat_template_kwargs": st.sampled_from([{}, {"a": 1}, {"enable_thinking": False}, {"b": 2, "a": 1}]),
    "mm_processor_kwargs": st.sampled_from([{}, {"max_pixels": 1}]),
    "tool_choice": st.sampled_from(["auto", "none", {"type": "function", "function": {"name": "look"}}]),
    "reasoning_effort": st.sampled_from(["none", "low"]),
    "unknown": st.just({"messages": [{"role": "user", "content": "not these"}]}),
}


@st.composite
def talks(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """Bodies that begin alike: turns of conversations, forks of them, with other fields around, some damaged."""
    path = draw(st.sampled_from([CHAT, MESSAGES]))
    said: list[Any] = []
    bodies = []
    for _ in range(draw(st.integers(2, 6))):
        said = said[: draw(st.integers(0, len(said)))] if draw(st.integers(0, 3)) == 0 else said
        said = said + draw(st.lists(st.one_of(PLAIN, PLAIN, OTHER[path]), max_size=4))
        if draw(st.integers(0, 15)) == 0:
            said = [*said, draw(JUNK)]
        fields = draw(st.fixed_dictionaries({}, optional=FIELDS)) | (
            {"tools": TOOLS[path]} if draw(st.booleans()) else {}
        )
        first = draw(st.booleans())
        whole = {"messages": said} | fields if first else fields | {"messages": said}
        body = json.dumps(
            whole, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, None, 1]))
        ).encode()
        if draw(st.integers(0, 9)) == 0:
            at = draw(st.integers(0, len(body) - 1))
            body = body[:at] + draw(st.sampled_from([b"", b"\xff", b'"', b"]", b"\\ud800", b" "])) + body[at + 1 :]
        bodies.append(body)
    return path, bodies


@given(talk=talks())
@settings(deadline=None, max_examples=examples(150))
def test_a_memory_changes_nothing(talk: tuple[str, list[bytes]]) -> None:
    """The same requests, prompts, keys and refusals as without, however often a body comes, and if little is kept."""
    path, bodies = talk
    large, small = memory(), memory(bytes_max=4_000)
    for body in [*bodies, *bodies]:
        without = read(path, body, None, keep=True)
        assert read(path, body, None) == without
        assert read(path, body, large) == without
        assert read(path, body, small) == without
        assert kept(path, body, large) == kept(path, body, small) == kept(path, body, None)


@given(path=st.sampled_from([*PATHS]), name=st.sampled_from(["model", "stream", "max_tokens", "messages"]), value=JUNK)
@settings(deadline=None, max_examples=examples(80))
def test_reading_less_reads_the_same(path: str, name: str, value: object) -> None:
    """With fields of any type, what is not kept for the template makes no difference to placement."""
    body = json.dumps({"model": "m", "prompt": "p", "input": "i", "text": "t", name: value}).encode()
    assert read(path, body, None) == read(path, body, None, keep=True)


def conversation(path: str, turns: int, **fields: Any) -> bytes:
    """The body of a conversation's turn; a longer one begins with the same bytes."""
    said = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} words of it " * 12} for i in range(turns)]
    return json.dumps({"model": "m", "messages": said} | fields).encode()


ROWS = pytest.mark.parametrize(("path", "dialect"), [(CHAT, OPENAI), (MESSAGES, ANTHROPIC)])


@ROWS
def test_of_the_next_turn_only_what_is_new_is_read(path: str, dialect: Dialect) -> None:
    """After two turns (the first that shares a beginning is worth remembering), a turn's text is its last messages."""
    seen = memory()
    for turns in range(21, 29, 2):
        ask = dialect.parse(path, conversation(path, turns), keep=False, seen=seen)
        assert told(ask) == read(path, conversation(path, turns), None)
    assert ask.prompt is not None
    assert 0 < len(ask.prompt.text) < ask.prompt.size / 6
    assert ask.prompt.text in dialect.parse(path, conversation(path, 27)).prompt.text  # type: ignore[union-attr]


@ROWS
def test_a_template_is_given_all_messages_of_a_known_conversation(path: str, dialect: Dialect) -> None:
    """Those that were decoded with earlier turns and the new ones, in every branch of the conversation."""
    seen, other = memory(), memory()
    for turns in (21, 23, 25, 27, 23, 25, 21):
        for body in (conversation(path, turns), conversation(path, turns).replace(b"20 words", b"20 WORDS")):
            assert kept(path, body, seen) == kept(path, body, None)
            dialect.parse(path, body, keep=False, seen=other)
    ask = dialect.parse(path, conversation(path, 29), seen=seen)
    assert ask.prompt is not None
    assert 0 < len(ask.prompt.text) < ask.prompt.size / 6
    ask = dialect.parse(path, conversation(path, 29), seen=other)
    assert ask.prompt is not None
    assert not ask.prompt.skipped_bytes, "a memory without decoded messages was used"


@ROWS
def test_one_beginning_has_a_chain_for_each_identity(path: str, dialect: Dialect) -> None:
    """Another salt, other tools, another model resolved: their own chains, though the messages are known."""
    seen = memory()
    for _ in range(3):
        told(dialect.parse(path, conversation(path, 21), keep=False, seen=seen))
    others = [{"cache_salt": str(salt)} for salt in range(12)] + [{"tools": TOOLS[path]}]
    for fields in [*others, *others]:
        assert read(path, conversation(path, 23, **fields), seen) == read(path, conversation(path, 23, **fields), None)
    asks = [dialect.parse(path, conversation(path, 23), keep=False, seen=each) for each in (seen, None)]
    assert told(asks[0], "resolved") == told(asks[1], "resolved")


@ROWS
def test_what_lies_behind_a_shared_beginning_stays_apart(path: str, dialect: Dialect) -> None:
    """Two conversations that part after ten messages, each as long as the other, have their own keys from there on."""
    seen = memory()
    one = other = conversation(path, 30)
    for at in range(10, 30):
        other = other.replace(b"%d words" % at, b"%d WORDS" % at)
    assert len(one) == len(other)
    for body in (one, one, other, other, one, other):
        assert read(path, body, seen) == read(path, body, None)


def test_what_is_used_is_kept() -> None:
    """What is asked again and again is not pushed out by what is asked once, however much that is."""
    seen, random = BodyPrefixCache(bytes_max=400_000, seed=7, cell_bytes=1_024), Random(3)
    for times in range(60):
        ask = OPENAI.parse(CHAT, conversation(CHAT, 41), keep=False, seen=seen)
        assert ask.prompt is not None
        assert bool(ask.prompt.skipped_bytes) is (times > 1)
        told(ask)
        for _ in range(8):
            said = [{"role": "user", "content": random.randbytes(400).hex()} for _ in range(20)]
            told(OPENAI.parse(CHAT, json.dumps({"messages": said}).encode(), keep=False, seen=seen))


SAID = conversation(CHAT, 21)
TURN = conversation(CHAT, 23)


@pytest.mark.parametrize(
    "body",
    [
        TURN[:-1] + b',"messages":[{"role":"user","content":"twice"}]}',
        TURN[:-1] + b',"mess\\u0061ges":["\\u007f",{"role":"user","content":"twice"}]}',
        TURN[:-1] + b',"messages":["\x7f",{"role":"user","content":"twice"}]}',
        TURN[:-1] + b',"messages":null}',
        TURN[:-1] + b',"model":"other"}',
        TURN[:-1],
        TURN + b"{}",
        TURN.replace(b"]}", b",3]}"),
        TURN.replace(b"]}", b",]}"),
        TURN.replace(b"22 words", b"22 \xff words"),
        TURN.replace(b"22 words", b"22 \\ud800 words"),
        TURN.replace(b"22 words", b"22 \x7f words"),
        b'{"x":' + TURN + b',"model":"m","messages":[{"role":"user","content":"these"}]}',
        b'{"messages":[{"role":"user","content":"not these"}],' + TURN[1:],
        b'{"messages":{"messages":[' + TURN[len(b'{"model": "m", "messages": [') :] + b"}",
    ],
)
def test_what_is_odd_is_read_as_if_nothing_had_been_seen(body: bytes) -> None:
    """Fields given twice, bodies in bodies, damage behind what is known: as without a memory, time after time."""
    seen = memory()
    for each in (SAID, SAID, SAID, body, TURN, body, body, TURN):
        assert read(CHAT, each, seen) == read(CHAT, each, None, keep=True)
        assert kept(CHAT, each, seen) == kept(CHAT, each, None)


def test_a_prompt_that_is_let_go_keeps_its_size() -> None:
    """What a lease holds of a prompt is numbers."""
    seen = memory()
    for turns in (21, 21, 21, 23):
        ask = OPENAI.parse(CHAT, conversation(CHAT, turns), keep=False, seen=seen)
        assert ask.prompt is not None
        size = ask.prompt.size
        assert chain_of(ask, "m") is not None
        ask.prompt.release()
        assert (ask.prompt.size, ask.prompt.text, ask.prompt.joint) == (size, b"", None)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.long
def test_what_is_kept_is_bounded(keep: bool) -> None:
    """A client that always sends something new, or other heads and salts, fills no more than was allowed."""
    bytes_max = 400_000
    seen, random = BodyPrefixCache(bytes_max=bytes_max, seed=7, cell_bytes=1_024), Random(3)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for talk in range(60):
            tools = [{"name": f"t{talk}", "description": "x" * 9_000}]
            said = [{"role": "user", "content": random.randbytes(400).hex()} for _ in range(40)]
            for turn in range(20, 41, 5):
                fields = {"cache_salt": str(turn), "messages": said[:turn], "tools": tools}
                with suppress(InvalidBody):
                    chain_of(OPENAI.parse(CHAT, json.dumps(fields).encode(), keep=keep, seen=seen), "m")
        for salt in range(2_000):
            fields = {"messages": said, "cache_salt": str(salt)}
            chain_of(OPENAI.parse(CHAT, json.dumps(fields).encode(), keep=keep, seen=seen), "m")
        del said, fields, tools
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 20_000 < held < bytes_max * 1.25
