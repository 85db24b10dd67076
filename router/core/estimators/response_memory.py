"""Index of past answers: the replica that gave each one, and its number of tokens.

An answer's own blocks are in the KV cache of the replica that gave it, but its text is only seen again as part of a
later prompt. So it is stored under the key of its prompt, and credited when a prompt quotes it. It also provides a
conversation's own bytes per token, which is more accurate than the model's mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from msgspec import Struct

Span = tuple[int, int, int]


class PastAnswer(Struct, gc=False):  # a Struct for speed: core/types/requests.py
    """An answer that a replica gave. `prompt_tokens` is 0 if the engine did not report it; `life` is the cache epoch of
    its blocks (Member.life)."""

    replica: str
    prompt_tokens: int
    completion_tokens: int
    life: int = 0


class ResponseMemory:
    """A bounded map of past answers; the oldest are dropped."""

    def __init__(self, answers_max: int) -> None:
        self._answers_max = answers_max
        # Oldest first. Not a dict: one that loses its first entries is searched from its first slot, 20 us a time.
        self._answers: OrderedDict[int, PastAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, end_key: int, answer: PastAnswer) -> None:
        """Store the answer to the prompt that ends at `end_key`; it replaces an earlier one."""
        self._answers.pop(end_key, None)
        self._answers[end_key] = answer
        if len(self._answers) > self._answers_max:
            self._answers.popitem(last=False)

    def get(self, end_key: int) -> PastAnswer | None:
        """Return the latest answer to that prompt."""
        return self._answers.get(end_key)

    def newest(self, start: int, count: int) -> list[tuple[int, PastAnswer]]:
        """Return `count` answers as (key of the prompt, answer), newest first, starting at position `start`. Restored
        answers are not in this order. If answers arrive between calls, some are returned twice."""
        newest = islice(dict.__reversed__(self._answers), start, start + count)
        return [(key, answer) for key in newest if (answer := self._answers.get(key)) is not None]

    def restore(self, end_key: int, answer: PastAnswer) -> bool:
        """Store an answer from before this router started, unless a later one is known or the map is full. Returns True
        if it was stored. It must be called in the order newest first."""
        if end_key in self._answers or len(self._answers) >= self._answers_max:
            return False
        self._answers[end_key] = answer
        self._answers.move_to_end(end_key, last=False)
        return True

    def find_quoted(self, spans: Sequence[Span]) -> list[tuple[Span, PastAnswer]]:
        """Return the known answers that a prompt quotes, the last one first. `spans` are the possible positions: (key
        of the prompt before it, start, end)."""
        get = self._answers.get
        return [(span, answer) for span in reversed(spans) if (answer := get(span[0])) is not None]
