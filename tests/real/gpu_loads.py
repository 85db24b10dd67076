"""How long vLLM takes to the first token where a prompt is computed, on the GPU, or loaded from CPU memory.

`python -m tests.real.gpu_loads OUT`; needs a GPU and a vLLM built for it in this Python (gpu_tiers.py). One request at
a time with nothing else on the GPU, a model of Llama-3.1-8B's shape. What a request loaded
is the engine's own count.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx

from tests.real.gpu_server import LARGE, GpuReplica, lay_model
from tests.real.gpu_tiers import FROM_GPU, LOADED, page
from tests.real.processes import wait_until
from tests.real.vllm_server import MODEL, sample

GPU_BLOCKS, CPU_BLOCKS = 1_300, 8_192  # 20,800 and 131,072 tokens: 2.7 and 17 GB
LENGTHS, ROUNDS = (1_000, 4_000, 16_000), 4
GO_TIMEOUT_S = 400.0


def first_token_s(client: httpx.Client, ids: list[int]) -> float:
    """Seconds to the first event of a stream of one token."""
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "stream": True}
    began_s = time.monotonic()
    took_s = 0.0
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for _ in answer.iter_lines():
            took_s = took_s or time.monotonic() - began_s
    return took_s


def main(words: Sequence[str] | None = None) -> int:
    """Start the engine, wait until it may begin, measure, end it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/warmroute-gpu/loads"))
    parser.add_argument("--go", type=Path, help="begin when this file is there")
    told = parser.parse_args(words)
    replica = GpuReplica("loads", told.out, lay_model(told.folder / "model", LARGE), LARGE, GPU_BLOCKS, CPU_BLOCKS)
    try:
        replica.start()
        print(f"{replica.name} ready after {replica.wait_ready():.0f} s of waiting", flush=True)
        if told.go is not None:
            wait_until("go", told.go.exists, GO_TIMEOUT_S)
        measure(replica)
        for way in ("load", "store"):
            moved, took_s = (sample(replica.url, f"vllm:kv_offload_{way}_{what}_total") for what in ("bytes", "time"))
            print(f"{way}s: {moved / 1e9 / took_s:.1f} GB/s by its own counters")
        print(json.dumps(page(replica)))
    finally:
        if replica.server is not None:
            replica.server.kill()
    return 0


def measure(replica: GpuReplica) -> None:
    """Print medians for each length."""
    rng = random.Random("loads")

    def ids(count: int) -> list[int]:
        return [rng.randint(300, 4_000) for _ in range(count)]

    with httpx.Client(base_url=replica.url, timeout=60.0, trust_env=False) as client:
        for length in (*LENGTHS, 1_000):
            first_token_s(client, ids(length))
        for length in LENGTHS:
            took: dict[str, list[float]] = {"computed": [], "GPU": [], "CPU": []}
            from_gpu, loaded = list[float](), list[float]()
            for _ in range(ROUNDS):
                prompt = ids(length)
                took["computed"].append(first_token_s(client, prompt))
                was = sample(replica.url, FROM_GPU)
                took["GPU"].append(first_token_s(client, prompt))
                from_gpu.append(sample(replica.url, FROM_GPU) - was)
                for _ in range(2):
                    first_token_s(client, ids(16_000))  # pushes it out of the KV pool
                was = sample(replica.url, LOADED)
                took["CPU"].append(first_token_s(client, prompt))
                loaded.append(sample(replica.url, LOADED) - was)
            times = ", ".join(f"{where} {median(all_s) * 1e3:.1f} ms" for where, all_s in took.items())
            found = f"on the GPU {median(from_gpu):.0f}, loaded {median(loaded):.0f}"
            print(f"{length} tokens: {times}; {found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
