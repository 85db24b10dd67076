"""`python -m loadtest sidechannel`: detection of another tenant's prompts by time to first token.

A victim sends one of two prompts before each probe. The other tenant then sends the first of them and measures its time
to first token: a prompt in some replica's cache is faster. The measure of the leak is the area under the ROC curve: 0.5
is none, 1 is all. With isolation off it must come near 1, otherwise the benchmark is blind.

It runs in simulated seconds. The router's own RequestParser parses the requests, and its own Router places them on
engine models (loadtest/fake_engine/model.py). These get the salt that a real engine would read in the body. Times are
the engine's, plus the jitter of a network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.common import flags
from loadtest.common.in_process_router import join, local_placer, make_json_request, warm_router
from loadtest.fake_engine import tokens
from loadtest.fake_engine.calibration import CALIBRATIONS
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Limits
from router.config.api_keys import Caller, Tenant
from router.config.schema import LimitSettings
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import Load
from router.ingress.parser import RequestParser

PATH, MODEL = "/v1/completions", "sim"
REPLICAS = 4
PROBES = 2_000
PROMPT_TOKENS = 512, 4_096
OUTPUT_TOKENS = 4
JITTER_S = 0.002  # one standard deviation of network delay
KV_TOKENS = 65_536
AUC_MAX, AUC_BLIND = 0.55, 0.95  # largest area under the curve with isolation, smallest without


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe: whether the victim had sent its prompt, and the measurements."""

    asked: bool
    ttft_s: float
    cached_tokens: int


class SharedRouter:
    """A router, its replicas, and two tenants."""

    def __init__(self, *, isolated: bool, seed: int) -> None:
        self._rng = random.Random(seed)
        self._now_s = 1_000.0
        calibration = CALIBRATIONS["llama-3.1-8b-a100"]
        self._router = warm_router(index_bytes_max=64 << 20, remembered_prompts_max=4_096, default_cache_blocks=4_096)
        load = Load(kv_tokens_max=KV_TOKENS, block_tokens=Limits().block_tokens)
        replicas = join(self._router, REPLICAS, MODEL, load)
        self._engines = {name: EngineModel(calibration.times, KV_TOKENS, Limits()) for name in replicas}
        self._placer = local_placer(self._router, lambda: self._now_s)
        secret = self._rng.randbytes(32).hex()
        self._reader = RequestParser(self._placer, None, LimitSettings(offload_bytes_min=1 << 30), secret=secret)
        self._ids = 0
        names = ["victim", "curious"]
        self._victim, self._curious = (Caller(name, tenant=Tenant(name, isolated=isolated)) for name in names)

    def close(self) -> None:
        """Stop the reader's thread."""
        self._reader.close()

    async def probe(self) -> Probe:
        """Let the victim send a prompt, and the other tenant probe."""
        size = self._rng.randint(*PROMPT_TOKENS)
        looked_for, other = (self._rng.randbytes(size * 2).hex() for _ in range(2))
        asked = self._rng.random() < 0.5
        await self._ask(self._victim, looked_for if asked else other)
        ttft_s, cached = await self._ask(self._curious, looked_for)
        return Probe(asked, ttft_s + abs(self._rng.gauss(0, JITTER_S)), cached)

    async def _ask(self, caller: Caller, prompt: str) -> tuple[float, int]:
        """Send one request to its end. Returns the time to its first token, and its cached tokens."""
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS}).encode()
        question = await self._reader.parse(make_json_request(PATH, body), "probe", caller)
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
        self._router.finish(lease, Outcome(EndReason.OK, usage), self._now_s)
        self._now_s += self._rng.expovariate(2.0)
        return ttft_s, cached


async def probes(count: int, *, isolated: bool, seed: int = 1) -> list[Probe]:
    """Return `count` probes of a separate router."""
    world = SharedRouter(isolated=isolated, seed=seed)
    try:
        return [await world.probe() for _ in range(count)]
    finally:
        world.close()


def auc(looks: Sequence[Probe]) -> float:
    """Return the area under the ROC curve: 0.5 to 1.

    It is the chance that time distinguishes two probes, one of a prompt that the victim sent and one of another.
    """
    ranked = sorted(looks, key=lambda look: look.ttft_s)
    asked = sum(look.asked for look in ranked)
    ranks = sum(rank for rank, look in enumerate(ranked, 1) if look.asked)
    area = (ranks - asked * (asked + 1) / 2) / (asked * (len(ranked) - asked))
    return max(area, 1 - area)


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns its exit status: 1 if isolation leaks, or the benchmark is blind."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest sidechannel", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--probes", type=flags.integer(1), default=PROBES, help=f"looks ({PROBES})")
    parser.add_argument("--seed", type=int, default=1, help="seed of prompts and jitter (1)")
    options = parser.parse_args(argv)
    told = {}
    for isolated in (False, True):
        looks = asyncio.run(probes(options.probes, isolated=isolated, seed=options.seed))
        told[isolated] = auc(looks)
        hits = sum(look.cached_tokens > 0 for look in looks)
        print(f"isolation {'on ' if isolated else 'off'}: AUC {told[isolated]:.3f}, {hits} of {len(looks)} probes hit")
    return 0 if told[True] <= AUC_MAX and told[False] >= AUC_BLIND else 1
