"""Condition `routers_unshared`: routers send to the same replicas without sharing their state.

Theory: each of such routers knows only the prompts that it placed itself. It sends a prompt that another router has
placed to any replica, and the prompt is computed again; it also sees no queued prefill of the others. The condition has
two sources. The settings may name more routers than one (`peering.expected_routers`) without a store, which holds from
the start. Or engines count more prompt tokens than this router has sent (`Router.known_share`) for a minute, and no
peer reports its work. The other senders are then routers without a common store, or clients of the engines.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

from router.config.schema import PeeringSettings
from router.core.fleet.engine_counters import SHARE_ALL
from router.peering.validation import is_shared

log = logging.getLogger(__name__)

UNSHARED_S = 60.0  # time for which other senders must be seen: a rollout of routers, or one heavy client, is shorter
_ADVICE = "set peering.redis_url for all routers, run one router, or let all clients send to routers"


class UnsharedRouters:
    """The condition of one router, and its peers. `check` is called about once a second."""

    def __init__(
        self,
        peering: PeeringSettings,
        *,
        share: Callable[[], float],
        peers: Callable[[], list[str]],
    ) -> None:
        """`share` returns the known part of the replicas' prompt tokens, `peers` the names of the other routers that
        report their work."""
        self.name = router_name(peering, 0)
        self._share, self._peers = share, peers
        self._alone = ""
        if peering.expected_routers > 1 and not is_shared(peering):
            self._alone = (
                f"{peering.expected_routers} routers are expected (peering.expected_routers) without a common store"
            )
        self._since_s: float | None = None  # since then other senders were seen without a break
        self.why = ""  # empty: the condition does not hold

    def check(self, now_s: float) -> None:
        """Update the condition, and log it if it begins or ends."""
        why = self._alone or self._by_share(now_s)
        if bool(why) != bool(self.why):
            if why:
                fields = {"why": why, "next": _ADVICE}
                text = "routers share no state: prompts that others placed are computed again"
                log.warning(text, extra={"event": "routers_unshared", "fields": fields})
            else:
                log.info("no other sender is unknown any more", extra={"event": "routers_unshared"})
        self.why = why

    def _by_share(self, now_s: float) -> str:
        share = self._share()
        if share >= SHARE_ALL or self._peers():
            self._since_s = None
            return ""
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < UNSHARED_S:
            return ""
        return f"other senders account for {1 - share:.0%} of the replicas' prompt tokens, and no router reports them"

    def explain(self) -> str:
        """Return the reason for which the condition holds; "" if it does not hold."""
        return self.why

    def status(self) -> dict[str, Any]:
        """Return this router's name, its peers and the condition, for the pages."""
        return {"name": self.name, "peers": self._peers(), "unshared": self.why}


def router_name(peering: PeeringSettings, admin_port: int) -> str:
    """Return the name of this router, unique in its fleet."""
    return peering.router_id or f"{socket.gethostname()}:{admin_port}"
