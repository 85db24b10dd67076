"""The one failure that has an answer with it. All others, and what each of them means, are in failures.py,
which says too why neither file is compiled."""

from __future__ import annotations

from router.http.exchange import EngineAnswer
from router.http.failures import Failure


class EngineFailed(Failure):
    """The engine answered that it cannot serve. `answer` goes to the client if no other replica can serve either."""

    kind = "engine"

    def __init__(self, answer: EngineAnswer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer
