"""Random histories of pools, pods and faults: after recovery the view is the truth, and until then the last good one.

They are those of test_histories.py, with pools that come, go and change besides.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from router.config.schema import DiscoverySettings
from router.engines.discovery.kubernetes import KubernetesDiscovery
from tests.engines.discovery.cluster import NAMESPACES
from tests.engines.discovery.test_histories import RESYNC_S, RUNS, SHARES, History, history
from tests.support.podstore import Pod, pool

NAMES = ("one/a", "one/b", "two/a")


class PoolHistory(History):
    """A history in which pools say who is a replica; two are in one namespace, and may overlap."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        settings = DiscoverySettings("kubernetes", NAMESPACES[:1], pools=NAMES, resync_s=RESYNC_S)
        self.discovery = KubernetesDiscovery(settings, self.api, Random(seed))
        for name in NAMES:
            if self.random.random() < 0.7:
                self.make(name)

    def change(self) -> None:
        """A pod or a pool changes."""
        if self.random.random() < 0.7:
            super().change()
            return
        name = self.random.choice(NAMES)
        namespace, _, own = name.partition("/")
        self.tally["pools"] += 1
        if (namespace, own) not in self.api.pools.pods:
            self.make(name)
        elif self.random.random() < 0.3:
            self.api.pools.delete(own, namespace)
        else:
            changed = self.new(name)
            self.api.pools.patch(own, {"spec": changed["spec"]}, namespace)

    def make(self, name: str) -> None:
        """Create a pool."""
        self.api.pools.create(self.new(name))

    def new(self, name: str) -> Pod:
        """Any that may have this name."""
        namespace, _, own = name.partition("/")
        ports = self.random.choice([(8000,), (8000,), (9000,), (8000, 8001)])
        return pool(own, *ports, namespace=namespace, labels={"app": self.random.choice(["vllm", "vllm", "other"])})

    def truth(self) -> set[tuple[str, str, str]]:
        """URL, name and run of every member of every pool, written down once more."""
        found = set[tuple[str, str, str]]()
        selected: dict[str, list[tuple[Pod, Pod]]] = {}
        for (namespace, _), each in self.store.pods.items():
            ip = each["status"].get("podIP")
            gone = "deletionTimestamp" in each["metadata"] or each["status"]["phase"] in ("Failed", "Succeeded")
            if ip is None or gone:
                continue
            for (where, _), one in self.api.pools.pods.items():
                if where == namespace and one["spec"]["selector"]["matchLabels"] == each["metadata"]["labels"]:
                    selected.setdefault(ip, []).append((each, one))
        for ip, pairs in selected.items():
            last = max(pairs, key=lambda pair: pair[0]["status"]["startTime"])[0]
            if {"type": "Ready", "status": "True"} not in last["status"]["conditions"]:
                continue
            if last["status"]["phase"] != "Running":
                continue
            meta = last["metadata"]
            run = f"{meta['uid']}/{last['status']['containerStatuses'][0]['containerID']}"
            found |= {
                (f"http://{ip}:{port['number']}", f"{meta['namespace']}/{meta['name']}", run)
                for each, one in pairs
                if each is last
                for port in one["spec"]["targetPorts"]
            }
        return found


@pytest.mark.parametrize("share", range(SHARES))
def test_view_of_pools_is_truth_after_recovery(share: int) -> None:
    """Whatever happened to pools, their pods and the API server, two seconds after recovery the view is what the pools
    select; while the API server is away it stays as it was, and is known to be stale."""
    tally: Counter[str] = Counter()
    for seed in range(share, RUNS, SHARES):
        tally += history(seed, PoolHistory)
    print(f"\n{share}: {dict(tally)}")
    assert tally["checks"] > RUNS / SHARES
    assert tally["pools"]
