"""Conversation identity of a request, made safe to store: names that clients choose become numbers.

Names are hashed with the tenant's name and a key. So equal session names of two tenants never collide: not in the
memory of conversations, not on the ring if a tenant is isolated, and not in traces.
"""

from __future__ import annotations

from hashlib import blake2b

from msgspec import Struct
from xxhash import xxh3_128_digest

from router.config.api_keys import Caller
from router.core.prompts.agent_headers import SESSION, label_of
from router.core.types.requests import AgentIds, ConversationRef, RequestSpec
from router.http.request import Request
from router.telemetry.request_record import session_key

NAME_BYTES_MAX = 256  # a longer name of a session goes to the ring as its hash
KEY_BYTES_MAX = 64  # longest key of blake2b


class SessionLabels(Struct, eq=False, gc=False):  # a Struct for speed: core/types/requests.py
    """Conversation data for a request's records; each field is "" if the request names none."""

    agent: str = ""  # kind of agent (core/prompts/agent_headers.py)
    session: str = ""  # keys, in place of names (telemetry/request_record.py)
    conversation: str = ""
    parent: str = ""
    final: bool = False  # the client reports the end of the conversation


class SessionHasher:
    """Names conversations. Its key must be the same in all routers that share a store."""

    def __init__(self, secret: bytes) -> None:
        self._key = secret if len(secret) <= KEY_BYTES_MAX else blake2b(secret).digest()

    def conversation_ref(self, ids: AgentIds | None, caller: Caller) -> ConversationRef | None:
        """Return the conversation in numbers; None if the request names none."""
        if ids is None:
            return None
        parent = self._number(ids.parent, caller) if ids.parent else 0
        return ConversationRef(self._number(ids.conversation, caller), parent, ids.final)

    def affinity_key(self, request: Request, ids: AgentIds | None, ask: RequestSpec, caller: Caller) -> str | None:
        """Return the ring key for this request; None for a key from its prompt. Conversations of one session have the
        same place on the ring, and so do sub-agents and the agent that started them."""
        name = request.fields.get(SESSION)
        if not name and ids is not None:
            name = ids.parent if ids.parent and ids.session == ids.conversation else ids.session
        if not name and ask.session:
            name = ask.session.encode(errors="surrogatepass")
        if not name:
            return None
        if (caller.tenant is not None and caller.tenant.isolated) or len(name) > NAME_BYTES_MAX:
            return format(self._number(name, caller), "x")
        return name.decode(errors="surrogateescape")

    def labels(self, request: Request, ids: AgentIds | None, ask: RequestSpec, caller: Caller) -> SessionLabels:
        """Return the data for the request's record. A session's requests can be found by the name that its client gave
        it."""
        apart = caller.tenant.name if caller.tenant is not None and caller.tenant.isolated else ""
        name = request.fields.get(SESSION) or (ids.session if ids is not None else b"")
        if not name and ask.session:
            name = ask.session.encode(errors="surrogatepass")
        whose = SessionLabels(label_of(ids), session_key(name, apart) if name else "")
        if ids is not None:
            whose.conversation = session_key(ids.conversation, apart)
            whose.parent = session_key(ids.parent, apart) if ids.parent else ""
            whose.final = ids.final
        return whose

    def _number(self, name: bytes, caller: Caller) -> int:
        """Return 64 bits, never 0. A long name goes through a faster hash first: `prompt_cache_key` may be as long as a
        body."""
        if len(name) > NAME_BYTES_MAX:
            name = xxh3_128_digest(name)
        tenant = caller.name.encode(errors="surrogatepass")
        text = b"%d,%b%b" % (len(tenant), tenant, name)
        return int.from_bytes(blake2b(text, digest_size=8, key=self._key).digest(), "big") or 1
