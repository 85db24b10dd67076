"""Which pods are replicas, from pods as the API server shows them. Pure, and safe against any content of a pod.

A pod is a replica while it runs, is ready, is not terminating, has an address, and has one port that can be told to be
the engine's. A replica that is not ready for a while stays one, but gets no new requests: a late answer to a probe
empties no cache. A pod *claims* its address from the moment it has one until it terminates or has finished.
Addresses are used again, and the status of a pod whose node died may say Ready for long: of several pods that claim
one address, the one started last has it, ready or not.

Only the fields that are needed are decoded, so that a pod of 10 KB costs some microseconds. Names are those of core/v1
Pod.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from router.core.facts.replicas import Replica
from router.engines.discovery.objects import ObjectView
from router.engines.discovery.stacks import REVISION, only_works, role_of, stack_of
from router.settings.networks import usual

PORT = "warmroute/port"  # annotations of pods
EVENTS_PORT = "warmroute/kv-events-port"
REPLAY_PORT = "warmroute/kv-replay-port"
PEER_PORT = "warmroute/p2p-port"
ACTIVE_PORTS = "llm-d.ai/active-ports"  # annotation of a pod: those ports of its pool that serve, with commas between
ACTIVE_PORTS_ONCE = "inference.networking.k8s.io/active-ports"  # its name in the upstream's own picker
ACTIVE_CHARS_MAX = 1_024  # characters of such an annotation that are read
ADDRESSES_MAX = 8  # addresses of one pod that are known
PORT_NAME = "http"  # name of the engine's port by default
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
class Rule:
    """How the engine is found in its pod: the settings `discovery.scheme`, `discovery.port` and `discovery.loopback`,
    and whether only pods of known stacks count because no selector has chosen. A pool's `ports` go before all else that
    names a port: its gateway connects to them, and each is a replica of its own, unless the pod says which of them are
    active. `split`: pods have roles, which their labels name."""

    scheme: str = "http"
    port: str = ""
    known_only: bool = False
    loopback: bool = False
    ports: tuple[int, ...] = ()
    split: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A pod that has an address, whether or not it is a replica."""

    holder: str  # the address; with host network, address and port; "" for none
    age: tuple[str, str, str]  # sort key by start: RFC 3339 in UTC sorts like text
    replicas: tuple[Replica, ...] = ()  # ready or not


@dataclass(frozen=True, slots=True)
class PodSeen:
    """One version of a pod."""

    name: str
    version: str
    claims: tuple[Claim, ...] = ()  # several only of a pod that is on its node's network and in a pool
    why: str = ""  # why a pod that looks like a replica is none, or not all of one


class _Unclear(Exception):
    """The engine's port in a pod is not clear."""


def read(raw: bytes | msgspec.Raw, rule: Rule) -> PodSeen | None:
    """Read a pod object; None if it does not even say which pod it is."""
    try:
        pod = _decode_pod(raw)
    except _UNREADABLE as error:
        try:
            bare = _decode_bare(raw).metadata
        except _UNREADABLE:
            return None
        return PodSeen(bare.name, bare.resource_version, why=f"not as a pod should be: {error}")
    name, version = pod.metadata.name, pod.metadata.resource_version
    address = _address(pod.status.pod_ip or "")
    if not address or pod.metadata.deletion_timestamp or pod.status.phase not in ("Pending", "Running"):
        return PodSeen(name, version)
    labels = pod.metadata.labels or {}
    stack = stack_of(labels, split=rule.split) if rule.known_only else None
    if rule.known_only and stack is None:
        return PodSeen(name, version)
    if not usual(pod.status.pod_ip or "", loopback=rule.loopback):
        return PodSeen(name, version, why=f"its address is {address}, where no replica may be (discovery.loopback)")
    if stack is not None and stack.port and not rule.port:
        rule = Rule(rule.scheme, stack.port, split=rule.split)
    age = (pod.status.start_time or "", pod.metadata.creation_timestamp or "", pod.metadata.uid)
    runs, ready = pod.status.phase == "Running", _ready(pod.status)
    nothing = Claim("" if pod.spec.host_network else address, age)
    try:
        replicas, why = _replicas(pod, address, rule, ready=ready)
    except _Unclear as unclear:
        return PodSeen(name, version, (nothing,), str(unclear) if runs and ready and not only_works(labels) else "")
    if not runs:
        return PodSeen(name, version, (nothing,))
    if not pod.spec.host_network:
        return PodSeen(name, version, (Claim(address, age, replicas),), why if ready else "")
    # A node's port is claimed only by a pod that serves there.
    age = age if ready else ("", "", "")
    return PodSeen(name, version, tuple(Claim(each.id, age, (each,)) for each in replicas), why if ready else "")


def _address(ip: str) -> str:
    """An IP address as in a URL; "" if the text is no address."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return ""
    if address.version == 4:
        return ip
    return "" if "%" in ip else f"[{address.compressed}]"


def _ready(status: _Status) -> bool:
    return any(condition.type == "Ready" and condition.status == "True" for condition in status.conditions or ())


def _replicas(pod: _Pod, address: str, rule: Rule, *, ready: bool) -> tuple[tuple[Replica, ...], str]:
    """The replicas, and what is wrong with their event ports, without which they can still be used."""
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
    """Whether a port of the pool serves in this pod. A pod that names none has all of them; an empty list is none."""
    listed = annotations.active if annotations.active is not None else annotations.active_once
    return listed is None or str(port) in map(str.strip, listed[:ACTIVE_CHARS_MAX].split(","))


def _replica(
    pod: _Pod, address: str, rule: Rule, port: int, container: str, *, rank: int = 0, ready: bool
) -> tuple[Replica, str]:
    """The replica on one port. The ranks of one pod publish their events each on a port of its own, counted up from
    the first rank's, as vLLM does (`ZmqEventPublisher.offset_endpoint_port`)."""
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


def _hosts(status: _Status, rule: Rule) -> tuple[str, ...]:
    """All addresses of a pod that has several, as with IPv4 and IPv6, but for those where no replica may be."""
    given = [each.ip for each in status.pod_ips or ()]
    addresses = tuple(ip for ip in given if _address(ip) and usual(ip, loopback=rule.loopback))
    return addresses if 1 < len(addresses) <= ADDRESSES_MAX else ()


def _number(text: str, what: str, beyond: int = 0) -> int:
    """A port number, counted up by `beyond`. Raises _Unclear if the text is none, or the sum is."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65_536 - beyond):
        raise _Unclear(f"{what} is not a port: {text[:64]!r}")
    return int(text) + beyond


def _port(spec: _Spec, wanted: str, who: str) -> tuple[int, str]:
    """The engine's port and its container's name, "" if unknown. `wanted` is a number, a port's name or "". Raises
    _Unclear if there is no such port, or more than one."""
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
        raise _Unclear(f"{who} says {wanted[:64]!r}, and no container has a port of that name")
    if not own:
        raise _Unclear(
            f"no container says a port: name one {PORT_NAME}, or set discovery.port or the annotation {PORT}"
        )
    return _only(
        {port.container_port: container for port, container in own},
        f"several ports, none named {PORT_NAME}: set discovery.port or the annotation {PORT}",
    )


def _open(containers: Iterable[_Container]) -> list[tuple[_Port, str]]:
    """All TCP ports of the pod with their containers' names."""
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
    """Which run of the engine's container this is, or of all containers if the engine's is not known. Container ids are
    better than restart counts, which a kubelet may lose with its dead containers."""
    own = pod.status.container_statuses or []
    statuses = [each for each in own + (pod.status.init_container_statuses or []) if each.name == container] or own
    return ",".join(each.container_id or str(each.restart_count) for each in statuses)


class PodView(ObjectView[PodSeen]):
    """The pods of one namespace, or those of one pool."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self._rule = rule

    def sighting(self, raw: msgspec.Raw) -> PodSeen | None:
        """One pod, by the view's rule."""
        return read(raw, self._rule)

    def claims(self) -> list[Claim]:
        """Claims of all pods that have an address."""
        return [claim for sighting in self.objects.values() for claim in sighting.claims]


def replicas_of(claims: Iterable[Claim], given: Mapping[str, str], replicas_max: int) -> tuple[frozenset[Replica], int]:
    """The replicas of these claims, and how many are left out because there are more than `replicas_max`. One that is
    not ready stays if that very instance is in `given` (by id). Ready ones go first, then those in `given`, then by
    name. A pod may claim more than once, as a member of several pools."""
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
