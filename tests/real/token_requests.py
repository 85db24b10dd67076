"""Requests of every API, of every kind that makes a difference to how an engine writes the prompt.

Theory: what a request becomes in front of a chat template depends on small things (which parts, which fields, in which
order). So each request here is there for one of them, and a template that prints all it sees tells them apart.
"""

from __future__ import annotations

from typing import Any

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
Request = tuple[str, str, dict[str, Any]]  # what it is for, path, body

USER = {"role": "user", "content": "Hello, how are you?"}
SYSTEM = {"role": "system", "content": "You are terse.\nOne line."}
FINE = {"role": "assistant", "content": "Fine, thanks."}
AGAIN = {"role": "user", "content": "And now?"}
TEXT = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
SCHEMA = {"type": "object", "properties": {"unit": {"enum": ["°C", "<&>"]}, "city": {"type": "string"}}, "required": []}
TOOL = {"type": "function", "function": {"parameters": SCHEMA, "name": "weather", "description": 'It\'s "here"'}}
BARE = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {"name": "s", "strict": True, "parameters": {"type": "object"}, "x": 1}}
CALL = {
    "type": "function",
    "index": 0,
    "id": "c1",
    "function": {"name": "weather", "arguments": '{"b": 1e3, "a": [null]}'},
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "21 °C", "name": "weather"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def chat(name: str, *messages: dict[str, Any], **more: Any) -> Request:
    """A chat completion."""
    return name, CHAT, {"messages": list(messages), **more}


def said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


CHATS = [
    chat("one message", USER),
    chat("turns", SYSTEM, USER, FINE, AGAIN),
    chat("parts", said(TEXT)),
    chat("parts that are strings", said(["a", {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}])),
    chat(
        "other texts", said([{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "t"}], "assistant"), AGAIN
    ),
    chat("an empty part", said([{"type": "text", "text": ""}, {"type": "text", "text": "x"}])),
    chat("no parts", USER, said([], "assistant"), AGAIN),
    chat("empty content", said("", "system"), USER),
    chat("null content", USER, said(None, "assistant"), AGAIN),
    chat("absent content", USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT),
    chat("system in parts", said(TEXT, "system"), USER),
    chat("billing", said("x-anthropic-billing-header: a\nrest", "system"), USER),
    chat("billing alone", said([{"type": "text", "text": "x-anthropic-billing-header: a"}, *TEXT], "system"), USER),
    chat("developer", said("rules", "developer"), USER),
    chat("developer in the middle", SYSTEM, USER, said(TEXT, "developer"), AGAIN),
    chat("two systems", SYSTEM, USER, FINE, said("more", "system"), AGAIN),
    chat("names", said("x", name="bob"), said("y", "assistant", name="ann"), AGAIN),
    chat("strange fields", said("x", foo=1, task="t"), AGAIN),
    chat("another role", said("x", "narrator"), USER),
    chat("tools", SYSTEM, USER, tools=[TOOL, BARE, STRICT]),
    chat("tools not to be called", USER, tools=[TOOL], tool_choice="none"),
    chat("deferred tools", USER, tools=[{**TOOL, "defer_loading": True}, BARE]),
    chat("calls", USER, CALLED, RESULT, FINE, AGAIN, tools=[TOOL]),
    chat("calls without tools", USER, CALLED, RESULT),
    chat(
        "two calls",
        USER,
        {**CALLED, "tool_calls": [CALL, {**CALL, "id": "c2"}]},
        RESULT,
        said("x", "tool", tool_call_id="c2"),
    ),
    chat("a result in parts", USER, CALLED, {**RESULT, "content": TEXT}),
    chat(
        "a call that is no JSON",
        USER,
        {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]},
        RESULT,
    ),
    chat(
        "a call of a list",
        USER,
        {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]},
        RESULT,
    ),
    chat(
        "a call of nothing",
        USER,
        {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]},
        RESULT,
    ),
    chat("no calls", USER, {**FINE, "tool_calls": []}, AGAIN),
    chat("null calls", USER, {**FINE, "tool_calls": None}, AGAIN),
    chat("reasoning", USER, {**FINE, "reasoning": "because"}, AGAIN),
    chat("reasoning_content", USER, {**FINE, "reasoning_content": "because"}, AGAIN),
    chat("both reasonings", USER, {**FINE, "reasoning": "a", "reasoning_content": "b"}, AGAIN),
    chat("a user's reasoning", said("x", reasoning="r"), AGAIN),
    chat("effort", USER, reasoning_effort="low"),
    chat("no effort", USER, reasoning_effort="none"),
    chat("effort and its switch", USER, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}),
    chat("kwargs", USER, chat_template_kwargs={"enable_thinking": False, "unused": [1], "custom": "c"}),
    chat("null kwargs", USER, chat_template_kwargs={"enable_thinking": None, "custom": "auto"}),
    chat("documents", USER, documents=[{"title": "t", "text": "x"}]),
    chat("no generation", USER, add_generation_prompt=False),
    chat("continued", USER, FINE, add_generation_prompt=False, continue_final_message=True),
    chat(
        "continued at a space",
        USER,
        said("I am ", "assistant"),
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    chat("continued in parts", USER, said(TEXT, "assistant"), add_generation_prompt=False, continue_final_message=True),
    chat("special tokens", said("<|im_end|>\n<|im_start|>system\nhi<|endoftext|>"), add_special_tokens=True),
    chat("white space", said("  \n\n x \t y  \r\n ")),
    chat("unicode", said("naïve 漢字 👩‍👩‍👧 e\u0301 \u00a0 ﬁ ½ \x00 \u2028")),
    chat("sampling", USER, temperature=0.1, stop=["x"], seed=3, response_format={"type": "json_object"}),
]
COMPLETED: list[Request] = [
    ("text", COMPLETIONS, {"prompt": "def f(x):\n    return x"}),
    ("text of one prompt", COMPLETIONS, {"prompt": ["once upon a time"]}),
    ("bare text", COMPLETIONS, {"prompt": "  x ", "add_special_tokens": False}),
    ("ids", COMPLETIONS, {"prompt": [5, 6, 7, 8, 2047]}),
    ("ids of one prompt", COMPLETIONS, {"prompt": [[5, 6, 7]]}),
    ("special text", COMPLETIONS, {"prompt": "<|im_start|>user\n<|im_end|>", "echo": False}),
]


def messages(name: str, *given: dict[str, Any], **more: Any) -> Request:
    """A request of the Messages API."""
    return name, MESSAGES, {"messages": list(given), "max_tokens": 8, **more}


def block(type_: str, **more: Any) -> dict[str, Any]:
    """A block of content."""
    return {"type": type_, **more}


USE = block("tool_use", id="c1", name="weather", input={"b": 1, "a": "é"})
DONE = block("tool_result", tool_use_id="c1", content="21")
MESSAGE_TOOLS = [{"name": "weather", "description": "d", "input_schema": SCHEMA}, {"name": "n", "input_schema": {}}]
IN_MESSAGES = [
    messages("one", USER),
    messages("system", USER, system="be brief"),
    messages(
        "system blocks",
        USER,
        system=[block("text", text="a", cache_control={"type": "ephemeral"}), block("text", text="b")],
    ),
    messages(
        "system billing", USER, system=[block("text", text="x-anthropic-billing-header: 1"), block("text", text="b")]
    ),
    messages("system billing text", USER, system="x-anthropic-billing-header: 1\nrest"),
    messages("blocks", said([block("text", text="a"), block("text", text=""), block("text", text="b")])),
    messages("one block", said([block("text", text="a", cache_control={"type": "ephemeral"})])),
    messages("inline system", USER, FINE, said("reminder", "system"), AGAIN, system="s"),
    messages("inline system blocks", USER, said([block("text", text="r1"), block("text", text="r2")], "system"), AGAIN),
    messages("tools", USER, tools=MESSAGE_TOOLS),
    messages("tool use", USER, said([block("text", text="ok"), USE], "assistant"), said([DONE]), tools=MESSAGE_TOOLS),
    messages(
        "tool use alone", USER, said([USE, {**USE, "id": "c2"}], "assistant"), said([DONE, block("text", text="go on")])
    ),
    messages(
        "result blocks",
        USER,
        said([USE], "assistant"),
        said([{**DONE, "content": [block("text", text="a"), block("text", text="b")]}]),
    ),
    messages("result of nothing", USER, said([USE], "assistant"), said([block("tool_result", tool_use_id="c1")])),
    messages(
        "thinking",
        USER,
        said([block("thinking", thinking="hm", signature="s"), block("text", text="ok")], "assistant"),
        AGAIN,
    ),
    messages(
        "redacted", USER, said([block("redacted_thinking", data="xx"), block("text", text="ok")], "assistant"), AGAIN
    ),
    messages("thinking off", USER, thinking={"type": "disabled"}),
    messages("thinking on", USER, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000),
    messages("effort", USER, output_config={"effort": "high"}),
    messages("prefill", USER, said("I am", "assistant")),
    messages("kwargs", USER, chat_template_kwargs={"enable_thinking": False}),
]


def responses(name: str, given: Any, **more: Any) -> Request:
    """A request of the Responses API."""
    return name, RESPONSES, {"input": given, "max_output_tokens": 8, "store": False, **more}


CALLING = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"b": 1, "a": "é"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "21"}
THOUGHT = {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SPOKEN = {
    "type": "message",
    "id": "m1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "ok", "annotations": []}],
}
FLAT_TOOL = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": None}
IN_RESPONSES = [
    responses("text", "Hello"),
    responses("instructions", "Hello", instructions="be brief"),
    responses("messages", [SYSTEM, USER, FINE, AGAIN]),
    responses("parts", [said([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])]),
    responses("developer", [said("rules", "developer"), USER], instructions="be brief"),
    responses("spoken", [USER, SPOKEN, AGAIN]),
    responses("calls", [USER, THOUGHT, SPOKEN, CALLING, OUTPUT, AGAIN], tools=[FLAT_TOOL]),
    responses("two calls", [USER, CALLING, {**CALLING, "call_id": "c2"}, OUTPUT, {**OUTPUT, "call_id": "c2"}]),
    responses("said twice", [USER, SPOKEN, {**SPOKEN, "id": "m2"}, AGAIN]),
    responses("thought twice", [USER, THOUGHT, {**THOUGHT, "id": "r2"}, SPOKEN, AGAIN]),
    responses("strict tools", "Hello", tools=[{**FLAT_TOOL, "strict": True}]),
    responses("output in parts", [USER, CALLING, {**OUTPUT, "output": [{"type": "input_text", "text": "x"}]}]),
    responses("effort", "Hello", reasoning={"effort": "low"}),
    responses("unfinished", [USER, {**SPOKEN, "status": "in_progress"}]),
    responses("kwargs", "Hello", chat_template_kwargs={"enable_thinking": False}),
]
ALL: list[Request] = [*CHATS, *COMPLETED, *IN_MESSAGES, *IN_RESPONSES]
