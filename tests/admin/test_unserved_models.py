"""A requested model without a ready replica: named in the 503, in the observatory, and in `warmroute top`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from router.admin.insights_pages import RECENT_S
from router.cli.top import plain
from router.cli.top.screen import screen
from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import ADMIN, Keyring, bearer

CHAT = "/v1/chat/completions"
WHY = "0 of 1 replicas of 'small' are ready: connection refused"


async def error_of(client: ClientSession, app: RouterServer, model: str, **headers: str) -> tuple[int, str]:
    """Status and message of a request for the model."""
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    async with client.post(app.url + CHAT, json=body, headers=headers) as response:
        answer = await response.json()
        return response.status, answer.get("error", {}).get("message", "")


async def observatory(client: ClientSession, app: RouterServer) -> Any:
    """The page."""
    async with client.get(app.admin_url + "/admin/observatory", headers=bearer(ADMIN)) as response:
        return await response.json()


async def test_a_model_without_a_ready_replica_is_named(client: ClientSession, engine: FakeEngine) -> None:
    """One of two models has lost its only replica. The 503 gives the replicas of that model and not of the fleet; page
    and terminal name the model once it is requested, and no longer when a replica is ready again."""
    async with FakeEngine(models=("small",)) as small, running(engine, small) as app:
        assert (await error_of(client, app, "small"))[0] == 200
        await small.stop()
        await app.control.probe_now()
        assert (await observatory(client, app))["unserved_models"] == [], "nobody requests it"
        expected = "No replica of model 'small' is ready for this request; try again after the seconds of Retry-After."
        assert await error_of(client, app, "small") == (503, f"{expected} Cause: {WHY}.")
        assert (await error_of(client, app, "m"))[0] == 200
        page = await observatory(client, app)
        assert page["unserved_models"] == [{"model": "small", "why": WHY}]
        assert f"model small has no ready replica: {WHY}" in plain.render(screen(page))
        async with FakeEngine(models=("small",), port=small.port):
            await app.control.probe_now()
            assert (await error_of(client, app, "small"))[0] == 200
            page = await observatory(client, app)
            assert page["unserved_models"] == []
            assert "no ready replica" not in plain.render(screen(page))


async def test_a_declared_model_that_no_replica_serves_is_named(
    client: ClientSession, engine: FakeEngine, tmp_path: Path
) -> None:
    """A tenant without receipts gets the name that it sent, and not the number of replicas; a name that the router does
    not know is 404, and is on no page."""
    ring = Keyring(tmp_path, acme={})
    declared: dict[str, Any] = {"discovery__models": ("new",), "admin__token": ADMIN}
    async with running(engine, **declared, **ring.settings) as app:
        status, message = await error_of(client, app, "new", **ring.of("acme"))
        assert (status, "No replica of model 'new' is ready" in message) == (503, True)
        assert "Cause" not in message
        assert (await error_of(client, app, "guess", **ring.of("acme")))[0] == 404
        why = "no replica is known to serve 'new'; 1 of 1 replicas are ready"
        assert (await observatory(client, app))["unserved_models"] == [{"model": "new", "why": why}]


async def test_a_model_that_is_requested_no_more_is_named_no_more(client: ClientSession, engine: FakeEngine) -> None:
    """The page names it for two minutes after the last request for it."""
    async with running(engine, discovery__models=("new",)) as app:
        assert (await error_of(client, app, "new"))[0] == 503
        requested_s = app.control.observatory._unready_at_s
        requested_s["new"] -= RECENT_S - 10
        assert [row["model"] for row in (await observatory(client, app))["unserved_models"]] == ["new"]
        requested_s["new"] -= 10
        assert (await observatory(client, app))["unserved_models"] == []
