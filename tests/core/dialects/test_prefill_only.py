"""Requests for a prefill alone: what is replaced, and that the prompt stays the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.dialects import PATHS, prefill_only
from router.core.prompts.block_keys import chain_of

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = '{"b": 1.50, "a": 10000000000000000000000}'
TOOLS = {
    CHAT: f'[ {{"type":"function", "function": {{"name": "f", "parameters": {SCHEMA}}}}} ]',
    MESSAGES: f'[ {{"name":"f", "input_schema": {SCHEMA}}} ]',
}


def made(path: str, body: str) -> dict[str, Any]:
    """What is sent."""
    sent: dict[str, Any] = json.loads(prefill_only.prefill_only(path, prefill_only.fields_of(body.encode())))
    return sent


@pytest.mark.parametrize(
    ("path", "given", "sent"),
    [
        (CHAT, '"max_tokens": 900, "min_tokens": 5, "n": 3', {"max_tokens": 1}),
        (CHAT, '"max_completion_tokens": 900, "max_tokens": 3', {"max_completion_tokens": 1}),
        (CHAT, '"stream": true, "stream_options": {"include_usage": true}', {"max_tokens": 1}),
        (CHAT, '"prompt_logprobs": 1, "logprobs": true, "top_logprobs": 5, "rid": "x"', {"max_tokens": 1}),
        (CHAT, '"cache_salt": "s", "tool_choice": "none"', {"max_tokens": 1, "cache_salt": "s", "tool_choice": "none"}),
        ("/v1/completions", '"echo": true, "best_of": 4', {"max_tokens": 1}),
        (MESSAGES, '"max_tokens": 4096', {"max_tokens": 1}),
        (RESPONSES, '"max_output_tokens": 900, "background": true', {"max_output_tokens": 16, "store": False}),
        ("/generate", '"sampling_params": {"max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5}',
         {"sampling_params": {"max_new_tokens": 1, "temperature": 0.5}}),
        ("/generate", '"return_logprob": true', {"sampling_params": {"max_new_tokens": 1}}),
    ],
)  # fmt: skip
def test_little_is_answered(path: str, given: str, sent: dict[str, Any]) -> None:
    """One token, without a stream; what asks for more, or makes no sense without it, is left out."""
    assert made(path, f'{{"model": "m", {given}}}') == {"model": "m", "stream": False, **sent}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_the_prompt_is_the_same(path: str) -> None:
    """Tools, messages and template arguments have the same chain of blocks, down to how numbers are written."""
    words = "word " * 1_000
    messages = json.dumps([{"role": "user", "content": words}])
    body = '{"model": "m", "tools": %s, "chat_template_kwargs": {"x": 1}, "messages": %s, "stream": true}'
    given = (body % (TOOLS[path], messages)).encode()
    fields = prefill_only.fields_of(given)
    sent = prefill_only.prefill_only(path, fields)
    assert TOOLS[path].encode() in sent
    chains = [chain_of(PATHS[path].parse(path, each), "m") for each in (given, sent)]
    assert chains[0] == chains[1]
    assert chains[0] is not None
    assert len(chains[0].keys) > 8


def test_cuts_end_with_the_user() -> None:
    """Shortest first, with the messages that are wanted, never the whole; only of what can be read."""
    roles = ["system", "user", "assistant", "user", "assistant", "tool", "assistant", "user"]
    messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles)]
    fields = prefill_only.fields_of(json.dumps({"model": "m", "messages": messages}).encode())
    cuts = [json.loads(bytes(cut["messages"])) for cut in prefill_only.shorter(CHAT, fields, 0)]
    assert cuts == [messages[:2], messages[:4]]
    assert [json.loads(bytes(cut["messages"])) for cut in prefill_only.shorter(CHAT, fields, 3)] == [messages[:4]]
    assert prefill_only.shorter("/v1/completions", fields, 0) == []
    assert prefill_only.shorter(CHAT, prefill_only.fields_of(b'{"messages": [1, 2]}'), 0) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, "[]"), (CHAT, "{"), (CHAT, '"\\ud800'), ("/v1/embeddings", "{}"), ("/nowhere", "{}"),
        ("/generate", '{"sampling_params": [{}]}'),
    ],
)  # fmt: skip
def test_what_warms_nothing(path: str, body: str) -> None:
    """No object, a path on which nothing is generated, several prompts at once: it is said."""
    with pytest.raises(prefill_only.NotWarmable):
        made(path, body)
