"""One conversation through three APIs is one chain: what chat left in the cache, Messages and Responses find there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from tests.real.talk import Conversation, prose
from tests.real.test_conversations import block_and_tail_tokens
from tests.real.vllm_server import BLOCK_TOKENS, MODEL

SYSTEM = prose("dialects system", 150)


async def test_a_conversation_goes_on_through_other_apis(
    client: httpx.AsyncClient, allowed: list[int], figures: Callable[[str], None]
) -> None:
    """Two turns of chat, then one of Messages and one of Responses: same replica, foretold to a block and the tail."""
    talk = Conversation("dialects", allowed, messages=[{"role": "system", "content": SYSTEM}])
    for _ in range(2):
        answer = await talk.turn(client)
        assert not answer.failure, answer.failure
    said = [*talk.messages[1:], {"role": "user", "content": prose("dialects more", 180)}]
    blocks = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    messages = {"model": MODEL, "max_tokens": 8, "system": blocks, "messages": said}
    responses = {"model": MODEL, "max_output_tokens": 8, "instructions": SYSTEM, "input": said, "store": False}
    for path, body in (("/v1/messages", messages), ("/v1/responses", responses)):
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        prompt_tokens, cached_tokens = counts(reply.json()["usage"])
        predicted = int(reply.headers["x-warmroute-predicted-cached-tokens"])
        reason = reply.headers["x-warmroute-reason"]
        figures(f"chat then {path}: prompt {prompt_tokens}, cached {cached_tokens}, predicted {predicted}; {reason}")
        assert reply.headers["x-warmroute-replica"] == answer.replica
        assert predicted > 0
        assert cached_tokens >= answer.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        answer.prompt_tokens = prompt_tokens
        assert abs(predicted - cached_tokens) < block_and_tail_tokens(talk, answer)


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens, and how many of them were cached."""
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0), cached
