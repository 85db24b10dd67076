"""Names of conversations that clients choose, on their way to what is kept."""

from __future__ import annotations

import re
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from router.core.facts.requests import AgentIds, Ask
from router.http.request import Connection, Request
from router.reading.kinship import NAME_BYTES_MAX, Kinship
from router.settings.keys import ANYBODY, Caller, Tenant
from router.telemetry.record import session_key

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
        kin, parent = (Kinship(secret).kin(ids, ANYBODY) for ids in (IDS, AgentIds("", b"s")))
        assert kin is not None
        assert parent is not None
        assert kin.parent == parent.conversation != kin.conversation
        assert Kinship(secret).kin(IDS, ANYBODY).conversation == kin.conversation  # type: ignore[union-attr]  # ids
    assert Kinship(b"").kin(None, ANYBODY) is None


@given(names, st.sampled_from(["", "a", "b", "ab"]), st.sampled_from(["c", "bc"]))
def test_tenants_never_meet(name: bytes, one: str, other: str) -> None:
    """Two tenants that call their sessions alike share no number; isolated ones no place on the ring and no key in
    records and traces either, and nobody's secret is another's."""
    ids, kinship = AgentIds("", name, name, name), Kinship(b"secret")
    mine, theirs = kinship.kin(ids, of(one)), kinship.kin(ids, of(other))
    assert mine is not None
    assert theirs is not None
    assert mine.conversation != theirs.conversation
    assert mine.conversation != Kinship(b"other").kin(ids, of(one)).conversation  # type: ignore[union-attr]  # ids
    mine_, theirs_ = of(one, isolated=True), of(other, isolated=True)
    asked = request(x_session_id=name)
    assert kinship.hint(asked, ids, Ask("m"), mine_) != kinship.hint(asked, ids, Ask("m"), theirs_)
    keys = [kinship.whose(asked, ids, Ask("m"), caller) for caller in (mine_, theirs_)]
    assert not {keys[0].session, keys[0].conversation} & {keys[1].session, keys[1].conversation}
    cache_key = Ask("m", session="k")
    assert kinship.hint(request(), None, cache_key, mine_) != kinship.hint(request(), None, cache_key, theirs_)


@given(names)
def test_what_is_kept_is_short_and_none_of_the_clients_words(name: bytes) -> None:
    """Records have hashes; a long name goes to the ring as its hash, and a short one as it is."""
    ids, kinship = AgentIds("codex", name, name + b"p", name), Kinship(b"")
    whose = kinship.whose(request(), ids, Ask("m"), ANYBODY)
    assert all(re.fullmatch("[0-9a-f]{16}", key) for key in (whose.session, whose.conversation, whose.parent))
    assert whose.agent == "codex/sub"
    hint = kinship.hint(request(), AgentIds("", name, b"", name), Ask("m"), ANYBODY)
    assert hint is not None
    assert len(hint) <= NAME_BYTES_MAX
    assert (hint.encode(errors="surrogateescape") == name) == (len(name) <= NAME_BYTES_MAX)


def test_long_names_are_told_apart() -> None:
    """A name of any length is one conversation, and another one with a single other byte, wherever it is."""
    kinship, long = Kinship(b"secret"), b"n" * (1 << 20)
    found = {
        kin.conversation
        for name in (long, long[:-1] + b"m", b"m" + long[1:], long[:-1], long)
        if (kin := kinship.kin(AgentIds("", name), ANYBODY)) is not None
    }
    assert len(found) == 4


def test_whose_place_on_the_ring() -> None:
    """The hint that a client gives itself comes first; a session's conversations have one place, sub-agents that of
    whoever started them; without any name the prompt decides."""
    kinship, ask = Kinship(b""), Ask("m", session="cache key")
    assert kinship.hint(request(x_session_id=b"mine"), IDS, ask, ANYBODY) == "mine"
    assert kinship.hint(request(), IDS, ask, ANYBODY) == "s"
    assert kinship.hint(request(), AgentIds("dynamo", b"child", b"parent", b"child"), ask, ANYBODY) == "parent"
    assert kinship.hint(request(), None, ask, ANYBODY) == "cache key"
    assert kinship.hint(request(), None, Ask("m"), ANYBODY) is None


def test_requests_are_found_by_the_name_of_their_session() -> None:
    """By whoever knows it: the client's own hint, its session, or the key of its prompt cache."""
    kinship, ask = Kinship(b""), Ask("m", session="cache key")
    for asked, ids, name in (
        (request(x_session_id=b"mine"), IDS, b"mine"),
        (request(), IDS, b"s"),
        (request(), None, b"cache key"),
    ):
        assert kinship.whose(asked, ids, ask, ANYBODY).session == session_key(name)
    nobody = kinship.whose(request(), None, Ask("m"), ANYBODY)
    assert (nobody.session, nobody.conversation, nobody.parent, nobody.agent) == ("", "", "", "")
