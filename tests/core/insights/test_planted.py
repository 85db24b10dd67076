"""Promises of the log with a planted time, which the audit is measured with."""

from __future__ import annotations

import json

import pytest

from router.core.dialects import PATHS
from tests.core.insights.planted import PATH, Planted, planted, shipped, written

REQUESTS = 60


@pytest.fixture(scope="module")
def log() -> Planted:
    """Of the first recorded sessions."""
    return planted(shipped(REQUESTS))


def test_log_is_of_requests(log: Planted) -> None:
    """Each line is a chat whose system prompt begins with a time of its own, and the router reads it as written."""
    assert log.requests == len(log.lines) == REQUESTS
    begins = []
    for line in log.lines:
        messages = json.loads(line)["messages"]
        prompt = PATHS[PATH].parse(PATH, line).prompt
        assert prompt is not None
        assert prompt.text == written(messages)
        assert messages[0]["role"] == "system"
        begins.append(messages[0]["content"].partition("\n")[0])
    assert all(begin.startswith("Current time: 2026-11-2") for begin in begins)
    assert len(set(begins)) > 0.9 * REQUESTS


def test_loss_is_true(log: Planted) -> None:
    """What is lost is what blocks say that prompts have in common with earlier ones of their session, to 2 %."""
    shared = 0
    for session in shipped(REQUESTS):
        known: set[tuple[int, ...]] = set()
        for request in session.requests:
            blocks = [first + i for first, count in request.runs for i in range(count)]
            prefixes = [tuple(blocks[: n + 1]) for n in range(len(blocks))]
            shared += sum(prefix in known for prefix in prefixes) * request.block_tokens
            known.update(prefixes)

    assert log.lost_tokens + log.reused_tokens == pytest.approx(shared, rel=0.02)
    assert log.reused_tokens < 0.01 * log.prompt_tokens


def test_without_a_time_nothing_is_lost(log: Planted) -> None:
    """The same log without the time reuses what the planted one lost."""
    plain = planted(shipped(REQUESTS), stamped=False)

    assert plain.lost_tokens == 0
    assert plain.reused_tokens == pytest.approx(log.lost_tokens + log.reused_tokens, rel=0.001)
    assert 0.5 < log.reachable < 1
