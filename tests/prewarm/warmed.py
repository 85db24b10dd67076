"""Engines, prompts and calls for tests of pre-warming."""

from __future__ import annotations

import io
import json
from typing import Any

from aiohttp import ClientSession

from router.router_server import RouterServer

CHAT = "/v1/chat/completions"


HEAD = "You answer in few words, and never in rhyme. " * 100


def chat(*texts: str, model: str = "m", head: str = HEAD) -> dict[str, Any]:
    """A conversation so far, on the shared system prompt."""
    messages = [{"role": "system", "content": head}]
    messages += [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]
    return {"model": model, "messages": messages, "max_tokens": 4}


def asking(*bodies: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A call's body."""
    return {"requests": [{"path": CHAT, "body": body} for body in bodies], "wait": True, **more}


async def call(client: ClientSession, app: RouterServer, body: Any, code: int = 200) -> dict[str, Any]:
    """POST /admin/prewarm."""
    sent: dict[str, Any] = {
        "data": io.BytesIO(json.dumps(body).encode()),
        "headers": {"Content-Type": "application/json"},
    }
    async with client.post(f"{app.admin_url}/admin/prewarm", **sent) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == code, answer
        return answer


async def page(client: ClientSession, app: RouterServer, name: str) -> dict[str, Any]:
    """One of the admin listener's."""
    async with client.get(f"{app.admin_url}/admin/{name}") as response:
        found: dict[str, Any] = await response.json()
        return found


async def ask(client: ClientSession, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
    """As a client: (replica, predicted tokens, tokens that the engine found cached)."""
    async with client.post(url + CHAT, json=body) as response:
        assert response.status == 200
        usage = (await response.json())["usage"]
        replica, predicted = (
            response.headers[f"x-warmroute-{each}"] for each in ("replica", "predicted-cached-tokens")
        )
        return replica, int(predicted), usage["prompt_tokens_details"]["cached_tokens"]


def jobs(app: RouterServer) -> list[dict[str, Any]]:
    """What has not ended."""
    state = app.control.warmer.state()
    return [*state["running"], *state["queue"]]
