"""Differences of messages, responses and passages, and the names of their places."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.insights.difference import text_overlap
from router.core.insights.difference.compare import compare
from router.core.insights.difference.json_changes import change_of
from router.core.types.cache_misses import DifferenceKind
from tests.core.insights.difference.compared import (
    CHAT,
    MESSAGES,
    NAMES,
    PARAMETERS,
    RESPONSES,
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
from tests.support.examples import examples


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


def block(message: int, part: int, **fields: Any) -> Edit:
    """Other fields of a block."""
    return lambda body: body["messages"][message]["content"][part].update(fields)


MESSAGE_EDITS: list[tuple[DifferenceKind, int, str, Edit]] = [
    (DifferenceKind.TIMESTAMP, 0, "system[1].text", lambda b: b["system"][1].update(text="Now: 2026-11-21.")),
    (DifferenceKind.OTHER, -1, "tools[1].description", lambda b: b["tools"][1].update(description="Something.")),
    (
        DifferenceKind.KEY_ORDER,
        -1,
        "tools[1].input_schema",
        lambda b: b["tools"][1].update(input_schema=dict(reversed(PARAMETERS.items()))),
    ),
    (DifferenceKind.TOOL_ORDER, -1, "tools[1]", tools_moved),
    (DifferenceKind.EDITED_HISTORY, 1, "messages[0].content[0].text", block(0, 0, text="Well?")),
    (DifferenceKind.KEY_ORDER, 2, "messages[1].content[1].input", block(1, 1, input={"why": "to see", "path": "/a/0"})),
    (
        DifferenceKind.EDITED_HISTORY,
        2,
        "messages[1].content[1].input.path",
        block(1, 1, input={"path": "/b", "why": "to see"}),
    ),
    (DifferenceKind.EDITED_HISTORY, 3, "messages[2].content[0].content", block(2, 0, content="[cleared]")),
    (DifferenceKind.EDITED_HISTORY, 4, "messages[2].content[1].text", block(2, 1, text="Well?")),
    (DifferenceKind.TRUNCATED_HISTORY, 1, "messages[0].content[0]", drop(0, 2)),
]


@pytest.mark.parametrize(("change", "message", "path", "edit"), MESSAGE_EDITS)
def test_messages(change: DifferenceKind, message: int, path: str, edit: Edit) -> None:
    """In Anthropic's dialect places have the names of that request's own JSON."""
    system = [{"type": "text", "text": RULES}, {"type": "text", "text": "Now: 2026-11-20."}]

    def make() -> Body:
        return messages_body(json.loads(json.dumps(system)))

    difference = found(MESSAGES, make(), changed(make, edit))
    assert (difference.change, difference.message, difference.path) == (change, message, path)


RESPONSE_EDITS: list[tuple[DifferenceKind, int, str, Edit]] = [
    (DifferenceKind.OTHER, 0, "instructions", lambda b: b.update(instructions=f"You are a poet.\n{RULES}")),
    (
        DifferenceKind.EDITED_HISTORY,
        1,
        "input[0].content[0].text",
        lambda b: b["input"][0]["content"][0].update(text="Well?"),
    ),
    (
        DifferenceKind.EDITED_HISTORY,
        2,
        "input[1].summary[0].text",
        lambda b: b["input"][1]["summary"][0].update(text="Well."),
    ),
    (
        DifferenceKind.KEY_ORDER,
        2,
        "input[2].arguments",
        lambda b: b["input"][2].update(arguments='{"why":"see","path":"/a"}'),
    ),
    (DifferenceKind.EDITED_HISTORY, 3, "input[3].output", lambda b: b["input"][3].update(output="[cleared]")),
    (DifferenceKind.TOOL_REMOVED, -1, "tools[2]", lambda b: b["tools"].pop(2)),
    (DifferenceKind.OTHER, -1, "tools[3].description", lambda b: b["tools"][3].update(description="Does.")),
]


@pytest.mark.parametrize(("change", "message", "path", "edit"), RESPONSE_EDITS)
def test_responses(change: DifferenceKind, message: int, path: str, edit: Edit) -> None:
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
    assert difference.change is DifferenceKind.REORDERED_CONTEXT
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
        DifferenceKind.TIMESTAMP,
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


MARKS = (b"\x1e", b"\x1d", b"\x1f", b"\x1euser\x1f", b"\x1eassistant\x1f", b"\x1dtools\x1f", b"\x1dtool_calls\x1f")
VALUES = (b'[{"id":"a"}]', b'{"a":{"b":1}}', b'[{"function":{"name":"n","arguments":{}}}]', b"2026-11-20")
TEXT = st.lists(
    st.sampled_from([*MARKS, *VALUES, b"17", b"x y", b"\xff", b"\n", b"  ", b""]) | st.binary(max_size=9), max_size=16
).map(b"".join)

FIELDS = (
    "messages", "input", "system", "tools", "role", "content", "type", "text", "tool_calls", "instructions", "prompt",
    "arguments", "output",
)  # fmt: skip
JSONS = st.recursive(
    st.none() | st.integers() | st.sampled_from(["user", "text", "tool_result", "tool_use", "function_call", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode())


@given(TEXT, TEXT, TEXT, TEXT, JSONS, st.sampled_from([CHAT, MESSAGES, RESPONSES, "/generate", "/v1/completions", ""]))
@settings(max_examples=examples(400), deadline=None)
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

    of_pair = text_overlap._count_common_bytes
    monkeypatch.setattr(text_overlap, "_count_common_bytes", counted)
    one, other = [
        "\n".join(". ".join(f"{which} {line} {n} is so" for n in range(200)) for line in range(300)) for which in "ab"
    ]
    text_overlap.repeated_lines([one.encode()], [other.encode()])
    assert 0 < paired <= text_overlap.PARTS_MAX + text_overlap.PAIRS_MAX


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
