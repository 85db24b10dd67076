"""Who answered which prompt, and with how many tokens.

An answer's own blocks are in the KV cache of whoever gave it, but its text only comes back as part of a later
prompt. So it is remembered under the key of the prompt it answered, and credited when a prompt quotes it.
It also gives a conversation's own bytes per token, better than the model's mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from msgspec import Struct

Span = tuple[int, int, int]


class PastAnswer(Struct, gc=False):  # a Struct for speed: core/facts/requests.py
    """An answer that a replica gave. `prompt_tokens` is 0 where the engine did not say; `life` is the number of the
    cache that it lies in (Member.life)."""

    replica: str
    prompt_tokens: int
    completion_tokens: int
    life: int = 0


class AnswerMemory:
    """Bounded; the answers given longest ago make room."""

    def __init__(self, answers_max: int) -> None:
        self._answers_max = answers_max
        # Oldest first. Not a dict: one that loses its first entries is searched from its first slot, 20 us a time.
        self._answers: OrderedDict[int, PastAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, end_key: int, answer: PastAnswer) -> None:
        """Remember the answer to the prompt that ends at `end_key`; a later answer replaces it."""
        self._answers.pop(end_key, None)
        self._answers[end_key] = answer
        if len(self._answers) > self._answers_max:
            self._answers.popitem(last=False)

    def get(self, end_key: int) -> PastAnswer | None:
        """The latest answer to that prompt."""
        return self._answers.get(end_key)

    def newest(self, start: int, count: int) -> list[tuple[int, PastAnswer]]:
        """So many answers, (key of the prompt, answer), behind the `start` that were given last; those given last come
        first, but for those that were restored. While answers come, some are listed twice."""
        newest = islice(dict.__reversed__(self._answers), start, start + count)
        return [(key, answer) for key in newest if (answer := self._answers.get(key)) is not None]

    def restore(self, end_key: int, answer: PastAnswer) -> bool:
        """Remember an answer given before this router came, unless a later one is known or there is no room; returns
        whether it is remembered. To be called with those given last first."""
        if end_key in self._answers or len(self._answers) >= self._answers_max:
            return False
        self._answers[end_key] = answer
        self._answers.move_to_end(end_key, last=False)
        return True

    def quoted(self, spans: Sequence[Span]) -> list[tuple[Span, PastAnswer]]:
        """Places where a prompt quotes a known answer, the last one first, of the `spans` where it may: (key of the
        prompt before it, start, end)."""
        get = self._answers.get
        return [(span, answer) for span in reversed(spans) if (answer := get(span[0])) is not None]
