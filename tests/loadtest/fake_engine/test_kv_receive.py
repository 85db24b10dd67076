"""Simulated engines of which one computes the prompts that another one decodes: what comes, when, and what stays."""

from __future__ import annotations

import pytest

from loadtest.fake_engine.calibration import Calibration, LinearTimes
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.peers import PeerLimits
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Limits
from loadtest.simulate.engine.replicas import VirtualReplica
from router.core.types.disagg_types import KvConnector
from tests.loadtest.fake_engine.clock import Engines

BLOCK, BLOCKS = 4, 8
TIMES = LinearTimes(floor_s=0.010, token_s=1e-3, pair_s=0.0, read_s=0.0)
LIMITS = Limits(block_tokens=BLOCK, batched_tokens_max=64, sequences_max=5, context_tokens_max=64)
LINK = PeerLimits(floor_s=0.2, token_s=2e-3)
KEYS = list(range(1, BLOCKS + 1))
TOKENS = BLOCK * BLOCKS + 1


class _Pair(Engines):
    """Engines `p` and `d` in virtual time."""

    def __init__(self, kv_tokens: int = 40 * BLOCK) -> None:
        super().__init__()
        calibration = Calibration(TIMES, kv_tokens, 64)
        self.p, self.d = (
            VirtualReplica(name, calibration, kv_tokens, LIMITS, self.call_at, self.note, legs=LINK) for name in "pd"
        )

    def prefill(self, number: int = 1, handshake: KvConnector = KvConnector.NIXL) -> None:
        """The prefill leg comes to `p`."""
        assert self.p.legs is not None
        self.p.legs.begin_prefill(handshake, str(number), TOKENS, self.now_s)
        self.p.submit(EngineRequest(number, TOKENS, 1, KEYS, hold=True), self.now_s)

    def decode(self, number: int = 2, leg: int = 1, tokens: int = 5) -> None:
        """The decode leg comes to `d`, with an answer of so many tokens."""
        assert self.p.legs is not None
        self.d.submit(EngineRequest(number, TOKENS, tokens, KEYS, handover=(self.p.legs, str(leg))), self.now_s)

    def computed(self, number: int = 1) -> None:
        """The prefill leg has ended."""
        assert self.p.legs is not None
        self.p.legs.finish_prefill(str(number), self.now_s)


def test_a_prompt_is_fetched_and_not_computed() -> None:
    """The decode leg's first token comes when the transfer is over and one token was computed; both caches have the
    prompt's blocks then, and what was fetched counts as cached."""
    pair = _Pair()
    pair.prefill()
    pair.run()
    assert pair.finished_s[1] == pytest.approx(0.010 + TOKENS / 1e3)
    pair.computed()
    pair.decode()
    begun_s = pair.now_s
    pair.run()
    at_s, cached = pair.first_s[2], pair.cached[2]
    assert at_s - begun_s == pytest.approx(LINK.transfer_s(BLOCK * BLOCKS) + 0.010 + 1e-3, abs=0.001)
    assert cached == BLOCK * BLOCKS
    assert pair.d.computed_tokens == 1
    assert set(KEYS) <= set(pair.d.model.pool.cached) & set(pair.p.model.pool.cached)  # type: ignore[call-overload]


def test_blocks_stay_until_they_are_fetched() -> None:
    """They are in use where they were computed, so that nothing takes their room, and free once they are released."""
    pair = _Pair(kv_tokens=10 * BLOCK)
    pair.prefill()
    pair.run()
    pair.computed()
    free = pair.p.model.pool.free_n
    assert free == 10 - BLOCKS - 1
    pair.p.submit(EngineRequest(9, TOKENS, 1, list(range(101, 101 + BLOCKS))), pair.now_s)
    pair.run(pair.now_s + 10.0)
    assert 9 not in pair.finished_s
    pair.p.model.release(1)
    pair.p._begin() if pair.p._step is None else None
    pair.run()
    assert 9 in pair.finished_s


def test_a_decode_leg_waits_for_a_prefill_under_way() -> None:
    """With handshakes whose legs go side by side it has its room at once, and others pass it by."""
    pair = _Pair()
    pair.prefill(handshake=KvConnector.MOONCAKE)
    pair.decode()
    pair.d.submit(EngineRequest(3, 9, 2, []), pair.now_s)
    pair.run(0.02)
    assert pair.d.model.waiting_n == 1
    pair.run(0.05)
    pair.computed()
    pair.d.computed_elsewhere(2, pair.now_s)
    pair.run()
    assert pair.finished_s[3] < pair.first_s[2]
    assert pair.cached[2] == BLOCK * BLOCKS


def test_a_preempted_decode_leg_computes_what_it_has_lost() -> None:
    """Its blocks came once, and are gone where they came from: nothing was lacking, and it ends."""
    pair = _Pair(kv_tokens=18 * BLOCK)
    for leg in (1, 3):
        pair.prefill(leg)
        pair.run()
        pair.computed(leg)
    pair.decode(2, leg=1, tokens=31)
    pair.decode(4, leg=3, tokens=31)
    pair.run()
    assert pair.d.model.arriving is not None
    assert (pair.d.model.counters.preemptions > 0, pair.d.model.arriving.lacked) == (True, 0)
    assert {2, 4} <= pair.finished_s.keys()


@pytest.mark.parametrize("how", ["unknown", "failed while it waits"])
def test_where_nothing_comes_all_is_computed(how: str) -> None:
    """A decode leg whose prefill is not to be had computes by itself."""
    pair = _Pair()
    assert pair.p.legs is not None
    if how == "unknown":
        pair.decode(leg=7)
    else:
        pair.prefill(handshake=KvConnector.MOONCAKE)
        pair.decode()
        pair.run(0.02)
        pair.p.cancel(1)
        pair.p.legs.drop("1")
        pair.d.computed_elsewhere(2, pair.now_s)
    pair.run()
    assert pair.cached[2] == 0
    assert pair.d.computed_tokens == TOKENS
    assert pair.d.model.arriving is not None
    assert pair.d.model.arriving.lacked == 1


@pytest.mark.parametrize("moment", ["waiting", "under way"])
def test_a_client_that_leaves_frees_the_room(moment: str) -> None:
    """Whether its decode leg waits for the prefill or for the transfer."""
    pair = _Pair()
    pair.prefill(handshake=KvConnector.MOONCAKE)
    pair.decode()
    pair.run(0.02 if moment == "waiting" else 0.06)
    if moment == "under way":
        pair.computed()
        pair.d.computed_elsewhere(2, pair.now_s)
        pair.run(pair.now_s + 0.01)
    assert pair.d.model.pool.free_n < 40
    pair.d.cancel(2)
    pair.run()
    assert pair.d.model.pool.free_n == 40
    assert 2 not in pair.first_s


def test_an_engine_has_a_tier_or_takes_legs() -> None:
    """Both at once is not simulated, and is not passed over in silence."""
    with pytest.raises(ValueError, match="a tier, or takes legs"):
        EngineModel(TIMES, 400, LIMITS, tier=TierLimits(400), legs=True)
