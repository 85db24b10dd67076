"""P2P KV transfers (pulls): blocks that the router lets one replica fetch from the CPU memory of another.

vLLM's p2p tier (docs/features/kv_offloading_usage.md, "Orchestration-Layer Protocol") looks up the missing blocks of a
request at the source that the request names. It receives the blocks in the source's CPU memory by RDMA, and computes
the rest. A replica is a source once its address is verified (`prove`); blocks that are only on its GPU cannot be
fetched. Replicas that fetch must be such peers as well.

A transfer takes floor + a x tokens, learned for each pair like a load from a tier (core/estimators/tier_load.py). The
end of a transfer is the time of the first token minus the modelled prefill of the tokens that were neither cached nor
fetched. Transfers from one source follow each other on its link, and so do transfers to one replica. The duration of a
transfer is the time from one such end to the next, or from the placement if that is later.
"""

from __future__ import annotations

from math import inf

from router.core.estimators.tier_load import LoadFit, LoadFits, LoadModel
from router.core.fleet.lease import Lease
from router.core.fleet.tier_loads import TierQueue
from router.core.types.placements import Pull
from router.core.types.tiers import PEER

PAIRS_MAX = 4_096  # limit of pairs with remembered times
ALONE = 0.9  # minimum part of a transfer that must have arrived for its time to count


class PullPeer:
    """One replica that can be source and destination of transfers."""

    __slots__ = ("address", "incoming", "outgoing", "rest_until_s")

    def __init__(self, address: str) -> None:
        self.address = address
        self.rest_until_s = -inf  # end of its cooldown as a source
        self.outgoing, self.incoming = TierQueue(), TierQueue()


class Pulls:
    """All replicas with P2P KV transfer, and the transfers in progress. Unused if there are none."""

    def __init__(self) -> None:
        self.peers: dict[str, PullPeer] = {}
        self._fits: dict[tuple[str, str], LoadFit] = {}  # (source, replica)
        self._resting: dict[str, float] = {}  # replicas that are not peers now -> end of their cooldown

    def prove(self, replica: str, address: str) -> None:
        """Record the address at which a replica's engine accepts its peers' requests; "": none is known."""
        peer = self.peers.get(replica)
        if not address:
            if peer is not None and peer.rest_until_s > -inf:
                self._resting[replica] = peer.rest_until_s  # a failed check does not end its cooldown
            self.peers.pop(replica, None)
        elif peer is None or peer.address != address:
            peer = self.peers[replica] = PullPeer(address)
            peer.rest_until_s = self._resting.pop(replica, -inf)

    def forget(self, replica: str) -> None:
        """Drop a replica that left or was replaced by another engine."""
        self.peers.pop(replica, None)
        self._resting.pop(replica, None)
        self.forget_times(replica)

    def forget_times(self, replica: str) -> None:
        """Forget the transfer times of a replica that serves another model, because they predict nothing for the new
        one."""
        for pair in [pair for pair in self._fits if replica in pair]:
            del self._fits[pair]

    def rest(self, replica: str, until_s: float) -> None:
        """Stop transfers from a replica until this time."""
        if (peer := self.peers.get(replica)) is not None:
            peer.rest_until_s = max(peer.rest_until_s, until_s)

    def sources(self, now_s: float) -> list[str]:
        """Return the replicas that may be a source now."""
        return [replica for replica, peer in self.peers.items() if peer.rest_until_s <= now_s]

    def model(self, source: str, replica: str, fits: LoadFits) -> LoadModel:
        """Return the model of transfer times between these two replicas, without waiting for their links."""
        return fits.model(PEER, self._fits.get((source, replica)) or _NOTHING)

    def pending_ms(self, source: str, replica: str, now_s: float) -> float:
        """Return the modelled time until the links between these two replicas are free."""
        return max(self.peers[source].outgoing.pending_ms(now_s), self.peers[replica].incoming.pending_ms(now_s))

    def begin(self, lease: Lease, pull: Pull, fits: LoadFits, now_s: float) -> None:
        """Add the transfer of a placed lease to the links of both replicas."""
        fetch_ms = self.model(pull.source, lease.replica, fits).ms(pull.tokens)
        for link in self._way(lease, pull):
            link.join(lease.id, fetch_ms, now_s)

    def leave(self, lease: Lease, pull: Pull, now_s: float) -> None:
        """Remove the transfer of a lease."""
        for link in self._way(lease, pull):
            link.leave(lease.id, now_s)

    def on_transfer_complete(self, lease: Lease, pull: Pull, now_s: float, *, alone: bool) -> None:
        """Record that a lease's transfer is complete, as its first token shows. Its duration is noted if it was
        `alone`."""
        way, ended_s = self._way(lease, pull), now_s - lease.prefill_ms / 1e3
        if lease.to_load is not None:
            ended_s -= lease.to_load.modelled_ms / 1e3
        if alone:
            pull.took_ms = (ended_s - max([lease.placed_s, *[link.ended_s for link in way]])) * 1e3
        for link in way:
            link.ended_s = max(link.ended_s, ended_s)
            link.leave(lease.id, now_s)

    def learn(self, lease: Lease, pull: Pull, fits: LoadFits, cached_tokens: int) -> None:
        """Learn transfer times from a lease that ended well. `cached_tokens` is the total of its prompt tokens that
        were cached."""
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

    def _way(self, lease: Lease, pull: Pull) -> list[TierQueue]:
        peers = [self.peers.get(pull.source), self.peers.get(lease.replica)]
        links = [peers[0].outgoing] if peers[0] is not None else []
        if peers[1] is not None:
            links.append(peers[1].incoming)
        return links


_NOTHING = LoadFit()
