"""Who asks, as agents' clients say it of themselves: the one table of headers and body fields by which a conversation,
the parent of a sub-agent and the end of a session are known without configuration.

    conversation   one chain of prompts, of an agent or of a sub-agent
    parent         the conversation that started it, whose prefix a sub-agent may share
    final          the client says that its conversation is over

Names and values were recorded of the clients themselves where they could be run, and read in their sources otherwise;
`tests/core/prompts/agents` has both. Rows are tried from the first to the last, headers before body fields, and the
first row whose conversation is named decides: a gateway's own header comes before what an agent sends by itself.
`x-correlation-id` is a session's only in AIPerf's requests: elsewhere it names one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import Raw

from router.core.facts.requests import AgentIds
from router.core.prompts.bodies import METADATA_BYTES_MAX, UNREADABLE

SESSION = b"x-session-id"  # anybody's hint, and OpenCode's
FINAL = (b"x-dynamo-session-final", b"nvext.agent_context.session_final")
TRUE = frozenset((b"true", b"1", b"yes", b"on"))
TURN = b"x-codex-turn-metadata"
_SPLIT = b"/"  # between a session's name and that of an agent in it
_USER_SESSION = b"_session_"  # stands before the session in the user id of older Claude Code


class AgentRow(NamedTuple):
    """Where one client says who asks. Of several names the first that is there counts. A name with a field behind a
    dot is that field of a JSON object: of a header's value, or of the body."""

    client: str
    conversation: tuple[bytes, ...]
    parent: tuple[bytes, ...] = ()
    agent: bytes = b""  # an agent within that conversation, which then is its parent unless `parent` names another
    session: tuple[bytes, ...] = ()  # name that all conversations of a session share
    user_agent: bytes = b""  # the row is for clients whose User-Agent has this in it


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
"""Headers, by their names in lower case."""
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
"""Fields of bodies, by their paths."""
CLIENTS = tuple(dict.fromkeys(row.client for row in (*HEADERS, *BODIES) if row.client))
"""Clients that the table knows, which label metrics."""

_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_text = msgspec.json.Decoder(str | bool).decode


def ids_of(headers: Mapping[bytes, bytes], names: Mapping[bytes, bytes] | None) -> AgentIds | None:
    """The ids in a request's headers, otherwise in the fields of its body that `names_of` found; None where it has
    none."""
    found = _of_rows(HEADERS, headers)
    if found is None and names is not None:
        found = _of_rows(BODIES, names)
    if found is not None:
        final = headers.get(FINAL[0]) or (names or {}).get(FINAL[1])
        found.final = final is not None and final.strip().lower() in TRUE
    return found


def names_of(nvext: Raw, client_metadata: Raw, metadata: Raw, session_id: Raw) -> dict[bytes, bytes] | None:
    """The fields of a body that BODIES asks for, by their paths, as text; None where there is none. What has more than
    METADATA_BYTES_MAX bytes is not looked into."""
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
    """What metrics and pages call the kind of agent: its client, and whether it is a sub-agent; "" where the client is
    not known."""
    if ids is None or not ids.client:
        return ""
    return f"{ids.client}/sub" if ids.parent else ids.client


def _of_rows(rows: tuple[AgentRow, ...], given: Mapping[bytes, bytes]) -> AgentIds | None:
    for row in rows:
        name = _first(row.conversation, given)
        if name and (not row.user_agent or row.user_agent in given.get(b"user-agent", b"").lower()):
            return _of_row(row, name, given)
    return None


def _of_row(row: AgentRow, name: bytes, given: Mapping[bytes, bytes]) -> AgentIds:
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
    """A field of a JSON object that is text; empty where it is none."""
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
