"""What the API server of Kubernetes says: pods, events of a watch, pages of a list."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

from router.core.facts.replicas import Replica
from router.engines.discovery import kubernetes
from router.engines.discovery.pod_watch import Gone, PodFollower, WatchFailed
from router.engines.discovery.pods import PodSeen, Rule, read, replicas_of
from tests.attack.cuts import cut
from tests.attack.target import Target

RULES = (Rule(), Rule(port="8000"), Rule(port="engine"), Rule("https", known_only=True))


def pods(data: bytes) -> None:
    """One pod, by each rule: a replica that can be asked, or why it is none."""
    for rule in RULES:
        seen = read(data, rule)
        if seen is not None:
            _sane(seen)


def _sane(seen: PodSeen) -> None:
    replica = seen.claim.replica if seen.claim is not None else None
    if replica is None or seen.claim is None:
        return
    for url in filter(None, (replica.id, replica.events, replica.replay)):
        parts = urlsplit(url)
        assert parts.hostname
        ipaddress.ip_address(parts.hostname)
        assert 0 < (parts.port or 0) < 65_536
        assert not parts.path
        assert not parts.query
    assert replicas_of([seen.claim], {}, 1)[0] <= {replica}


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
    follower = PodFollower(
        cast("Any", _Listing(data)), "default", Rule(), resync_s=60.0, changed=lambda: None, random=random.Random(1)
    )
    for line in lines[0]:
        with suppress(Gone, WatchFailed):
            follower._hear(line)
    with suppress(Gone, WatchFailed):
        follower._take(await follower._list())
    claims = follower.view.claims()
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
        async for line in kubernetes._lines(cast("Any", response)):
            found.append(line)
    except WatchFailed:
        return found, False
    return found, True


FIELDS = [
    "metadata",
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "deletionTimestamp",
    "annotations",
    "labels",
    "spec",
    "nodeName",
    "hostNetwork",
    "containers",
    "ports",
    "containerPort",
    "protocol",
    "initContainers",
    "restartPolicy",
    "status",
    "phase",
    "podIP",
    "startTime",
    "conditions",
    "type",
    "status",
    "containerStatuses",
    "containerID",
    "restartCount",
    "items",
    "continue",
    "object",
    "code",
    "reason",
    "message",
]
WORDS = (
    *(b'"%b":' % field.encode() for field in FIELDS),
    b'"warmroute/port":"',
    b'"warmroute/kv-events-port":"',
    b'"warmroute/kv-replay-port":"',
    b'"Running"',
    b'"True"',
    b'"ADDED"',
    b'"MODIFIED"',
    b'"DELETED"',
    b'"BOOKMARK"',
    b'"ERROR"',
    b'"10.0.0.1"',
    b'"fe80::1%eth0"',
    b'"::ffff:1.2.3.4"',
    b"\n",
    b"null",
    b"65536",
    b"-1",
    b"410",
    b'"\xd9\xa1"',
)

TARGETS = (
    Target(pods, WORDS, steps=(20_000, 100)),
    Target(watch, WORDS, steps=(60_000, 400), held_bytes=(4 << 20, 400)),
)
