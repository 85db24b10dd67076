"""Interface of this package: produces this router's messages, and applies those of others.

It is synchronous and free of I/O, like the Router that it serves. Time is a parameter, and the transport of bytes runs
in the background. `say` is called several times a second: 50 ms after the last message if `changed` was called since,
and preferably at once after `urgent`. `hear` is called with every message of another router, in the order in which that
router sent them. If some are missing, `restore` is called with its complete state, and then `hear` with the messages
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from router.core.peer_sync.applier import StateApplier
from router.core.peer_sync.cache_epochs import CacheEpochs
from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.row_publisher import StatePublisher
from router.core.placement.router import Router


class PeerView(Struct):
    """State of another router, from its messages."""

    name: str
    known: bool  # its complete state was received
    replicas: int  # replicas at which it has open work
    open: int  # open leases
    waiting_ms: int  # modelled prefill that waits, over all replicas


class PeerSyncCore:
    """One router among several.

    - `changed()` is called once before each message, when there is state to send.
    - `urgent()` is called after a placement that other routers should receive before the next regular message.

    Both must return at once, and may be called at any time.
    """

    def __init__(
        self,
        router: Router,
        name: str,
        limits: SharingLimits = SharingLimits(),  # noqa: B008 - frozen
        urgent: Callable[[], None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to observe `router`. `name` distinguishes this router from all others, and stays the same across
        processes."""
        caches = CacheEpochs(router)
        self._said = StatePublisher(router, caches, limits, urgent, changed)
        self._heard = StateApplier(router, caches, name, limits, self._said.on_recount)

    def say(self, now_s: float) -> bytes | None:
        """Return one message for all other routers; None if there is no change to send yet."""
        return self._said.say(now_s)

    def state(self, now_s: float) -> bytes:
        """Return the complete state of this router, which includes all messages so far except their events."""
        return self._said.state(now_s)

    def begin(self, name: str) -> None:
        """Add a router of which the first message arrives, so that none is missing."""
        self._heard.begin(name)

    def hear(self, name: str, message: bytes, clock_s: float, now_s: float) -> None:
        """Apply a message of another router. `clock_s` is the time of our clock at which that router's clock was 0.
        Raises BadMessage for unreadable ones, and no other exception."""
        self._heard.hear(name, message, clock_s, now_s)

    def restore(self, name: str, state: bytes, clock_s: float, now_s: float) -> Iterator[None]:
        """Apply the complete state of a router in place of its messages so far. Yields after each step of at most a
        millisecond. Raises BadMessage."""
        return self._heard.restore(name, state, clock_s, now_s)

    def forget(self, name: str, now_s: float) -> None:
        """Drop a router that is silent or has left, with its open leases; computed prompts stay cached."""
        self._heard.forget(name, now_s)

    def tick(self, now_s: float) -> None:
        """Continue with work in steps; must be called several times a second."""
        self._heard.tick(now_s)

    def peers(self) -> list[PeerView]:
        """Return the received routers, by name."""
        views = []
        for name, peer in sorted(self._heard.peers.items()):
            busy = [each.row.sums for each in peer.rows.values() if each.row.sums.open]
            open_, waiting_ms = sum(sums.open for sums in busy), sum(sums.waiting_ms for sums in busy)
            views.append(PeerView(name, peer.known, len(busy), open_, waiting_ms))
        return views

    def count_remote_leases(self) -> list[tuple[int, int]]:
        """Return (open leases that are known individually, keys of their prompts) of each other router."""
        return [(len(peer.leases), peer.leases.keys) for peer in self._heard.peers.values()]

    def on_disconnected(self, now_s: float) -> None:
        """Drop all other routers at once, because the channel is gone. They keep working, like this router."""
        self._heard.on_disconnected(now_s)

    @property
    def left_out(self) -> dict[str, int]:
        """Number of events omitted from messages so far because of limits: `placements`, `first_tokens`, `ends`."""
        return self._said.news.left_out

    @property
    def long(self) -> int:
        """Number of messages with placements or ends beyond the limit so far, which were ignored."""
        return self._heard.long
