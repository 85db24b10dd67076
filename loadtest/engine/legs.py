"""Prefill legs of one engine: prompts that it computes for others to decode, and the rules by which these fetch them.

A handshake is broken as it is broken in life, so that a router which takes liberties with it is found out:

- NIXL (vLLM 0.32, nixl/pull_scheduler.py and base_worker.py): blocks are kept for 30 s from the end of the prefill, and
  longer only while the decoding engine has the request: its heartbeats renew the lease. They are fetched once, and are
  gone then.
- Mooncake (vLLM 0.32, mooncake/mooncake_connector.py): either leg may come first. The decoding engine waits for the
  prefill, and blocks that nobody fetches are kept for 480 s. Once it has asked for them they are sent, whether its
  request was aborted meanwhile or not, and until then, or for 480 s, it keeps room for them: a prefill that is aborted
  strands that.
- Offloading (vLLM 0.32, kv_offload/tiering/p2p/manager.py): the same, with 60 s.
- SGLang (0.5.23, disaggregation/common/conn.py): nothing is computed before the decoding engine has connected. Either
  engine waits for 300 s for the other one. A room that comes again while it is in use ends the process.

Pure: no clock, no I/O. Times are moments in simulated seconds. The engine that computes has one link out, on which
transfers follow each other, each with a floor and so much a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.engine.peers import PeerLimits
from router.core.facts.legs import Handshake

LEASE_S = {Handshake.NIXL: 30.0, Handshake.MOONCAKE: 480.0, Handshake.OFFLOADING: 60.0, Handshake.SGLANG: 300.0}
"""Seconds for which computed blocks are kept for whoever is to fetch them, from the end of the prefill on."""
WAIT_S = {Handshake.NIXL: 0.0, Handshake.MOONCAKE: 540.0, Handshake.OFFLOADING: 60.0, Handshake.SGLANG: 300.0}
"""Seconds for which a decoding engine waits for a prefill that does not end: of NIXL it is told of no other."""
OVER_MAX = 10_000
"""Ids of legs that are over, by which a second fetch is told from one that never was."""


class LegError(Exception):
    """The decoding engine cannot have these blocks. `kind`: `unknown`, `expired`, `taken` or `failed`."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class NotComputed(Exception):
    """The prefill is not over yet: the decoding engine is to wait, and to ask again when it is."""


class EngineCrashed(Exception):
    """The handshake was broken in a way that ends the engine's process."""


@dataclass(slots=True)
class _Leg:
    handshake: Handshake
    tokens: int
    since_s: float
    """When it began, and from the end of its prefill on when that ended."""
    computed: bool = False
    met: bool = False
    """Whether the decoding engine has connected."""


class Legs:
    """The legs of one engine, by id: NIXL's request id, Mooncake's transfer id, the p2p tier's request id, SGLang's
    room."""

    def __init__(self, limits: PeerLimits | None = None) -> None:
        self.limits = limits or PeerLimits()
        self.fetched = self.fetched_tokens = self.expired = 0  # since the start
        self.stranded = 0  # decode legs of Mooncake's, since the start, whose room is kept for blocks that do not come
        self._orphans: set[str] = set()  # legs of Mooncake's whose decode leg has asked for the blocks, and was aborted
        self._legs: dict[str, _Leg] = {}
        self._early: dict[str, tuple[Handshake, float]] = {}  # decoding engines that connected before their prefill
        self._over: dict[str, str] = {}  # id of a leg that is over -> kind of error of whoever fetches it now
        self._free_s = 0.0  # when the link has sent all that it was asked

    def __len__(self) -> int:
        return len(self._legs)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._legs

    def begin_prefill(self, handshake: Handshake, id_: str, tokens: int, now_s: float) -> None:
        """A prefill leg of so many prompt tokens comes in. Raises EngineCrashed where its id is a room in use, and
        ValueError where it is any other id in use."""
        if id_ in self._legs:
            if handshake is Handshake.SGLANG:
                raise EngineCrashed(f"room {id_} is in use")
            raise ValueError(f"leg {id_} is already here")
        self._over.pop(id_, None)
        met = self._early.pop(id_, None) is not None
        self._legs[id_] = _Leg(handshake, tokens, now_s, met=met)

    def connect(self, handshake: Handshake, id_: str, now_s: float) -> None:
        """The decoding engine has the request from now on, before its prefill leg or behind it."""
        leg = self._legs.get(id_)
        if leg is not None:
            leg.met = True
        elif id_ not in self._over and handshake is not Handshake.NIXL:
            self._early[id_] = handshake, now_s

    def disconnect(self, id_: str, now_s: float) -> None:
        """The decoding engine has the request no more, and has not fetched its blocks."""
        leg, early = self._legs.get(id_), self._early.get(id_)
        if (leg.handshake if leg else early and early[0]) is Handshake.MOONCAKE:
            if leg is not None and leg.computed:
                self._end(id_, "taken")
            else:
                self._orphans.add(id_)
            return
        self._early.pop(id_, None)
        if leg is None:
            return
        if leg.handshake is Handshake.NIXL and leg.computed:
            self._end(id_, "taken")  # it is told by an empty read, and frees the blocks
        else:
            leg.met, leg.since_s = False, now_s

    def may_compute(self, id_: str) -> bool:
        """Whether the prefill may begin."""
        leg = self._legs[id_]
        return leg.met or leg.handshake is not Handshake.SGLANG

    def computed(self, id_: str, now_s: float) -> None:
        """The prefill is over: its blocks are kept for whoever is to fetch them."""
        leg = self._legs[id_]
        leg.computed, leg.since_s = True, now_s
        if id_ in self._orphans:
            self._end(id_, "taken")

    def drop(self, id_: str) -> None:
        """The prefill leg was aborted or refused: nobody can have its blocks."""
        if (leg := self._legs.get(id_)) is not None:
            self.stranded += leg.handshake is Handshake.MOONCAKE and leg.met
            self._end(id_, "failed")

    def end(self) -> None:
        """The engine is gone: nobody can have its blocks."""
        for id_ in list(self._legs):
            self._end(id_, "failed")
        self._early.clear()
        self._orphans.clear()

    def fetch(self, id_: str, now_s: float, lacking_tokens: int | None = None) -> float:
        """The decoding engine takes the blocks, or as many tokens as it lacks: seconds until they are there. They are
        here no more then. Raises LegError, and NotComputed where it is to wait."""
        self.expire(now_s)
        leg = self._legs.get(id_)
        if leg is None:
            if id_ in self._early:
                raise NotComputed
            raise LegError(self._over.get(id_, "unknown"))
        if not leg.computed:
            if leg.handshake is Handshake.NIXL:
                raise LegError("unknown")  # nobody is told of blocks before the prefill has ended
            leg.met = True
            raise NotComputed
        tokens = leg.tokens if lacking_tokens is None else min(leg.tokens, lacking_tokens)
        self._end(id_, "taken")
        self.fetched += 1
        self.fetched_tokens += tokens
        self._free_s = max(now_s, self._free_s) + self.limits.transfer_s(tokens)
        return self._free_s - now_s

    def expire(self, now_s: float) -> list[str]:
        """Forget legs that nobody came for in time; returns their ids, whose blocks are free now."""
        gone = []
        for id_, leg in self._legs.items():
            if not leg.computed:
                late = leg.handshake is Handshake.SGLANG and not leg.met
            else:
                late = not (leg.met and leg.handshake is Handshake.NIXL)  # heartbeats renew its lease
            if late and now_s >= leg.since_s + LEASE_S[leg.handshake]:
                gone.append(id_)
        for id_ in gone:
            self._end(id_, "expired")
        self.expired += len(gone)
        for id_, (handshake, since_s) in list(self._early.items()):
            if now_s >= since_s + WAIT_S[handshake]:
                del self._early[id_]
                self._orphans.discard(id_)
                self._note(id_, "expired")
        return gone

    def until_s(self) -> float | None:
        """The earliest moment at which `expire` may find something; None for never."""
        times = [leg.since_s + LEASE_S[leg.handshake] for leg in self._legs.values()]
        times += [since_s + WAIT_S[handshake] for handshake, since_s in self._early.values()]
        return min(times, default=None)

    def _end(self, id_: str, kind: str) -> None:
        del self._legs[id_]
        self._orphans.discard(id_)
        self._note(id_, kind)

    def _note(self, id_: str, kind: str) -> None:
        self._over[id_] = kind
        while len(self._over) > OVER_MAX:
            del self._over[next(iter(self._over))]
