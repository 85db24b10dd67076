"""Requests of the Messages API."""

from __future__ import annotations

import json
from typing import Any

from router.core.dialects.anthropic import Anthropic
from router.core.types.requests import RequestSpec
from tests.core.dialects.chats import USER, Same

MESSAGES = "/v1/messages"
ANTHROPIC = Anthropic()
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "Ulm", "n": [1, 2.5]}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Ulm","n":[1,2.5]}'}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CHAT_PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CACHED = {"type": "ephemeral"}


def text(words: str, **fields: Any) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": words, **fields}


def parse(**fields: Any) -> RequestSpec:
    """A body with these fields, read."""
    return ANTHROPIC.parse(MESSAGES, json.dumps({"model": "m", "max_tokens": 8, **fields}).encode())


SAME: Same = {
    "a user": ({"messages": [USER]}, [USER], {}),
    "blocks": ({"messages": [{"role": "user", "content": [text("a"), text(""), text("b")]}]},
               [{"role": "user", "content": [text("a"), text("b")]}], {}),
    "system": ({"messages": [USER], "system": "Be terse."}, [{"role": "system", "content": "Be terse."}, USER], {}),
    "system blocks": ({"messages": [USER], "system": [text("Be "), text("terse.", cache_control=CACHED)]},
                      [{"role": "system", "content": "Be terse."}, USER], {}),
    "billing": ({"messages": [USER], "system": [text("x-anthropic-billing-header: cch=1"), text("Be terse.")]},
                [{"role": "system", "content": [text("x-anthropic-billing-header: cch=2"), text("Be terse.")]},
                 USER], {}),
    "system between": ({"messages": [USER, {"role": "system", "content": [text("Now.")]}, USER]},
                       [USER, {"role": "system", "content": "Now."}, USER], {}),
    "tools": ({"messages": [USER], "tools": [TOOL | {"cache_control": CACHED}]}, [USER],
              {"tools": [CHAT_TOOL]}),
    "tools in other words": ({"messages": [USER], "tools": [TOOL]}, [USER],
                             {"tools": [{"function": {"strict": None, **dict(reversed(CHAT_TOOL["function"].items()))},  # type: ignore[attr-defined]
                                         "type": "function"}]}),
    "a plain tool": ({"messages": [USER], "tools": [{"name": "x", "input_schema": {}}]}, [USER],
                     {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}]}),
    "no tools": ({"messages": [USER], "tools": []}, [USER], {}),
    "a tool used": (
        {"messages": [USER, {"role": "assistant", "content": [text("I look."), USE]},
                      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "South"}]}]},
        [USER, {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
         {"role": "tool", "tool_call_id": "c1", "content": "South"}], {}),
    "a result and more": (
        {"messages": [{"role": "user", "content": [text("And?"), PNG, {"type": "tool_result", "tool_use_id": "c1",
                                                                  "content": [text("S"), text("W"), PNG]}]}]},
        [{"role": "tool", "tool_call_id": "c1", "content": "S\nW"}, {"role": "user", "content": [CHAT_PNG]},
         {"role": "user", "content": [text("And?"), CHAT_PNG]}], {}),
    "a picture's URL": ({"messages": [{"role": "user", "content": [{"type": "image",
                                                                    "source": {"type": "url", "url": "https://x/1"}}]}]},
                        [{"role": "user", "content": [{"type": "image_url", "image_url": "https://x/1"}]}], {}),
    "thoughts": ({"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm",
                                                                      "signature": "s"},
                                                                     {"type": "redacted_thinking", "data": "x"},
                                                                     text("South.")]}]},
                 [USER, {"role": "assistant", "content": "South.", "reasoning": "hm"}], {}),
    "effort": ({"messages": [USER], "output_config": {"effort": "low"}}, [USER], {"reasoning_effort": "low"}),
    "no thinking": ({"messages": [USER], "thinking": {"type": "disabled"}}, [USER], {"reasoning_effort": "none"}),
    "template arguments": ({"messages": [USER], "chat_template_kwargs": {"x": 1}}, [USER],
                           {"chat_template_kwargs": {"x": 1}}),
}  # fmt: skip
