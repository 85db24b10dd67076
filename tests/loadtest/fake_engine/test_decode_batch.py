"""Sequences that decode are moved on together, and nobody misses a block or an end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.fake_engine.decode_batch import DecodeBatch, EngineSequence
from loadtest.fake_engine.request import EngineRequest

SIZE = 4
MEMBERS = st.lists(st.tuples(st.integers(1, 30), st.integers(2, 12)), min_size=1, max_size=8)
CHANGES = st.lists(st.one_of(st.tuples(st.integers(1, 9), st.just(-1)), st.tuples(st.just(0), st.integers(0, 7))))


def joined(decoding: DecodeBatch, shapes: list[tuple[int, int]], numbers: Iterator[int]) -> list[EngineSequence]:
    """Prompts and answers of those lengths, each with its first token."""
    members = []
    for number, (prompt, outputs) in zip(numbers, shapes, strict=False):
        sequence = EngineSequence(EngineRequest(number, prompt, outputs, ()))
        sequence.number, sequence.computed, sequence.generated = number, prompt, 1
        decoding.join(sequence)
        members.append(sequence)
    return members


def blocks(tokens: int) -> int:
    """That hold so many tokens."""
    return -(-tokens // SIZE)


@settings(max_examples=200, deadline=None)
@given(MEMBERS, MEMBERS, CHANGES)
def test_all_is_as_if_each_were_moved_on_alone(
    first: list[tuple[int, int]], later: list[tuple[int, int]], changes: list[tuple[int, int]]
) -> None:
    """Who needs or fills a block, who ends when, and what all hold, whoever came and left before."""
    decoding, numbers = DecodeBatch(SIZE), count(0)
    tokens = {s: s.computed for s in joined(decoding, first, numbers)}
    for iterations, leaving in changes:
        if iterations and tokens:
            most = min(iterations, decoding.count_iterations_left())
            after = {s: n + most for s, n in tokens.items()}
            assert decoding.blocks_for(most) == sum(blocks(after[s]) - blocks(n) for s, n in tokens.items())
            due = [s for s, n in tokens.items() if blocks(after[s]) > blocks(n) or after[s] // SIZE > n // SIZE]
            assert decoding.find_bordering(most) == sorted(due, key=lambda s: s.number)
            left = {s: s.request.prompt_tokens + s.request.output_tokens - 1 - n for s, n in tokens.items()}
            assert decoding.count_iterations_left() == min(left.values())
            ended = [s for s, n in left.items() if n == most]
            assert decoding.advance(most) == sorted(ended, key=lambda s: s.number)
            assert [s.generated for s in ended] == [s.request.output_tokens for s in ended]
            tokens = {s: n for s, n in after.items() if s not in ended}
        elif not iterations and leaving < len(tokens):
            sequence = list(tokens)[leaving]
            decoding.leave(sequence)
            assert sequence.computed == tokens.pop(sequence)
        if not tokens:
            tokens = {s: s.computed for s in joined(decoding, later, numbers)}
        assert (decoding.count, decoding.context_tokens) == (len(tokens), sum(tokens.values()))
        assert all(decoding.count_computed(s) == n for s, n in tokens.items())
