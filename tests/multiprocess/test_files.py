"""Files that settings name, with several processes: all serve with what was last accepted, whoever is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import time
from pathlib import Path

import pytest
import trustme
from aiohttp import ClientSession, TCPConnector

from router.config import file_contents, tls
from router.config.api_keys import Keys
from tests.multiprocess.test_processes import CHAT, Command, body, command
from tests.multiprocess.test_processes import pytestmark as looks_into_proc
from tests.support.fakes import FakeEngine
from tests.support.figures import figure
from tests.support.keyring import ADMIN, SECRET, Keyring
from tests.support.waiting import until

pytestmark = [
    looks_into_proc,
    pytest.mark.promise("Broken settings never take effect, not in part and not in a restarted process.", "admin"),
]

BACK_MAX_S = 3.0


async def ask(app: Command, headers: dict[str, str]) -> int:
    """The status of one request, on a connection of its own, to whichever worker takes it."""
    async with ClientSession() as client, client.post(app.url + CHAT, json=body(), headers=headers) as response:
        await response.read()
        return response.status


async def killed(app: Command, *names: str) -> float:
    """Kill these processes at once. Returns the seconds until others have taken their places and serve."""
    before = {name: len(app.pids(name)) for name in names}
    joined = app.said("a worker joined")
    began_s = time.monotonic()
    for name in names:
        os.kill(app.pids(name)[-1], signal.SIGKILL)
    await until(lambda: all(len(app.pids(name)) > count for name, count in before.items()))
    joins = 2 if "hub" in names else 1  # workers that join a hub: all of them a new one, a new one the old
    await until(lambda: app.said("a worker joined") >= joined + joins)
    return time.monotonic() - began_s


@pytest.mark.promise("Keys and certificates are replaced without a restart, in all processes.", "admin")
@pytest.mark.long
@pytest.mark.figures
async def test_whoever_is_killed_comes_back_with_what_was_accepted(tmp_path: Path, engine: FakeEngine) -> None:
    """Keys that were changed on disk and not reloaded, then broken and refused, are those last accepted for every
    process: a hub, a worker, or both that are killed are back with them, and no worker answers otherwise."""
    ring = Keyring(tmp_path, acme={}, gone={})
    later = Keyring(tmp_path / "..", acme={})  # any other keys
    accepted = ring.file.read_text()
    settings = {"auth__keys_file": str(ring.file), "auth__secret": SECRET, "admin__token": ADMIN}
    async with command(engine, listen__file_watch_interval_s="0", **settings) as app:
        for broken in (False, True):
            ring.file.write_text("- {" if broken else later.file.read_text())
            if broken:
                app.process.send_signal(signal.SIGHUP)
                await until(lambda: app.said("new configuration is invalid: the old one remains active"))
            for names in (("hub",), ("worker 0",), ("hub", "worker 1")):
                took_s = await killed(app, *names)
                figure(f"{' and '.join(names)} killed, keys {'broken' if broken else 'changed'}: s", BACK_MAX_S, took_s)
                assert [await ask(app, ring.of("gone")) for _ in range(8)] == [200] * 8
                assert [await ask(app, later.of("acme")) for _ in range(4)] == [401] * 4
        ring.file.write_text(accepted.replace(accepted[accepted.index("\n- ") + 1 :], ""))
        app.process.send_signal(signal.SIGHUP)
        await until(lambda: app.said("configuration reloaded"))
        while await ask(app, ring.of("gone")) != 401:  # each process is told by itself
            await asyncio.sleep(0.01)
        await killed(app, "hub", "worker 0")
        assert {await ask(app, ring.of("gone")) for _ in range(8)} == {401}
        assert {await ask(app, ring.of("acme")) for _ in range(8)} == {200}


@pytest.mark.long
async def test_certificates_and_tokens_are_those_accepted(tmp_path: Path, engine: FakeEngine) -> None:
    """A worker that is started again shows the certificate that was accepted, though its file is gone, and the hub asks
    for the same token."""
    authority = trustme.CA()
    pem, token = tmp_path / "all.pem", tmp_path / "token"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    token.write_text(ADMIN)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    settings = {
        "listen__tls_certificate": str(pem),
        "admin__token_file": str(token),
        "listen__file_watch_interval_s": "0",
    }
    async with command(engine, tls=context, **settings) as app:
        pem.unlink()
        token.write_text("another-token-of-somebody")
        await killed(app, "worker 0")
        await killed(app, "hub", "worker 1")
        for _ in range(8):
            async with ClientSession(connector=TCPConnector(ssl=context)) as client:
                async with client.get(f"{app.url}/healthz") as response:
                    assert response.status == 200
                async with client.get(
                    f"{app.admin_url}/metrics", headers={"Authorization": f"Bearer {ADMIN}"}
                ) as response:
                    assert response.status == 200


def test_what_was_checked_is_what_is_handed_on(tmp_path: Path) -> None:
    """A file that changes while it is checked is noted as it was checked, whoever reads it again, and certificates
    can be loaded from what was noted when their files are gone."""
    ring, pem = Keyring(tmp_path, acme={}), tmp_path / "all.pem"
    trustme.CA().issue_cert("here").private_key_and_cert_chain_pem.write_to_path(pem)
    with file_contents.recording() as files:
        Keys.load(ring.file, isolate=False, receipts=False)
        assert not tls.listener_problems(str(pem), "", str(pem))
        ring.file.write_text("- {")
        Keys.load(ring.file, isolate=False, receipts=False)
    assert files.keys() == {str(ring.file), str(pem)}
    before = file_contents.install(files)
    try:
        pem.unlink()
        assert "acme" in Keys.load(ring.file, isolate=False, receipts=False).tenants
        assert tls.listener_context(str(pem), str(pem), str(pem)) is not None
        tls.replica_context(str(pem), str(pem), "")
    finally:
        file_contents.install(before)
