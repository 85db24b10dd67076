"""The official client against a fake API server, over real connections."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from router.config.schema import DiscoverySettings
from router.engines.discovery import informer
from router.engines.discovery.api_client import ApiClient
from router.engines.discovery.kubernetes import KubernetesDiscovery
from tests.engines.discovery.cluster import SELECTOR
from tests.engines.discovery.followed import Followed
from tests.support.apiserver import ApiServer
from tests.support.podstore import pod


@pytest.mark.promise(
    "Discovery lists and watches pods of the configured namespaces only, and names missing rights.", "discovery"
)
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
    monkeypatch.setattr(informer, "PAGE_PODS", 2)
    for number in range(2, 8):
        api.store.create(pod(f"p{number}", ip=f"10.0.0.{number}"))
    async with Followed(api, tmp_path) as view:
        await view.until(lambda: bool(view.sets))
        assert [len(found) for found in view.sets] == [7]
        assert api.asked["list"] == 4


@pytest.mark.promise(
    "Two seconds after an outage the view is current; until then the last good one is used.", "discovery"
)
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
    assert said.count("discovery is stale") == said.count("discovery is current again") == 1


async def test_another_cause_is_told(
    api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage that goes on for another reason than it began is one outage, and its log says both."""
    monkeypatch.setattr(informer, "RELOG_INTERVAL_S", 0.0)
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


@pytest.mark.promise(
    "Discovery lists and watches pods of the configured namespaces only, and names missing rights.", "discovery"
)
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


@pytest.mark.promise("Service account tokens are in no status and no log, and renewed ones are used.", "discovery")
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
    monkeypatch.setattr(informer, "PAGE_PODS", 1)
    monkeypatch.setattr(informer, "WATCH_S", 1)
    monkeypatch.setattr(informer, "SPREAD_S", 0)
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
    """A watch whose connection is dead is found out when the next one is due."""
    monkeypatch.setattr(informer, "WATCH_S", 1)
    monkeypatch.setattr(informer, "SPREAD_S", 0)
    monkeypatch.setattr(informer, "PAGE_S", 0.2)
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


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the client the error says what to install."""
    monkeypatch.setitem(sys.modules, "kubernetes.aio.client", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[kubernetes\]'"):
        ApiClient("")


async def test_a_refused_selector_is_named(api: ApiServer, tmp_path: Path) -> None:
    """An API server that does not understand the selector answers 400: the setting is named, and what is wrong."""
    api.failing = (400, "")
    async with Followed(api, tmp_path) as view:
        await view.until(lambda: view.discovery.status().errors > 0)
        why = view.discovery.status().why
        assert f"400: the API server rejects discovery.selector {SELECTOR!r}: told to" in why
