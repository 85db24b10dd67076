"""Prefill stages of one engine: prompts that it computes for other engines to decode, and the rules of their transfer.

A violation of a KV connector's protocol has the same consequences as in the real engine, so that tests detect a router
that violates it:

- NIXL (vLLM 0.32, nixl/pull_scheduler.py and base_worker.py): blocks are kept for 30 s from the end of the prefill.
  They are kept longer only while the decode engine has the request: its heartbeats renew the lease. They can be fetched
  once.
- Mooncake (vLLM 0.32, mooncake/mooncake_connector.py): either stage may come first. The decode engine waits for the
  prefill. Blocks that are not fetched are kept for 480 s. Once the decode engine has requested them they are sent, even
  if its request was aborted in the meantime. Until then, or for 480 s, it reserves blocks for them. An aborted prefill
  strands those blocks.
- Offloading (vLLM 0.32, kv_offload/tiering/p2p/manager.py): the same, with 60 s.
- SGLang (0.5.23, disaggregation/common/conn.py): prefill starts only after the decode engine has connected. Each engine
  waits 300 s for the other. A `bootstrap_room` that is reused while in use ends the process.

This module is pure: no clock, no I/O. Times are in simulated seconds. The computing engine has one outgoing link.
Transfers on it are sequential; each takes a fixed floor plus a time per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.fake_engine.peers import PeerLimits
from router.core.types.disagg_types import KvConnector

LEASE_S = {KvConnector.NIXL: 30.0, KvConnector.MOONCAKE: 480.0, KvConnector.OFFLOADING: 60.0, KvConnector.SGLANG: 300.0}
"""Seconds for which computed blocks are kept for the decode engine, from the end of the prefill on."""
WAIT_S = {KvConnector.NIXL: 0.0, KvConnector.MOONCAKE: 540.0, KvConnector.OFFLOADING: 60.0, KvConnector.SGLANG: 300.0}
"""Seconds for which a decode engine waits for an unfinished prefill. With NIXL it learns only of finished ones."""
OVER_MAX = 10_000
"""Number of finished ids that are kept, to distinguish a second fetch from a fetch of an unknown id."""


class LegError(Exception):
    """The decode engine cannot get these blocks. `kind`: `unknown`, `expired`, `taken` or `failed`."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class NotComputed(Exception):
    """The prefill is not finished: the decode engine must wait, and try again when it is."""


class EngineCrashed(Exception):
    """A violation of the KV connector's protocol that ends the engine's process."""


@dataclass(slots=True)
class _Leg:
    handshake: KvConnector
    tokens: int
    since_s: float
    """Start of the prefill stage, its end, or the disconnect of the decode engine, whichever is latest."""
    computed: bool = False
    met: bool = False
    """True if the decode engine has connected."""


class PrefillExports:
    """Prefill stages of one engine by id: NIXL's request id, Mooncake's transfer id, the p2p tier's request id,
    SGLang's `bootstrap_room`."""

    def __init__(self, limits: PeerLimits | None = None) -> None:
        self.limits = limits or PeerLimits()
        self.fetched = self.fetched_tokens = self.expired = 0  # since the start
        self.stranded = 0  # Mooncake decode requests, since the start, that reserve blocks for KV that never arrives.
        # Mooncake ids: the decode request was aborted after it had requested the blocks
        self._orphans: set[str] = set()
        self._legs: dict[str, _Leg] = {}
        self._early: dict[str, tuple[KvConnector, float]] = {}  # decode engines that connected before their prefill
        self._over: dict[str, str] = {}  # finished id -> kind of error of a fetch from now on
        self._free_s = 0.0  # time at which the link has finished all its transfers

    def __len__(self) -> int:
        return len(self._legs)

    @property
    def reserved(self) -> int:
        """Number of decode engines' requests with memory reserved for a prefill that has not been requested here."""
        return len(self._early)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._legs

    def begin_prefill(self, handshake: KvConnector, id_: str, tokens: int, now_s: float) -> None:
        """Add a prefill request of `tokens` prompt tokens.

        Raises `EngineCrashed` if its id is a `bootstrap_room` in use, and `ValueError` if it is any other id in use.
        """
        if id_ in self._legs:
            if handshake is KvConnector.SGLANG:
                raise EngineCrashed(f"room {id_} is in use")
            raise ValueError(f"leg {id_} is already here")
        self._over.pop(id_, None)
        met = self._early.pop(id_, None) is not None
        self._legs[id_] = _Leg(handshake, tokens, now_s, met=met)

    def connect(self, handshake: KvConnector, id_: str, now_s: float) -> None:
        """Record that the decode engine has the request, before or after its prefill request."""
        leg = self._legs.get(id_)
        if leg is not None:
            leg.met = True
        elif id_ not in self._over and handshake is not KvConnector.NIXL:
            self._early[id_] = handshake, now_s

    def disconnect(self, id_: str, now_s: float) -> None:
        """Record that the decode engine no longer has the request and has not fetched its blocks."""
        leg, early = self._legs.get(id_), self._early.get(id_)
        if (leg.handshake if leg else early and early[0]) is KvConnector.MOONCAKE:
            if leg is not None and leg.computed:
                self._end(id_, "taken")
            else:
                self._orphans.add(id_)
            return
        self._early.pop(id_, None)
        if leg is None:
            return
        if leg.handshake is KvConnector.NIXL and leg.computed:
            self._end(id_, "taken")  # an empty read notifies this engine, which then frees the blocks
        else:
            leg.met, leg.since_s = False, now_s

    def may_compute(self, id_: str) -> bool:
        """True if the prefill may start."""
        leg = self._legs[id_]
        return leg.met or leg.handshake is not KvConnector.SGLANG

    def finish_prefill(self, id_: str, now_s: float) -> None:
        """Record the end of the prefill: its blocks are kept for the decode engine."""
        leg = self._legs[id_]
        leg.computed, leg.since_s = True, now_s
        if id_ in self._orphans:
            self._end(id_, "taken")

    def drop(self, id_: str) -> None:
        """Record that the prefill request was aborted or refused: its blocks are unavailable."""
        if (leg := self._legs.get(id_)) is not None:
            self.stranded += leg.handshake is KvConnector.MOONCAKE and leg.met
            self._end(id_, "failed")

    def end(self) -> None:
        """Record that the engine has ended: all blocks are unavailable."""
        for id_ in list(self._legs):
            self._end(id_, "failed")
        self._early.clear()
        self._orphans.clear()

    def fetch(self, id_: str, now_s: float, lacking_tokens: int | None = None) -> float:
        """Transfer all blocks, or `lacking_tokens`, to the decode engine. Returns the seconds until they arrive.

        The blocks are no longer here afterwards. Raises `LegError`, and `NotComputed` if the decode engine must wait.
        """
        self.expire(now_s)
        leg = self._legs.get(id_)
        if leg is None:
            if id_ in self._early:
                raise NotComputed
            raise LegError(self._over.get(id_, "unknown"))
        if not leg.computed:
            if leg.handshake is KvConnector.NIXL:
                raise LegError("unknown")  # NIXL's decode engine learns of blocks only after the prefill
            leg.met = True
            raise NotComputed
        tokens = leg.tokens if lacking_tokens is None else min(leg.tokens, lacking_tokens)
        self._end(id_, "taken")
        self.fetched += 1
        self.fetched_tokens += tokens
        self._free_s = max(now_s, self._free_s) + self.limits.transfer_s(tokens)
        return self._free_s - now_s

    def expire(self, now_s: float) -> list[str]:
        """Drop ids after their time limit. Returns the ids of the freed blocks."""
        gone = []
        for id_, leg in self._legs.items():
            if not leg.computed:
                late = leg.handshake is KvConnector.SGLANG and not leg.met
            else:
                late = not (leg.met and leg.handshake is KvConnector.NIXL)  # heartbeats renew its lease
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

    def get_next_expiry_s(self) -> float | None:
        """Return the earliest time at which `expire` may find an id, or None for never."""
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
