"""Against real vLLM: what the router makes of a request is, token for token, what the engine makes of it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest

from router.core import dialects
from router.core.types.requests import TemplateInput
from router.tokenization.encoder import PromptEncoder
from tests.real import token_requests
from tests.real.install import model_dir
from tests.real.token_requests import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Request
from tests.real.vllm_server import MODEL, Replica


@pytest.fixture
async def engine(replicas: list[Replica]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a replica itself."""
    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=60, trust_env=False) as made:
        yield made


@pytest.fixture
async def prompts() -> AsyncIterator[PromptEncoder]:
    """The tiny model's own files."""
    made = PromptEncoder({MODEL: str(model_dir())}, deadline_s=30.0)
    assert await made.prepare(MODEL)
    yield made
    made.close()


def read(path: str, body: dict[str, Any]) -> TemplateInput | None:
    """As the proxy reads it."""
    return dialects.dialect_of(path).template_input(path, msgspec.json.encode(body))


async def counted(engine: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, list[int] | None] | None:
    """The engine's count of prompt tokens and, where the API tells, their ids; None when it refuses the request."""
    short: dict[str, Any] = {"max_output_tokens": 1} if path == RESPONSES else {"max_tokens": 1}
    more = {"return_token_ids": True} if path in (CHAT, COMPLETIONS) else {}
    answer = await engine.post(path, json=short | {"model": MODEL, **body, **more})
    if answer.status_code != 200:
        return None
    read = answer.json()
    usage = read["usage"]
    if path == MESSAGES:
        total = sum(
            usage.get(name) or 0 for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        )
        return total, None
    if path == RESPONSES:
        return usage["input_tokens"], None
    return usage["prompt_tokens"], read.get("prompt_token_ids") or read["choices"][0].get("prompt_token_ids")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
async def test_requests_become_the_engines_own_tokens(
    path: str, engine: httpx.AsyncClient, prompts: PromptEncoder, figures: Callable[[str], None]
) -> None:
    """Every request that the engine takes has the same ids here, or the same number where it says no more."""
    compared = by_id = 0
    wrong: list[Request | str] = []
    for name, at, body in token_requests.ALL:
        theirs = await counted(engine, path, body) if at == path else None
        if theirs is None:
            continue
        given = read(path, {"model": MODEL, **body})
        ours = await prompts.encode(given, MODEL, "vllm") if given else None
        ids = None if ours is None else list(array("I", ours))
        compared += 1
        by_id += theirs[1] is not None
        if ids is None or len(ids) != theirs[0] or (theirs[1] is not None and ids != theirs[1]):
            wrong.append(name)
    figures(f"tokens of {path}: {compared} requests compared, {by_id} of them id by id, {len(wrong)} differ")
    assert not wrong
    assert compared >= 5


async def test_its_own_tokenize_agrees(engine: httpx.AsyncClient, prompts: PromptEncoder) -> None:
    """The check at start passes on the model's own files, and asking gives the same ids as rendering here."""

    async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = (await engine.post(path, json=body)).json()
        return answer

    assert await prompts.verify(MODEL, "vllm", ask) is None
    asking = PromptEncoder({}, deadline_s=30.0)
    different = []
    for name, path, body in token_requests.ALL:
        given = read(path, {"model": MODEL, **body})
        theirs = await asking.encode(given, MODEL, "vllm", ask) if given else None
        if given is not None and theirs is not None and theirs != await prompts.encode(given, MODEL, "vllm"):
            different.append(name)
    asking.close()
    assert not different
