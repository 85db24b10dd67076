"""Router of the simulated replicas: the real `router.core`, called as by the proxy.

Every row is a Router, and rows differ only in the policy. A policy of the product chooses only from priced candidates.
A *rule* restates the policy of another router. It may also read the turn's text, the router's own books (open leases,
probes) and the clock. It receives them before each choice, so that its formula can be written as published.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from loadtest.simulate.engine.kv_events import Follower, Publisher
from loadtest.simulate.engine.replicas import VirtualReplica
from loadtest.simulate.engine.workload import MODEL, SimRequest, Workload
from router.config.schema import ExtProcSettings
from router.core.admission.hold_back import DeferredQueue
from router.core.admission.wait_credit import WaitCredit
from router.core.disagg.disagg_policy import DisaggPolicy
from router.core.disagg.pair_disaggregator import PairDisaggregator
from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import Policy, PullPolicy, RingOrdered
from router.core.placement.router import Router
from router.core.prompts.block_keys import Chain
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.disagg_types import KvConnector, Role
from router.core.types.placements import Candidate, EndReason, Outcome, PlacementContext, PolicyDecision, Usage
from router.core.types.replicas import Load, Replica, ServedModel
from router.core.types.requests import Prompt, RequestSpec

INDEX_BYTES_MAX = 1 << 30
MEMORY_MAX = 100_000
BLOCKS_MAX_DEFAULT = 8_192
STORED_BLOCKS_MAX = 1 << 17
"""Limit of blocks kept of one replica's events: two million tokens. The product's default also keeps names of blocks
evicted long ago."""
SAMPLED = ExtProcSettings().response_sample_ratio
SHOWN_MIN = 64
"""Number of answers that all reach the router; of later ones only a sample does, as at the picker
(`router.extproc.response_tracker`)."""


@dataclass(slots=True)
class SimView:
    """Input of a rule besides its candidates."""

    router: Router
    turn: SimRequest
    now_s: float


@runtime_checkable
class PolicyUnderTest(Protocol):
    """A Policy with more input; `see` comes before each `choose`, `placed` after it, `ended` with the answer."""

    def see(self, sight: SimView) -> None:
        """Receive the input of the next `choose`."""

    def on_placed(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Record that the request was sent to this replica."""

    def first_token(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Record the end of the request's prefill."""

    def on_ended(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Record the end of the request's answer, after success or failure."""


@runtime_checkable
class OraclePolicy(Protocol):
    """A SimPolicy that receives facts before a run that no router can see: for bounds, and for offline fits."""

    def prepare_run(self, replicas: Mapping[str, VirtualReplica], workload: Workload, first: Policy) -> None:
        """Receive all replicas and all requests of the run; `first` is the policy of the first router."""


class RecordingPolicy:
    """Policy of the router that records the fleet's backlog at the last choice."""

    def __init__(self, policy: Policy) -> None:
        self.name, self.cache_aware = policy.name, policy.cache_aware
        self.backlog = 0.0
        self._policy = policy
        if isinstance(policy, RingOrdered):
            # With it, the router offers this wrapper as few candidates as it offers the policy.
            self.order_by_ring = policy.order_by_ring
        if isinstance(policy, PullPolicy):
            self.pulls = policy.pulls
        if isinstance(policy, DisaggPolicy):
            self.split, self.may_split = policy.split, policy.may_split

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Choose by the wrapped policy."""
        self.backlog = market.backlog
        return self._policy.choose(market, candidates)


class Placer:
    """One router with one policy.

    - `make`: called once, because a policy has state
    - `knowing`: if False, the router assumes that no replica caches prompts; a router that `follow`s events uses those
    - `unseen`: if True, only a sample of the answers reaches the router, and of the others only their end
    - `tiers`: if False, only blocks on GPUs count
    - `limit_of`: the `max_tokens` that a turn's client sends
    """

    def __init__(
        self,
        make: Callable[[], Policy],
        *,
        knowing: bool = True,
        unseen: bool = False,
        tiers: bool = True,
        limit_of: Callable[[SimRequest], int | None] = lambda _: None,
    ) -> None:
        self.policy = make()
        self._rule: PolicyUnderTest | None = self.policy if isinstance(self.policy, PolicyUnderTest) else None
        self._knowing, self._unseen, self._limit_of = knowing, unseen, limit_of
        self._chances = random.Random(1)
        self._shown = 0
        self._past = set[int]()  # leases of answers that bypass the router
        self.heard = RecordingPolicy(self.policy)
        self.router = Router(
            self.heard,
            index_bytes_max=INDEX_BYTES_MAX,
            remembered_prompts_max=MEMORY_MAX,
            default_cache_blocks=BLOCKS_MAX_DEFAULT,
            stored_blocks_max=STORED_BLOCKS_MAX,
            tiers=tiers,
            disaggregation=PairDisaggregator,
            resync=lambda name: self._followers[name].resync("distrusted"),
            suspect=self._suspect,
        )
        self._followers: dict[str, Follower] = {}
        self.holding: DeferredQueue[int] = DeferredQueue()
        self.returning = WaitCredit()
        self._turns: dict[int, SimRequest] = {}
        self._replicas: list[str] = []
        self._models: Mapping[str, str] = {}
        self._split = False

    def tell(self, replicas: Mapping[str, VirtualReplica], workload: Workload, first: Placer) -> None:
        """Give the rule the facts of the run before it begins; most rules use none."""
        if isinstance(self.policy, OraclePolicy):
            self.policy.prepare_run(replicas, workload, first.policy)

    def join(
        self, names: Iterable[str], roles: Mapping[str, Role] | None = None, models: Mapping[str, str] | None = None
    ) -> None:
        """Set the whole fleet, as discovery reports it, with its `roles` and the `models` that are not MODEL. New
        replicas are healthy."""
        before, self._replicas = set(self._replicas), list(names)
        roles, self._models = roles or {}, models or {}
        self.router.replace([Replica(name, role=roles.get(name, Role.BOTH)) for name in self._replicas])
        for name in self._replicas:
            if name not in before:
                self.router.observations.observe_models(
                    name, [ServedModel(self._models.get(name, MODEL), owned_by="vllm")]
                )
                self.router.fleet.observe_health(name, ok=True)

    def pair(self, names: Iterable[str], handshake: KvConnector, now_s: float) -> None:
        """Record the KV connector of these replicas, and every pair as warm."""
        for name in names:
            self.router.disaggregator.set_connector(name, handshake, name)
        while pairs := self.router.disaggregator.pairs_to_warm(now_s):
            for prefill, decode in pairs:
                self.router.disaggregator.pair_warmed(prefill, decode, ok=True, now_s=now_s)
        self._split = True

    def finish_prefill(
        self, turn: SimRequest, lease: Lease, ending: EndReason, cached_tokens: int | None, now_s: float
    ) -> None:
        """Record the end of a prefill stage; `cached_tokens` is the count of its engine."""
        usage = Usage(turn.prompt_tokens, 1, cached_tokens) if ending is EndReason.OK else None
        self.router.finish_prefill(lease, Outcome(ending, usage), now_s)

    def follow(self, publisher: Publisher) -> None:
        """Receive a replica's events from now on; prompts come with their tokens."""
        self.router.models.observe_tokens(self._models.get(publisher.name, MODEL), "")
        follower = self._followers[publisher.name] = Follower(publisher, self.router)
        publisher.connect(follower)

    def _suspect(self, name: str) -> None:
        if name in self._followers:
            self._followers[name].suspect("connection refused")

    def on_connection_refused(self, name: str) -> None:
        """Record a refused connection, which proves that the engine is gone."""
        if self.router.fleet.observe_health(name, False, "connection refused", proof=True):
            self.router.observations.forget(name)

    def probe(self, name: str, load: Load | None, now_s: float) -> None:
        """Record the result of a probe; None if it failed."""
        self.router.fleet.observe_health(name, load is not None, "" if load else "refused", silent=load is None)
        if load is not None:
            known = load if self._knowing else replace(load, prefix_caching=False)
            self.router.observations.observe_load(name, known, now_s)

    def make_placement_request(self, turn: SimRequest, tokens: TokenPrompt | None) -> PlacementRequest:
        """Return the placement request of a turn."""
        prompt = Prompt(text=b"", first_user_end=turn.first_user_bytes, skipped_bytes=4 * turn.prompt_tokens)
        ask = RequestSpec(turn.model, prompt, stream=True, output_tokens_max=self._limit_of(turn))
        chain = Chain(turn.chain.tolist(), turn.chain_root, turn.end_key, (), turn.first_user_key)
        key = format(turn.first_user_key, "x")
        return PlacementRequest(ask, turn.model, chain, key, tokens, conversation=turn.kin, may_split=self._split)

    def place(
        self,
        turn: SimRequest,
        now_s: float,
        exclude: frozenset[str],
        tokens: TokenPrompt | None,
        *,
        may_hold_back: bool,
    ) -> Lease:
        """Place the turn. Raises NoReplicaReady, Shed; also Deferred if `may_hold_back` and the router defers it."""
        wanted = self.make_placement_request(turn, tokens)
        if self._rule is not None:
            self._rule.see(SimView(self.router, turn, now_s))
        wanted.response_bypasses_router = (
            self._unseen and self._shown >= SHOWN_MIN and self._chances.random() >= SAMPLED
        )
        lease = self.router.route(wanted, now_s, exclude=exclude, may_hold_back=may_hold_back)
        if wanted.response_bypasses_router:
            self._past.add(lease.id)
        self._shown += not wanted.response_bypasses_router
        if self._rule is not None:
            self._rule.on_placed(turn, lease.replica, now_s)
        return lease

    def first_token(self, turn: SimRequest, lease: Lease, now_s: float) -> None:
        """Record the first body event of its stream."""
        if lease.id not in self._past:
            self.router.first_token(lease, now_s)
        if self._rule is not None:
            self._rule.first_token(turn, lease.replica, now_s)

    def finish(
        self, turn: SimRequest, lease: Lease, ending: EndReason, cached_tokens: int | None, now_s: float
    ) -> None:
        """Record the end of an attempt. `cached_tokens` is the engine's count, or None if the engine does not report
        it."""
        unseen, usage = lease.id in self._past, None
        if ending is EndReason.OK and not unseen:
            usage = Usage(turn.prompt_tokens, turn.output_tokens, cached_tokens)
        self._past.discard(lease.id)
        self.router.finish(lease, Outcome(ending, usage, unobserved=unseen), now_s)
        if self._rule is not None:
            self._rule.on_ended(turn, lease.replica, now_s)
