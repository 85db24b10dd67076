"""Client identities: the one table of headers and body fields by which known agent clients name a conversation.

The table also names the parent of a sub-agent and the end of a session. It works without configuration.

    conversation   one chain of prompts, of an agent or of a sub-agent
    parent         the conversation that started it; a sub-agent may share its prefix
    final          the client states that its conversation is over

Names and values were recorded from the clients themselves if they could be run, and read in their sources otherwise;
`tests/core/prompts/agents` has both. Rows are tried from first to last, headers before body fields. The first row with
a conversation in the request decides, so a gateway's own header takes precedence over the headers that an agent sends
by itself. `x-correlation-id` names a session in AIPerf's requests only. In requests of other clients it names one
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import Raw

from router.core.prompts.json_fields import METADATA_BYTES_MAX, UNREADABLE
from router.core.types.requests import AgentIds

SESSION = b"x-session-id"  # a hint that any client may send; also OpenCode's header
FINAL = (b"x-dynamo-session-final", b"nvext.agent_context.session_final")
TRUE = frozenset((b"true", b"1", b"yes", b"on"))
TURN = b"x-codex-turn-metadata"
_SPLIT = b"/"  # between the name of a session and the name of an agent in it
_USER_SESSION = b"_session_"  # precedes the session in the user id of older Claude Code


class AgentRow(NamedTuple):
    """Names under which one client sends its ids. The first name that is present counts. A name with a field after a
    dot is that field of a JSON object: of a header's value, or of the body."""

    client: str
    conversation: tuple[bytes, ...]
    parent: tuple[bytes, ...] = ()
    agent: bytes = b""  # an agent within that conversation, which is its parent unless `parent` names another
    session: tuple[bytes, ...] = ()  # names of the id that all conversations of a session share
    user_agent: bytes = b""  # the row applies to clients with this text in their User-Agent


HEADERS: tuple[AgentRow, ...] = (
    AgentRow("dynamo", (b"x-dynamo-session-id",), (b"x-dynamo-parent-session-id",)),
    AgentRow(
        "claude-code", (b"x-claude-code-session-id",), (b"x-claude-code-parent-agent-id",), b"x-claude-code-agent-id"
    ),
    AgentRow(
        "codex",
        (b"thread-id", TURN + b".thread_id", b"session-id", b"session_id"),
        (b"x-codex-parent-thread-id", TURN + b".parent_thread_id"),
        session=(b"session-id", b"session_id", TURN + b".session_id"),
    ),
    AgentRow("opencode", (b"x-session-affinity",), (b"x-parent-session-id",)),
    AgentRow("", (SESSION,), (b"x-parent-session-id",)),
    AgentRow("aiperf", (b"x-correlation-id",), user_agent=b"aiperf/"),
)
"""Headers, by their lower-case names."""
BODIES: tuple[AgentRow, ...] = (
    AgentRow(
        "dynamo",
        (b"nvext.agent_context.trajectory_id", b"nvext.agent_context.session_id"),
        (b"nvext.agent_context.parent_trajectory_id", b"nvext.agent_context.parent_session_id"),
        session=(b"nvext.agent_context.session_id",),
    ),
    AgentRow(
        "codex",
        (b"client_metadata.thread_id", b"client_metadata.session_id"),
        (b"client_metadata.x-codex-parent-thread-id",),
        session=(b"client_metadata.session_id",),
    ),
    AgentRow("claude-code", (b"metadata.user_id.session_id",)),
    AgentRow("vllm", (b"session_id",)),
)
"""Body fields, by their paths."""
CLIENTS = tuple(dict.fromkeys(row.client for row in (*HEADERS, *BODIES) if row.client))
"""Clients in the table. They label metrics."""

_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_text = msgspec.json.Decoder(str | bool).decode


def ids_of(headers: Mapping[bytes, bytes], names: Mapping[bytes, bytes] | None) -> AgentIds | None:
    """Return the ids in a request's headers, or else those in the body fields that `names_of` found. None if the
    request has no ids."""
    found = _match_rows(HEADERS, headers)
    if found is None and names is not None:
        found = _match_rows(BODIES, names)
    if found is not None:
        final = headers.get(FINAL[0]) or (names or {}).get(FINAL[1])
        found.final = final is not None and final.strip().lower() in TRUE
    return found


def names_of(nvext: Raw, client_metadata: Raw, metadata: Raw, session_id: Raw) -> dict[bytes, bytes] | None:
    """Return the body fields that BODIES uses, by their paths, as text. None if the body has no such field. A field
    with more than METADATA_BYTES_MAX bytes is not parsed."""
    if not (nvext or client_metadata or metadata or session_id):
        return None
    found: dict[bytes, bytes] = {}
    _put(found, b"session_id", session_id)
    _put_all(found, b"client_metadata", client_metadata)
    for name, raw in _object(nvext).items():
        if name == "agent_context":
            _put_all(found, b"nvext.agent_context", raw)
    user = _text(_object(metadata).get("user_id"))
    if user:
        session = user.rpartition(_USER_SESSION)[2] if _USER_SESSION in user else _inside(user, "session_id")
        if session:
            found[b"metadata.user_id.session_id"] = session
    return found or None


def label_of(ids: AgentIds | None) -> str:
    """Return the kind of agent for metrics and pages: its client, and "/sub" for a sub-agent. "" if the client is
    unknown."""
    if ids is None or not ids.client:
        return ""
    return f"{ids.client}/sub" if ids.parent else ids.client


def _match_rows(rows: tuple[AgentRow, ...], given: Mapping[bytes, bytes]) -> AgentIds | None:
    for row in rows:
        name = _first(row.conversation, given)
        if name and (not row.user_agent or row.user_agent in given.get(b"user-agent", b"").lower()):
            return _build_ids(row, name, given)
    return None


def _build_ids(row: AgentRow, name: bytes, given: Mapping[bytes, bytes]) -> AgentIds:
    session, conversation = _first(row.session, given) or name, name
    parent = _first(row.parent, given)
    if row.agent:
        agent = given.get(row.agent, b"").strip()
        within = bool(agent) and agent != name
        conversation = name + _SPLIT + agent if within else name
        parent = (name + _SPLIT + parent if parent else name) if within else b""
    return AgentIds(row.client, conversation, b"" if parent == conversation else parent, session)


def _first(names: tuple[bytes, ...], given: Mapping[bytes, bytes]) -> bytes:
    for name in names:
        value = given.get(name)
        if value is None and name.startswith(TURN):
            value = _inside(given.get(TURN, b""), name[len(TURN) + 1 :].decode())
        if value and (value := value.strip()):
            return value
    return b""


def _put_all(found: dict[bytes, bytes], path: bytes, raw: Raw) -> None:
    for name, value in _object(raw).items():
        _put(found, b"%b.%b" % (path, name.encode(errors="surrogatepass")), value)


def _put(found: dict[bytes, bytes], path: bytes, raw: Raw) -> None:
    if path in _ASKED and (text := _text(raw)):
        found[path] = text


_ASKED = frozenset((*(name for row in BODIES for name in (*row.conversation, *row.parent, *row.session)), FINAL[1]))


def _inside(value: bytes, name: str) -> bytes:
    """Return a text field of a JSON object. Empty if the field is absent or not text."""
    return _text(_object(Raw(value)).get(name)) if value.startswith(b"{") else b""


def _object(raw: Raw) -> dict[str, Raw]:
    if not raw or len(raw) > METADATA_BYTES_MAX:
        return {}
    try:
        return _decode_object(raw)
    except UNREADABLE:
        return {}


def _text(raw: Raw | None) -> bytes:
    if not raw or len(raw) > METADATA_BYTES_MAX:
        return b""
    try:
        value = _decode_text(raw)
    except UNREADABLE:
        return b""
    text = value if isinstance(value, str) else "true" if value else "false"
    return text.encode(errors="surrogatepass")
