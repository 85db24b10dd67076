"""Honesty check of a broken stream: an error event of its API family, on an event boundary, without invented
content."""

from __future__ import annotations

import json
from typing import Any

ENDINGS = ("response.completed", "response.incomplete")


def events(body: bytes) -> tuple[list[tuple[str, Any]], bytes]:
    """Return (event, data) of every complete event, and the rest after the last; data that is not JSON stays bytes."""
    *whole, rest = body.replace(b"\r\n", b"\n").split(b"\n\n")
    found = []
    for block in whole:
        name, data = "", list[bytes]()
        for line in block.split(b"\n"):
            field, _, value = line.partition(b":")
            if field == b"event":
                name = value.strip().decode(errors="replace")
            elif field == b"data":
                data.append(value.removeprefix(b" "))
        text: Any = b"\n".join(data)
        try:
            found.append((name, json.loads(text)))
        except ValueError:
            found.append((name, text))
    return found, rest


def is_error(api: str, name: str, data: Any) -> bool:  # noqa: ANN401 - JSON of any kind
    """True if official clients of this API raise an exception for this event."""
    if not isinstance(data, dict):
        return False
    if api == "messages":
        return name == "error" and data.get("type") == "error" and isinstance(data.get("error"), dict)
    if api == "responses":
        return (name == "error" and data.get("type") == "error") or data.get("type") == "response.failed"
    return isinstance(data.get("error"), dict)


def is_finished(data: Any) -> bool:  # noqa: ANN401 - JSON of any kind
    """True if an event states that the answer is complete."""
    if not isinstance(data, dict):
        return False
    choices = data.get("choices")
    if isinstance(choices, list) and any(isinstance(c, dict) and c.get("finish_reason") for c in choices):
        return True
    delta = data.get("delta")
    return data.get("type") in ENDINGS or (isinstance(delta, dict) and bool(delta.get("stop_reason")))


def verdict(api: str, body: bytes, error: str) -> str:
    """Return the end of an unfinished stream: `honest`, or a description of the router's error. `error`: the client's
    error."""
    whole, rest = events(body)
    if any(is_finished(data) for _, data in whole):
        return "invented"
    wrong = [i for i, (name, data) in enumerate(whole) if is_error(api, name, data)]
    if wrong:
        before = whole[: wrong[0]]
        if any(data == b"[DONE]" for _, data in before):
            return "error behind [DONE]"  # official clients stop reading there
        if rest.strip():
            return "error, then half an event"
        return f"error, then {error}" if error else "honest"
    return error or "silent"
