"""deploy/compose.yaml: valid, confined, in step, and its commands run for real, as processes and without a daemon.

What a container would give is replaced word by word: names of services become 127.0.0.1, and every port a free one.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from loadtest.common.processes import free_ports
from tests.supply.install import REPO, VENV

DEPLOY = REPO / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
UP_TIMEOUT_S = 240.0
LOAD_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
PORTS_MAX = 40
PORT = re.compile(r"(?<![\d.])(?:8000|8001|9090|910\d|555\d|655\d)(?!\d)")


def test_compose_follows_the_specification() -> None:
    """The file is valid by the schema of the Compose specification."""
    check = [VENV / "bin" / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_confined(name: str) -> None:
    """A root that cannot be written, no capability, no way to more; reached from this machine alone."""
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert "user" not in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for volume in service.get("volumes", []):
        source, _, mode = volume.split(":")
        assert mode == "ro"
        assert (DEPLOY / source).exists(), source


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_pinned_and_watched(name: str) -> None:
    """A foreign image by its version, and a health check for whatever stays. Our own is built here, never pulled: no
    registry has it, and a name there could be anybody's."""
    service = SERVICES[name]
    image, _, tag = service["image"].rpartition(":")
    assert image
    if "build" in service:
        assert (image, service["pull_policy"]) == ("warmroute", "build")
    else:
        assert re.search(r"\d+\.\d+\.\d+", tag), tag
    assert "healthcheck" in service or "profiles" in service


def test_the_router_has_time_to_end() -> None:
    """The grace of the router's container is longer than its lame duck and its drain together."""
    from router.config.schema import Settings

    listen = Settings().listen
    assert SERVICES["router"]["stop_grace_period"] == f"{listen.lame_duck_s + listen.drain_s + 15:.0f}s"


def prometheus_files(folder: Path) -> Path:
    """The folder that the container has: the files beside each other, as they are mounted."""
    folder.mkdir()
    for volume in SERVICES["prometheus"]["volumes"]:
        source, target, _ = volume.split(":")
        shutil.copy(DEPLOY / source, folder / Path(target).name)
    return folder


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    """`promtool check config` finds the configuration and the rules sound."""
    promtool = program("promtool")
    check = [promtool, "check", "config", prometheus_files(tmp_path / "prometheus") / "prometheus.yml"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def program(name: str) -> str:
    """A program of the package `prometheus`; the test is skipped where it is missing."""
    found = shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not here: apt-get install prometheus")
    return found


class Stand:
    """The services as processes: what they are called, and where they are instead."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports: dict[str, int] = {}
        self._free = iter(free_ports(PORTS_MAX))
        self._prometheus = prometheus_files(folder / "prometheus")
        config = self._prometheus / "prometheus.yml"
        config.write_text(
            self.local(config.read_text(encoding="utf-8")).replace("scrape_interval: 5s", "scrape_interval: 1s")
        )

    def port(self, wanted: str) -> int:
        """The free port that stands for one of the file."""
        if wanted not in self._ports:
            self._ports[wanted] = next(self._free)
        return self._ports[wanted]

    def local(self, text: str) -> str:
        """The same words with addresses of this machine."""
        for name in [*SERVICES, "localhost"]:
            text = re.sub(rf"(?<![\w.-]){name}(?=:\d)", "127.0.0.1", text)
        return PORT.sub(lambda found: str(self.port(found[0])), text.replace("0.0.0.0", "127.0.0.1"))

    def command(self, name: str) -> list[str]:
        """What the service's container would run, here."""
        service = SERVICES[name]
        entrypoint = service.get(
            "entrypoint", {"router": ["warmroute"], "prometheus": [program("prometheus")]}.get(name)
        )
        words = [self.local(str(word)) for word in service["command"]]
        changes: Mapping[str, Callable[[str], str]] = {
            "/traces/": lambda word: word.replace("/traces", str(REPO / "loadtest" / "data")),
            "/etc/prometheus": lambda word: word.replace("/etc/prometheus", str(self._prometheus)),
            "=/prometheus": lambda word: word.replace("=/prometheus", f"={self.folder}/series"),
        }
        for part, change in changes.items():
            words = [change(word) if part in word else word for word in words]
        if name == "router":
            words += ["--port", str(self.port("8000")), "--admin-port", str(self.port("8001"))]
        if name == "prometheus":
            words += [f"--web.listen-address=127.0.0.1:{self.port('9090')}"]
        python = {"python": [sys.executable], "warmroute": [sys.executable, "-m", "router"]}
        return [*python.get(entrypoint[0], entrypoint[:1]), *entrypoint[1:], *words]

    def url(self, wanted: str) -> str:
        """Where a service that listens on this port of the file is."""
        return f"http://127.0.0.1:{self.port(wanted)}"


@asynccontextmanager
async def process(command: list[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """One service, ended with the block."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WARMROUTE_")}
    with log.open("wb") as file:
        child = await asyncio.create_subprocess_exec(*command, cwd=REPO, env=environment, stdout=file, stderr=file)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            try:
                await asyncio.wait_for(child.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                child.kill()
                await child.wait()


def last_words(logs: Path) -> str:
    """The end of what each service wrote."""
    return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in sorted(logs.glob("*.log")))


async def until(session: aiohttp.ClientSession, url: str, good: Callable[[Any], bool], logs: Path) -> Any:
    """What a page says once it is good; the test fails with what the services said if that takes too long."""
    try:
        async with asyncio.timeout(UP_TIMEOUT_S):
            while True:
                try:
                    async with session.get(url) as answer:
                        said = await (answer.json() if "api" in url else answer.text())
                        if answer.status == 200 and good(said):
                            return said
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.3)
    except TimeoutError:
        pytest.fail(f"{url} is not as it should be\n{last_words(logs)}", pytrace=False)


async def test_the_services_run_and_prometheus_sees_them(tmp_path: Path) -> None:
    """With the commands of the file replicas, router and Prometheus come up in order; every target is up, every rule
    group is evaluated without error, and the load generator's requests are seen in Prometheus."""
    stand = Stand(tmp_path)
    async with AsyncExitStack() as running:
        session = await running.enter_async_context(aiohttp.ClientSession())
        for names, page in (
            (("replica-0",), stand.url("9100") + "/health"),
            (("replica-1",), stand.url("9101") + "/health"),
            (("router",), stand.url("8000") + "/readyz"),
            (("prometheus",), stand.url("9090") + "/-/ready"),
        ):
            for name in names:
                await running.enter_async_context(process(stand.command(name), tmp_path / f"{name}.log"))
            await until(session, page, lambda _: True, tmp_path)
        targets = stand.url("9090") + "/api/v1/targets"

        def all_up(said: Any) -> bool:
            active = said["data"]["activeTargets"]
            return len(active) == 4 and {each["health"] for each in active} == {"up"}

        await until(session, targets, all_up, tmp_path)
        load = [*stand.command("load"), "--requests", "12"]
        async with process(load, tmp_path / "load.log") as generator:
            assert await asyncio.wait_for(generator.wait(), LOAD_TIMEOUT_S) == 0, (tmp_path / "load.log").read_text()
        query = stand.url("9090") + "/api/v1/query?query=sum(warmroute_requests_total)"
        await until(session, query, lambda said: float(said["data"]["result"][0]["value"][1]) >= 12, tmp_path)
        rules = stand.url("9090") + "/api/v1/rules"

        def evaluated(said: Any) -> bool:
            found = [rule for group in said["data"]["groups"] for rule in group["rules"]]
            return bool(found) and all(rule["health"] == "ok" for rule in found)

        await until(session, rules, evaluated, tmp_path)
