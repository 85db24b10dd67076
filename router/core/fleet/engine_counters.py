"""Conclusions from the engine's own counters: our share of its prompts, and requests of senders unknown to us.

The counters are those of the engine's metrics page (engine_metrics.py). Every probe compares them with the counts of
this router and of the routers that report their work.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from router.core.fleet.lease import Lease
from router.core.fleet.restart_detection import PageSource
from router.core.types.replicas import Load

FOREIGN_PROBES = 3  # number of probes over which waiting requests of other senders are averaged
SHARE_FADE = 0.98  # factor on the counts behind our share of a replica's prompts, for each probe with progress
# Above 90 % we count as the only sender: the difference is requests that only one of engine and router has counted so
# far.
SHARE_ALL = 0.9
SHARE_TOKENS_MIN = 50_000  # prompt tokens that the engine must count before the share is used
PROMPT_TOKENS_MAX = 1 << 24  # limit on the reported length of one prompt
UNCOUNTED_MAX = 256  # allowance for open leases that an engine counts with a delay


@dataclass(slots=True)
class EngineCounters:
    """Counters of one replica's engine, and the router's counts with which they are compared."""

    page_source: PageSource = field(default_factory=PageSource)
    are_moving: bool = False  # the engine's counters move while it works
    sent_prompt_tokens: float = 0.0  # prompt tokens that we sent, with decay
    peer_prompt_tokens: float = 0.0  # prompt tokens that other routers report as sent, with the same decay
    engine_prompt_tokens: float = 0.0  # prompt tokens that the engine counted, with the same decay
    decay_count: int = 0  # number of decays of these counts
    untracked_waiting: float = 0.0  # mean number of waiting requests of other senders, over the last probes
    # Upper limit of other routers' open leases here, from the engine's own request counts. A writer of the shared store
    # could publish any number. None: the engine does not report its counts.
    others_max: int | None = None
    in_flight_probed: int = 0  # open leases at the last probe
    coming_probed: int = 0  # decode-stage leases that waited in the engine for their blocks at the last probe
    _foreign: deque[int] = field(default_factory=lambda: deque([0], maxlen=FOREIGN_PROBES))

    @property
    def share(self) -> float:
        """Part of the replica's prompt tokens that this router sends. Other senders fill its cache too."""
        return self._part(self.sent_prompt_tokens)

    @property
    def known_share(self) -> float:
        """Part of the replica's prompt tokens sent by this router, and by other routers that report their work."""
        return self._part(self.sent_prompt_tokens + self.peer_prompt_tokens)

    def _part(self, prompt_tokens: float) -> float:
        if self.engine_prompt_tokens < SHARE_TOKENS_MIN:
            return 1.0
        share = prompt_tokens / self.engine_prompt_tokens
        return share if share < SHARE_ALL else 1.0

    def limit_others(self, load: Load) -> None:
        """Take the limit of other routers' open leases from a probe."""
        if load.running is None or load.waiting is None:
            self.others_max = None
        else:
            waiting = load.waiting + (load.deferred or 0)
            self.others_max = max(0, load.running) + max(0, waiting) + UNCOUNTED_MAX

    def count_untracked(self, load: Load, known: int) -> None:
        """Count waiting requests of other senders. `known` is the maximum of requests since the last probe that the
        engine may count as waiting, of this router and of routers that report their work.

        Our own count may be ahead of the engine's, so only an excess over this maximum belongs to other senders. The
        mean of several probes is used, because other senders are not observed between two probes.
        """
        self._foreign.append(max(0, (load.waiting or 0) - known))
        self.untracked_waiting = sum(self._foreign) / len(self._foreign)

    def count_prompts(self, before: Load, load: Load) -> None:
        """Add the prompt tokens that the engine counted between two probes. Earlier counts decay."""
        old, new = before.prompt_tokens_total, load.prompt_tokens_total
        if old is not None and new is not None and new > old:
            self.decay_count += 1
            self.sent_prompt_tokens *= SHARE_FADE
            self.peer_prompt_tokens *= SHARE_FADE
            self.engine_prompt_tokens = self.engine_prompt_tokens * SHARE_FADE + new - old

    def correct_prompt_tokens(self, lease: Lease, prompt_tokens: int) -> None:
        """Correct the length of an answered prompt from the estimate at placement to the engine's count."""
        more = min(prompt_tokens, PROMPT_TOKENS_MAX) - lease.prompt_tokens
        if more:
            sent = self.sent_prompt_tokens + more * SHARE_FADE ** (self.decay_count - lease.measurements.decay_count)
            self.sent_prompt_tokens = max(0.0, sent)

    def forget(self) -> None:
        """Discard the engine's counters, which turned out to be those of several processes. They show neither our share
        nor a sign of life."""
        self.are_moving = False
        self.engine_prompt_tokens = 0.0


def has_progress(before: Load, after: Load) -> bool:
    """True if a counter of the engine moved between two probes."""
    return (
        _rose(before.prompt_tokens_total, after.prompt_tokens_total)
        or _rose(before.generation_tokens_total, after.generation_tokens_total)
        or _rose(before.computed_tokens_total, after.computed_tokens_total)
    )


def _rose(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after > before
