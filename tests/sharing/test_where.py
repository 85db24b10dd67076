"""Where the store is: databases of one store."""

from __future__ import annotations

from tests.sharing.links import linked
from tests.sharing.stores import StoreServer
from tests.support.waiting import until


async def test_databases_of_one_store_keep_routers_apart() -> None:
    """Routers with one name of a fleet and different databases do not hear each other, and each is whole; those with
    the same database do, with no more rights than the guide gives."""
    async with StoreServer() as server:
        commands = "+ping +publish +subscribe +unsubscribe +set +del +xadd +xrange +time +select"
        await server.ask("ACL", "SETUSER", "r", "on", ">pw", "~warmroute:*", "&warmroute:*", *commands.split())
        url = f"redis://r:pw@127.0.0.1:{server.port}"
        async with (
            linked(url, "a") as a,
            linked(f"{url}/3", "b") as b,
            linked(f"{url}/3", "c") as c,
            linked(f"{url}/0", "d") as d,
        ):
            pairs = ((a, d), (b, c))
            await until(lambda: all(each.link.routers == 2 and each.link.whole for pair in pairs for each in pair))
            for pair in pairs:
                for each in pair:
                    each.core.to_say = [each.link.name.encode()]
            await until(lambda: all(each.core.heard for pair in pairs for each in pair))
            heard = {each.link.name: each.core.heard for pair in pairs for each in pair}
            assert heard == {"a": [b"d"], "b": [b"c"], "c": [b"b"], "d": [b"a"]}
            assert [name for each in (a, b, c, d) for name, _ in each.link.peers()] == ["d", "c", "b", "a"]
            assert not any(each.link.failures or each.link.refusal for pair in pairs for each in pair)
