"""A router that starts with what was known before (router/control/snapshot.py), before simulated engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from router.config.runtime import resolve
from router.control.snapshot_file import MAGIC, read_chunks, write_chunks
from router.core.kv_events.event_state_codec import UnreadableState
from router.core.peer_sync.snapshot_format import VERSION, StateEnd, StateOrigin, encode_piece
from router.core.types.placements import Confidence
from router.router_server import RouterServer
from tests.control.warm_fleet import Conversations, fleet, share
from tests.support import fakes
from tests.support.waiting import until

NUMBERS = range(24)
ESTIMATE_TOKENS = 128  # of a block of our own


def settings(*urls: str, file: Path, **more: Any) -> Any:
    """Of a router that keeps its state in this file."""
    return fakes.settings(
        *urls,
        snapshot__path=str(file),
        **{"snapshot__readiness_wait_s": 30.0, "probe__interval_s": 0.2, "tokens__deadline_s": 20.0, **more},
    )


async def ready(client: ClientSession, app: RouterServer) -> None:
    """Return when `/readyz` says so."""
    async with asyncio.timeout(60):
        while (await client.get(app.url + "/readyz")).status != 200:
            await asyncio.sleep(0.01)


async def state(client: ClientSession, app: RouterServer) -> dict[str, Any]:
    """What the admin page says."""
    async with client.get(app.admin_url + "/admin/index") as response:
        said: dict[str, Any] = (await response.json())["state"]
        return said


@pytest.mark.parametrize("events", [False, True], ids=["estimated", "exact"])
async def test_a_router_is_as_warm_after_as_before(events: bool, tmp_path: Path) -> None:
    """It is ready once it knows what the one before it knew: conversations go on where they were, and are credited as
    before; where engines tell of their blocks, exactly."""
    file = tmp_path / "state"
    async with ClientSession() as client, fleet(events=events) as engines:
        talk = Conversations(client)
        async with RouterServer(resolve(settings(*engines.urls, file=file))) as app:
            await ready(client, app)
            if events:
                await until(lambda: all(m.grade is Confidence.EXACT for m in app.router.members))
            talk.url = app.url
            await talk.round(NUMBERS, 1)
            before = await talk.round(NUMBERS, 1)
        assert share(before) == 1.0
        assert len(set(talk.at.values())) > 2
        async with RouterServer(resolve(settings(*engines.urls, file=file))) as app:
            await ready(client, app)
            said = await state(client, app)
            assert said["replicas"] == {"restored": 4, "refused": 0, "waiting": 0}
            used = [each for each in said["restored"] if each["replica"] in set(talk.at.values())]
            assert all(bool(each["events_blocks"]) is events for each in used)
            if events:  # token ids are trusted once they were compared with an engine's
                await until(lambda: all(m.grade is Confidence.EXACT for m in app.router.members))
            talk.url, at = app.url, dict(talk.at)
            after = await talk.round(NUMBERS, 1)
        assert len(after) == len(NUMBERS)
        assert talk.at == at
        assert share(after) == 1.0
        assert all(turn.predicted >= turn.could - 2 * ESTIMATE_TOKENS for turn in after)
        if events:
            exact = [turn for turn in after if turn.grade == "exact"]  # but for turns that outran their events
            assert len(exact) > len(after) // 2
            assert all(turn.predicted == turn.cached for turn in exact)


@pytest.mark.parametrize("events", [False, True], ids=["estimated", "exact"])
async def test_an_engine_that_restarted_is_credited_with_nothing(events: bool, tmp_path: Path) -> None:
    """Other engines are at the same addresses, with empty caches: nothing is taken over, and the page says why."""
    file = tmp_path / "state"
    async with ClientSession() as client:
        async with fleet(1, events=events) as engines:
            (url,) = engines.urls
            async with RouterServer(resolve(settings(url, file=file))) as app:
                await ready(client, app)
                if events:
                    await until(lambda: all(m.grade is Confidence.EXACT for m in app.router.members))
                talk = Conversations(client, app.url)
                await talk.round(range(4))
        async with fleet(1, events=events, port=int(url.rpartition(":")[2])) as engines:
            async with RouterServer(resolve(settings(url, file=file))) as app:
                await ready(client, app)
                said = await state(client, app)
                assert said["replicas"] == {"restored": 0, "refused": 1, "waiting": 0}
                ((outcome),) = said["restored"]
                assert outcome["why"]
                assert not app.router.index.blocks(url)
                talk.url = app.url
                after = await talk.round(range(4))
    assert len(after) == 4
    assert not any(turn.predicted for turn in after)


def _begun(at_s: float) -> bytes:
    """The first piece of a state of this release."""
    return encode_piece(StateOrigin(VERSION, "r", at_s))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-3]), "truncated"),
        (lambda file: file.write_bytes(b"not ours"), "it is not a state file of a router"),
        (lambda file: file.write_bytes(MAGIC.replace(b"1", b"9")), "another release"),
        (lambda file: write_chunks(file, [_begun(time.time() - 5_000), encode_piece(StateEnd(1))]), "old"),
        (lambda file: write_chunks(file, [encode_piece(StateOrigin(7, "r", time.time()))]), "version 7"),
        (lambda file: write_chunks(file, [_begun(time.time())]), "the end of the file is missing"),
        (lambda file: write_chunks(file, [bytes(20_000)] * 10), "snapshot.bytes_max"),
        (lambda file: (file.unlink(), file.mkdir()), "directory"),
    ],
)
async def test_a_file_that_is_no_use_costs_one_line(
    spoil: Callable[[Path], object], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The router starts cold, at once, and says why."""
    file = tmp_path / "state"
    write_chunks(file, [_begun(time.time()), encode_piece(StateEnd(1))])
    spoil(file)
    async with ClientSession() as client, fakes.FakeEngine() as engine:
        with caplog.at_level(logging.INFO):
            async with RouterServer(resolve(settings(engine.url, file=file, snapshot__bytes_max=100_000))) as app:
                await ready(client, app)
                assert why in (await state(client, app))["why"]
                async with client.post(app.url + "/v1/completions", json={"model": "m", "prompt": "x"}) as response:
                    assert response.status == 200
    lines = [line for line in caplog.records if getattr(line, "event", "") == "snapshot_ignored"]
    assert len(lines) == 1
    assert why in lines[0].fields["why"]  # type: ignore[attr-defined]  # ours


async def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However often that fails; what is there stays, and requests are served."""
    file = tmp_path / "gone" / "state"
    async with ClientSession() as client, fakes.FakeEngine() as engine:
        with caplog.at_level(logging.INFO):
            async with RouterServer(resolve(settings(engine.url, file=file, snapshot__interval_s=0.05))) as app:
                await ready(client, app)
                assert app.control.state is not None
                await until(lambda: app.control.state and app.control.state.figures().files["failed"] >= 3)
                assert "No such file" in (await state(client, app))["failing"]
                file.parent.mkdir()
                await until(lambda: app.control.state and app.control.state.figures().files["ok"])
                assert not (await state(client, app))["failing"]
    lines = [line for line in caplog.records if getattr(line, "event", "") == "snapshot_write_failed"]
    assert len(lines) == 1
    assert read_chunks(file, 1 << 20)


async def test_readiness_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    """A replica that never proves to be the same holds the router back for as long as the setting says."""
    file = tmp_path / "state"
    async with ClientSession() as client, fakes.FakeEngine(metrics="") as engine:
        async with RouterServer(resolve(settings(engine.url, file=file))) as app:
            await ready(client, app)
        async with RouterServer(resolve(settings(engine.url, file=file, snapshot__readiness_wait_s=0.0))) as app:
            await until(lambda: bool(app.router.fleet.ready()))
            assert (await client.get(app.url + "/readyz")).status == 200
        async with RouterServer(resolve(settings(engine.url, file=file, snapshot__readiness_wait_s=600.0))) as app:
            await ready(client, app)  # nothing says that it is the same: that is known at the first probe
            assert (await state(client, app))["replicas"] == {"restored": 0, "refused": 1, "waiting": 0}


@pytest.mark.promise(
    "The state file and the state sent to siblings hold no text, header or key of a client.", "records"
)
async def test_the_file_has_hashes_only(tmp_path: Path) -> None:
    """No text of a prompt or an answer, and no key of a client, is in it."""
    file = tmp_path / "state"
    async with ClientSession() as client, fleet(1, events=True) as engines:
        async with RouterServer(resolve(settings(*engines.urls, file=file))) as app:
            await ready(client, app)
            body = {
                "model": "sim",
                "max_tokens": 32,
                "messages": [{"role": "user", "content": "my secret is xyzzy " * 200}],
            }
            headers = {"Authorization": "Bearer sk-plugh", "x-session-id": "session-frotz"}
            async with client.post(app.url + "/v1/chat/completions", json=body, headers=headers) as response:
                answer = (await response.json())["choices"][0]["message"]["content"]
    left = file.read_bytes()
    for word in (b"xyzzy", b"secret", b"plugh", b"frotz", answer[:12].encode()):
        assert word not in left
    with pytest.raises(UnreadableState):
        read_chunks(file, 10)
