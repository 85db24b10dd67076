"""Names of conversations that clients choose, on their way to what is kept."""

from __future__ import annotations

import re
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from router.config.api_keys import ANONYMOUS, Caller, Tenant
from router.core.types.requests import AgentIds, RequestSpec
from router.http.request import Connection, Request
from router.ingress.session_identity import NAME_BYTES_MAX, SessionHasher
from router.telemetry.request_record import session_key

IDS = AgentIds("claude-code", b"s/a", b"s", b"s")
names = st.binary(min_size=1, max_size=400)


def request(**fields: bytes) -> Request:
    """One with these headers."""
    made = Request(cast("Connection", None))
    made.fields = {name.replace("_", "-").encode(): value for name, value in fields.items()}
    return made


def of(tenant: str, **how: Any) -> Caller:
    """A caller that a key proved."""
    return Caller(tenant, tenant=Tenant(tenant, **how))


def test_one_name_is_one_number() -> None:
    """A parent's name has the number under which its own requests are known, in every process with the same secret."""
    for secret in (b"", b"s", b"x" * 100):
        kin, parent = (SessionHasher(secret).conversation_ref(ids, ANONYMOUS) for ids in (IDS, AgentIds("", b"s")))
        assert kin is not None
        assert parent is not None
        assert kin.parent == parent.conversation != kin.conversation
        assert SessionHasher(secret).conversation_ref(IDS, ANONYMOUS).conversation == kin.conversation  # type: ignore[union-attr]  # ids
    assert SessionHasher(b"").conversation_ref(None, ANONYMOUS) is None


@given(names, st.sampled_from(["", "a", "b", "ab"]), st.sampled_from(["c", "bc"]))
def test_tenants_never_meet(name: bytes, one: str, other: str) -> None:
    """Two tenants that call their sessions alike share no number; isolated ones no place on the ring and no key in
    records and traces either, and nobody's secret is another's."""
    ids, kinship = AgentIds("", name, name, name), SessionHasher(b"secret")
    mine, theirs = kinship.conversation_ref(ids, of(one)), kinship.conversation_ref(ids, of(other))
    assert mine is not None
    assert theirs is not None
    assert mine.conversation != theirs.conversation
    assert mine.conversation != SessionHasher(b"other").conversation_ref(ids, of(one)).conversation  # type: ignore[union-attr]  # ids
    mine_, theirs_ = of(one, isolated=True), of(other, isolated=True)
    asked = request(x_session_id=name)
    assert kinship.affinity_key(asked, ids, RequestSpec("m"), mine_) != kinship.affinity_key(
        asked, ids, RequestSpec("m"), theirs_
    )
    keys = [kinship.labels(asked, ids, RequestSpec("m"), caller) for caller in (mine_, theirs_)]
    assert not {keys[0].session, keys[0].conversation} & {keys[1].session, keys[1].conversation}
    cache_key = RequestSpec("m", session="k")
    assert kinship.affinity_key(request(), None, cache_key, mine_) != kinship.affinity_key(
        request(), None, cache_key, theirs_
    )


@given(names)
def test_what_is_kept_is_short_and_none_of_the_clients_words(name: bytes) -> None:
    """Records have hashes; a long name goes to the ring as its hash, and a short one as it is."""
    ids, kinship = AgentIds("codex", name, name + b"p", name), SessionHasher(b"")
    whose = kinship.labels(request(), ids, RequestSpec("m"), ANONYMOUS)
    assert all(re.fullmatch("[0-9a-f]{16}", key) for key in (whose.session, whose.conversation, whose.parent))
    assert whose.agent == "codex/sub"
    hint = kinship.affinity_key(request(), AgentIds("", name, b"", name), RequestSpec("m"), ANONYMOUS)
    assert hint is not None
    assert len(hint) <= NAME_BYTES_MAX
    assert (hint.encode(errors="surrogateescape") == name) == (len(name) <= NAME_BYTES_MAX)


def test_long_names_are_told_apart() -> None:
    """A name of any length is one conversation, and another one with a single other byte, wherever it is."""
    kinship, long = SessionHasher(b"secret"), b"n" * (1 << 20)
    found = {
        kin.conversation
        for name in (long, long[:-1] + b"m", b"m" + long[1:], long[:-1], long)
        if (kin := kinship.conversation_ref(AgentIds("", name), ANONYMOUS)) is not None
    }
    assert len(found) == 4


def test_whose_place_on_the_ring() -> None:
    """The hint that a client gives itself comes first; a session's conversations have one place, sub-agents that of
    whoever started them; without any name the prompt decides."""
    kinship, ask = SessionHasher(b""), RequestSpec("m", session="cache key")
    assert kinship.affinity_key(request(x_session_id=b"mine"), IDS, ask, ANONYMOUS) == "mine"
    assert kinship.affinity_key(request(), IDS, ask, ANONYMOUS) == "s"
    assert (
        kinship.affinity_key(request(), AgentIds("dynamo", b"child", b"parent", b"child"), ask, ANONYMOUS) == "parent"
    )
    assert kinship.affinity_key(request(), None, ask, ANONYMOUS) == "cache key"
    assert kinship.affinity_key(request(), None, RequestSpec("m"), ANONYMOUS) is None


def test_requests_are_found_by_the_name_of_their_session() -> None:
    """By whoever knows it: the client's own hint, its session, or the key of its prompt cache."""
    kinship, ask = SessionHasher(b""), RequestSpec("m", session="cache key")
    for asked, ids, name in (
        (request(x_session_id=b"mine"), IDS, b"mine"),
        (request(), IDS, b"s"),
        (request(), None, b"cache key"),
    ):
        assert kinship.labels(asked, ids, ask, ANONYMOUS).session == session_key(name)
    nobody = kinship.labels(request(), None, RequestSpec("m"), ANONYMOUS)
    assert (nobody.session, nobody.conversation, nobody.parent, nobody.agent) == ("", "", "", "")
