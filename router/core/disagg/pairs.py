"""Disaggregated prefill: replicas that may take the prefill and decode stages of a request, and open prefill stages.

Two replicas form a pair if they have the same KV connector, serve the same models with blocks of the same size, belong
to one revision of a rollout, and are not ranks of one server. KV connectors are detected by another component, which
records them with `prove`. The first transfer between two engines takes seconds and may fail, so a new pair gets no
traffic before a warm-up transfer has succeeded (`to_warm`, `warmed`). A pair that failed gets a cooldown, twice as long
each time.

A transfer takes floor + a x tokens, learned for each pair like a load from a tier (core/estimators/tier_load.py). Its
time is measured from the end of the prefill to the first token of the decoding replica, if no other work delayed it
there. Its tokens are those that the decoding replica had not cached.

Slow transfers keep requests away, and without requests a later improvement is not observed. So the times of a pair
without a transfer for TIMES_S are forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest
from math import inf

from router.core.estimators.tier_load import OUTLIER, LoadFit, LoadFits, LoadModel
from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.types.disagg_types import KvConnector, PairState, PairStatus, Role
from router.core.types.replicas import Replica
from router.core.types.tiers import LEG

_Kind = tuple[KvConnector, str, int, int]
"""(KV connector, revision, id of the served models' speeds, block size in tokens). Replicas of one kind form pairs."""

PAIRS_MAX = 4_096  # limit of pairs, and of pairs with remembered times
PAIR_REST_S, PAIR_REST_MAX_S = 5.0, 300.0  # cooldown of a failed pair: the first, and the longest
TIMES_S = 120.0  # lifetime of measured transfer times without a new one
_STATES = (PairState.COOLDOWN, PairState.NEW, PairState.WARM)  # in the order of pairs on status pages
WARMING_MAX_S = 60.0  # a warm-up without a result for this time has failed


class _ConnectorEndpoint:
    """KV connector of one replica, and the address at which its blocks are requested."""

    __slots__ = ("address", "connector")

    def __init__(self, connector: KvConnector, address: str) -> None:
        self.connector, self.address = connector, address


class _Pair:
    """State of the connection between two replicas."""

    __slots__ = ("broken", "prefills_failed", "rest_s", "rest_until_s", "sent", "warm", "warming_since_s")

    def __init__(self) -> None:
        self.warm = False
        self.warming_since_s = -inf  # time at which its warm-up began; -inf: no warm-up runs
        self.rest_s, self.rest_until_s = 0.0, -inf
        self.sent = self.prefills_failed = self.broken = 0  # numbers of requests (facts.legs.PairSeen)

    def rank(self, now_s: float) -> int:
        """Return the position of its state in _STATES."""
        return 2 if self.warm else 0 if self.rest_until_s > now_s else 1


class DisaggPairs:
    """Replicas that form pairs, and the open prefill stages. Unused if no KV connector was detected."""

    def __init__(self, stage_only: set[str]) -> None:
        """`stage_only` receives the ids of replicas that take no whole requests (`Fleet.stage_only`)."""
        self._stage_only = stage_only
        self.hands: dict[str, _ConnectorEndpoint] = {}
        self._silent: dict[
            str, _ConnectorEndpoint
        ] = {}  # replicas with a known KV connector that is not detected at present
        self.open: dict[int, Lease] = {}  # id of a decode stage's lease -> lease of its prefill stage
        # Id of a prefill stage's lease -> replica of its decode stage, if both begin at once: the prefilling engine
        # waits until the decoding engine takes the blocks.
        self.decoders: dict[int, str] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}  # (prefill, decode)
        # Inputs of the last computation of the pairs: (id, KV connector, replica as discovered, id of the served
        # models' speeds, block size in tokens).
        self._made_of: list[tuple[str, KvConnector, Replica, int, int]] = []
        self._partners: dict[str, list[str]] = {}  # decode -> prefill replicas of all its pairs
        self._fits: dict[tuple[str, str], LoadFit] = {}  # (prefill, decode) -> transfer times
        # (prefill, decode) -> time of the last measured transfer, the oldest first.
        self._heard_s: dict[tuple[str, str], float] = {}
        # id() of the fits of all replicas with the same models -> (these fits, time of the last transfer in them).
        self._common: dict[int, tuple[LoadFits, float]] = {}

    # -- state of replicas ---------------------------------------------------------------------------------------

    def set_connector(self, replica: str, connector: KvConnector | None, address: str) -> None:
        """Record a replica's KV connector, and the address at which its blocks are requested.

        None: no connector is detected. The pairs of the replica then take no traffic, and return to their former state
        once the same connector is detected again.
        """
        hand = self.hands.get(replica)
        if connector is None:
            if hand is not None:
                self._silent[replica] = self.hands.pop(replica)
            return
        hand = hand or self._silent.pop(replica, None)
        if hand is None or hand.connector is not connector or hand.address != address:
            self._forget_pairs(replica)
            hand = _ConnectorEndpoint(connector, address)
        self.hands[replica] = hand
        (self._stage_only.add if connector.traits.single_stage_engines else self._stage_only.discard)(replica)

    def forget(self, replica: str) -> None:
        """Drop a replica that left or was replaced by another engine."""
        self.hands.pop(replica, None)
        self._silent.pop(replica, None)
        self._stage_only.discard(replica)
        self._forget_pairs(replica)
        self.forget_times(replica)

    def on_engine_restarted(self, replica: str) -> None:
        """Forget pairs and times of a replica whose engine is a new process without connections to its peers. Its pairs
        must be warmed again. The times of the old process, perhaps in trouble, predict nothing for the new one."""
        self._forget_pairs(replica)
        self.forget_times(replica)

    def forget_times(self, replica: str) -> None:
        """Forget the transfer times of a replica that serves another model or restarted, because they predict nothing.
        The prior that all pairs share is forgotten with the last pair that has times of its own."""
        for pair in [pair for pair in self._fits if replica in pair]:
            del self._fits[pair], self._heard_s[pair]
        if not self._fits:
            for fits, _ in self._common.values():
                fits.forget(LEG)
            self._common.clear()

    def _forget_pairs(self, replica: str) -> None:
        for pair in [pair for pair in self._pairs if replica in pair]:
            del self._pairs[pair]
            self._made_of = []

    # -- pairs ---------------------------------------------------------------------------------------------------

    def may_prefill(self, member: ReplicaState) -> bool:
        """True if a replica takes prefill stages."""
        return member.id in self.hands and member.replica.role is not Role.DECODE

    def may_decode(self, member: ReplicaState) -> bool:
        """True if a replica takes decode stages."""
        return member.id in self.hands and not member.replica.only_prefills

    def serves_whole(self, member: ReplicaState) -> bool:
        """True if a replica takes requests with both stages."""
        return member.id not in self._stage_only

    def are_compatible(self, prefill: ReplicaState, decode: ReplicaState) -> bool:
        """True if the second replica can decode a prompt that the first one prefills."""
        first, second = self.hands.get(prefill.id), self.hands.get(decode.id)
        if first is None or second is None or first.connector is not second.connector:
            return False
        if prefill.replica.revision != decode.replica.revision or prefill.speeds is not decode.speeds:
            return False
        if (prefill.load.block_tokens or 0) != (decode.load.block_tokens or 0):
            return False
        return prefill.replica.url != decode.replica.url  # excludes itself, and the ranks of its server

    def is_warm(self, prefill: ReplicaState, decode: ReplicaState) -> bool:
        """True if the pair takes traffic."""
        pair = self._pairs.get((prefill.id, decode.id))
        return pair is not None and pair.warm and self.are_compatible(prefill, decode)

    def to_warm(self, members: Mapping[str, ReplicaState], now_s: float) -> list[tuple[str, str]]:
        """Return the pairs (prefill, decode) to warm now, with each replica in at most one of them. `warmed` must be
        called for each pair."""
        made_of = [
            (m.id, hand.connector, m.replica, id(m.speeds), m.load.block_tokens or 0)
            for id_, hand in self.hands.items()
            if (m := members.get(id_)) is not None
        ]
        if made_of != self._made_of:
            self._made_of, self._pairs = made_of, self._build_pairs(members)
            self._partners = {}
            for first, second in self._pairs:
                self._partners.setdefault(second, []).append(first)
        self._forget_old(now_s)
        pairs = self._pairs
        busy = set[str]()
        for (first, second), pair in pairs.items():
            if now_s - pair.warming_since_s >= WARMING_MAX_S and pair.warming_since_s > -inf:
                self._start_cooldown(pair, now_s)
            if pair.warming_since_s > -inf:
                busy.update((first, second))
        found = list[tuple[str, str]]()
        for (first, second), pair in pairs.items():
            if pair.warm or pair.rest_until_s > now_s or first in busy or second in busy:
                continue
            if first in self._silent or second in self._silent:
                continue
            if members[first].ready and members[second].ready:
                pair.warming_since_s = now_s
                busy.update((first, second))
                found.append((first, second))
        return found

    def note_warm_up(self, prefill: str, decode: str, now_s: float, *, ok: bool) -> None:
        """Record the result of a pair's warm-up."""
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            return
        # `rest_s` stays until blocks of a request have arrived: a warm-up transfer is small, and may succeed although a
        # request's fails
        if ok:
            pair.warm, pair.warming_since_s = True, -inf
        else:
            self._start_cooldown(pair, now_s)

    def cooldown_pair(self, members: Mapping[str, ReplicaState], prefill: str, decode: str, now_s: float) -> None:
        """Record that the blocks of a request did not arrive over a warm pair. The pair gets a cooldown, and is warmed
        again. If the decoding replica does not take whole requests, the last pair of a model stays warm."""
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            return
        pair.broken += 1
        if not pair.warm:
            return  # the pair is in cooldown or being warmed already: many requests report one failed transfer
        there = members.get(decode)
        if there is None or self.serves_whole(there) or self._has_another(members, prefill, there):
            self._start_cooldown(pair, now_s)

    def count_request(self, prefill: str, decode: str) -> None:
        """Count a request that was placed on a pair."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None:
            pair.sent += 1

    def prefill_failed(self, prefill: str, decode: str) -> None:
        """Count a request with a failed prefill stage."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None:
            pair.prefills_failed += 1

    def note_transfer(self, prefill: str, decode: str) -> None:
        """Record that the blocks of a request arrived over a pair."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None:
            pair.rest_s = 0.0

    def connector_of(self, replica: str) -> tuple[_ConnectorEndpoint, bool] | None:
        """Return a replica's KV connector, and True if it is detected at present; None if it never was."""
        if (hand := self.hands.get(replica)) is not None:
            return hand, True
        silent = self._silent.get(replica)
        return None if silent is None else (silent, False)

    def pair_counts(self, now_s: float) -> dict[str, dict[str, int]]:
        """Count the pairs of each replica by state: `warm` takes traffic, `new` must be warmed, `resting` is in
        cooldown after a failure. This is a single pass, as there may be thousands of pairs."""
        counts: dict[str, list[int]] = {}
        for (first, second), pair in self._pairs.items():
            rank = pair.rank(now_s)
            one, other = counts.get(first), counts.get(second)
            if one is None:
                one = counts[first] = [0, 0, 0]
            if other is None:
                other = counts[second] = [0, 0, 0]
            one[rank] += 1
            other[rank] += 1
        states = [state.value for state in _STATES]
        return {replica: dict(zip(states, each, strict=True)) for replica, each in counts.items()}

    def list_pairs(self, pairs_max: int, now_s: float) -> tuple[list[PairStatus], int]:
        """Return pairs, and their total number. Of more than `pairs_max` pairs, those in cooldown come first, then
        those to be warmed, then those with the most requests."""
        ranked = [(pair.rank(now_s), -pair.sent, name) for name, pair in self._pairs.items()]
        found = list[PairStatus]()
        for rank, _, name in nsmallest(pairs_max, ranked):
            pair = self._pairs[name]
            rests_s = max(0.0, pair.rest_until_s - now_s) if not pair.warm else 0.0
            found.append(PairStatus(*name, _STATES[rank], rests_s, pair.sent, pair.prefills_failed, pair.broken))
        return found, len(ranked)

    def partners(self, decode: str) -> list[str]:
        """Return the ids of prefill replicas that form a pair with this decode replica, warm or not."""
        return self._partners.get(decode, [])

    def _has_another(self, members: Mapping[str, ReplicaState], prefill: str, decode: ReplicaState) -> bool:
        """True if another pair can take the requests of this one."""
        for first, second in self._pairs:
            one, other = members.get(first), members.get(second)
            if one is None or other is None or (first, second) == (prefill, decode.id):
                continue
            if other.speeds is decode.speeds and one.ready and other.ready and self.is_warm(one, other):
                return True
        return False

    def _start_cooldown(self, pair: _Pair, now_s: float) -> None:
        pair.warm, pair.warming_since_s = False, -inf
        pair.rest_s = min(PAIR_REST_MAX_S, max(PAIR_REST_S, 2 * pair.rest_s))
        pair.rest_until_s = now_s + pair.rest_s

    def _build_pairs(self, members: Mapping[str, ReplicaState]) -> dict[tuple[str, str], _Pair]:
        """Return all possible pairs; of more than PAIRS_MAX, the same number for each decoding replica."""
        first, second = dict[_Kind, list[ReplicaState]](), list[tuple[_Kind, ReplicaState]]()
        for id_, hand in self.hands.items():
            if (member := members.get(id_)) is None:
                continue
            kind = hand.connector, member.replica.revision, id(member.speeds), member.load.block_tokens or 0
            if self.may_prefill(member):
                first.setdefault(kind, []).append(member)
            if self.may_decode(member):
                second.append((kind, member))
        pairs, most = dict[tuple[str, str], _Pair](), PAIRS_MAX // max(1, len(second))
        for number, (kind, decode) in enumerate(second):
            there, partners = first.get(kind, []), 0
            for n in range(len(there)):
                prefill = there[(n + number) % len(there)]
                if not self.are_compatible(prefill, decode):  # ranks of one server, or itself
                    continue
                if partners == most or len(pairs) == PAIRS_MAX:
                    break
                name = prefill.id, decode.id
                pairs[name] = self._pairs.get(name) or _Pair()
                partners += 1
        for name, pair in self._pairs.items() if self._silent else ():
            if len(pairs) == PAIRS_MAX:
                break
            if name[0] in self._silent or name[1] in self._silent:
                pairs[name] = pair
        return pairs

    # -- transfers -----------------------------------------------------------------------------------------------

    def model(self, prefill: str, decode: str, fits: LoadFits) -> LoadModel:
        """Return the model of transfer times between these two replicas."""
        return fits.model(LEG, self._fits.get((prefill, decode)) or _NOTHING)

    def learn(self, prefill: str, decode: str, fits: LoadFits, tokens: int, took_ms: float, now_s: float) -> None:
        """Learn the duration of a transfer. A duration of more than OUTLIER times the expected one counts as OUTLIER
        times: the next transfers show if it was only a pause."""
        pair, most_ms = (prefill, decode), OUTLIER * self.model(prefill, decode, fits).ms(tokens)
        fit = self._fits.get(pair)
        if fit is None:
            if len(self._fits) >= PAIRS_MAX:
                oldest = next(iter(self._heard_s))
                del self._fits[oldest], self._heard_s[oldest]
            fit = self._fits[pair] = LoadFit()
        self._heard_s.pop(pair, None)
        self._heard_s[pair], self._common[id(fits)] = now_s, (fits, now_s)
        fits.observe(LEG, fit, tokens, min(took_ms, most_ms))

    def _forget_old(self, now_s: float) -> None:
        while self._heard_s and now_s - self._heard_s[pair := next(iter(self._heard_s))] > TIMES_S:
            del self._fits[pair], self._heard_s[pair]
        for key, (fits, heard_s) in list(self._common.items()):
            if now_s - heard_s > TIMES_S:
                fits.forget(LEG)
                del self._common[key]


_NOTHING = LoadFit()
