"""Pulls: blocks that one replica brings from the CPU memory of another, where the router orders that.

vLLM's p2p tier (docs/features/kv_offloading_usage.md, "Orchestration-Layer Protocol") looks the missing blocks of a
request up at the source that the request names, has those that its CPU memory holds sent by RDMA, and computes the
rest. A replica is a source once its address was proved, by whoever proves it (`prove`); what its GPU alone holds cannot
be pulled. Replicas that take are such peers as well.

A pull takes floor + a x tokens, learned for each pair like a load from a tier (core/learned/loads.py): before a first
token, by the model of prefill, lies the prefill of what was neither held nor pulled, and before that the pull's end.
Pulls from one source follow each other on its link, and so do pulls to one replica: from one such end to the next, or
from the placement where that is later, is what a pull took.
"""

from __future__ import annotations

from math import inf

from router.core.facts.placements import Pull
from router.core.facts.tiers import PEER
from router.core.fleet.lease import Lease
from router.core.fleet.loads import TierLink
from router.core.learned.loads import LoadFit, LoadFits, LoadModel

PAIRS_MAX = 4_096  # pairs whose times are remembered
ALONE = 0.9  # part of a pull that must have come for its time to say anything


class PullPeer:
    """One replica that gives and takes."""

    __slots__ = ("address", "incoming", "outgoing", "rest_until_s")

    def __init__(self, address: str) -> None:
        self.address = address
        self.rest_until_s = -inf  # nothing is pulled from here before
        self.outgoing, self.incoming = TierLink(), TierLink()


class Pulls:
    """All replicas that give and take, and the pulls under way. Where there are none nothing here is called."""

    def __init__(self) -> None:
        self.peers: dict[str, PullPeer] = {}
        self._fits: dict[tuple[str, str], LoadFit] = {}  # (source, replica)
        self._resting: dict[str, float] = {}  # replicas that are no peers now, and rest until then

    def prove(self, replica: str, address: str) -> None:
        """The engine of a replica takes orders of its peers at this address; "": nowhere, as far as known."""
        peer = self.peers.get(replica)
        if not address:
            if peer is not None and peer.rest_until_s > -inf:
                self._resting[replica] = peer.rest_until_s  # a look that fails is no end of its rest
            self.peers.pop(replica, None)
        elif peer is None or peer.address != address:
            peer = self.peers[replica] = PullPeer(address)
            peer.rest_until_s = self._resting.pop(replica, -inf)

    def forget(self, replica: str) -> None:
        """A replica left, or another engine is there."""
        self.peers.pop(replica, None)
        self._resting.pop(replica, None)
        self.forget_times(replica)

    def forget_times(self, replica: str) -> None:
        """A replica serves another model: what pulls to and from it took says nothing of those to come."""
        for pair in [pair for pair in self._fits if replica in pair]:
            del self._fits[pair]

    def rest(self, replica: str, until_s: float) -> None:
        """Have nothing pulled from a replica until then."""
        if (peer := self.peers.get(replica)) is not None:
            peer.rest_until_s = max(peer.rest_until_s, until_s)

    def sources(self, now_s: float) -> list[str]:
        """Replicas that may be pulled from now."""
        return [replica for replica, peer in self.peers.items() if peer.rest_until_s <= now_s]

    def model(self, source: str, replica: str, fits: LoadFits) -> LoadModel:
        """What a pull between these two takes once the way is free."""
        return fits.model(PEER, self._fits.get((source, replica)) or _NOTHING)

    def pending_ms(self, source: str, replica: str, now_s: float) -> float:
        """Modelled time until the way between these two is free."""
        return max(self.peers[source].outgoing.pending_ms(now_s), self.peers[replica].incoming.pending_ms(now_s))

    def begin(self, lease: Lease, pull: Pull, fits: LoadFits, now_s: float) -> None:
        """A lease was placed that pulls."""
        fetch_ms = self.model(pull.source, lease.replica, fits).ms(pull.tokens)
        for link in self._way(lease, pull):
            link.join(lease.id, fetch_ms, now_s)

    def leave(self, lease: Lease, pull: Pull, now_s: float) -> None:
        """A lease pulls no more."""
        for link in self._way(lease, pull):
            link.leave(lease.id, now_s)

    def arrived(self, lease: Lease, pull: Pull, now_s: float, *, alone: bool) -> None:
        """The first token of a lease was seen, so its pull is over: note how long that took, if it was `alone`."""
        way, ended_s = self._way(lease, pull), now_s - lease.prefill_ms / 1e3
        if lease.to_load is not None:
            ended_s -= lease.to_load.modelled_ms / 1e3
        if alone:
            pull.took_ms = (ended_s - max([lease.placed_s, *[link.ended_s for link in way]])) * 1e3
        for link in way:
            link.ended_s = max(link.ended_s, ended_s)
            link.leave(lease.id, now_s)

    def learn(self, lease: Lease, pull: Pull, fits: LoadFits, cached_tokens: int) -> None:
        """Learn from a lease that ended well and had, in all, so many tokens of its prompt cached."""
        came = cached_tokens - (lease.cached_tokens - pull.tokens)
        if pull.took_ms is None or came < ALONE * pull.tokens:
            return
        pair = pull.source, lease.replica
        fit = self._fits.get(pair)
        if fit is None:
            if len(self._fits) >= PAIRS_MAX:
                del self._fits[next(iter(self._fits))]
            fit = self._fits[pair] = LoadFit()
        fits.observe(PEER, fit, pull.tokens, pull.took_ms)

    def _way(self, lease: Lease, pull: Pull) -> list[TierLink]:
        peers = [self.peers.get(pull.source), self.peers.get(lease.replica)]
        links = [peers[0].outgoing] if peers[0] is not None else []
        if peers[1] is not None:
            links.append(peers[1].incoming)
        return links


_NOTHING = LoadFit()
