"""Served models and their state: resolution of requested names, and usability of token ids for prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from router.core.cache_state.event_index import EventIndex
from router.core.estimators.token_ratio import ModelTokens
from router.core.fleet.expected_models import ExpectedModels
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.prompts.cache_identity import CacheIdentities
from router.core.types.placements import Confidence
from router.core.types.replicas import ServedModel

CONTEXT_TOKENS = 1 << 20  # assumed for an engine that does not report its context length
CONTEXT_TOKENS_MAX = 1 << 24  # limit on the context length that an engine reports
MODELS_MAX = 1_024  # models with learned token statistics
NOT_YET = "none of its prompts is tokenized yet"
NO_MODELS = "its models are unknown yet"


REASONS_MAX = 3  # reasons for unready replicas in a refusal's text


class NoReplicaReady(Exception):
    """No ready replica may take this request now."""


class UnknownModel(Exception):
    """Ready replicas exist, but none serves this model; `known` are the served models."""

    def __init__(self, known: list[str]) -> None:
        super().__init__("unknown model")
        self.known = known


class Models:
    """View of the fleet by model, with the statistics learned for each model."""

    def __init__(self, fleet: Fleet, knowledge: EventIndex, expected: ExpectedModels) -> None:
        self._fleet = fleet
        self.expected = expected  # models that may have no replica now
        self._knowledge = knowledge
        self.names = CacheIdentities()
        self._tokens: dict[str, ModelTokens] = {}
        self._engines: dict[str, frozenset[str]] = {}  # valid until replicas or their models change
        self._contexts: dict[str, int] = {}  # valid until replicas or their models change
        self._untokened: dict[str, str] = {}  # model -> reason why its prompts cannot be tokenized

    def resolve(self, model: str | None) -> str:
        """Return the model that a request names. Engines accept a request without a name if they serve a single model.

        Raises UnknownModel, or NoReplicaReady if no replica is ready.
        """
        if model is not None and self._fleet.list_serving(model):
            return model
        names = self._fleet.model_names()
        if not self._fleet.usable():
            raise NoReplicaReady
        if model is None:
            served = (m for member in self._fleet.usable() for m in member.models.values() if m.parent is None)
            bases = {m.name: m.root or m.name for m in served}
            if len(set(bases.values())) != 1:  # several names of one model are unambiguous
                raise UnknownModel(sorted(names))
            return min(bases)
        if any(model in member.models for member in self._fleet.members.values()):
            raise NoReplicaReady  # served by a replica that is not ready now
        if self.find_expected_base(model):
            raise NoReplicaReady  # all its replicas have left, or are yet to join
        raise UnknownModel(sorted(names))

    def find_expected_base(self, model: str | None) -> str:
        """Return the expected base model for a name, or for a request without one; "" for any other name."""
        return self.expected.find_base(model)

    def adapter(self, model: str) -> str:
        """Return the LoRA adapter that a model name stands for; "" for a base model."""
        return model if self.parent(model) else ""

    def parent(self, model: str) -> str:
        """Return the base model of a LoRA adapter; "" for any other name."""
        served = (member.models.get(model) for member in self._fleet.members.values())
        return next((each.parent for each in served if each is not None and each.parent), "")

    def engine(self, model: str) -> tuple[str, str, str]:
        """Return (base model, kind of engine, a ready replica that serves it)."""
        for member in self._fleet.list_serving(model):
            served = member.models[model]
            return served.parent or model, served.owned_by, member.id
        return model, "", ""

    def tokens(self, model: str) -> ModelTokens:
        """Return the token statistics of a model, which all of its names share."""
        model = self.names.cache_identity(model)
        known = self._tokens.get(model)
        if known is None:
            if len(self._tokens) >= MODELS_MAX:
                self._tokens.pop(next(iter(self._tokens)))
            known = self._tokens[model] = ModelTokens()
        return known

    def counts(self, models_max: int) -> list[tuple[str, tuple[float, ...]]]:
        """Return (name, token counts) of at most `models_max` models."""
        return [(name, tokens.counts) for name, tokens in islice(self._tokens.items(), models_max)]

    def engines(self, model: str) -> frozenset[str]:
        """Return the kinds of all engines that serve the model, ready or not."""
        known = self._engines.get(model)
        if known is None:
            served = (member.models.get(model) for member in self._fleet.members.values())
            known = frozenset(each.owned_by for each in served if each is not None)
            if known:  # names not served could be any text, and are not cached
                self._engines[model] = known
        return known

    def context_tokens(self, model: str | None) -> int:
        """Return the longest context of the model over all replicas, ready or not. A replica that reports none counts
        with CONTEXT_TOKENS. The result is at most CONTEXT_TOKENS_MAX."""
        known = self._contexts.get(model or "")
        if known is None:
            served = [each for member in self._fleet.members.values() if (each := member.models.get(model or ""))]
            known = longest_context(served)
            if served:  # names not served could be any text, and are not cached
                self._contexts[model or ""] = known
        return known

    def on_replicas_removed(self, members: Iterable[ReplicaState]) -> None:
        """Record that these members have left the fleet."""
        listed = {name for member in self._fleet.members.values() for name in member.models}
        for member in members:
            self.expected.on_replica_removed(member.models.values(), listed)

    def invalidate_caches(self) -> None:
        """Discard cached results after replicas joined, left, or changed their models."""
        self._engines.clear()
        self._contexts.clear()

    def find_known_name(self, model: str | None) -> str:
        """Return the name if a replica serves it, ready or not, else its expected base model. Any other text that a
        client may have sent is ""."""
        return model if model and self.engines(model) else self.find_expected_base(model)

    def readiness_summary(self, model: str = "") -> str:
        """Return the number of ready replicas and the most frequent reasons why others are not, as text for operators
        in a refusal. With a known name as `model`, the replicas are those that serve it."""
        fleet = self._fleet.members.values()
        if not fleet:
            return "no replica is known: set --replica URL, or check discovery"
        members = [member for member in fleet if not model or model in member.models]
        if not members:
            return f"no replica is known to serve '{model}'; {self.readiness_summary()}"
        ready = sum(member.ready for member in members)
        reasons = Counter(_unfit(member) for member in members if not member.ready).most_common(REASONS_MAX)
        counted = ", ".join(why if len(reasons) == 1 else f"{why} ({count})" for why, count in reasons)
        of = f" of '{model}'" if model else ""
        return f"{ready} of {len(members)} replicas{of} are ready" + (f": {counted}" if counted else "")

    # -- usability of events -------------------------------------------------------------------------------------

    def follows(self, model: str) -> bool:
        """True if token ids of a prompt for this model can be matched with events of a replica."""
        serving = self._fleet.list_serving(model)
        return not self._untokened.get(model, NOT_YET) and any(m.grade is not Confidence.ESTIMATED for m in serving)

    def list_event_models(self) -> list[str]:
        """Return the models of ready replicas with an event stream."""
        members = [m for m in self._fleet.ready() if self._knowledge.engine_blocks(m.id) is not None]
        return sorted({name for member in members for name in member.models})

    def observe_tokens(self, model: str, why: str) -> bool:
        """Record if prompts for `model` can be tokenized: `why` is the reason if not, or "". Return True if that is a
        change."""
        news = self._untokened.get(model, NOT_YET) != why
        if news:
            if model not in self._untokened and len(self._untokened) >= MODELS_MAX:
                self._untokened.pop(next(iter(self._untokened)))
            self._untokened[model] = why
            for member in self._fleet.members.values():
                if model in member.models:
                    self.update_tokenizability(member)
        return news

    def compare_counts(self, model: str, ours: int, theirs: int) -> None:
        """Compare our token count of a prompt with the engine's. After too many differences our tokenizer counts as
        wrong."""
        if self.tokens(model).miscounts(ours, theirs):
            self.observe_tokens(
                model, f"prompts with {theirs} tokens by the engine's count have {ours} by the router's count"
            )

    def update_tokenizability(self, member: ReplicaState) -> None:
        """Disable or enable the use of a replica's events. They are unusable if none of its models has a tokenizer, or
        if its models are unknown."""
        why = "" if member.models else NO_MODELS
        for name in member.models:
            trouble = self._untokened.get(name, NOT_YET)
            if not trouble:
                why = ""
                break
            why = why or trouble  # the reason of the first model
        self._knowledge.set_untokenizable(member.id, why)


def longest_context(served: Iterable[ServedModel]) -> int:
    """Return the longest context of one model in tokens; a replica that reports none counts with CONTEXT_TOKENS."""
    lengths = [each.max_model_len_tokens or CONTEXT_TOKENS for each in served]
    return min(max(lengths, default=CONTEXT_TOKENS), CONTEXT_TOKENS_MAX)


def _unfit(member: ReplicaState) -> str:
    """Return the reason why a member that is not ready gets no requests."""
    if not member.replica.ready:
        return "not ready according to discovery"
    return (member.health.why or "not probed yet") if not member.health.fit else "being warmed"
