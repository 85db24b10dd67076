from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects.openai import OpenAI
from router.core.dialects.responses import Responses
from router.core.facts.placements import Usage
from router.core.facts.requests import Ask, Prompt
from router.core.prompts.bodies import BadBody

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
RESPONSES, OPENAI = Responses(), OpenAI()
USER = {"role": "user", "content": "Where is Ulm?"}
SYSTEM = {"role": "system", "content": "Be terse."}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"Ulm"}'}}
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"at": "Ulm"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "South"}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "South.", "annotations": []}],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def parse(**fields: Any) -> Ask:
    """A body with these fields, read."""
    return RESPONSES.parse(PATH, json.dumps({"model": "m", **fields}).encode())


def chat(*messages: dict[str, Any], **fields: Any) -> Prompt:
    """The prompt of a chat."""
    prompt = OPENAI.parse(CHAT, json.dumps({"model": "m", "messages": messages, **fields}).encode()).prompt
    assert prompt is not None
    return prompt


def assistant(text: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chat's assistant message."""
    return {"role": "assistant", "content": text, **fields}


TOOL_MESSAGE = {"role": "tool", "tool_call_id": "c1", "content": "South"}
SAME: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    "a string": ({"input": "Where is Ulm?"}, [USER], {}),
    "instructions": ({"input": "Where is Ulm?", "instructions": "Be terse."}, [SYSTEM, USER], {}),
    "messages": ({"input": [SYSTEM, {"type": "message", **USER}]}, [SYSTEM, USER], {}),
    "parts": ({"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": "https://x/1.png", "detail": "auto"}]}]},
              [{"role": "user", "content": [{"type": "text", "text": "See"},
                                            {"type": "image_url", "image_url": {"url": "https://x/1.png"}}]}], {}),
    "an answer": ({"input": [USER, SAID, USER]}, [USER, assistant("South."), USER], {}),
    "an answer as text": ({"input": [USER, assistant("South."), USER]}, [USER, assistant("South."), USER], {}),
    "a call": ({"input": [USER, CALLED, RESULT]}, [USER, assistant(tool_calls=[CALL]), TOOL_MESSAGE], {}),
    "thought, said and called": ({"input": [USER, THOUGHT, SAID, CALLED, {**CALLED, "call_id": "c2"}, RESULT]},
                                 [USER, assistant("South.", tool_calls=[CALL, {**CALL, "id": "c2"}], reasoning="hm"),
                                  TOOL_MESSAGE], {}),
    "said twice": ({"input": [USER, SAID, SAID]}, [USER, assistant("South."), assistant("South.")], {}),
    "summary": ({"input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, SAID]},
                [USER, assistant("South.", reasoning="hm")], {}),
    "a result in parts": ({"input": [USER, CALLED, {**RESULT, "output": [{"type": "input_text", "text": "South"}]}]},
                          [USER, assistant(tool_calls=[CALL]), TOOL_MESSAGE], {}),
    "tools": ({"input": "Where is Ulm?", "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}]}, [USER],
              {"tools": [{"type": "function", "function": FUNCTION}]}),
    "no function": ({"input": "Where is Ulm?", "tools": [{"type": "web_search"}]}, [USER], {}),
    "a namespace": ({"input": "Where is Ulm?", "tools": [{"type": "namespace", "name": "geo", "description": "d",
                                                       "tools": [{"type": "function", **FUNCTION}]}]}, [USER],
                    {"tools": [{"type": "function", "function": {**FUNCTION, "name": "geo__look"}}]}),
    "effort": ({"input": "Where is Ulm?", "reasoning": {"effort": "low"}}, [USER], {"reasoning_effort": "low"}),
    "template arguments": ({"input": "Where is Ulm?", "chat_template_kwargs": {"x": 1}}, [USER],
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
        {"temperature": 0.1, "max_output_tokens": 9, "stream": True, "store": False, "metadata": {"a": "b"}},
        {"text": {"format": {"type": "text"}}, "truncation": "auto", "include": [], "parallel_tool_calls": True},
        {"previous_response_id": None, "prompt": None, "instructions": None, "tools": [], "user": "u"},
    ],
)
def test_what_the_engine_does_not_cache_by_changes_nothing(fields: dict[str, Any]) -> None:
    """Sampling, storage and formats leave the prompt as it is."""
    assert parse(input="x", **fields).prompt == parse(input="x").prompt


ITEMS = st.lists(st.sampled_from([USER, SYSTEM, RESULT]), min_size=1, max_size=3)
ANSWERS = st.lists(st.sampled_from([SAID, CALLED, THOUGHT]), min_size=1, max_size=4)


@given(items=ITEMS, answers=ANSWERS, more=ITEMS)
@settings(deadline=None, max_examples=60)
def test_the_next_turn_extends_the_bytes_of_this_one(
    items: list[dict[str, Any]], answers: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    """What was sent, then the answer's items, then new ones: each begins with all bytes of the one before."""
    turns = [parse(input=i).prompt for i in (items, items + answers, items + answers + more)]
    texts = [prompt.text for prompt in turns if prompt]
    assert len(texts) == 3
    assert texts[1].startswith(texts[0])
    assert texts[2].startswith(texts[1])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input": None},
        {"input": {"a": 1}},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "previous_input_messages": [{}]},
        {"input": [USER, {"type": "item_reference", "id": "msg_1"}]},
        {"input": [USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        {"input": [3]},
        {"input": "x", "tools": "y"},
    ],
)
def test_a_prompt_that_is_not_understood_is_unknown(fields: dict[str, Any]) -> None:
    """What lies in the engine's store, and what no chat is made of: placement goes on without it."""
    assert parse(**fields).prompt is None


def test_what_placement_needs_to_know() -> None:
    """Model, stream, salt, session, output length, and what ties a request to the replica that stored a response."""
    ask = parse(
        input="x",
        stream=True,
        cache_salt="s",
        prompt_cache_key="k",
        max_output_tokens=9,
        store=False,
        previous_response_id="resp_1",
    )
    assert ask == Ask("m", None, True, b"s", "k", 9, False, "resp_1", True)
    assert parse(input=3, stream="x", cache_salt=3, store="x", max_output_tokens=0) == Ask("m", wants_usage=True)


@given(st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.integers() | st.just("x"), st.lists).map(repr)))
@settings(deadline=None, max_examples=60)
def test_no_body_breaks_the_parser(part: bytes | str) -> None:
    """Whatever stands in a field, the answer is an Ask or BadBody."""
    value = part if isinstance(part, bytes) else part.replace("'", '"').replace("None", "null").encode()
    for field in (b'"input":%s', b'"tools":%s', b'"tools":[{"type":"namespace","tools":%s}]', b'"reasoning":%s'):
        body = b'{"model":"m","input":"x",' + field % value + b"}"
        with suppress(BadBody):
            assert RESPONSES.parse(PATH, body).model == "m"


def event(kind: str, **fields: Any) -> bytes:
    """One streamed event."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


COUNTS = {
    "input_tokens": 50,
    "input_tokens_details": {"cached_tokens": 32, "cached_tokens_per_turn": []},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 57,
}


def test_usage_of_a_whole_answer() -> None:
    """Counts as the engine reports them; a queued response has none yet."""
    assert RESPONSES.usage(json.dumps({"id": "resp_1", "usage": COUNTS}).encode()) == Usage(50, 7, 32)
    assert RESPONSES.usage(b'{"usage":{"input_tokens":5,"output_tokens":1}}') == Usage(5, 1, None)
    assert RESPONSES.usage(b'{"usage":null}') is None


@given(cut=st.integers(0, 700))
@settings(deadline=None)
def test_usage_from_the_end_of_a_stream(cut: int) -> None:
    """The last event's usage counts, though the tail may begin within that event."""
    created = event("response.created", response={"usage": None})
    last = event("response.completed", response={"output": [{"text": '"usage": {' + "x" * 600}], "usage": COUNTS})
    stream = created + last
    assert RESPONSES.stream_usage(stream[min(cut, stream.rindex(b'"usage"')) :]) == Usage(50, 7, 32)
    assert RESPONSES.stream_usage(created) is None


@pytest.mark.parametrize(
    ("chunk", "status"),
    [
        (event("error", code="server_error", message="dead"), 500),
        (event("response.failed", response={"error": {"code": "server_error"}}), 500),
        (b'data: {"error": {"message": "dead", "code": 503}}\n\n', 503),
        (event("response.created", response={"error": None}), None),
        (event("response.created", response={"instructions": '"error"'}) + event("error"), None),
        (b'event: error\ndata: {"type', None),
        (b"", None),
    ],
)
def test_an_error_in_the_first_event_is_seen(chunk: bytes, status: int | None) -> None:
    """Status 200 with an error event is the error."""
    assert RESPONSES.event_error(chunk) == status


def test_prefill_is_done_when_output_begins() -> None:
    """vLLM sends created and in_progress before it has computed anything."""
    early = event("response.created", response={"instructions": "event: x\n"}) + event("response.in_progress")
    assert not RESPONSES.begun(early)
    assert RESPONSES.begun(early + event("response.output_item.added"))
