"""Pods, as the API server shows them, to replicas: pure, and never surprised by what a pod looks like.

A pod is a replica while it runs, is ready, is not about to go, has an address, and has one port that can be told to be
the engine's. One that was a replica and is not ready for a while stays one, to which nothing new is sent: a probe that
a busy engine answers late empties no cache. A pod *claims* its address from the moment it has one until it terminates
or has finished. Addresses are used again, and the status of a pod whose node died may say Ready for as long as nobody
corrects it: of several pods that claim one address, the one started last has it, ready or not.

Only what is needed is decoded, so that a pod of 10 KB costs some microseconds. Field names are those of core/v1 Pod.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from router.core.facts.replicas import Replica

PORT = "warmroute/port"  # annotations of pods
EVENTS_PORT = "warmroute/kv-events-port"
REPLAY_PORT = "warmroute/kv-replay-port"
PORT_NAME = "http"  # of the engine's port where nothing else is said
SEEN_MAX = 8_192  # versions of events that a view remembers
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


class _Annotations(msgspec.Struct):
    port: str = msgspec.field(default="", name=PORT)
    events: str = msgspec.field(default="", name=EVENTS_PORT)
    replay: str = msgspec.field(default="", name=REPLAY_PORT)


class _Identity(msgspec.Struct, rename="camel"):
    name: str
    resource_version: str = ""


class _Metadata(_Identity, rename="camel"):
    namespace: str = ""
    uid: str = ""
    deletion_timestamp: str | None = None
    creation_timestamp: str | None = None
    annotations: _Annotations | None = None


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


class _Status(msgspec.Struct, rename="camel"):
    phase: str | None = None
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
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
    """How an engine is found in its pod: settings `discovery.scheme` and `discovery.port`."""

    scheme: str = "http"
    port: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A pod that has an address, whether or not it can be used."""

    holder: str  # the address, or where pods share their node's, address and port; "": none
    age: tuple[str, str, str]  # sorts pods by their start; RFC 3339 in UTC sorts as text does
    replica: Replica | None  # ready or not


@dataclass(frozen=True, slots=True)
class PodSeen:
    """One version of a pod."""

    name: str
    version: str
    claim: Claim | None = None
    why: str = ""  # it is no replica, or not all of one, though it looks as if it were meant to be


class _Unclear(Exception):
    """A pod's port cannot be told."""


def read(raw: bytes | msgspec.Raw, rule: Rule) -> PodSeen | None:
    """What a pod object says; None when it does not even say which pod it is."""
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
    age = (pod.status.start_time or "", pod.metadata.creation_timestamp or "", pod.metadata.uid)
    runs, ready = pod.status.phase == "Running", _ready(pod.status)
    try:
        replica, why = _replica(pod, address, rule, ready=ready)
    except _Unclear as unclear:
        claim = Claim("" if pod.spec.host_network else address, age, None)
        return PodSeen(name, version, claim, str(unclear) if runs and ready else "")
    if not runs:
        return PodSeen(name, version, Claim("" if pod.spec.host_network else address, age, None))
    if not ready:
        # A node's port is claimed by who serves there, not by who would like to.
        age, why = ("", "", "") if pod.spec.host_network else age, ""
    return PodSeen(name, version, Claim(replica.id if pod.spec.host_network else address, age, replica), why)


def _address(ip: str) -> str:
    """As it stands in a URL; empty when it is none."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return ""
    if address.version == 4:
        return ip
    return "" if "%" in ip else f"[{address.compressed}]"


def _ready(status: _Status) -> bool:
    return any(condition.type == "Ready" and condition.status == "True" for condition in status.conditions or ())


def _replica(pod: _Pod, address: str, rule: Rule, *, ready: bool) -> tuple[Replica, str]:
    """And what is wrong with its event ports: without them it can be used all the same."""
    annotations = pod.metadata.annotations or _Annotations()
    port, container = _port(pod.spec, annotations.port or rule.port, PORT if annotations.port else "discovery.port")
    events = replay = why = ""
    try:
        if annotations.events:
            events = f"tcp://{address}:{_number(annotations.events, EVENTS_PORT)}"
            if annotations.replay:
                replay = f"tcp://{address}:{_number(annotations.replay, REPLAY_PORT)}"
    except _Unclear as unclear:
        why = str(unclear)
    replica = Replica(
        f"{rule.scheme}://{address}:{port}",
        instance=f"{pod.metadata.uid}/{_run(pod, container)}",
        name=f"{pod.metadata.namespace}/{pod.metadata.name}",
        node=pod.spec.node_name or "",
        events=events,
        replay=replay,
        ready=ready,
    )
    return replica, why


def _number(text: str, what: str) -> int:
    """A port; raises _Unclear when it is none."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65_536):
        raise _Unclear(f"{what} is not a port: {text[:64]!r}")
    return int(text)


def _port(spec: _Spec, wanted: str, who: str) -> tuple[int, str]:
    """The engine's port and its container's name, empty if unknown. `wanted` is a number, a port's name or nothing;
    raises _Unclear when there is none, or more than one."""
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
    """TCP ports with their containers' names."""
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
    """Which run of the engine's container this is; of all containers, where it is not known which is the engine's.
    Ids are better than counts, which a kubelet may lose with its dead containers."""
    own = pod.status.container_statuses or []
    statuses = [each for each in own + (pod.status.init_container_statuses or []) if each.name == container] or own
    return ",".join(each.container_id or str(each.restart_count) for each in statuses)


class PodView:
    """The pods of one namespace. Versions are only ever compared for equality: that is all they promise."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.version = ""  # that a watch goes on from; empty: pods have to be listed first
        self.pods: dict[str, PodSeen] = {}
        self._seen: dict[str, None] = {}  # versions: who tells one twice tells nothing

    def read(self, items: Iterable[msgspec.Raw]) -> list[PodSeen]:
        """Items of one page of a list."""
        return [sighting for item in items if (sighting := read(item, self._rule)) is not None]

    def replace(self, sightings: Iterable[PodSeen], version: str) -> None:
        """Nothing else is there. What was heard is forgotten: a store put back from a backup counts versions anew."""
        self.pods = {sighting.name: sighting for sighting in sightings}
        self.version = version
        self._seen = dict.fromkeys(sighting.version for sighting in self.pods.values())

    def hear(self, raw: msgspec.Raw, *, deleted: bool) -> PodSeen | None:
        """An event of a watch; None when it says nothing new."""
        sighting = read(raw, self._rule)
        if sighting is None:
            return None
        if sighting.version:
            told = f"-{sighting.version}" if deleted else sighting.version  # some say DELETED of the last version
            if told in self._seen:
                return None
            self._seen[told] = None
            if len(self._seen) > SEEN_MAX:
                del self._seen[next(iter(self._seen))]
            self.version = sighting.version
        if deleted:
            self.pods.pop(sighting.name, None)
        else:
            self.pods[sighting.name] = sighting
        return sighting

    def claims(self) -> list[Claim]:
        """Of all pods that have an address."""
        return [sighting.claim for sighting in self.pods.values() if sighting.claim is not None]


def replicas_of(claims: Iterable[Claim], given: Mapping[str, str], replicas_max: int) -> tuple[frozenset[Replica], int]:
    """What claims come to, and how many are left out because there are more than `replicas_max`. Who is not ready
    stays, if that very instance is in `given` (by id). Who is ready goes before who is not, who is in `given` before
    who is not, then they go by name."""
    holders: dict[str, Replica | None] = {}
    for claim in sorted(claims, key=lambda claim: claim.age):
        if claim.holder:
            holders[claim.holder] = claim.replica
    by_id = {
        replica.id: replica
        for replica in holders.values()
        if replica is not None and (replica.ready or given.get(replica.id) == replica.instance)
    }
    if len(by_id) <= replicas_max:
        return frozenset(by_id.values()), 0
    ranked = sorted(by_id.values(), key=lambda each: (not each.ready, each.id not in given, each.name, each.id))
    return frozenset(ranked[:replicas_max]), len(ranked) - replicas_max
