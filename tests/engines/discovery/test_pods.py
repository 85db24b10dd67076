"""Pods to replicas: which port, which address, who goes before whom, and nothing that makes it fall."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.types.replicas import Replica
from router.engines.discovery.pods import ParsedPod, PodMapping, PodView, read, replicas_of
from tests.engines.discovery.test_dns import SPECIAL
from tests.support.podstore import Pod, merged, pod


def seen(what: Pod, **changes: Any) -> ParsedPod:
    """What is read of a pod, merged with changes of its parts."""
    found = read(json.dumps(merged(what, changes)).encode(), RULE)
    assert found is not None
    return found


RULE = PodMapping()
A = merged(pod("a"), {"metadata": {"uid": "u", "resourceVersion": "7"}})


def replica(found: ParsedPod) -> Replica | None:
    """That a pod is, and ready."""
    ready = [one for claim in found.claims for one in claim.replicas if one.ready]
    return ready[0] if ready else None


def containers(*ports: list[tuple[str, int]], kind: str = "containers") -> dict[str, Any]:
    """Of a spec: containers c0, c1, ... with named ports."""
    return {
        kind: [
            {"name": f"c{index}", "ports": [{"name": name, "containerPort": port} for name, port in each]}
            for index, each in enumerate(ports)
        ]
    }


def port_of(spec: dict[str, Any], rule: PodMapping = RULE, **annotations: str) -> int | str:
    """The port that is found in a pod with this spec, or why there is none."""
    bare = {**A, "spec": spec, "metadata": {**A["metadata"], "annotations": annotations}}
    found = read(json.dumps(bare).encode(), rule)
    assert found is not None
    one = replica(found)
    return int(one.url.rpartition(":")[2]) if one else found.why


def test_what_a_replica_is() -> None:
    """Address, run, name, node and event ports come from the pod."""
    annotations = {"warmroute/kv-events-port": "5557", "warmroute/kv-replay-port": "5558"}
    assert replica(seen(A, metadata={"annotations": annotations})) == Replica(
        "http://10.0.0.1:8000",
        instance="u/containerd://a-0",
        name="default/a",
        node="node-1",
        events="tcp://10.0.0.1:5557",
        replay="tcp://10.0.0.1:5558",
    )


def test_where_requests_are_split_a_pod_has_all_its_addresses() -> None:
    """Those of a pod with several, and none where no replica is allowed: its engine may name them to others."""
    for ips, hosts in (
        (["10.0.0.1", "fd00::1"], ("10.0.0.1", "fd00::1")),
        (["10.0.0.1"], ()),
        (
            ["10.0.0.1", "169.254.169.254", "fe80::1%eth0", "engine.example", "127.0.0.1", "fd00::1"],
            ("10.0.0.1", "fd00::1"),
        ),
        ([f"10.0.0.{n}" for n in range(9)], ()),
    ):
        raw = json.dumps(merged(A, {"status": {"podIP": "10.0.0.1", "podIPs": [{"ip": ip} for ip in ips]}})).encode()
        for rule, expected in ((PodMapping(split=True), hosts), (RULE, ())):
            found = read(raw, rule)
            assert found is not None
            one = replica(found)
            assert one is not None
            assert one.hosts == expected


@pytest.mark.promise(
    "DNS and pods give addresses, never names, and no metadata, link-local or multicast ones.", "discovery"
)
@pytest.mark.promise("Loopback addresses become replicas only if the settings permit it.", "discovery")
@pytest.mark.parametrize("address", [each for each in SPECIAL if each not in ("nowhere", "010.0.0.1")])
def test_whoever_writes_pods_sends_the_router_nowhere_special(address: str) -> None:
    """A pod whose status has the address of a metadata service, of this machine or of no host is no replica, and the
    log says why; this machine's own are taken where the settings say so."""
    found = seen(A, status={"podIP": address})
    assert found.claims == ()
    assert "is not allowed for replicas" in found.why
    raw = json.dumps(merged(A, {"status": {"podIP": address}})).encode()
    local = read(raw, PodMapping(loopback=True))
    assert local is not None
    assert (replica(local) is not None) == (address in ("127.0.0.1", "127.8.8.8", "::1"))


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"status": {"phase": "Pending"}},
        {"status": {"phase": "Failed"}},
        {"status": {"phase": "Succeeded"}},
        {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}},
        {"status": {"conditions": [{"type": "ContainersReady", "status": "True"}]}},
        {"status": {"conditions": None}},
        {"status": {"podIP": None}},
        {"status": {"podIP": "fe80::1%eth0"}},
        {"status": {"podIP": "engine.example"}},
    ],
)
def test_who_is_no_replica(changes: dict[str, Any]) -> None:
    """Terminating, finished, not ready, or without an address: out, and nothing to be said of it. lwepp
    TestIsPodReady."""
    found = seen(A, **changes)
    assert replica(found) is None
    assert found.why == ""


def test_ipv6() -> None:
    """Addresses are bracketed, and written one way."""
    one = replica(seen(A, status={"podIP": "FD00:0::A"}, metadata={"annotations": {"warmroute/kv-events-port": "1"}}))
    assert one is not None
    assert (one.id, one.events) == ("http://[fd00::a]:8000", "tcp://[fd00::a]:1")


def test_port() -> None:
    """The annotation, then the setting, by number or name; then the port named http, then the only one. Sidecars'
    ports have to be asked for by name or number."""
    two = containers([("http", 8000), ("metrics", 9000)], [("web", 80)])
    assert port_of(two) == 8000
    assert port_of(two, PodMapping(port="web")) == 80
    assert port_of(two, PodMapping(port="1234")) == 1234
    assert port_of(two, PodMapping(port="web"), **{"warmroute/port": "metrics"}) == 9000
    assert port_of(two, **{"warmroute/port": "9000"}) == 9000
    assert port_of(containers([("api", 7000)])) == 7000
    sidecars = containers([("http", 5000)], kind="initContainers")
    assert "no container has a port" in str(port_of(containers([]) | containers([("x", 1)], kind="initContainers")))
    assert "no container has a port" in str(port_of(containers([]) | sidecars)), "an init container that ends"
    for each in sidecars["initContainers"]:
        each["restartPolicy"] = "Always"
    assert port_of(containers([("api", 7000)]) | sidecars) == 5000
    assert port_of(containers([("http", 7000)]) | sidecars) == 7000


@pytest.mark.parametrize(
    ("spec", "annotation", "why"),
    [
        (containers([]), "", "no container has a port"),
        (containers([("a", 1), ("b", 2)]), "", "several ports, but none named http"),
        (containers([("http", 1)], [("http", 2)]), "", "several ports are named http"),
        (containers([("http", 1)]), "api", "'api', but no container has a port of that name"),
        (containers([("http", 1)]), "0", "warmroute/port is not a valid port: '0'"),
        (containers([("http", 1)]), "65536", "warmroute/port is not a valid port: '65536'"),
        (containers([("http", 1)]), "٣", "no container has a port of that name"),
    ],
)
def test_unclear_port_is_told(spec: dict[str, Any], annotation: str, why: str) -> None:
    """A pod that cannot be used says why not."""
    assert why in str(port_of(spec, **({"warmroute/port": annotation} if annotation else {})))


def test_wrong_event_port_is_told() -> None:
    """The engine is used all the same."""
    found = seen(A, metadata={"annotations": {"warmroute/kv-events-port": "many"}})
    one = replica(found)
    assert one is not None
    assert one.events == ""
    assert "kv-events-port is not a valid port: 'many'" in found.why


def test_run() -> None:
    """An engine that is started again in its pod is another one; a sidecar beside it that is, is not."""
    spec = containers([("http", 8000)], [])
    statuses = [{"name": "c0", "restartCount": 0}, {"name": "c1", "restartCount": 0, "containerID": "x"}]
    first = replica(seen(A, spec=spec, status={"containerStatuses": statuses}))
    assert first is not None
    for index, other in ((0, True), (1, False)):
        later = [dict(status) for status in statuses]
        later[index] |= {"restartCount": 1, "containerID": "y"}
        again = replica(seen(A, spec=spec, status={"containerStatuses": later}))
        assert again is not None
        assert (again.instance != first.instance) == other


def union(*pods: Pod, given: Mapping[str, str] = MappingProxyType({}), replicas_max: int = 100) -> tuple[set[str], int]:
    """Names of the replicas that pods come to."""
    claims = [claim for each in pods for claim in seen(each).claims]
    found, left_out = replicas_of(claims, given, replicas_max)
    return {one.name.partition("/")[2] for one in found}, left_out


def test_two_pods_with_one_address() -> None:
    """The one started last has it, from before it is ready; one that terminates or has finished claims nothing."""
    old, new = pod("old", started="2026-01-01T00:00:00Z"), pod("new", started="2026-01-01T00:00:01Z")
    assert union(old, new)[0] == union(new, old)[0] == {"new"}
    assert union(old, pod("new", started="2026-01-01T00:00:01Z", ready=False))[0] == set()
    assert union(old, pod("new", started="2026-01-01T00:00:01Z", phase="Failed"))[0] == {"old"}
    assert union(old, merged(new, {"metadata": {"deletionTimestamp": "x"}}))[0] == {"old"}


def test_pods_on_their_nodes_network() -> None:
    """They share an address, and each has its own port."""
    host = {"spec": {"hostNetwork": True}}
    assert union(merged(pod("a"), host), merged(pod("b", port=9000), host))[0] == {"a", "b"}
    assert union(merged(pod("a"), host), merged(pod("b", ready=False), host))[0] == {"a"}


@pytest.mark.promise("No content of a pod stops discovery, and its findings are bounded.", "discovery")
def test_no_more_than_replicas_max() -> None:
    """Who is there stays; of the others the first by name come."""
    pods = [pod(name, ip=f"10.0.0.{index}") for index, name in enumerate("abcd", 1)]
    assert union(*pods, replicas_max=2) == ({"a", "b"}, 2)
    assert union(*pods, replicas_max=2, given={"http://10.0.0.4:8000": "d"}) == ({"a", "d"}, 2)
    assert union(*pods, replicas_max=4) == ({"a", "b", "c", "d"}, 0)


def test_events_told_again_change_nothing() -> None:
    """A version that was heard before, or listed, is not taken for news; a deletion is, once."""
    view = PodView(RULE)
    versions = [merged(A, {"metadata": {"resourceVersion": str(version)}}) for version in range(1, 5)]
    raws = [msgspec.Raw(json.dumps(version).encode()) for version in versions]
    view.replace(view.read([raws[0]]), "1")
    assert view.apply_event(raws[0], deleted=False) is None
    assert view.apply_event(raws[1], deleted=False) is not None
    assert view.apply_event(raws[2], deleted=False) is not None
    assert view.apply_event(raws[1], deleted=False) is None
    assert (view.objects["a"].version, view.version) == ("3", "3")
    assert view.apply_event(raws[2], deleted=True) is not None
    assert view.apply_event(raws[2], deleted=False) is None
    assert view.objects == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in _paths(each, (*path, key)))]


@pytest.mark.promise("No content of a pod stops discovery, and its findings are bounded.", "discovery")
@given(path=st.sampled_from(_paths(A)[1:]), junk=JSON)
def test_malformed_pods_never_raise(path: tuple[Any, ...], junk: Any) -> None:
    """Whatever stands anywhere in a pod: it is read, or is no replica, or is nobody."""
    whole = json.loads(json.dumps(A))
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    found = read(json.dumps(whole).encode(), RULE)
    assert found is None or isinstance(found.name, str)
    if found is not None and (one := replica(found)) is not None:
        assert one.id.startswith("http://")


@pytest.mark.promise("No content of a pod stops discovery, and its findings are bounded.", "discovery")
@given(st.binary(max_size=50))
def test_bytes_never_raise(raw: bytes) -> None:
    """Nor does anything that is no JSON."""
    assert read(raw, RULE) is None
