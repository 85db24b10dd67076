"""Settings read again while the router runs: what comes of them, and that nothing under way notices."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from router.app import App
from router.reloading import FILES, FIXED, LIVE, REFUSED, SWITCHES, Reloader, change
from router.settings import Settings, field_keys, load
from tests.fakes import FakeEngine, events, half_then_waits, idle

CHAT = "/v1/chat/completions"


def body(text: str = "x", *, stream: bool = True) -> dict[str, object]:
    """A chat request."""
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}]}


class Running:
    """A router that has its settings from a file."""

    def __init__(self, app: App, reloader: Reloader, file: Path) -> None:
        self.app, self.reloader, self.file = app, reloader, file

    async def set(self, *engines: FakeEngine, **settings: Any) -> None:
        """Write the file, and have it read again."""
        write(self.file, *engines, **settings)
        await self.reloader.reload()

    async def replicas_are(self, *engines: FakeEngine) -> None:
        """Wait until these are known, and probe them."""
        while set(self.app.router.fleet.members) != {engine.url for engine in engines}:
            await asyncio.sleep(0.001)
        await self.app.hub.probe_now()

    async def metric(self, name: str) -> float | None:
        """As it is scraped."""
        for line in (await self.app.hub.metrics.page_in_slices()).decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series == name:
                return float(value)
        return None


def write(file: Path, *engines: FakeEngine, **settings: Any) -> None:
    """A settings file."""
    sections: dict[str, Any] = {"replicas": [engine.url for engine in engines]}
    base = {"listen__port": 0, "listen__admin_port": 0, "probe__interval_s": 3600.0}
    for key, value in (base | settings).items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    file.write_text(json.dumps(sections))


@asynccontextmanager
async def running(file: Path, *engines: FakeEngine, **settings: Any) -> AsyncIterator[Running]:
    """A router in front of these engines, every replica probed once."""
    write(file, *engines, **settings)
    async with App(load(file)) as app:
        await app.hub.probe_now()
        yield Running(app, Reloader(load(file), lambda: load(file), app.reload, app.hub.reloaded), file)


def other_than(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2
    return value + (("x",) if isinstance(value, tuple) else "x")


def having(settings: Settings, key: str, value: Any) -> Settings:
    """The same but for one."""
    section, _, name = key.partition(".")
    if not name:
        return dataclasses.replace(settings, **{key: value})
    return dataclasses.replace(settings, **{section: dataclasses.replace(getattr(settings, section), **{name: value})})


def value_of(settings: Settings, key: str) -> Any:
    """By its dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name) if name else getattr(settings, key)


def test_every_setting_is_live_or_fixed() -> None:
    """Each is in one table and in one only, so that nobody adds one without a thought of it; files are live."""
    assert set(field_keys()) == LIVE | FIXED
    assert not LIVE & FIXED
    assert set(FILES) <= LIVE
    assert set(FILES) >= SWITCHES
    assert len(set(FILES)) == len(FILES)


@pytest.mark.parametrize("key", sorted(field_keys()))
def test_what_is_live_changes_and_nothing_else(key: str) -> None:
    """One changed setting is taken over or kept out, by its table, and named; every other stays as it was."""
    old = having(Settings(), key, "there") if key in SWITCHES else Settings()
    new = having(old, key, other_than(value_of(old, key)))
    found = change(old, new)
    assert found.settings == (new if key in LIVE else old)
    assert (found.applied, found.kept) == (((key,), ()) if key in LIVE else ((), (key,)))


@pytest.mark.parametrize("key", sorted(SWITCHES))
def test_a_switch_needs_a_restart(key: str) -> None:
    """What is turned on or off stays as it was, and is named."""
    off, on = Settings(), having(Settings(), key, "there")
    for old, new in ((off, on), (on, off)):
        found = change(old, new)
        assert (found.settings, found.applied, found.kept) == (old, (), (key,))


def in_force(app: App) -> dict[str, Any]:
    """What parts of the router hold that was given to them by settings."""
    edge = app.edge
    of = {
        edge.upstream: ("_connect_timeout_s", "_first_byte_timeout_s", "_idle_timeout_s", "_keepalive_s"),
        edge.proxy: ("_receipts",),
        edge.proxy._attempts: ("_retries_max", "_retry_on_timeout"),
        edge._server: ("limits",),
        edge: ("_inference", "_settings"),
        app.hub: ("settings",),
        app: ("_settings",),
    }
    held = {f"{type(part).__name__}.{name}": getattr(part, name) for part, names in of.items() for name in names}
    held |= {"ratio": edge._budget.ratio, "floor": edge._budget.floor_per_s, "usage": edge.reader.ask_usage}
    return held | {"held": edge.upstream._held_bytes_max}


async def test_a_reload_is_as_good_as_a_restart(tmp_path: Path, engine: FakeEngine) -> None:
    """After a reload every part holds what it would hold had it been started with these settings."""
    defaults, settings = Settings(), {}
    for key in sorted(LIVE - set(FILES)):
        section, dot, _ = key.partition(".")
        if dot and section in ("listen", "upstream", "limits", "api"):
            settings[key.replace(".", "__")] = other_than(value_of(defaults, key))
    settings["api__passthrough"] = ["/only"]
    settings["upstream__api_key"] = "k"
    async with running(tmp_path / "a", engine) as router:
        before = in_force(router.app)
        await router.set(engine, **settings)
        reloaded = in_force(router.app)
    async with running(tmp_path / "b", engine, **settings) as router:
        assert in_force(router.app) == reloaded
    assert not [name for name, value in before.items() if reloaded[name] == value]


async def test_fifty_reloads_under_load(
    tmp_path: Path, engine: FakeEngine, other: FakeEngine, client: ClientSession
) -> None:
    """Replicas come and go and settings change fifty times over while requests and streams run: each is answered in
    full, and nothing is left open."""
    engine.script.extend([half_then_waits] * 4)
    other.script.extend([half_then_waits] * 4)
    async with running(tmp_path / "file", engine, other) as router:
        app, ended = router.app, 0
        streams = [await client.post(app.url + CHAT, json=body(f"{n} " * 300)) for n in range(4)]
        for each in (engine, other):
            each.script.clear()
        over = asyncio.Event()

        async def ask(number: int) -> None:
            nonlocal ended
            for n in itertools.count():
                async with client.post(app.url + CHAT, json=body(f"{number} {n}")) as response:
                    assert (response.status, await response.read()) == (200, b"".join(events()))
                    ended += 1
                if over.is_set():
                    return

        asking = [asyncio.create_task(ask(number)) for number in range(4)]
        for n in range(50):
            enough = ended + 4
            there = (engine, other) if n % 2 else (other,)
            await router.set(*there, upstream__retries_max=n, api__receipts=bool(n % 2))
            await router.replicas_are(*there)
            while ended < enough and not any(task.done() for task in asking):
                await asyncio.sleep(0)
        over.set()
        await asyncio.gather(*asking)
        for each in (engine, other):
            each.go_on.set()
        assert [await stream.read() for stream in streams] == [b"".join(events())] * 4
        while not idle(app):
            await asyncio.sleep(0)
        assert await router.metric('warmroute_reloads_total{result="ok"}') == 50
        assert await router.metric('warmroute_reloads_total{result="refused"}') == 0


async def test_a_replica_that_is_taken_out_finishes(
    tmp_path: Path, engine: FakeEngine, other: FakeEngine, client: ClientSession
) -> None:
    """What runs on it ends well; what comes goes elsewhere; its connections are closed; its lease is not left over."""
    engine.script.append(half_then_waits)
    async with running(tmp_path / "file", engine) as router:
        stream = await client.post(router.app.url + CHAT, json=body())
        await engine.at_work.wait()
        await router.set(other)
        await router.replicas_are(other)
        for _ in range(5):
            async with client.post(router.app.url + CHAT, json=body()) as response:
                assert response.headers["x-warmroute-replica"] == other.url
        engine.go_on.set()
        assert await stream.read() == b"".join(events())
        assert len(engine.seen) == 1
        while not idle(router.app):
            await asyncio.sleep(0)
        assert engine.url not in router.app.edge.upstream._servers


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("replicas: [http://a, http://a]\nlog: {level: loud}\n", 2),
        ("upstream: {retries_max: -1}\n", 1),
        ("nonsense: 1\n", 1),
        ("[", 1),
        ("auth: {keys_file: /nowhere/keys.yaml}\n", 1),
        ("auth: {keys_file: /dev/null}\n", 1),
        ("listen: {tls_certificate: /}\n", 1),
    ],
)
async def test_a_bad_file_is_kept_out(
    tmp_path: Path,
    engine: FakeEngine,
    client: ClientSession,
    caplog: pytest.LogCaptureFixture,
    text: str,
    problems: int,
) -> None:
    """The old settings stay in force, whole; each problem is one line of level error; it is counted. So it is with a
    file that the settings name and nobody can read."""
    async with running(tmp_path / "file", engine) as router:
        before = in_force(router.app)
        (tmp_path / "file").write_text(text)
        await router.reloader.reload()
        said = [record for record in caplog.records if record.getMessage() == REFUSED]
        assert [record.levelno for record in said] == [logging.ERROR] * problems
        assert in_force(router.app) == before
        async with client.post(router.app.url + CHAT, json=body()) as response:
            assert response.status == 200
        assert await router.metric('warmroute_reloads_total{result="refused"}') == 1
        assert await router.metric("warmroute_last_reload_timestamp_seconds") is None


async def test_what_needs_a_restart_is_said_and_kept(
    tmp_path: Path, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the keys, another line what changed, neither a value; and the rest is applied."""
    caplog.set_level(logging.INFO)
    async with running(tmp_path / "file", engine) as router:
        await router.set(
            engine, listen__port=1, routing__policy="round_robin", upstream__retries_max=7, admin__token="s3cret" * 4
        )
        assert router.app.edge.proxy._attempts._retries_max == 7
        assert router.reloader.settings.listen.port == 0
        (kept,) = [r for r in caplog.records if r.getMessage() == "settings that changed need a restart"]
        assert (kept.levelno, vars(kept)["fields"]) == (
            logging.WARNING,
            {"settings": ["listen.port", "routing.policy"]},
        )
        (applied,) = [r for r in caplog.records if r.getMessage() == "the settings were read again"]
        assert vars(applied)["fields"] == {"changed": ["admin.token", "upstream.retries_max"]}
        assert await router.metric("warmroute_last_reload_timestamp_seconds") is not None


async def test_a_bug_while_reloading_is_not_the_end() -> None:
    """The next reload works."""
    told, settings = list[str](), Settings()

    def apply(_: Settings) -> None:
        if not told:
            raise ZeroDivisionError

    reloader = Reloader(settings, lambda: settings, apply, told.append)
    watching = asyncio.create_task(reloader.watch())
    for n in (1, 2):
        reloader.ask()
        while len(told) < n:
            await asyncio.sleep(0)
    watching.cancel()
    assert told == ["refused", "ok"]
