from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.prompts.block_keys import chain_of
from router.core.types.placements import Usage
from router.core.types.requests import RequestSpec
from tests.core.dialects.chats import USER, chat, event
from tests.core.dialects.messages_bodies import ANTHROPIC, CACHED, PNG, USE, parse, text
from tests.support.examples import examples


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
@settings(deadline=None, max_examples=examples(60))
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
    assert ask == RequestSpec("m", chat(USER), True, b"s", "k", 8, wants_usage=True, metadata=b'{"user_id": "u"}')
    assert parse(messages=[USER], metadata={"user_id": "u"}).session is None
    wrong = parse(messages=3, stream="maybe", cache_salt=3, metadata=[1], max_tokens=-5, tools="x")
    assert wrong == RequestSpec("m", wants_usage=True, metadata=b"[1]")


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
    assert ANTHROPIC.find_abort(b'{"type":"message","content":[{"type":"text","text":"half"}]}')
    for head in (b'{"type":"message","stop_reason":"end_turn"}', b'{"input_tokens":7}', b'{"type":"error"}', b"{", b""):
        assert not ANTHROPIC.find_abort(head)
    assert not ANTHROPIC.find_abort(event("message_start", message={"type": "message"}))


def test_prefill_is_done_when_content_begins() -> None:
    """message_start and pings may be sent before; a piece that begins no event says nothing."""
    assert not ANTHROPIC.has_output(event("message_start") + event("ping"))
    assert not ANTHROPIC.has_output(b'{"text": "event: x\\n"}\n\n')
    assert ANTHROPIC.has_output(event("ping") + event("content_block_start"))
