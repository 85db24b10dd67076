"""The failures that carry an answer. All others, and the meaning of each, are in failures.py, which also gives the
reason why neither file is compiled."""

from __future__ import annotations

from router.core.types.placements import EndReason
from router.http.exchange import UpstreamResponse
from router.http.failures import UpstreamError


class EngineFailed(UpstreamError):
    """The engine answered that it cannot serve. `answer` is sent to the client if no other replica can serve either."""

    kind = "engine"

    def __init__(self, answer: UpstreamResponse) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


class NothingMade(EngineFailed):
    """The engine aborted the request before any output, although it is healthy: an operator aborted it."""

    ending = EndReason.REFUSED_BY_ENGINE


class LacksModel(EngineFailed):
    """The engine does not serve the model that the request names, and has computed nothing. `model` is its name."""

    kind = "model"
    ending = EndReason.REFUSED_BY_ENGINE

    def __init__(self, answer: UpstreamResponse, model: str) -> None:
        super().__init__(answer)
        self.model = model


class TransferFailed(EngineFailed):
    """The decode stage of a request failed within its engine, for example because blocks of the prompt could not be
    fetched. No engine reports which of the two engines is at fault (vLLM 0.32, `_raise_if_error`: "Internal server
    error")."""

    kind = "blocks"
    ending = EndReason.REFUSED_BY_ENGINE
