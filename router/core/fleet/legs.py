"""Prefill apart from decode: which replicas may take the two legs of a request, and the prefill legs under way.

Two replicas pair that shake hands alike, serve the same models from blocks of the same size, are of one revision of a
rollout, and are no ranks of one server. Whoever looks for handshakes proves them (`prove`). The first transfer between
two engines takes seconds and may fail, so a new pair gets no traffic before somebody has warmed it (`to_warm`,
`warmed`); one that failed rests, twice as long each time.

A transfer takes floor + a x tokens, learned for each pair like a load from a tier (core/learned/loads.py): the time
from the end of the prefill to the decoding replica's first token, where nothing else was in its way there. The tokens
are those that the decoding replica did not hold. Slow transfers keep requests away, and with them the news that these
are fast again: times of which nothing was heard for TIMES_S are forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest
from math import inf

from router.core.facts.legs import Handshake, PairSeen, PairState, Role
from router.core.facts.replicas import Replica
from router.core.facts.tiers import LEG
from router.core.fleet.lease import Lease
from router.core.fleet.member import Member
from router.core.learned.loads import OUTLIER, LoadFit, LoadFits, LoadModel

_Kind = tuple[Handshake, str, int, int]
"""(handshake, revision, which models, block size in tokens): those of one kind pair."""

PAIRS_MAX = 4_096  # pairs that there may be, and whose times are remembered
PAIR_REST_S, PAIR_REST_MAX_S = 5.0, 300.0  # rest of a pair that failed: the first, and the longest
TIMES_S = 120.0  # how long times of transfers count for without another one
_STATES = (PairState.RESTING, PairState.NEW, PairState.WARM)  # in the order of pairs on pages
WARMING_MAX_S = 60.0  # a warming of which nothing was heard for so long has failed


class _Hand:
    """How one replica shakes hands, and where it is asked for blocks."""

    __slots__ = ("address", "handshake")

    def __init__(self, handshake: Handshake, address: str) -> None:
        self.handshake, self.address = handshake, address


class _Pair:
    """What is known of the way between two replicas."""

    __slots__ = ("broken", "prefills_failed", "rest_s", "rest_until_s", "sent", "warm", "warming_since_s")

    def __init__(self) -> None:
        self.warm = False
        self.warming_since_s = -inf  # time at which its warming began; -inf: nobody warms it
        self.rest_s, self.rest_until_s = 0.0, -inf
        self.sent = self.prefills_failed = self.broken = 0  # requests (facts.legs.PairSeen)

    def rank(self, now_s: float) -> int:
        """Position of its state in _STATES."""
        return 2 if self.warm else 0 if self.rest_until_s > now_s else 1


class Legs:
    """Replicas that pair, and the prefill legs under way. Where no handshake is proved nothing here is called."""

    def __init__(self) -> None:
        self.hands: dict[str, _Hand] = {}
        self._silent: dict[str, _Hand] = {}  # hands of replicas that shook them, and do not for now
        self.open: dict[int, Lease] = {}  # id of a decode leg's lease -> the lease of its prefill leg
        # Id of a prefill leg's lease -> replica of its decode leg, where both begin at once: a prefilling engine waits
        # for the decoding one to take the blocks.
        self.decoders: dict[int, str] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}  # (prefill, decode)
        # What decides which pairs there are, as it was when they were found: (id, handshake, replica as told, which
        # models, block size in tokens).
        self._made_of: list[tuple[str, Handshake, Replica, int, int]] = []
        self._partners: dict[str, list[str]] = {}  # decode -> all that there is a pair with
        self._fits: dict[tuple[str, str], LoadFit] = {}  # (prefill, decode) -> how long transfers take
        # (prefill, decode) -> time of the last transfer that was learned from, the longest ago first.
        self._heard_s: dict[tuple[str, str], float] = {}
        # id() of what all replicas of the same models have shown -> (that, time at which a transfer last showed it).
        self._common: dict[int, tuple[LoadFits, float]] = {}

    # -- what is told of replicas --------------------------------------------------------------------------------

    def prove(self, replica: str, handshake: Handshake | None, address: str) -> None:
        """The replica shakes hands like this, and is asked for blocks at this address; None: it does not, as far as
        known. Its pairs take no traffic then, and are as they were once it does so as before."""
        hand = self.hands.get(replica)
        if handshake is None:
            if hand is not None:
                self._silent[replica] = self.hands.pop(replica)
            return
        hand = hand or self._silent.pop(replica, None)
        if hand is None or hand.handshake is not handshake or hand.address != address:
            self._forget_pairs(replica)
            hand = _Hand(handshake, address)
        self.hands[replica] = hand

    def forget(self, replica: str) -> None:
        """A replica left, or another engine is there."""
        self.hands.pop(replica, None)
        self._silent.pop(replica, None)
        self._forget_pairs(replica)
        self.forget_times(replica)

    def restarted(self, replica: str) -> None:
        """Forget pairs and times of a replica whose engine is another process: its pairs must be warmed again, and the
        times of the process that ended, perhaps in trouble, say nothing of the new one."""
        self._forget_pairs(replica)
        self.forget_times(replica)

    def forget_times(self, replica: str) -> None:
        """Forget the transfer times of a replica that serves another model or restarted. The prior that all pairs have
        in common is forgotten with the last pair that has times of its own."""
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

    def may_prefill(self, member: Member) -> bool:
        """Whether a replica takes prefill legs."""
        return member.id in self.hands and member.replica.role is not Role.DECODE

    def may_decode(self, member: Member) -> bool:
        """Whether a replica takes decode legs."""
        return member.id in self.hands and member.replica.role is not Role.PREFILL

    def takes_whole(self, member: Member) -> bool:
        """Whether a replica takes requests in one leg. Servers of SGLang's that prefill or decode answer those with 400
        (0.5.23, srt/managers/scheduler.py: "Disaggregated request received without bootstrap room id")."""
        hand = self.hands.get(member.id) or self._silent.get(member.id)
        return hand is None or hand.handshake is not Handshake.SGLANG

    def whole(self, members: list[Member]) -> list[Member]:
        """The members that take requests in one leg; all of them where none does."""
        return [member for member in members if self.takes_whole(member)] or members

    def alike(self, prefill: Member, decode: Member) -> bool:
        """Whether the second replica can decode what the first one prefills."""
        first, second = self.hands.get(prefill.id), self.hands.get(decode.id)
        if first is None or second is None or first.handshake is not second.handshake:
            return False
        if prefill.replica.revision != decode.replica.revision or prefill.speeds is not decode.speeds:
            return False
        if (prefill.load.block_tokens or 0) != (decode.load.block_tokens or 0):
            return False
        return prefill.replica.url != decode.replica.url  # itself, and the ranks of its server

    def is_warm(self, prefill: Member, decode: Member) -> bool:
        """Whether the pair takes traffic."""
        pair = self._pairs.get((prefill.id, decode.id))
        return pair is not None and pair.warm and self.alike(prefill, decode)

    def to_warm(self, members: Mapping[str, Member], now_s: float) -> list[tuple[str, str]]:
        """Pairs (prefill, decode) to be warmed now, each replica in one of them at most; `warmed` is to be called for
        each."""
        made_of = [
            (m.id, hand.handshake, m.replica, id(m.speeds), m.load.block_tokens or 0)
            for id_, hand in self.hands.items()
            if (m := members.get(id_)) is not None
        ]
        if made_of != self._made_of:
            self._made_of, self._pairs = made_of, self._paired(members)
            self._partners = {}
            for first, second in self._pairs:
                self._partners.setdefault(second, []).append(first)
        self._forget_old(now_s)
        pairs = self._pairs
        busy = set[str]()
        for (first, second), pair in pairs.items():
            if now_s - pair.warming_since_s >= WARMING_MAX_S and pair.warming_since_s > -inf:
                self._failed(pair, now_s)
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

    def warmed(self, prefill: str, decode: str, now_s: float, *, ok: bool) -> None:
        """A pair was warmed, well or not."""
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            return
        if ok:  # `rest_s` stays until a request's blocks have come: a warming is small, and may pass where they do not
            pair.warm, pair.warming_since_s = True, -inf
        else:
            self._failed(pair, now_s)

    def broke(self, members: Mapping[str, Member], prefill: str, decode: str, now_s: float) -> None:
        """The blocks of a request did not come over a pair that takes traffic: it rests, and is warmed anew. Where
        requests are only taken in two legs, the last pair of a model goes on."""
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            return
        pair.broken += 1
        if not pair.warm:
            return  # the pair rests or is being warmed already: many requests report one failed transfer
        there = members.get(decode)
        if there is None or self.takes_whole(there) or self._has_another(members, prefill, there):
            self._failed(pair, now_s)

    def sent(self, prefill: str, decode: str) -> None:
        """A request was placed on a pair."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None:
            pair.sent += 1

    def prefill_failed(self, prefill: str, decode: str) -> None:
        """A request's prefill leg failed."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None:
            pair.prefills_failed += 1

    def came(self, prefill: str, decode: str) -> None:
        """The blocks of a request came over a pair."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None:
            pair.rest_s = 0.0

    def hand_of(self, replica: str) -> tuple[_Hand, bool] | None:
        """How a replica shakes hands, and whether it does so now; None where it never did."""
        if (hand := self.hands.get(replica)) is not None:
            return hand, True
        silent = self._silent.get(replica)
        return None if silent is None else (silent, False)

    def pair_counts(self, now_s: float) -> dict[str, dict[str, int]]:
        """By replica that is in one, how many pairs take traffic (`warm`), are to be warmed (`new`), and rest after a
        failure (`resting`). One pass, as there may be thousands of pairs."""
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

    def seen(self, pairs_max: int, now_s: float) -> tuple[list[PairSeen], int]:
        """Pairs, and how many there are: of more than `pairs_max` those that rest, then those to be warmed, then those
        that most requests went to."""
        ranked = [(pair.rank(now_s), -pair.sent, name) for name, pair in self._pairs.items()]
        found = list[PairSeen]()
        for rank, _, name in nsmallest(pairs_max, ranked):
            pair = self._pairs[name]
            rests_s = max(0.0, pair.rest_until_s - now_s) if not pair.warm else 0.0
            found.append(PairSeen(*name, _STATES[rank], rests_s, pair.sent, pair.prefills_failed, pair.broken))
        return found, len(ranked)

    def partners(self, decode: str) -> list[str]:
        """Ids of replicas with which this one that decodes is a pair, warm or not."""
        return self._partners.get(decode, [])

    def _has_another(self, members: Mapping[str, Member], prefill: str, decode: Member) -> bool:
        """Whether another pair takes what this one does."""
        for first, second in self._pairs:
            one, other = members.get(first), members.get(second)
            if one is None or other is None or (first, second) == (prefill, decode.id):
                continue
            if other.speeds is decode.speeds and one.ready and other.ready and self.is_warm(one, other):
                return True
        return False

    def _failed(self, pair: _Pair, now_s: float) -> None:
        pair.warm, pair.warming_since_s = False, -inf
        pair.rest_s = min(PAIR_REST_MAX_S, max(PAIR_REST_S, 2 * pair.rest_s))
        pair.rest_until_s = now_s + pair.rest_s

    def _paired(self, members: Mapping[str, Member]) -> dict[tuple[str, str], _Pair]:
        """All pairs that there can be; of more than PAIRS_MAX the same number for each decoding replica."""
        first, second = dict[_Kind, list[Member]](), list[tuple[_Kind, Member]]()
        for id_, hand in self.hands.items():
            if (member := members.get(id_)) is None:
                continue
            kind = hand.handshake, member.replica.revision, id(member.speeds), member.load.block_tokens or 0
            if self.may_prefill(member):
                first.setdefault(kind, []).append(member)
            if self.may_decode(member):
                second.append((kind, member))
        pairs, most = dict[tuple[str, str], _Pair](), PAIRS_MAX // max(1, len(second))
        for number, (kind, decode) in enumerate(second):
            there, partners = first.get(kind, []), 0
            for n in range(len(there)):
                prefill = there[(n + number) % len(there)]
                if not self.alike(prefill, decode):  # ranks of one server, or itself
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
        """What a transfer between these two takes."""
        return fits.model(LEG, self._fits.get((prefill, decode)) or _NOTHING)

    def learn(self, prefill: str, decode: str, fits: LoadFits, tokens: int, took_ms: float, now_s: float) -> None:
        """A transfer of so many tokens took so long. One of more than OUTLIER times as long as was expected counts as
        that: the next ones tell whether it was a pause."""
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
