from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects import PATHS
from router.core.facts.misses import Change, Difference
from router.core.observatory.difference import overlap
from router.core.observatory.difference.compare import Compared, compare
from router.core.observatory.difference.json_changes import change_of

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


def messages_body(system: Any = "You are an agent.\n" + RULES, turns: int = 3) -> Body:
    """The same through the Messages API."""
    messages: list[Body] = []
    for n in range(turns):
        results = [{"type": "tool_result", "tool_use_id": f"t{n - 1}", "content": words(8, f"file {n}")}] if n else []
        messages += [
            {"role": "user", "content": [*results, {"type": "text", "text": words(3, f"ask {n}")}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": f"Reading now, {'xyzuvw'[n]}."},
                    {"type": "tool_use", "id": f"t{n}", "name": "look", "input": {"path": f"/a/{n}", "why": "to see"}},
                ],
            },
        ]
    messages.append(
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": f"t{turns - 1}",
                    "content": [{"type": "text", "text": words(5, "last file")}],
                }
            ],
        }
    )
    tools = [{"name": name, "description": f"Does {name}.", "input_schema": PARAMETERS} for name in NAMES]
    return {"model": "m", "max_tokens": 9, "system": system, "tools": tools, "messages": messages}


def responses_body(turns: int = 3) -> Body:
    """The same as items of the Responses API."""
    items: list[Body] = []
    for n in range(turns):
        items += [
            {"role": "user", "content": [{"type": "input_text", "text": words(3, f"ask {n}")}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": words(2, f"thought {n}")}]},
            {"type": "function_call", "call_id": f"c{n}", "name": "look", "arguments": '{"path": "/a", "why": "see"}'},
            {"type": "function_call_output", "call_id": f"c{n}", "output": words(8, f"file {n}")},
        ]
    items.append({"role": "user", "content": "Go on."})
    tools: list[Body] = [{"type": "web_search"}]
    tools += [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES]
    return {"model": "m", "instructions": f"You are an agent.\n{RULES}", "input": items, "tools": tools}


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


# What a template fills in: what stood there, what stands there now, and how many bytes of both are the same.
FILLED: list[tuple[Change, str, str]] = [
    (Change.TIMESTAMP, "Now: 2026-11-20T10:31:05Z.", "Now: 2026-11-20T10:42:17Z."),
    (Change.TIMESTAMP, "Now: 2026-11-20 10:31:05.123456+00:00", "Now: 2026-11-20 10:31:09.000001+00:00"),
    (Change.TIMESTAMP, "Today's date: 2026-11-20", "Today's date: 2026-11-21"),
    (Change.TIMESTAMP, "Today is Thursday, November 20, 2026.", "Today is Friday, November 21, 2026."),
    (Change.TIMESTAMP, "The current date is November 20, 2026", "The current date is December 1, 2026"),
    (Change.TIMESTAMP, "Date: Fri, 20 Nov 2026 10:31:00 +0000", "Date: Fri, 20 Nov 2026 11:02:59 +0000"),
    (Change.TIMESTAMP, "It is 9:59 PM here", "It is 10:01 PM here"),
    (Change.TIMESTAMP, "It is 10 AM in Ulm", "It is 11 AM in Ulm"),
    (Change.TIMESTAMP, "Current Date: 20 Nov 2026", "Current Date: 21 Nov 2026"),
    (Change.TIMESTAMP, "Current time: Fri Nov 20 10:31:05 UTC 2026", "Current time: Sat Nov 21 00:00:01 UTC 2026"),
    (Change.TIMESTAMP, "as of 11/20/2026, 10:31:05 AM", "as of 11/21/2026, 9:01:44 PM"),
    (Change.TIMESTAMP, "Stand: 20.11.2026 10:31", "Stand: 21.11.2026 08:00"),
    (Change.TIMESTAMP, "timestamp=1795343465", "timestamp=1795343999"),
    (Change.TIMESTAMP, "ts: 1795343465123", "ts: 1795346465001"),
    (Change.TIMESTAMP, "epoch 1795343465.123", "epoch 1795399465.9"),
    (Change.TIMESTAMP, "Last login: 5 minutes ago", "Last login: 2 hours ago"),
    (Change.TIMESTAMP, "Today is Monday.", "Today is Tuesday."),
    (Change.TIMESTAMP, "20261120T103105Z", "20261120T113105Z"),
    (Change.TIMESTAMP, "[10:31:05] ready", "[10:31:09] ready"),
    (
        Change.TIMESTAMP,
        "Good morning, it is the 20th of November 2026",
        "Good morning, it is the 21st of November 2026",
    ),
    (Change.TIMESTAMP, "Hello (2026-11-20).", "Hello."),
    (Change.IDENTIFIER, "Session 3f2b8a6e-9d1c-4f7e-8b2a-1c3d5e7f9a0b", "Session 9c1d7e2f-0a3b-4c5d-8e6f-7a8b9c0d1e2f"),
    (Change.IDENTIFIER, "request_id: req_8fa2Kd93ZpQ1", "request_id: req_Lk30sPq8vX2m"),
    (Change.IDENTIFIER, "trace=4bf92f3577b34da6a3ce929d0e0e4736", "trace=a0af7651916cd43dd8448eb211c80319"),
    (Change.IDENTIFIER, "Run 01J9ZK3V8Q4M5N6P7R8S9T0VWX", "Run 01J9ZKB7T2C3D4E5F6G7H8J9KA"),
    (Change.IDENTIFIER, "commit a1b2c3d", "commit f00dba5"),
    (Change.IDENTIFIER, "cwd: /tmp/tmpk3j9x_2a/work", "cwd: /tmp/tmp8sd71qpz/work"),
    (Change.IDENTIFIER, "user_id=48213397", "user_id=90117254"),
    (Change.IDENTIFIER, "nonce kJhQwErTyUiOpAsD", "nonce ZxCvBnMlKjHgFdSa"),
    (Change.IDENTIFIER, "doc 65f1a2b3c4d5e6f7a8b9c0d1", "doc 65f1a2b3c4d5e6f7a8b9c0d9"),
    (Change.IDENTIFIER, "session: V1StGXR8_Z5jdHi6B-myT", "session: k9QpLm2x_Ab3Cd-Ef4GhJ"),
    (Change.IDENTIFIER, "X-Request-Id: 8f14e45f-ceea-467a", "X-Request-Id: c9f0f895-fb98-4b91"),
    (Change.IDENTIFIER, "build deadbeef", "build 0badf00d"),
    (Change.TIMESTAMP, "see log_2026-11-20.txt", "see log_2026-11-21.txt"),
    (Change.TIMESTAMP, "Month: November 2026", "Month: December 2026"),
    (Change.TIMESTAMP, "The year is 2026", "The year is 2027"),
    (Change.TIMESTAMP, "now=2026-11-20T10:31:05.123+02:00", "now=2026-11-20T10:31:05.987+02:00"),
    (Change.TIMESTAMP, "20 November 2026, 22:31 (UTC+1)", "20 November 2026, 23:01 (UTC+1)"),
    (Change.TIMESTAMP, "Thu Nov 20 2026 10:31:05 GMT+0100", "Thu Nov 20 2026 11:00:00 GMT+0100"),
    (Change.TIMESTAMP, "Zeit: 10.31 Uhr, 20. Nov 2026", "Zeit: 10.31 Uhr, 21. Nov 2026"),
    (Change.TIMESTAMP, "elapsed since start: 00:10:31", "elapsed since start: 00:12:05"),
    (Change.COUNTER, "used 1999 tokens", "used 2044 tokens"),
    (Change.COUNTER, "Context left until auto-compact: 45%", "Context left until auto-compact: 9%"),
    (Change.COUNTER, "retry 2/5", "retry 3/5"),
    (Change.COUNTER, "turn-17-of-40", "turn-18-of-40"),
    (Change.COUNTER, "this is the second attempt", "this is the third attempt"),
    (Change.COUNTER, "unread: 9", "unread: 12"),
    (Change.COUNTER, "step=017;", "step=018;"),
    (Change.IDENTIFIER, "host 10.12.0.4", "host 10.98.3.17"),
    (Change.IDENTIFIER, "pod web-7d9f8b6c5-x2x4k", "pod web-7d9f8b6c5-9qq7z"),
    (
        Change.IDENTIFIER,
        "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "traceparent: 00-a0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
    ),
    (Change.IDENTIFIER, "ticket ABC-12345", "ticket ABC-67890"),
    (Change.IDENTIFIER, "order 48213", "order 90117"),
    (Change.TIMESTAMP, "今天是2026年11月20日。", "今天是2026年11月21日。"),
    (Change.TIMESTAMP, '{"month": 11, "day": 20}', '{"month": 11, "day": 21}'),
    (Change.TIMESTAMP, "at 20-Nov-2026 10:31", "at 21-Nov-2026 09:00"),
    (Change.TIMESTAMP, "(10:31:05.123Z)", "(10:31:06.001Z)"),
    (Change.COUNTER, "Elapsed: 3m 20s", "Elapsed: 4m 05s"),
    (Change.COUNTER, "turn 17 of 40", "turn 18 of 40"),
    (Change.COUNTER, "step=9", "step=10"),
    (Change.COUNTER, "You have 3 tool calls left", "You have 2 tool calls left"),
    (Change.COUNTER, "You have 2 tool calls left", "You have 1 tool call left"),
    (Change.COUNTER, "<budget>183220 tokens left</budget>", "<budget>179004 tokens left</budget>"),
    (Change.COUNTER, "Token usage: 12,345/200,000", "Token usage: 13,001/200,000"),
    (Change.COUNTER, "You have three attempts left", "You have two attempts left"),
    (Change.COUNTER, "message #17", "message #19"),
    (Change.COUNTER, "Spent so far: $0.1234", "Spent so far: $0.1250"),
    (Change.COUNTER, "iteration_7_of_run", "iteration_8_of_run"),
    (Change.WHITESPACE, "Be brief. ", "Be brief."),
    (Change.WHITESPACE, "Be brief.\n\nBe kind.", "Be brief.\nBe kind."),
    (Change.WHITESPACE, "a:\n  b\n  c", "a:\n    b\n    c"),
    (Change.WHITESPACE, "a\r\nb\r\nc", "a\nb\nc"),
    (Change.WHITESPACE, "Be\u00a0brief", "Be brief"),
    (Change.OTHER, "Answer in a friendly tone.", "Answer in a formal manner."),
    (Change.OTHER, "User likes Python.", "User likes Rust and Ulm."),
    (Change.KEY_ORDER, 'Config: {"a": 1, "b": {"c": 2}}', 'Config: {"b": {"c": 2}, "a": 1}'),
    (Change.REORDERED_CONTEXT, "Files: alpha.py, beta.py, gamma.py", "Files: beta.py, alpha.py, gamma.py"),
]


@pytest.mark.parametrize(("change", "before", "after"), FILLED)
@pytest.mark.parametrize("place", ["top", "end"])
def test_what_a_template_fills_in(change: Change, before: str, after: str, place: str) -> None:
    """The kind of a change in a system prompt is told, at its top and at its end, and so is its first byte."""
    texts = [f"{piece}\n{RULES}" if place == "top" else f"{RULES}{piece}" for piece in (before, after)]
    difference = found(CHAT, chat(texts[0]), chat(texts[1]))
    assert (difference.change, difference.message, difference.role) == (change, 0, "system")
    assert difference.path == "messages[0].content"
    one, other = texts[0].encode(), texts[1].encode()
    assert one[: difference.at_bytes] == other[: difference.at_bytes]
    assert one[difference.at_bytes :][:1] != other[difference.at_bytes :][:1]


@pytest.mark.parametrize(("change", "before", "after"), FILLED)
def test_the_same_in_a_message(change: Change, before: str, after: str) -> None:
    """In a message of a user the same kinds are told; words there are an edited history."""
    bodies = [
        changed(chat, lambda b, x=x: b["messages"][5].update(content=f"{words(4)}\n{x}\n{words(4, 'it')}"))
        for x in (before, after)
    ]
    difference = found(CHAT, *bodies)
    assert difference.change is (Change.EDITED_HISTORY if change is Change.OTHER else change)
    assert (difference.message, difference.role, difference.path) == (5, "user", "messages[5].content")


def test_an_appended_conversation_has_no_difference() -> None:
    """Neither has a retry, an earlier turn once more, nor an answer or a question made anew."""
    short, long = chat(turns=3), chat(turns=4)
    assert seen(CHAT, short, long) == Compared(None, 0, len(text_of(CHAT, short)[1]), True)
    assert seen(CHAT, long, long).appended
    again = seen(CHAT, long, short)
    assert again.difference is None
    assert not again.appended
    for index in (16, 13):
        anew = changed(
            chat,
            lambda b, i=index: b["messages"][i].update(content="Quite something else, said anew."),
            lambda b, i=index: b["messages"].__delitem__(slice(i + 1, None)),
        )
        assert seen(CHAT, long, anew)[:2] == (None, 0)
    branch = changed(
        chat,
        lambda b: b.update(
            messages=[
                *b["messages"][:5],
                {"role": "user", "content": "Now write a poem about the sea, please, in four lines."},
                {"role": "assistant", "content": "Grey the water, grey the sky, ..."},
                {"role": "user", "content": "More."},
            ]
        ),
    )
    assert seen(CHAT, long, branch)[:2] == (None, 0)


def tools_moved(body: Body) -> None:
    """A tool comes earlier."""
    body["tools"].insert(1, body["tools"].pop(3))


def drop(start: int, end: int) -> Edit:
    """Messages that are gone."""
    return lambda body: body["messages"].__delitem__(slice(start, end))


def said(index: int, text: str) -> Edit:
    """Another content."""
    return lambda body: body["messages"][index].update(content=text)


def summed_up(body: Body) -> None:
    """One message in place of many."""
    body["messages"][1:9] = [{"role": "user", "content": "Summary of what was said before: all is well."}]


def call_keys(body: Body) -> None:
    """The arguments of a call in another order."""
    function = body["messages"][6]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(dict(reversed(json.loads(function["arguments"]).items())))


def other_call(body: Body) -> None:
    """Another argument."""
    function = body["messages"][6]["tool_calls"][0]["function"]
    function["arguments"] = function["arguments"].replace("/src/part_1.py", "/src/other.py")


CHATS: list[tuple[Change, int, str, int | None, Edit]] = [
    (Change.TOOL_ORDER, -1, "tools[1]", 0, tools_moved),
    (Change.TOOL_ORDER, -1, "tools[0]", 0, lambda b: b["tools"].reverse()),
    (Change.TOOL_ADDED, -1, "tools[5]", 0, lambda b: b["tools"].append(tool("mcp__new"))),
    (Change.TOOL_ADDED, -1, "tools[2]", 0, lambda b: b["tools"].insert(2, tool("mcp__new"))),
    (Change.TOOL_REMOVED, -1, "tools[4]", 0, lambda b: b["tools"].pop()),
    (Change.TOOL_REMOVED, -1, "tools[1]", 0, lambda b: b["tools"].pop(1)),
    (Change.TOOL_REMOVED, -1, "tools[0]", 0, lambda b: b.pop("tools")),
    (
        Change.KEY_ORDER,
        -1,
        "tools[2].function.parameters",
        None,
        lambda b: b["tools"][2]["function"].update(parameters=dict(reversed(PARAMETERS.items()))),
    ),
    (
        Change.KEY_ORDER,
        -1,
        "tools[3].function.parameters.required",
        None,
        lambda b: b["tools"][3]["function"].update(parameters=PARAMETERS | {"required": ["limit", "path"]}),
    ),
    (
        Change.OTHER,
        -1,
        "tools[1].function.description",
        0,
        lambda b: b["tools"][1]["function"].update(description="Puts bytes in a file."),
    ),
    (
        Change.TIMESTAMP,
        -1,
        "tools[1].function.description",
        15,
        lambda b: b["tools"][1]["function"].update(description="Does write_file (2026-11-20)."),
    ),
    (Change.OTHER, -1, "chat_template_kwargs", 0, lambda b: b.update(chat_template_kwargs={"date": "today"})),
    (Change.TRUNCATED_HISTORY, 1, "messages[1].content", None, drop(1, 5)),
    (Change.TRUNCATED_HISTORY, 5, "messages[5].content", None, drop(5, 13)),
    (Change.TRUNCATED_HISTORY, 1, "messages[1]", 0, drop(1, 3)),
    (Change.TRUNCATED_HISTORY, 1, "messages[1].content", 0, summed_up),
    (Change.EDITED_HISTORY, 3, "messages[3].content", 0, said(3, "[Old tool result content cleared]")),
    (Change.EDITED_HISTORY, 4, "messages[4].content", 0, said(4, "It was something else.")),
    (
        Change.EDITED_HISTORY,
        5,
        "messages[5]",
        0,
        lambda b: b["messages"].insert(5, {"role": "system", "content": "<reminder>Be brief.</reminder>"}),
    ),
    (Change.KEY_ORDER, 6, "messages[6].tool_calls[0].function.arguments", 2, call_keys),
    (Change.EDITED_HISTORY, 6, "messages[6].tool_calls[0].function.arguments", 15, other_call),
    (
        Change.WHITESPACE,
        4,
        "messages[4].content",
        None,
        lambda b: b["messages"][4].update(content=b["messages"][4]["content"].replace("\n", "\n\n")),
    ),
    (
        Change.REORDERED_CONTEXT,
        3,
        "messages[3].content",
        None,
        lambda b: b["messages"][3].update(content="\n".join(reversed(b["messages"][3]["content"].split("\n")))),
    ),
]


@pytest.mark.parametrize(("change", "message", "path", "at", "edit"), CHATS)
@pytest.mark.parametrize("turns", [4, 5])
def test_chats(change: Change, message: int, path: str, at: int | None, edit: Edit, turns: int) -> None:
    """What happens to tools and messages of a chat is told by kind and place, whether or not it goes on behind."""
    difference = found(CHAT, chat(), changed(lambda: chat(turns=turns), edit))
    assert (difference.change, difference.message, difference.path) == (change, message, path)
    assert at is None or abs(difference.at_bytes - at) <= 1


def block(message: int, part: int, **fields: Any) -> Edit:
    """Other fields of a block."""
    return lambda body: body["messages"][message]["content"][part].update(fields)


MESSAGE_EDITS: list[tuple[Change, int, str, Edit]] = [
    (Change.TIMESTAMP, 0, "system[1].text", lambda b: b["system"][1].update(text="Now: 2026-11-21.")),
    (Change.OTHER, -1, "tools[1].description", lambda b: b["tools"][1].update(description="Something.")),
    (
        Change.KEY_ORDER,
        -1,
        "tools[1].input_schema",
        lambda b: b["tools"][1].update(input_schema=dict(reversed(PARAMETERS.items()))),
    ),
    (Change.TOOL_ORDER, -1, "tools[1]", tools_moved),
    (Change.EDITED_HISTORY, 1, "messages[0].content[0].text", block(0, 0, text="Well?")),
    (Change.KEY_ORDER, 2, "messages[1].content[1].input", block(1, 1, input={"why": "to see", "path": "/a/0"})),
    (Change.EDITED_HISTORY, 2, "messages[1].content[1].input.path", block(1, 1, input={"path": "/b", "why": "to see"})),
    (Change.EDITED_HISTORY, 3, "messages[2].content[0].content", block(2, 0, content="[cleared]")),
    (Change.EDITED_HISTORY, 4, "messages[2].content[1].text", block(2, 1, text="Well?")),
    (Change.TRUNCATED_HISTORY, 1, "messages[0].content[0]", drop(0, 2)),
]


@pytest.mark.parametrize(("change", "message", "path", "edit"), MESSAGE_EDITS)
def test_messages(change: Change, message: int, path: str, edit: Edit) -> None:
    """In Anthropic's dialect places have the names of that request's own JSON."""
    system = [{"type": "text", "text": RULES}, {"type": "text", "text": "Now: 2026-11-20."}]

    def make() -> Body:
        return messages_body(json.loads(json.dumps(system)))

    difference = found(MESSAGES, make(), changed(make, edit))
    assert (difference.change, difference.message, difference.path) == (change, message, path)


RESPONSE_EDITS: list[tuple[Change, int, str, Edit]] = [
    (Change.OTHER, 0, "instructions", lambda b: b.update(instructions=f"You are a poet.\n{RULES}")),
    (Change.EDITED_HISTORY, 1, "input[0].content[0].text", lambda b: b["input"][0]["content"][0].update(text="Well?")),
    (Change.EDITED_HISTORY, 2, "input[1].summary[0].text", lambda b: b["input"][1]["summary"][0].update(text="Well.")),
    (Change.KEY_ORDER, 2, "input[2].arguments", lambda b: b["input"][2].update(arguments='{"why":"see","path":"/a"}')),
    (Change.EDITED_HISTORY, 3, "input[3].output", lambda b: b["input"][3].update(output="[cleared]")),
    (Change.TOOL_REMOVED, -1, "tools[2]", lambda b: b["tools"].pop(2)),
    (Change.OTHER, -1, "tools[3].description", lambda b: b["tools"][3].update(description="Does.")),
]


@pytest.mark.parametrize(("change", "message", "path", "edit"), RESPONSE_EDITS)
def test_responses(change: Change, message: int, path: str, edit: Edit) -> None:
    """So they have in the dialect of Responses, where several items make one message."""

    def make() -> Body:
        body = responses_body()
        body["tools"][3]["description"] = "Finds words."
        return body

    difference = found(RESPONSES, make(), changed(make, edit))
    assert (difference.change, difference.message, difference.path) == (change, message, path)


PASSAGES = [
    f'<document index="{{}}">\nSource: doc-{n}.md, 2024-0{n + 1}-1{n}\n{words(4, f"chapter {chr(97 + n)}")}\n'
    "</document>"
    for n in range(6)
]


@pytest.mark.parametrize("order", [[1, 0, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 1, 4, 5], [0, 3, 1, 2, 5, 4]])
@pytest.mark.parametrize("index", [0, 1])
def test_passages_in_another_order(order: list[int], index: int) -> None:
    """Retrieved passages that come in another order are told, though they are numbered anew and some are gone."""
    bodies = [
        changed(
            chat,
            lambda b, o=o: b["messages"][index].update(
                content="Use this:\n"
                + "\n".join(PASSAGES[n].format(i + 1) for i, n in enumerate(o))
                + "\nWhat follows?"
            ),
        )
        for o in ([0, 1, 2, 3, 4, 5], order)
    ]
    difference = found(CHAT, *bodies)
    assert difference.change is Change.REORDERED_CONTEXT
    assert difference.message == index


def test_what_repeats_is_counted() -> None:
    """All that is behind a timestamp at the top repeats; of a shortened history what was kept; of new turns nothing."""
    one, other = (f"Now: 2026-11-20T10:{minute}:00Z\n{RULES}" for minute in (31, 42))
    text = text_of(CHAT, chat(other))[1]
    compared = seen(CHAT, chat(one), chat(other, turns=5))
    behind = len(text) - compared.same_bytes
    assert compared.repeated_bytes == pytest.approx(behind, rel=0.03)
    body = changed(lambda: chat(turns=5), drop(1, 5))
    kept = text_of(CHAT, changed(chat, drop(1, 5)))[1]
    compared = seen(CHAT, chat(), body)
    assert compared.repeated_bytes == pytest.approx(len(kept) - compared.same_bytes, rel=0.03)


def test_texts_are_shown_only_where_they_may_be() -> None:
    """Without excerpts there are a shape and a hash; two differences with other texts have other hashes."""
    bodies = [chat(f"Run req_{x}: go\n{RULES}") for x in ("8fa2Kd93ZpQ1", "Lk30sPq8vX2m", "Mm21kQw9zY7b")]
    hidden = seen(CHAT, bodies[0], bodies[1]).difference
    shown = seen(CHAT, bodies[0], bodies[1], excerpts=True).difference
    third = seen(CHAT, bodies[0], bodies[2]).difference
    assert hidden is not None
    assert shown is not None
    assert third is not None
    assert (hidden.before, hidden.after, hidden.shape) == ("", "", "aaa_Aa00aAa0aA0a")
    assert hidden.piece_hash == shown.piece_hash != third.piece_hash
    assert "Run req_8fa2Kd93ZpQ1: go" in shown.before
    assert "Run req_Lk30sPq8vX2m: go" in shown.after


def test_prompts_that_are_no_chats() -> None:
    """A completion's prompt is one text, with its own bytes."""
    bodies = [{"model": "m", "prompt": f"At {at}:\n{RULES}"} for at in ("10:31", "10:42")]
    difference = found("/v1/completions", *bodies)
    assert (difference.change, difference.message, difference.path, difference.at_bytes) == (
        Change.TIMESTAMP,
        0,
        "prompt",
        6,
    )


def parts(index: int, *texts: str) -> Edit:
    """A content of several texts, with a picture between them."""
    made: list[Body] = [{"type": "text", "text": text} for text in texts]
    made.insert(1, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    return lambda body: body["messages"][index].update(content=made)


def test_places_have_the_names_of_the_body() -> None:
    """Of several parts the one is named that changed; a byte is counted in the text that the client sent."""
    bodies = [changed(chat, parts(5, "Look:", words(3), f"It was {when} then.")) for when in ("10:31", "10:42")]
    difference = found(CHAT, *bodies)
    assert (difference.path, difference.at_bytes) == ("messages[5].content[3].text", 10)
    spaced = [
        changed(
            chat,
            lambda b, x=x: b["messages"][6]["tool_calls"][0]["function"].update(
                arguments=json.dumps({"text": 'ä\n"b"', "deep": [1, {"at": f"Ulm {x}"}]}, indent=2)
            ),
        )
        for x in ("north", "south")
    ]
    difference = found(CHAT, *spaced)
    arguments = spaced[1]["messages"][6]["tool_calls"][0]["function"]["arguments"]
    assert difference.path == "messages[6].tool_calls[0].function.arguments"
    assert difference.at_bytes == arguments.index("south")
    spaces = [
        {
            "type": "namespace",
            "name": "n",
            "tools": [
                {"type": "function", "name": name, "parameters": PARAMETERS, "description": words(1, name)}
                for name in names
            ],
        }
        for names in (("one", "two", "three"), ("one", "three", "two"))
    ]
    bodies = [changed(responses_body, lambda b, x=x: b["tools"].insert(2, x)) for x in spaces]
    assert found(RESPONSES, *bodies).path == "tools[2].tools[1]"
    billed = [
        changed(
            chat,
            lambda b, x=x, n=n: b["messages"][0].update(
                content=f"x-anthropic-billing-header: cch={n}\nNow: {x}\n{RULES}"
            ),
        )
        for n, x in enumerate(("10:31", "10:42"))
    ]
    difference = found(CHAT, *billed)
    assert difference.at_bytes == billed[1]["messages"][0]["content"].index("42")


def test_without_a_body_places_are_named_as_in_a_chat() -> None:
    """So they are where the body is of another request."""
    texts = [text_of(MESSAGES, messages_body(f"Now 10:{minute}\n{RULES}"))[1] for minute in (31, 42)]
    for body in (b"", b"[]", b"{", b'{"messages":[]}'):
        difference = compare(*texts, body=body, path=MESSAGES).difference
        assert difference is not None
        assert difference.path == "messages[0].content"


def test_another_agent_with_some_of_the_tools_is_no_change_of_them() -> None:
    """Tools came or went only where the messages behind them are the same."""
    other = {
        "model": "m",
        "tools": [tool(name) for name in NAMES[1:3]],
        "messages": [{"role": "system", "content": "You review code."}, {"role": "user", "content": "Review."}],
    }
    assert seen(CHAT, chat(), other)[:2] == (None, 0)
    assert seen(CHAT, other, chat())[:2] == (None, 0)


TEXT = st.lists(
    st.sampled_from(
        [
            b"\x1e",
            b"\x1d",
            b"\x1f",
            b"\x1euser\x1f",
            b"\x1eassistant\x1f",
            b"\x1dtools\x1f",
            b"\x1dtool_calls\x1f",
            b'[{"id":"a"}]',
            b'{"a":{"b":1}}',
            b"2026-11-20",
            b"\xff",
            b"x y",
            b'[{"function":{"name":"n","arguments":{}}}]',
            b"\n",
            b"  ",
            b"17",
            b"",
        ]
    )
    | st.binary(max_size=9),
    max_size=16,
).map(b"".join)


JSONS = st.recursive(
    st.none() | st.integers() | st.sampled_from(["user", "text", "tool_result", "tool_use", "function_call", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "input",
                    "system",
                    "tools",
                    "role",
                    "content",
                    "type",
                    "text",
                    "tool_calls",
                    "instructions",
                    "prompt",
                    "arguments",
                    "output",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode())


@given(TEXT, TEXT, TEXT, TEXT, JSONS, st.sampled_from([CHAT, MESSAGES, RESPONSES, "/generate", "/v1/completions", ""]))
@settings(max_examples=400, deadline=None)
def test_no_bytes_are_too_odd(start: bytes, before: bytes, after: bytes, end: bytes, body: bytes, path: str) -> None:
    """Whatever the texts are, the counts fit them and nothing is raised."""
    one, other = start + before + end * 4, start + after + end * 4
    compared = compare(one, other, from_bytes=len(start), body=body, path=path, excerpts=True)
    same = compared.same_bytes
    assert one[:same] == other[:same]
    assert one[same : same + 1] != other[same : same + 1] or same == len(one) == len(other)
    assert 0 <= compared.repeated_bytes <= len(other) - same
    assert compared.appended == other.startswith(one)


def test_sentences_of_many_lines_are_paired_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of which every sentence was written anew do not cost their square."""
    paired = 0

    def counted(*given: Any) -> int:
        nonlocal paired
        paired += 1
        return of_pair(*given)

    of_pair = overlap._of_pair
    monkeypatch.setattr(overlap, "_of_pair", counted)
    one, other = [
        "\n".join(". ".join(f"{which} {line} {n} is so" for n in range(200)) for line in range(300)) for which in "ab"
    ]
    overlap.repeated_lines([one.encode()], [other.encode()])
    assert 0 < paired <= overlap.PARTS_MAX + overlap.PAIRS_MAX


def test_a_deep_value_is_walked_as_far_as_it_is_worth() -> None:
    """Each level is written again on the way down: a short one is named to its end, a long one as far as that goes."""
    for size, named in ((10, 60), (200_000, 20)):
        values = []
        for leaf in ("one", "two"):
            value: Any = {"leaf": leaf, "rest": "x" * size}
            for level in range(60):
                value = {f"level{level}": value}
            values.append(json.dumps(value).encode())
        assert len(change_of(*values).steps) in range(named, named + 2)


@pytest.mark.parametrize("forged", [b"\x1dCANARY\x1f", b"\x1eCANARY\x1f"])
def test_words_of_a_prompt_name_no_place(forged: bytes) -> None:
    """A text may hold the separators of canonical bytes: what it says between them is no field's name, and no role."""
    one, other = [
        b"\x1esystem\x1f" + b"Be kind. " * 9 + b"\x1euser\x1fhi " + forged + at + RULES.encode() for at in (b"1", b"2")
    ]
    found = compare(one, other, body=b"{}", path=CHAT).difference
    assert found is not None
    assert "CANARY" not in repr(found)
