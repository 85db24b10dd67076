"""Replicas of the zoo that publish KV events: a router follows each kind, and predicts what it finds."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import ClientSession

from loadtest.engine.zoo.members import MEMBERS
from router.core.cache.selfcheck import CHECKS
from router.core.facts.placements import Grade
from tests.engines.test_exact import COMPLETIONS, ask, caught_up, graded, replicas, routing

EAGLE = "kind F9: the last block that is found is computed again, and the router counts it as found"
KINDS = [
    ("vllm-hybrid", CHECKS),  # groups beside the first may not hold a prefix
    ("vllm-dcp", 0),
    pytest.param("vllm-eagle", CHECKS, marks=pytest.mark.xfail(reason=EAGLE, strict=True)),
    ("vllm-processes", 0),
    ("sglang", 0),
]


@pytest.mark.parametrize(("name", "earned"), KINDS)
async def test_predictions(name: str, earned: int) -> None:
    """Prompts that share their beginnings, through a cache that holds a few. The grade takes `earned` answers."""
    async with (
        replicas(1, kv_tokens=4_096, member=MEMBERS[name]) as engines,
        routing(*engines.urls) as app,
        ClientSession() as client,
    ):
        if not earned:
            await graded(app, Grade.EXACT)
        async with asyncio.timeout(60):
            while any(member.grade is Grade.ESTIMATED for member in app.router.fleet.members.values()):
                await asyncio.sleep(0.01)
        hits = 0
        for n in range(earned + 30):
            prompt = f"{n if n % 2 else n % 6:04d}" * 600 + f"{n % 4:04d}" * (n % 5 * 40)
            grade, predicted, actual, *_ = await ask(client, app, COMPLETIONS, {"prompt": prompt})
            assert n < earned or (grade, predicted) == ("exact", actual), n
            hits += actual
            await caught_up(app, engines)
        assert hits > 0
