"""Talk to a chat server as clients do, and keep what each answer said about caching and placement.

Theory: prompts are made of common words in an order drawn from a name, so that no two conversations share a
block and every run sends the same bytes. Answers are restricted to tokens that are whole words (vLLM's
`allowed_token_ids`): the model's weights are random, and only such an answer encodes, as part of the next
prompt, to the very tokens that were generated. Then what the engine found cached can be held against what
the router foretold.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.real.vllm_server import MODEL

ROUTER_BLOCK_BYTES = 512
COMMON = """
the and return self name value path list not for with is file code string data object type set function
error default test time line every that cannot be read from another user given asked
"""
WORDS = tuple(COMMON.split())


@dataclass
class Answer:
    """What a client saw of one request; `failure` is empty when it went well."""

    status: int = 0
    replica: str = ""
    # The replica that prefilled, where that was another one.
    prefiller: str = ""
    reason: str = ""
    grade: str = ""
    predicted_tokens: int | None = None
    # Of these, what is to be loaded from tiers behind the GPU.
    tier_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""
    text: str = ""
    streamed: bool = False
    # Whether any byte of a body had come: until then a router may, and should, hide the loss of a replica.
    begun: bool = False
    failure: str = ""


def prose(name: str, words: int) -> str:
    """Text of `words` words, the same for the same name."""
    rng = random.Random(name)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def chat(messages: list[dict[str, str]], tokens: int, stream: bool, allowed: list[int]) -> dict[str, Any]:
    """The body of a chat request whose answer has exactly `tokens` tokens."""
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True}
    # No "seed": with one, vLLM 0.32's CPU sampler now and then ends its engine ("CPU Generator does not use offset").
    body |= {"temperature": 0.0, "allowed_token_ids": allowed}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def note_headers(answer: Answer, response: httpx.Response) -> None:
    """Keep the status and the router's receipt."""
    headers = response.headers
    answer.status = response.status_code
    answer.replica = headers.get("x-warmroute-replica", "")
    answer.prefiller = headers.get("x-warmroute-prefill-replica", "")
    answer.reason = headers.get("x-warmroute-reason", "")
    answer.grade = headers.get("x-warmroute-grade", "")
    predicted = headers.get("x-warmroute-predicted-cached-tokens")
    answer.predicted_tokens = int(predicted) if predicted is not None else None
    answer.tier_tokens = int(headers.get("x-warmroute-predicted-tier-tokens", 0))


def note_usage(answer: Answer, usage: dict[str, Any] | None) -> None:
    """Keep the engine's counts."""
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def read_stream(answer: Answer, response: httpx.Response) -> None:
    """Read a streamed answer to its end; an error event or a missing [DONE] is a failure."""
    done = False
    async for data in events(response):
        answer.begun = True
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            answer.failure = answer.failure or f"error event {data[:200]}"
            continue
        note_usage(answer, chunk.get("usage"))
        for choice in chunk["choices"]:
            answer.text += choice["delta"].get("content") or ""
            answer.finish = choice["finish_reason"] or answer.finish
    if not done:
        answer.failure = answer.failure or "the stream ended without [DONE]"


async def ask(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer | None = None) -> Answer:
    """Send one chat request and read its answer; never raises: what broke is in `failure`.

    `answer` may be given to watch the answer while it grows.
    """
    answer = answer or Answer()
    answer.streamed = bool(body.get("stream"))
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            note_headers(answer, response)
            if response.status_code != 200:
                answer.failure = f"{response.status_code} {(await response.aread()).decode()[:300]}"
            elif answer.streamed:
                await read_stream(answer, response)
            else:
                parsed = json.loads(await response.aread())
                answer.begun = True
                note_usage(answer, parsed["usage"])
                answer.text = parsed["choices"][0]["message"]["content"]
                answer.finish = parsed["choices"][0]["finish_reason"]
    except httpx.HTTPError as broken:
        answer.failure = f"{type(broken).__name__}: {broken}"
    return answer


@dataclass
class Conversation:
    """A user's conversation: every turn sends the whole history, answers included."""

    name: str
    allowed: list[int]
    words_a_turn: int = 180
    answer_tokens: int = 80
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    async def turn(self, client: httpx.AsyncClient, stream: bool = False) -> Answer:
        """Say something more and keep the answer; a failed turn leaves the history as it was."""
        text = prose(f"{self.name} {len(self.answers)}", self.words_a_turn)
        said = [*self.messages, {"role": "user", "content": text}]
        answer = await ask(client, chat(said, self.answer_tokens, stream, self.allowed))
        if not answer.failure:
            self.messages = [*said, {"role": "assistant", "content": answer.text}]
        self.answers.append(answer)
        return answer

    def bytes_per_token(self) -> float:
        """UTF-8 bytes of the last prompt's contents per token of it; without the template's own bytes."""
        content_bytes = sum(len(message["content"].encode()) for message in self.messages[:-1])
        return content_bytes / self.answers[-1].prompt_tokens


async def word_tokens(client: httpx.AsyncClient) -> list[int]:
    """The ids of those words that are one token each, with the space before them."""
    ids: list[int] = []
    for word in WORDS:
        body = {"model": MODEL, "prompt": f" {word}", "add_special_tokens": False}
        tokens = (await client.post("/tokenize", json=body)).raise_for_status().json()["tokens"]
        ids += tokens if len(tokens) == 1 else []
    return ids
