"""Simulated engines that send each other what their CPU memory holds: what comes, when, and what does not."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadtest.fake_engine.calibration import Calibration, LinearTimes
from loadtest.fake_engine.host_tier import HostTier, TierLimits
from loadtest.fake_engine.kv_pool import BlocksRemoved, BlockStored, KvEvent
from loadtest.fake_engine.peers import PeerLimits, Peers
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Limits, Outcome
from loadtest.simulate.engine.replicas import VirtualReplica
from tests.loadtest.fake_engine.clock import Engines

BLOCK = 4
TIMES = LinearTimes(floor_s=0.010, token_s=1e-3, pair_s=0.0, read_s=0.0)
LIMITS = Limits(block_tokens=BLOCK, batched_tokens_max=64, sequences_max=5, context_tokens_max=64)
TIER = TierLimits(tokens=80 * BLOCK, floor_s=0.05, token_s=1e-3)
LINK = PeerLimits(floor_s=0.2, token_s=2e-3)
PULL_S = LINK.transfer_s(8 * BLOCK) + TIER.load_s(8 * BLOCK)


class _Fleet(Engines):
    """Engines `a`, `b` and `c` in virtual time."""

    def __init__(self, *, kv_tokens: int = 40 * BLOCK, tier: TierLimits = TIER) -> None:
        super().__init__()
        self.peers, self._number = Peers(LINK), 0
        self.events: dict[str, list[KvEvent]] = {name: [] for name in "abc"}
        calibration = Calibration(TIMES, kv_tokens, 64)
        virtual = partial(VirtualReplica, record_events=True, tier=tier, peers=self.peers)
        self.engines = {name: virtual(name, calibration, kv_tokens, LIMITS, self.call_at, self.note) for name in "abc"}

    def note(self, engine: VirtualReplica, outcome: Outcome, now_s: float) -> None:
        """Remember what came of a step, and the events of each engine."""
        super().note(engine, outcome, now_s)
        self.events[engine.name] += outcome.events

    def ask(self, engine: str, name: int, *, source: str = "", blocks: int = 8) -> int:
        """A prompt of so many blocks and a token, whose blocks are its own."""
        self._number += 1
        keys = [name * 100 + n for n in range(1, blocks + 1)]
        request = EngineRequest(self._number, blocks * BLOCK + 1, 1, keys, None, source)
        self.engines[engine].submit(request, self.now_s)
        return self._number

    def run(self, until_s: float = 1_000.0) -> None:
        """Until then, or until nothing is left to do."""
        super().run(until_s)
        self.now_s = max(self.now_s, until_s) if self._heap else self.now_s

    def served(self, engine: str, name: int, *, source: str = "") -> tuple[float, int]:
        """(seconds to the first token, cached tokens) of a prompt that is asked alone."""
        began_s, number = self.now_s, self.ask(engine, name, source=source)
        self.run()
        return self.first_s[number] - began_s, self.cached[number]

    def tier(self, engine: str) -> HostTier:
        """Its CPU memory."""
        loading = self.engines[engine].model.loading
        assert loading is not None
        return loading.tier

    def told(self, engine: str) -> set[int]:
        """Keys in its CPU memory, by its events."""
        held: Counter[int] = Counter()
        for event in self.events[engine]:
            if isinstance(event, (BlockStored, BlocksRemoved)) and event.medium == "CPU":
                held.update({key: 1 if isinstance(event, BlockStored) else -1 for key in event.keys})
        assert set(held.values()) <= {0, 1}
        return {key for key, copies in held.items() if copies}


def test_what_a_source_has_in_memory_is_not_computed() -> None:
    """The first token comes after the transfer and the load, all blocks count as cached, and both memories have them
    afterwards, as the events say; whoever asks the second engine next finds them there."""
    fleet = _Fleet()
    fleet.served("a", 1)
    ttft_s, cached = fleet.served("b", 1, source="a")
    assert ttft_s == pytest.approx(PULL_S + TIMES.mixed_s(0, 0, 1, 0), abs=0.02)
    assert cached == 8 * BLOCK
    assert fleet.told("b") == set(fleet.tier("b")._keys) == set(fleet.tier("a")._keys)
    assert (fleet.peers.transfers, fleet.peers.sent_tokens) == (1, 8 * BLOCK)
    assert fleet.served("b", 1)[0] < 0.05


def test_transfers_follow_each_other_on_a_link() -> None:
    """Of two pulls from one source, or to one engine, the second waits for the first; a request that computes does not
    wait for either."""
    fleet = _Fleet()
    for name in (1, 2):
        fleet.served("a", name)
    fleet.served("b", 3)
    began_s = fleet.now_s
    first, second = fleet.ask("b", 1, source="a"), fleet.ask("c", 2, source="a")
    third, alone = fleet.ask("c", 3, source="b"), fleet.ask("b", 9, blocks=2)
    fleet.run()
    took_s = {number: fleet.first_s[number] - began_s for number in (first, second, third, alone)}
    link_s = LINK.transfer_s(8 * BLOCK)
    assert took_s[alone] < 0.1
    assert took_s[first] == pytest.approx(PULL_S, abs=0.05)
    assert took_s[second] == pytest.approx(PULL_S + link_s, abs=0.05)
    assert took_s[third] == pytest.approx(PULL_S + 2 * link_s, abs=0.05)


def test_what_only_a_gpu_has_does_not_come() -> None:
    """A source without memory for them, one that never had them, and the engine itself: all is computed, at once."""
    computed_s = _Fleet().served("a", 1)[0]
    fleet = _Fleet(tier=TierLimits(4 * BLOCK))
    fleet.served("a", 1)
    for source in ("a", "c", "b"):
        ttft_s, cached = fleet.served("b", 1 if source == "a" else ord(source), source=source)
        assert (ttft_s, cached) == (pytest.approx(computed_s), 0)
    assert fleet.peers.transfers == 0


def test_a_source_that_dies_sends_nothing() -> None:
    """What was on its way is computed when its time is over, and nothing of it is in memory unless it was computed."""
    fleet = _Fleet()
    fleet.served("a", 1)
    began_s, number = fleet.now_s, fleet.ask("b", 1, source="a")
    fleet.run(began_s + 0.1)
    fleet.engines["a"].stop()
    fleet.engines["a"].start()
    fleet.run()
    assert fleet.first_s[number] - began_s > PULL_S + TIMES.mixed_s(8 * BLOCK, 0, 0, 0)
    assert fleet.cached[number] == 0
    assert fleet.told("b") == set(fleet.tier("b")._keys)
    assert not fleet.tier("b")._loading


def test_a_wrong_address_is_waited_for_without_end() -> None:
    """Nobody answers there: the request has no first token until its client leaves, and nobody else waits for it."""
    fleet = _Fleet()
    number = fleet.ask("b", 1, source="10.0.0.9:5710")
    assert fleet.served("b", 2)[0] < 0.1
    fleet.run(fleet.now_s + 3_600)
    assert number not in fleet.first_s
    assert fleet.engines["b"].model.cancel(number)
    model = fleet.engines["b"].model
    assert (model.waiting_n, model.pool.free_n) == (0, model.pool.blocks_n)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "run", "cancel", "restart"]),
        st.sampled_from("abc"),
        st.integers(1, 6),
        st.sampled_from(["", "a", "b", "c"]),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(OPERATIONS, st.integers(8, 40))
@example([("ask", "c", 3, ""), ("run", "a", 1, ""), ("ask", "a", 3, "c"), ("restart", "a", 1, "")], 8)
def test_nothing_is_left_behind(operations: list[tuple[str, str, int, str]], tier_blocks: int) -> None:
    """Whatever is asked, pulled, cancelled and restarted: everybody else finishes, nothing stays held for a transfer,
    and events tell what each memory has."""
    fleet = _Fleet(kv_tokens=20 * BLOCK, tier=TierLimits(tier_blocks * BLOCK, 0.03, 1e-3))
    open_: dict[int, str] = {}
    for what, engine, value, source in operations:
        if what == "ask":
            open_[fleet.ask(engine, value, source=source, blocks=5 + value % 4)] = engine
        elif what == "run":
            fleet.run(fleet.now_s + 0.05 * value)
        elif what == "cancel":
            for number in [number for number, at in open_.items() if at == engine][:1]:
                fleet.engines[engine].cancel(number)
                open_.pop(number)
        else:
            fleet.engines[engine].stop()
            fleet.engines[engine].start()
            fleet.events[engine].clear()
            open_ = {number: at for number, at in open_.items() if at != engine}
    fleet.run(fleet.now_s + 1_000)
    assert open_.keys() <= fleet.finished_s.keys()
    for name, engine in fleet.engines.items():
        assert not fleet.tier(name)._loading
        assert engine.model.pool.free_n == engine.model.pool.blocks_n
        assert fleet.told(name) == set(fleet.tier(name)._keys)
