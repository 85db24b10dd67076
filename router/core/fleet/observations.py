"""Observations of engines, and their effects on all state of a replica.

Discovery provides the set of replicas, and probes their health and models. Metrics give the size of their caches, and
events the cached blocks. If a replica joins, leaves or loses its cache, this module updates the registry, the estimate
of its cache and the state of its events together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.core.cache_state.event_index import EventIndex
from router.core.cache_state.prefix_index import PrefixIndex
from router.core.fleet.engine_capacity import with_event_block
from router.core.fleet.expected_models import ExpectedModels
from router.core.fleet.member import ReplicaState
from router.core.fleet.models import Models
from router.core.fleet.registry import Fleet
from router.core.fleet.restart_detection import PageChange, strip_counters
from router.core.prompts.block_keys import BLOCK_BYTES
from router.core.types.placements import Confidence
from router.core.types.replicas import Load, Replica, ServedModel, Sleep

BYTES_PER_TOKEN = 4.0  # assumed for a replica with unknown models


class Observations:
    """Writes observations to the state that placement reads."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        default_cache_blocks: int,
        stored_blocks_max: int,
        stored_bytes_max: int,
        repeats: bool,
        tiers: bool,
        graded: Callable[[str, Confidence, str], None],
        resync: Callable[[str], None],
        suspect: Callable[[str], None],
        cleared: Callable[[str], None],
        several: Callable[[str], None] = lambda _: None,
        expected: ExpectedModels | None = None,
    ) -> None:
        """Parameters are those of Router. `default_cache_blocks` is the assumed size of a cache of unknown size."""
        self._index = index
        self._blocks_max_default = default_cache_blocks
        self._tell_graded = graded
        self._tell_cleared = cleared
        self._suspect = suspect
        self._tell_several = several
        self.fleet = Fleet()
        self.knowledge = EventIndex(
            blocks_max=stored_blocks_max,
            aside_max=stored_blocks_max // 8,
            names_max=stored_blocks_max // 8,
            graded=self._on_grade_changed,
            resync=resync,
            restarted=self._clear_index,
            bytes_max=stored_bytes_max,
            repeats=repeats,
            tiers=tiers,
        )
        self.models = Models(self.fleet, self.knowledge, expected or ExpectedModels())

    def replace(self, replicas: Iterable[Replica]) -> tuple[list[str], list[str]]:
        """Take discovery's complete set; return the ids that joined and the ids that left.

        The state of a replica that left is dropped, though its open leases may still finish. An engine that was
        replaced at its address has left, and another has joined: its id is in both lists.
        """
        before = dict(self.fleet.members)
        joined, left = self.fleet.replace(replicas)
        self.models.invalidate_caches()
        if left:
            self.models.on_replicas_removed([before[id_] for id_ in left])
        for id_ in left:
            self._index.remove(id_)
            self.knowledge.forget(id_)
            self.models.names.forget(id_)
        for id_ in joined:
            self._index.add(id_, self._blocks_max_default)
            self.models.update_tokenizability(self.fleet.members[id_])
        return joined, left

    def observe_models(self, id_: str, models: Iterable[ServedModel]) -> None:
        """Record the models that a replica serves now."""
        member = self.fleet.members.get(id_)
        if member and self.fleet.observe_models(member, models):
            self.models.invalidate_caches()
            self.models.expected.came(member.models)
            self.models.names.observe(id_, member.models.values())
            self.knowledge.tiered.serves(id_, " ".join(sorted(m.name for m in member.models.values() if not m.parent)))
            self.models.update_tokenizability(member)

    def lacks_model(self, id_: str, model: str) -> bool:
        """Remove a model from a replica's list that its server does not serve on any rank. Return True if that is a
        change. The model counts again as soon as a later list contains it."""
        news = False
        for rank in self.fleet.same_server(id_):
            served = self.fleet.members[rank].models
            if model in served:
                self.observe_models(rank, [row for row in served.values() if row.name != model])
                news = True
        return news

    def observe_load(self, id_: str, load: Load, now_s: float | None = None) -> None:
        """Take the load of a probe. It determines the size of our estimate of the replica's cache: the engine's
        capacity, times the share of this router and of routers that report their work. With `now_s`, counters that
        moved are a sign of life."""
        member = self.fleet.members.get(id_)
        if member is None:
            return
        if load is not member.load:  # a probe without a result leaves the load unchanged
            load = self._compare_page(member, load, 0.0 if now_s is None else now_s)
        load = with_event_block(load, *self.knowledge.event_blocks(id_))
        member.observe_load(load, now_s)
        if load.kv_tokens_max:
            learned = [self.models.tokens(name) for name in member.models]
            ratio = max((tokens.bytes_per_token * tokens.pool_ratio for tokens in learned), default=BYTES_PER_TOKEN)
            blocks_max = load.kv_tokens_max * member.counters.known_share * ratio / BLOCK_BYTES
            self._index.resize(id_, max(1, int(blocks_max)))

    def forget(self, id_: str) -> None:
        """Clear the state of a replica's cache, which is empty after a restart. Its event stream must be verified
        again."""
        member = self.fleet.members.get(id_)
        if member is not None:
            member.counters.page_source.on_engine_restarted()
            self._on_engine_restarted(id_)

    def check(self, now_s: float) -> None:
        """Compare events with the engines' counters, and update the fleet's share of known work; must be called about
        once a second."""
        self.fleet.observe_share()
        self.fleet.observe_under_way(now_s)
        self.models.expected.age(now_s)
        for member in self.fleet.members.values():
            self.knowledge.on_probe(member.id, member.load, now_s)

    def alive(self, id_: str, now_s: float) -> None:
        """Record a part of an answer from a replica as a sign of life."""
        member = self.fleet.members.get(id_)
        if member is not None:
            member.evidence.alive(now_s)

    def _compare_page(self, member: ReplicaState, load: Load, now_s: float) -> Load:
        """Compare a page with the previous one, and return the load without unusable counters."""
        counters, sleep = member.counters, load.sleep
        change = counters.page_source.compare(load, now_s)
        if change is PageChange.RESTART:
            self._on_engine_restarted(member.id)
        elif change is PageChange.SEVERAL:
            counters.forget()
            self._tell_several(member.id)
        if sleep is not member.load.sleep and Sleep.ASLEEP in (sleep, member.load.sleep):
            self._clear_cache(member.id, now_s)
        return strip_counters(load) if counters.page_source.several else load

    def _on_engine_restarted(self, id_: str) -> None:
        self._clear_index(id_)
        self._suspect(id_)
        for observer in self.fleet.observers:
            observer.on_engine_restarted(id_)

    def _clear_cache(self, id_: str, now_s: float) -> None:
        """Clear the cache of a process that keeps running. Its event stream reports that only with its next step."""
        self._clear_index(id_)
        self.knowledge.clear_blocks(id_, now_s)

    def _clear_index(self, id_: str) -> None:
        if self.fleet.clear(id_):
            self._index.clear(id_)
            self._tell_cleared(id_)

    def _on_grade_changed(self, id_: str, grade: Confidence, why: str) -> None:
        member = self.fleet.members.get(id_)
        if member is not None:
            member.grade = grade
            self._tell_graded(id_, grade, why)
