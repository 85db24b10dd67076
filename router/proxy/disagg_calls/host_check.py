"""Checks prefill answers for hosts that are not the prefill replica's own, and logs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from router.core.disagg.prefill_hosts import OwnHosts, check_transfer_params, hosts_of
from router.core.types.disagg_types import PrefillStage

log = logging.getLogger(__name__)

SAY_S = 60.0  # minimum interval between two log lines


class ForeignHosts:
    """Set of the hosts that `disagg.hosts` lists, and a rate-limited log of other hosts."""

    def __init__(self, clock: Callable[[], float], listed: Iterable[str]) -> None:
        self._clock = clock
        self._listed = OwnHosts(listed)
        self._said_s = -SAY_S
        self._unsaid = 0

    def check_transfer_params(self, leg: PrefillStage, params: bytes, peer: str) -> bytes:
        """Return the transfer parameters for the decode stage from a prefill answer that came from the address `peer`.
        Raises ForeignHost."""
        return check_transfer_params(params, hosts_of(leg.replica, leg.address, peer), self._listed)

    def report_foreign_host(self, replica: str, why: str) -> None:
        """Count one foreign host. Log the count since the last line, at most once a minute."""
        self._unsaid += 1
        now_s = self._clock()
        if now_s - self._said_s < SAY_S:
            return
        fields = {"replica": replica, "why": why, "count": self._unsaid, "next": "add the host to disagg.hosts"}
        self._said_s, self._unsaid = now_s, 0
        text = "a prefill replica returned a foreign host: no decode replica was sent there"
        log.warning(text, extra={"event": "foreign_host", "fields": fields})
