"""The simulated replica tells token ids as vLLM does, and goes on from them with the same answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from loadtest.fake_engine import tokens
from tests.loadtest.fake_engine.test_http import post, running
from tests.support.speaking import chunks_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """Speaks to a replica."""
    async with running() as engines, aiohttp.ClientSession(engines.urls[0]) as session:
        yield session


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    """A request for twenty tokens."""
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {"model": "sim", "max_tokens": 20, **asked, **fields}


def choice_ids(chunks: list[dict[str, Any]]) -> list[int]:
    """The ids of an answer's tokens."""
    return [id_ for chunk in chunks for choice in chunk["choices"] for id_ in choice.get("token_ids") or ()]


async def streamed(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    async with client.post(path, json=body | {"stream": True}) as response:
        return chunks_of(await response.read())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_ids_where_asked(client: aiohttp.ClientSession, path: str) -> None:
    """The prompt's ids come with the first event and each token's with its text, as far as they are asked for; a whole
    answer has the same. Unasked, their fields are null."""
    body = body_of(path, "hello you")
    chunks = await streamed(client, path, body | {"return_token_ids": True})
    first = chunks[0] if path == CHAT else chunks[0]["choices"][0]
    prompt = tokens.from_ids(first["prompt_token_ids"])
    assert prompt.startswith(b"<|user|>\nhello you" if path == CHAT else b"hello you")
    text = tokens.answer(prompt, 20)
    assert tokens.from_ids(choice_ids(chunks)).decode() == text
    whole = await post(client, path, body | {"return_token_ids": True})
    assert whole["choices"][0]["token_ids"] == choice_ids(chunks)
    assert (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"] == first["prompt_token_ids"]
    plain = await streamed(client, path, body)
    assert (plain[0] if path == CHAT else plain[0]["choices"][0])["prompt_token_ids"] is None
    assert plain[-1]["choices"][0]["token_ids"] is None
    assert choice_ids(plain) == []
    assert "token_ids" not in (await post(client, path, body))["choices"][0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("said", [0, 1, 7, 19])
async def test_goes_on(client: aiohttp.ClientSession, path: str, said: int) -> None:
    """Behind any of its tokens, a prompt of all ids so far goes on as the answer did, whatever the prompt's length."""
    for length in range(4):
        chunks = await streamed(client, path, body_of(path, "x" * length + "y", return_token_ids=True))
        prompt = (chunks[0] if path == CHAT else chunks[0]["choices"][0])["prompt_token_ids"]
        ids = choice_ids(chunks)
        following = {"model": "sim", "prompt": prompt + ids[:said], "max_tokens": 20 - said, "return_token_ids": True}
        rest = await post(client, COMPLETIONS, following)
        assert rest["choices"][0]["token_ids"] == ids[said:]
        assert rest["usage"]["prompt_tokens"] == len(prompt) + said


async def test_open_messages(client: aiohttp.ClientSession) -> None:
    """A last message that is left open is gone on with; it cannot be closed as well."""
    body = body_of(CHAT, "hello")
    text = (await post(client, CHAT, body))["choices"][0]["message"]["content"]
    body["messages"].append({"role": "assistant", "content": text[:24]})
    opened = body | {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 14}
    assert (await post(client, CHAT, opened))["choices"][0]["message"]["content"] == text[24:]
    await post(client, CHAT, opened | {"add_generation_prompt": True}, status=400)


def test_tool_calls_are_rendered_as_templates_do() -> None:
    """Neither the order of a call's fields, nor its id, nor white space in its arguments changes the prompt; other
    arguments do."""

    def prompt(call: dict[str, Any]) -> bytes:
        return tokens.render_chat([tokens.Message("assistant", "I look.", [call])], None)

    function = {"name": "read_file", "arguments": '{"path":"a.py","lines":[1,2]}'}
    one = prompt({"id": "call_1", "type": "function", "function": function})
    spaced = {"arguments": '{"path": "a.py", "lines": [1, 2]}', "name": "read_file"}
    assert prompt({"function": spaced, "type": "function", "id": "call_2"}) == one
    assert prompt({"function": spaced | {"arguments": '{"path": "b.py"}'}}) != one
    assert prompt({"function": {"name": "read_file", "arguments": "no JSON"}}) != one
