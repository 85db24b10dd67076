"""What clients say of their prompts besides asking: where a template ends, and which step of an agent this is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.dialects import PATHS
from router.core.dialects.tenant_isolation import CHAT, MESSAGES, RESPONSES
from router.core.prompts.incremental_parse import BodyPrefixCache
from router.core.prompts.json_fields import METADATA_BYTES_MAX, step_of

MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": {"name": name}} for name in "ab"],
    MESSAGES: [{"name": name, "input_schema": {"type": "object"}} for name in "ab"],
}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    RESPONSES: {"input": "x"},
}


def text(said: str, *, marked: bool = False) -> dict[str, Any]:
    """A content part."""
    return {"type": "text", "text": said} | (MARK if marked else {})


def user(*parts: Any) -> dict[str, Any]:
    """A message."""
    return {"role": "user", "content": list(parts)}


def before_hint(path: str, body: dict[str, Any], *, keep: bool = False) -> bytes | None:
    """Canonical bytes before the hint; None without one."""
    ask = PATHS[path].parse(path, json.dumps({"model": "m", "max_tokens": 1} | body).encode(), keep=keep)
    assert ask.prompt is not None
    assert 0 <= ask.hint_bytes < ask.prompt.first_user_end
    return ask.prompt.text[: ask.hint_bytes] if ask.hint_bytes else None


FIRST = user(text("doc", marked=True), text("question", marked=True))
LATER = [{"role": "assistant", "content": "yes"}, user(text("more", marked=True), text("and more"))]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_the_last_breakpoint_of_the_beginning_counts(path: str, keep: bool) -> None:
    """Of those within tools, system prompt and first user message: not the one that ends the first user message, which
    is the conversation's, nor any later one; without one there is no hint."""
    tools = [*TOOLS[path][:-1], TOOLS[path][-1] | MARK]
    plain = user(text("doc"), text("question", marked=True))
    assert before_hint(path, {"messages": [plain, *LATER]}, keep=keep) is None
    assert before_hint(path, {"messages": [FIRST, *LATER]}, keep=keep) == b"\x1euser\x1fdoc"
    found = before_hint(path, {"messages": [plain, *LATER], "tools": tools}, keep=keep)
    assert found is not None
    assert found.startswith(b"\x1dtools\x1f[")
    assert found.endswith(b"]")
    found = before_hint(path, {"messages": [FIRST], "tools": tools}, keep=keep)
    assert found is not None
    assert found.endswith(b"]\x1euser\x1fdoc")
    null = user(text("doc") | {"cache_control": None}, text("question"))
    assert before_hint(path, {"messages": [null]}, keep=keep) is None


@pytest.mark.parametrize("keep", [False, True])
def test_a_system_prompt_may_be_marked_within(keep: bool) -> None:
    """Through either API the hint is behind the part that is marked, what changes with every request left out."""
    parts = [text("x-anthropic-billing-header: 1"), text("Be "), text("terse.", marked=True), text("Today: Monday")]
    messages = [{"role": "user", "content": "x"}]
    found = before_hint(MESSAGES, {"system": parts, "messages": messages}, keep=keep)
    assert found == b"\x1esystem\x1fBe terse."
    found = before_hint(CHAT, {"messages": [{"role": "system", "content": parts}, *messages]}, keep=keep)
    assert found == b"\x1esystem\x1fBe \nterse."
    system = {"role": "system", "content": "Be terse.", **MARK}
    assert before_hint(CHAT, {"messages": [system, *messages]}, keep=keep) == b"\x1esystem\x1fBe terse."
    assert before_hint(MESSAGES, {"system": "Be terse.", "messages": messages}, keep=keep) is None
    assert before_hint(CHAT, {"messages": [system]}, keep=keep) is None


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("marked", [(), ("tools",), ("system",), ("first",), ("tools", "system", "first")])
def test_the_hint_is_the_same_for_a_prompt_that_was_begun_before(path: str, marked: tuple[str, ...]) -> None:
    """Turn for turn, and however much of the prompt is read anew; long tools and a long system prompt included."""
    seen = BodyPrefixCache(bytes_max=1 << 20, seed=7, cell_bytes=64)
    tools = [{**tool, "description": "d" * 9_000} for tool in TOOLS[path]]
    tools[-1] |= MARK if "tools" in marked else {}
    system = [text("s" * 9_000, marked="system" in marked), text("Monday")]
    said: list[Any] = [user(text("doc", marked="first" in marked), text("question"))]
    hints, joined = set(), 0
    for turn in range(6):
        fields: dict[str, Any] = {"model": "m", "max_tokens": 1, "tools": tools}
        head = {"system": system} if path == MESSAGES else {}
        messages = said if path == MESSAGES else [{"role": "system", "content": system}, *said]
        body = json.dumps(fields | head | {"messages": messages}).encode()
        ask = PATHS[path].parse(path, body, keep=False, seen=seen)
        assert ask.prompt is not None
        joined += ask.prompt.joint is not None
        hints |= {ask.hint_bytes, PATHS[path].parse(path, body, keep=False).hint_bytes}
        said += [{"role": "assistant", "content": f"answer {turn} " * 40}, user(text("more", marked=True))]
    assert joined > 2
    assert len(hints) == 1
    assert (hints == {0}) == (not marked)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_every_dialect_has_a_session_and_metadata(path: str, keep: bool) -> None:
    """`prompt_cache_key` names the session, and metadata come along as they are, unless they are absurdly long."""
    metadata = {"agent_step": "plan", "user_id": "u"}
    body = ASKED[path] | {"model": "m", "prompt_cache_key": "k", "metadata": metadata}
    ask = PATHS[path].parse(path, json.dumps(body).encode(), keep=keep)
    assert ask.session == "k"
    assert json.loads(ask.metadata) == metadata
    assert step_of(ask.metadata, "agent_step") == "plan"
    body["metadata"] = {"agent_step": "x" * METADATA_BYTES_MAX}
    assert PATHS[path].parse(path, json.dumps(body).encode(), keep=keep).metadata == b""


@pytest.mark.parametrize("metadata", ["", "null", "[]", '"agent_step"', '{"other":"x"}', '{"agent_step":3}', "{", "\\"])
def test_a_step_that_is_not_said_is_none(metadata: str) -> None:
    """Whatever stands where metadata should."""
    assert step_of(metadata.encode(), "agent_step") == ""
    assert step_of(b'{"":"x"}', "") == ""
