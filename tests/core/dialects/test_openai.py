from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.dialects.openai import OpenAI
from router.core.prompts.block_keys import chain_of
from router.core.prompts.canonical import OPAQUE_REPEATS
from router.core.prompts.json_fields import InvalidBody
from router.core.types.requests import Prompt, RequestSpec
from tests.support.examples import examples

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
OPENAI = OpenAI()
SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "Where is Ulm?"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"b": 1, "a": 2}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Ulm"}'}}


def parse(path: str = CHAT, **fields: Any) -> RequestSpec:
    """A body with these fields, read."""
    return OPENAI.parse(path, json.dumps({"model": "m", **fields}).encode())


def chat(*messages: dict[str, Any], **fields: Any) -> Prompt:
    """The prompt of a conversation."""
    prompt = parse(messages=list(messages), **fields).prompt
    assert prompt is not None
    return prompt


def image(url: str, **more: str) -> dict[str, Any]:
    """A user message of a text and a picture."""
    given: Any = {"url": url, **more} if more else url
    return {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": given}]}


TEXT = st.text("aé\u4e2d\x1e \n", max_size=6)
MESSAGES = st.lists(
    st.one_of(
        st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXT),
        st.builds(lambda text: {"role": "tool", "tool_call_id": "c1", "content": text}, TEXT),
        st.builds(lambda text: {"role": "user", "content": [{"type": "text", "text": text}]}, TEXT),
        st.just({"role": "assistant", "content": None, "tool_calls": [CALL]}),
        st.just(image("https://x/y.png")),
    ),
    min_size=1,
    max_size=6,
)


@given(messages=MESSAGES, more=MESSAGES, tools=st.booleans())
@example(
    messages=[{"role": "user", "content": "a"}],
    more=[{"role": "user", "content": [{"type": "text", "text": "b"}]}],
    tools=False,
)
@settings(deadline=None, max_examples=examples(60))
def test_the_next_turn_extends_the_bytes_of_this_one(
    messages: list[dict[str, Any]], more: list[dict[str, Any]], tools: bool
) -> None:
    """Turn n+1 starts with all bytes of turn n, its spans with turn n's, and each span is an assistant message."""
    extra = {"tools": TOOLS} if tools else {}
    now, later = chat(*messages, **extra), chat(*messages, *more, **extra)
    assert later.text.startswith(now.text)
    assert later.assistant_spans[: len(now.assistant_spans)] == now.assistant_spans
    assert all(now.text[start : start + 11] == b"\x1eassistant\x1f" for start, _ in now.assistant_spans[:1])
    assert len(later.assistant_spans) == sum(m["role"] == "assistant" for m in [*messages, *more])
    if any(m["role"] == "user" for m in messages):
        assert later.first_user_end == now.first_user_end <= len(now.text)
    assert later.opaque_bytes >= now.opaque_bytes


DIFFERENT: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([SYSTEM, USER], {}),
    "another role": ([{**SYSTEM, "role": "developer"}, USER], {}),
    "another text": ([SYSTEM, {**USER, "content": "Where is Bonn?"}], {}),
    "no system": ([USER], {}),
    "a name": ([SYSTEM, {**USER, "name": "ann"}], {}),
    "tools": ([SYSTEM, USER], {"tools": TOOLS}),
    "tools in another order of keys": (
        [SYSTEM, USER],
        {"tools": [{"type": "function", "function": {"parameters": {"a": 2, "b": 1}, "name": "look"}}]},
    ),
    "functions": ([SYSTEM, USER], {"functions": TOOLS}),
    "documents": ([SYSTEM, USER], {"documents": [{"text": "x"}]}),
    "template": ([SYSTEM, USER], {"chat_template": "{{ messages }}"}),
    "template arguments": ([SYSTEM, USER], {"chat_template_kwargs": {"date": "today"}}),
    "another template argument": ([SYSTEM, USER], {"chat_template_kwargs": {"date": "tomorrow"}}),
    "effort": ([SYSTEM, USER], {"reasoning_effort": "low"}),
    "tool calls": ([SYSTEM, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], {}),
    "another call": (
        [SYSTEM, USER, {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": {"name": "go"}}]}],
        {},
    ),
    "an answer": ([SYSTEM, USER, {"role": "assistant", "content": "Swabia"}], {}),
    "an answer with reasoning": ([SYSTEM, USER, {"role": "assistant", "content": "Swabia", "reasoning": "hm"}], {}),
    "image": ([image("https://x/1.png")], {}),
    "another image": ([image("https://x/2.png")], {}),
    "an image looked at closely": ([image("https://x/1.png", detail="high")], {}),
    "an image processed otherwise": ([image("https://x/1.png")], {"mm_processor_kwargs": {"max_pixels": 9}}),
    "image data": ([image("data:image/png;base64,AAAA")], {}),
    "salt": ([SYSTEM, USER], {"cache_salt": "s"}),
    "another salt": ([SYSTEM, USER], {"cache_salt": "t"}),
    "model": ([SYSTEM, USER], {"model": "lora"}),
}


def end_keys(path: str, fields: dict[str, Any]) -> int:
    """The key that names the whole prompt under its identity."""
    ask = parse(path, **fields)
    chain = chain_of(ask, ask.model or "")
    assert chain is not None
    return chain.end_key


def test_what_the_engine_caches_apart_is_apart() -> None:
    """Roles, texts, tools, template arguments, calls, images, salts and models each make another chain."""
    keys = {name: end_keys(CHAT, {"messages": m, **fields}) for name, (m, fields) in DIFFERENT.items()}
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.3, "top_p": 0.9, "seed": 7, "n": 2, "stop": ["x"], "logprobs": True},
        {"max_tokens": 9, "max_completion_tokens": 7, "stream": True, "stream_options": {"include_usage": True}},
        {
            "user": "u",
            "metadata": {"a": 1},
            "prompt_cache_key": "k",
            "store": True,
            "response_format": {"type": "text"},
        },
        {"tools": None, "chat_template_kwargs": None, "unknown": [[]]},
        {"messages": [{**SYSTEM, "name": None, "tool_calls": None, "refusal": None}, USER]},
        {"messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}]},
        {"messages": [SYSTEM, {"role": "user", "content": [USER["content"]]}]},
    ],
)
def test_what_the_template_does_not_see_changes_nothing(fields: dict[str, Any]) -> None:
    """Generation parameters, nulls, and the way a text is wrapped leave the chain as it is."""
    assert end_keys(CHAT, {"messages": [SYSTEM, USER], **fields}) == end_keys(CHAT, {"messages": [SYSTEM, USER]})


def test_json_that_means_the_same_is_the_same() -> None:
    """White space, escapes and the order of the body's fields change nothing."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Zürich \u4e2d / ok"}], "tools": TOOLS}
    forms = [
        json.dumps(body),
        json.dumps(body, ensure_ascii=False, indent=3),
        json.dumps(dict(reversed(body.items())), separators=(",", ":")),
        json.dumps(body).replace("/", "\\/").replace("o", "\\u006f"),
    ]
    first, *others = [OPENAI.parse(CHAT, form.encode()).prompt for form in forms]
    assert first is not None
    assert all(other == first for other in others)


def test_an_image_weighs_what_images_weigh() -> None:
    """A picture stands as a fixed number of opaque bytes, whatever its URL's length; text around it is text."""
    short, long = chat(image("https://x/1.png")), chat(image("data:image/png;base64," + "A" * 9_000))
    assert short.opaque_bytes == long.opaque_bytes == 16 * OPAQUE_REPEATS
    assert len(short.text) == len(long.text)
    assert b"See\n" in short.text


def test_completions_prompts() -> None:
    """Strings, token ids and lists of either; ids carry their own bytes per token and never meet text."""
    assert parse(COMPLETIONS, prompt="abc").prompt == Prompt(b"abc", 3)
    assert parse(COMPLETIONS, prompt=["abc", "de"]).prompt == Prompt(b"abc\x1ede", 3)
    ids = parse(COMPLETIONS, prompt=[1, 2, 70_000]).prompt
    assert ids is not None
    assert (len(ids.text), ids.bytes_per_token, ids.opaque_bytes) == (12, 4, 0)
    assert parse(COMPLETIONS, prompt=[[1, 2], [70_000]]).prompt == ids
    assert end_keys(COMPLETIONS, {"prompt": [0x61616161]}) != end_keys(COMPLETIONS, {"prompt": "aaaa"})
    assert parse(EMBEDDINGS, input=["abc"], prompt="x").prompt == Prompt(b"abc", 3)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"prompt": [-1]}),
        (COMPLETIONS, {"prompt": [2**40]}),
        (COMPLETIONS, {"prompt": [1.5]}),
        (COMPLETIONS, {"prompt": {"a": 1}}),
        (EMBEDDINGS, {"prompt": "only input counts"}),
        (CHAT, {"messages": "hello"}),
        (CHAT, {"messages": [{"role": 3}]}),
        (CHAT, {"messages": [{"role": "user", "content": {"a": 1}}]}),
        (CHAT, {"messages": [{"role": "user", "content": [3]}]}),
    ],
)
def test_a_prompt_that_is_not_understood_is_unknown(path: str, fields: dict[str, Any]) -> None:
    """The engine judges its own input: placement goes on without a prompt, the request is not refused."""
    ask = parse(path, **fields)
    assert (ask.model, ask.prompt) == ("m", None)
    assert chain_of(ask, "m") is None


def test_what_placement_needs_to_know() -> None:
    """Model, stream, salt, session, output length, response id and usage are read; wrong types are as absent."""
    ask = parse(
        model="lora",
        stream=True,
        stream_options={"include_usage": True},
        cache_salt="s",
        prompt_cache_key="k",
        max_tokens=9,
        max_completion_tokens=7,
        store=True,
        previous_response_id="resp_1",
    )
    expected = RequestSpec(
        "lora", None, True, b"s", "k", 7, True, "resp_1", True, stream_options={"include_usage": True}
    )
    assert ask == expected
    wrong = parse(stream="maybe", stream_options=[1], cache_salt=3, prompt_cache_key={}, max_tokens=-5, store="x")
    assert wrong == RequestSpec("m")
    assert OPENAI.parse(CHAT, b"{}") == OPENAI.parse(CHAT, b'{"model":null}') == RequestSpec(None)


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"x"', "invalid_json"),
        (b'{"model":"m"', "invalid_json"),
        (b"\xff\xfe{}", "invalid_json"),
        (b'{"model":"m","x":' + DEEP + b"}", "invalid_json"),
        (b'{"model":3}', "invalid_model"),
        (b'{"model":"\xff"}', "invalid_model"),
    ],
)
def test_what_no_engine_could_take_is_refused(body: bytes, code: str) -> None:
    """Not JSON, no object, nested without end, or a model that is no string: InvalidBody with a stable code."""
    with pytest.raises(InvalidBody) as caught:
        OPENAI.parse(CHAT, body)
    assert caught.value.code == code
