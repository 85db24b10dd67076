"""Requests of the Responses API."""

from __future__ import annotations

import json
from typing import Any

from router.core.dialects.responses_api import Responses
from router.core.types.requests import RequestSpec
from tests.core.dialects.chats import USER, Same

RESPONSES = Responses()
SYSTEM = {"role": "system", "content": "Be terse."}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"Ulm"}'}}
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"at": "Ulm"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "South"}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "South.", "annotations": []}],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def parse(**fields: Any) -> RequestSpec:
    """A body with these fields, read."""
    return RESPONSES.parse("/v1/responses", json.dumps({"model": "m", **fields}).encode())


def assistant(text: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chat's assistant message."""
    return {"role": "assistant", "content": text, **fields}


TOOL_MESSAGE = {"role": "tool", "tool_call_id": "c1", "content": "South"}


SAME: Same = {
    "a string": ({"input": "Where is Ulm?"}, [USER], {}),
    "instructions": ({"input": "Where is Ulm?", "instructions": "Be terse."}, [SYSTEM, USER], {}),
    "messages": ({"input": [SYSTEM, {"type": "message", **USER}]}, [SYSTEM, USER], {}),
    "parts": ({"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": "https://x/1.png", "detail": "auto"}]}]},
              [{"role": "user", "content": [{"type": "text", "text": "See"},
                                            {"type": "image_url", "image_url": {"url": "https://x/1.png"}}]}], {}),
    "an answer": ({"input": [USER, SAID, USER]}, [USER, assistant("South."), USER], {}),
    "an answer as text": ({"input": [USER, assistant("South."), USER]}, [USER, assistant("South."), USER], {}),
    "a call": ({"input": [USER, CALLED, RESULT]}, [USER, assistant(tool_calls=[CALL]), TOOL_MESSAGE], {}),
    "thought, said and called": ({"input": [USER, THOUGHT, SAID, CALLED, {**CALLED, "call_id": "c2"}, RESULT]},
                                 [USER, assistant("South.", tool_calls=[CALL, {**CALL, "id": "c2"}], reasoning="hm"),
                                  TOOL_MESSAGE], {}),
    "said twice": ({"input": [USER, SAID, SAID]}, [USER, assistant("South."), assistant("South.")], {}),
    "summary": ({"input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, SAID]},
                [USER, assistant("South.", reasoning="hm")], {}),
    "a result in parts": ({"input": [USER, CALLED, {**RESULT, "output": [{"type": "input_text", "text": "South"}]}]},
                          [USER, assistant(tool_calls=[CALL]), TOOL_MESSAGE], {}),
    "tools": ({"input": "Where is Ulm?", "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}]}, [USER],
              {"tools": [{"type": "function", "function": FUNCTION}]}),
    "no function": ({"input": "Where is Ulm?", "tools": [{"type": "web_search"}]}, [USER], {}),
    "a namespace": ({"input": "Where is Ulm?", "tools": [{"type": "namespace", "name": "geo", "description": "d",
                                                       "tools": [{"type": "function", **FUNCTION}]}]}, [USER],
                    {"tools": [{"type": "function", "function": {**FUNCTION, "name": "geo__look"}}]}),
    "effort": ({"input": "Where is Ulm?", "reasoning": {"effort": "low"}}, [USER], {"reasoning_effort": "low"}),
    "template arguments": ({"input": "Where is Ulm?", "chat_template_kwargs": {"x": 1}}, [USER],
                           {"chat_template_kwargs": {"x": 1}}),
}  # fmt: skip
