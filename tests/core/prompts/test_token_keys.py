"""Remembered keys are the keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.prompts.block_keys import token_chain, token_root
from router.core.prompts.token_keys import ID_BYTES, RUN_BLOCKS, KeyCache, TokenPrompt, rest

BLOCK = 2


def _prompt(runs: list[int], tail_tokens: int, salt: bytes) -> TokenPrompt:
    run_bytes = RUN_BLOCKS * BLOCK * ID_BYTES
    ids = b"".join(bytes([run]) * run_bytes for run in runs) + b"\x07" * (tail_tokens * ID_BYTES)
    return TokenPrompt(ids, "", salt)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=4), st.integers(0, 2 * RUN_BLOCKS), st.sampled_from([b"", b"s"])
        ),
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_remembered_or_not_the_keys_are_those_of_the_chain(
    asked: list[tuple[list[int], int, bytes]], runs_max: int
) -> None:
    """Whatever was asked before, and however little is remembered."""
    cache = KeyCache(runs_max)
    for runs, tail_tokens, salt in asked:
        prompt = _prompt(runs, tail_tokens, salt)
        known = cache.find_leading_keys(prompt, BLOCK)
        keys = known + rest(prompt, BLOCK, known)
        cache.learn(prompt, BLOCK, keys, len(known))
        assert prompt.keys[BLOCK] == token_chain(prompt.ids, BLOCK, token_root("", salt, BLOCK))
        assert len(cache) <= runs_max


def test_the_next_turn_hashes_only_what_is_new() -> None:
    """All whole runs of the turn before are found."""
    cache = KeyCache(100)
    first = _prompt([1, 2, 3], 10, b"")
    cache.learn(first, BLOCK, rest(first, BLOCK, []), 0)
    second = _prompt([1, 2, 3, 4], 10, b"")
    assert len(cache.find_leading_keys(second, BLOCK)) == 3 * RUN_BLOCKS
    assert cache.find_leading_keys(_prompt([2, 1], 0, b""), BLOCK) == []
