"""Prompts for comparing the router's token ids with a replica's, and the line that reports their first difference."""

from __future__ import annotations

import struct

from router.core.types.requests import TemplateInput

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place, now: <b>°C</b> & wind",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"type": "string", "enum": ["°C", "°F"]}, "city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
_CALL = {
    "id": "call00001",
    "function": {"arguments": '{"city": "Zürich", "unit": "°C", "n": 1.5e3}', "name": "get_weather"},
    "type": "function",
}
_HELLO = {"role": "user", "content": "Hello, how are you?"}
_FINE = {"role": "assistant", "content": "Fine. And you?"}
_SYSTEM = {"role": "system", "content": "You are terse.\nAnswer in one line."}

PROMPTS: dict[str, TemplateInput] = {
    "plain text": TemplateInput(text="The quick brown fox, 1234567890 times.", add_special_tokens=True),
    "bare text": TemplateInput(text=" leading space\n\n\ttab  two ", add_special_tokens=False),
    "one message": TemplateInput(messages=[_HELLO]),
    "several turns": TemplateInput(messages=[_SYSTEM, _HELLO, _FINE, {"role": "user", "content": "Same."}]),
    "parts": TemplateInput(
        messages=[{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    ),
    "unicode": TemplateInput(messages=[{"role": "user", "content": "naïve 漢字 한국어 👩‍👩‍👧 e\u0301 \u00a0 ﬁ ½"}]),
    "white space": TemplateInput(messages=[{"role": "user", "content": "  \n\n x \t\r\n  y   "}]),
    "look-alikes": TemplateInput(
        messages=[
            {"role": "user", "content": "<|im_start|>system\n</s><s>[INST]<|eot_id|><|endoftext|> <think>x</think>"}
        ]
    ),
    "tools": TemplateInput(messages=[_SYSTEM, _HELLO], tools=_TOOLS),
    "tool calls": TemplateInput(
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "I look.", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": '{"t": 21}'},
            {"role": "assistant", "content": "21 °C"},
            {"role": "user", "content": "Thanks"},
        ],
        tools=_TOOLS,
    ),
    "reasoning": TemplateInput(
        messages=[_HELLO, _FINE | {"reasoning": "Say so."}, {"role": "user", "content": "Good."}]
    ),
    "continued": TemplateInput(messages=[_HELLO, _FINE], add_generation_prompt=False, continue_final_message=True),
    "no generation": TemplateInput(messages=[_HELLO], add_generation_prompt=False),
}


def difference(name: str, ours: bytes | None, theirs: bytes | None) -> str | None:
    """Return a line that names the first token that differs; None if all are equal, or both sides refuse."""
    if ours == theirs:
        return None
    if ours is None or theirs is None:
        return f"prompt '{name}' is rejected {'here' if ours is None else 'there'} only"
    at = next((i for i in range(0, min(len(ours), len(theirs)), 4) if ours[i : i + 4] != theirs[i : i + 4]), None)
    at = min(len(ours), len(theirs)) if at is None else at
    return f"prompt '{name}' differs at token {at // 4}: {_token(ours, at)} here, {_token(theirs, at)} there"


def _token(ids: bytes, at: int) -> str:
    return str(struct.unpack_from("<I", ids, at)[0]) if at < len(ids) else "the end"
