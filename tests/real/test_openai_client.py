"""The official openai client works through the router against real vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletionToolParam

from tests.real.router_process import Router
from tests.real.vllm_server import CONTEXT_TOKENS_MAX, MODEL, STREAM_TOKENS

TIMEOUT_S = 60.0
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
async def openai_client(router: Router) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client as its users make it, but for its retries: every failure is to be seen."""
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as made:
        yield made


async def test_chat(openai_client: openai.AsyncOpenAI) -> None:
    """A chat answer comes with its usage, cached tokens included."""
    answer = await openai_client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say something."}], max_tokens=8
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    assert answer.usage.prompt_tokens_details is not None


async def test_streaming(openai_client: openai.AsyncOpenAI) -> None:
    """A stream comes chunk by chunk, ends with its reason, and with usage because it was asked for."""
    stream = await openai_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say something longer."}],
        max_tokens=STREAM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert len(chunks) > 10
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == STREAM_TOKENS


async def test_streaming_without_usage(openai_client: openai.AsyncOpenAI) -> None:
    """A client that did not ask for usage is not given any."""
    stream = await openai_client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Go on."}], max_tokens=8, stream=True
    )
    assert all(chunk.usage is None and chunk.choices for chunk in [chunk async for chunk in stream])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_tools(openai_client: openai.AsyncOpenAI, stream: bool) -> None:
    """A request with tools, and one with a tool's result in its history, are answered."""
    for messages in (
        [{"role": "user", "content": "What is the weather in Paris?"}],
        [
            {"role": "user", "content": "What is the weather in Paris?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
    ):
        answer = await openai_client.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            tools=[WEATHER],
            max_tokens=16,
            stream=stream,
            temperature=0.0,
        )
        if isinstance(answer, openai.AsyncStream):
            assert [chunk async for chunk in answer]
        else:
            assert answer.choices[0].finish_reason


async def test_embeddings_error(openai_client: openai.AsyncOpenAI) -> None:
    """What the engine refuses arrives as the client's own error type with the engine's status."""
    with pytest.raises(openai.APIStatusError) as refused:
        await openai_client.embeddings.create(model=MODEL, input="no embeddings from a generating model")
    assert refused.value.status_code == 404


async def test_engine_refusal(openai_client: openai.AsyncOpenAI) -> None:
    """A request the engine finds invalid is a 400 with the engine's message, not a retry and not a 502."""
    with pytest.raises(openai.BadRequestError) as refused:
        await openai_client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Too much."}],
            max_tokens=CONTEXT_TOKENS_MAX * 2,
            stream=True,
        )
    assert str(CONTEXT_TOKENS_MAX) in str(refused.value)


async def test_unknown_model(openai_client: openai.AsyncOpenAI) -> None:
    """A model that no replica serves is a 404 that names those there are."""
    with pytest.raises(openai.NotFoundError) as refused:
        await openai_client.chat.completions.create(model="tiniest", messages=[{"role": "user", "content": "?"}])
    assert MODEL in str(refused.value)


async def test_models(openai_client: openai.AsyncOpenAI) -> None:
    """The two replicas' models are listed once."""
    assert [model.id async for model in openai_client.models.list()] == [MODEL]


@pytest.mark.parametrize(
    "prompt", ["def main():", [5, 6, 7, 8], ["one", "another"]], ids=["string", "token ids", "strings"]
)
async def test_completions(openai_client: openai.AsyncOpenAI, prompt: str | list[int] | list[str]) -> None:
    """Plain completions take each of the protocol's shapes of a prompt."""
    answer = await openai_client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert len(answer.choices) == (2 if prompt == ["one", "another"] else 1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8 * len(answer.choices)
