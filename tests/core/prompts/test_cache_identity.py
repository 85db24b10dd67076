"""What two requests must have in common to share a chain: the prompt that the engine computes, by whatever name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.dialects import OPENAI, PATHS
from router.core.prompts.block_keys import Chain, chain_of, ring_key
from router.core.prompts.cache_identity import with_fewer_tools
from router.core.prompts.incremental_parse import BodyPrefixCache

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
WORDS = "What is said is long enough to fill some blocks. " * 40
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": WORDS},
    {"role": "assistant", "content": WORDS},
    {"role": "user", "content": WORDS},
]
INPUT = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}
TOOLS = [{"type": "function", "function": {"name": name, "description": WORDS}} for name in ("look", "go")]
ROWS = pytest.mark.parametrize("path", INPUT)


def read(path: str = CHAT, said: list[dict[str, Any]] = TALK, **fields: Any) -> tuple[Chain, str]:
    """A request's chain, and what the ring hashes."""
    body = json.dumps({"model": "m", INPUT[path]: said, **fields}).encode()
    ask = PATHS[path].parse(path, body)
    chain = chain_of(ask, "m")
    assert chain is not None
    return chain, ring_key(ask, chain, None, body)


def common(one: Chain, other: Chain) -> int:
    """Leading blocks that two chains have in common."""
    return sum(a == b for a, b in zip(one.keys, other.keys, strict=False))


LATE = [
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"enable_thinking": True, "add_generation_prompt": True}},
    {"chat_template_kwargs": {"thinking": True, "clear_thinking": False}},
    {"chat_template_kwargs": {}},
]


@ROWS
@pytest.mark.parametrize("fields", LATE)
def test_an_argument_that_acts_at_the_end_leaves_the_chain(path: str, fields: dict[str, Any]) -> None:
    """Thinking turned on or off is no other conversation: the engine reuses all of it, at the same place."""
    assert read(path, **fields) == read(path)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
    ],
)
def test_thinking_switched_off_leaves_the_chain(path: str, fields: dict[str, Any]) -> None:
    """So it is in each dialect's own words."""
    assert read(path, **fields) == read(path)


@ROWS
def test_arguments_have_no_order(path: str) -> None:
    """They are variables of the template; two orders of the same ones are the same prompt, other values are not."""
    one, other = {"date": "today", "city": "Ulm"}, {"city": "Ulm", "enable_thinking": True, "date": "today"}
    assert read(path, chat_template_kwargs=one) == read(path, chat_template_kwargs=other)
    assert not common(read(path, chat_template_kwargs=one)[0], read(path)[0])


@ROWS
def test_the_ring_does_not_look_at_arguments(path: str) -> None:
    """Whatever a template is told, a conversation has one place, and another conversation another."""
    effort = {CHAT: {"reasoning_effort": "low"}, MESSAGES: {"output_config": {"effort": "low"}}}
    tools = {CHAT: TOOLS, MESSAGES: [{"name": "look", "input_schema": {}, "description": WORDS}]}
    for fields in ({"chat_template_kwargs": {"date": "today"}}, effort.get(path, {"reasoning": {"effort": "low"}})):
        own = {"tools": tools[path]} if path in tools else {}
        (chain, place), (plain, same) = read(path, **fields, **own), read(path, **own)
        assert chain.end_key != plain.end_key
        assert place == same
        assert place != read(path, [{"role": "user", "content": "Another one."}], **fields, **own)[1]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_the_ring_does_not_look_at_arguments_of_what_was_seen_before(path: str) -> None:
    """Nor does it where only the end of a conversation is read."""
    seen = BodyPrefixCache(bytes_max=1 << 20, seed=7, cell_bytes=64)
    for turns in (1, 3, 5, 7, 5, 7):
        said = [{"role": ("user", "assistant")[n % 2], "content": f"{n} {WORDS}"} for n in range(turns)]
        places = []
        for fields in ({}, {"chat_template_kwargs": {"date": "today"}}, {"chat_template_kwargs": {"date": "now"}}):
            body = json.dumps({"model": "m", "messages": said, **fields}).encode()
            ask = PATHS[path].parse(path, body, keep=False, seen=seen)
            places.append(ring_key(ask, chain_of(ask, "m"), None, b""))
        assert places == [read(path, said)[1]] * 3


@pytest.mark.parametrize("choice", ["none", {"type": "function", "function": {"name": "go"}}])
def test_a_prompt_with_fewer_tools_is_one_that_never_had_more(choice: object) -> None:
    """Offsets, head and all that is remembered of a conversation are those of a request with only these tools, also
    where only its end is read."""
    seen = BodyPrefixCache(bytes_max=1 << 20, seed=7, cell_bytes=64)
    for turns in (1, 3, 5, 7, 5, 7):
        said = [{"role": ("user", "assistant")[n % 2], "content": f"{n} {WORDS}"} for n in range(turns)]
        fields = {"model": "m", "messages": said, "chat_template_kwargs": {"date": "today"}}
        asks = []
        for tools, more in ((TOOLS, {"tool_choice": choice}), (TOOLS[1:] if isinstance(choice, dict) else None, {})):
            body = json.dumps({**fields, "tools": tools, **more}).encode()
            asks.append(OPENAI.parse(CHAT, body, keep=False, seen=seen))
        one, other = asks
        assert one.prompt is not None
        one.prompt = with_fewer_tools(one.prompt)
        assert chain_of(one, "m") == chain_of(other, "m")
        assert one.prompt.arguments == (other.prompt and other.prompt.arguments)
        assert one.prompt.size == (other.prompt and other.prompt.size)
        chain_of(OPENAI.parse(CHAT, body, keep=False, seen=seen), "m")


CALLED = {"role": "assistant", "content": "I look."}
NOTHING: dict[str, Any] = {"reasoning_content": "", "reasoning": "", "tool_calls": []}


@pytest.mark.parametrize("name", NOTHING)
def test_a_field_that_says_nothing_is_absent(name: str) -> None:
    """Clients send back empty what they got empty, or leave it out."""
    assert read(said=[*TALK, CALLED | {name: NOTHING[name]}, *TALK]) == read(said=[*TALK, CALLED, *TALK])


def called(path: str, id_: str) -> list[dict[str, Any]]:
    """A call and its result, under an id."""
    if path == CHAT:
        call = {"id": id_, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": id_, "content": WORDS}]
    if path == MESSAGES:
        use = {"type": "tool_use", "id": id_, "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": id_, "content": WORDS}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    call = {"type": "function_call", "call_id": id_, "name": "look", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": id_, "output": WORDS}]


@ROWS
def test_ids_of_calls_are_no_part_of_a_prompt(path: str) -> None:
    """Some clients make them anew each turn, and most templates do not print them."""
    assert read(path, [*TALK, *called(path, "a1"), *TALK]) == read(path, [*TALK, *called(path, "b2"), *TALK])


def picture(**fields: str) -> list[dict[str, Any]]:
    """A user message with a picture, behind others."""
    return [*TALK, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", **fields}}]}]


def test_how_an_image_is_processed_is_part_of_it() -> None:
    """Engines hash that with the image; what stands before the image they share."""
    plain, text = read(said=picture())[0], read()[0]
    for fields, given in (({"detail": "high"}, {}), ({}, {"mm_processor_kwargs": {"max_pixels": 9}})):
        other = read(said=picture(**fields), **given)[0]
        assert len(text.keys) <= common(plain, other) < len(other.keys)
        assert other.end_key != plain.end_key
    assert read(said=picture(detail="auto"), mm_processor_kwargs={}) == read(said=picture())
    assert read(mm_processor_kwargs={"max_pixels": 9}) == read()


def test_an_image_of_responses_has_its_detail_beside_its_url() -> None:
    """There it is a field of the part, which the API's own client always sends."""
    chains = [
        read(RESPONSES, [{"role": "user", "content": [{"type": "input_image", "image_url": "x", **fields}]}])[0]
        for fields in ({}, {"detail": "auto"}, {"detail": "high"})
    ]
    assert chains[0] == chains[1] != chains[2]
