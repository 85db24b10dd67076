from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.types.placements import Usage
from router.core.types.requests import RequestSpec
from tests.core.dialects.chats import USER, event
from tests.core.dialects.responses_bodies import CALLED, RESPONSES, RESULT, SAID, SYSTEM, THOUGHT, parse
from tests.support.examples import examples


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
@settings(deadline=None, max_examples=examples(60))
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
    assert ask == RequestSpec("m", None, True, b"s", "k", 9, False, "resp_1", True)
    assert parse(input=3, stream="x", cache_salt=3, store="x", max_output_tokens=0) == RequestSpec(
        "m", wants_usage=True
    )


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
    assert not RESPONSES.has_output(early)
    assert RESPONSES.has_output(early + event("response.output_item.added"))
