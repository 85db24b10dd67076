"""The failures that have an answer with them. All others, and what each of them means, are in failures.py,
which says too why neither file is compiled."""

from __future__ import annotations

from router.core.facts.placements import Ending
from router.http.exchange import EngineAnswer
from router.http.failures import Failure


class EngineFailed(Failure):
    """The engine answered that it cannot serve. `answer` goes to the client if no other replica can serve either."""

    kind = "engine"

    def __init__(self, answer: EngineAnswer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


class NothingMade(EngineFailed):
    """The engine gave the request up before anything was generated, though it is well: an operator had it aborted."""

    ending = Ending.REFUSED_BY_ENGINE


class LacksModel(EngineFailed):
    """The engine does not serve the model that the request names, and has computed nothing. `model` is the name."""

    kind = "model"
    ending = Ending.REFUSED_BY_ENGINE

    def __init__(self, answer: EngineAnswer, model: str) -> None:
        super().__init__(answer)
        self.model = model


class BlocksFailed(EngineFailed):
    """The decode leg of a request failed within its engine, as where blocks of the prompt could not be fetched: no
    engine says which of the two is at fault (vLLM 0.32, `_raise_if_error`: "Internal server error")."""

    kind = "blocks"
    ending = Ending.REFUSED_BY_ENGINE
