"""Rollouts without a cluster: fake API server, engines as pods, and the real command with the chart's own settings.

The settings file is what Helm makes of an example's values; see cluster.gateway for the little that is overridden.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.k8s import tools
from tests.k8s.cluster import CHAT, MODEL, Balancer, Cluster, Gateway, Load, Pod, cluster, gateway, until
from tests.support.figures import figure

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs all of 127.0.0.0/8")

EXAMPLE = tools.CHART / "examples" / "vllm.yaml"
STREAMS_MIN, LANES, ANSWER_TOKENS = 50, 72, 60
GONE_S = 0.5  # for what was on its way to a pod when the router heard that it is Terminating
AWAY_S = 20.0
RESTART_LANES = 24
SOON_S = 120.0
STREAM_S_MAX = 60.0
COMMAND_S_MAX = 90.0


def rendered(*options: str) -> list[tools.Document]:
    """The chart with the example's values and these."""
    return tools.template("--values", str(EXAMPLE), *options)


def settings_of(documents: list[tools.Document]) -> str:
    """The settings file of the chart's pods."""
    return tools.settings_text(documents)


def written(folder: Path, *options: str) -> Path:
    """The settings file."""
    file = folder / "warmroute.yaml"
    file.write_text(settings_of(rendered(*options)))
    return file


def labels_of(settings: Path) -> dict[str, str]:
    """Labels that the file's selector asks for."""
    discovery = yaml.safe_load(settings.read_text())["discovery"]
    assert discovery["source"] == "kubernetes"
    assert list(discovery["namespaces"]) == [tools.NAMESPACE]
    return dict(term.split("=") for term in discovery["selector"].split(","))


@asynccontextmanager
async def fleet(folder: Path, routers: int = 1, *, pods: int, options: tuple[str, ...] = ()) -> AsyncIterator[Any]:
    """A cluster with so many pods, and so many gateways that know them, without a store."""
    file = written(folder, "--set", "valkey.enabled=false", *options)
    async with cluster(labels_of(file)) as made, AsyncExitStack() as stack:
        kubeconfig = made.api.kubeconfig(folder, tools.NAMESPACE)
        gateways, there = await asyncio.gather(
            asyncio.gather(*(stack.enter_async_context(gateway(file, kubeconfig)) for _ in range(routers))),
            made.run_all(*(f"engine-{n}" for n in range(pods))),
        )
        for each in gateways:
            await knows(each, *there)
        yield made, gateways


async def knows(router: Gateway, *pods: Pod) -> None:
    """Wait until these are its replicas, all ready."""
    try:
        await until(lambda: router.knows(*pods), SOON_S, f"replicas were not {[pod.url for pod in pods]}")
    except AssertionError as error:
        raise router.process.error(f"knows {await router.rows()}: {error}") from error


async def roll(made: Cluster, router: Gateway, old: Pod, name: str) -> tuple[int, int]:
    """What a Deployment does with one pod: a new one is ready, then the old one goes, when its streams are done.

    Returns how many streams it still had, and how many requests came later than GONE_S after the router knew of it.
    """
    await made.run(name)
    made.terminate(old.name)
    streams = await old.open()

    async def gone() -> bool:
        return old.url not in await router.rows()

    figure("a pod is Terminating: no replica any more, s", 0.5, await until(gone, SOON_S, "it stayed a replica"))
    await asyncio.sleep(GONE_S)
    arrived = await old.arrived()

    async def idle() -> bool:
        return not await old.open()

    await until(idle, STREAM_S_MAX, "the streams of a Terminating pod did not end")
    late = await old.arrived() - arrived
    await made.end(old.name)
    return streams, late


# Labels and ports as vLLM production-stack's chart gives them to engines and to its router (vllm-stack 0.1.12).
ENGINE_LABELS = {"model": "one", "app.kubernetes.io/component": "serving-engine", "app.kubernetes.io/part-of": "x"}
ENGINE_PORTS = [{"name": "container-port", "containerPort": 1}, {"name": "zmq-port", "containerPort": 55_555}]


async def test_engines_of_another_stack_are_found_without_a_selector(tmp_path: Path) -> None:
    """The chart's settings without a selector find the engines of a known stack at their named port, and neither that
    stack's router nor a pod of nobody's."""
    file = tmp_path / "warmroute.yaml"
    file.write_text(tools.settings_text(tools.template("--values", tools.example("stacks"))))

    def template(labels: dict[str, str], *ports: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "vllm", "ports": list(ports)}]}}

    engine = template(ENGINE_LABELS, *ENGINE_PORTS)
    router_pod = template(ENGINE_LABELS | {"app.kubernetes.io/component": "router"}, *ENGINE_PORTS)
    nobody = template({"app": "vllm"}, *ENGINE_PORTS)
    async with cluster({}) as made:
        await made.run("router", template=router_pod)
        await made.run("nobody", template=nobody)
        pods = [await made.run(f"engine-{turn}", template=engine) for turn in (0, 1)]
        async with gateway(file, made.api.kubeconfig(tmp_path, tools.NAMESPACE)) as router:
            await until(lambda: router.knows(*pods), SOON_S, "the engines were not found")


@pytest.mark.figures
async def test_a_rolling_restart_of_all_replicas_costs_nobody_anything(tmp_path: Path) -> None:
    """Goal 11: with at least 50 streams in flight all along, every pod is replaced by another; 0 requests fail, 0
    streams are cut, each has the very tokens that the engine made; a pod that is known to terminate gets nothing new.
    Before and after it, KV events are followed where the pods' annotations say, so that every replica is graded exact,
    and people see which pod and which node a replica is."""
    async with fleet(tmp_path, pods=3) as (made, (router,)):
        async with Load(router.url, LANES, ANSWER_TOKENS).going() as load:
            await load.more(LANES)
            await followed(router, *made.pods.values())
            load.least, begun = load.in_flight, load.results["ok"]
            seen = [await roll(made, router, old, f"next-{old.name}") for old in list(made.pods.values())]
            await knows(router, *made.pods.values())
            least, through = load.least, load.results["ok"] - begun
            await followed(router, *made.pods.values())
        print(f"\n{through} streams, never under {least}; (still open, late) by pod: {seen}")
        assert load.wrong == {}
        assert least >= STREAMS_MIN
        assert all(streams > 0 and late == 0 for streams, late in seen), seen
        async with asyncio.timeout(60):
            while await router.metric("warmroute_in_flight_requests"):
                await asyncio.sleep(0.05)
        assert await router.metric("warmroute_discovery_fresh", source="kubernetes") == 1
        assert await router.metric("warmroute_discovery_replicas", source="kubernetes") == len(made.pods)


async def followed(router: Gateway, *pods: Pod) -> None:
    """Wait until these, which have answered something, are graded exact, and look at what the metrics say of them."""

    async def exact() -> bool:
        rows = await router.rows()
        return all(rows[pod.url]["grade"] == "exact" for pod in pods)

    await until(exact, SOON_S, "not every pod was graded exact")
    assert all([await described(router, pod) for pod in pods])


async def described(router: Gateway, pod: Pod) -> bool:
    """Whether people see by its metrics which pod and which node this replica is."""
    name, node = f"{tools.NAMESPACE}/{pod.name}", f"node-of-{pod.name}"
    return await router.metric("warmroute_replica_info", replica=pod.url, name=name, node=node) == 1


async def asked(router: Gateway, prompt: str) -> tuple[str, int]:
    """The grade and the cached tokens that were predicted for one request."""
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": prompt}]}
    async with aiohttp.ClientSession() as session, session.post(router.url + CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-warmroute-grade"], int(response.headers["x-warmroute-predicted-cached-tokens"])


BY_DISCOVERY_ALONE = ("--set", "config.events.enabled=false", "--set", "config.probe.interval_s=600")


@pytest.mark.promise("An engine at a reused address is credited with no block of its predecessor.", "discovery")
@pytest.mark.parametrize(
    ("options", "grade"), [((), "exact"), (BY_DISCOVERY_ALONE, "estimated")], ids=["with events", "by discovery alone"]
)
async def test_another_pod_with_the_same_address_holds_nothing(
    tmp_path: Path, options: tuple[str, ...], grade: str
) -> None:
    """A pod gets the address that another had a moment ago, twice: once as the router is told, and once while the API
    server is away, so that it is told of neither. Nothing of the former one's cache is ever credited to its heir; also
    where neither probes nor events could have told, only that it is another pod."""
    prompt = "somebody asks for this again and again. " * 100
    async with fleet(tmp_path, pods=1, options=options) as (made, (router,)):

        async def credited() -> bool:
            found, tokens = await asked(router, prompt)
            return found == grade and tokens > 800

        for missed in (False, True):
            (old,) = made.pods.values()
            await until(credited, SOON_S, "the prompt was not credited to the first pod")
            if missed:
                await made.api.down()
            made.terminate(old.name)
            await made.end(old.name)
            heir = await made.run(f"heir-of-{old.name}", old.ip)
            if missed:
                await made.api.up()

            async def known(heir: Pod = heir) -> bool:
                return await described(router, heir) and await router.knows(heir)

            await until(known, SOON_S, "the second pod was not found")
            assert (await asked(router, prompt))[1] == 0, f"missed: {missed}"


@pytest.mark.promise(
    "Two seconds after an outage the view is current; until then the last good one is used.", "discovery"
)
async def test_the_api_server_is_away_for_20_s(tmp_path: Path) -> None:
    """Nobody notices but the metric: no request fails, `/readyz` stays, the view is flagged stale; what changed
    meanwhile is known soon after it is back."""
    async with fleet(tmp_path, 2, pods=2) as (made, routers), AsyncExitStack() as stack:
        loads = [await stack.enter_async_context(Load(router.url, 12, 20).going()) for router in routers]
        for load in loads:
            await load.more(12)
        down_s = time.monotonic()
        await made.api.down()
        ends_s = time.monotonic() + AWAY_S
        while time.monotonic() < ends_s:
            assert all([await router.ready() for router in routers])
            await asyncio.sleep(0.25)
        for router in routers:
            assert await router.metric("warmroute_discovery_fresh", source="kubernetes") == 0
            stale_s = await router.metric("warmroute_discovery_stale_seconds", source="kubernetes")
            assert stale_s is not None
            assert 0 < stale_s <= time.monotonic() - down_s
            assert await router.knows(*made.pods.values())
        await made.run("meanwhile")
        await made.api.up()
        for router in routers:
            await knows(router, *made.pods.values())
            assert await router.metric("warmroute_discovery_fresh", source="kubernetes") == 1
            assert await router.metric("warmroute_discovery_stale_seconds", source="kubernetes") == 0
        for load in loads:
            await load.more(12)
        await stack.aclose()
        assert [load.wrong for load in loads] == [{}, {}]


async def test_routers_are_restarted_under_load(tmp_path: Path) -> None:
    """Two gateways behind a balancer that goes by readiness: each gets SIGTERM under load
    once another is ready in its place; each ends by itself with status 0, and nobody's request fails or is cut."""
    options = ("--set", "config.listen.lame_duck_s=3", "--set", "config.listen.drain_s=30")
    async with fleet(tmp_path, 2, pods=2, options=options) as (made, gateways), AsyncExitStack() as stack:
        balancer = await stack.enter_async_context(Balancer().serving())
        for each in gateways:
            await balancer.add(each)
        async with Load(balancer.url, RESTART_LANES, 30).going() as load:
            await load.more(RESTART_LANES)
            for old in list(gateways):
                kubeconfig = made.api.kubeconfig(tmp_path, tools.NAMESPACE)
                new = await stack.enter_async_context(gateway(tmp_path / "warmroute.yaml", kubeconfig))
                await knows(new, *made.pods.values())
                await balancer.add(new)
                old.process.terminate()
                assert await old.process.wait_for_exit(STREAM_S_MAX) == 0
                balancer.remove(old)
                await load.more(RESTART_LANES)
        assert load.wrong == {}


def command_of(documents: list[tools.Document], url: str) -> list[str]:
    """The command of `helm test`'s pod, as it would run here: another Python, and our URL for the Service's."""
    (pod,) = (d for d in documents if d["metadata"].get("annotations", {}).get("helm.sh/hook") == "test")
    (container,) = pod["spec"]["containers"]
    words = [*container.get("command", []), *container.get("args", [])]
    (service,) = (
        d
        for d in documents
        if d["kind"] == "Service"
        and d["spec"].get("clusterIP") != "None"
        and not d["metadata"]["name"].endswith("valkey")
    )
    port = service["spec"]["ports"][0]["port"]
    name = service["metadata"]["name"]
    found = [word for word in words if name in word]
    assert found, words
    for host in (f"{name}.{tools.NAMESPACE}.svc", f"{name}.{tools.NAMESPACE}", name):
        words = [word.replace(f"http://{host}:{port}", url).replace(f"http://{host}", url) for word in words]
    assert not [word for word in words if name in word], words
    return [sys.executable if word.startswith("python") else word for word in words]


async def test_the_command_of_helm_test(tmp_path: Path) -> None:
    """`helm test` succeeds where replicas are ready, and fails where none is."""
    documents = rendered("--set", "test.timeoutSeconds=2")
    async with fleet(tmp_path, 1, pods=1) as (made, (router,)):
        for status in (0, 1):
            words = command_of(documents, router.url)
            process = await asyncio.create_subprocess_exec(
                *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            async with asyncio.timeout(COMMAND_S_MAX):
                said = (await process.communicate())[0].decode()
            assert (process.returncode != 0) == bool(status), said
            (pod,) = made.pods.values() or [None]
            if pod is not None:
                made.terminate(pod.name)
                await made.end(pod.name)
                await until(lambda: router.knows(), SOON_S, "the last pod did not leave")
