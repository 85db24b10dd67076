"""The world of one run: requests, replicas, routers and their events, in the order of a virtual clock.

Every change is an event: (time, number, callback, argument). Between two events no state changes. Clients send to the
routers by turns, as a Service in front of several would. Each router sees only its own requests, and every replica
through its own probes.

The rules for failures are the same for every row. A request with a replica that is gone before its first token is tried
once more on another one; a request that had its first token fails. A client gives up a try after `timeout_s`, or after
`patience_s` without a token. The request counts from its first try, and as failed when all have failed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from loadtest.common.answer_limits import answer_limit
from loadtest.common.traces import BYTES_PER_TOKEN
from loadtest.fake_engine.request import EngineRequest, RequestRefused
from loadtest.fake_engine.step import Outcome
from loadtest.simulate.engine.channel import Channel
from loadtest.simulate.engine.cluster import VirtualCluster
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.network import NetworkDelay
from loadtest.simulate.engine.placer import Placer
from loadtest.simulate.engine.replicas import VirtualReplica
from loadtest.simulate.engine.workload import SimRequest, Workload
from router.config.schema import AdmissionSettings
from router.core.admission.hold_back import TICK_S
from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplicaReady
from router.core.placement.policies import Policy
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Deferred, EndReason, Shed

HOLD_S = AdmissionSettings().defer_max_s
BUSY_UNITS = 1.0
"""Mean backlog at which a fleet begins to be busy (Market.backlog); below it no request should be deferred."""
ANSWER_KEY = 1 << 63
"""First key of answers' blocks, which no prompt uses again."""
ANSWER_KEYS = 1 << 20
"""Size of the range of one answer's keys. It is the same for all, so that events of one answer do not reveal another
answer's length."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request under way, and later its outcome."""

    turn: SimRequest
    due_s: float
    router: int
    user: Iterator[SimRequest] | None
    replay: bool
    """True if the same prompt was sent before in this run."""
    lease: Lease | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    cached_tokens: int = 0
    prefill_cached_tokens: int = -1
    """Cached tokens that the prefill stage found; -1 without one."""
    failure: str = ""
    tried: tuple[str, ...] = ()
    tries: int = 1
    """The number of this try of its client."""
    asked_s: float = 0.0
    """Time at which the try under way began."""
    waited_s: float = 0.0
    """Time for which earlier tries were deferred."""
    held: bool = False
    held_while_idle: bool = False
    """`held`: it was deferred at least once. `held_while_idle`: it was deferred while the fleet's mean backlog was
    below one unit."""


@dataclass(slots=True)
class Result:
    """Outcome of a run."""

    sent: list[SimulatedRequest]
    duration_s: float
    computed_tokens: dict[str, int]
    preemptions: int = 0
    events: int = 0


def limits_of(workload: Workload, setting: ClusterSpec) -> Callable[[SimRequest], int | None]:
    """Return the `max_tokens` of a turn's request; with foreknowledge the length of its answer."""
    if setting.foreknowledge:
        return lambda turn: turn.output_tokens
    limits, longest_tokens = setting.answer_limits, workload.longest_answer_tokens
    return lambda turn: answer_limit(limits, turn.session, longest_tokens)


class Simulation:
    """One run of one workload under one policy."""

    def __init__(self, workload: Workload, setting: ClusterSpec, policy: Callable[[], Policy]) -> None:
        self.workload, self.setting, self.now_s = workload, setting, 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = count()
        self._sent: list[SimulatedRequest] = []
        self._open: dict[int, SimulatedRequest] = {}
        self._seen: set[object] = set()
        self._gathered: dict[int, int] = {}  # request -> cached tokens, of answers that wait in a proxy
        self._answer_keys = count(ANSWER_KEY, ANSWER_KEYS)
        self._left = self._budget = workload.request_count
        self._sessions = iter(workload.sessions)
        knowing, unseen = setting.grade != "none", setting.unseen
        tiers, limit_of = setting.tier_told, limits_of(workload, setting)
        self.placers = [
            Placer(policy, knowing=knowing, unseen=unseen, tiers=tiers, limit_of=limit_of)
            for _ in range(setting.routers)
        ]
        self._cluster = VirtualCluster(
            setting, workload.block_tokens, self, self.placers, self._on_step, self._on_replica_lost
        )
        self.replicas = self._cluster.replicas
        self.channel: Channel | None = None
        if setting.share_delay_s is not None and setting.routers > 1:
            self.channel = Channel(setting, self.placers, self.call_at, lambda: self.now_s)
        self._wire: NetworkDelay | None = None
        if setting.wire_s:
            self._wire = NetworkDelay(setting.wire_s, workload.mean_prompt_tokens, setting.wire_seed)

    @property
    def sent_tokens(self) -> int:
        """Tokens that replicas sent each other."""
        return self._cluster.peers.sent_tokens if self._cluster.peers is not None else 0

    def run(self) -> Result:
        """Send all requests and wait for all answers."""
        for placer in self.placers:
            placer.tell(self.replicas, self.workload, self.placers[0])
        self._cluster.begin()
        if self.channel is not None:
            self.channel.begin()
        self._begin_clients()
        heap = self._heap
        while heap and self._left:
            self.now_s, _, act, argument = heappop(heap)
            act(argument)
        computed = {name: replica.computed_tokens for name, replica in self.replicas.items()}
        preemptions = sum(replica.preemptions for replica in self.replicas.values())
        return Result(self._sent, self.now_s, computed, preemptions, next(self._count))

    def call_at(self, when_s: float, act: Callable[[Any], None], argument: Any = None) -> None:  # noqa: ANN401 - of any act
        """Call `act(argument)` at a virtual time."""
        heappush(self._heap, (when_s, next(self._count), act, argument))

    # -- clients ---------------------------------------------------------------------------------------------------

    def _begin_clients(self) -> None:
        workload = self.workload
        if workload.open:
            for (turn,) in workload.sessions:
                self.call_at(turn.at_s, self._arrive, (turn, None))
            return
        rng = random.Random(self.setting.seed)
        for _ in range(workload.active):
            self.call_at(rng.uniform(0, workload.ramp_s), self._next_session)

    def _next_session(self, _: None) -> None:
        session = next(self._sessions, None)
        if session is not None:
            self._next_turn(iter(session))

    def _next_turn(self, user: Iterator[SimRequest]) -> None:
        turn = next(user, None)
        if turn is None:
            self._next_session(None)
        elif self._budget:
            self._budget -= 1
            self.call_at(self.now_s + min(turn.think_s, self.workload.think_max_s), self._arrive, (turn, user))

    # -- one request ---------------------------------------------------------------------------------------------

    def _arrive(self, what: tuple[SimRequest, Iterator[SimRequest] | None]) -> None:
        turn, user = what
        key = turn.request.prompt_key()
        replay = key in self._seen
        self._seen.add(key)
        number = len(self._sent)
        sent = SimulatedRequest(turn, self.now_s, number % self.setting.routers, user, replay)
        self._sent.append(sent)
        self._open[number] = sent
        self._ask(number, sent)

    def _ask(self, number: int, sent: SimulatedRequest) -> None:
        """Start a try of its client."""
        setting = self.setting
        self.call_at(self.now_s + setting.timeout_s, self._give_up, (number, sent.tries))
        if setting.patience_s is not None:
            self.call_at(self.now_s + setting.patience_s, self._lose_patience, (number, sent.tries))
        placer = self.placers[sent.router]
        sent.waited_s = placer.returning.redeem(number, self.now_s)
        sent.asked_s = self.now_s
        self._place(number, sent, may_hold_back=not placer.holding.full and sent.waited_s < HOLD_S)

    def _place(self, number: int, sent: SimulatedRequest, *, may_hold_back: bool = False) -> None:
        """Place a request, or defer it if `may_hold_back`."""
        turn, placer = sent.turn, self.placers[sent.router]
        while True:
            tokens = self._tokens(turn) if self.setting.grade == "exact" else None
            try:
                lease = placer.place(turn, self.now_s, frozenset(sent.tried), tokens, may_hold_back=may_hold_back)
            except Deferred:
                sent.held = True
                sent.held_while_idle = sent.held_while_idle or placer.heard.backlog < BUSY_UNITS
                self._hold(number, placer)
                return
            except (NoReplicaReady, Shed) as error:
                self._end(number, sent, "rejected" if isinstance(error, Shed) else "none_ready")
                return
            placer.holding.remove(number)
            sent.lease, may_hold_back = lease, False
            replica = self.replicas[lease.replica]
            if replica.up:
                break
            placer.on_connection_refused(lease.replica)
            if not self._retry(sent, EndReason.UNREACHED):
                self._end(number, sent, "unreached")
                return
        machine, length = replica.machine, turn.prompt_tokens
        way_s = machine.far_s + machine.hop.request_delay_s(length)
        if self._wire is not None:
            way_s += self._wire.delay_s(length)
        if way_s:
            self.call_at(self.now_s + way_s, self._reach, (number, sent, lease))
        else:
            self._submit(number, sent, replica)

    # -- deferred requests, as in router/control/admission_controller.py
    # ----------------------------------------------------------------

    def _hold(self, number: int, placer: Placer) -> None:
        if number in placer.holding:
            return
        if not placer.holding:
            self.call_at(self.now_s + TICK_S, self._try_held, placer)
        sent = self._open[number]
        placer.holding.add(number, self.now_s - sent.waited_s)

    def _try_held(self, placer: Placer) -> None:
        for number in placer.holding.over(self.now_s, HOLD_S):
            self._place(number, self._open[number])
        for number in placer.holding.next_few():
            self._place(number, self._open[number], may_hold_back=True)
        if placer.holding:
            self.call_at(self.now_s + TICK_S, self._try_held, placer)

    def _reach(self, what: tuple[int, SimulatedRequest, Lease]) -> None:
        """Submit the request to its replica, unless it was given up or sent to another one on the way."""
        number, sent, lease = what
        if number not in self._open or sent.lease is not lease:
            return
        replica = self.replicas[lease.replica]
        if replica.up:
            self._submit(number, sent, replica)
        elif self._retry(sent, EndReason.UNREACHED):
            self._place(number, sent)
        else:
            self._end(number, sent, "unreached")

    def _submit(self, number: int, sent: SimulatedRequest, replica: VirtualReplica) -> None:
        try:
            pull = sent.lease.receipt.pull if sent.lease is not None else None
            replica.submit(self._request(number, sent.turn, pull.address if pull is not None else ""), self.now_s)
        except RequestRefused:
            if sent.lease is not None:
                placer = self.placers[sent.router]
                placer.finish(sent.turn, sent.lease, EndReason.REFUSED_BY_ENGINE, None, self.now_s)
            self._end(number, sent, "refused")

    def _tokens(self, turn: SimRequest) -> TokenPrompt:
        """Return the token prompt of a turn: keys are given, so only the number of ids matters."""
        keys = {self.workload.block_tokens: turn.engine_keys.tolist()}
        return TokenPrompt(bytes(BYTES_PER_TOKEN * turn.prompt_tokens), "", b"", keys)

    def _retry(self, sent: SimulatedRequest, ending: EndReason) -> bool:
        """Give the lease back as failed. True if there is another try."""
        lease = sent.lease
        if lease is None:
            return False
        self.placers[sent.router].finish(sent.turn, lease, ending, None, self.now_s)
        sent.tried += (lease.replica,)
        sent.lease = None
        return len(sent.tried) < 2 and sent.ttft_s is None

    def _request(self, number: int, turn: SimRequest, source: str = "") -> EngineRequest:
        size = self.workload.block_tokens
        answer = (turn.prompt_tokens + turn.output_tokens) // size - turn.prompt_tokens // size
        first = next(self._answer_keys)
        keys = [*turn.engine_keys, *range(first, first + answer)]
        return EngineRequest(number, turn.prompt_tokens, turn.output_tokens, keys, turn, source)

    def _on_step(self, replica: VirtualReplica, outcome: Outcome, now_s: float) -> None:
        """Deliver the outcome of a step to the router, at once or after the network delay."""
        machine = replica.machine
        if machine.hop.gathers:
            outcome = self._gather(outcome)
        if not machine.reply_s:
            self._deliver(outcome, now_s)
            return
        leases = {number: self._open[number].lease for number in [*dict(outcome.first), *outcome.finished]}
        if leases:
            self.call_at(now_s + machine.reply_s, self._deliver_late, (outcome, leases))

    def _gather(self, outcome: Outcome) -> Outcome:
        """Return the outcome with first tokens only of answers that are complete, as a proxy that gathers them."""
        self._gathered.update(outcome.first)
        finished = outcome.finished
        return Outcome([], [(n, self._gathered.pop(n)) for n in finished if n in self._gathered], finished, [])

    def _deliver_late(self, what: tuple[Outcome, dict[int, Lease | None]]) -> None:
        """Deliver the outcome after the delay, without requests that were given up in the meantime."""
        outcome, leases = what
        there = {n for n, lease in leases.items() if n in self._open and self._open[n].lease is lease}
        first = [each for each in outcome.first if each[0] in there]
        self._deliver(Outcome([], first, [n for n in outcome.finished if n in there], []), self.now_s)

    def _deliver(self, outcome: Outcome, now_s: float) -> None:
        for number, cached_tokens in outcome.first:
            sent = self._open[number]
            sent.ttft_s, sent.cached_tokens = now_s - sent.due_s, cached_tokens
            if sent.lease is not None:
                self.placers[sent.router].first_token(sent.turn, sent.lease, now_s)
        for number in outcome.finished:
            sent = self._open[number]
            if sent.lease is not None:
                self.placers[sent.router].finish(sent.turn, sent.lease, EndReason.OK, sent.cached_tokens, now_s)
            self._end(number, sent, "")

    def _lose_patience(self, what: tuple[int, int]) -> None:
        """Apply a read timeout: a client that has had a token receives data at every step and keeps waiting."""
        sent = self._open.get(what[0])
        if sent is not None and sent.ttft_s is None:
            self._give_up(what)

    def _give_up(self, what: tuple[int, int]) -> None:
        """End a try of the client. While it has tries left and no token, it returns as a new request."""
        number, tries = what
        sent = self._open.get(number)
        if sent is None or sent.tries != tries:
            return
        if sent.lease is not None:
            self.replicas[sent.lease.replica].cancel(number)
            self.placers[sent.router].finish(sent.turn, sent.lease, EndReason.CLIENT_LEFT, None, self.now_s)
        if sent.ttft_s is not None or tries > self.setting.retries:
            self._end(number, sent, "timeout")
            return
        placer = self.placers[sent.router]
        if placer.holding.remove(number):
            placer.returning.remember(number, self.now_s - sent.asked_s + sent.waited_s, self.now_s)
        sent.lease, sent.tried, sent.tries = None, (), tries + 1
        self._ask(number, sent)

    def _end(self, number: int, sent: SimulatedRequest, failure: str) -> None:
        del self._open[number]
        self.placers[sent.router].holding.remove(number)
        sent.failure = failure
        sent.e2e_s = self.now_s - sent.due_s
        self._left -= 1
        if sent.user is not None:
            self._next_turn(sent.user)

    def _on_replica_lost(self, name: str) -> None:
        """Fail or retry all requests of a replica that died."""
        lost = [(n, s) for n, s in self._open.items() if s.lease is not None and s.lease.replica == name]
        for number, sent in lost:
            if self._retry(sent, EndReason.FAILED):
                self._place(number, sent)
            else:
                self._end(number, sent, "broken")
