"""Bodies of three APIs, and how two are compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from router.core.dialects import PATHS
from router.core.insights.difference.compare import Compared, compare
from router.core.types.cache_misses import Difference

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


RULES = "Read a file before you edit it. Run the tests when you are done. Ask where something is not clear.\n" * 8


PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "Absolute."}, "limit": {"type": "integer"}},
    "required": ["path", "limit"],
}


NAMES = ("read_file", "write_file", "grep", "run_shell", "web_fetch")


Body = dict[str, Any]


Edit = Callable[[Body], object]


def words(n: int, topic: str = "the parser") -> str:
    """A text of n lines, none like another."""
    return "\n".join(
        f"{topic} keeps its state in slot {i * 7919 % 1000}, which {topic} reads {i} times" for i in range(n)
    )


def tool(name: str) -> Body:
    """A tool as chats have it."""
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": PARAMETERS}}


def chat(system: str = f"You are a coding agent.\n{RULES}", turns: int = 4) -> Body:
    """A chat of an agent, 1 + 4 * turns messages: a question, a call, its result, an answer."""
    messages: list[Body] = [{"role": "system", "content": system}]
    for n in range(turns):
        arguments = json.dumps({"path": f"/src/part_{n}.py", "limit": 200 + n, "note": f"why {n}"})
        call = {"id": f"call_{n}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
        messages += [
            {"role": "user", "content": f"Please look at part {'abcdefgh'[n]}.\n{words(3, f'question {n}')}"},
            {"role": "assistant", "content": f"I read it. {'abcdefgh'[n]}", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{n}", "content": words(9, f"module {'abcdefgh'[n]}")},
            {"role": "assistant", "content": words(4, f"answer {'abcdefgh'[n]}")},
        ]
    return {"model": "m", "tools": [tool(name) for name in NAMES], "messages": messages}


def text_of(path: str, body: Body) -> tuple[bytes, bytes]:
    """The body as JSON, and its canonical bytes."""
    given_ = json.dumps(body).encode()
    prompt = PATHS[path].parse(path, given_).prompt
    assert prompt is not None
    return given_, prompt.text


def seen(path: str, before: Body, after: Body, *, excerpts: bool = False) -> Compared:
    """What is found between two bodies."""
    body, text = text_of(path, after)
    return compare(text_of(path, before)[1], text, body=body, path=path, excerpts=excerpts)


def changed(make: Callable[[], Body], *edits: Edit) -> Body:
    """A new body, edited."""
    body = make()
    for edit in edits:
        edit(body)
    return body


def found(path: str, before: Body, after: Body) -> Difference:
    """The difference, which there must be."""
    difference = seen(path, before, after).difference
    assert difference is not None
    return difference


def tools_moved(body: Body) -> None:
    """A tool comes earlier."""
    body["tools"].insert(1, body["tools"].pop(3))


def drop(start: int, end: int) -> Edit:
    """Messages that are gone."""
    return lambda body: body["messages"].__delitem__(slice(start, end))
