"""What is read of a request, by dialect."""

import json
from typing import Any, cast

import pytest

from router.config.schema import LimitSettings
from router.core.dialects import PATHS
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.token_keys import TokenPrompt
from router.http.request import Connection, Request
from router.ingress.parser import RequestParser
from router.placement_api import PlacementService, TokenizationSpec
from router.tokenization.request_tokens import RequestTokenizer

CHAT = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": "Hello"},
    "/generate": {"text": "Hello"},
}


class Following:
    """Places nothing; some replica's events are followed."""

    def resolve(self, model: str | None) -> str:
        """As it is called; `m` where no name is given."""
        return model or "m"

    def __init__(self, engine: str = "vllm") -> None:
        self.engine = engine

    def engines(self, _: str) -> tuple[str, ...]:
        """All of one kind."""
        return (self.engine,)

    def cache_identity(self, model: str) -> str:
        """`n` is another name of `m`."""
        return "m" if model == "n" else model

    def wants_token_ids(self) -> bool:
        """They are."""
        return True

    def tokenization_spec(self, _: str) -> TokenizationSpec:
        """Of any model."""
        return TokenizationSpec("m", "vllm", "http://a", "", (16,))


class Asked:
    """Turns every prompt into the same tokens, and notes of which path it was."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def tokenize_request(self, _: object, path: str, *__: object) -> TokenPrompt:
        """Three tokens."""
        self.paths.append(path)
        return TokenPrompt(b"\0" * 12, "", b"")


@pytest.mark.parametrize("offload_bytes_min", [0, 1 << 20])
@pytest.mark.parametrize("path", PATHS)
async def test_every_dialect_becomes_tokens(path: str, offload_bytes_min: int) -> None:
    """Where events are followed, a prompt of any dialect is wanted as token ids, short or long."""
    tokens = Asked()
    wanted = await understood(path, offload_bytes_min, Following(), tokens, model="m", **BODIES[path])
    assert tokens.paths == [path]
    assert wanted.tokens is not None
    assert wanted.ask.decoded is None


async def understood(
    path: str, offload_bytes_min: int, placer: Following, tokens: Asked | None = None, **fields: object
) -> PlacementRequest:
    """What is read of a request with these fields, on the event loop or beside it."""
    reader = RequestParser(
        cast("PlacementService", placer),
        cast("RequestTokenizer", tokens),
        LimitSettings(offload_bytes_min=offload_bytes_min),
    )
    request, body = Request(cast("Connection", None)), json.dumps(fields).encode()
    request.method, request.target, request.path = "POST", path, path
    request.replace_body([body], len(body))
    try:
        return (await reader.parse(request, "id")).wanted
    finally:
        reader.close()


@pytest.mark.parametrize("offload_bytes_min", [0, 1 << 20])
async def test_another_name_of_a_model_is_the_same_prompt(offload_bytes_min: int) -> None:
    """Engines share the cache, so keys and place are the same; the request goes to who serves the name."""
    one, other = [
        await understood("/v1/chat/completions", offload_bytes_min, Following(), model=model, messages=CHAT)
        for model in "mn"
    ]
    assert (one.chain, one.ring_key) == (other.chain, other.ring_key)
    assert (one.model, other.model) == ("m", "n")


TOOLS = [{"type": "function", "function": {"name": name, "description": "x" * 600}} for name in ("look", "go")]


@pytest.mark.parametrize("offload_bytes_min", [0, 1 << 20])
async def test_tools_that_may_not_be_called_are_left_out_by_who_leaves_them_out(offload_bytes_min: int) -> None:
    """SGLang shows a model only the tools that `tool_choice` allows, vLLM shows it all: the keys are of what it
    sees."""

    async def keys(engine: str, tools: list[Any], **more: object) -> object:
        said = {"model": "m", "messages": CHAT, "tools": tools, **more}
        wanted = await understood("/v1/chat/completions", offload_bytes_min, Following(engine), **said)
        assert wanted.ask.prompt is not None
        return wanted.chain, wanted.ring_key, wanted.ask.prompt.size

    named = {"type": "function", "function": {"name": "go"}}
    for choice, left in (("none", []), (named, TOOLS[1:]), ("required", TOOLS), ("auto", TOOLS)):
        assert await keys("sglang", TOOLS, tool_choice=choice) == await keys("sglang", left)
        assert await keys("vllm", TOOLS, tool_choice=choice) == await keys("vllm", TOOLS)
