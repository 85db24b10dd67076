"""A cluster without one: pods are processes with loopback addresses of their own, beside the fake API server.

A pod is a simulated engine on 127.x.y.z, at the same port as all others, as pods of one Deployment have it. What the
kubelet and the Deployment's controller would do, the tests do: a pod is ready when its engine answers, a pod that is
deleted is Terminating for as long as it has streams, and only then ends. The gateway is the real command, started with
the settings file that Helm renders into an annotation of the chart's pods.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.common.processes import LISTENING, READY, START_TIMEOUT_S, Process, free_ports, run_process
from loadtest.fake_engine import tokens
from tests.http.wire import spliced
from tests.k8s.tools import NAMESPACE
from tests.support.apiserver import ApiServer
from tests.support.podstore import pod

MODEL = "sim"
CHAT = "/v1/chat/completions"
LOOK_S = 0.02
PROBE_S = 0.2
_ARRIVED = re.compile(r"^vllm:(?:request_success_total|num_requests_\w+)\{.*\} (\S+)$", re.MULTILINE)
_OPEN = re.compile(r"^vllm:num_requests_\w+\{.*\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


async def until(what: Callable[[], Awaitable[bool]], timeout_s: float, else_: str) -> float:
    """Wait until it is so; returns how long that took, fails with `else_` after `timeout_s`."""
    began_s = time.monotonic()
    while not await what():
        assert time.monotonic() - began_s < timeout_s, f"{else_} within {timeout_s:g} s"
        await asyncio.sleep(LOOK_S)
    return time.monotonic() - began_s


async def page(url: str) -> tuple[int, str]:
    """Status and text of a page, on a connection of its own; status 0 where nobody listens."""
    try:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return response.status, await response.text()
    except aiohttp.ClientError:
        return 0, ""


# Pods


@dataclass
class Pod:
    """One engine that runs, and its name in the API."""

    name: str
    ip: str
    url: str
    process: Process

    async def arrived(self) -> int:
        """Requests that ever came here and were not given up, by the engine's own counters."""
        return round(sum(map(float, _ARRIVED.findall((await page(f"{self.url}/metrics"))[1]))))

    async def open(self) -> int:
        """Requests that are here now."""
        return round(sum(map(float, _OPEN.findall((await page(f"{self.url}/metrics"))[1]))))


@dataclass
class Cluster:
    """Pods and the API that knows them."""

    api: ApiServer
    labels: Mapping[str, str]
    port: int
    events_port: int
    replay_port: int
    pods: dict[str, Pod] = field(default_factory=dict)
    _stacks: dict[str, AsyncExitStack] = field(default_factory=dict)
    _hosts: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def address(self) -> str:
        """One that no pod had yet: this process' own part of 127.0.0.0/8."""
        own = os.getpid()
        return f"127.{10 + own % 200}.{own // 200 % 250}.{next(self._hosts)}"

    async def run(self, name: str, ip: str = "", model: str = MODEL, template: Mapping[str, Any] | None = None) -> Pod:
        """Start an engine: the pod is there, and ready as soon as its engine answers. With a Deployment's template it
        is a pod of that, whose ports are this machine's."""
        ip = ip or self.address()
        ports = [str(port) for port in (self.port, self.events_port, self.replay_port)]
        words = ["-m", "loadtest", "engine", "--host", ip, "--port", ports[0], "--replicas", "1", "--model", model]
        words += ["--kv-events", "--kv-events-port", ports[1], "--kv-replay-port", ports[2]]
        notes = {"warmroute/kv-events-port": ports[1], "warmroute/kv-replay-port": ports[2]}
        made_of = pod(
            name,
            namespace=NAMESPACE,
            ip=ip,
            ready=False,
            port=self.port,
            labels=self.labels,
            annotations=notes,
            node=f"node-of-{name}",
        )
        self.api.store.create(made_of if template is None else self._of_template(made_of, template))
        stack = self._stacks[name] = AsyncExitStack()
        process = await stack.enter_async_context(run_process(name, [sys.executable, *words]))
        url = (await process.wait_for_output(READY))[0][1]
        self.api.store.set_ready(name, True, NAMESPACE)
        made = self.pods[name] = Pod(name, ip, url, process)
        return made

    def _of_template(self, made_of: dict[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
        """A pod with the template's labels, annotations and containers, ports by name moved to this machine's."""
        spec = json.loads(json.dumps(template["spec"])) | {"nodeName": made_of["spec"]["nodeName"]}
        moved = {"kv-events": self.events_port, "kv-replay": self.replay_port}
        moved |= dict.fromkeys(("http", "container-port"), self.port)
        for port in (port for each in spec["containers"] for port in each.get("ports", [])):
            port["containerPort"] = moved.get(port["name"], port["containerPort"])
        meta = {"labels": template["metadata"]["labels"], "annotations": template["metadata"].get("annotations", {})}
        return made_of | {"metadata": made_of["metadata"] | meta, "spec": spec}

    async def run_all(self, *names: str) -> list[Pod]:
        """Several at once."""
        return list(await asyncio.gather(*map(self.run, names)))

    def terminate(self, name: str) -> None:
        """`kubectl delete pod`: it is Terminating from now on, and its `preStop` holds back SIGTERM."""
        self.api.store.terminate(name, NAMESPACE)

    async def end(self, name: str) -> None:
        """SIGTERM, and when the process has ended the pod is gone."""
        del self.pods[name]
        await self._stacks.pop(name).aclose()
        self.api.store.delete(name, NAMESPACE)

    async def close(self) -> None:
        """End all processes."""
        for stack in self._stacks.values():
            await stack.aclose()


@asynccontextmanager
async def cluster(labels: Mapping[str, str]) -> AsyncIterator[Cluster]:
    """A cluster without pods, whose pods will have these labels; all that it started is stopped with the block."""
    async with ApiServer() as api:
        made = Cluster(api, labels, *free_ports(3))
        try:
            yield made
        finally:
            await made.close()


# The gateway


@dataclass
class Gateway:
    """One running `warmroute serve`."""

    url: str
    admin_url: str
    process: Process

    async def ready(self) -> bool:
        """Whether `/readyz` says so."""
        return (await page(f"{self.url}/readyz"))[0] == 200

    async def rows(self) -> dict[str, dict[str, Any]]:
        """`/admin/replicas`, by id."""
        status, text = await page(f"{self.admin_url}/admin/replicas")
        return {row["id"]: row for row in json.loads(text)["replicas"]} if status == 200 else {}

    async def knows(self, *pods: Pod) -> bool:
        """Whether these, and no others, are there and ready."""
        return {id_: row["ready"] for id_, row in (await self.rows()).items()} == {pod.url: True for pod in pods}

    async def metric(self, series: str, /, **labels: str) -> float | None:
        """The value of the one series of that name with these labels, by one scrape; None where there is none."""
        text = (await page(f"{self.admin_url}/metrics"))[1]
        for found in re.finditer(rf"^{re.escape(series)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE):
            if labels.items() <= dict(_LABEL.findall(found[1] or "")).items():
                return float(found[2])
        return None


@asynccontextmanager
async def gateway(config: Path, kubeconfig: Path) -> AsyncIterator[Gateway]:
    """The command with the chart's settings file. Only what a machine without a cluster cannot have is overridden: a
    kubeconfig in place of the pod's service account, loopback and free ports in place of the pod's own address."""
    words = ["-m", "router", "serve", "--config", str(config), "--host", "127.0.0.1", "--port", "0"]
    words += ["--admin-port", "0", "--set", f"discovery.kubeconfig={kubeconfig}", "--set", "discovery.loopback=true"]
    async with run_process("warmroute", [sys.executable, *words]) as process:
        (said,) = await process.wait_for_output(LISTENING)
        yield Gateway(said[1], said[2], process)


# Load


@dataclass
class Load:
    """So many streams at a time, one after the other, each compared with what the engine's model says."""

    url: str
    lanes: int
    answer_tokens: int
    """Of the shortest; the longest are twice as long, so that not all end together."""
    results: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    """Streams that were asked for and have not come to their end."""
    least: int = 0
    """The fewest in flight since this was set."""
    _on: bool = False

    @asynccontextmanager
    async def going(self) -> AsyncIterator[Load]:
        """Until the block ends; then what runs is waited for."""
        self._on = True
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=60.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            lanes = [asyncio.create_task(self._lane(session, lane)) for lane in range(self.lanes)]
            try:
                yield self
            finally:
                self._on = False
                await asyncio.gather(*lanes)

    async def _lane(self, session: aiohttp.ClientSession, lane: int) -> None:
        for number in itertools.count():
            if not self._on:
                return
            prompt = f"{lane} asks {number}: " + "what is a warm route? " * (10 + lane % 7)
            answer_tokens = self.answer_tokens * (16 + (lane + number) % 17) // 16
            self.in_flight += 1
            try:
                said = await self._one(session, prompt, answer_tokens)
            except (aiohttp.ClientError, TimeoutError) as error:
                said = f"failed: {error!r}"
            self.in_flight -= 1
            self.least = min(self.least, self.in_flight)
            self.results[said] += 1

    async def _one(self, session: aiohttp.ClientSession, prompt: str, answer_tokens: int) -> str:
        body = {"model": MODEL, "stream": True, "max_tokens": answer_tokens}
        messages = [{"role": "user", "content": prompt}]
        async with session.post(self.url + CHAT, json=body | {"messages": messages}) as response:
            if response.status != 200:
                return f"failed: {response.status} {(await response.text())[:200]}"
            try:
                text, done = await _read(response)
            except aiohttp.ClientError as error:
                return f"truncated: {error!r}"
        rendered = tokens.render_chat([tokens.Message("user", prompt)], None)
        if not done:
            return "truncated: no [DONE]"
        return "ok" if text == tokens.answer(rendered, answer_tokens) else "truncated: another answer"

    async def more(self, answers: int, timeout_s: float = 60.0) -> None:
        """Wait for so many more that are right, or until something is wrong."""
        enough = self.results["ok"] + answers

        async def there() -> bool:
            return self.results["ok"] >= enough or bool(self.wrong)

        await until(there, timeout_s, f"{answers} answers")

    @property
    def wrong(self) -> dict[str, int]:
        """All that was not right."""
        return {said: count for said, count in self.results.items() if said != "ok"}


async def _read(response: aiohttp.ClientResponse) -> tuple[str, bool]:
    """Text of a stream, and whether it came to its end."""
    parts = list[str]()
    async for line in response.content:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                parts.append(choice["delta"].get("content") or "")
        elif line == b"data: [DONE]\n":
            return "".join(parts), True
    return "".join(parts), False


# Between clients and several gateways


class Balancer:
    """What a Service and its load balancer do: connections go in turn to gateways whose `/readyz` says 200."""

    def __init__(self) -> None:
        self.url = ""
        self._gateways = list[Gateway]()
        self._ready = list[Gateway]()
        self._turn = itertools.count()
        self._pipes = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Balancer]:
        """Until the block ends."""
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        looking = asyncio.create_task(self._look())
        try:
            yield self
        finally:
            server.close()
            for task in (looking, *self._pipes):
                task.cancel()
            await asyncio.gather(looking, *self._pipes, return_exceptions=True)

    async def add(self, gateway: Gateway) -> None:
        """One more; returns when it is among those that are ready."""
        self._gateways.append(gateway)

        async def there() -> bool:
            return gateway in self._ready

        await until(there, START_TIMEOUT_S, f"{gateway.url} was not ready")

    def remove(self, gateway: Gateway) -> None:
        """It has ended."""
        self._gateways.remove(gateway)

    async def _look(self) -> None:
        """A readiness probe each second would be the kubelet's; ours is quicker, as the lame duck is shorter."""
        while True:
            known = list(self._gateways)
            found = await asyncio.gather(*(each.ready() for each in known))
            self._ready = [gateway for gateway, ready in zip(known, found, strict=True) if ready]
            await asyncio.sleep(PROBE_S)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(len(self._ready)):
            port = int(self._ready[next(self._turn) % len(self._ready)].url.rpartition(":")[2])
            if await spliced(reader, writer, port, self._pipes):
                return
        writer.close()
