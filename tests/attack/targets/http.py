"""Heads and bodies of requests, and answers of engines, in pieces that the bytes themselves decide."""

from __future__ import annotations

import random

from router.core.dialects import PATHS
from tests.attack import cuts, received, relayed
from tests.attack.target import Target


def requests(data: bytes) -> None:
    """What a client sends on a connection."""
    received.judged(data, cuts.cut(random.Random(data), data))


def answers(data: bytes) -> None:
    """What an engine sends on a connection."""
    choose = random.Random(data)
    dialect = choose.choice(list(PATHS.values()))
    pieces, way = cuts.cut(choose, data), choose.choice(relayed.ways(dialect))
    relayed.judged(data, pieces, way, [choose.random() < cuts.LATE for _ in pieces])


TARGETS = (
    Target(requests, cuts.WORDS, steps=(20_000, 400)),
    Target(answers, (*cuts.EVENTS, *cuts.WORDS), steps=(20_000, 400)),
)
