"""Requests as chat templates and tokenizers get them: the same conversation through every API, and what is unknown."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from router.core import dialects
from router.core.prompts.engine_messages import Traits, for_sglang, for_vllm
from router.core.prompts.template_chat import UnsupportedForTemplate
from router.core.types.requests import TemplateInput
from tests.real import token_requests
from tests.real.token_requests import CHAT, COMPLETIONS, MESSAGES, RESPONSES

PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, "/generate", "/v1/embeddings")
USER = {"role": "user", "content": "x"}
CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}


def read(path: str, body: object) -> TemplateInput | None:
    """As the proxy reads it."""
    return dialects.dialect_of(path).template_input(path, msgspec.json.encode(body))


def chat(*messages: dict[str, Any], **more: Any) -> TemplateInput:
    """A chat that must be known."""
    found = read(CHAT, {"messages": list(messages), **more})
    assert found is not None
    return found


@pytest.mark.parametrize("request_", token_requests.ALL, ids=lambda request_: f"{request_[1]} {request_[0]}")
def test_text_is_always_known(request_: token_requests.Request) -> None:
    """Whatever is text, in whatever form, has a way to tokens, and exactly one."""
    _, path, body = request_
    found = read(path, {"model": "m", **body})
    assert found is not None
    assert [found.messages, found.text, found.ids].count(None) == 2
    if found.messages is not None:
        assert for_vllm(found, Traits(), {}).messages


UNKNOWN = [
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "uuid": "u"}]}]}),
    (CHAT, {"messages": [USER], "chat_template": "x"}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}),
    (CHAT, {"messages": [USER], "truncate_prompt_tokens": 5}),
    (CHAT, {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [1]}}),
    (CHAT, {"messages": [USER], "functions": [{"name": "f"}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}]}),
    (CHAT, {"messages": "x"}),
    (CHAT, {"messages": [{"content": "x"}]}),
    (CHAT, []),
    (COMPLETIONS, {"prompt": ["a", "b"]}),
    (COMPLETIONS, {"prompt": [[1], [2]]}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": [1 << 32]}),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}),
    (COMPLETIONS, {}),
    ("/v1/embeddings", {"input": "x"}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
    (MESSAGES, {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}),
    (RESPONSES, {"input": "x", "previous_response_id": "r"}),
    (RESPONSES, {"input": "x", "truncation": "auto"}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}),
    (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "e", "summary": []}]}),
    (RESPONSES, {"input": [{"type": "computer_call"}]}),
]


@pytest.mark.parametrize(("path", "body"), UNKNOWN)
def test_what_the_engine_expands_by_itself_is_unknown(path: str, body: object) -> None:
    """Images, kept answers, cut prompts and the like are None: such a request is placed by estimate."""
    assert read(path, body) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("type", "text", "x")), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a body something stands."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, each in inner for place in places(each, (*at, key)))]


def replaced(value: Any, at: tuple[Any, ...], by: object) -> Any:
    """The body with something else there."""
    if not at:
        return by
    copy = value.copy()
    copy[at[0]] = replaced(value[at[0]], at[1:], by)
    return copy


@for_all(st.sampled_from(token_requests.ALL), st.data(), JSON)
def test_no_body_is_an_exception(request_: token_requests.Request, data: st.DataObject, by: object) -> None:
    """Whatever stands in a body in place of what should, reading and fitting it ends in a prompt, in None or
    UnsupportedForTemplate."""
    _, path, body = request_
    found = read(path, replaced(body, data.draw(st.sampled_from(places(body))), by))
    if found is None or found.messages is None:
        return
    for fit in (for_vllm, for_sglang):
        for parts in (False, True):
            with contextlib.suppress(UnsupportedForTemplate):
                fit(found, Traits(parts=parts, system_first=True), {})


@for_all(st.sampled_from(PATHS), st.binary(max_size=40))
def test_no_bytes_are_an_exception(path: str, body: bytes) -> None:
    """Not even what is no JSON."""
    if path != "/generate":  # whose parse has refused such a body before
        assert dialects.dialect_of(path).template_input(path, body) is None or body


def test_one_conversation_through_three_apis_is_rendered_alike() -> None:
    """Chat completions, Messages and Responses of the same agent's turn hand the template the same messages."""
    through_chat = chat(
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "21"},
    )
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"b": 1, "a": 2}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    through_messages = read(
        MESSAGES,
        {
            "system": "s",
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "ok"}, use]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "21"}]},
            ],
        },
    )
    through_responses = read(
        RESPONSES,
        {
            "instructions": "s",
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"role": "assistant", "content": "ok"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"b": 1, "a": 2}'},
                {"type": "function_call_output", "call_id": "c", "output": "21"},
            ],
        },
    )
    assert through_messages is not None
    assert through_responses is not None
    wanted = for_vllm(through_chat, Traits(), {}).messages
    assert for_vllm(through_messages, Traits(), {}).messages == wanted
    assert for_vllm(through_responses, Traits(), {}).messages == wanted
    assert wanted[2]["tool_calls"][0]["function"]["arguments"] == {"b": 1, "a": 2}


def test_calls_are_in_the_order_of_the_engines_types() -> None:
    """A template that prints a call shows `id, function, type` and `arguments, name`, as vLLM validates them; through
    Responses, which it does not validate, `name, arguments`."""
    made = chat({"role": "assistant", "tool_calls": [CALL]}).messages
    assert made is not None
    assert list(made[0]["tool_calls"][0]) == ["id", "function", "type"]
    assert list(made[0]["tool_calls"][0]["function"]) == ["arguments", "name"]
    through = read(RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]})
    assert through is not None
    assert through.messages is not None
    assert list(through.messages[0]["tool_calls"][0]["function"]) == ["name", "arguments"]


def test_parts_are_joined_or_kept_by_the_templates_trait() -> None:
    """Where a template takes a string, parts are joined by line ends and empty ones dropped; else all stay."""
    given = chat({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}, "", "b"]})
    assert for_vllm(given, Traits(), {}).messages == [{"role": "user", "content": "a\nb"}]
    assert for_vllm(given, Traits(parts=True), {}).messages[0]["content"] == [
        {"type": "text", "text": "a", "cache_control": {}},
        {"type": "text", "text": ""},
        {"type": "text", "text": "b"},
    ]


def test_developers_are_systems_at_the_head_where_the_template_does_not_know_them() -> None:
    """A developer's message becomes the system's, merged with others into the first."""
    given = chat({"role": "system", "content": "a"}, USER, {"role": "developer", "content": "b"})
    assert for_vllm(given, Traits(), {}).messages == [{"role": "system", "content": "a\n\nb"}, USER]
    assert [message["role"] for message in for_vllm(given, Traits(developer=True), {}).messages][2] == "developer"


def test_system_messages_of_the_messages_api_are_merged_where_the_template_wants_it() -> None:
    """Only there, and only for that API."""
    given = read(MESSAGES, {"system": "a", "messages": [USER, {"role": "system", "content": "b"}, USER]})
    assert given is not None
    merged = for_vllm(given, Traits(system_first=True), {}).messages
    assert merged == [{"role": "system", "content": "ab"}, USER, USER]
    assert len(for_vllm(given, Traits(), {}).messages) == 4
    assert len(for_vllm(chat({"role": "system", "content": "a"}, USER), Traits(system_first=True), {}).messages) == 2


def test_kwargs_of_request_and_server() -> None:
    """A request's kwargs win over the server's, null ones do not, and an effort switches thinking."""
    given = chat(USER, chat_template_kwargs={"a": 1, "b": None}, reasoning_effort="none")
    kwargs = for_vllm(given, Traits(), {"a": 0, "b": 2}).kwargs
    assert kwargs == {"a": 1, "b": 2, "reasoning_effort": "none", "enable_thinking": False}
    assert for_sglang(given, Traits(), {}).kwargs["thinking"] is False


def test_tools_as_each_engine_shows_them() -> None:
    """vLLM shows three fields of each, null or not; SGLang what was sent, and none that may not be called."""
    tools = [{"type": "function", "function": {"parameters": {}, "name": "f"}}]
    given = chat(USER, tools=tools)
    shown = {"type": "function", "function": {"name": "f", "description": None, "parameters": {}}}
    assert for_vllm(given, Traits(), {}).tools == [shown]
    sglang = for_sglang(given, Traits(), {}).tools
    assert sglang is not None
    assert list(sglang[0]["function"]) == ["parameters", "name", "description"]
    assert for_sglang(chat(USER, tools=tools, tool_choice="none"), Traits(), {}).tools is None
    assert for_vllm(chat(USER, tools=tools, tool_choice="none"), Traits(), {}).tools == [shown]


def test_sglang_takes_a_last_assistant_for_the_user() -> None:
    """Unless its message is to be continued: then it is put behind the rendered text."""
    said = {"role": "assistant", "content": "I am"}
    assert for_sglang(chat(USER, said), Traits(), {}).messages[-1] == {"role": "user", "content": "I am"}
    continued = for_sglang(chat(USER, said, continue_final_message=True), Traits(), {})
    assert (continued.messages, continued.suffix) == ([USER], "I am")


def test_fitting_changes_nothing_of_what_was_read() -> None:
    """The same input can be fitted for several engines."""
    for _, path, body in token_requests.ALL:
        given, again = read(path, body), read(path, body)
        if given is not None and given.messages is not None:
            for_vllm(given, Traits(parts=True, system_first=True), {})
            for_vllm(given, Traits(), {})
            assert given == again
