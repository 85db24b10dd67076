"""What is read of a request, by dialect."""

import json
from typing import Any, cast

import pytest

from router.core.dialects import PATHS
from router.core.keys import TokenPrompt
from router.placing import Placer, TokenView
from router.reading import Reader
from router.receiving import Connection, Request
from router.tokens import Tokens

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

    def resolve(self, model: str) -> str:
        """As it is called."""
        return model

    def follows(self) -> bool:
        """They are."""
        return True

    def token_view(self, _: str) -> TokenView:
        """Of any model."""
        return TokenView("m", "vllm", "http://a", "", (16,))


class Asked:
    """Turns every prompt into the same tokens, and notes of which path it was."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def of(self, _: object, path: str, *__: object) -> TokenPrompt:
        """Three tokens."""
        self.paths.append(path)
        return TokenPrompt(b"\0" * 12, "", b"")


@pytest.mark.parametrize("offload_bytes_min", [0, 1 << 20])
@pytest.mark.parametrize("path", PATHS)
async def test_every_dialect_becomes_tokens(path: str, offload_bytes_min: int) -> None:
    """Where events are followed, a prompt of any dialect is wanted as token ids, short or long."""
    tokens = Asked()
    reader = Reader(
        cast("Placer", Following()), cast("Tokens", tokens), offload_bytes_min=offload_bytes_min, ask_usage=False
    )
    request, body = Request(cast("Connection", None)), json.dumps({"model": "m", **BODIES[path]}).encode()
    request.method, request.target, request.path = "POST", path, path
    request.bring([body], len(body))
    try:
        question = await reader.understand(request, "id")
    finally:
        reader.close()
    assert tokens.paths == [path]
    assert question.wanted.tokens is not None
    assert question.wanted.ask.decoded is None
