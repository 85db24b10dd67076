"""Conversations stay where their cache is, spread over the replicas, and are foretold to within a block."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import httpx
import pytest

from tests.real.talk import ROUTER_BLOCK_BYTES, Answer, Conversation
from tests.real.vllm_server import BLOCK_TOKENS

TURNS = 6
CONVERSATIONS = 8
ROUNDS = 4


def block_and_tail_tokens(talk: Conversation, answer: Answer) -> float:
    """The larger of the two block sizes in tokens of this prompt, and what its last block holds."""
    router_block = ROUTER_BLOCK_BYTES / talk.bytes_per_token()
    block = max(router_block, BLOCK_TOKENS)
    return block + answer.prompt_tokens % block


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_stays_and_is_foretold(
    stream: bool, client: httpx.AsyncClient, allowed: list[int], figures: Callable[[str], None]
) -> None:
    """Six turns stay on one replica, each finds more cached, foretold to a block and the tail."""
    talk = Conversation(f"stay {stream}", allowed)
    for _ in range(TURNS):
        answer = await talk.turn(client, stream)
        assert not answer.failure, answer.failure
        figures(
            f"{'streamed' if stream else 'whole'} turn {len(talk.answers)}: prompt {answer.prompt_tokens}, "
            f"cached {answer.cached_tokens}, predicted {answer.predicted_tokens}, may differ by less than "
            f"{block_and_tail_tokens(talk, answer):.0f}; {answer.replica} {answer.reason} {answer.grade}"
        )
    assert len({answer.replica for answer in talk.answers}) == 1
    cached = [answer.cached_tokens for answer in talk.answers]
    assert cached == sorted(set(cached)), f"cached tokens do not grow with every turn: {cached}"
    for answer in talk.answers[1:]:
        assert answer.predicted_tokens is not None, "no x-warmroute-predicted-cached-tokens"
        off = abs(answer.predicted_tokens - answer.cached_tokens)
        assert off < block_and_tail_tokens(talk, answer), answer


async def test_conversations_spread(
    client: httpx.AsyncClient, allowed: list[int], figures: Callable[[str], None]
) -> None:
    """Eight different conversations begun together use both replicas, and most turns find the one before cached."""
    talks = [Conversation(f"spread {number}", allowed) for number in range(CONVERSATIONS)]
    for _ in range(ROUNDS):
        answers = await asyncio.gather(*(talk.turn(client) for talk in talks))
        assert not [answer.failure for answer in answers if answer.failure]
    spread = Counter(talk.answers[0].replica for talk in talks)
    figures(f"spread of {CONVERSATIONS} conversations: {dict(spread)}")
    assert len(spread) == 2
    turns = [pair for talk in talks for pair in pairwise(talk.answers)]
    moves = [now.reason for before, now in turns if now.replica != before.replica]
    figures(f"turns that left the replica of the turn before: {len(moves)} of {len(turns)} {moves}")
    # Moving is right when waiting costs more than computing again, which eight turns at once on two cores can make so.
    assert len(moves) <= len(turns) // 4
