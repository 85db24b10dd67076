"""TLS on the main listener and to replicas, by certificates made on the spot."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import ClientSession, web

from router.cli.config_loader import load
from router.cli.main import main
from router.config import tls
from router.config.schema import SettingsError
from tests.http.clients import LIMITS
from tests.http.looks import Looks
from tests.http.test_client_limits import flood
from tests.http.wire import STREAM, Client, RawEngine, Wire, on_uvloop, post, proxied, settled
from tests.support.fakes import FakeEngine, events, idle, running
from tests.support.recorded import SSE, head

pytestmark = pytest.mark.promise(
    "TLS is at least 1.2, configured certificates are checked, a cut answer is seen as cut.", "clients"
)

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@dataclass
class Files:
    """Certificates of one authority, as files."""

    folder: Path
    ca: trustme.CA

    @property
    def authority(self) -> str:
        """The authority's own."""
        path = self.folder / "ca.pem"
        self.ca.cert_pem.write_to_path(str(path))
        return str(path)

    def chain(self, name: str = "127.0.0.1") -> tuple[str, str]:
        """A new certificate for this name, and its key."""
        issued = self.ca.issue_cert(name)
        stem = len(list(self.folder.iterdir()))
        paths = str(self.folder / f"{stem}.pem"), str(self.folder / f"{stem}.key")
        issued.cert_chain_pems[0].write_to_path(paths[0])
        issued.private_key_pem.write_to_path(paths[1])
        return paths

    def trusting(self) -> ssl.SSLContext:
        """A client that knows the authority."""
        return ssl.create_default_context(cafile=self.authority)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """An authority of its own."""
    return Files(tmp_path, trustme.CA())


def listening(files: Files, **more: Any) -> dict[str, Any]:
    """Settings of a listener with TLS."""
    certificate, key = files.chain()
    return {"listen__tls_certificate": certificate, "listen__tls_key": key, **more}


async def secure(url: str, context: ssl.SSLContext) -> Client:
    """A client's connection."""
    host, port = url.removeprefix("https://").split(":")
    _, client = await asyncio.get_running_loop().create_connection(Client, host, int(port), ssl=context)
    return client


@pytest.mark.inside
@on_uvloop
async def test_served(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and pages are served over TLS as they are without; the URL says so, and what speaks no TLS, or an old
    one, is not served."""

    async def stream(wire: Wire) -> None:
        wire.transport.write(head(SSE, "transfer-encoding: chunked"))
        wire.transport.write(b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events()) + b"0\r\n\r\n")

    async with RawEngine(stream) as engine, proxied(engine, monkeypatch, **listening(files)) as app:
        assert app.url.startswith("https://127.0.0.1:")
        client = await secure(app.url, files.trusting())
        for n in range(3):
            client.ask(post(body=STREAM))
            assert (await client.answer(n)).body == b"".join(events())
        server = app.http._server
        assert server.connections == len(server.clients) == 1
        client.transport.close()
        await client.lost.wait()
        host, port = app.url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(post())
        assert b"HTTP" not in await reader.read()
        writer.close()
        old = files.trusting()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await secure(app.url, old)
        while server.connections:
            await asyncio.sleep(0)
        assert server.closed["tls_handshake"] == 2


@pytest.mark.inside
@on_uvloop
async def test_clients_must_show_a_certificate(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `listen.tls_client_ca` only clients of that authority are served."""

    async def play(wire: Wire) -> None:
        wire.transport.write(head("content-length: 2") + b"{}")

    more = {"listen__tls_client_ca": files.authority}
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **listening(files, **more)) as app:
        known = files.trusting()
        known.load_cert_chain(*files.chain("client"))
        client = await secure(app.url, known)
        client.ask(post())
        assert (await client.answer()).status == 200
        client.transport.close()
        stranger = files.trusting()
        trustme.CA().issue_cert("client").configure_cert(stranger)
        for context in (files.trusting(), stranger):
            try:
                client = await secure(app.url, context)
            except OSError:
                continue
            client.ask(post())
            await client.lost.wait()  # TLS 1.3 tells a client only then
            assert not client.answers
        assert len(engine.seen) == 1


@pytest.mark.promise("Connections are limited in all and per address, unfinished TLS handshakes included.", "clients")
@pytest.mark.inside
@on_uvloop
async def test_stalled_handshakes(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who begins a handshake and does not go on is ended as one who does not finish a head, counts as a connection
    meanwhile, and is refused before the handshake where there are too many."""
    more = {"listen__head_timeout_s": 6.0, "listen__connections_max": 20}  # all have come before the first is ended
    async with RawEngine(flood) as engine, proxied(engine, monkeypatch, **listening(files, **more)) as app:
        loop, server, stalled = asyncio.get_running_loop(), app.http._server, list[socket.socket]()
        host, port = app.url.removeprefix("https://").split(":")
        for n in range(30):
            sock = socket.create_connection((host, int(port)))  # some are reset before the loop would tell of them
            with suppress(OSError):
                sock.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" if n % 2 else b"")
            stalled.append(sock)
        for sock in stalled:
            sock.setblocking(False)
            with suppress(OSError):
                assert await loop.sock_recv(sock, 1) in (b"", b"\x15")  # an alert
            sock.close()
        assert (server.closed["connections_max"], server.closed["tls_handshake"]) == (10, 20)
        while server.connections:
            await asyncio.sleep(0)


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
@on_uvloop
async def test_stopping_in_mid_handshake(begun: bytes, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that is told to stop does not wait for a handshake, and leaves no connection behind."""
    async with RawEngine(flood) as engine:
        async with running(engine.url, **listening(files)) as app:
            host, port = app.url.removeprefix("https://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begun)
            while not app.http._server.connections:
                await asyncio.sleep(0)
        assert app.http._server.connections == 0
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.promise("Keys and certificates are replaced without a restart.", "admin")
@pytest.mark.inside
@on_uvloop
async def test_a_certificate_is_replaced(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that takes another's place is used by connections to come; those that exist go on."""
    settings_ = listening(files)
    async with RawEngine(flood) as engine, proxied(engine, monkeypatch, **settings_) as app:
        before = await secure(app.url, files.trusting())
        renewed = files.chain()
        app.http._server.tls = tls.listener_context(*renewed, "")
        after = await secure(app.url, files.trusting())
        numbers = []
        for n, client in enumerate((before, after)):
            client.ask(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", "GET")
            assert (await client.answer()).status == 200, n
            numbers.append(client.transport.get_extra_info("ssl_object").getpeercert()["serialNumber"])
            client.transport.close()
        assert numbers[0] != numbers[1]


@pytest.mark.inside
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@on_uvloop
async def test_a_cut_answer_does_not_look_whole(version: str, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the engine breaks off in an answer that has no error event, the client sees that over TLS too: without
    chunks by an end that says no goodbye."""

    async def breaks(wire: Wire) -> None:
        await wire.send(head(SSE, "transfer-encoding: chunked"), b"a\r\ndata: {}\n\n\r\n")
        wire.reset()

    async with RawEngine(breaks) as engine, proxied(engine, monkeypatch, **listening(files)) as app:
        host, port = app.url.removeprefix("https://").split(":")
        raw = post("/rerank", STREAM, version=version)
        whole = await asyncio.to_thread(_read_to_end, host, int(port), files.trusting(), raw)
        assert whole is None or not whole.endswith(b"0\r\n\r\n")
        if version == "1.0":
            assert whole is None
        await settled(app)


def _read_to_end(host: str, port: int, context: ssl.SSLContext, raw: bytes) -> bytes | None:
    """What comes until a proper end; None where there is none."""
    with (
        socket.create_connection((host, port)) as plain,
        context.wrap_socket(plain, server_hostname=host, suppress_ragged_eofs=False) as wrapped,
    ):
        wrapped.sendall(raw)
        got = b""
        try:
            while piece := wrapped.recv(65_536):
                got += piece
        except OSError:
            return None
        return got


@pytest.mark.promise(
    "A client that does not read costs at most 1 MiB and is ended after `listen.send_timeout_s`.", "clients"
)
@pytest.mark.inside
@on_uvloop
async def test_clients_that_do_not_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS too the engine is stopped for such a client, little is kept, and after `send_timeout_s` it is ended."""
    async with RawEngine(flood) as engine, proxied(engine, monkeypatch, **listening(files)) as app:
        looks = Looks(app.http._server)
        client = await secure(app.url, files.trusting())
        client.transport.pause_reading()
        client.ask(post(body=STREAM))
        kept_max = 0
        while not app.http._server.closed["send_timeout"]:
            await asyncio.sleep(0)
            kept_max = max([kept_max, *(each.unread_bytes for each in app.http._server.clients)])
            if kept_max:
                await looks.look(LIMITS.send_timeout_s + 1)
        assert 0 < kept_max <= 1 << 20
        await settled(app)
        client.transport.abort()


@asynccontextmanager
async def secured(engine: FakeEngine, context: ssl.SSLContext) -> AsyncIterator[str]:
    """The engine's pages over TLS too; its URL."""
    runner = web.AppRunner(engine._runner.app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("mutual", [False, True])
async def test_replicas(files: Files, engine: FakeEngine, client: ClientSession, mutual: bool) -> None:
    """A replica of `upstream.tls_ca` is probed and called over TLS, with our certificate where it wants one; one of
    another authority is neither."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files.chain())
    chain = files.chain("router")
    ours = {"upstream__tls_ca": files.authority}
    if mutual:
        context.load_verify_locations(files.authority)
        context.verify_mode = ssl.CERT_REQUIRED
        ours |= {"upstream__tls_certificate": chain[0], "upstream__tls_key": chain[1]}
    async with secured(engine, context) as url:
        async with running(url, **ours) as app:
            assert app.router.fleet.ready()
            async with client.post(app.url + CHAT, json={**ASKED, "stream": True}) as response:
                assert await response.read() == b"".join(events())
            assert idle(app)
        async with running(url, **({} if not mutual else {"upstream__tls_ca": files.authority})) as app:
            assert not app.router.fleet.ready()
            async with client.post(app.url + CHAT, json=ASKED) as response:
                assert response.status == 503
        assert len(engine.seen) == 1


@pytest.mark.usefixtures("bare_environment")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"listen.tls_certificate": "absent.pem"}, "'listen.tls_certificate': .*absent.pem: No such file"),
        ({"listen.tls_certificate": "A", "listen.tls_key": "absent"}, "'listen.tls_key': .*absent: No such file"),
        (
            {"listen.tls_certificate": "A", "listen.tls_key": "Bkey"},
            "'listen.tls_key': .*does not belong to the certificate",
        ),
        ({"listen.tls_certificate": "A"}, "'listen.tls_certificate': .*not valid"),
        ({"listen.tls_certificate": "text", "listen.tls_key": "Akey"}, "'listen.tls_certificate': .*not valid"),
        ({"listen.tls_key": "Akey"}, "'listen.tls_key': needs 'listen.tls_certificate'"),
        ({"listen.tls_certificate": "A", "listen.tls_key": "Akey", "listen.tls_client_ca": "text"}, "tls_client_ca"),
        ({"upstream.tls_ca": "text"}, "'upstream.tls_ca'"),
        ({"upstream.tls_ca": "absent"}, "'upstream.tls_ca': .*No such file"),
        ({"upstream.tls_certificate": "A", "upstream.tls_key": "Bkey"}, "'upstream.tls_key': .*does not belong"),
        ({"upstream.tls_key": "Akey"}, "'upstream.tls_key': needs"),
    ],
)
def test_wrong_files(
    given: dict[str, str], said: str, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is absent, not PEM, or another's is named with its setting, by `check-config` as at start."""
    (tmp_path / "text").write_text("no PEM")
    (a, a_key), (_, b_key) = files.chain(), files.chain()
    paths = {"A": a, "Akey": a_key, "Bkey": b_key}
    overrides = {key: paths.get(value, str(tmp_path / value)) for key, value in given.items()}
    with pytest.raises(SettingsError, match=said):
        load(overrides=overrides)
    config = tmp_path / "warmroute.yaml"
    lines = [f"{key.split('.')[0]}: {{{', '.join(_inner(overrides))}}}" for key in list(overrides)[:1]]
    config.write_text("\n".join(lines))
    assert main(["check-config", str(config)]) == 2
    assert "tls_" in capsys.readouterr().err


def _inner(overrides: dict[str, str]) -> list[str]:
    return [f"{key.split('.')[1]}: {value}" for key, value in overrides.items()]


@pytest.mark.usefixtures("bare_environment")
async def test_the_command(files: Files, engine: FakeEngine) -> None:
    """`warmroute serve` with a certificate says https and serves that; whoever does not know its authority is not
    served."""
    certificate, key = files.chain()
    command = ["-m", "router", "serve", "--replica", engine.url, "--port", "0", "--admin-port", "0"]
    command += ["--set", f"listen.tls_certificate={certificate}", "--set", f"listen.tls_key={key}"]
    command += ["--set", "listen.lame_duck_s=0"]
    pipes: dict[str, Any] = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.DEVNULL}
    router = await asyncio.create_subprocess_exec(sys.executable, *command, env=dict(os.environ), **pipes)
    try:
        assert router.stdout is not None
        url = (await router.stdout.readline()).split()[1].decode()
        assert url.startswith("https://")
        async with ClientSession() as session:
            while (await session.get(url + "/readyz", ssl=files.trusting())).status != 200:
                await asyncio.sleep(0.05)  # another process
            async with session.post(url + CHAT, json=ASKED, ssl=files.trusting()) as response:
                assert response.status == 200
            async with session.get(url + "/metrics", ssl=files.trusting()) as response:
                assert 'warmroute_connections_closed_total{reason="tls_handshake"}' in await response.text()
        with pytest.raises(ssl.SSLCertVerificationError):
            await secure(url, ssl.create_default_context())
        router.send_signal(signal.SIGTERM)
        assert await router.wait() == 0
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()
