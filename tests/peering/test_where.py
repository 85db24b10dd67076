"""Where the store is: another one, or another password, while the router runs; and databases of one store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.peering.peer_link import PeerChannel
from router.router_server import RouterServer
from tests.config.reloaded import running
from tests.peering.links import linked
from tests.peering.routers import routers_of, whole
from tests.peering.stores import StoreServer
from tests.support.fakes import FakeEngine
from tests.support.waiting import until

RIGHTS = "+ping +xadd +xread +xlen +xdel +set +get +sadd +smembers +srem +del +pexpire +select"

pytestmark = pytest.mark.usefixtures("patience")


def link_of(app: RouterServer) -> PeerChannel:
    """Its link."""
    assert app.control.link is not None
    return app.control.link.link


async def is_used(server: StoreServer) -> bool:
    """Whether routers have connections to this store."""
    return (await server.ask("CLIENT", "LIST")).count(b" cmd=") > 1  # this one


async def test_another_url_moves_routers_at_once(tmp_path: Path, engine: FakeEngine) -> None:
    """Routers whose URL's file names another store go there when they have read it again: they hear each other there,
    none has been alone or has failed, and nobody hears the old store any more. What the new one has kept for long is
    known, and what a router has made at the old one is written to it."""
    file, settings = tmp_path / "url", {"peering__redis_url_file": str(tmp_path / "url")}
    async with StoreServer() as old, StoreServer() as new:
        file.write_text(old.url)
        async with (
            running(tmp_path / "one", engine, **settings) as one,
            running(tmp_path / "other", engine, **settings) as other,
        ):
            apps = (one.app, other.app)
            await until(lambda: all(routers_of(app) == 2 and whole(app) for app in apps))
            link_of(one.app).publish_response_owner("resp_made", engine.url, "")
            await until(lambda: link_of(one.app).counts["written"])
            owner = ("i", "resp_kept", "r", engine.url, "t", "")
            await new.ask("XADD", "warmroute:{fleet}:responses", "1-1", *owner)
            file.write_text(new.url)
            before = [link_of(app)._session for app in apps]
            for each in (one, other):
                await each.reloader.reload()
            await until(lambda: all(app.control.placer.owners.knows("resp_kept") for app in apps))
            await until(lambda: link_of(one.app).counts["written"] == 2)
            assert all(link_of(app)._session is not session for app, session in zip(apps, before, strict=True))
            async with asyncio.timeout(60):
                while await is_used(old) or not await is_used(new):
                    await asyncio.sleep(0.01)
            said = [link_of(app).counts["heard"] for app in apps]
            await until(lambda: all(link_of(app).counts["heard"] > of + 2 for app, of in zip(apps, said, strict=True)))
            for app in apps:
                assert (whole(app), routers_of(app), link_of(app).counts["interruptions"]) == (True, 2, 0)
                assert set(link_of(app).failures) <= {"timeout"}  # where the store is given no turn


async def test_another_password_is_shown_at_once(tmp_path: Path, engine: FakeEngine) -> None:
    """A password's file with another one in it: the router has a new session by it, without a failure."""
    file = tmp_path / "password"
    async with StoreServer() as server:
        await server.ask("ACL", "SETUSER", "r", "on", ">one", ">two", "&*", "~*", "+@all")
        file.write_text("one")
        url = f"redis://r@127.0.0.1:{server.port}"
        settings = {"peering__redis_url": url, "peering__password_file": str(file)}
        async with running(tmp_path / "settings", engine, **settings) as router:
            its = link_of(router.app)
            await until(lambda: its.connected)
            before = its._session
            await server.ask("ACL", "SETUSER", "r", "<one")
            file.write_text("two")
            await router.reloader.reload()
            await until(lambda: its._session not in (None, before))
            heard = its.counts["heard"]
            await until(lambda: its.counts["heard"] > heard)
            assert its.connected
            assert set(its.failures) <= {"timeout"}  # likewise


@pytest.mark.parametrize("says", ["the same", "nothing that can be read"])
async def test_a_reload_that_moves_nothing_interrupts_nothing(tmp_path: Path, engine: FakeEngine, says: str) -> None:
    """Settings that are read again, with the same URL or one that is refused, leave the session as it is."""
    file = tmp_path / "url"
    async with StoreServer() as server:
        file.write_text(server.url)
        async with running(tmp_path / "settings", engine, peering__redis_url_file=str(file)) as router:
            its = link_of(router.app)
            await until(lambda: its.connected)
            before = its._session
            file.write_text(f"{server.url}\n" if says == "the same" else "redis://nonsense:port")
            await router.set(engine, peering__redis_url_file=str(file), listen__keepalive_s=7.0)
            assert (router.reloader.settings.listen.keepalive_s == 7.0) is (says == "the same")
            heard = its.counts["heard"]
            await until(lambda: its.counts["heard"] > heard + 1)
            assert its._session is before or its.failures  # the store may have been given no turn for too long


async def test_a_store_that_was_never_there_is_left_for_one_that_is(tmp_path: Path, engine: FakeEngine) -> None:
    """A router that has no session finds the store that its URL's file names by now, with a reload or without."""
    file = tmp_path / "url"
    async with StoreServer() as server:
        file.write_text("redis://127.0.0.1:1")
        async with running(tmp_path / "settings", engine, peering__redis_url_file=str(file)) as router:
            its = link_of(router.app)
            await until(lambda: its.failures["unreachable"])
            file.write_text(server.url)
            await router.reloader.reload()
            await until(lambda: its.connected)


async def test_a_session_that_is_lost_and_back_leaves_no_reason(tmp_path: Path, engine: FakeEngine) -> None:
    """A connection that the store ends is replaced before the router counts as alone: the page says that it is whole,
    and nothing of why it might not be."""
    async with StoreServer() as server:
        async with running(tmp_path / "settings", engine, peering__redis_url=server.url) as router:
            its = link_of(router.app)
            await until(lambda: its.connected)
            async with asyncio.timeout(60):
                while not its.failures["unreachable"]:  # a connection that is not in use is replaced without a failure
                    await server.ask("CLIENT", "KILL", "TYPE", "normal")
                    await asyncio.sleep(0.02)
            heard = its.counts["heard"]
            await until(lambda: its.counts["heard"] > heard)
            assert router.app.control.link is not None
            said = router.app.control.link.status()
            assert (said["whole"], said["why"], its.counts["interruptions"]) == (True, "", 0)


async def test_databases_of_one_store_keep_routers_apart() -> None:
    """Routers with one name of a fleet and different databases do not hear each other, and each is whole; those with
    the same database do, with no more rights than the guide gives."""
    async with StoreServer() as server:
        commands = RIGHTS
        await server.ask("ACL", "SETUSER", "r", "on", ">pw", "~warmroute:*", *commands.split())
        url = f"redis://r:pw@127.0.0.1:{server.port}"
        async with (
            linked(url, "a") as a,
            linked(f"{url}/3", "b") as b,
            linked(f"{url}/3", "c") as c,
            linked(f"{url}/0", "d") as d,
        ):
            pairs = ((a, d), (b, c))
            await until(lambda: all(each.link.routers == 2 and each.link.connected for pair in pairs for each in pair))
            for pair in pairs:
                for each in pair:
                    each.core.to_say = [each.link.name.encode()]
            await until(lambda: all(each.core.heard for pair in pairs for each in pair))
            heard = {each.link.name: each.core.heard for pair in pairs for each in pair}
            assert heard == {"a": [b"d"], "b": [b"c"], "c": [b"b"], "d": [b"a"]}
            assert [name for each in (a, b, c, d) for name, _ in each.link.peers()] == ["d", "c", "b", "a"]
            assert not any(each.link.failures or each.link.refusal for pair in pairs for each in pair)


async def test_tls_to_a_port_without_it_is_told() -> None:
    """Redis waits in silence for more of what it takes for a line: the reason says what to look at."""
    async with StoreServer() as server:
        url = server.url.replace("redis://", "rediss://")
        async with linked(url, "a", timeout_s=0.2) as a:
            await until(lambda: "uses TLS" in a.link.why)
