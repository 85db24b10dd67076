"""`python -m loadtest sidechannel`: whether one tenant finds out by time to first token what another has asked.

A victim asks one of two prompts before each probe; the other tenant then asks the first of them, and looks at how long
its first token takes: a prompt that some replica holds comes sooner. What it can tell is the area under the ROC curve:
0.5 is nothing, 1 is all. With isolation off it must come near 1, else the instrument is blind.

In simulated seconds: requests are read by the router's own Reader, placed by its own Router on engine models
(model.py), which get the salt that a real engine would read in the body. Times are the engine's, with the jitter of a
network on top.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.common import flags
from loadtest.common.placers import asked, join, local_placer, warm_router
from loadtest.engine import tokens
from loadtest.engine.calibration import CALIBRATIONS
from loadtest.engine.model import EngineModel
from loadtest.engine.request import EngineRequest
from loadtest.engine.step import Limits
from router.core.facts.placements import Ending, Outcome, Usage
from router.core.facts.replicas import Load
from router.reading.reader import Reader, ReadingRules
from router.settings.keys import Caller, Tenant

PATH, MODEL = "/v1/completions", "sim"
REPLICAS = 4
PROBES = 2_000
PROMPT_TOKENS = 512, 4_096
OUTPUT_TOKENS = 4
JITTER_S = 0.002  # one standard deviation of network delay
KV_TOKENS = 65_536
AUC_MAX, AUC_BLIND = 0.55, 0.95  # most area under the curve with isolation, least without


@dataclass(frozen=True, slots=True)
class Probe:
    """One look: whether the victim had asked this, and what was seen."""

    asked: bool
    ttft_s: float
    cached_tokens: int


class SharedRouter:
    """A router, its replicas, and two tenants."""

    def __init__(self, *, isolated: bool, seed: int) -> None:
        self._rng = random.Random(seed)
        self._now_s = 1_000.0
        calibration = CALIBRATIONS["llama-3.1-8b-a100"]
        self._router = warm_router(index_bytes_max=64 << 20, memory_max=4_096, blocks_max_default=4_096)
        load = Load(kv_tokens_max=KV_TOKENS, block_tokens=Limits().block_tokens)
        replicas = join(self._router, REPLICAS, MODEL, load)
        self._engines = {name: EngineModel(calibration.times, KV_TOKENS, Limits()) for name in replicas}
        self._placer = local_placer(self._router, lambda: self._now_s)
        secret = self._rng.randbytes(32).hex()
        self._reader = Reader(self._placer, None, ReadingRules(1 << 30), secret=secret)
        self._ids = 0
        names = ["victim", "curious"]
        self._victim, self._curious = (Caller(name, tenant=Tenant(name, isolated=isolated)) for name in names)

    def close(self) -> None:
        """Stop the reader's thread."""
        self._reader.close()

    async def probe(self) -> Probe:
        """The victim asks; the other looks."""
        size = self._rng.randint(*PROMPT_TOKENS)
        looked_for, other = (self._rng.randbytes(size * 2).hex() for _ in range(2))
        asked = self._rng.random() < 0.5
        await self._ask(self._victim, looked_for if asked else other)
        ttft_s, cached = await self._ask(self._curious, looked_for)
        return Probe(asked, ttft_s + abs(self._rng.gauss(0, JITTER_S)), cached)

    async def _ask(self, caller: Caller, prompt: str) -> tuple[float, int]:
        """One request, answered whole: time to its first token, and cached tokens."""
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS}).encode()
        question = await self._reader.understand(asked(PATH, body), "probe", caller)
        lease = await self._placer.place(question.wanted, frozenset())
        engine, data = self._engines[lease.replica], prompt.encode()
        self._ids += 1
        keys = tokens.chain(data, engine.limits.block_tokens, json.loads(question.body).get("cache_salt") or "")
        begun_s, ttft_s, cached = self._now_s, 0.0, 0
        engine.submit(EngineRequest(self._ids, tokens.count(data), OUTPUT_TOKENS, keys))
        while (step := engine.begin()) is not None:
            self._now_s += step.duration_s
            first = engine.complete(step).first
            if first:
                ttft_s, cached = self._now_s - begun_s, first[0][1]
                self._router.first_token(lease, self._now_s)
        usage = Usage(tokens.count(data), OUTPUT_TOKENS, cached)
        self._router.finish(lease, Outcome(Ending.OK, usage), self._now_s)
        self._now_s += self._rng.expovariate(2.0)
        return ttft_s, cached


async def probes(count: int, *, isolated: bool, seed: int = 1) -> list[Probe]:
    """So many probes of a router of their own."""
    world = SharedRouter(isolated=isolated, seed=seed)
    try:
        return [await world.probe() for _ in range(count)]
    finally:
        world.close()


def auc(looks: Sequence[Probe]) -> float:
    """Chance that of two looks, one at what was asked and one at what was not, time tells which is which: 0.5 to 1."""
    ranked = sorted(looks, key=lambda look: look.ttft_s)
    asked = sum(look.asked for look in ranked)
    ranks = sum(rank for rank, look in enumerate(ranked, 1) if look.asked)
    area = (ranks - asked * (asked + 1) / 2) / (asked * (len(ranked) - asked))
    return max(area, 1 - area)


def main(argv: Sequence[str]) -> int:
    """Exit status of `python -m loadtest sidechannel`: 1 where isolation leaks, or the instrument is blind."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest sidechannel", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--probes", type=flags.whole(1), default=PROBES, help=f"looks ({PROBES})")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and jitter (1)")
    options = parser.parse_args(argv)
    told = {}
    for isolated in (False, True):
        looks = asyncio.run(probes(options.probes, isolated=isolated, seed=options.seed))
        told[isolated] = auc(looks)
        hits = sum(look.cached_tokens > 0 for look in looks)
        print(f"isolation {'on ' if isolated else 'off'}: AUC {told[isolated]:.3f}, {hits} of {len(looks)} probes hit")
    return 0 if told[True] <= AUC_MAX and told[False] >= AUC_BLIND else 1
