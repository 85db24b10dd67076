"""InferencePools to members: which pods, which ports, and nothing that makes it fall."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.discovery.pods import ACTIVE_PORTS, ACTIVE_PORTS_ONCE, PodMapping, PodView, read, replicas_of
from router.engines.discovery.pools import LABELS_MAX, ParsedPool, PoolSelector, PoolView, read_pool
from tests.engines.discovery.test_pods import JSON, _paths
from tests.support.podstore import merged, pod, pool

A = merged(pool("a"), {"metadata": {"resourceVersion": "7"}})


def seen(**changes: Any) -> ParsedPool:
    """What is read of the pool, merged with changes of its parts."""
    found = read_pool(json.dumps(merged(A, changes)).encode())
    assert found is not None
    return found


def test_what_a_pool_is() -> None:
    """Labels in one order, whatever the object's is, ports in the pool's own, picker and failure mode. lwepp
    TestInferencePoolToEndpointPool."""
    labels = {"role": "decode", "app.example.com/name": "vllm"}
    found = seen(spec={"selector": {"matchLabels": None}} | {"targetPorts": [{"number": 8001}, {"number": 8000}]})
    assert found.trouble
    found = seen(spec={"selector": {"matchLabels": {"app": None} | labels}, "targetPorts": [{"number": 8001}]})
    assert found.members == PoolSelector("app.example.com/name=vllm,role=decode", (8001,))
    assert (found.version, found.trouble, found.picker, found.failure_mode) == ("7", "", "picker:9002", "FailOpen")


def test_a_pool_without_a_picker() -> None:
    """The picker may be left out (1.5 of the extension), and a pool that says no failure mode closes, as defined."""
    found = seen(spec={"endpointPickerRef": None})
    assert (found.members, found.picker) == (PoolSelector("app=vllm", (8000,)), "")
    assert seen(spec={"endpointPickerRef": {"failureMode": None}}).failure_mode == "FailClose"


@pytest.mark.promise(
    "An invalid InferencePool selects no pods beyond its labels and keeps its last good members.", "discovery"
)
@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"selector": None}, "matchLabels is empty, which would select every pod of the namespace"),
        ({"selector": {"matchLabels": {"app": None}}}, "matchLabels is empty"),
        ({"selector": {"matchLabels": {"app": "a,b!=c"}}}, "an invalid label: 'app': 'a,b!=c'"),
        ({"selector": {"matchLabels": {"a=b,c": "d"}}}, "an invalid label: 'a=b,c': 'd'"),
        ({"selector": {"matchLabels": {f"l{n}": "" for n in range(LABELS_MAX)}}}, "has 65 labels, more than 64"),
        ({"targetPorts": None}, "targetPorts is empty"),
        ({"targetPorts": [{"number": port} for port in range(1, 10)]}, "has 9 ports, more than 8"),
        ({"targetPorts": [{"number": 65_536}]}, "has 65536, which is not a valid port"),
        ({"targetPorts": [{"number": "http"}]}, "invalid InferencePool"),
    ],
)
def test_a_pool_that_cannot_be_followed_says_why(spec: dict[str, Any], why: str) -> None:
    """No selector is made of what is no label, and none that takes every pod."""
    found = seen(spec=spec)
    assert found.members is None
    assert why in found.trouble


def test_a_pool_that_is_being_deleted_is_none() -> None:
    """As the reference picker has it, a finalizer that holds the object changes nothing."""
    view = PoolView("a")
    view.replace(view.read([msgspec.Raw(json.dumps(A).encode())]), "7")
    assert view.pool is not None
    going = merged(A, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "8"}})
    view.apply_event(msgspec.Raw(json.dumps(going).encode()), deleted=False)
    assert view.pool is None


def test_another_pool_is_not_taken_for_it() -> None:
    """An API server that does not heed the name that was asked for changes nothing."""
    view = PoolView("b")
    view.replace(view.read([msgspec.Raw(json.dumps(A).encode())]), "7")
    assert view.pool is None


# Members


def test_each_port_of_a_pod_is_a_replica() -> None:
    """Of one pod and one run, each with its own events, counted up from the first rank's; what the pod says of its own
    port does not count, since the gateway goes by the pool's. lwepp TestEndpointMetadata."""
    annotations = {"warmroute/port": "9999", "warmroute/kv-events-port": "5557", "warmroute/kv-replay-port": "6557"}
    raw = json.dumps(pod("a", port=8001, annotations=annotations)).encode()
    found = read(raw, PodMapping(ports=(8000, 8001)))
    assert found is not None
    assert found.why == ""
    replicas, left_out = replicas_of(found.claims, {}, 10)
    first, second = sorted(replicas, key=lambda each: each.id)
    assert left_out == 0
    assert (first.id, first.events, first.replay) == (
        "http://10.0.0.1:8000",
        "tcp://10.0.0.1:5557",
        "tcp://10.0.0.1:6557",
    )
    assert (second.id, second.events, second.replay) == (
        "http://10.0.0.1:8001",
        "tcp://10.0.0.1:5558",
        "tcp://10.0.0.1:6558",
    )
    assert first.name == second.name == "default/a"
    assert first.instance == second.instance


def test_a_port_beyond_the_last_is_no_address() -> None:
    """Events of a rank whose port would be above 65535 are told to be wrong, and the engine is used all the same."""
    raw = json.dumps(pod("a", annotations={"warmroute/kv-events-port": "65535"})).encode()
    found = read(raw, PodMapping(ports=(8000, 8001)))
    assert found is not None
    assert [[each.events for each in claim.replicas] for claim in found.claims] == [["tcp://10.0.0.1:65535", ""]]


@pytest.mark.parametrize(
    ("annotations", "ports"),
    [
        pytest.param({}, {8000, 8001, 8002}, id="Pod without active ports annotation uses all ports"),
        pytest.param({ACTIVE_PORTS_ONCE: "8000,8002"}, {8000, 8002}, id="annotation filters endpoints"),
        pytest.param({ACTIVE_PORTS_ONCE: " 8000 , 8002 "}, {8000, 8002}, id="multiple ports with spaces"),
        pytest.param({ACTIVE_PORTS_ONCE: ""}, set(), id="empty active ports annotation uses no ports"),
        pytest.param({ACTIVE_PORTS_ONCE: "x,-1,8001,8001"}, {8001}, id="invalid and duplicate ports"),
        pytest.param({ACTIVE_PORTS_ONCE: "9000"}, set(), id="port not in validPorts"),
        pytest.param({ACTIVE_PORTS: "8001", ACTIVE_PORTS_ONCE: "8000"}, {8001}, id="llm-d's name before the older one"),
    ],
)
def test_a_pod_may_say_which_ports_are_active(annotations: dict[str, str], ports: set[int]) -> None:
    """lwepp TestActivePortFiltering, TestActivePortEndpointRemoval and TestExtractActivePorts: the pool's ports are
    those that may serve, and a pod's annotation says which do; each keeps its rank, and with it its events."""
    raw = json.dumps(pod("a", annotations=annotations | {"warmroute/kv-events-port": "5557"})).encode()
    found = read(raw, PodMapping(ports=(8000, 8001, 8002)))
    assert found is not None
    assert found.why == ""
    events = {each.id: each.events for each in replicas_of(found.claims, {}, 10)[0]}
    assert events == {f"http://10.0.0.1:{port}": f"tcp://10.0.0.1:{port - 8000 + 5557}" for port in ports}


def test_members_on_their_nodes_network() -> None:
    """Each port of theirs is claimed by itself: two pods of one node and pool do not take each other's."""
    host = {"spec": {"hostNetwork": True}}
    claims = []
    for name, ports in (("a", (8000, 8001)), ("b", (8002,))):
        found = read(json.dumps(merged(pod(name), host)).encode(), PodMapping(ports=ports))
        assert found is not None
        claims += found.claims
    replicas, _ = replicas_of(claims, {}, 10)
    assert {each.url.rpartition(":")[2] for each in replicas} == {"8000", "8001", "8002"}


def test_a_pod_of_two_pools_is_in_both() -> None:
    """Two pools may select one pod at other ports; a younger pod with the same address takes all of them."""
    raw = json.dumps(merged(pod("a"), {"metadata": {"uid": "u"}})).encode()
    claims = [claim for port in (8000, 9000) for claim in _read(raw, port)]
    assert {each.url.rpartition(":")[2] for each in replicas_of(claims, {}, 10)[0]} == {"8000", "9000"}
    heir = json.dumps(merged(pod("b", started="2026-02-01T00:00:00Z"), {"metadata": {"uid": "v"}})).encode()
    claims += _read(heir, 8000)
    assert {(each.name, each.url) for each in replicas_of(claims, {}, 10)[0]} == {("default/b", "http://10.0.0.1:8000")}


def _read(raw: bytes, port: int) -> list[Any]:
    view = PodView(PodMapping(ports=(port,)))
    view.replace(view.read([msgspec.Raw(raw)]), "1")
    return view.claims()


@pytest.mark.promise(
    "An invalid InferencePool selects no pods beyond its labels and keeps its last good members.", "discovery"
)
@given(path=st.sampled_from(_paths(A)[1:]), junk=JSON)
def test_malformed_pools_never_raise(path: tuple[Any, ...], junk: Any) -> None:
    """Whatever stands anywhere in a pool: it has members, or says why not, or is nobody."""
    whole = json.loads(json.dumps(A))
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    found = read_pool(json.dumps(whole).encode())
    assert found is None or found.going or (found.members is None) == bool(found.trouble)


@given(st.binary(max_size=50))
def test_bytes_never_raise(raw: bytes) -> None:
    """Nor does anything that is no JSON."""
    assert read_pool(raw) is None
