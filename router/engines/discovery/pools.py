"""InferencePools (`inference.networking.k8s.io/v1`) as the API server shows them. Pure, and safe against any content.

A pool says which pods of its own namespace are its members (`selector`), on which ports each of them serves
(`targetPorts`, every one an endpoint), and which picker its gateway asks, and what the gateway does without an answer
(`endpointPickerRef`). The names are those of api/v1/inferencepool_types.go of the Gateway API inference extension.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from router.engines.discovery.objects import ObjectView

PORTS_MAX = 8  # target ports of a pool, by its definition
LABELS_MAX = 64  # labels of a selector, which are sent in the URL of each question
FAIL_CLOSE = "FailClose"  # what a gateway does where a pool does not say
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


class _PoolName(msgspec.Struct, rename="camel"):
    name: str
    resource_version: str = ""
    deletion_timestamp: str | None = None


class _PoolSelector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str] | None = None


class _TargetPort(msgspec.Struct):
    number: int


class _PickerPort(msgspec.Struct):
    number: int = 0


class _PickerRef(msgspec.Struct, rename="camel"):
    name: str = ""
    port: _PickerPort | None = None
    failure_mode: str | None = None


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: _PoolSelector | None = None
    target_ports: list[_TargetPort] | None = None
    endpoint_picker_ref: _PickerRef | None = None


class _PoolObject(msgspec.Struct):
    metadata: _PoolName
    spec: _PoolSpec


class _BarePool(msgspec.Struct):
    metadata: _PoolName


_decode_pool = msgspec.json.Decoder(_PoolObject).decode
_decode_bare = msgspec.json.Decoder(_BarePool).decode


@dataclass(frozen=True, slots=True)
class Members:
    """Which endpoints a pool has."""

    selector: str  # label selector of its pods
    ports: tuple[int, ...]  # on each of which every pod of it is a replica; in the pool's own order


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """One version of a pool."""

    name: str
    version: str
    members: Members | None = None  # None: `trouble` says why, or the pool is being deleted
    trouble: str = ""  # why a pool cannot be followed as it is, for people
    going: bool = False  # being deleted: it is no pool any more
    picker: str = ""  # Service and port of its endpoint picker; "" for none
    failure_mode: str = FAIL_CLOSE  # what its gateway does without an answer of the picker; FailOpen, or FailClose
    why: str = ""  # always: what is wrong with a pool is told by whoever follows it


def read_pool(raw: bytes | msgspec.Raw) -> PoolSeen | None:
    """Read a pool object; None if it does not even say which pool it is."""
    try:
        pool = _decode_pool(raw)
    except _UNREADABLE as error:
        try:
            bare = _decode_bare(raw).metadata
        except _UNREADABLE:
            return None
        return PoolSeen(bare.name, bare.resource_version, trouble=f"not as a pool should be: {error}")
    name, version = pool.metadata.name, pool.metadata.resource_version
    if pool.metadata.deletion_timestamp:
        return PoolSeen(name, version, going=True)
    ref = pool.spec.endpoint_picker_ref or _PickerRef()
    port = ref.port.number if ref.port is not None else 0
    picker = f"{ref.name}:{port}" if port else ref.name
    labels = (pool.spec.selector or _PoolSelector()).match_labels or {}
    ports = tuple(dict.fromkeys(each.number for each in pool.spec.target_ports or ()))
    trouble = _trouble(labels, ports)
    members = None
    if not trouble:
        members = Members(",".join(f"{key}={value}" for key, value in sorted(labels.items())), ports)
    return PoolSeen(name, version, members, trouble, picker=picker, failure_mode=ref.failure_mode or FAIL_CLOSE)


def _trouble(labels: dict[str, str], ports: tuple[int, ...]) -> str:
    """What is wrong with a pool's selector or its ports; "" if nothing is."""
    if not labels:
        return "its spec.selector.matchLabels is empty, which would take every pod of the namespace"
    if len(labels) > LABELS_MAX:
        return f"its spec.selector.matchLabels has {len(labels)} labels, more than {LABELS_MAX}"
    for key, value in labels.items():
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            return f"its spec.selector.matchLabels has no label: {key[:64]!r}: {value[:64]!r}"
    if not ports:
        return "its spec.targetPorts is empty, so nothing says where engines listen"
    if len(ports) > PORTS_MAX:
        return f"its spec.targetPorts has {len(ports)} ports, more than {PORTS_MAX}"
    if wrong := [port for port in ports if not 0 < port < 65_536]:
        return f"its spec.targetPorts has {wrong[0]}, which is no port"
    return ""


class PoolView(ObjectView[PoolSeen]):
    """The one pool of a name, or nothing."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def sighting(self, raw: msgspec.Raw) -> PoolSeen | None:
        """The pool; None for another, which the API server was not asked for."""
        seen = read_pool(raw)
        return seen if seen is not None and seen.name == self._name else None

    @property
    def pool(self) -> PoolSeen | None:
        """The pool; None where there is none, or it is being deleted."""
        seen = self.objects.get(self._name)
        return None if seen is None or seen.going else seen
