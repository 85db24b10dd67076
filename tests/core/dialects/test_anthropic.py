from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects.anthropic import Anthropic
from router.core.dialects.openai import OpenAI
from router.core.facts.placements import Usage
from router.core.facts.requests import Ask, Prompt
from router.core.prompts.blocks import chain_of
from router.core.prompts.bodies import BadBody

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
ANTHROPIC, OPENAI = Anthropic(), OpenAI()
USER = {"role": "user", "content": "Where is Ulm?"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "Ulm", "n": [1, 2.5]}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Ulm","n":[1,2.5]}'}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CHAT_PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CACHED = {"type": "ephemeral"}


def text(words: str, **fields: Any) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": words, **fields}


def parse(**fields: Any) -> Ask:
    """A body with these fields, read."""
    return ANTHROPIC.parse(MESSAGES, json.dumps({"model": "m", "max_tokens": 8, **fields}).encode())


def chat(*messages: dict[str, Any], **fields: Any) -> Prompt:
    """The prompt of a chat."""
    prompt = OPENAI.parse(CHAT, json.dumps({"model": "m", "messages": messages, **fields}).encode()).prompt
    assert prompt is not None
    return prompt


SAME: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    "a user": ({"messages": [USER]}, [USER], {}),
    "blocks": ({"messages": [{"role": "user", "content": [text("a"), text(""), text("b")]}]},
               [{"role": "user", "content": [text("a"), text("b")]}], {}),
    "system": ({"messages": [USER], "system": "Be terse."}, [{"role": "system", "content": "Be terse."}, USER], {}),
    "system blocks": ({"messages": [USER], "system": [text("Be "), text("terse.", cache_control=CACHED)]},
                      [{"role": "system", "content": "Be terse."}, USER], {}),
    "billing": ({"messages": [USER], "system": [text("x-anthropic-billing-header: cch=1"), text("Be terse.")]},
                [{"role": "system", "content": [text("x-anthropic-billing-header: cch=2"), text("Be terse.")]},
                 USER], {}),
    "system between": ({"messages": [USER, {"role": "system", "content": [text("Now.")]}, USER]},
                       [USER, {"role": "system", "content": "Now."}, USER], {}),
    "tools": ({"messages": [USER], "tools": [TOOL | {"cache_control": CACHED}]}, [USER],
              {"tools": [CHAT_TOOL]}),
    "tools in other words": ({"messages": [USER], "tools": [TOOL]}, [USER],
                             {"tools": [{"function": {"strict": None, **dict(reversed(CHAT_TOOL["function"].items()))},  # type: ignore[attr-defined]
                                         "type": "function"}]}),
    "a plain tool": ({"messages": [USER], "tools": [{"name": "x", "input_schema": {}}]}, [USER],
                     {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}]}),
    "no tools": ({"messages": [USER], "tools": []}, [USER], {}),
    "a tool used": (
        {"messages": [USER, {"role": "assistant", "content": [text("I look."), USE]},
                      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "South"}]}]},
        [USER, {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
         {"role": "tool", "tool_call_id": "c1", "content": "South"}], {}),
    "a result and more": (
        {"messages": [{"role": "user", "content": [text("And?"), PNG, {"type": "tool_result", "tool_use_id": "c1",
                                                                  "content": [text("S"), text("W"), PNG]}]}]},
        [{"role": "tool", "tool_call_id": "c1", "content": "S\nW"}, {"role": "user", "content": [CHAT_PNG]},
         {"role": "user", "content": [text("And?"), CHAT_PNG]}], {}),
    "a picture's URL": ({"messages": [{"role": "user", "content": [{"type": "image",
                                                                    "source": {"type": "url", "url": "https://x/1"}}]}]},
                        [{"role": "user", "content": [{"type": "image_url", "image_url": "https://x/1"}]}], {}),
    "thoughts": ({"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm",
                                                                      "signature": "s"},
                                                                     {"type": "redacted_thinking", "data": "x"},
                                                                     text("South.")]}]},
                 [USER, {"role": "assistant", "content": "South.", "reasoning": "hm"}], {}),
    "effort": ({"messages": [USER], "output_config": {"effort": "low"}}, [USER], {"reasoning_effort": "low"}),
    "no thinking": ({"messages": [USER], "thinking": {"type": "disabled"}}, [USER], {"reasoning_effort": "none"}),
    "template arguments": ({"messages": [USER], "chat_template_kwargs": {"x": 1}}, [USER],
                           {"chat_template_kwargs": {"x": 1}}),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "messages", "extra"), SAME.values(), ids=SAME)
def test_a_conversation_is_the_chat_that_the_engine_makes_of_it(
    fields: dict[str, Any], messages: list[dict[str, Any]], extra: dict[str, Any]
) -> None:
    """Canonical bytes, spans and the first user message are equal through both APIs: it is one chain."""
    assert parse(**fields).prompt == chat(*messages, **extra)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.1, "top_p": 0.5, "top_k": 3, "stop_sequences": ["x"], "max_tokens": 99, "stream": True},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "metadata": {"user_id": "u"}, "service_tier": "auto"},
        {"tool_choice": {"type": "auto"}, "cache_control": CACHED, "system": "", "tools": None},
        {"messages": [{"role": "user", "content": [text("Where is Ulm?", cache_control=CACHED)]}]},
    ],
)
def test_what_the_engine_does_not_cache_by_changes_nothing(fields: dict[str, Any]) -> None:
    """Sampling, budgets and cache_control leave the prompt as it is."""
    assert parse(**{"messages": [USER], **fields}).prompt == parse(messages=[USER]).prompt


BLOCKS = st.lists(
    st.one_of(
        st.builds(text, st.text("aé\x1e \n", max_size=5)),
        st.sampled_from([USE, PNG, {"type": "tool_result", "tool_use_id": "c1", "content": "S"}]),
        st.just({"type": "thinking", "thinking": "hm"}),
    ),
    max_size=3,
)
TURNS = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant"]),
        st.one_of(st.just("words"), BLOCKS.filter(lambda blocks: all(b["type"] != "tool_result" for b in blocks))),
    ),
    min_size=1,
    max_size=5,
)


@given(messages=TURNS, more=TURNS)
@settings(deadline=None, max_examples=60)
def test_the_next_turn_extends_the_bytes_of_this_one(
    messages: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    """Turn n+1 starts with all bytes of turn n, and its spans with turn n's."""
    now, later = (parse(messages=m, system="s").prompt for m in (messages, [*messages, *more]))
    assert now is not None
    assert later is not None
    assert later.text.startswith(now.text)
    assert later.assistant_spans[: len(now.assistant_spans)] == now.assistant_spans


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hello",
        [{"role": "user", "content": [{"type": "document", "source": {}}]}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user"}],
        [{"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "x"}}]}],
        [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]}],
    ],
)
def test_a_prompt_that_is_not_understood_is_unknown(messages: Any) -> None:
    """The engine judges its own input; the user's id then keeps the conversation together."""
    ask = parse(messages=messages, metadata={"user_id": "u"})
    assert (ask.model, ask.prompt, ask.session) == ("m", None, "u")
    assert chain_of(ask, "m") is None


def test_what_placement_needs_to_know() -> None:
    """Model, stream, salt, session and output length; a user's id is no session where the prompt is known."""
    ask = parse(messages=[USER], stream=True, cache_salt="s", prompt_cache_key="k", metadata={"user_id": "u"})
    assert ask == Ask("m", chat(USER), True, b"s", "k", 8, wants_usage=True, metadata=b'{"user_id": "u"}')
    assert parse(messages=[USER], metadata={"user_id": "u"}).session is None
    wrong = parse(messages=3, stream="yes", cache_salt=3, metadata=[1], max_tokens=-5, tools="x")
    assert wrong == Ask("m", wants_usage=True, metadata=b"[1]")


@given(st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.integers() | st.just("x"), st.lists).map(repr)))
@settings(deadline=None, max_examples=60)
def test_no_body_breaks_the_parser(part: bytes | str) -> None:
    """Whatever stands in a field, the answer is an Ask or BadBody."""
    value = part if isinstance(part, bytes) else part.replace("'", '"').replace("None", "null").encode()
    for name in (b"messages", b"system", b"tools", b"thinking", b"output_config", b"metadata"):
        body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"' + name + b'":' + value + b"}"
        with suppress(BadBody):
            assert ANTHROPIC.parse(MESSAGES, body).model == "m"


def event(kind: str, **fields: Any) -> bytes:
    """One streamed event."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def test_usage_counts_what_came_from_the_cache_as_prompt() -> None:
    """vLLM takes cached and created tokens off input_tokens; silence on the cache is told from a miss."""
    whole = {"usage": {"input_tokens": 8, "output_tokens": 3, "cache_read_input_tokens": 32}}
    assert ANTHROPIC.usage(json.dumps(whole).encode()) == Usage(40, 3, 32)
    whole["usage"]["cache_creation_input_tokens"] = 60
    assert ANTHROPIC.usage(json.dumps(whole).encode()) == Usage(100, 3, 32)
    assert ANTHROPIC.usage(b'{"usage":{"input_tokens":5,"output_tokens":1}}') == Usage(5, 1, None)
    assert (
        ANTHROPIC.usage(b'{"usage":{"output_tokens":1}}') is ANTHROPIC.usage(b'{"usage":{"input_tokens":-1}}') is None
    )


def test_usage_of_a_stream_is_that_of_message_delta() -> None:
    """message_start knows no more than the prompt; only where message_delta does not say it, it counts."""
    start = event("message_start", message={"usage": {"input_tokens": 100, "output_tokens": 0}})
    body = event("content_block_delta", index=0, delta={"type": "text_delta", "text": '"usage"'})
    full = event(
        "message_delta", delta={}, usage={"input_tokens": 36, "cache_read_input_tokens": 64, "output_tokens": 7}
    )
    short = event("message_delta", delta={}, usage={"output_tokens": 7})
    stop = event("message_stop")
    assert ANTHROPIC.stream_usage(start + body + full + stop) == Usage(100, 7, 64)
    assert ANTHROPIC.stream_usage(body[30:] + full.replace(b"\n", b"\r\n") + stop) == Usage(100, 7, 64)
    assert ANTHROPIC.stream_usage(start + body + short + stop) == Usage(100, 7, None)
    assert ANTHROPIC.stream_usage(body + short + stop) is ANTHROPIC.stream_usage(start + body) is None


@pytest.mark.parametrize(
    ("chunk", "status"),
    [
        (event("error", error={"type": "internal_error", "message": "EngineCore died"}), 500),
        (event("error", error={"type": "overloaded_error"}), 503),
        (event("error", error={"type": "invalid_request_error"}) + event("ping"), 400),
        (event("error", error="boom"), 500),
        (event("error"), 500),
        (b'data: {"error": {"code": 503}}\n\n', 503),
        (event("message_start", message={"x": '"error"'}), None),
        (event("content_block_delta", error=None), None),
        (b'event: error\ndata: {"error', None),
        (b"", None),
    ],
)
def test_an_error_in_the_first_event_is_seen(chunk: bytes, status: int | None) -> None:
    """Status 200 with an error event is the error."""
    assert ANTHROPIC.event_error(chunk) == status


def test_a_whole_answer_without_stop_reason_was_given_up() -> None:
    """vLLM leaves the reason out when it was told to stop; counts, errors and streams are something else."""
    assert ANTHROPIC.aborted(b'{"type":"message","content":[{"type":"text","text":"half"}]}')
    for head in (b'{"type":"message","stop_reason":"end_turn"}', b'{"input_tokens":7}', b'{"type":"error"}', b"{", b""):
        assert not ANTHROPIC.aborted(head)
    assert not ANTHROPIC.aborted(event("message_start", message={"type": "message"}))


def test_prefill_is_done_when_content_begins() -> None:
    """message_start and pings may be sent before; a piece that begins no event says nothing."""
    assert not ANTHROPIC.begun(event("message_start") + event("ping"))
    assert not ANTHROPIC.begun(b'{"text": "event: x\\n"}\n\n')
    assert ANTHROPIC.begun(event("ping") + event("content_block_start"))
