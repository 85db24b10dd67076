"""The image's Kubernetes client, without its generated classes, does what discovery needs of it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from deploy.trim_kubernetes import GENERATED, trim
from tests.support.apiserver import ApiServer
from tests.support.podstore import pod

# One set of pods, found with the client that lies in the folder given first.
FIND = """
import asyncio, sys
import kubernetes
from router.engines.discovery.kubernetes import KubernetesDiscovery
from router.config.schema import DiscoverySettings

async def find():
    assert kubernetes.__file__.startswith(sys.argv[1]), kubernetes.__file__
    sets = KubernetesDiscovery(DiscoverySettings("kubernetes", selector="app=vllm", kubeconfig=sys.argv[2])).watch()
    print(*sorted(replica.name for replica in await anext(sets)))
    await sets.aclose()

asyncio.run(find())
"""


async def test_discovery_works_with_the_trimmed_client(api: ApiServer, tmp_path: Path) -> None:
    """Pods are found by a client of which only configuration and HTTP are left, and most of its bytes are gone."""
    found = find_spec("kubernetes")
    assert found is not None
    assert found.origin is not None
    site = tmp_path / "site"
    shutil.copytree(Path(found.origin).parent, site / "kubernetes")
    before = _bytes(site)
    assert trim(site) > 1_000
    assert _bytes(site) < before / 10
    api.store.create(pod("b", ip="10.0.0.2"))
    command = [sys.executable, "-c", FIND, str(site), str(api.kubeconfig(tmp_path))]
    environment = {"PYTHONPATH": f"{site}:.", "PYTHONDONTWRITEBYTECODE": "1"}
    said = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["default/a", "default/b"]


def test_another_layout_is_an_error(tmp_path: Path) -> None:
    """A client that is laid out otherwise fails the build, rather than being taken apart."""
    with pytest.raises(FileNotFoundError, match=GENERATED[0]):
        trim(tmp_path)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.py"))
