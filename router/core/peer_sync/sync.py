"""Interface of this package: produces this router's messages, and applies those of others.

It is synchronous and free of I/O, like the Router that it serves. Time is a parameter, and the transport of bytes runs
in the background. `say` is called several times a second: 50 ms after the last message if `changed` was called since,
and preferably at once after `urgent`. `hear` is called with every message of the channel, including this router's own.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from router.core.peer_sync import messages
from router.core.peer_sync.applier import StateApplier
from router.core.peer_sync.cache_epochs import CacheEpochs
from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.row_publisher import StatePublisher
from router.core.placement.router import Router


class PeerView(Struct):
    """State of another router, from its messages."""

    name: str
    boot: int
    age_s: float  # time since its last message
    delay_s: float  # minimum delay of its messages
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
        boot: int,
        limits: SharingLimits = SharingLimits(),  # noqa: B008 - frozen
        urgent: Callable[[], None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to observe `router`. Raises ValueError for an invalid name.

        - `name`: distinguishes this router from all others, and stays the same across processes (1 to 255 bytes of
          UTF-8).
        - `boot`: distinguishes this process from earlier ones; it is higher, and less than 2^64.
        """
        self._limits = limits
        caches = CacheEpochs(router)
        self._said = StatePublisher(router, caches, messages.head(name, boot), limits, urgent, changed)
        self._heard = StateApplier(
            router,
            caches,
            name,
            boot,
            limits,
            self._said.request_full_sync,
            self._said.queue_retransmit,
            self._said.on_recount,
        )

    def say(self, now_s: float) -> bytes | None:
        """Return one message for all other routers; None if there is no state to send yet."""
        return self._said.say(now_s, self._heard.clock_offsets, self._heard.take_gaps)

    def hear(self, message: bytes, now_s: float) -> None:
        """Apply a message from the channel. Messages that are old, repeated, our own, or of another release are
        ignored. Raises BadMessage for unreadable ones, and no other exception."""
        self._heard.hear(message, now_s)

    def tick(self, now_s: float) -> None:
        """Drop routers that have been silent for too long; must be called several times a second."""
        self._heard.tick(now_s)

    def peers(self, now_s: float) -> list[PeerView]:
        """Return the received routers, by name."""
        views = []
        for name, peer in sorted(self._heard.peers.items()):
            busy = [each.row.sums for each in peer.rows.values() if each.row.sums.open]
            open_, waiting_ms = sum(sums.open for sums in busy), sum(sums.waiting_ms for sums in busy)
            age_s, delay_s = now_s - peer.heard_s, peer.delay.delay_s
            views.append(PeerView(name, peer.boot, age_s, delay_s, len(busy), open_, waiting_ms))
        return views

    def count_remote_leases(self) -> list[tuple[int, int]]:
        """Return (open leases that are known individually, keys of their prompts) of each other router."""
        return [(len(peer.leases), peer.leases.keys) for peer in self._heard.peers.values()]

    def on_disconnected(self, now_s: float) -> None:
        """Drop all other routers at once, because the channel is gone. Each returns with its next message."""
        self._heard.on_disconnected(now_s)

    @property
    def left_out(self) -> dict[str, int]:
        """Number of events omitted from messages so far because of limits: `placements`, `first_tokens`, `ends`."""
        return self._said.news.left_out

    @property
    def ignored(self) -> dict[str, int]:
        """Number of ignored messages so far, by reason.

        - `version`: a message of another version.
        - `namesake`: another process has our name.
        - `old`: a later message was received.
        - `many`: too many routers.
        - `long`: placements or ends beyond the limit.
        """
        return self._heard.ignored
