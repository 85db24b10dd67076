from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.estimators.response_memory import PastAnswer, ResponseMemory
from router.core.estimators.token_ratio import BYTES_PER_TOKEN, CREDIT_TRIALS_MIN, ModelTokens


@given(puts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=60), answers_max=st.integers(1, 6))
@settings(deadline=None)
def test_the_latest_answers_are_remembered(puts: list[tuple[int, int]], answers_max: int) -> None:
    """The memory is a dict of the last `answers_max` prompts answered; an answer given again is new again."""
    memory, naive = ResponseMemory(answers_max), dict[int, PastAnswer]()
    for key, tokens in puts:
        answer = PastAnswer("a", 0, tokens)
        memory.put(key, answer)
        naive.pop(key, None)
        naive[key] = answer
        naive = dict(list(naive.items())[-answers_max:])
        assert len(memory) == len(naive)
    assert {key: memory.get(key) for key in range(10)} == {key: naive.get(key) for key in range(10)}


def test_bytes_per_token_is_learned() -> None:
    """A prior of four gives way to what engines count; a hundred prompts settle it."""
    tokens = ModelTokens()
    assert tokens.bytes_per_token == BYTES_PER_TOKEN
    tokens.observe(3_000, 1_000)
    assert 3.0 < tokens.bytes_per_token < 3.3
    for _ in range(100):
        tokens.observe(3_000, 1_000)
    assert tokens.bytes_per_token == pytest.approx(3.0, rel=0.01)
    for _ in range(300):
        tokens.observe(5_000, 1_000)
    assert tokens.bytes_per_token == pytest.approx(5.0, rel=0.03)


@pytest.mark.parametrize(("text_bytes", "prompt_tokens"), [(0, 10), (10, 0), (-1, 10), (10, -1)])
def test_nonsense_teaches_nothing(text_bytes: int, prompt_tokens: int) -> None:
    """Empty prompts and impossible counts leave the ratio as it was."""
    tokens = ModelTokens()
    tokens.observe(text_bytes, prompt_tokens)
    assert tokens.bytes_per_token == BYTES_PER_TOKEN


@given(st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 10_000)), max_size=50))
@settings(deadline=None)
def test_the_ratio_stays_within_what_was_seen(pairs: list[tuple[int, int]]) -> None:
    """A mean: never below the lowest nor above the highest ratio seen, the prior included."""
    tokens = ModelTokens()
    for pair in pairs:
        tokens.observe(*pair)
    ratios = [BYTES_PER_TOKEN, *(size / count for size, count in pairs)]
    assert min(ratios) * 0.999 <= tokens.bytes_per_token <= max(ratios) * 1.001


def test_answers_that_never_come_back_are_not_credited() -> None:
    """Where the engine keeps counting an answer's tokens as missing (a template that drops reasoning), crediting
    stops after a few trials, and starts again when the counts agree again."""
    tokens = ModelTokens()
    for _ in range(int(CREDIT_TRIALS_MIN) + 1):
        assert tokens.credits_answers
        tokens.observe_credit(400, 390)
    assert not tokens.credits_answers
    for _ in range(20):
        tokens.observe_credit(400, 12)
    assert tokens.credits_answers


def test_a_block_of_rounding_does_not_stop_crediting() -> None:
    """Less than half of the credit missing is the engine's rounding, not a broken credit."""
    tokens = ModelTokens()
    for _ in range(50):
        tokens.observe_credit(400, 150)
    assert tokens.credits_answers
