"""Streams that go on on another replica: whatever was said, nothing is doubled or lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects.failover import (
    REASONS,
    AlreadyComplete,
    FailoverMismatch,
    FailoverRefused,
    StreamRecorder,
    StreamStitcher,
    plan_of,
    recorder_of,
    stitcher_of,
)
from router.core.dialects.sse import EventSplitter
from tests.core.dialects.continued import CHAT, COMPLETIONS, TOOLS, VLLM, body_of, planned, streamed
from tests.support.examples import examples
from tests.support.speaking import Piece, asked_of, chunks_of, events_of, said_in, spoken, text_of, whole


def killed(
    path: str, body: dict[str, Any], after: int, *, together_max: int = 1, seed: int = 0
) -> list[dict[str, Any]]:
    """The chunks that a client gets of a stream that is killed behind so many events, and continued."""
    carried = StreamRecorder(planned(path, body))
    events = streamed(path, body, together_max=together_max, seed=seed)
    got = b"".join([carried.take(event) for event in events[:after]])
    try:
        following = json.loads(carried.next_body())
    except AlreadyComplete as said:
        return chunks_of(got + said.events)
    assert following["prompt"][: carried.prompt_tokens] == list(asked_of(path, body).prompt)
    resumed = StreamStitcher(carried)
    for event in streamed(COMPLETIONS, following, together_max=together_max, seed=seed + 1):
        got += resumed.take(event)
    assert not resumed.broken
    assert got.endswith(b"data: [DONE]\n\n")
    assert got.count(b"[DONE]") == 1
    return chunks_of(got)


STOPS = st.sampled_from([[], "s", ["STOP"], [" cat", " the cat sat"], ["🙂"], ["é", "atat"]])


@settings(max_examples=examples(40))
@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    text=st.text(max_size=8),
    stop=STOPS,
    tokens_max=st.integers(1, 60),
    tokens_min=st.integers(0, 30),
    include=st.booleans(),
    usage=st.booleans(),
    together_max=st.integers(1, 4),
    seed=st.integers(0, 1 << 20),
    data=st.data(),
)
def test_continued_is_unbroken(
    path: str, text: str, stop: Any, tokens_max: int, tokens_min: int, include: bool, usage: bool, together_max: int,
    seed: int, data: st.DataObject,
) -> None:  # fmt: skip
    """Killed behind any event, a stream says what the unbroken one says: text, role, reason to finish and usage, under
    one name, without ids; also where characters are cut, text is held back, and events have several tokens."""
    fields: dict[str, Any] = {"max_tokens": tokens_max, "min_tokens": min(tokens_min, tokens_max), "stop": stop}
    fields |= {"include_stop_str_in_output": include, "stream_options": {"include_usage": usage}}
    body = body_of(path, **fields)
    body |= {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text or "x"}
    count = len(streamed(path, body, together_max=together_max, seed=seed))
    after = data.draw(st.integers(1, count))
    got = said_in(killed(path, body, after, together_max=together_max, seed=seed))
    expected = said_in(whole(path, body))
    assert got == expected


def moved(path: str, body: dict[str, Any], rng: random.Random, together_max: int) -> tuple[list[dict[str, Any]], int]:
    """The chunks of a stream that is moved from replica to replica behind a few events each time; how often."""
    carried = recorder_of(planned(path, body), lambda: json.dumps(body).encode())
    asked_path, asked_body, take, got, moves = path, body, carried.take, b"", 0
    least = 12 if body["stop"] else 1  # text that is held back is never said where replicas are left too soon
    while True:
        events = streamed(asked_path, asked_body, together_max=together_max, seed=moves)
        got += b"".join([take(event) for event in events[: least + rng.randint(0, 11)]])
        try:
            asked_path, asked_body = COMPLETIONS, json.loads(carried.next_body())
        except AlreadyComplete as said:
            return chunks_of(got + said.events), moves
        take, moves = stitcher_of(carried).take, moves + 1
        assert moves < 200


@pytest.mark.parametrize("stop", [[], ["STOP", " cat sat"]])
@pytest.mark.parametrize("together_max", [1, 3])
def test_moved_often(stop: list[str], together_max: int) -> None:
    """However often a stream is moved, behind a few events each time, it is the unbroken one."""
    moves = 0
    for number in range(8):
        path = (CHAT, COMPLETIONS)[number % 2]
        body = body_of(path, max_tokens=60, stop=stop, stream_options={"include_usage": True})
        body |= {"messages": [{"role": "user", "content": f"{number}"}]} if path == CHAT else {"prompt": f"{number}"}
        got, often = moved(path, body, random.Random(number), together_max)
        assert said_in(got) == said_in(whole(path, body))
        moves += often
    assert moves > (2 if stop else 20)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [[], ["STOP", " cat sat"]])
def test_every_event(path: str, stop: list[str]) -> None:
    """Killed behind each event of long answers in turn, nothing changes."""
    for number in range(3):
        body = body_of(path, max_tokens=80, stop=stop, stream_options={"include_usage": True})
        body |= {"messages": [{"role": "user", "content": f"{number}"}]} if path == CHAT else {"prompt": f"{number}"}
        expected = said_in(whole(path, body))
        for after in range(1, len(streamed(path, body)) + 1):
            assert said_in(killed(path, body, after)) == expected, after


def test_untouched_but_for_ids() -> None:
    """What passes before a break is what would have come without ids, byte for byte."""
    for path in (CHAT, COMPLETIONS):
        body = body_of(path, stream_options={"include_usage": True})
        plain = asked_of(path, body)
        expected = events_of(plain, list(spoken(plain)), chat=path == CHAT, name=f"x-{path == CHAT}-0")
        carried = StreamRecorder(planned(path, body))
        assert [carried.take(event) for event in streamed(path, body)] == expected


def test_half_a_character_is_said_anew() -> None:
    """A stream is never continued behind half a character: an engine would begin with all of the prompt's text."""
    seen = 0
    for number in range(16):
        body = body_of(COMPLETIONS, prompt=f"{number}", max_tokens=60)
        events = streamed(COMPLETIONS, body)
        for after in range(1, len(events) - 2):
            carried = StreamRecorder(planned(COMPLETIONS, body))
            for event in events[:after]:
                carried.take(event)
            if carried.can_continue:
                assert not text_of(json.loads(carried.next_body())["prompt"]).endswith("\ufffd")
                seen += carried.said_tokens < after
    assert seen > 8


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "choices"),
        ({"best_of": 3}, "choices"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "grammar"),
        ({"structured_outputs": {"choice": ["a"]}}, "grammar"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"presence_penalty": 0.5}, "penalty"),
        ({"bad_words": ["x"]}, "penalty"),
        ({"seed": 7, "temperature": 1}, "seed"),
        ({"seed": 7, "temperature": None}, "seed"),
        ({"return_token_ids": True}, "ids"),
        ({"echo": True}, "echo"),
        ({"made_up": 1}, "field"),
        ({"kv_transfer_params": {"x": 1}}, "field"),
        ({"stop": "x" * 2_000}, "stop"),
        ({"max_tokens": "many"}, "field"),
        ({"max_tokens": 9.5}, "field"),
        ({"min_tokens": [1]}, "field"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_refused(fields: dict[str, Any], reason: str) -> None:
    """What would not be the same answer is refused, with the reason that the metric has."""
    for path in (CHAT, COMPLETIONS):
        with pytest.raises(FailoverRefused) as raised:
            planned(path, body_of(path, **fields))
        assert raised.value.reason == reason
        assert reason in REASONS


def test_refused_by_place() -> None:
    """Engines that tell no ids, unknown engines, media and several prompts are refused."""
    with pytest.raises(FailoverRefused, match="engine"):
        planned(CHAT, body_of(CHAT), engines=frozenset(("sglang",)))
    with pytest.raises(FailoverRefused, match="engine"):
        planned(CHAT, body_of(CHAT), engines=frozenset(("other",)))
    with pytest.raises(FailoverRefused, match="engine"):
        planned(COMPLETIONS, body_of(COMPLETIONS), engines=frozenset(("sglang", "vllm")))
    with pytest.raises(FailoverRefused, match="media"):
        plan_of(CHAT, json.dumps(body_of(CHAT)).encode(), VLLM, media=True, context_tokens=4_096)
    with pytest.raises(FailoverRefused, match="prompts"):
        planned(COMPLETIONS, body_of(COMPLETIONS, prompt=["a", "b"]))
    with pytest.raises(FailoverRefused, match="path"):
        planned("/v1/embeddings", body_of(COMPLETIONS))
    with pytest.raises(FailoverRefused, match="no_ids"):
        planned("/v1/messages", body_of(CHAT))
    with pytest.raises(FailoverRefused, match="stop"):
        planned(COMPLETIONS, body_of(COMPLETIONS, stop="ab"), engines=frozenset(("sglang",)))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "best_of": 1, "logprobs": None, "tools": [], "bad_words": [], "response_format": {"type": "text"}},
        {"tools": TOOLS, "tool_choice": "none"},
        {"seed": 7, "temperature": 0},
        {"repetition_penalty": 1.2, "logit_bias": {"7": 1.5}, "top_k": 5, "cache_salt": "s"},
        {"made_up": None},
        {"n": "1", "best_of": 1.0, "use_beam_search": "no", "return_token_ids": "false"},
    ],
)
def test_exact(fields: dict[str, Any]) -> None:
    """What says nothing, and what the next replica heeds as well, is exact."""
    assert not planned(CHAT, body_of(CHAT, **fields)).calls_tools


def test_next_request() -> None:
    """The next request has the ids of the prompt and of what was said, and what is left of the limits; nothing of the
    messages; of the sampling fields all."""
    body = body_of(CHAT, max_tokens=30, min_tokens=20, temperature=0.5, top_p=0.9, stop=["zzz"], user="u")
    carried = StreamRecorder(planned(CHAT, body))
    for event in streamed(CHAT, body)[:9]:
        carried.take(event)
    following = json.loads(carried.next_body())
    assert following["max_tokens"] == 30 - carried.said_tokens
    assert following["min_tokens"] == 20 - carried.said_tokens
    assert following["return_token_ids"] is True
    assert "messages" not in following
    same = ("model", "stream", "temperature", "top_p", "stop", "user")
    assert {name: following[name] for name in same} == {name: body[name] for name in same}
    assert len(following["prompt"]) == carried.prompt_tokens + carried.said_tokens


@pytest.mark.finding("2026-11-28/20")
@pytest.mark.parametrize(("most", "fewest"), [("30", "20"), (30.0, 20.0), (" +3_0 ", "20.0")])
def test_limits_in_other_types(most: object, fewest: object) -> None:
    """Limits that are strings or floats go on as those of the unbroken stream, and so do flags that are words."""
    options = {"include_usage": "true", "continuous_usage_stats": "false"}
    for path in (CHAT, COMPLETIONS):
        body = body_of(path, max_tokens=30, min_tokens=20)
        plan = planned(path, body | {"max_tokens": most, "min_tokens": fewest, "stream_options": options})
        assert (plan.tokens_max, plan.tokens_min, plan.wants_usage) == (30, 20, True)
        carried = StreamRecorder(plan)
        for event in streamed(path, body)[:9]:
            carried.take(event)
        following = json.loads(carried.next_body())
        left = (30 - carried.said_tokens, 20 - carried.said_tokens)
        assert (following["max_tokens"], following["min_tokens"]) == left
        for include, held in (("false", (3, 0)), ("yes", (0, 3))):
            stops = body_of(path, stop=["STOP"], include_stop_str_in_output=include)
            plan = planned(path, stops)
            assert (plan.held_chars, plan.open_chars) == held


def test_without_limit() -> None:
    """A chat without a limit has what the model has room for; a completion has sixteen tokens, as one with null has, so
    that no limit is ever left out."""
    for path in (CHAT, COMPLETIONS):
        for most in ({}, {"max_tokens": None}):
            body = body_of(path)
            del body["max_tokens"]
            body |= most
            carried = StreamRecorder(planned(path, body, context_tokens=500))
            for event in streamed(path, body)[:4]:
                carried.take(event)
            following = json.loads(carried.next_body())
            limit = 16 if path == COMPLETIONS else 500 - carried.prompt_tokens
            assert following["max_tokens"] == limit - carried.said_tokens


def test_ids_that_do_not_come() -> None:
    """Text without ids, and a stream without the prompt's, are not continued."""
    for text, prompt in (("x", False), ("x", True)):
        carried = StreamRecorder(planned(CHAT, body_of(CHAT)))
        head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        first = head | {"choices": [], "prompt_token_ids": [1, 2] if prompt else None}
        for chunk in (first, head | {"choices": [{"index": 0, "delta": {"content": text}}]}):
            carried.take(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        with pytest.raises(FailoverRefused, match="no_ids"):
            carried.next_body()


def test_another_answer() -> None:
    """A replica that does not say again what was said, ends before that, or counts another prompt, is found out."""
    body = body_of(COMPLETIONS)
    asked = asked_of(COMPLETIONS, body | {"return_token_ids": True})
    pieces = [Piece([1, 2], " the cat")]
    first = events_of(asked, pieces, chat=False, name="x")[0]
    for second in ([Piece([4], "at")], [Piece([1], " the", "stop")]):
        carried = StreamRecorder(planned(COMPLETIONS, body))
        carried.take(first)
        following = json.loads(carried.next_body())
        assert following["prompt"] == list(asked.prompt)  # the one event had two tokens
        resumed = StreamStitcher(carried)
        with pytest.raises(FailoverMismatch):
            resumed.take(events_of(asked_of(COMPLETIONS, following), second, chat=False, name="y")[0])
    carried = StreamRecorder(planned(COMPLETIONS, body))
    carried.take(first)
    carried.next_body()
    other = asked_of(COMPLETIONS, body | {"prompt": "longer", "return_token_ids": True})
    with pytest.raises(FailoverMismatch):
        StreamStitcher(carried).take(events_of(other, pieces, chat=False, name="y")[0])


def test_errors_are_kept() -> None:
    """An error event, an answer that is given up, and an early [DONE] do not reach the client: the stream counts as
    broken there, and so does that of the replica that goes on."""
    body = body_of(CHAT)
    events = streamed(CHAT, body)
    given_up = events[5].replace(b'"finish_reason":null', b'"finish_reason":"abort"')
    assert given_up != events[5]
    for last in (b'data: {"error": {"message": "dead", "code": 500}}\n\n', b"data: [DONE]\n\n", given_up):
        carried = StreamRecorder(planned(CHAT, body))
        for event in events[:5]:
            assert carried.take(event)
        assert carried.take(last) == b""
        assert carried.broken
        carried.next_body()
        resumed = StreamStitcher(carried)
        assert resumed.take(last) == b""
        assert resumed.broken


def test_events_in_pieces() -> None:
    """However the bytes of the stream are cut, the same comes out of it."""
    body = body_of(CHAT, stream_options={"include_usage": True})
    stream = b"".join(streamed(CHAT, body))
    expected = b"".join(map(StreamRecorder(planned(CHAT, body)).take, streamed(CHAT, body)))
    rng = random.Random(3)
    for _ in range(20):
        carried, splitter, got, at = StreamRecorder(planned(CHAT, body)), EventSplitter(), b"", 0
        while at < len(stream):
            size = rng.randint(1, 90)
            got += b"".join([carried.take(event) for event in splitter.feed(stream[at : at + size])])
            at += size
        assert got == expected


def test_sglang() -> None:
    """SGLang's ids are taken out with their fields: without a wish for ids it has none."""
    body = body_of(COMPLETIONS)
    carried = StreamRecorder(planned(COMPLETIONS, body, engines=frozenset(("sglang",))))
    choice = {"index": 0, "text": " the", "logprobs": None, "finish_reason": None, "matched_stop": None}
    head = {"id": "x", "object": "text_completion", "created": 1, "model": "m"}

    def event(**ids: Any) -> bytes:
        return b"data: " + json.dumps(head | {"choices": [choice | ids]}, separators=(",", ":")).encode() + b"\n\n"

    assert carried.take(event(token_ids=[1], prompt_token_ids=[4, 5])) == event()
    assert carried.take(event(token_ids=[1])) == event()
    assert json.loads(carried.next_body())["prompt"] == [4, 5, 1, 1]
