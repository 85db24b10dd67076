"""The examples run: the script and the agents for real, on free ports; the compose file as far as it can be here."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.common.processes import free_ports
from router.cli import main as command
from router.cli.config_loader import load
from router.config.schema import Settings

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose" / "compose.yaml").read_text(encoding="utf-8"))
SCRIPT_TIMEOUT_S = 240.0


@asynccontextmanager
async def script(**variables: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """examples/two-replicas/run.sh on free ports, and the URL of its router; ended at the end."""
    router, admin, replica, _ = map(str, free_ports(4))  # the second replica takes the next
    bare = {key: value for key, value in os.environ.items() if not key.startswith("WARMROUTE_")}
    ports = {"ROUTER_PORT": router, "ADMIN_PORT": admin, "REPLICA_PORT": replica, "PYTHON": sys.executable}
    process = await asyncio.create_subprocess_exec(
        EXAMPLES / "two-replicas" / "run.sh",
        stdout=asyncio.subprocess.PIPE,
        env={**bare, **ports, **variables},
    )
    try:
        yield process, f"http://127.0.0.1:{router}"
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.communicate(), SCRIPT_TIMEOUT_S)


async def test_the_second_turn_finds_the_first() -> None:
    """The script of two replicas ends well, and shows a cold first turn and a warm second one on the same replica."""
    async with script() as (process, _):
        out, _ = await asyncio.wait_for(process.communicate(), SCRIPT_TIMEOUT_S)
    assert process.returncode == 0
    first, second = out.decode().split("== second turn")
    assert "x-warmroute-reason: cold" in first
    assert "x-warmroute-reason: warm" in second
    replicas = [line for line in out.decode().splitlines() if line.startswith("x-warmroute-replica")]
    assert len(replicas) == 2
    assert len(set(replicas)) == 1


async def test_agents_stay_where_their_history_is() -> None:
    """With the script kept up, agents with the official client get answers, and each stays on one replica."""
    async with script(KEEP="1") as (process, url):
        assert process.stdout is not None
        async with asyncio.timeout(SCRIPT_TIMEOUT_S):
            while b"the router is at" not in await process.stdout.readline():
                assert process.returncode is None
        words = [EXAMPLES / "agents" / "agents.py", "--base-url", f"{url}/v1", "--agents", "3", "--turns", "3"]
        agents = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(agents.communicate(), SCRIPT_TIMEOUT_S)
    assert agents.returncode == 0
    assert out.decode().count("prompt tokens cached") == 9
    assert "3 of 3 agents stayed on one replica" in out.decode()


def test_the_script_is_sound() -> None:
    """bash finds no mistake in the script's syntax."""
    subprocess.run(["bash", "-n", EXAMPLES / "two-replicas" / "run.sh"], check=True, timeout=10)


def test_the_router_of_the_compose_file_takes_its_words() -> None:
    """The router's command is one that the image's entry point accepts, and its settings are fine."""
    words = COMPOSE["services"]["router"]["command"]
    options = command._parser().parse_args(words)
    assert str(options.config) == "/etc/warmroute/warmroute.yaml"
    settings = load(EXAMPLES / "compose" / "warmroute.yaml")
    assert [url.removeprefix("http://").partition(":")[0] for url in settings.replicas] == ["vllm-0", "vllm-1"]
    assert set(COMPOSE["services"]) == {"vllm-0", "vllm-1", "router"}


def test_the_compose_file_has_the_images_that_are_deployed_elsewhere() -> None:
    """Router and vLLM are of the versions, with the flags and limits, that deploy/ has."""
    deployed = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))["services"]["router"]
    router = COMPOSE["services"]["router"]
    for key in (
        "image",
        "pull_policy",
        "read_only",
        "cap_drop",
        "security_opt",
        "tmpfs",
        "stop_grace_period",
        "healthcheck",
    ):
        assert router[key] == deployed[key], key
    pod = next(yaml.safe_load_all((ROOT / "deploy" / "engines" / "vllm.yaml").read_text(encoding="utf-8")))
    engine = pod["spec"]["template"]["spec"]["containers"][0]
    for name in ("vllm-0", "vllm-1"):
        assert COMPOSE["services"][name]["image"] == engine["image"]
        assert set(COMPOSE["services"][name]["command"]) <= set(engine["args"])


def test_the_router_of_the_compose_file_has_time_to_end() -> None:
    """The container's grace is longer than lame duck and drain together."""
    listen = Settings().listen
    grace = COMPOSE["services"]["router"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) >= listen.lame_duck_s + listen.drain_s


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir()))
def test_every_example_is_on_the_page(example: str) -> None:
    """examples/README.md leads to each example."""
    assert f"]({example}/" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
