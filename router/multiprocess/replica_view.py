"""Worker's copy of the replicas: the hub's last view, and the ring for a lost hub.

Names of models are resolved by the view as the hub would (core/fleet/models.py). Without the hub requests go by the
consistent-hash ring with bounded load, over the replicas last known as ready and this worker's leases on them. So all
workers, and their hub before, send a conversation to the same replica while loads allow it.
"""

from __future__ import annotations

from collections import Counter

from router.core.fleet.expected_models import expected_base
from router.core.fleet.models import CONTEXT_TOKENS, NoReplicaReady, UnknownModel
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.ring import Ring, under_bound
from router.core.types.placements import Confidence, PlacementReason, Receipt
from router.core.types.replicas import Replica
from router.multiprocess.protocol import ReplicaView
from router.placement_api import TokenizationSpec

POLICY = "ring"
NOTHING = ReplicaView(ready=[], unready=(), default=None, tokens={}, ids=False)


class CachedReplicaView:
    """The hub's last view, without the replicas that refused a connection since."""

    def __init__(self) -> None:
        self.loads: Counter[str] = Counter()  # open leases of this worker, by replica
        self._ring = Ring()
        self.take(NOTHING)

    def take(self, view: ReplicaView) -> None:
        """Apply a new view."""
        self._view = view
        self._ready = dict(view.ready)
        self._learn()

    def drop(self, replica: str) -> None:
        """Remove a replica that refused a connection, until the next view."""
        if self._ready.pop(replica, None) is not None:
            self._learn()

    def _learn(self) -> None:
        self._serving: dict[str, list[str]] = {}
        for replica, models in self._ready.items():
            for model in models:
                self._serving.setdefault(model, []).append(replica)

    @property
    def hub(self) -> int:
        """Number of the hub that sent the view."""
        return self._view.hub

    @property
    def ids(self) -> bool:
        """True if the hub wants token ids."""
        return self._view.ids

    @property
    def follows(self) -> bool:
        """True if any prompt is wanted as token ids."""
        return bool(self._view.tokens)

    def engines(self, model: str) -> tuple[str, ...]:
        """Return the kinds of engines that serve the model."""
        return self._view.engines.get(model, ())

    def context_tokens(self, model: str | None) -> int:
        """Return the longest context that any replica has for the model."""
        return self._view.contexts.get(model or "", CONTEXT_TOKENS)

    def find_expected_base(self, model: str | None) -> str:
        """Return the expected base model of a name, or of a missing name; "" for any other name."""
        return expected_base(model, self._view.expected, self._view.adapting)

    def parent(self, model: str) -> str:
        """Return the base model of a LoRA adapter; "" for any other name."""
        return self._view.parents.get(model, "")

    def serves(self, model: str) -> bool:
        """True if a replica serves the model, ready or not."""
        return model in self._serving or model in self._view.unready

    def known_as(self, model: str) -> str:
        """Return the name with which chains of the model begin. Safe in any thread, because a view is never changed."""
        return self._view.names.get(model, model)

    def resolve(self, model: str | None) -> str:
        """Return the model meant. Raises UnknownModel, or NoReplicaReady if no replica is ready."""
        if model in self._serving:
            return model
        if not self._ready:
            raise NoReplicaReady
        if model is None:
            if self._view.default in self._serving:
                return self._view.default
        elif (
            model in self._view.unready
            or any(model in models for _, models in self._view.ready)
            or self.find_expected_base(model)
        ):
            raise NoReplicaReady
        raise UnknownModel(sorted(self._serving))

    @property
    def standing(self) -> str:
        """Text with the number of ready replicas, and the reasons why others are not."""
        return self._view.readiness_summary

    def token_view(self, model: str) -> TokenizationSpec | None:
        """Return the data needed to turn prompts of the model into token ids; None if token ids would not help
        placement."""
        return self._view.tokens.get(model)

    def has_other_ready(self, tried: frozenset[str]) -> bool:
        """True if a replica other than these is ready."""
        return any(replica not in tried for replica in self._ready)

    def ready_one(self) -> str | None:
        """Return the first of the replicas that are ready."""
        return next(iter(self._ready), None)

    def pick_by_ring(self, wanted: PlacementRequest, exclude: frozenset[str], owner: str | None) -> Receipt:
        """Place without the hub, and without disaggregated prefill. `owner` is the one replica that can answer. Raises
        NoReplicaReady."""
        serving = self._ready if wanted.model is None else self._serving.get(wanted.model, ())
        ids = [id_ for id_ in serving if id_ not in exclude and owner in (None, id_)]
        if owner is None:
            ids = [id_ for id_ in ids if id_ not in self._view.disagg_only]
            ids = [id_ for id_ in ids if id_ not in self._view.prefills] or ids
        if not ids:
            raise NoReplicaReady
        servers = {Replica(id_).url for id_ in exclude}
        ids = [id_ for id_ in ids if Replica(id_).url not in servers] or ids
        under = under_bound({id_: self.loads[id_] for id_ in ids}, 1)
        reason = PlacementReason.RETRY if exclude else PlacementReason.POLICY
        return Receipt(self._ring.pick(wanted.ring_key, ids, under), POLICY, reason, Confidence.ESTIMATED, 0, 0)
