"""InferencePools (`inference.networking.k8s.io/v1`) as reported by the API server. Without I/O, safe for any content.

A pool selects the pods of its namespace that are its members (`selector`), and names the ports on which each of them
serves (`targetPorts`, every one an endpoint). It also names the picker of its gateway, and the gateway's behaviour
without an answer (`endpointPickerRef`). The names are those of api/v1/inferencepool_types.go of the Gateway API
inference extension.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from router.engines.discovery.object_cache import ObjectCache

PORTS_MAX = 8  # target ports of a pool, by its definition
LABELS_MAX = 64  # labels of a selector, which are sent in the URL of each request
FAIL_CLOSE = "FailClose"  # a gateway's behaviour if the pool does not set it
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
class PoolSelector:
    """The endpoints of a pool."""

    selector: str  # label selector of its pods
    ports: tuple[int, ...]  # every pod is a replica on each of these; in the pool's own order


@dataclass(frozen=True, slots=True)
class ParsedPool:
    """One version of a pool."""

    name: str
    version: str
    members: PoolSelector | None = None  # None: `trouble` has the reason, or the pool is being deleted
    trouble: str = ""  # readable reason why a pool cannot be followed
    going: bool = False  # being deleted: no longer a pool
    picker: str = ""  # Service and port of its endpoint picker; "" without one
    failure_mode: str = FAIL_CLOSE  # its gateway's behaviour without an answer of the picker: FailOpen or FailClose
    why: str = ""  # always "": the PoolInformer logs a pool's problems


def read_pool(raw: bytes | msgspec.Raw) -> ParsedPool | None:
    """Decode a pool object; None if even its identity is unreadable."""
    try:
        pool = _decode_pool(raw)
    except _UNREADABLE as error:
        try:
            bare = _decode_bare(raw).metadata
        except _UNREADABLE:
            return None
        return ParsedPool(bare.name, bare.resource_version, trouble=f"invalid InferencePool: {error}")
    name, version = pool.metadata.name, pool.metadata.resource_version
    if pool.metadata.deletion_timestamp:
        return ParsedPool(name, version, going=True)
    ref = pool.spec.endpoint_picker_ref or _PickerRef()
    port = ref.port.number if ref.port is not None else 0
    picker = f"{ref.name}:{port}" if port else ref.name
    labels = (pool.spec.selector or _PoolSelector()).match_labels or {}
    ports = tuple(dict.fromkeys(each.number for each in pool.spec.target_ports or ()))
    trouble = _trouble(labels, ports)
    members = None
    if not trouble:
        members = PoolSelector(",".join(f"{key}={value}" for key, value in sorted(labels.items())), ports)
    return ParsedPool(name, version, members, trouble, picker=picker, failure_mode=ref.failure_mode or FAIL_CLOSE)


def _trouble(labels: dict[str, str], ports: tuple[int, ...]) -> str:
    """Return the problem of a pool's selector or ports; "" without one."""
    if not labels:
        return "its spec.selector.matchLabels is empty, which would select every pod of the namespace"
    if len(labels) > LABELS_MAX:
        return f"its spec.selector.matchLabels has {len(labels)} labels, more than {LABELS_MAX}"
    for key, value in labels.items():
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            return f"its spec.selector.matchLabels has an invalid label: {key[:64]!r}: {value[:64]!r}"
    if not ports:
        return "its spec.targetPorts is empty, so the engines' port is unknown"
    if len(ports) > PORTS_MAX:
        return f"its spec.targetPorts has {len(ports)} ports, more than {PORTS_MAX}"
    if wrong := [port for port in ports if not 0 < port < 65_536]:
        return f"its spec.targetPorts has {wrong[0]}, which is not a valid port"
    return ""


class PoolView(ObjectCache[ParsedPool]):
    """The one pool of a name, or no pool."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def parse(self, raw: msgspec.Raw) -> ParsedPool | None:
        """Return the pool; None for another pool, which was not requested."""
        seen = read_pool(raw)
        return seen if seen is not None and seen.name == self._name else None

    @property
    def pool(self) -> ParsedPool | None:
        """The pool; None if it does not exist or is being deleted."""
        seen = self.objects.get(self._name)
        return None if seen is None or seen.going else seen
