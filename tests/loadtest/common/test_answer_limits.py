"""Limits of answers say nothing of their lengths."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.common.answer_limits import COMMON, FLAG, AnswerLimits, LimitsAction, answer_limit, parse_limits

LIMITS = st.lists(st.none() | st.integers(1, 10_000), max_size=5).map(tuple)


def test_limits_are_used_in_equal_parts() -> None:
    """Of many sessions each limit has its part, as far as chance goes."""
    found = Counter(answer_limit(COMMON, f"session {number}", 100) for number in range(30_000))

    assert found.keys() == set(COMMON)
    assert all(9_500 < count < 10_500 for count in found.values())


@given(limits=LIMITS, session=st.text(), longest_tokens=st.integers(1, 12_000))
def test_a_limit_cuts_nothing(limits: AnswerLimits, session: str, longest_tokens: int) -> None:
    """A session has one of the limits, the same each time, or none where its own would cut the longest answer."""
    limit = answer_limit(limits, session, longest_tokens)

    assert limit == answer_limit(limits, session, longest_tokens)
    assert limit is None or (limit in limits and limit >= longest_tokens)


@given(limits=LIMITS, session=st.text(), first=st.integers(1, 12_000), second=st.integers(1, 12_000))
def test_a_limit_depends_on_no_single_answer(limits: AnswerLimits, session: str, first: int, second: int) -> None:
    """Of an answer counts only whether it is longer than all others and than the limit."""
    limit, other = answer_limit(limits, session, first), answer_limit(limits, session, second)

    assert limit == other or None in (limit, other)
    longest_tokens = max(first, second)
    assert answer_limit(limits, session, longest_tokens) in (None, limit, other)
    if all(each is None or each >= longest_tokens for each in limits):
        assert limit == other


def test_limits_of_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers over 0, or `absent`; anything else ends the command with the flag's name."""
    parser = argparse.ArgumentParser()
    parser.add_argument(FLAG, nargs="+", action=LimitsAction)

    assert parse_limits(["absent", "4096"]) == (None, 4_096)
    assert parser.parse_args([FLAG, "1", "absent"]).answer_limits == (1, None)
    for wrong in ("0", "-1", "many"):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([f"{FLAG}={wrong}"])
        assert FLAG in capsys.readouterr().err
