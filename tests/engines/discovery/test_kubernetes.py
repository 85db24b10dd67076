"""The official client against a fake API server, over real connections."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Self

import pytest
import trustme
from aiohttp import web
from kubernetes.aio.config import incluster_config

from router.core.facts.replicas import Replica
from router.engines.discovery import pod_watch
from router.engines.discovery.kubernetes import Client, KubernetesDiscovery
from router.settings.schema import DiscoverySettings
from tests.engines.discovery.cluster import NAMESPACES, SELECTOR, Pods
from tests.support.apiserver import ApiServer
from tests.support.podstore import failure, pod

RUNS = max(10, int(os.environ.get("WARMROUTE_DISCOVERY_RUNS", "200")) // 50)
AT_ONCE = 10


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    """A well one, with one pod."""
    async with ApiServer() as server:
        server.store.create(pod("a"))
        yield server


class Followed:
    """`async with Followed(api, folder) as view`: what discovery yields."""

    def __init__(self, api: ApiServer, folder: Path, **settings: Any) -> None:
        self.kubeconfig = api.kubeconfig(folder)
        settings = {"source": "kubernetes", "selector": SELECTOR, "kubeconfig": str(self.kubeconfig)} | settings
        self.discovery = KubernetesDiscovery(DiscoverySettings(**settings))
        self.sets: list[frozenset[Replica]] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        async for replicas in self.discovery.watch():
            self.sets.append(replicas)

    @property
    def names(self) -> set[str]:
        """Of the pods in the view that are ready."""
        return {replica.name.partition("/")[2] for replica in self.sets[-1] if replica.ready} if self.sets else set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for it, ten seconds at most."""
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.005)

    async def until_names(self, *names: str) -> None:
        """Wait until these are the view."""
        await self.until(lambda: bool(self.sets) and self.names == set(names))


async def test_pods_come_and_go(api: ApiServer, tmp_path: Path) -> None:
    """A pod is a replica from when it is ready to when it is told to terminate, not until it is gone."""
    async with Followed(api, tmp_path) as view:
        await view.until_names("a")
        api.store.create(pod("b", ip="10.0.0.2", ready=False))
        api.store.create(pod("c", ip="10.0.0.3"))
        api.store.create(pod("stranger", ip="10.0.0.4", labels={"app": "other"}))
        await view.until_names("a", "c")
        api.store.set_ready("b", True)
        await view.until_names("a", "b", "c")
        api.store.terminate("a")
        await view.until_names("b", "c")
        assert ("default", "a") in api.store.pods
        api.store.delete("a")
        api.store.delete("c")
        await view.until_names("b")
        assert view.discovery.status().fresh


async def test_not_ready_for_a_while(api: ApiServer, tmp_path: Path) -> None:
    """A pod that was ready stays the replica that it was, and is not ready; one that never was is none, nor one whose
    container is another meanwhile, that goes, or that a successor has the address of."""
    async with Followed(api, tmp_path) as view:
        api.store.create(pod("b", ip="10.0.0.2", ready=False))
        await view.until_names("a")
        (before,) = view.sets[-1]
        api.store.set_ready("a", False)
        await view.until_names()
        assert view.sets[-1] == {replace(before, ready=False)}
        assert view.discovery.status().replicas == 0
        api.store.set_ready("a", True)
        await view.until_names("a")
        assert view.sets[-1] == {before}
        for gone in (api.store.restart, api.store.terminate):
            api.store.set_ready("a", False)
            await view.until_names()
            gone("a")
            await view.until(lambda: not view.sets[-1])
            api.store.delete("a")
            api.store.create(pod("a"))
            await view.until_names("a")
        api.store.set_ready("a", False)
        await view.until_names()
        api.store.create(pod("heir", started="2026-02-01T00:00:00Z", ready=False))
        await view.until(lambda: not view.sets[-1])


async def test_pages_of_a_list_are_one_view(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is yielded before the last page is there."""
    monkeypatch.setattr(pod_watch, "PAGE_PODS", 2)
    for number in range(2, 8):
        api.store.create(pod(f"p{number}", ip=f"10.0.0.{number}"))
    async with Followed(api, tmp_path) as view:
        await view.until(lambda: bool(view.sets))
        assert [len(found) for found in view.sets] == [7]
        assert api.asked["list"] == 4


async def test_api_server_away(api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last good view stays and is known to be stale, which is logged once, and its end once; what happened
    meanwhile is found afterwards."""
    caplog.set_level("INFO", "router.engines.discovery")
    async with Followed(api, tmp_path) as view:
        await view.until_names("a")
        await api.down()
        await view.until(lambda: not view.discovery.status().fresh)
        api.store.delete("a")
        api.store.create(pod("b", ip="10.0.0.2"))
        await view.until(lambda: view.discovery.status().errors > 3)
        status = view.discovery.status()
        assert view.names == {"a"}
        assert (status.replicas, status.stale_s > 0) == (1, True)
        assert "no answer from the API server" in status.why
        await api.up()
        await view.until_names("b")
        await view.until(lambda: view.discovery.status().fresh)
    said = [record.message for record in caplog.records]
    assert said.count("discovery is stale") == said.count("discovery is fresh again") == 1


async def test_another_cause_is_told(
    api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage that goes on for another reason than it began is one outage, and its log says both."""
    monkeypatch.setattr(pod_watch, "TOLD_AGAIN_S", 0.0)
    async with Followed(api, tmp_path) as view:
        await view.until_names("a")
        await api.down()
        await view.until(lambda: view.discovery.status().errors > 3)
        api.forbidden = {"default"}
        await api.up()
        await view.until(lambda: "403" in view.discovery.status().why)
        await view.until(lambda: view.discovery.status().errors > 6)
    told = [vars(record)["fields"]["why"] for record in caplog.records if record.message == "discovery is stale"]
    assert "403" in told[-1]
    assert "no answer" in told[0]
    assert len(told) == len([why for n, why in enumerate(told) if not n or told[n - 1] != why])


async def test_nothing_is_yielded_before_the_first_list(api: ApiServer, tmp_path: Path) -> None:
    """A router that starts while the API server fails does not take that for an empty fleet."""
    api.failing = (500, "")
    async with Followed(api, tmp_path) as view:
        await view.until(lambda: view.discovery.status().errors > 2)
        assert view.sets == []
        assert "500" in view.discovery.status().why
        api.failing = None
        await view.until_names("a")


async def test_missing_right_is_named(api: ApiServer, tmp_path: Path) -> None:
    """403 says which verb, where, and what a Role needs; a namespace that may be read is used all the same."""
    api.forbidden = {"watch"}
    async with Followed(api, tmp_path) as view:
        await view.until(lambda: view.discovery.status().errors > 0)
        why = view.discovery.status().why
        assert "403" in why
        assert "watch pods in namespace default" in why
        assert "verbs list and watch on pods" in why
        assert view.names == {"a"}


async def test_new_token_is_read(api: ApiServer, tmp_path: Path) -> None:
    """A token that is no longer taken is read anew from its file."""
    async with Followed(api, tmp_path) as view:
        await view.until_names("a")
        api.token = "another-token"
        api.close_watches()
        await view.until(lambda: "401" in view.discovery.status().why)
        assert api.token not in view.discovery.status().why
        (tmp_path / "token").write_text(api.token)
        api.store.delete("a")
        await view.until_names()
        await view.until(lambda: view.discovery.status().fresh)


async def test_retry_after_is_heeded(api: ApiServer, tmp_path: Path) -> None:
    """An API server that is overloaded says when to come again, and is left alone until then."""
    api.failing = (429, "1")
    async with Followed(api, tmp_path) as view:
        await view.until(lambda: api.asked["list"] == 1)
        began_s = asyncio.get_running_loop().time()
        api.failing = None
        await view.until_names("a")
        assert asyncio.get_running_loop().time() - began_s > 0.9


@pytest.mark.parametrize("as_status", [True, False])
async def test_compacted_version(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_status: bool
) -> None:
    """410, as a status or as an event: pods are listed again, and nobody is told that the view is stale."""
    monkeypatch.setattr(pod_watch, "PAGE_PODS", 1)
    monkeypatch.setattr(pod_watch, "WATCH_S", 1)
    monkeypatch.setattr(pod_watch, "SPREAD_S", 0)
    api.gone_as_status, api.bookmark_s = as_status, 100.0
    api.store.create(pod("b", ip="10.0.0.2"))
    async with Followed(api, tmp_path) as view:
        await view.until_names("a", "b")
        api.store.create(pod("elsewhere", namespace="other"))  # the version goes on, and no watch hears of it
        api.store.compact()
        lists = api.asked["list"]
        await view.until(lambda: api.asked["list"] > lists)
        api.store.delete("a")
        await view.until_names("b")
        assert view.discovery.status().errors == 0


async def test_half_open_watch(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch whose connection is dead is given up soon after it should have ended."""
    monkeypatch.setattr(pod_watch, "WATCH_S", 1)
    monkeypatch.setattr(pod_watch, "SPREAD_S", 0)
    monkeypatch.setattr(pod_watch, "LATE_S", 0.2)
    async with Followed(api, tmp_path) as view:
        await view.until_names("a")
        api.stalled = True
        api.store.delete("a")
        await view.until(lambda: view.discovery.status().errors > 0)
        assert view.names == {"a"}
        api.close_watches()
        api.stalled = False
        await view.until(lambda: view.names == set())


async def test_a_selector_of_nothing_is_said(api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where no pod is a replica the log says so, with what was looked for; there is nothing else to see."""
    caplog.set_level(logging.WARNING, logger="router.engines.discovery.kubernetes")
    async with Followed(api, tmp_path, selector="app=misspelt") as view:
        await view.until(lambda: bool(view.sets))
        assert view.sets == [frozenset()]
    (record,) = caplog.records
    assert record.message == "discovery finds no replica"
    assert record.__dict__["fields"] == {
        "source": "kubernetes",
        "selector": "app=misspelt",
        "namespaces": "default",
        "pods": 0,
    }


async def test_own_namespace(api: ApiServer, tmp_path: Path) -> None:
    """Without namespaces the kubeconfig's own is meant; outside of a pod, without either, that is said."""
    api.store.create(pod("b", namespace="mine", ip="10.0.0.2"))
    path = api.kubeconfig(tmp_path, namespace="mine")
    settings = DiscoverySettings("kubernetes", selector=SELECTOR, kubeconfig=str(path))
    sets = KubernetesDiscovery(settings).watch()
    assert {replica.name for replica in await anext(sets)} == {"mine/b"}
    await sets.aclose()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"discovery\.namespaces"):
        KubernetesDiscovery(DiscoverySettings("kubernetes", selector=SELECTOR))
    with pytest.raises(ValueError, match=r"discovery\.kubeconfig"):
        KubernetesDiscovery(DiscoverySettings("kubernetes", selector=SELECTOR, kubeconfig="/nowhere"))
    with pytest.raises(ValueError, match=r"discovery\.selector"):
        KubernetesDiscovery(DiscoverySettings("kubernetes", ("a",)))


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the client the error says what to install."""
    monkeypatch.setitem(sys.modules, "kubernetes.aio.client", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[kubernetes\]'"):
        Client(SELECTOR, "")


async def test_service_account(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files of a service account are missing, discovery says so, and goes on trying."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    discovery = KubernetesDiscovery(DiscoverySettings("kubernetes", ("default",), SELECTOR))
    task = asyncio.ensure_future(anext(discovery.watch()))
    async with asyncio.timeout(60):
        while discovery.status().errors < 2:
            await asyncio.sleep(0.01)
    assert "cannot tell who we are: ConfigException: Service host/port is not set." in discovery.status().why
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
            await view.until(lambda: "no trust in the API server" in status().why)
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
        assert status.why.startswith("namespace secret: 403: we may not list pods in namespace secret, a Role")
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
        await view.until(lambda: "not as it should be" in view.discovery.status().why)
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
    monkeypatch.setattr(pod_watch, "PAGE_PODS", 1)
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
