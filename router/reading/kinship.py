"""Whose conversation a request belongs to, made fit to be kept: names that clients choose become numbers.

Names are hashed with the tenant's and a key, so two tenants that call their sessions alike never meet: neither in the
memory of conversations, nor on the ring where a tenant is isolated, nor in traces.
"""

from __future__ import annotations

from hashlib import blake2b

from msgspec import Struct
from xxhash import xxh3_128_digest

from router.core.facts.requests import AgentIds, Ask, Kin
from router.core.prompts.agents import SESSION, label_of
from router.http.request import Request
from router.settings.keys import Caller
from router.telemetry.record import session_key

NAME_BYTES_MAX = 256  # a longer name of a session goes to the ring as its hash
KEY_BYTES_MAX = 64  # most that blake2b takes


class Whose(Struct, eq=False, gc=False):  # a Struct for speed: core/facts/requests.py
    """What records tell of the conversation that a request belongs to; each is "" where it names none."""

    agent: str = ""  # kind of agent (core/prompts/agents.py)
    session: str = ""  # keys, in place of names (telemetry/record.py)
    conversation: str = ""
    parent: str = ""
    final: bool = False  # the client says that the conversation is over


class Kinship:
    """Names conversations. Its key must be the same in all processes of a router."""

    def __init__(self, secret: bytes) -> None:
        self._key = secret if len(secret) <= KEY_BYTES_MAX else blake2b(secret).digest()

    def kin(self, ids: AgentIds | None, caller: Caller) -> Kin | None:
        """The conversation in numbers; None where the request names none."""
        if ids is None:
            return None
        parent = self._number(ids.parent, caller) if ids.parent else 0
        return Kin(self._number(ids.conversation, caller), parent, ids.final)

    def hint(self, request: Request, ids: AgentIds | None, ask: Ask, caller: Caller) -> str | None:
        """What the ring is to hash for this request; None for its prompt. Conversations of a session, and sub-agents
        and whoever started them, have one place."""
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

    def whose(self, request: Request, ids: AgentIds | None, ask: Ask, caller: Caller) -> Whose:
        """What the request's record tells: a session's requests are found by the name that its client gave it."""
        apart = caller.tenant.name if caller.tenant is not None and caller.tenant.isolated else ""
        name = request.fields.get(SESSION) or (ids.session if ids is not None else b"")
        if not name and ask.session:
            name = ask.session.encode(errors="surrogatepass")
        whose = Whose(label_of(ids), session_key(name, apart) if name else "")
        if ids is not None:
            whose.conversation = session_key(ids.conversation, apart)
            whose.parent = session_key(ids.parent, apart) if ids.parent else ""
            whose.final = ids.final
        return whose

    def _number(self, name: bytes, caller: Caller) -> int:
        """64 bits, never 0. A long name goes through a faster hash first: `prompt_cache_key` may be a whole body."""
        if len(name) > NAME_BYTES_MAX:
            name = xxh3_128_digest(name)
        tenant = caller.name.encode(errors="surrogatepass")
        text = b"%d,%b%b" % (len(tenant), tenant, name)
        return int.from_bytes(blake2b(text, digest_size=8, key=self._key).digest(), "big") or 1
