"""A router that is killed in mid-load and starts again, as processes before simulated engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from tests.control.warm_fleet import Conversations, Turn, fleet, share
from tests.support.command import Command, command
from tests.support.figures import figure
from tests.support.waiting import until

NUMBERS = range(40)


class At:
    """An engine at an address."""

    def __init__(self, url: str) -> None:
        self.url = url


async def state_of(client: ClientSession, router: Command) -> dict[str, Any]:
    """What its admin page says of what it knew before."""
    async with client.get(f"{router.admin_url}/admin/index") as response:
        said: dict[str, Any] = (await response.json())["state"]
        return said


async def exact(client: ClientSession, router: Command) -> None:
    """Return when all replicas are."""
    async with asyncio.timeout(60):
        while True:
            async with client.get(f"{router.admin_url}/admin/replicas") as response:
                if all(row["grade"] == "exact" for row in (await response.json())["replicas"]):
                    return
            await asyncio.sleep(0.02)


def compared(what: str, before: list[Turn], after: list[Turn]) -> None:
    """Turns that find what the last one left are nearly as many after as before, and so are exact predictions."""
    ratio = share(after) / share(before)
    figure(f"{what}: share of good decisions that a restart costs", 0.05, 1 - ratio)
    assert ratio >= 0.9
    exact_before, exact_after = (sum(turn.grade == "exact" for turn in turns) / len(turns) for turns in (before, after))
    assert exact_after >= 0.9 * exact_before


async def written(file: Path) -> None:
    """Return when the file was written anew twice: what is known by now is in the second one."""
    for _ in range(2):
        await until(_changes(file))


def _changes(file: Path) -> Callable[[], bool]:
    """Whether the file is another one than now: its first piece has the time."""
    before = file.read_bytes()
    return lambda: file.read_bytes() != before


@pytest.mark.long
@pytest.mark.figures
@pytest.mark.parametrize("events", [False, True], ids=["estimated", "exact"])
async def test_a_killed_router_is_back_as_warm_as_it_was(events: bool, tmp_path: Path) -> None:
    """Conversations go on all the while. A second after it serves again, as many turns go where the last one left its
    blocks as before, and as many are predicted exactly; one that starts without the file scatters them."""
    kept = {"snapshot__path": str(tmp_path / "state"), "snapshot__interval_s": "0.5"}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(ClientSession())
        engines = await stack.enter_async_context(fleet(events=events))
        ats, talk = [At(url) for url in engines.urls], Conversations(client)

        async def begun(**more: str) -> Command:
            router = await stack.enter_async_context(command(*ats, **more))  # type: ignore[arg-type]  # as engines
            if events:
                await exact(client, router)
            talk.url = router.url
            return router

        first = await begun(**kept)
        for _ in range(3):
            before = await talk.round(NUMBERS)
        await until(lambda: (tmp_path / "state").exists())
        await written(tmp_path / "state")  # with the last turns
        going = asyncio.create_task(talk.round(NUMBERS))
        await asyncio.sleep(0.05)
        await first.kill()
        await going
        second = await begun(**kept)
        serving_s = time.monotonic()
        said = await state_of(client, second)
        assert said["replicas"] == {"restored": 4, "refused": 0, "waiting": 0}
        while time.monotonic() < serving_s + 1.0:
            await talk.turn(NUMBERS[0])
        compared("exact" if events else "estimated", before, await talk.round(NUMBERS))
        if not events:
            await second.kill()
            await begun()
            assert share(await talk.round(NUMBERS)) < 0.8 * share(before)


@pytest.mark.promise("An engine that restarted is credited with no block of its earlier run.", "engines")
@pytest.mark.long
async def test_an_engine_that_restarted_meanwhile_is_credited_with_nothing(tmp_path: Path) -> None:
    """One of two engines is another one when the router is back: it gets none of the credit, the other all of it."""
    kept = {
        "snapshot__path": str(tmp_path / "state"),
        "snapshot__interval_s": "0.2",
        "snapshot__readiness_wait_s": "20",
    }
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(ClientSession())
        stays = await stack.enter_async_context(fleet(1, events=True))
        goes = AsyncExitStack()
        gone = await goes.enter_async_context(fleet(1, events=True))
        ats, talk = [At(stays.urls[0]), At(gone.urls[0])], Conversations(client)
        first = await stack.enter_async_context(command(*ats, **kept))  # type: ignore[arg-type]  # as engines
        await exact(client, first)
        talk.url = first.url
        for _ in range(2):
            await talk.round(NUMBERS)
        assert set(talk.at.values()) == {at.url for at in ats}
        await until(lambda: (tmp_path / "state").exists())
        await written(tmp_path / "state")
        await first.kill()
        await goes.aclose()
        port = int(gone.urls[0].rpartition(":")[2])
        await stack.enter_async_context(fleet(1, events=True, port=port))
        second = await stack.enter_async_context(command(*ats, **kept))  # type: ignore[arg-type]  # as engines
        said = await state_of(client, second)
        outcomes = {each["replica"]: each for each in said["restored"]}
        assert outcomes[stays.urls[0]]["events_blocks"] > 100
        assert outcomes[gone.urls[0]]["events_blocks"] == outcomes[gone.urls[0]]["estimate_blocks"] == 0
        await exact(client, second)
        talk.url, homes = second.url, dict(talk.at)
        for number in NUMBERS:
            turn = await talk.turn(number)
            assert turn is not None
            assert turn.predicted == turn.cached
            if homes[number] == gone.urls[0] == turn.replica:
                assert not turn.cached
