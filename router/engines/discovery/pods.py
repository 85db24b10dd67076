"""Selection of replicas from pods as reported by the API server. Without I/O, and safe against any content of a pod.

A pod is a replica while it runs, is ready, is not terminating, has an address, and has one port that is known to be the
engine's. A replica that becomes not ready stays one, but gets no new requests. A late answer to a readiness probe
therefore empties no cache.

A pod *claims* its address from the time that it has one until it terminates or has finished. Addresses are reused, and
the status of a pod on a dead node can be Ready for long. If several pods claim one address, it belongs to the pod that
was started last, ready or not.

Only required fields are decoded, so that a pod of 10 KB takes a few microseconds. Names are those of core/v1 Pod.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from router.config.allowed_networks import is_public
from router.core.types.replicas import Replica
from router.engines.discovery.known_stacks import REVISION, is_worker_only, role_of, stack_of
from router.engines.discovery.object_cache import ObjectCache

PORT = "warmroute/port"  # annotations of pods
EVENTS_PORT = "warmroute/kv-events-port"
REPLAY_PORT = "warmroute/kv-replay-port"
PEER_PORT = "warmroute/p2p-port"
ACTIVE_PORTS = "llm-d.ai/active-ports"  # annotation of a pod: the serving ports of its pool, separated by commas
ACTIVE_PORTS_ONCE = "inference.networking.k8s.io/active-ports"  # its name in the upstream's own picker
ACTIVE_CHARS_MAX = 1_024  # maximum length of such an annotation that is read
ADDRESSES_MAX = 8  # maximum number of known addresses of one pod
PORT_NAME = "http"  # default name of the engine's port
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


class _Annotations(msgspec.Struct):
    port: str = msgspec.field(default="", name=PORT)
    events: str = msgspec.field(default="", name=EVENTS_PORT)
    replay: str = msgspec.field(default="", name=REPLAY_PORT)
    peer: str = msgspec.field(default="", name=PEER_PORT)
    active: str | None = msgspec.field(default=None, name=ACTIVE_PORTS)
    active_once: str | None = msgspec.field(default=None, name=ACTIVE_PORTS_ONCE)


class _Identity(msgspec.Struct, rename="camel"):
    name: str
    resource_version: str = ""


class _Metadata(_Identity, rename="camel"):
    namespace: str = ""
    uid: str = ""
    deletion_timestamp: str | None = None
    creation_timestamp: str | None = None
    annotations: _Annotations | None = None
    labels: dict[str, str] | None = None


class _Port(msgspec.Struct, rename="camel"):
    container_port: int
    name: str | None = None
    protocol: str | None = None


class _Container(msgspec.Struct, rename="camel"):
    name: str
    ports: list[_Port] | None = None
    restart_policy: str | None = None


class _Spec(msgspec.Struct, rename="camel"):
    node_name: str | None = None
    host_network: bool | None = None
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str


class _ContainerStatus(msgspec.Struct, rename="camel"):
    name: str
    restart_count: int = 0
    container_id: str | None = msgspec.field(default=None, name="containerID")


class _PodIp(msgspec.Struct):
    ip: str = ""


class _Status(msgspec.Struct, rename="camel"):
    phase: str | None = None
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    pod_ips: list[_PodIp] | None = msgspec.field(default=None, name="podIPs")
    start_time: str | None = None
    conditions: list[_Condition] | None = None
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec
    status: _Status


class _Bare(msgspec.Struct):
    metadata: _Identity


_decode_pod = msgspec.json.Decoder(_Pod).decode
_decode_bare = msgspec.json.Decoder(_Bare).decode


@dataclass(frozen=True, slots=True)
class PodMapping:
    """Rule by which the engine is found in its pod.

    - `scheme`, `port`, `loopback`: the settings `discovery.*`.
    - `known_only`: only pods of known stacks count, because there is no selector.
    - `ports`: the ports of a pool, which have priority over any other name of a port because its gateway connects to
      them. Each is a separate replica, unless the pod names the active ones.
    - `split`: pods have roles, which their labels name.
    """

    scheme: str = "http"
    port: str = ""
    known_only: bool = False
    loopback: bool = False
    ports: tuple[int, ...] = ()
    split: bool = False


@dataclass(frozen=True, slots=True)
class PodReplica:
    """A pod that has an address. It may be a replica or not."""

    holder: str  # the address; with host network, address and port; "" for no address
    age: tuple[str, str, str]  # sort key by start: RFC 3339 in UTC sorts as text
    replicas: tuple[Replica, ...] = ()  # ready or not


@dataclass(frozen=True, slots=True)
class ParsedPod:
    """One version of a pod."""

    name: str
    version: str
    claims: tuple[PodReplica, ...] = ()  # several only for a pod in a pool that uses its node's network
    why: str = ""  # reason why a pod that looks like a replica is not one, or only in part


class _Unclear(Exception):
    """The engine's port in a pod is ambiguous or unknown."""


def read(raw: bytes | msgspec.Raw, rule: PodMapping) -> ParsedPod | None:
    """Decode a pod object; None if even its identity is unreadable."""
    try:
        pod = _decode_pod(raw)
    except _UNREADABLE as error:
        try:
            bare = _decode_bare(raw).metadata
        except _UNREADABLE:
            return None
        return ParsedPod(bare.name, bare.resource_version, why=f"invalid pod: {error}")
    name, version = pod.metadata.name, pod.metadata.resource_version
    address = _address(pod.status.pod_ip or "")
    if not address or pod.metadata.deletion_timestamp or pod.status.phase not in ("Pending", "Running"):
        return ParsedPod(name, version)
    labels = pod.metadata.labels or {}
    stack = stack_of(labels, split=rule.split) if rule.known_only else None
    if rule.known_only and stack is None:
        return ParsedPod(name, version)
    if not is_public(pod.status.pod_ip or "", loopback=rule.loopback):
        return ParsedPod(name, version, why=f"its address {address} is not allowed for replicas (discovery.loopback)")
    if stack is not None and stack.port and not rule.port:
        rule = PodMapping(rule.scheme, stack.port, split=rule.split)
    age = (pod.status.start_time or "", pod.metadata.creation_timestamp or "", pod.metadata.uid)
    runs, ready = pod.status.phase == "Running", _ready(pod.status)
    nothing = PodReplica("" if pod.spec.host_network else address, age)
    try:
        replicas, why = _replicas(pod, address, rule, ready=ready)
    except _Unclear as unclear:
        return ParsedPod(
            name, version, (nothing,), str(unclear) if runs and ready and not is_worker_only(labels) else ""
        )
    if not runs:
        return ParsedPod(name, version, (nothing,))
    if not pod.spec.host_network:
        return ParsedPod(name, version, (PodReplica(address, age, replicas),), why if ready else "")
    # A node's port is claimed only by a pod that serves there.
    age = age if ready else ("", "", "")
    return ParsedPod(name, version, tuple(PodReplica(each.id, age, (each,)) for each in replicas), why if ready else "")


def _address(ip: str) -> str:
    """Return an IP address as in a URL; "" if the text is not an address."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return ""
    if address.version == 4:
        return ip
    return "" if "%" in ip else f"[{address.compressed}]"


def _ready(status: _Status) -> bool:
    return any(condition.type == "Ready" and condition.status == "True" for condition in status.conditions or ())


def _replicas(pod: _Pod, address: str, rule: PodMapping, *, ready: bool) -> tuple[tuple[Replica, ...], str]:
    """Return the replicas, and the problem of their event ports, without which they are still usable."""
    annotations = pod.metadata.annotations or _Annotations()
    if not rule.ports:
        named, who = annotations.port or rule.port, PORT if annotations.port else "discovery.port"
        replica, why = _replica(pod, address, rule, *_port(pod.spec, named, who), ready=ready)
        return (replica,), why
    found = [
        _replica(pod, address, rule, *_port(pod.spec, str(port), "targetPorts"), rank=rank, ready=ready)
        for rank, port in enumerate(rule.ports)
        if _is_active(annotations, port)
    ]
    return tuple(replica for replica, _ in found), found[0][1] if found else ""


def _is_active(annotations: _Annotations, port: int) -> bool:
    """True if a port of the pool serves in this pod. Without the annotation all ports do; with an empty list none
    does."""
    listed = annotations.active if annotations.active is not None else annotations.active_once
    return listed is None or str(port) in map(str.strip, listed[:ACTIVE_CHARS_MAX].split(","))


def _replica(
    pod: _Pod, address: str, rule: PodMapping, port: int, container: str, *, rank: int = 0, ready: bool
) -> tuple[Replica, str]:
    """Return the replica on one port. The ranks of one pod publish their events on separate ports, counted up from the
    first rank's, the same as vLLM (`ZmqEventPublisher.offset_endpoint_port`)."""
    annotations = pod.metadata.annotations or _Annotations()
    events = replay = peer = why = ""
    try:
        if annotations.peer:
            peer = f"{address}:{_number(annotations.peer, PEER_PORT, rank)}"
        if annotations.events:
            events = f"tcp://{address}:{_number(annotations.events, EVENTS_PORT, rank)}"
            if annotations.replay:
                replay = f"tcp://{address}:{_number(annotations.replay, REPLAY_PORT, rank)}"
    except _Unclear as unclear:
        why = str(unclear)
    labels = (pod.metadata.labels or {}) if rule.split else {}
    replica = Replica(
        f"{rule.scheme}://{address}:{port}",
        instance=f"{pod.metadata.uid}/{_run(pod, container)}",
        name=f"{pod.metadata.namespace}/{pod.metadata.name}",
        node=pod.spec.node_name or "",
        events=events,
        replay=replay,
        peer=peer,
        role=role_of(labels),
        revision=labels.get(REVISION, ""),
        ready=ready,
        hosts=_hosts(pod.status, rule) if rule.split else (),
    )
    return replica, why


def _hosts(status: _Status, rule: PodMapping) -> tuple[str, ...]:
    """Return all addresses of a pod that has several, such as IPv4 and IPv6, without those that no replica may have."""
    given = [each.ip for each in status.pod_ips or ()]
    addresses = tuple(ip for ip in given if _address(ip) and is_public(ip, loopback=rule.loopback))
    return addresses if 1 < len(addresses) <= ADDRESSES_MAX else ()


def _number(text: str, what: str, beyond: int = 0) -> int:
    """Return a port number plus `beyond`. Raises _Unclear if the text or the sum is not a port."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65_536 - beyond):
        raise _Unclear(f"{what} is not a valid port: {text[:64]!r}")
    return int(text) + beyond


def _port(spec: _Spec, wanted: str, who: str) -> tuple[int, str]:
    """Return the engine's port and its container's name, "" if unknown. `wanted` is a number, a port's name or "".
    Raises _Unclear if there is no such port, or more than one."""
    sidecars = [each for each in spec.init_containers or () if each.restart_policy == "Always"]
    own, aside = _open(spec.containers or ()), _open(sidecars)
    if wanted and wanted.isascii() and wanted.isdigit():
        number = _number(wanted, who)
        return number, next((container for port, container in own + aside if port.container_port == number), "")
    name = wanted or PORT_NAME
    for ports in (own, aside):
        if named := {port.container_port: container for port, container in ports if port.name == name}:
            return _only(named, f"several ports are named {name}")
    if wanted:
        raise _Unclear(f"{who} is {wanted[:64]!r}, but no container has a port of that name")
    if not own:
        raise _Unclear(f"no container has a port: name one {PORT_NAME}, or set discovery.port or the annotation {PORT}")
    return _only(
        {port.container_port: container for port, container in own},
        f"several ports, but none named {PORT_NAME}: set discovery.port or the annotation {PORT}",
    )


def _open(containers: Iterable[_Container]) -> list[tuple[_Port, str]]:
    """Return all TCP ports of the pod with their containers' names."""
    return [
        (port, container.name)
        for container in containers
        for port in container.ports or ()
        if (port.protocol or "TCP") == "TCP" and 0 < port.container_port < 65_536
    ]


def _only(ports: Mapping[int, str], otherwise: str) -> tuple[int, str]:
    if len(ports) > 1:
        raise _Unclear(otherwise)
    return next(iter(ports.items()))


def _run(pod: _Pod, container: str) -> str:
    """Return an id of the current run of the engine's container, or of all containers if the engine's is unknown.
    Container ids are better than restart counts, which a kubelet can lose with its dead containers."""
    own = pod.status.container_statuses or []
    statuses = [each for each in own + (pod.status.init_container_statuses or []) if each.name == container] or own
    return ",".join(each.container_id or str(each.restart_count) for each in statuses)


class PodView(ObjectCache[ParsedPod]):
    """The pods of one namespace, or of one pool."""

    def __init__(self, rule: PodMapping) -> None:
        super().__init__()
        self._rule = rule

    def parse(self, raw: msgspec.Raw) -> ParsedPod | None:
        """Decode one pod, by the view's rule."""
        return read(raw, self._rule)

    def claims(self) -> list[PodReplica]:
        """Return the claims of all pods that have an address."""
        return [claim for sighting in self.objects.values() for claim in sighting.claims]


def replicas_of(
    claims: Iterable[PodReplica], given: Mapping[str, str], replicas_max: int
) -> tuple[frozenset[Replica], int]:
    """Return the replicas of these claims, and the number omitted above `replicas_max`.

    A replica that is not ready stays if the same instance is in `given` (by id). Ready ones have priority, then those
    in `given`, then the order of names. A pod can have several claims, as a member of several pools.
    """
    holders: dict[str, tuple[tuple[str, str, str], dict[str, Replica]]] = {}
    for claim in sorted(claims, key=lambda claim: claim.age):
        if claim.holder:
            age, held = holders.get(claim.holder, (claim.age, {}))
            own = {replica.id: replica for replica in claim.replicas}
            holders[claim.holder] = claim.age, (held | own if age == claim.age else own)
    by_id = {
        id_: replica
        for _, held in holders.values()
        for id_, replica in held.items()
        if replica.ready or given.get(id_) == replica.instance
    }
    if len(by_id) <= replicas_max:
        return frozenset(by_id.values()), 0
    ranked = sorted(by_id.values(), key=lambda each: (not each.ready, each.id not in given, each.name, each.id))
    return frozenset(ranked[:replicas_max]), len(ranked) - replicas_max
