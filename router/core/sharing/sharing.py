"""What this router says to others, and what it makes of what they say.

Synchronous and pure as the Router that it serves: time comes in, bytes go out and come in, and whoever carries them
does so in the background. `say` is called a few times a second, 50 ms after the last message where `changed` was called
since, and at best at once after `urgent`. `hear` is called with every message of the channel, this router's own
included.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from router.core.placement.router import Router
from router.core.sharing import messages
from router.core.sharing.engines import Caches
from router.core.sharing.hearing import Hearer
from router.core.sharing.limits import SharingLimits
from router.core.sharing.telling import Teller


class PeerView(Struct):
    """Another router, as last heard of."""

    name: str
    boot: int
    age_s: float  # time since its last message
    delay_s: float  # time that its messages take at best
    replicas: int  # replicas at which it has anything open
    open: int  # open leases
    waiting_ms: int  # modelled prefill that waits, of all replicas


class Sharing:
    """One router among several. `changed()` is called when there is something to say, once before each message;
    `urgent()` when something was placed that the others had better know before the next regular message. Both must
    return at once, and may be called at any time."""

    def __init__(
        self,
        router: Router,
        name: str,
        boot: int,
        limits: SharingLimits = SharingLimits(),  # noqa: B008 - frozen
        urgent: Callable[[], None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`name` tells this router apart from all others, whatever process it is (1 to 255 bytes of UTF-8), and `boot`
        this process from those before it: it is higher, and less than 2^64. Raises ValueError."""
        self._limits = limits
        caches = Caches(router)
        self._said = Teller(router, caches, messages.head(name, boot), limits, urgent, changed)
        self._heard = Hearer(
            router, caches, name, boot, limits, self._said.greet, self._said.asked, self._said.recounted
        )

    def say(self, now_s: float) -> bytes | None:
        """One message for all others; None where there is nothing to say yet."""
        return self._said.say(now_s, self._heard.lags, self._heard.missed)

    def hear(self, message: bytes, now_s: float) -> None:
        """Take a message from the channel. What is old, repeated, our own, or of another release is ignored. Raises
        BadMessage for what cannot be read, and nothing else."""
        self._heard.hear(message, now_s)

    def tick(self, now_s: float) -> None:
        """Forget routers that have been silent for too long; to be called some times a second."""
        self._heard.tick(now_s)

    def peers(self, now_s: float) -> list[PeerView]:
        """The routers that are listened to, by name."""
        views = []
        for name, peer in sorted(self._heard.peers.items()):
            busy = [each.row.sums for each in peer.rows.values() if each.row.sums.open]
            open_, waiting_ms = sum(sums.open for sums in busy), sum(sums.waiting_ms for sums in busy)
            age_s, delay_s = now_s - peer.heard_s, peer.delay.delay_s
            views.append(PeerView(name, peer.boot, age_s, delay_s, len(busy), open_, waiting_ms))
        return views

    def mirrored(self) -> list[tuple[int, int]]:
        """(open leases that are known one by one, keys of their prompts) of each other router."""
        return [(len(peer.leases), peer.leases.keys) for peer in self._heard.peers.values()]

    def alone(self, now_s: float) -> None:
        """Forget all others at once: the channel is gone. Each is back with its next message."""
        self._heard.alone(now_s)

    @property
    def left_out(self) -> dict[str, int]:
        """What was left out of messages so far because of limits: `placements`, `ends`."""
        return self._said.news.left_out

    @property
    def ignored(self) -> dict[str, int]:
        """Messages that were not for us so far, by why: `version`, `namesake` (another process has our name), `old`
        (a later one was heard), `many` (more routers than may be)."""
        return self._heard.ignored
