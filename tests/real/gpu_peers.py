"""Have one vLLM on a GPU bring a prompt's blocks from another one's CPU memory: `python -m tests.real.gpu_peers OUT`.

Needs a GPU, a vLLM built for it in this Python (gpu_tiers.py) and NIXL. First as the router orders a pull, with the
very field that it writes (router/core/dialects/pulls.py), then as it hands a prompt over (`split.handshake:
offloading`), with a router in front of both. It has not been through on a GPU yet: there NIXL wants `cuda_copy` in
`UCX_TLS`, where that is set.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from loadtest.common.processes import free_ports
from router.core.dialects.pulls import with_pull
from tests.real.conftest import CLIENT_TIMEOUT_S
from tests.real.exact_workload import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.real.gpu_server import BLOCK_TOKENS, SMALL, GpuReplica, lay_model
from tests.real.gpu_tiers import LOADED, Listener, page, touch, write
from tests.real.processes import wait_until
from tests.real.router_process import Router
from tests.real.two_legs import calls, decoding, send_all, split_settings, two_legs, warmed
from tests.real.vllm_server import MODEL, sample

BLOCKS = 4_096
PROMPTS = 12
PAIR_TIMEOUT_S = 30.0


def peers(folder: Path, out: Path) -> tuple[list[GpuReplica], list[int]]:
    """Two engines that take orders of each other, and at which ports; not started."""
    model, ports = lay_model(folder / "model", SMALL), free_ports(2)
    made = []
    for name, port in zip(("source", "other"), ports, strict=True):
        extra = {"spec_name": "TieringOffloadingSpec", "offload_prompt_only": False}
        extra |= {"secondary_tiers": [{"type": "p2p", "host": "127.0.0.1", "port": port}]}
        replica = GpuReplica(name, out, model, SMALL, BLOCKS, BLOCKS, **extra)
        replica.environment |= {"PYTHONHASHSEED": "0"}
        made.append(replica)
    return made, ports


async def pull(replicas: Sequence[GpuReplica], address: str) -> None:
    """Ask the one engine for prompts, and then the other one for the same, to bring them from `address`."""
    rng, wrong, took_s = random.Random("pull"), list[str](), dict[str, list[float]]()
    source, other = (httpx.AsyncClient(base_url=r.url, timeout=30.0, trust_env=False) for r in replicas)
    async with source, other:
        for number in range(PROMPTS):
            ids = [rng.randint(300, 4_000) for _ in range(rng.randint(300, 3_500))]
            body = json.dumps({"model": MODEL, "prompt": ids, "max_tokens": 2, "temperature": 0.0}).encode()
            for way, client, each in (
                ("computed", source, body),
                ("pulled", other, with_pull(body, address, f"pull-{number}")),
                ("again", other, body),
            ):
                began_s, was = time.monotonic(), sample(replicas[1].url, LOADED)
                answer = await client.post(
                    "/v1/completions", content=each, headers={"content-type": "application/json"}
                )
                took_s.setdefault(way, []).append(time.monotonic() - began_s)
                usage = answer.raise_for_status().json()["usage"]
                cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
                whole = 0 if way == "computed" else (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                if cached != whole:
                    wrong.append(f"{number} {way}: cached {cached} of {len(ids)}")
                if way == "pulled":
                    print(f"pulled {number}: {len(ids)} tokens, cached {cached}, loaded", end=" ")
                    print(f"{sample(replicas[1].url, LOADED) - was:.0f}, {took_s[way][-1] * 1e3:.1f} ms", flush=True)
                await asyncio.sleep(0.3)
    print("pulls:", {way: f"{median(all_s) * 1e3:.1f} ms" for way, all_s in took_s.items()}, "wrong", wrong, flush=True)


async def hand_over(replicas: Sequence[GpuReplica], router: Router) -> None:
    """Long prompts through a router that has the one prefill and the other decode, beside streams that decode."""
    source, other = replicas
    await asyncio.to_thread(wait_until, "a warm pair", lambda: warmed(router) > 0, PAIR_TIMEOUT_S)
    async with httpx.AsyncClient(base_url=router.url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as client:
        async with decoding(client, other, "beside"):
            was = sample(other.url, LOADED)
            answers = await send_all(client, calls((CHAT, COMPLETIONS, MESSAGES, RESPONSES), "two legs", rounds=2))
            fetched = sample(other.url, LOADED) - was
    split = two_legs(source, other, answers)
    tokens = sum(answer.prompt_tokens for answer in split)
    print(f"handed over: {len(split)} of {len(answers)} in two legs, {tokens} tokens, {fetched:.0f} fetched")
    for answer in answers:
        print(f"  {answer.prompt_tokens} asked, {answer.cached_tokens} cached, by {answer.prefiller or 'itself'}")


def main(words: Sequence[str] | None = None) -> int:
    """Start both engines, pull, hand over, write down what they published, end all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/warmroute-gpu/peers"))
    told = parser.parse_args(words)
    replicas, ports = peers(told.folder, told.out)
    router: Router | None = None
    rows: list[dict[str, Any]] = []
    try:
        for replica in replicas:
            replica.start()
        for replica in replicas:
            print(f"{replica.name} ready after {replica.wait_ready():.0f} s of waiting", flush=True)
        listener = Listener(replicas)
        asyncio.run(touch(replicas))
        asyncio.run(pull(replicas, f"127.0.0.1:{ports[0]}"))
        listener.close()
        print(f"blocks {dict(listener.events())}", flush=True)
        rows = [each.line() for each in listener.heard]
        endpoints = [f"{replica.url}=127.0.0.1:{port}" for replica, port in zip(replicas, ports, strict=True)]
        more = ["--tokenizer", str(told.folder / "model"), "--set", f"split.endpoints={json.dumps(endpoints)}"]
        more += split_settings("offloading", replicas[0], replicas[1])
        router = Router([replica.url for replica in replicas], told.out, "peers-router", more)
        router.wait_ready()
        asyncio.run(hand_over(replicas, router))
    finally:
        metrics = {"kind": "metrics", "lines": [page(replica) for replica in replicas]}
        write(told.out / "peers.jsonl.gz", [{"kind": "head"}, *rows, metrics])
        for server in [each.server for each in replicas] + [router.server if router else None]:
            if server is not None:
                server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
