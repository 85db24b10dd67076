"""Cached blocks of the answers that a replica gave.

An answer's blocks are in the cache of the replica that gave it, but the router only sees its text when a later prompt
quotes it. Until then the blocks are counted under keys of their own (`answer_keys`), so that they occupy cache
capacity. When a prompt quotes the answer, they are counted under the keys of its text as part of that prompt.
"""

from __future__ import annotations

from msgspec import Struct

from router.core.cache_state.prefix_index import PrefixIndex
from router.core.estimators.response_memory import PastAnswer, Span
from router.core.fleet.lease import Lease
from router.core.fleet.models import Models
from router.core.fleet.registry import Fleet
from router.core.prompts import block_keys
from router.core.prompts.block_keys import BLOCK_BYTES, Chain
from router.core.types.placements import Outcome


class AnswerCredit(Struct, gc=False):
    """A past answer that a replica holds after its prompt: `tokens` of it are not yet counted as cached."""

    replica: str
    prefix: list[int]  # keys up to the last full block of the answer
    tokens: int
    answer_keys: list[int]  # keys under which the answer's blocks have been counted so far


class AnswerReuse:
    """Counts past answers as cached."""

    def __init__(self, fleet: Fleet, models: Models, index: PrefixIndex) -> None:
        self._fleet = fleet
        self._models = models
        self._index = index

    def home(self, answer: PastAnswer) -> str:
        """Return the replica that gave an answer if its cache epoch is unchanged; otherwise ""."""
        member = self._fleet.members.get(answer.replica)
        return member.id if member is not None and member.cache_epoch == answer.life else ""

    def find_credit(
        self, chain: Chain, quoted: tuple[Span, PastAnswer], text_bytes_per_token: float
    ) -> AnswerCredit | None:
        """Return the cached part of a past answer that a prompt quotes, or None if there is no such part."""
        (key, start, end), answer = quoted
        upto = min(end, start + int(answer.completion_tokens * text_bytes_per_token))
        first, last = start // BLOCK_BYTES, upto // BLOCK_BYTES
        prefix = chain.keys[:last]
        depth = self._index.depth(answer.replica, prefix)
        if not first <= depth < last:  # the answer is useful only after a prompt that is still cached
            return None
        answer_bytes = (last - depth) * BLOCK_BYTES
        tokens = round(answer_bytes / text_bytes_per_token)
        return AnswerCredit(answer.replica, prefix, tokens, block_keys.answer_keys(key, answer_bytes))

    def take(self, credit: AnswerCredit, now_s: float) -> None:
        """Count a past answer as cached from now on, under the keys of its text as part of a prompt."""
        self._index.drop(credit.replica, credit.answer_keys)
        self._index.touch(credit.replica, credit.prefix, now_s)

    def keys_of_answer(self, lease: Lease, outcome: Outcome) -> list[int]:
        """Return the keys under which the answer of an ended lease is counted until a prompt quotes it."""
        if lease.prompt.end_key is None:
            return []
        tokens = outcome.usage.completion_tokens if outcome.usage else outcome.events
        tokens = min(tokens, lease.answer_tokens_max)  # an engine may report any number
        answer_bytes = int(tokens * self._models.tokens(lease.model).bytes_per_token)
        bytes_max = self._index.capacity(lease.replica) * BLOCK_BYTES
        return block_keys.answer_keys(lease.prompt.end_key, min(answer_bytes, bytes_max))
