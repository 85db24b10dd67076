"""The table of agents' clients, against what these clients send (`agents/*.json`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from router.core.dialects import PATHS
from router.core.prompts import agent_headers
from router.core.prompts.agent_headers import BODIES, CLIENTS, HEADERS, ids_of, label_of, names_of
from router.core.types.requests import AgentIds

CAPTURES = Path(__file__).parent / "agents"
ABSENT = Raw(b"")
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hello"},
    "/v1/completions": {"prompt": "Hello"},
}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def captured() -> Iterator[Any]:
    """Every request of every file, with a name for the test."""
    for file in sorted(CAPTURES.glob("*.json")):
        for number, request in enumerate(json.loads(file.read_text())["requests"]):
            yield pytest.param(request, id=f"{file.stem}-{number}")


def read(request: dict[str, Any], *, headers: bool = True) -> AgentIds | None:
    """The ids of a request as the frontends read them, its headers left out if a proxy in between drops them."""
    path = request["path"]
    body = json.dumps({"model": "m", **PROMPTS.get(path, CHAT), **request["body"]}).encode()
    fields = {name.lower().encode(): value.encode() for name, value in request["headers"]} if headers else {}
    return ids_of(fields, PATHS[path].parse(path, body).names)


def expected(row: dict[str, Any] | None) -> AgentIds | None:
    """What the file says is meant."""
    if row is None:
        return None
    names = (row[name].encode() for name in ("conversation", "parent", "session"))
    return AgentIds(row["client"], *names, row.get("final", False))


@pytest.mark.parametrize("request_", [*captured()])
def test_sessions_parents_and_ends_are_those_of_the_client(request_: dict[str, Any]) -> None:
    """Of every captured request the conversation, what started it, its session and whether it ends are known."""
    assert read(request_) == expected(request_["expect"])


@pytest.mark.parametrize("file", sorted(CAPTURES.glob("*.json")), ids=lambda file: file.stem)
def test_a_sub_agents_parent_is_a_conversation_that_was_seen(file: Path) -> None:
    """A parent's name is the very name under which its own requests came, or nothing could be found by it."""
    found = [ids for request in json.loads(file.read_text())["requests"] if (ids := read(request)) is not None]
    seen = {ids.conversation for ids in found}
    parents = {ids.parent for ids in found if ids.parent}
    recorded = json.loads(file.read_text())["how"].startswith("recorded")
    assert not recorded or (parents and parents <= seen)


def test_codex_is_known_by_its_body_where_headers_are_dropped() -> None:
    """A proxy that passes only headers it knows leaves the same ids in `client_metadata`; Claude Code's body names its
    session, and not the sub-agent."""
    for request in json.loads((CAPTURES / "codex.json").read_text())["requests"]:
        assert read(request, headers=False) == read(request)
    of_claude = json.loads((CAPTURES / "claude-code.json").read_text())["requests"]
    names = {ids.conversation for request in of_claude if (ids := read(request, headers=False)) is not None}
    assert names == {of_claude[0]["expect"]["session"].encode()}


def test_older_names_of_a_session() -> None:
    """Claude Code before its JSON, Codex before it had threads, and Codex's own JSON where it alone is left."""
    user = Raw(b'{"user_id":"user_ab12_account__session_5f-77"}')
    found = ids_of({}, names_of(ABSENT, ABSENT, user, ABSENT))
    assert found == AgentIds("claude-code", b"5f-77", b"", b"5f-77")
    assert ids_of({b"session_id": b"s"}, None) == AgentIds("codex", b"s", b"", b"s")
    turn = b'{"session_id":"s","thread_id":"t","parent_thread_id":"s"}'
    assert ids_of({agent_headers.TURN: turn}, None) == AgentIds("codex", b"t", b"s", b"s")


def test_headers_come_before_bodies_and_a_gateway_before_the_agent() -> None:
    """Whoever stands nearer to the router knows better: headers may be added on the way, bodies are the client's."""
    names = names_of(ABSENT, ABSENT, ABSENT, Raw(b'"body"'))
    both = {b"x-claude-code-session-id": b"agent", b"x-dynamo-session-id": b"gateway"}
    assert ids_of(both, names) == AgentIds("dynamo", b"gateway", b"", b"gateway")
    assert ids_of({}, names) == AgentIds("vllm", b"body", b"", b"body")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"x-claude-code-agent-id": b"a"},
        {b"x-parent-session-id": b"p"},
        {b"x-dynamo-session-final": b"true"},
        {b"x-claude-code-session-id": b"  "},
        {b"x-correlation-id": b"of-one-request"},
        {agent_headers.TURN: b"{"},
        {agent_headers.TURN: b'{"thread_id":7}'},
    ],
)
def test_half_an_identity_is_none(headers: dict[bytes, bytes]) -> None:
    """Without a name of the conversation nothing is made up."""
    assert ids_of(headers, None) is None


def test_who_is_its_own_parent_has_none() -> None:
    """A client that names itself as what started it is at the root."""
    ids = ids_of({b"x-dynamo-session-id": b"a", b"x-dynamo-parent-session-id": b"a"}, None)
    assert ids == AgentIds("dynamo", b"a", b"", b"a")
    ids = ids_of({b"x-claude-code-session-id": b"a", b"x-claude-code-agent-id": b"a"}, None)
    assert ids == AgentIds("claude-code", b"a", b"", b"a")


def test_agents_of_one_name_in_two_sessions_are_two() -> None:
    """Names of agents in a team repeat from session to session."""
    one, two = (
        ids_of({b"x-claude-code-session-id": session, b"x-claude-code-agent-id": b"reviewer@team"}, None)
        for session in (b"s1", b"s2")
    )
    assert one is not None
    assert two is not None
    assert one.conversation != two.conversation
    assert (one.parent, two.parent) == (b"s1", b"s2")


def test_labels_are_few() -> None:
    """Metrics have a label for each client and its sub-agents, whatever names clients choose."""
    labels = {label_of(AgentIds(client, b"x", parent)) for client in CLIENTS for parent in (b"", b"p")}
    assert len(labels) == 2 * len(CLIENTS) == 12
    assert label_of(None) == label_of(AgentIds("", b"x", b"p")) == ""


names = st.sampled_from([name for row in (*HEADERS, *BODIES) for name in (*row.conversation, *row.parent, row.agent)])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
raws = json_values.map(lambda value: Raw(json.dumps(value).encode())) | st.binary(max_size=20).map(Raw)


@given(st.dictionaries(names | st.just(b"user-agent"), st.binary(max_size=40)), st.tuples(raws, raws, raws, raws))
def test_whatever_clients_send_is_read(headers: dict[bytes, bytes], fields: tuple[Raw, Raw, Raw, Raw]) -> None:
    """Any bytes in any of the headers and fields give ids or none, and never an error; ids that are given are whole."""
    ids = ids_of(headers, names_of(*fields))
    assert ids is None or (ids.conversation and ids.session and ids.parent != ids.conversation)


def test_the_page_has_every_name() -> None:
    """Whoever runs such a client finds on the page what is read of it."""
    page = (Path(__file__).parents[3] / "docs/guide/agents.md").read_text()
    for row in (*HEADERS, *BODIES):
        for name in (*row.conversation, *row.parent, *row.session, row.agent):
            told = (
                name.decode()
                .replace(f"{agent_headers.TURN.decode()}.", "")
                .replace("metadata.user_id.session_id", "session_id")
            )
            assert not told or f"`{told}`" in page, name
        assert row.client in page
    assert all(f"`{name.decode()}" in page for name in agent_headers.FINAL)


@pytest.mark.parametrize("field", range(4))
def test_what_is_large_is_not_looked_into(field: int) -> None:
    """The work for a request is bounded, whatever stands in any of the fields."""
    names = {"thread_id": "t", "user_id": "u_session_s", "agent_context": {"session_id": "s"}}
    for more, found in (("", True), ("x" * 20_000, False)):
        fields = [ABSENT] * 4
        fields[field] = Raw(json.dumps(f"s{more}" if field == 3 else {**names, "more": more}).encode())
        assert (names_of(*fields) is not None) == found
