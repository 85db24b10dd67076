"""Requests whose streams go on on another replica, their plans, and what an engine says to them."""

from __future__ import annotations

import json
import random
from typing import Any

from router.core.dialects.failover import plan_of
from tests.support.speaking import asked_of, events_of, joined, spoken

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VLLM = frozenset(("vllm",))
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """A request."""
    asked = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {"model": "m", "stream": True, "temperature": 0, "max_tokens": 40, **asked, **fields}


def planned(path: str, body: dict[str, Any], engines: frozenset[str] = VLLM, context_tokens: int = 4_096) -> Any:
    """The plan of a body."""
    return plan_of(path, json.dumps(body).encode(), engines, media=False, context_tokens=context_tokens)


def streamed(path: str, body: dict[str, Any], *, together_max: int = 1, seed: int = 0) -> list[bytes]:
    """The events of an engine that was asked for ids."""
    asked = asked_of(path, body | {"return_token_ids": True})
    pieces = joined(list(spoken(asked)), random.Random(seed), together_max)
    return events_of(asked, pieces, chat=path == CHAT, name=f"x-{path == CHAT}-{seed}")
