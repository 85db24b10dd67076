"""The observatory on the corpus of damage: right class and right position. WARMROUTE_CORPUS_SEEDS=40 looks at more
seeds; a failure shows some of what was wrong."""

from __future__ import annotations

import os
from collections import defaultdict
from statistics import median

import pytest

from tests.core.insights.corpus import corpus
from tests.core.insights.scoring import KINDS, Score, Scores, scored

SEEDS = int(os.environ.get("WARMROUTE_CORPUS_SEEDS", "4"))
WRONG_SHOWN_MAX = 3  # of each kind


@pytest.fixture(scope="module")
def halves() -> dict[str, Scores]:
    """Even seeds were there to develop with, odd ones were held out."""
    made: dict[str, Scores] = {}
    for first, name in enumerate(("development", "held out")):
        made[name] = defaultdict(Score)
        for seed in range(first, SEEDS, 2):
            scored(corpus(seed), made[name])
    return made


pytestmark = [pytest.mark.long, pytest.mark.timeout(60 + 10 * SEEDS)]
BOTH = pytest.mark.parametrize("half", ["development", "held out"])


@BOTH
def test_damage_is_found(halves: dict[str, Scores], half: str) -> None:
    """In 97 % of damaged requests class, message, path and offset are right."""
    scores = [halves[half][kind] for kind in KINDS]

    wrong = [found for score in scores for found in score.wrong[:WRONG_SHOWN_MAX]]
    assert sum(score.right for score in scores) >= 0.97 * sum(score.turns for score in scores), wrong


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_found(halves: dict[str, Scores], half: str, kind: str) -> None:
    """No kind is bad: of each, class and position are right in 90 %."""
    score = halves[half][kind]

    assert score.turns >= 5
    assert score.share >= 0.9, score.wrong[:WRONG_SHOWN_MAX]


@BOTH
def test_clean_sessions_are_clean(halves: dict[str, Scores], half: str) -> None:
    """Of clean requests (appended, tried again, regenerated, branched, in parallel), under 0.5 % are said to differ."""
    clean = halves[half]["clean"]

    assert clean.turns > 100
    assert clean.false < 0.005 * clean.turns, clean.wrong[:WRONG_SHOWN_MAX]


@BOTH
def test_repeated_bytes_are_true(halves: dict[str, Scores], half: str) -> None:
    """What is computed again for no other reason than the difference is told within 10 % (median)."""
    said = [ratio for kind in KINDS for ratio in halves[half][kind].repeated]

    assert 0.9 <= median(said) <= 1.1


@BOTH
def test_nothing_is_counted_twice(halves: dict[str, Scores], half: str) -> None:
    """What is repeated stands behind what is known: together they are never more than the prompt."""
    assert [kind for kind in KINDS if halves[half][kind].twice] == []
