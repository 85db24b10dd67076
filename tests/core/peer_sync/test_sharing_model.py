"""Routers and their channel against the plain truth: whatever is late or lost, a message or a state corrects it."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.fleet.lease import Lease
from router.core.peer_sync.limits import SharingLimits
from router.core.types.placements import EndReason, Outcome, Usage
from tests.core.peer_sync.several import TOKENS_A_BLOCK, Several
from tests.support.examples import examples

NAMES = ("a", "b", "c")
LIMITS = SharingLimits(
    keys_max=40,
    row_keys=4,
    placement_keys=4,
    end_keys=4,
    first_token_keys=2,
    rows_max=2,
    queue_keys_max=200,
    queue_news_max=6,
    leases_max=4,
    lease_keys_max=120,
)
NAME = st.sampled_from(NAMES)
PAIRS = tuple(permutations(NAMES, 2))
"""(sender, receiver)"""
ENDINGS = st.sampled_from([EndReason.OK, EndReason.FAILED, EndReason.CLIENT_LEFT])


class Routers(RuleBasedStateMachine):
    """Three routers. Each receives the messages of another in their order, sooner or later; or it misses some and reads
    the state instead."""

    @initialize()
    def begin(self) -> None:
        """Nothing is open anywhere."""
        self.routers = Several(*NAMES, limits=LIMITS)
        self.now_s = 1_000.0
        self.open: list[tuple[str, Lease]] = []
        self.waiting: dict[tuple[str, str], list[bytes]] = {pair: [] for pair in PAIRS}
        self.missed: set[tuple[str, str]] = set()  # (sender, receiver) of which the receiver needs the state

    @rule(seconds=st.floats(0, 1.5))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        for name in NAMES:
            self.routers[name].tick(self.now_s)

    @rule(name=NAME, group=st.integers(0, 3), blocks=st.integers(0, 60))
    def place(self, name: str, group: int, blocks: int) -> None:
        """A request comes to one of them."""
        lease = self.routers.place(name, prompt_tokens=blocks * TOKENS_A_BLOCK + 1, now_s=self.now_s, group=group)
        self.open.append((name, lease))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0), ending=ENDINGS, first_token=st.booleans())
    def end(self, number: int, ending: EndReason, first_token: bool) -> None:
        """A request ends, with or without a token."""
        name, lease = self.open.pop(number % len(self.open))
        router = self.routers.router(name)
        if first_token or ending is EndReason.OK:
            router.first_token(lease, self.now_s)
        usage = Usage(lease.prompt_tokens, 300, 0) if ending is EndReason.OK else None
        router.finish(lease, Outcome(ending, usage), self.now_s)

    @rule(name=NAME)
    def begin_anew(self, name: str) -> None:
        """A router's process dies, with all that it has open, and another takes its place."""
        self.open = [(each, lease) for each, lease in self.open if each != name]
        self.routers.begin_anew(name, self.now_s)
        for pair in PAIRS:
            if name in pair:
                self.waiting[pair].clear()
                self.missed.discard(pair)

    @rule(name=NAME, replica=st.integers(0, 2))
    def lose_cache(self, name: str, replica: int) -> None:
        """One of them sees that an engine began anew."""
        self.routers.router(name).observations.forget(self.routers.ids[replica])

    @rule(name=NAME)
    def say(self, name: str) -> None:
        """A message of it is in the channel."""
        self.now_s += LIMITS.every_s
        message = self.routers[name].say(self.now_s)
        for other in NAMES:
            if message is not None and other != name:
                self.waiting[name, other].append(message)

    @rule(pair=st.sampled_from(PAIRS), count=st.integers(1, 4))
    def deliver(self, pair: tuple[str, str], count: int) -> None:
        """The next messages arrive."""
        if pair not in self.missed:
            for message in self.waiting[pair][:count]:
                self.routers.hear(*pair, message, self.now_s)
            del self.waiting[pair][:count]

    @rule(pair=st.sampled_from(PAIRS), silent=st.booleans())
    def lose(self, pair: tuple[str, str], silent: bool) -> None:
        """Messages are no longer in the channel, or the sender was silent and is forgotten."""
        self.waiting[pair].clear()
        self.missed.add(pair)
        if silent:
            self.routers[pair[1]].forget(pair[0], self.now_s)

    @rule(pair=st.sampled_from(PAIRS))
    def settle(self, pair: tuple[str, str]) -> None:
        """All that one has to say arrives, or its state: the other one knows just that."""
        if pair in self.missed:
            self.routers.restore(*pair, self.now_s)
            self.missed.discard(pair)
        for _ in range(8):
            self.now_s += LIMITS.idle_s
            message = self.routers[pair[0]].say(self.now_s)
            for other in NAMES:
                if message is not None and other != pair[0]:
                    self.waiting[pair[0], other].append(message)
        self.deliver(pair, 1_000)
        self._knows(pair[1], pair[0])

    def _knows(self, hearer: str, teller: str) -> None:
        views = [peer for peer in self.routers[hearer].peers() if peer.name == teller]
        open_ = [lease for name, lease in self.open if name == teller]
        assert sum(view.open for view in views) == len(open_)
        for id_ in self.routers.ids:
            here, there = self.routers.member(teller, id_), self.routers.member(hearer, id_)
            sums = there.others.get_load(teller)
            assert sums.open == len(here.leases)
            assert sums.context_tokens == here.work.context_tokens
            assert sums.waiting == here.queue.count_waiting()
            assert sums.waiting_ms == pytest.approx(here.queue.waiting_ms(), abs=1)

    @invariant()
    def limits_hold(self) -> None:
        """Nothing grows beyond its limit."""
        for name in NAMES:
            for leases, keys in self.routers[name].count_remote_leases():
                assert leases <= LIMITS.leases_max
                assert keys <= LIMITS.lease_keys_max

    @invariant()
    def sums_are_sums(self) -> None:
        """What all others have open is what each has."""
        for name in NAMES:
            for id_ in self.routers.ids:
                others = self.routers.member(name, id_).others
                each = [others.get_load(other) for other in NAMES if other != name]
                assert others.open == sum(sums.open for sums in each)
                assert others.waiting_ms == sum(sums.waiting_ms for sums in each)
                assert others.context_tokens == sum(sums.context_tokens for sums in each)

    def teardown(self) -> None:
        """Once all is over and nobody speaks any more, nothing is left of anybody."""
        if not hasattr(self, "routers"):
            return
        random.Random(0).shuffle(self.open)
        while self.open:
            self.end(0, EndReason.OK, first_token=True)
        for name in NAMES:
            for other in NAMES:
                self.routers[name].forget(other, self.now_s + 60)
            for id_ in self.routers.ids:
                member = self.routers.member(name, id_)
                assert (member.open_leases, member.others.waiting_ms, member.others.context_tokens) == (0, 0, 0)
                assert (member.work.kv.unshared_blocks, member.work.kv.own_tokens, member.work.kv.blocks) == (0, 0, 0)
                assert not self.routers.router(name).index.holders[id_].pins
                assert not self.routers.router(name).index.holders[id_].unproven


Routers.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestRouters = Routers.TestCase
