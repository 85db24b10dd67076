"""The chart's container run as a process: its arguments, variables and mounted Secrets do what the values say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from loadtest.common.processes import LISTENING, run_process
from router.config.api_keys import entry_of, make_key
from tests.k8s.cluster import page, until
from tests.k8s.tools import NEEDED, SECRETS, Document, only, settings_text, template

SOON_S = 120.0
# A line of log.format text; with log.level warning those of level info are left out.
AS_TEXT = re.compile(r"^[0-9:.]{12} warning ", re.MULTILINE)
GRAFANA = "https://grafana.example.com/d/warmroute"
VALUES: dict[str, Any] = {
    "config": {
        "discovery": {"source": "static"},
        "replicas": ["http://127.0.0.1:9"],
        "listen": {"file_watch_interval_s": 0.05},
    },
    "networkPolicy": {"engines": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    "apiKeys": {"existingSecret": "keys"},
    "extraArgs": ["--set", "log.format=text"],
    "extraEnv": [{"name": "WARMROUTE_LOG_LEVEL", "value": "warning"}],
    "extraEnvFrom": [{"configMapRef": {"name": "more"}}],
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "more"},
            "data": {"WARMROUTE_INSIGHTS_GRAFANA_URL": GRAFANA},
        }
    ],
}


def variables(found: list[Document], container: Document) -> list[str]:
    """A container's variables as `env` takes them: of its ConfigMaps first, then its own, as a kubelet has it."""
    maps = {d["metadata"]["name"]: d["data"] for d in found if d["kind"] == "ConfigMap"}
    given: dict[str, str] = {}
    for source in container.get("envFrom", []):
        given |= maps[source["configMapRef"]["name"]]
    given |= {each["name"]: each["value"] for each in container.get("env", [])}
    return [f"{name}={value}" for name, value in given.items()]


def mount(folder: Path, version: str, content: str) -> None:
    """A Secret's file as a kubelet mounts it and exchanges it: links to a folder, of which one is renamed."""
    (folder / f"..{version}").mkdir(parents=True)
    (folder / f"..{version}" / "keys.yaml").write_text(content)
    (folder / "..next").symlink_to(f"..{version}")
    (folder / "..next").rename(folder / "..data")
    if not (folder / "keys.yaml").is_symlink():
        (folder / "keys.yaml").symlink_to("..data/keys.yaml")


def command(container: Document, settings: Path, env: Sequence[str]) -> list[str]:
    """The container's command on this machine: its settings file, and free ports of loopback."""
    assert container["command"] == ["warmroute"]
    args = [str(settings) if word == "/etc/warmroute/warmroute.yaml" else word for word in container["args"]]
    here = ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0"]
    return ["env", *env, sys.executable, "-m", "router", *args, *here]


async def test_what_is_added_works_and_secrets_are_exchanged(tmp_path: Path) -> None:
    """Arguments, variables and ConfigMaps of variables reach the router, and a key of a Secret that was exchanged is
    taken by the process that runs, while the old one no longer is: the Secret's folder is mounted whole for that."""
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(NEEDED | VALUES))
    found = template("--values", values)
    (container,) = only(found, "Deployment")["spec"]["template"]["spec"]["containers"]
    (mounted,) = (each for each in container["volumeMounts"] if each["mountPath"] == SECRETS)
    assert "subPath" not in mounted

    old, new = make_key(), make_key()
    secrets, settings = tmp_path / "secrets", tmp_path / "warmroute.yaml"
    mount(secrets, "one", entry_of(old, "team"))
    settings.write_text(settings_text(found).replace(SECRETS, str(secrets)))
    words = command(container, settings, variables(found, container))
    async with run_process("warmroute", words, tmp_path) as process, aiohttp.ClientSession() as session:
        (said,) = await process.wait_for_output(LISTENING)
        url, admin = said[1], said[2]

        async def taken(key: str) -> bool:
            async with session.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
                return response.status != 401

        async def exchanged() -> bool:
            return await taken(new) and not await taken(old)

        assert await taken(old)
        assert not await taken(new)
        status, text = await page(f"{admin}/admin/observatory")
        assert (status, json.loads(text)["links"]["grafana"]) == (200, GRAFANA)
        await process.wait_for_output(AS_TEXT)
        assert "replica joined" not in process.output.read_text()
        mount(secrets, "two", entry_of(new, "team"))
        await until(exchanged, SOON_S, "the new key was not taken")
