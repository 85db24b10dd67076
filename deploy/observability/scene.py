"""Replicas, a router and Prometheus on this machine, under load and faults, to try dashboards.

Replicas are those of `python -m loadtest engine`, with KV events, each a separate process so that it can be killed. The
router runs as operators run it, with a settings file and a keys file. Prometheus is the real one, from the package of
that name; it scrapes every SCRAPE_S and evaluates our rules.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from loadtest.common.processes import LISTENING, READY, Process, ProcessError, free_port, run_process
from loadtest.common.report import Row
from loadtest.common.traces import shipped_trace
from loadtest.replay.run import ReplaySettings, run_replay
from router.config.api_keys import entry_of, make_key

HOST = "127.0.0.1"
MODEL = "sim"
SCRAPE_S = 4.0
START_S = 60.0
LONG_TOKENS = 100_000  # of an answer that certainly still runs when its replica ends
TENANTS: dict[str, dict[str, Any]] = {"acme": {"receipts": True}, "globex": {}, "thrifty": {"requests_per_min": 5}}
CHAT = "/v1/chat/completions"
RULES = Path(__file__).resolve().parents[2] / "helm" / "warmroute" / "files" / "rules.yaml"
LIVELY = {"$job": ".*", "$namespace": ".*", "$model": ".*", "$replica": ".*"}


class SceneError(Exception):
    """Something did not start; the message names it."""


@dataclass
class Scene:
    """The running processes. `folder` has the files of all of them."""

    folder: Path
    time_scale: float
    url: str = ""
    prometheus: str = ""
    replicas: list[str] = field(default_factory=list)
    engines: dict[str, Process] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    # one for all routers: a different one changes the hashes of all prompts
    secret: str = field(default_factory=make_key)
    port: int = 0
    admin_port: int = 0
    router: Process | None = None
    shared_url: str = ""  # store that the router shares with others; "": no store

    def headers(self, tenant: str = "acme") -> dict[str, str]:
        """Return headers with a tenant's key."""
        return {"Authorization": f"Bearer {self.keys[tenant]}"}

    def write_settings(self, policy: str = "warm", **admission: Any) -> Path:  # noqa: ANN401 - as in a settings file
        """Write the router's settings file, with limits that are soon reached."""
        settings = {
            "replicas": self.replicas,
            "listen": {"host": HOST, "port": self.port, "admin_port": self.admin_port, "lame_duck_s": 0},
            "auth": {"keys_file": str(self.folder / "keys.yaml"), "secret": self.secret},
            "routing": {"policy": policy},
            "admission": {"queue_requests_max": 4, "in_flight_max": 8, **admission},
            "upstream": {"slow_start_s": 0},
            **({"peering": {"redis_url": self.shared_url}} if self.shared_url else {}),
        }
        file = self.folder / "warmroute.yaml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return file

    async def reload(self) -> None:
        """Let the router reload its settings."""
        if self.router is not None:
            os.kill(self.router.pid, signal.SIGHUP)

    async def kill(self, replica: str) -> None:
        """Kill a replica at once."""
        os.kill(self.engines[replica].pid, signal.SIGKILL)

    async def kill_answering(self) -> str:
        """Kill a replica in the middle of an answer, so that an attempt certainly fails. Returns its URL.

        Raises SceneError if no replica accepts the request in time.
        """
        messages = [{"role": "user", "content": "?"}]
        body = {"model": MODEL, "max_tokens": LONG_TOKENS, "stream": True, "messages": messages}
        headers = self.headers("acme")
        async with aiohttp.ClientSession() as client:
            for _ in range(int(START_S)):
                async with client.post(self.url + CHAT, json=body, headers=headers) as response:
                    if response.status == 200:
                        await response.content.readany()
                        replica = response.headers["x-warmroute-replica"]
                        await self.kill(replica)
                        await response.read()
                        return replica
                await asyncio.sleep(1)  # rejected: too many other requests are running
        raise SceneError("no replica took a long request")

    async def replay(self, requests: int, sessions: int, tenant: str = "acme", policy: str = "") -> Row:
        """Replay agents' sessions from a real trace. Rejected and broken requests are in the row."""
        settings = ReplaySettings(
            url=self.url,
            model=MODEL,
            time_scale=self.time_scale,
            requests_max=requests,
            sessions_active=sessions,
            think_max_s=10,
            ramp_s=30,
            output_tokens_max=256,
            headers=self.headers(tenant),
            session_header="x-claude-code-session-id",
            policy=policy,
        )
        return await run_replay(shipped_trace("claude_code_sessions"), settings)

    async def burst(self, count: int, tenant: str) -> list[int]:
        """Open `count` streams at once, with a deadline of a minute for the first token. Returns their statuses."""
        headers = self.headers(tenant) | {"x-warmroute-ttft-ms": "60000"}
        async with aiohttp.ClientSession() as client:

            async def one(number: int) -> int:
                body = {
                    "model": MODEL,
                    "max_tokens": 1_500,
                    "messages": [{"role": "user", "content": f"{number} " * 2_000}],
                    "stream": True,
                }
                async with client.post(self.url + CHAT, json=body, headers=headers) as response:
                    await response.read()
                    return response.status

            return await asyncio.gather(*map(one, range(count)))

    async def query(self, expr: str, start_s: float, end_s: float, step_s: float = 1.0) -> list[dict[str, Any]]:
        """Return the series of a dashboard's expression, over Unix times. Raises SceneError for a bad one."""
        params: dict[str, str | float] = {
            "query": filled(expr, end_s - start_s),
            "start": start_s,
            "end": end_s,
            "step": step_s,
        }
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"{self.prometheus}/api/v1/query_range", params=params) as response,
        ):
            answer = await response.json()
        if answer["status"] != "success":
            raise SceneError(f"{expr}: {answer.get('error')}")
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series


def filled(expr: str, range_s: float) -> str:
    """Return the expression with all values of each Grafana variable filled in."""
    for name, value in (
        LIVELY | {"$__rate_interval": f"{5 * SCRAPE_S:g}s", "$__range": f"{max(1, round(range_s))}s"}
    ).items():
        expr = expr.replace(name, value)
    return expr


@asynccontextmanager
async def scene(folder: Path, *, replicas: int, time_scale: float) -> AsyncIterator[Scene]:
    """Run replicas and Prometheus, which waits for a router: see `routing`."""
    it = Scene(folder, time_scale, port=free_port(), admin_port=free_port())
    it.url = f"http://{HOST}:{it.port}"
    it.keys = {tenant: make_key() for tenant in TENANTS}
    entries = [entry_of(key, tenant, **TENANTS[tenant]) for tenant, key in it.keys.items()]
    (folder / "keys.yaml").write_text("".join(entries), encoding="utf-8")
    async with AsyncExitStack() as stack:
        for _ in range(replicas):
            engine = await stack.enter_async_context(run_process("loadtest engine", _engine(time_scale)))
            url = (await engine.wait_for_output(READY))[0][1]
            it.engines[url] = engine
            it.replicas.append(url)
        it.prometheus = await stack.enter_async_context(_prometheus(folder, it.admin_port, it.replicas))
        yield it


@asynccontextmanager
async def routing(it: Scene, policy: str = "warm", **admission: Any) -> AsyncIterator[None]:  # noqa: ANN401 - likewise
    """Run a router in front of the scene's replicas, always on the same port; ready when the block begins."""
    file = it.write_settings(policy, **admission)
    async with run_process("the router", [sys.executable, "-m", "router", "serve", "--config", str(file)]) as router:
        await router.wait_for_output(LISTENING)
        it.router = router
        await _in_time(_ready(f"{it.url}/readyz"), "the router")
        yield
    it.router = None


def _engine(time_scale: float) -> Sequence[str]:
    return (
        *(sys.executable, "-m", "loadtest", "engine"),
        *("--host", HOST, "--port", "0", "--replicas", "1", "--model", MODEL),
        *("--kv-events", "--kv-events-port", "0", "--kv-replay-port", "0"),
        *("--kv-tokens", "307328", "--time-scale", str(time_scale)),
    )


@asynccontextmanager
async def _prometheus(folder: Path, admin_port: int, replicas: Sequence[str]) -> AsyncIterator[str]:
    program = shutil.which("prometheus")
    if program is None:
        raise SceneError("there is no prometheus here: install the package of that name")
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S:g}s", "evaluation_interval": "5s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "warmroute",
                "static_configs": [{"targets": [f"{HOST}:{admin_port}"], "labels": {"namespace": "llm"}}],
            },
            {
                "job_name": "engines",
                "static_configs": [
                    {"targets": [url.partition("://")[2] for url in replicas], "labels": {"namespace": "llm"}}
                ],
            },
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"{HOST}:{free_port()}"
    words = [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    async with run_process("prometheus", [*words, f"--web.listen-address={address}"], folder):
        await _in_time(_ready(f"http://{address}/-/ready"), "Prometheus")
        yield f"http://{address}"


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as client:
        while True:
            try:
                async with client.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


async def _in_time(work: Any, what: str) -> Any:  # noqa: ANN401 - any coroutine, and what it returns
    try:
        async with asyncio.timeout(START_S):
            return await work
    except (TimeoutError, ProcessError) as error:
        raise SceneError(f"{what} did not start: {error}") from error
