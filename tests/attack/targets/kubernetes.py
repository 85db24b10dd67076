"""What the API server of Kubernetes says: pods, InferencePools, events of a watch, pages of a list."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

from router.core.types.replicas import Replica
from router.engines.discovery import api_client
from router.engines.discovery.informer import Gone, Informer, WatchFailed
from router.engines.discovery.pods import ParsedPod, PodMapping, PodView, read, replicas_of
from router.engines.discovery.pools import PORTS_MAX, read_pool
from tests.attack.cuts import cut
from tests.attack.target import Target

RULES = (
    PodMapping(),
    PodMapping(port="8000"),
    PodMapping(port="engine"),
    PodMapping("https", known_only=True),
    PodMapping(ports=(8000, 65_535)),
)


def pods(data: bytes) -> None:
    """One pod, by each rule: a replica that can be asked, or why it is none."""
    for rule in RULES:
        seen = read(data, rule)
        if seen is not None:
            _sane(seen)


def pools(data: bytes) -> None:
    """One InferencePool: a selector that names labels alone and ports that there are, or why it has no members."""
    seen = read_pool(data)
    if seen is None or seen.going:
        return
    assert (seen.members is None) == bool(seen.trouble)
    if seen.members is not None:
        for label in seen.members.selector.split(","):
            key, _, value = label.partition("=")
            assert key
            assert not {*key + value} & {*" !=,()\n"}
        assert 0 < len(seen.members.ports) <= PORTS_MAX
        assert all(0 < port < 65_536 for port in seen.members.ports)


def _sane(seen: ParsedPod) -> None:
    found = [replica for claim in seen.claims for replica in claim.replicas]
    for url in filter(None, (text for each in found for text in (each.id, each.events, each.replay))):
        parts = urlsplit(url)
        assert parts.hostname
        ipaddress.ip_address(parts.hostname)
        assert 0 < (parts.port or 0) < 65_536
        assert not parts.path
        assert not parts.query
    assert replicas_of(seen.claims, {}, 1)[0] <= {*found}


class _Listing:
    """An API server that answers a list with these bytes."""

    def __init__(self, page: bytes) -> None:
        self._page = page

    async def list(self, _: str, __: int, ___: str) -> bytes:
        """The same page, whatever is asked for."""
        return self._page


def watch(data: bytes) -> None:
    """Lines of a watch, heard one after the other: only Gone and WatchFailed are raised, and the view stays whole."""
    asyncio.run(_watched(data))


async def _watched(data: bytes) -> None:
    lines = await _lines([data])
    assert await _lines(cut(random.Random(data), data) if data else []) == lines
    view = PodView(PodMapping())
    follower = Informer(
        cast("Any", _Listing(data)), "default", view, resync_s=60.0, changed=lambda: None, random=random.Random(1)
    )
    for line in lines[0]:
        with suppress(Gone, WatchFailed):
            follower._hear(line)
    with suppress(Gone, WatchFailed):
        follower._take(await follower._list())
    claims = view.claims()
    found, _ = replicas_of(claims, {}, 10)
    assert all(isinstance(each, Replica) for each in found)


async def _lines(pieces: list[bytes]) -> tuple[list[bytes], bool]:
    """Lines of an answer that comes in these pieces, and whether it ended as it should."""

    async def any_pieces() -> Any:
        for piece in pieces:
            yield piece

    response = SimpleNamespace(content=SimpleNamespace(iter_any=any_pieces))
    found: list[bytes] = []
    try:
        async for line in api_client._lines(cast("Any", response)):
            found.append(line)
    except WatchFailed:
        return found, False
    return found, True


FIELDS = [
    "metadata", "name", "namespace", "uid", "resourceVersion", "deletionTimestamp", "annotations", "labels", "spec",
    "nodeName", "hostNetwork", "containers", "ports", "containerPort", "protocol", "initContainers",
    "restartPolicy", "status", "phase", "podIP", "startTime", "conditions", "type", "status", "containerStatuses",
    "containerID", "restartCount", "items", "continue", "object", "code", "reason", "message",
]  # fmt: skip
WORDS = (
    *(b'"%b":' % field.encode() for field in FIELDS), b'"warmroute/port":"', b'"warmroute/kv-events-port":"',
    b'"warmroute/kv-replay-port":"', b'"Running"', b'"True"', b'"ADDED"', b'"MODIFIED"', b'"DELETED"',
    b'"BOOKMARK"', b'"ERROR"', b'"10.0.0.1"', b'"fe80::1%eth0"', b'"::ffff:1.2.3.4"', b"\n", b"null", b"65536",
    b"-1", b"410", b'"\xd9\xa1"',
)  # fmt: skip

POOL_WORDS = (
    *WORDS,
    b'"selector":{"matchLabels":{"app":"vllm"}}',
    b'"targetPorts":[{"number":8000}]',
    b'"endpointPickerRef":{"name":"picker","port":{"number":9002},"failureMode":"FailOpen"}',
)

TARGETS = (
    Target(pods, WORDS, steps=(20_000, 100)),
    Target(pools, POOL_WORDS, steps=(5_000, 100)),
    Target(watch, WORDS, steps=(60_000, 400), held_bytes=(4 << 20, 400)),
)
