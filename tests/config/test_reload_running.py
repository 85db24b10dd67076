"""A running router reads its settings again: files, load, bad input."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import ssl
import types
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import ClientSession

from router.cli.config_loader import load
from router.config import files
from router.config.reload import REFUSED, FileDebouncer, Reloader, refuse_empty
from router.config.runtime import RuntimeConfig, resolve
from router.config.schema import (
    AdminSettings,
    AuthSettings,
    ListenSettings,
    Settings,
    SettingsError,
    reloadable_keys,
)
from tests.config.reloaded import in_force, running, write
from tests.http.test_tls import secured
from tests.support.fakes import FakeEngine, events, half_then_waits, idle
from tests.support.keyring import Keyring

CHAT = "/v1/chat/completions"


def body(text: str = "x", *, stream: bool = True) -> dict[str, object]:
    """A chat request."""
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}]}


async def test_files_are_read_again(tmp_path: Path, engine: FakeEngine, client: ClientSession) -> None:
    """Keys, tokens and certificates that were written anew count after a reload, though no setting has changed."""
    authorities = [trustme.CA(), trustme.CA()]
    names = ("token", "key", "own.pem", "ca.pem", "ours.pem", "theirs.pem")
    token, key, own, ca, ours, theirs = (tmp_path / name for name in names)

    def write_all(number: int) -> dict[str, str]:
        """The files; returns what a client of the new keys sends."""
        authority = authorities[number]
        token.write_text(f"admin-token-{number:04}")
        key.write_text(f"key-{number}\n")
        authority.cert_pem.write_to_path(str(ca))
        for path, name in ((own, "127.0.0.1"), (ours, "router"), (theirs, "127.0.0.1")):
            authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(str(path))
        return Keyring(tmp_path, acme={}).of("acme")

    def served() -> ssl.SSLContext:
        """What a replica speaks."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(theirs)
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    settings: dict[str, Any] = {
        "listen__tls_certificate": str(own), "listen__tls_client_ca": str(ca),
        "admin__token_file": str(token), "upstream__api_key_file": str(key),
        "upstream__tls_ca": str(ca), "upstream__tls_certificate": str(ours),
    }  # fmt: skip
    settings["auth__keys_file"] = str(tmp_path / "keys.yaml")
    old = write_all(0)
    async with secured(engine, served()) as first, running(tmp_path / "file", first, **settings) as router:
        app = router.app
        trusting = ssl.create_default_context(cafile=ca)
        trusting.load_cert_chain(ours)
        async with client.post(app.url + CHAT, json=body(), headers=old, ssl=trusting) as response:
            assert response.status == 200
        new = write_all(1)
        async with secured(engine, served()) as second:
            await router.set(second, **settings)
            while set(app.router.fleet.members) != {second}:
                await asyncio.sleep(0.001)
            await app.control.probe_now()
            assert app.router.fleet.ready()
            trusting = ssl.create_default_context(cafile=ca)
            trusting.load_cert_chain(ours)
            for headers, status in ((new, 200), (old, 401)):
                async with client.post(app.url + CHAT, json=body(), headers=headers, ssl=trusting) as response:
                    assert response.status == status
            assert engine.seen[-1].headers["authorization"] == "Bearer key-1"
            assert app.control.tls is not None
            assert app.control.tls.cert_store_stats()["x509_ca"] == len(authorities)
            for number, status in ((1, 200), (0, 401)):
                bearer = {"Authorization": f"Bearer admin-token-{number:04}"}
                async with client.get(app.admin_url + "/metrics", headers=bearer) as response:
                    assert response.status == status
                async with client.get(app.url + "/metrics", headers=bearer, ssl=trusting) as response:
                    assert response.status == status


@pytest.mark.parametrize("gone", ["keys.yaml", "token", "ca.pem"])
async def test_a_file_that_goes_meanwhile(
    tmp_path: Path, engine: FakeEngine, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    """A file that is gone when it is read is reported like any other problem, and nothing changes."""
    Keyring(tmp_path, acme={})
    (tmp_path / "token").write_text("t" * 16)
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    settings = {
        "auth__keys_file": str(tmp_path / "keys.yaml"), "admin__token_file": str(tmp_path / "token"),
        "upstream__tls_ca": str(tmp_path / "ca.pem"),
    }  # fmt: skip
    async with running(tmp_path / "file", engine, **settings) as router:
        before = in_force(router)
        write(tmp_path / "file", engine, **settings, upstream__retries_max=7)
        checked = load(tmp_path / "file")
        (tmp_path / gone).unlink()
        await Reloader(checked, lambda: resolve(checked), router.app.apply, router.app.control.count_reload).reload()
        assert in_force(router) == before
        (said,) = [record for record in caplog.records if record.getMessage() == REFUSED]
        assert "No such file" in vars(said)["fields"]["problem"]


@pytest.mark.long
async def test_fifty_reloads_under_load(
    tmp_path: Path, engine: FakeEngine, other: FakeEngine, client: ClientSession
) -> None:
    """Replicas come and go and settings change fifty times over while requests and streams run: each is answered in
    full, with no retry allowed when a replica goes, and nothing is left open."""
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
            await router.set(*there, upstream__retries_max=n % 2, api__receipts=bool(n % 2))
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
        assert engine.url not in router.app.http.upstream._pools


@pytest.mark.promise("Broken settings never take effect, not in part.", "admin")
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
        before = in_force(router)
        (tmp_path / "file").write_text(text)
        await router.reloader.reload()
        said = [record for record in caplog.records if record.getMessage() == REFUSED]
        assert [record.levelno for record in said] == [logging.ERROR] * problems
        assert in_force(router) == before
        async with client.post(router.app.url + CHAT, json=body()) as response:
            assert response.status == 200
        assert await router.metric('warmroute_reloads_total{result="refused"}') == 1
        assert await router.metric("warmroute_last_reload_timestamp_seconds") is None


@pytest.mark.finding("2026-11-28/7")
@pytest.mark.promise("An empty or cut settings file removes neither all replicas nor the keys.", "admin")
@pytest.mark.parametrize("text", ["", "log: {requests: false}\n", "replicas: []\n"])
async def test_a_file_without_replicas_is_kept_out(
    tmp_path: Path, engine: FakeEngine, client: ClientSession, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """A file that is empty or was cut off before its replicas is refused, and the fleet goes on; with `allow_empty` it
    is what was meant."""
    async with running(tmp_path / "file", engine) as router:
        (tmp_path / "file").write_text(text)
        await router.reloader.reload()
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [REFUSED]
        async with client.post(router.app.url + CHAT, json=body()) as response:
            assert response.status == 200
        (tmp_path / "file").write_text("allow_empty: true\n" + text)
        await router.reloader.reload()
        assert router.reloader.settings.replicas == ()


@pytest.mark.finding("2026-11-28/7")
@pytest.mark.promise("An empty or cut settings file removes neither all replicas nor the keys.", "admin")
def test_a_reload_may_not_take_all_keys_away(tmp_path: Path) -> None:
    """Whatever a restart would do: it says so, and names what allows it."""
    old, open_ = Settings(auth=AuthSettings(keys_file="keys.yaml")), Settings()
    with pytest.raises(SettingsError, match=r"auth\.keys_file.*allow_empty: true"):
        refuse_empty(old, open_)
    refuse_empty(old, dataclasses.replace(open_, allow_empty=True))
    refuse_empty(open_, old)


@pytest.mark.finding("2026-11-28/7")
@pytest.mark.promise("An empty or cut settings file removes neither all replicas nor the keys.", "admin")
def test_a_settings_file_is_read_when_nothing_writes_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changed a moment ago is waited for, and one that changes for ever, or that is another machine's
    clock ahead, is not waited for without end."""
    file, now_s = tmp_path / "file", [1_000.0]
    writes = [1_000.0, 1_000.2, 1_000.4]  # times at which it is written, in pieces
    file.write_text("")

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        last_s = max([at for at in writes if at <= now_s[0]], default=0.0)
        os.utime(file, (last_s, last_s))

    monkeypatch.setattr(files, "time", types.SimpleNamespace(time=lambda: now_s[0], sleep=sleep))
    os.utime(file, (writes[0], writes[0]))
    files.wait_until_settled(file)
    assert 1_000.7 <= now_s[0] < 1_001.2
    writes += [1_001 + n / 10 for n in range(1_000)]
    sleep(0.3)
    began_s = now_s[0]
    files.wait_until_settled(file)
    assert now_s[0] - began_s == pytest.approx(files.SETTLE_S * files.SETTLE_LOOKS_MAX)
    os.utime(file, (2_000, 2_000))
    files.wait_until_settled(file)
    files.wait_until_settled(tmp_path / "not there")
    assert now_s[0] - began_s < 20


@pytest.mark.promise("A reload logs names of settings, never their values.", "records")
async def test_what_needs_a_restart_is_said_and_kept(
    tmp_path: Path, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the keys, another line what changed, neither a value; and the rest is applied."""
    caplog.set_level(logging.INFO)
    async with running(tmp_path / "file", engine) as router:
        await router.set(
            engine, listen__port=1, routing__policy="round_robin", upstream__retries_max=7, admin__token="s3cret" * 4
        )
        assert router.app.http.proxy._attempts.limits.retries_max == 7
        assert router.reloader.settings.listen.port == 0
        (kept,) = [r for r in caplog.records if r.getMessage() == "changed settings need a restart"]
        assert (kept.levelno, vars(kept)["fields"]) == (
            logging.WARNING,
            {"settings": ["listen.port", "routing.policy"]},
        )
        (applied,) = [r for r in caplog.records if r.getMessage() == "configuration reloaded"]
        assert vars(applied)["fields"] == {"changed": ["admin.token", "upstream.retries_max"]}
        assert await router.metric("warmroute_last_reload_timestamp_seconds") is not None


async def test_a_bug_while_reloading_is_not_the_end() -> None:
    """The next reload works."""
    told, settings = list[str](), Settings()

    def apply(_: RuntimeConfig) -> None:
        if not told:
            raise ZeroDivisionError

    reloader = Reloader(settings, lambda: resolve(settings), apply, told.append)
    watching = asyncio.create_task(reloader.watch())
    for n in (1, 2):
        reloader.ask()
        while len(told) < n:
            await asyncio.sleep(0)
    watching.cancel()
    assert told == ["refused", "ok"]


async def test_a_secret_that_is_exchanged(tmp_path: Path) -> None:
    """A file behind a link to a folder, as Kubernetes mounts a Secret, is read again when the link leads elsewhere, and
    so is one that is written in place; what stays the same is not, and neither is anything where looking is off."""
    mounted, told = tmp_path / "token", list[str]()
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "token").write_text(version * 8)
    (tmp_path / "data").symlink_to("one")
    mounted.symlink_to("data/token")
    listen, admin = ListenSettings(file_watch_interval_s=0.01), AdminSettings(token_file=str(mounted))
    settings = Settings(listen=listen, admin=admin)
    read, looked = list[str](), asyncio.Event()

    def reread() -> RuntimeConfig:
        read.append(mounted.read_text())
        return resolve(settings)

    def said(result: str) -> None:
        told.append(result)
        looked.set()

    reloader = Reloader(settings, reread, lambda _: None, said)
    watching = asyncio.create_task(reloader.watch())
    await asyncio.sleep(0.1)
    assert not read
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(tmp_path / "data")
    async with asyncio.timeout(60):
        await looked.wait()
    looked.clear()
    (tmp_path / "two" / "token").write_text("three" * 8)
    async with asyncio.timeout(60):
        await looked.wait()
    assert (read, told) == (["two" * 8, "three" * 8], ["ok", "ok"])
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def test_a_file_that_is_being_written() -> None:
    """A file is left alone while it changes: its change is told once, when two looks have found the same, and so is
    its end."""
    changes = FileDebouncer((("token", 1, 0, 4),))
    looks = [(4, False), (5, False), (6, False), (6, True), (6, False), (0, False), (0, True), (6, False), (0, False)]
    assert [changes.has_settled((("token", 1, 0, size),)) for size, _ in looks] == [told for _, told in looks]


def test_every_file_that_is_live_is_looked_at() -> None:
    """A live setting that names a file is among those that are looked at, by its name."""
    marks = reloadable_keys()
    named = {key for key in marks if key.endswith(("_file", "tls_certificate", "tls_key", "tls_ca", "tls_client_ca"))}
    assert {key for key, mark in marks.items() if mark.is_file} == named
