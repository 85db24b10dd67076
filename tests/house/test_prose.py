"""Ceilings for the counts of `python -m tests.house.prose`. Above the aims they may only fall: a change that lowers a
count by a tenth lowers its ceiling, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import prose

# Per 10,000 words; `opening` in percent of docstrings, `callable` in percent of callables.
AIMS = {
    "person": 3.0, "speech": 10.0, "what": 20.0, "where": 10.0, "none": 5.0, "calque": 10.0, "house": 3.0,
    "chain": 3.0, "opening": 2.0, "callable": 1.5,
}  # fmt: skip
CEILINGS = {
    "router": AIMS,
    "loadtest": AIMS | {"chain": 5.6},
    "docs": AIMS,
}

# Per 10,000 words of messages, such as errors, log lines and help texts. The benchmarks' data has sentences of agents.
MESSAGES = dict.fromkeys(prose.PATTERNS, 3.0) | {"chain": 10.0}
MESSAGE_CEILINGS = {
    "router": MESSAGES | {"where": 10.0},  # `where` and `WHERE` of SQL
    "loadtest": MESSAGES | {
        "person": 2.8, "speech": 10.0, "what": 22.6, "where": 7.3, "calque": 10.9, "house": 8.2, "chain": 11.8,
    },
    "deploy": MESSAGES,
}  # fmt: skip


@pytest.mark.parametrize("folder", CEILINGS)
def test_counts_only_fall(folder: str) -> None:
    """No pattern is more frequent than its ceiling, and no ceiling is far above its count."""
    _judge(prose.count([prose.ROOT / folder])[0], CEILINGS[folder], AIMS, folder)


@pytest.mark.parametrize("folder", MESSAGE_CEILINGS)
def test_counts_of_messages_only_fall(folder: str) -> None:
    """No pattern is more frequent in messages than its ceiling, and no ceiling is far above its count."""
    counts, _ = prose.count_messages([prose.ROOT / folder])
    aims = MESSAGES | ({"where": 10.0} if folder == "router" else {})
    _judge(counts, MESSAGE_CEILINGS[folder], aims, f"--messages {folder}")


def _judge(counts: prose.Counts, ceilings: dict[str, float], aims: dict[str, float], arguments: str) -> None:
    rates = {rule: round(counts.rate(rule), 1) for rule in ceilings}
    risen = {rule: (rate, ceilings[rule]) for rule, rate in rates.items() if rate > ceilings[rule]}
    assert not risen, f"(now, ceiling): python -m tests.house.prose --list RULE {arguments}"
    fallen = {
        rule: (rate, ceilings[rule])
        for rule, rate in rates.items()
        if ceilings[rule] > aims[rule] and rate < 0.9 * ceilings[rule] - 0.1
    }
    assert not fallen, "(now, ceiling): lower the ceiling"


def test_rules_match_what_they_name(tmp_path: Path) -> None:
    """Each rule finds its pattern in docstrings and comments, and nothing in plain sentences or directives."""
    file = tmp_path / "odd.py"
    file.write_text(
        '"""What is told to whoever asks, where there is none."""\n'
        "x = 1  # besides, the house mends it\n"
        "# noqa: nobody\n"
        "def told() -> None:\n"
        '    """Reports a, b, c, d, e, and f."""\n'
        "def on_lost() -> None:\n"
        '    """Counts a lost replica."""\n'
        "def of_pool() -> None: ...\n",
        encoding="utf-8",
    )
    counts, found = prose.count([file])
    by_rule = {rule: [hit.line for hit in found if hit.rule == rule] for rule in counts.hits}
    assert by_rule == {
        "person": [1], "speech": [1], "what": [1], "where": [1], "none": [1], "calque": [2], "house": [2, 2],
        "opening": [1], "chain": [5], "callable": [4, 8],
    }  # fmt: skip
    assert (counts.docstrings, counts.names) == (3, 3)
