from __future__ import annotations

import json

import pytest

from router.core.insights.difference.compare import Compared
from router.core.types.cache_misses import DifferenceKind
from tests.core.insights.difference.compared import (
    CHAT,
    PARAMETERS,
    RULES,
    Body,
    Edit,
    changed,
    chat,
    drop,
    found,
    seen,
    text_of,
    tool,
    tools_moved,
    words,
)

# What a template fills in, by kind: what stood there, and what stands there now.
FILLED_BY_KIND: dict[DifferenceKind, list[tuple[str, str]]] = {
    DifferenceKind.TIMESTAMP: [
        ("Now: 2026-11-20T10:31:05Z.", "Now: 2026-11-20T10:42:17Z."),
        ("Now: 2026-11-20 10:31:05.123456+00:00", "Now: 2026-11-20 10:31:09.000001+00:00"),
        ("Today's date: 2026-11-20", "Today's date: 2026-11-21"),
        ("Today is Thursday, November 20, 2026.", "Today is Friday, November 21, 2026."),
        ("The current date is November 20, 2026", "The current date is December 1, 2026"),
        ("Date: Fri, 20 Nov 2026 10:31:00 +0000", "Date: Fri, 20 Nov 2026 11:02:59 +0000"),
        ("It is 9:59 PM here", "It is 10:01 PM here"),
        ("It is 10 AM in Ulm", "It is 11 AM in Ulm"),
        ("Current Date: 20 Nov 2026", "Current Date: 21 Nov 2026"),
        ("Current time: Fri Nov 20 10:31:05 UTC 2026", "Current time: Sat Nov 21 00:00:01 UTC 2026"),
        ("as of 11/20/2026, 10:31:05 AM", "as of 11/21/2026, 9:01:44 PM"),
        ("Stand: 20.11.2026 10:31", "Stand: 21.11.2026 08:00"),
        ("timestamp=1795343465", "timestamp=1795343999"),
        ("ts: 1795343465123", "ts: 1795346465001"),
        ("epoch 1795343465.123", "epoch 1795399465.9"),
        ("Last login: 5 minutes ago", "Last login: 2 hours ago"),
        ("Today is Monday.", "Today is Tuesday."),
        ("20261120T103105Z", "20261120T113105Z"),
        ("[10:31:05] ready", "[10:31:09] ready"),
        ("Good morning, it is the 20th of November 2026", "Good morning, it is the 21st of November 2026"),
        ("Hello (2026-11-20).", "Hello."),
        ("see log_2026-11-20.txt", "see log_2026-11-21.txt"),
        ("Month: November 2026", "Month: December 2026"),
        ("The year is 2026", "The year is 2027"),
        ("now=2026-11-20T10:31:05.123+02:00", "now=2026-11-20T10:31:05.987+02:00"),
        ("20 November 2026, 22:31 (UTC+1)", "20 November 2026, 23:01 (UTC+1)"),
        ("Thu Nov 20 2026 10:31:05 GMT+0100", "Thu Nov 20 2026 11:00:00 GMT+0100"),
        ("Zeit: 10.31 Uhr, 20. Nov 2026", "Zeit: 10.31 Uhr, 21. Nov 2026"),
        ("elapsed since start: 00:10:31", "elapsed since start: 00:12:05"),
        ("今天是2026年11月20日。", "今天是2026年11月21日。"),
        ('{"month": 11, "day": 20}', '{"month": 11, "day": 21}'),
        ("at 20-Nov-2026 10:31", "at 21-Nov-2026 09:00"),
        ("(10:31:05.123Z)", "(10:31:06.001Z)"),
    ],
    DifferenceKind.IDENTIFIER: [
        ("Session 3f2b8a6e-9d1c-4f7e-8b2a-1c3d5e7f9a0b", "Session 9c1d7e2f-0a3b-4c5d-8e6f-7a8b9c0d1e2f"),
        ("request_id: req_8fa2Kd93ZpQ1", "request_id: req_Lk30sPq8vX2m"),
        ("trace=4bf92f3577b34da6a3ce929d0e0e4736", "trace=a0af7651916cd43dd8448eb211c80319"),
        ("Run 01J9ZK3V8Q4M5N6P7R8S9T0VWX", "Run 01J9ZKB7T2C3D4E5F6G7H8J9KA"),
        ("commit a1b2c3d", "commit f00dba5"),
        ("cwd: /tmp/tmpk3j9x_2a/work", "cwd: /tmp/tmp8sd71qpz/work"),
        ("user_id=48213397", "user_id=90117254"),
        ("nonce kJhQwErTyUiOpAsD", "nonce ZxCvBnMlKjHgFdSa"),
        ("doc 65f1a2b3c4d5e6f7a8b9c0d1", "doc 65f1a2b3c4d5e6f7a8b9c0d9"),
        ("session: V1StGXR8_Z5jdHi6B-myT", "session: k9QpLm2x_Ab3Cd-Ef4GhJ"),
        ("X-Request-Id: 8f14e45f-ceea-467a", "X-Request-Id: c9f0f895-fb98-4b91"),
        ("build deadbeef", "build 0badf00d"),
        ("host 10.12.0.4", "host 10.98.3.17"),
        ("pod web-7d9f8b6c5-x2x4k", "pod web-7d9f8b6c5-9qq7z"),
        (
            "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "traceparent: 00-a0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
        ),
        ("ticket ABC-12345", "ticket ABC-67890"),
        ("order 48213", "order 90117"),
    ],
    DifferenceKind.COUNTER: [
        ("used 1999 tokens", "used 2044 tokens"),
        ("Context left until auto-compact: 45%", "Context left until auto-compact: 9%"),
        ("retry 2/5", "retry 3/5"),
        ("turn-17-of-40", "turn-18-of-40"),
        ("this is the second attempt", "this is the third attempt"),
        ("unread: 9", "unread: 12"),
        ("step=017;", "step=018;"),
        ("Elapsed: 3m 20s", "Elapsed: 4m 05s"),
        ("turn 17 of 40", "turn 18 of 40"),
        ("step=9", "step=10"),
        ("You have 3 tool calls left", "You have 2 tool calls left"),
        ("You have 2 tool calls left", "You have 1 tool call left"),
        ("<budget>183220 tokens left</budget>", "<budget>179004 tokens left</budget>"),
        ("Token usage: 12,345/200,000", "Token usage: 13,001/200,000"),
        ("You have three attempts left", "You have two attempts left"),
        ("message #17", "message #19"),
        ("Spent so far: $0.1234", "Spent so far: $0.1250"),
        ("iteration_7_of_run", "iteration_8_of_run"),
    ],
    DifferenceKind.WHITESPACE: [
        ("Be brief. ", "Be brief."),
        ("Be brief.\n\nBe kind.", "Be brief.\nBe kind."),
        ("a:\n  b\n  c", "a:\n    b\n    c"),
        ("a\r\nb\r\nc", "a\nb\nc"),
        ("Be\u00a0brief", "Be brief"),
    ],
    DifferenceKind.OTHER: [
        ("Answer in a friendly tone.", "Answer in a formal manner."),
        ("User likes Python.", "User likes Rust and Ulm."),
    ],
    DifferenceKind.KEY_ORDER: [
        ('Config: {"a": 1, "b": {"c": 2}}', 'Config: {"b": {"c": 2}, "a": 1}'),
    ],
    DifferenceKind.REORDERED_CONTEXT: [
        ("Files: alpha.py, beta.py, gamma.py", "Files: beta.py, alpha.py, gamma.py"),
    ],
}
FILLED = [(change, *texts) for change, pairs in FILLED_BY_KIND.items() for texts in pairs]


@pytest.mark.parametrize(("change", "before", "after"), FILLED)
@pytest.mark.parametrize("place", ["top", "end"])
def test_what_a_template_fills_in(change: DifferenceKind, before: str, after: str, place: str) -> None:
    """The kind of a change in a system prompt is told, at its top and at its end, and so is its first byte."""
    texts = [f"{piece}\n{RULES}" if place == "top" else f"{RULES}{piece}" for piece in (before, after)]
    difference = found(CHAT, chat(texts[0]), chat(texts[1]))
    assert (difference.change, difference.message, difference.role) == (change, 0, "system")
    assert difference.path == "messages[0].content"
    one, other = texts[0].encode(), texts[1].encode()
    assert one[: difference.at_bytes] == other[: difference.at_bytes]
    assert one[difference.at_bytes :][:1] != other[difference.at_bytes :][:1]


@pytest.mark.parametrize(("change", "before", "after"), FILLED)
def test_the_same_in_a_message(change: DifferenceKind, before: str, after: str) -> None:
    """In a message of a user the same kinds are told; words there are an edited history."""
    bodies = [
        changed(chat, lambda b, x=x: b["messages"][5].update(content=f"{words(4)}\n{x}\n{words(4, 'it')}"))
        for x in (before, after)
    ]
    difference = found(CHAT, *bodies)
    assert difference.change is (DifferenceKind.EDITED_HISTORY if change is DifferenceKind.OTHER else change)
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


CHATS: list[tuple[DifferenceKind, int, str, int | None, Edit]] = [
    (DifferenceKind.TOOL_ORDER, -1, "tools[1]", 0, tools_moved),
    (DifferenceKind.TOOL_ORDER, -1, "tools[0]", 0, lambda b: b["tools"].reverse()),
    (DifferenceKind.TOOL_ADDED, -1, "tools[5]", 0, lambda b: b["tools"].append(tool("mcp__new"))),
    (DifferenceKind.TOOL_ADDED, -1, "tools[2]", 0, lambda b: b["tools"].insert(2, tool("mcp__new"))),
    (DifferenceKind.TOOL_REMOVED, -1, "tools[4]", 0, lambda b: b["tools"].pop()),
    (DifferenceKind.TOOL_REMOVED, -1, "tools[1]", 0, lambda b: b["tools"].pop(1)),
    (DifferenceKind.TOOL_REMOVED, -1, "tools[0]", 0, lambda b: b.pop("tools")),
    (
        DifferenceKind.KEY_ORDER,
        -1,
        "tools[2].function.parameters",
        None,
        lambda b: b["tools"][2]["function"].update(parameters=dict(reversed(PARAMETERS.items()))),
    ),
    (
        DifferenceKind.KEY_ORDER,
        -1,
        "tools[3].function.parameters.required",
        None,
        lambda b: b["tools"][3]["function"].update(parameters=PARAMETERS | {"required": ["limit", "path"]}),
    ),
    (
        DifferenceKind.OTHER,
        -1,
        "tools[1].function.description",
        0,
        lambda b: b["tools"][1]["function"].update(description="Puts bytes in a file."),
    ),
    (
        DifferenceKind.TIMESTAMP,
        -1,
        "tools[1].function.description",
        15,
        lambda b: b["tools"][1]["function"].update(description="Does write_file (2026-11-20)."),
    ),
    (DifferenceKind.OTHER, -1, "chat_template_kwargs", 0, lambda b: b.update(chat_template_kwargs={"date": "today"})),
    (DifferenceKind.TRUNCATED_HISTORY, 1, "messages[1].content", None, drop(1, 5)),
    (DifferenceKind.TRUNCATED_HISTORY, 5, "messages[5].content", None, drop(5, 13)),
    (DifferenceKind.TRUNCATED_HISTORY, 1, "messages[1]", 0, drop(1, 3)),
    (DifferenceKind.TRUNCATED_HISTORY, 1, "messages[1].content", 0, summed_up),
    (DifferenceKind.EDITED_HISTORY, 3, "messages[3].content", 0, said(3, "[Old tool result content cleared]")),
    (DifferenceKind.EDITED_HISTORY, 4, "messages[4].content", 0, said(4, "It was something else.")),
    (
        DifferenceKind.EDITED_HISTORY,
        5,
        "messages[5]",
        0,
        lambda b: b["messages"].insert(5, {"role": "system", "content": "<reminder>Be brief.</reminder>"}),
    ),
    (DifferenceKind.KEY_ORDER, 6, "messages[6].tool_calls[0].function.arguments", 2, call_keys),
    (DifferenceKind.EDITED_HISTORY, 6, "messages[6].tool_calls[0].function.arguments", 15, other_call),
    (
        DifferenceKind.WHITESPACE,
        4,
        "messages[4].content",
        None,
        lambda b: b["messages"][4].update(content=b["messages"][4]["content"].replace("\n", "\n\n")),
    ),
    (
        DifferenceKind.REORDERED_CONTEXT,
        3,
        "messages[3].content",
        None,
        lambda b: b["messages"][3].update(content="\n".join(reversed(b["messages"][3]["content"].split("\n")))),
    ),
]


@pytest.mark.parametrize(("change", "message", "path", "at", "edit"), CHATS)
@pytest.mark.parametrize("turns", [4, 5])
def test_chats(change: DifferenceKind, message: int, path: str, at: int | None, edit: Edit, turns: int) -> None:
    """What happens to tools and messages of a chat is told by kind and place, whether or not it goes on behind."""
    difference = found(CHAT, chat(), changed(lambda: chat(turns=turns), edit))
    assert (difference.change, difference.message, difference.path) == (change, message, path)
    assert at is None or abs(difference.at_bytes - at) <= 1
