"""What is served, and what is known of each model: whom a request means, and whether its prompts become tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from router.core.cache.knowledge import Knowledge
from router.core.facts.placements import Grade
from router.core.facts.replicas import ServedModel
from router.core.fleet.expected import ExpectedModels, expected_base
from router.core.fleet.fleet import Fleet
from router.core.fleet.member import Member
from router.core.learned.token_ratio import ModelTokens
from router.core.prompts.identity import Names

CONTEXT_TOKENS = 1 << 20  # assumed of an engine that does not say how long a context it takes
CONTEXT_TOKENS_MAX = 1 << 24  # an engine that says more is not believed
MODELS_MAX = 1_024  # models whose tokens are learned
NOT_YET = "its prompts were not turned into tokens yet"
NO_MODELS = "its models are not known yet"


REASONS_MAX = 3  # reasons why replicas are not ready that are told with a refusal


class NoReplica(Exception):
    """No ready replica may take this request now."""


class UnknownModel(Exception):
    """Ready replicas exist, but none serves this model; `known` are those that are served."""

    def __init__(self, known: list[str]) -> None:
        super().__init__("unknown model")
        self.known = known


class Models:
    """Reads the fleet; keeps what is learned of models."""

    def __init__(self, fleet: Fleet, knowledge: Knowledge, expected: ExpectedModels) -> None:
        self._fleet = fleet
        self.expected = expected  # models that may have no replica now
        self._knowledge = knowledge
        self.names = Names()
        self._tokens: dict[str, ModelTokens] = {}
        self._engines: dict[str, frozenset[str]] = {}  # until replicas or their models change
        self._contexts: dict[str, int] = {}  # likewise
        self._untokened: dict[str, str] = {}  # model -> why its prompts cannot be turned into tokens

    def resolve(self, model: str | None) -> str:
        """The model meant; engines accept a request that names none when there is no choice.

        Raises UnknownModel, or NoReplica when nothing is ready.
        """
        if model is not None and self._fleet.serving(model):
            return model
        names = self._fleet.model_names()
        if not self._fleet.usable():
            raise NoReplica
        if model is None:
            served = (m for member in self._fleet.usable() for m in member.models.values() if m.parent is None)
            bases = {m.name: m.root or m.name for m in served}
            if len(set(bases.values())) != 1:  # several names of one model are no choice
                raise UnknownModel(sorted(names))
            return min(bases)
        if any(model in member.models for member in self._fleet.members.values()):
            raise NoReplica  # served by a replica that is not ready now
        if self.awaited(model):
            raise NoReplica  # its replicas are all gone, or yet to come
        raise UnknownModel(sorted(names))

    def awaited(self, model: str | None) -> str:
        """The expected base model that a name, or its absence, stands for; "" for any other name."""
        return expected_base(model, self.expected.bases(), self.expected.adapting())

    def adapter(self, model: str) -> str:
        """The LoRA adapter that a model's name stands for; "" for a base model."""
        return model if self.parent(model) else ""

    def parent(self, model: str) -> str:
        """The base model of a LoRA adapter; "" for any other name."""
        served = (member.models.get(model) for member in self._fleet.members.values())
        return next((each.parent for each in served if each is not None and each.parent), "")

    def engine(self, model: str) -> tuple[str, str, str]:
        """(base model, kind of engine, a ready replica that serves it)."""
        for member in self._fleet.serving(model):
            served = member.models[model]
            return served.parent or model, served.owned_by, member.id
        return model, "", ""

    def tokens(self, model: str) -> ModelTokens:
        """What is learned of a model's tokens, under whichever of its names."""
        model = self.names.known_as(model)
        known = self._tokens.get(model)
        if known is None:
            if len(self._tokens) >= MODELS_MAX:
                self._tokens.pop(next(iter(self._tokens)))
            known = self._tokens[model] = ModelTokens()
        return known

    def counts(self, models_max: int) -> list[tuple[str, tuple[float, ...]]]:
        """(name, what was counted of its tokens) of so many models at most."""
        return [(name, tokens.counts) for name, tokens in islice(self._tokens.items(), models_max)]

    def engines(self, model: str) -> frozenset[str]:
        """Kinds of all engines that serve it, ready or not."""
        known = self._engines.get(model)
        if known is None:
            served = (member.models.get(model) for member in self._fleet.members.values())
            known = frozenset(each.owned_by for each in served if each is not None)
            if known:  # other names are anybody's
                self._engines[model] = known
        return known

    def context_tokens(self, model: str | None) -> int:
        """The longest context that any replica, ready or not, has for the model; CONTEXT_TOKENS where one does not say,
        and never more than CONTEXT_TOKENS_MAX."""
        known = self._contexts.get(model or "")
        if known is None:
            served = [each for member in self._fleet.members.values() if (each := member.models.get(model or ""))]
            known = longest_context(served)
            if served:  # other names are anybody's
                self._contexts[model or ""] = known
        return known

    def left(self, members: Iterable[Member]) -> None:
        """These have left the fleet."""
        listed = {name for member in self._fleet.members.values() for name in member.models}
        for member in members:
            self.expected.left(member.models.values(), listed)

    def changed(self) -> None:
        """Replicas came or went, or serve something else."""
        self._engines.clear()
        self._contexts.clear()

    def standing(self) -> str:
        """How many replicas are ready, and why the others are not, the most frequent reasons first: for an operator who
        reads why a request found none."""
        members = self._fleet.members.values()
        if not members:
            return "no replica is known: give --replica URL, or look at discovery"
        ready = sum(member.ready for member in members)
        reasons = Counter(_unfit(member) for member in members if not member.ready).most_common(REASONS_MAX)
        counted = ", ".join(why if len(reasons) == 1 else f"{why} ({count})" for why, count in reasons)
        return f"{ready} of {len(members)} replicas are ready" + (f": {counted}" if counted else "")

    # -- whether events are of use -------------------------------------------------------------------------------

    def follows(self, model: str) -> bool:
        """Whether token ids of a prompt for this model would tell anything."""
        serving = self._fleet.serving(model)
        return not self._untokened.get(model, NOT_YET) and any(m.grade is not Grade.ESTIMATED for m in serving)

    def followed(self) -> list[str]:
        """Models of ready replicas with an event stream."""
        members = [m for m in self._fleet.ready() if self._knowledge.engine_blocks(m.id) is not None]
        return sorted({name for member in members for name in member.models})

    def observe_tokens(self, model: str, why: str) -> bool:
        """Whether prompts for `model` can be turned into token ids: why not, or "". Returns whether that is news."""
        news = self._untokened.get(model, NOT_YET) != why
        if news:
            if model not in self._untokened and len(self._untokened) >= MODELS_MAX:
                self._untokened.pop(next(iter(self._untokened)))
            self._untokened[model] = why
            for member in self._fleet.members.values():
                if model in member.models:
                    self.judge(member)
        return news

    def compare_counts(self, model: str, ours: int, theirs: int) -> None:
        """Take a prompt whose tokens were counted here and by the engine; too many that differ, and it is not ours."""
        if self.tokens(model).miscounts(ours, theirs):
            self.observe_tokens(model, f"prompts of {theirs} tokens, says the engine, have {ours} by our count")

    def judge(self, member: Member) -> None:
        """Events are of no use to a replica none of whose models has a tokenizer, nor while none is known."""
        why = "" if member.models else NO_MODELS
        for name in member.models:
            trouble = self._untokened.get(name, NOT_YET)
            if not trouble:
                why = ""
                break
            why = why or trouble  # the first one's
        self._knowledge.untokened(member.id, why)


def longest_context(served: Iterable[ServedModel]) -> int:
    """Tokens of the longest context of one model, as replicas serve it, those counted that do not say."""
    lengths = [each.max_model_len_tokens or CONTEXT_TOKENS for each in served]
    return min(max(lengths, default=CONTEXT_TOKENS), CONTEXT_TOKENS_MAX)


def _unfit(member: Member) -> str:
    """Why a member that is not ready is sent nothing."""
    if not member.replica.ready:
        return "not ready, by discovery"
    return (member.health.why or "not probed yet") if not member.health.fit else "being warmed"
