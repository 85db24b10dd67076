"""Discovery by InferencePools, with the official client against a fake API server, over real connections."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from router.config.schema import DiscoverySettings
from router.engines.discovery import informer
from router.engines.discovery.kubernetes import KubernetesDiscovery
from tests.engines.discovery.followed import Followed
from tests.support.apiserver import ApiServer
from tests.support.podstore import pod, pool


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    """One pool of the pods of vLLM, and pods of two kinds."""
    async with ApiServer() as server:
        server.pools.create(pool("main"))
        server.store.create(pod("a"))
        server.store.create(pod("s", ip="10.0.0.9", labels={"app": "sglang"}))
        yield server


def followed(api: ApiServer, folder: Path, *pools: str, **settings: object) -> Followed:
    """A discovery by these pools."""
    return Followed(api, folder, selector="", pools=pools or ("main",), **settings)


def urls(view: Followed) -> set[str]:
    """Of the replicas in the view that are ready."""
    return {replica.url.removeprefix("http://10.0.0.") for replica in view.sets[-1] if replica.ready}


async def test_members_of_a_pool_come_and_go(api: ApiServer, tmp_path: Path) -> None:
    """Pods that the pool selects are replicas at its port, as those of a selector are. lwepp TestPods,
    TestPodReconciler."""
    async with followed(api, tmp_path) as view:
        await view.until_names("a")
        assert urls(view) == {"1:8000"}
        api.store.create(pod("b", ip="10.0.0.2", port=None))
        await view.until_names("a", "b")
        assert urls(view) == {"1:8000", "2:8000"}
        api.store.terminate("a")
        await view.until_names("b")
        status = view.discovery.status()
        assert (status.fresh, status.why, status.errors) == (True, "", 0)


async def test_changes_of_a_pool_are_followed(api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other ports, more ports, another selector: the members are others at once, and between two versions of a pool
    the view is never empty. lwepp TestTargetPortsChange, TestInferencePoolReconciler."""
    caplog.set_level(logging.INFO, "router.engines.discovery")
    async with followed(api, tmp_path) as view:
        await view.until_names("a")
        for numbers in ((9000,), (9000, 9001)):
            api.pools.patch("main", {"spec": {"targetPorts": [{"number": number} for number in numbers]}})
            await view.until(lambda numbers=numbers: urls(view) == {f"1:{number}" for number in numbers})  # type: ignore[misc]
        api.pools.patch("main", {"spec": {"selector": {"matchLabels": {"app": "sglang"}}}})
        await view.until_names("s")
        assert all(view.sets)
        watches = len(api.watching)
        assert watches <= 4, "watches of former selectors are left"
        await view.until(lambda: len(api.watching) == 2)
    told = [vars(record)["fields"] for record in caplog.records if vars(record).get("event") == "pool_followed"]
    assert [(each["selector"], each["ports"]) for each in told] == [
        ("app=vllm", "8000"),
        ("app=vllm", "9000"),
        ("app=vllm", "9000,9001"),
        ("app=sglang", "9000,9001"),
    ]
    assert {(each["pool"], each["picker"], each["failure_mode"]) for each in told} == {
        ("default/main", "picker:9002", "FailOpen")
    }


async def test_a_change_of_what_is_not_members_changes_nothing(api: ApiServer, tmp_path: Path) -> None:
    """Status, annotations and failure mode of a pool change without a list of pods anew."""
    async with followed(api, tmp_path) as view:
        await view.until_names("a")
        lists = api.asked["list"]
        api.pools.patch(
            "main", {"status": {"parents": []}, "spec": {"endpointPickerRef": {"failureMode": "FailClose"}}}
        )
        api.store.create(pod("b", ip="10.0.0.2"))
        await view.until_names("a", "b")
        assert api.asked["list"] == lists


async def test_a_pool_that_is_deleted(api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It brings nothing from that moment, and its pods are watched no more; when it is made again it counts again."""
    async with followed(api, tmp_path) as view:
        await view.until_names("a")
        api.pools.delete("main")
        await view.until(lambda: not view.sets[-1])
        await view.until(lambda: len(api.watching) == 1)
        assert view.discovery.status().fresh
        assert "pool_missing" in {vars(record).get("event") for record in caplog.records}
        api.pools.create(pool("main"))
        await view.until_names("a")


async def test_a_pool_that_is_not_there_yet(api: ApiServer, tmp_path: Path) -> None:
    """The others bring theirs, and a pool that comes later is found."""
    async with followed(api, tmp_path, "later", "main") as view:
        await view.until_names("a")
        api.pools.create(pool("later", labels={"app": "sglang"}))
        await view.until_names("a", "s")


@pytest.mark.promise(
    "An invalid InferencePool selects no pods beyond its labels and keeps its last good members.", "discovery"
)
async def test_several_pools(api: ApiServer, tmp_path: Path) -> None:
    """Of one namespace and of another, each with its own selector and ports; one that cannot be followed as it is
    keeps its last good members, and the view says which it is and why."""
    api.pools.create(pool("other", 9000, labels={"app": "sglang"}))
    api.pools.create(pool("main", 7000, namespace="team"))
    api.store.create(pod("t", namespace="team", ip="10.0.0.3"))
    async with followed(api, tmp_path, "main", "other", "team/main") as view:
        await view.until(lambda: bool(view.sets) and urls(view) == {"1:8000", "9:9000", "3:7000"})
        api.pools.patch("other", {"spec": {"selector": {"matchLabels": {"app": None}}}})
        await view.until(lambda: not view.discovery.status().fresh)
        status = view.discovery.status()
        assert status.why.startswith("InferencePool default/other: its spec.selector.matchLabels is empty")
        assert status.stale_s >= 0
        api.store.create(pod("b", ip="10.0.0.2"))
        await view.until(lambda: urls(view) == {"1:8000", "2:8000", "9:9000", "3:7000"})
        api.pools.patch("other", {"spec": {"selector": {"matchLabels": {"app": "sglang"}}}})
        await view.until(lambda: view.discovery.status().fresh)


@pytest.mark.promise("Discovery reads InferencePools by name, so that a Role can name them too.", "discovery")
async def test_only_the_named_pool_is_asked_for(api: ApiServer, tmp_path: Path) -> None:
    """Every question about pools names one, so that a Role may name it too (`resourceNames`); nothing but list and
    watch of pods and of that pool is asked."""
    asked = set[tuple[str, str, str]]()

    async def note(verb: str, request: web.Request) -> None:
        fields = request.query.get("fieldSelector", "") + request.query.get("labelSelector", "")
        asked.add((verb, request.path.rpartition("/")[2], fields))

    api.odd = note
    async with followed(api, tmp_path) as view:
        await view.until_names("a")
        await view.until(lambda: len(api.watching) == 2)
    assert asked == {
        (verb, *what)
        for verb in ("list", "watch")
        for what in (("inferencepools", "metadata.name=main"), ("pods", "app=vllm"))
    }


async def test_a_missing_right_on_pools_is_named(api: ApiServer, tmp_path: Path) -> None:
    """403 says what a Role needs, and nothing is yielded before the pool was read."""
    api.forbidden = {"inferencepools"}
    async with followed(api, tmp_path) as view:
        await view.until(lambda: view.discovery.status().errors > 0)
        why = view.discovery.status().why
        assert why.startswith(
            "InferencePool default/main: 403: the router may not list inferencepools in namespace default"
        )
        assert "list and watch on inferencepools of the group inference.networking.k8s.io, by the name main" in why
        assert view.sets == []
        api.forbidden = set()
        await view.until_names("a")


async def test_a_cluster_that_knows_no_pools(tmp_path: Path) -> None:
    """404 says what to install."""
    async with ApiServer(knows_pools=False) as api, followed(api, tmp_path) as view:
        await view.until(lambda: view.discovery.status().errors > 0)
        assert "has no InferencePools" in view.discovery.status().why
        assert "install the CRDs of the Gateway API inference extension" in view.discovery.status().why


async def test_an_api_server_that_is_away(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last good members stay, whatever became of the pool meanwhile, and are right again afterwards."""
    monkeypatch.setattr(informer, "WATCH_S", 1)
    async with followed(api, tmp_path) as view:
        await view.until_names("a")
        await api.down()
        await view.until(lambda: not view.discovery.status().fresh)
        api.pools.delete("main")
        api.pools.create(pool("main", 9000, labels={"app": "sglang"}))
        assert urls(view) == {"1:8000"}
        await api.up()
        await view.until(lambda: urls(view) == {"9:9000"})
        await view.until(lambda: view.discovery.status().fresh)


async def test_nothing_found_says_which_pools(api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pool whose selector finds nothing is told in the log, by its name."""
    api.pools.patch("main", {"spec": {"selector": {"matchLabels": {"app": "misspelt"}}}})
    async with followed(api, tmp_path) as view:
        await view.until(lambda: bool(view.sets))
    (record,) = (record for record in caplog.records if vars(record).get("event") == "discovery_empty")
    assert vars(record)["fields"] == {"source": "kubernetes", "pools": "main", "pods": 0}


def test_pools_with_namespaces_need_no_other() -> None:
    """Outside of a pod, pools that say their namespaces say enough; a plain name does not."""
    KubernetesDiscovery(DiscoverySettings("kubernetes", pools=("team/main",), kubeconfig=""))
    with pytest.raises(ValueError, match=r"discovery\.namespaces"):
        KubernetesDiscovery(DiscoverySettings("kubernetes", pools=("team/main", "main"), kubeconfig=""))
