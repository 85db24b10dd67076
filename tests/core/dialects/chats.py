"""What other APIs are compared with: the chat that an engine makes of their requests. And events as they stream."""

from __future__ import annotations

import json
from typing import Any

from router.core.dialects.openai import OpenAI
from router.core.types.requests import Prompt

USER = {"role": "user", "content": "Where is Ulm?"}

# By what a request shows: its fields, the messages of the chat that it is, and the chat's other fields.
Same = dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]]


def chat(*messages: dict[str, Any], **fields: Any) -> Prompt:
    """The prompt of a chat."""
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    prompt = OpenAI().parse("/v1/chat/completions", body).prompt
    assert prompt is not None
    return prompt


def event(kind: str, **fields: Any) -> bytes:
    """One streamed event."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
