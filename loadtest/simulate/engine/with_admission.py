"""A world with the product's admission: windows, the fair queue, deadlines, deferral.

Other worlds leave the queue out, because they compare placements. This one uses the product's own
`AdmissionController`, with its default settings except for those that a run changes. Deadlines are given by the number
of a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.placer import Placer
from loadtest.simulate.engine.workload import SimRequest, Workload
from loadtest.simulate.engine.world import BUSY_UNITS, SimulatedRequest, Simulation, limits_of
from router.config.schema import AdmissionSettings
from router.control.admission_controller import AdmissionController
from router.control.response_owners import ResponseOwners
from router.core.admission.hold_back import TICK_S
from router.core.admission.queue import Ticket
from router.core.estimators import model_speeds
from router.core.fleet.lease import Lease
from router.core.placement.policies import Policy
from router.core.types.placements import EndReason, Outcome, Shed, Usage

RESPONSE_IDS_MAX = 1
STALE_S = 3.0


class AdmittingPlacer(Placer):
    """A router that queues requests. `clock` gives simulated seconds."""

    def __init__(
        self,
        make: Callable[[], Policy],
        clock: Callable[[], float],
        limits: AdmissionSettings,
        limit_of: Callable[[SimRequest], int | None],
    ) -> None:
        super().__init__(make, limit_of=limit_of)
        self.sheds: list[str] = []
        self.admitter = AdmissionController(
            self.router,
            ResponseOwners(RESPONSE_IDS_MAX),
            limits,
            stale_s=STALE_S,
            clock=clock,
            shed=lambda code, *_: self.sheds.append(code),
        )

    def first_token(self, turn: SimRequest, lease: Lease, now_s: float) -> None:
        """Record the first token of an answer, after which another prompt may begin."""
        self.admitter.first_token(lease, now_s)

    def has_idle(self, waiting_tokens: int, now_s: float) -> bool:
        """True if a replica with space in its window has no waiting prefill, and the mean backlog is below one unit.
        The backlog includes prompts that wait here."""
        window, members = self.admitter.window, self.router.members
        if all(m.queue.pending_ms(now_s) or m.open_leases >= window(m.id) for m in members):
            return False
        _, unit_ms = members[0].speeds.units()
        units = sum(m.queue.pending_ms(now_s) for m in members) / unit_ms + waiting_tokens / model_speeds.BACKLOG_TOKENS
        return units / len(members) < BUSY_UNITS

    def finish(
        self, turn: SimRequest, lease: Lease, ending: EndReason, cached_tokens: int | None, now_s: float
    ) -> None:
        """End an attempt, which frees space for another request."""
        usage = Usage(turn.prompt_tokens, turn.output_tokens, cached_tokens) if ending is EndReason.OK else None
        self.admitter.finish(lease, Outcome(ending, usage), now_s)


class SimulationWithAdmission(Simulation):
    """A world with one router and no faults. `within_s` gives the deadline of a turn by its number, in seconds from its
    arrival. `tenants` gives its tenant, which is "" for all others."""

    def __init__(
        self,
        workload: Workload,
        setting: ClusterSpec,
        policy: Callable[[], Policy],
        within_s: Mapping[int, float],
        limits: AdmissionSettings | None = None,
        *,
        tenants: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(workload, setting, policy)
        placer = self._admitting = AdmittingPlacer(
            policy, lambda: self.now_s, limits or AdmissionSettings(), limits_of(workload, setting)
        )
        self.placers[:] = [placer]
        self._within_s, self._tenants = within_s, tenants or {}
        self._tickets: dict[int, Ticket] = {}
        self.call_at(TICK_S, self._tick)

    def _tick(self, _: None) -> None:
        self._admitting.admitter.tick()
        self._look_at_waiting(self._tickets)
        self.call_at(self.now_s + TICK_S, self._tick)

    def _look_at_waiting(self, numbers: Iterable[int]) -> None:
        """Mark these requests as held, and as held while idle if a replica is idle now."""
        waiting_tokens = sum(self._open[number].turn.prompt_tokens for number in self._tickets)
        idle = self._admitting.has_idle(waiting_tokens, self.now_s)
        for number in numbers:
            sent = self._open[number]
            sent.held, sent.held_while_idle = True, sent.held_while_idle or idle

    def _place(self, number: int, sent: SimulatedRequest, *, may_hold_back: bool = False) -> None:
        placer = self._admitting
        wanted = placer.make_placement_request(sent.turn, None)
        wanted.tenant = self._tenants.get(sent.turn.number, "")
        if sent.turn.number in self._within_s:
            wanted.due_s = sent.due_s + self._within_s[sent.turn.number]
        try:
            answer = placer.admitter.admit(wanted, frozenset(), lambda answer: self._on_admission(number, sent, answer))
        except Shed as shed:
            self._on_admission(number, sent, shed)
            return
        if isinstance(answer, Ticket):
            self._look_at_waiting([number])
            self._tickets[number] = answer
        else:
            self._on_admission(number, sent, answer)

    def _on_admission(self, number: int, sent: SimulatedRequest, answer: Lease | Exception) -> None:
        self._tickets.pop(number, None)
        if isinstance(answer, Lease):
            sent.lease = answer
            self._submit(number, sent, self.replicas[answer.replica])
        else:
            self._end(number, sent, "rejected")

    def _give_up(self, what: tuple[int, int]) -> None:
        ticket = self._tickets.pop(what[0], None)
        if ticket is not None:
            self._admitting.admitter.cancel(ticket)
        super()._give_up(what)
