"""Keys and tenants with several workers: all know the same, and none gives away what is another's."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from aiohttp import ClientSession

from router.core.placement.placement_request import PlacementRequest
from router.core.types.replicas import ServedModel
from router.core.types.requests import RequestSpec
from router.placement_api import UnknownResponse
from tests.multiprocess.stubs import StubHub, serving, until, worker
from tests.multiprocess.test_processes import CHAT, body, command, pytestmark
from tests.support.fakes import FakeEngine, status
from tests.support.keyring import ADMIN, SECRET, Keyring, bearer

__all__ = ["pytestmark"]

RESPONSES = "/v1/responses"
NOBODY = frozenset[str]()


def about(response_id: str, tenant: str) -> PlacementRequest:
    """A request about a stored response."""
    return PlacementRequest(RequestSpec("m"), "m", None, "key", response_id=response_id, tenant=tenant)


@pytest.mark.promise("A stored response is its tenant's alone, through any worker and a restart of the hub.", "tenants")
async def test_a_stored_response_is_its_tenants_through_any_worker(tmp_path: Path) -> None:
    """Whoever made it, only its tenant gets to its replica; another's, and one that nobody knows, are unknown. So it
    is without the hub, to the worker that was there; nobody takes over another's."""
    path, hub = tmp_path / "hub", StubHub("http://a", "http://b", private=True)
    async with worker(path, private=True) as one:
        async with serving(hub, path), worker(path, 1, private=True) as two:
            await until(lambda: one.placing and two.placing)
            one.register_response_owner("resp_1", "http://a", "acme")
            one.register_response_owner("resp_1", "http://b", "evil")
            assert (await one.place(about("resp_1", "acme"), NOBODY)).replica == "http://a"
            assert (await two.place(about("resp_1", "acme"), NOBODY)).replica == "http://a"
            for placer, (id_, tenant) in product((one, two), (("resp_1", "evil"), ("resp_1", ""), ("resp_0", "acme"))):
                with pytest.raises(UnknownResponse, match=id_):
                    await placer.place(about(id_, tenant), NOBODY)
        await until(lambda: not one.placing)
        assert (await one.place(about("resp_1", "acme"), NOBODY)).replica == "http://a"
        for id_, tenant in (("resp_1", "evil"), ("resp_0", "acme")):
            with pytest.raises(UnknownResponse, match=id_):
                await one.place(about(id_, tenant), NOBODY)
    assert hub.open == 0


@pytest.mark.promise("A stored response is its tenant's alone, through any worker and a restart of the hub.", "tenants")
@pytest.mark.parametrize("many", [1, 3_500])
async def test_stored_responses_outlive_the_hub(tmp_path: Path, many: int) -> None:
    """A hub that was restarted is told again whose each stored response is, by the worker through which it was made:
    its tenant gets to it at once by that worker, soon by any other, and nobody else does."""
    path = tmp_path / "hub"
    async with worker(path, private=True) as one:
        hub = StubHub("http://a", "http://b", private=True)
        async with serving(hub, path):
            await until(lambda: one.placing)
            for n in range(many):
                one.register_response_owner(f"resp_{n}", "http://b", "acme")
        await until(lambda: not one.placing)
        again = StubHub("http://a", "http://b", private=True, response_ids_max=10_000)
        async with serving(again, path), worker(path, 1, private=True) as two:
            await until(lambda: one.placing and two.placing)
            last = f"resp_{many - 1}"
            assert (await one.place(about(last, "acme"), NOBODY)).replica == "http://b"
            await until(lambda: len(again.placer.owners.ids()) == many)
            assert (await two.place(about(last, "acme"), NOBODY)).replica == "http://b"
            for placer in (one, two):
                with pytest.raises(UnknownResponse):
                    await placer.place(about(last, "evil"), NOBODY)


async def test_workers_know_kinds_of_engines(tmp_path: Path) -> None:
    """As the hub does: all kinds that serve a model, a replica's that is not ready among them; and still without the
    hub."""
    path, hub = tmp_path / "hub", StubHub("http://a", "http://b")
    hub.ready("http://b", ok=False)
    kinds = {"kind of http://a", "kind of http://b"}
    async with worker(path) as placer:
        async with serving(hub, path):
            await until(lambda: placer.placing)
            assert set(placer.engines("m")) == set(hub.placer.engines("m")) == kinds
            assert not placer.engines("x")
        await until(lambda: not placer.placing)
        assert set(placer.engines("m")) == kinds


async def test_workers_know_names_of_one_model(tmp_path: Path) -> None:
    """As the hub does, so that their chains are its chains; and still without the hub."""
    path, hub = tmp_path / "hub", StubHub("http://a", "http://b")
    for id_ in ("http://a", "http://b"):
        hub.router.observe_models(id_, [ServedModel("m", root="/x"), ServedModel("other", root="/x")])
    async with worker(path) as placer:
        async with serving(hub, path):
            await until(lambda: placer.placing)
            assert placer.cache_identity("other") == placer.cache_identity("m") == "m"
        await until(lambda: not placer.placing)
        assert placer.cache_identity("other") == "m"
        assert placer.cache_identity("unknown") == "unknown"


@pytest.mark.long
async def test_keys_with_several_processes(tmp_path: Path) -> None:
    """`--workers 2`: every worker asks for a key, salts alike, keeps responses apart, and tells the hub whose requests
    they were."""
    ring = Keyring(tmp_path, acme={"isolate": True}, evil={})
    settings = {"auth__keys_file": str(ring.file), "auth__secret": SECRET, "admin__token": ADMIN}
    async with FakeEngine(owned_by="vllm") as engine, command(engine, **settings) as app:

        async def ask(tenant: str, method: str, path: str, given: object = None) -> int:
            headers = ring.of(tenant) if tenant else {}
            async with ClientSession() as client:  # a connection of its own, to whichever worker takes it
                async with client.request(method, app.url + path, json=given, headers=headers) as response:
                    return response.status

        for _ in range(6):
            assert await ask("", "POST", CHAT, body()) == 401
            assert await ask("acme", "POST", CHAT, body()) == 200
        assert len({json.loads(seen.body)["cache_salt"] for seen in engine.seen}) == 1
        engine.script.append(status(200, '{"id": "resp_1", "object": "response"}'))
        assert await ask("acme", "POST", RESPONSES, {"model": "m", "input": "x"}) == 200
        for _ in range(6):
            assert await ask("acme", "GET", f"{RESPONSES}/resp_1") == 200
            assert await ask("evil", "GET", f"{RESPONSES}/resp_1") == 404
        lines = ('status="2xx",tenant="acme"} 13.0', 'status="4xx",tenant="evil"} 6.0', 'tenant="none"} 6.0')
        page = ""
        async with ClientSession() as client:
            while not all(line in page for line in lines):  # what workers tell the hub comes a moment later
                async with client.get(f"{app.admin_url}/metrics", headers=bearer(ADMIN)) as response:
                    page = await response.text()
