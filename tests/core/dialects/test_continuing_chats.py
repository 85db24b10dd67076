"""Chats that may call tools go on on another replica as chats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects.failover import (
    AlreadyComplete,
    FailoverMismatch,
    FailoverRefused,
    StreamRecorder,
    recorder_of,
    stitcher_of,
)
from tests.core.dialects.continued import CHAT, TOOLS, body_of, planned, streamed
from tests.support.examples import examples
from tests.support.speaking import chunks_of, said_in, whole


def chatted(body: dict[str, Any], after: int, *, together_max: int = 1, seed: int = 0) -> list[dict[str, Any]]:
    """The chunks of a chat with tools that is killed behind so many events, and continued. Raises FailoverMismatch."""
    carried = recorder_of(planned(CHAT, body), lambda: json.dumps(body).encode())
    got = b"".join(
        [carried.take(event) for event in streamed(CHAT, body, together_max=together_max, seed=seed)[:after]]
    )
    try:
        following = json.loads(carried.next_body())
    except AlreadyComplete as said:
        return chunks_of(got + said.events)
    assert carried.next_path == CHAT
    assert following["tools"] == TOOLS
    assert "prompt" not in following
    resumed = stitcher_of(carried)
    for event in streamed(CHAT, following, together_max=together_max, seed=seed + 1):
        got += resumed.take(event)
    assert not resumed.broken
    return chunks_of(got)


@settings(max_examples=examples(100))
@given(
    text=st.text(max_size=8),
    stop=st.sampled_from([[], ["STOP"], [" cat sat", "s"], ["🙂"]]),
    tokens_max=st.integers(1, 60),
    together_max=st.integers(1, 4),
    seed=st.integers(0, 1 << 20),
    data=st.data(),
)
def test_exact_or_refused(
    text: str, stop: list[str], tokens_max: int, together_max: int, seed: int, data: st.DataObject
) -> None:
    """Killed behind any event, a chat with tools is the unbroken one, its limits kept, or found out; also where events
    have several tokens and text is held back."""
    body = body_of(CHAT, messages=[{"role": "user", "content": text}], tools=TOOLS, stop=stop, max_tokens=tokens_max)
    body |= {"min_tokens": data.draw(st.integers(0, tokens_max)), "stream_options": {"include_usage": True}}
    count = len(streamed(CHAT, body, together_max=together_max, seed=seed))
    after = data.draw(st.integers(1, count))
    try:
        got = chatted(body, after, together_max=together_max, seed=seed)
    except (FailoverMismatch, FailoverRefused):
        return
    assert said_in(got) == said_in(whole(CHAT, body))


def test_chats_with_tools() -> None:
    """A chat that may call tools is the unbroken one, if its text becomes the ids that were said; otherwise it is found
    out."""
    exact = found_out = 0
    for number in range(4):
        messages = [{"role": "user", "content": f"{number}"}]
        body = body_of(CHAT, messages=messages, tools=TOOLS, stream_options={"include_usage": True})
        expected = said_in(whole(CHAT, body))
        for after in range(1, len(streamed(CHAT, body)) + 1, 2):
            try:
                got = chatted(body, after)
            except FailoverMismatch:
                found_out += 1
            else:
                assert said_in(got) == expected
                exact += 1
    assert exact > 20
    assert found_out > 5


def test_calls_pass() -> None:
    """A call that the other replica makes reaches the client as it is."""
    body = body_of(CHAT, tools=TOOLS)
    carried = recorder_of(planned(CHAT, body), lambda: json.dumps(body).encode())
    carried.take(streamed(CHAT, body)[0])
    following = json.loads(carried.next_body())
    assert following["messages"] == body["messages"]  # nothing was said: the same chat again
    assert "continue_final_message" not in following
    resumed = stitcher_of(carried)
    assert resumed.take(streamed(CHAT, following)[0]) == b""  # its role was told
    calls = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    choice = {"index": 0, "delta": {"tool_calls": calls}, "finish_reason": None, "token_ids": [7, 8]}
    event = b"data: " + json.dumps({"id": "y", "choices": [choice]}).encode() + b"\n\n"
    made = chunks_of(resumed.take(event))
    assert made[0]["choices"][0]["delta"] == {"tool_calls": calls}
    assert made[0]["id"] == "x-True-0"


def test_a_prompt_without_ids_is_found_out() -> None:
    """Another replica that does not report the ids of its prompt might have continued another text."""
    body = body_of(CHAT, tools=TOOLS)
    carried = recorder_of(planned(CHAT, body), lambda: json.dumps(body).encode())
    for event in streamed(CHAT, body)[:5]:
        carried.take(event)
    following = json.loads(carried.next_body())
    assert following["continue_final_message"] is True
    assert following["add_generation_prompt"] is False
    assert following["messages"][-1]["role"] == "assistant"
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    with pytest.raises(FailoverMismatch, match="token boundaries"):
        stitcher_of(carried).take(b"data: " + json.dumps({"id": "y", "choices": [choice]}).encode() + b"\n\n")


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        ({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}, "tool_call"),
        ({"reasoning": "hm"}, "reasoning"),
        ({"reasoning_content": "hm"}, "reasoning"),
    ],
)
def test_parsed_text(delta: dict[str, Any], reason: str) -> None:
    """A tool call, and reasoning that has not come to words, only the engine's parser can go on with."""
    body = body_of(CHAT)
    carried = StreamRecorder(planned(CHAT, body))
    events = streamed(CHAT, body)
    carried.take(events[0])
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [5]}
    carried.take(b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n")
    with pytest.raises(FailoverRefused, match=reason):
        carried.next_body()
    if reason == "reasoning":  # once the answer itself has begun it is plain text
        choice = {"index": 0, "delta": {"content": " the"}, "finish_reason": None, "token_ids": [1]}
        carried.take(b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n")
        assert json.loads(carried.next_body())["prompt"][-2:] == [5, 1]
