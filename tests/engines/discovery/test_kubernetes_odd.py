"""Accounts, forbidden namespaces, nonsense and histories over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trustme
from aiohttp import web
from kubernetes.aio.config import incluster_config

from router.config.schema import DiscoverySettings
from router.engines.discovery import informer
from router.engines.discovery.kubernetes import KubernetesDiscovery
from tests.engines.discovery.cluster import NAMESPACES, SELECTOR, Pods
from tests.engines.discovery.followed import Followed
from tests.support.apiserver import ApiServer
from tests.support.podstore import failure, pod

RUNS = max(10, int(os.environ.get("WARMROUTE_DISCOVERY_RUNS", "200")) // 50)


AT_ONCE = 10


async def test_service_account(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files of a service account are missing, discovery says so, and goes on trying."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    discovery = KubernetesDiscovery(DiscoverySettings("kubernetes", ("default",), SELECTOR))
    task = asyncio.ensure_future(anext(discovery.watch()))
    async with asyncio.timeout(60):
        while discovery.status().errors < 2:
            await asyncio.sleep(0.01)
    assert (
        "the router's credentials cannot be read: ConfigException: Service host/port is not set."
        in discovery.status().why
    )
    assert "set discovery.kubeconfig" in discovery.status().why
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Account:
    """The files of a service account, and the environment that every pod has."""

    def __init__(self, api: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.token, self.authority = folder / "token", folder / "ca.crt"
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(self.token))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(self.authority))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", api.host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))


def authority(api: ApiServer) -> trustme.CA:
    """A new one, by which the API server is known from its next `up` on."""
    ca = trustme.CA()
    api.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert(api.host).configure_cert(api.tls)
    return ca


@pytest.mark.promise(
    "The API server's CA is reloaded on change, and untrusted certificates are never accepted.", "discovery"
)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_files_of_a_service_account_change(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another authority, a token that is another one, or is not there for a while: all are read anew while we run."""
    api = ApiServer(host=host)
    former = authority(api)
    async with api:
        api.store.create(pod("a"))
        account = Account(api, tmp_path, monkeypatch)
        account.token.write_text(f"{api.token}\n")
        former.cert_pem.write_to_path(str(account.authority))
        async with Followed(api, tmp_path, kubeconfig="", namespaces=("default",)) as view:
            status = view.discovery.status
            account.token.write_text(f"{api.token}\n")
            await view.until_names("a")
            await api.down()
            latter = authority(api)
            await api.up()
            await view.until(lambda: "the certificate of the API server is not trusted" in status().why)
            latter.cert_pem.write_to_path(str(account.authority))
            await view.until(lambda: status().fresh)
            account.token.write_text("")
            api.token = "another"
            api.close_watches()
            await view.until(lambda: "Token file exists but empty" in status().why)
            account.token.write_text(api.token)
            api.store.create(pod("b", ip="10.0.0.2"))
            await view.until_names("a", "b")
            await view.until(lambda: status().fresh)


async def test_a_client_that_was_closed_meanwhile(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who we are is read anew for one namespace while another is about to ask: that one asks again, and no bug is
    logged."""
    from kubernetes.aio.client import Configuration

    settings, client = Configuration.auth_settings, None

    async def closed(self: Configuration) -> Any:
        nonlocal client
        if client is not None:
            await client.close()
            client = None
        return await settings(self)

    async with Followed(api, tmp_path) as view:
        await view.until_names("a")
        monkeypatch.setattr(Configuration, "auth_settings", closed)
        client = view.discovery._api
        api.store.delete("a")
        api.close_watches()
        await view.until_names()
        await view.until(lambda: view.discovery.status().fresh)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_one_namespace_is_forbidden(api: ApiServer, tmp_path: Path) -> None:
    """The other works, from the beginning and on; which one it is, and what a Role needs there, is said for as long."""
    api.forbidden = {"secret"}
    async with Followed(api, tmp_path, namespaces=("secret", "default")) as view:
        await view.until_names("a")
        api.store.create(pod("b", ip="10.0.0.2"))
        await view.until_names("a", "b")
        status = view.discovery.status()
        assert (status.fresh, status.why.count("namespace ")) == (False, 3)
        assert status.why.startswith("namespace secret: 403: the router may not list pods in namespace secret, a Role")
        assert "default" not in status.why
        api.forbidden = set()  # it is created, say, and the Role with it
        await view.until(lambda: view.discovery.status().fresh)


def written(*pieces: bytes, cut: bool = False) -> Callable[[str, web.Request], Awaitable[web.StreamResponse | None]]:
    """The next watch is told these pieces, each a chunk of its own, and then its connection breaks, if it is to be
    cut, or the answer ends; then all is well again."""
    rest = [pieces]

    async def odd(verb: str, request: web.Request) -> web.StreamResponse | None:
        if verb != "watch" or not rest:
            return None
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for piece in rest.pop():
            await response.write(piece)
            await asyncio.sleep(0.01)
        if cut and request.transport is not None:
            request.transport.abort()
        return response

    return odd


def _event(kind: str, what: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": what}, ensure_ascii=False).encode() + b"\n"


ODD = {
    "html": (b"<html>Please log in</html>\n",),
    "half": (b'{"type": "DELETED", "obj',),
    "error": (_event("ERROR", failure(500, "InternalError", "etcd is gone")),),
    "busy": (_event("ERROR", failure(429, "TooManyRequests", "later")),),
    "nothing": (b"null\n",),
    "strange": (b'{"type": "MODIFIED", "object": {"metadata": {"name": 5}}}\n{"type": "BOOKMARK", "object": {}}\n',),
}


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("case", ODD)
async def test_a_watch_that_says_nonsense(
    api: ApiServer, tmp_path: Path, case: str, cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Pods are listed again, at once: what happened meanwhile is known, nobody leaves, and the view is not stale."""
    api.odd = written(*ODD[case], cut=cut)
    async with Followed(api, tmp_path) as view:
        await view.until_names("a")
        await view.until(lambda: api.asked["list"] > 1)
        api.store.create(pod("b", ip="10.0.0.2"))
        await view.until_names("a", "b")
        assert [len(found) for found in view.sets] == [1, 2]
        assert view.discovery.status().fresh
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_page_that_is_none(api: ApiServer, tmp_path: Path) -> None:
    """A proxy before the API server answers 200 with a page for people: the last good view stays, and is flagged."""

    async def page(verb: str, _: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>Please log in</html>", content_type="text/html")

    async with Followed(api, tmp_path) as view:
        await view.until_names("a")
        api.odd = page
        api.close_watches()
        await view.until(lambda: "is invalid" in view.discovery.status().why)
        assert view.names == {"a"}
        api.odd = None
        await view.until(lambda: view.discovery.status().fresh)


async def test_events_in_pieces(api: ApiServer, tmp_path: Path) -> None:
    """However the answer is cut, within a character too, and however long an event is, up to what etcd takes."""
    made = api.store.create(pod("b", ip="10.0.0.2", ready=False))
    made["metadata"] |= {"resourceVersion": "900", "annotations": {"note": "gr\u00fc\u00dfe \U0001f600" * 125_000}}
    made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    line = _event("MODIFIED", made)
    assert len(line) > 1_500_000
    api.odd = written(line[:-700_001], line[-700_001:-3], line[-3:] + line[:1], line[1:])
    async with Followed(api, tmp_path) as view:
        await view.until_names("a", "b")
        assert view.discovery.status().errors == 0


async def test_a_watch_that_breaks_is_not_gone_on_with(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What breaks a watch may have lost its last events, which an API server in trouble never tells again: pods are
    listed, also where a list is dear."""
    monkeypatch.setattr(informer, "PAGE_PODS", 1)
    api.store.create(pod("b", ip="10.0.0.2"))
    async with Followed(api, tmp_path) as view:
        await view.until_names("a", "b")
        await view.until(lambda: bool(api.watching))
        api.dropping = True
        api.store.delete("a")
        await asyncio.sleep(0.05)
        api.dropping = False
        api.store.create(pod("c", ip="10.0.0.3"))
        await view.until_names("a", "b", "c")  # a watch from here does not hear of what was lost
        api.close_watches()
        await view.until_names("b", "c")


async def _history(seed: int, folder: Path) -> None:
    pods = Pods(Random(seed))
    async with ApiServer(pods.store) as api, Followed(api, folder, namespaces=NAMESPACES) as view:
        for _ in range(2):
            for _ in range(pods.random.randrange(2, 12)):
                pods.change()
                match pods.random.randrange(8):
                    case 0:
                        api.close_watches()
                    case 1:
                        pods.store.compact()
                    case 2:
                        api.repeating = not api.repeating
                    case 3:
                        api.dropping = True
                    case 4:
                        api.failing = (pods.random.choice([401, 500, 503, 504]), "")
                        api.close_watches()
                    case 5:
                        api.stalled = True
                await asyncio.sleep(pods.random.choice([0, 0, 0.02, 0.1]))
            if pods.random.random() < 0.5:
                await api.down()
                pods.change()
                await asyncio.sleep(0.1)
                await api.up()
            api.dropping = api.stalled = api.repeating = False
            api.failing = None
            api.close_watches()  # those that were deaf or dead are reset: that is when they have recovered
            await view.until(
                lambda: (
                    bool(view.sets) and {(r.id, r.name, r.instance) for r in view.sets[-1] if r.ready} == pods.truth()
                )
            )


async def test_histories_over_http(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever happened to pods, API server and connections: afterwards the view becomes the truth."""
    for first in range(0, RUNS, AT_ONCE):
        await asyncio.gather(
            *(_history(seed, tmp_path_factory.mktemp(str(seed))) for seed in range(first, first + AT_ONCE))
        )
