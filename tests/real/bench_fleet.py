"""Routers of several makers before the same vLLM replicas, one after the other, each under the same load.

Between two of them the replicas forget their prefixes, and every router is a new process: what one learned or left in
a cache helps no other.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.common import rivals
from loadtest.common.processes import free_port
from tests.real.bench_serve import Load, Told, bench
from tests.real.install import REPO, model_dir
from tests.real.processes import Server, wait_until
from tests.real.router_process import Router
from tests.real.vllm_server import Replica, get, sample

RIVAL = "sglang-router"
READY_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 60.0
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
ANSWERED, RUNNING = "vllm:request_success_total", "vllm:num_requests_running"


@dataclass(frozen=True)
class Seen:
    """One router under one load: what the generator told, and what the engines counted."""

    router: str
    told: Told
    hit_tokens: float
    query_tokens: float
    answered: tuple[int, ...]
    """Requests that each replica answered."""

    @property
    def hit_rate(self) -> float:
        """Cached part of all prompt tokens, by the engines' counters."""
        return self.hit_tokens / max(1.0, self.query_tokens)

    def line(self) -> str:
        """All of it, for whoever reads the run's figures."""
        told = self.told
        return (
            f"{self.router}: {told.completed} answered, {told.failed} failed; TTFT p50 {told.ttft_p50_s:.3f} s, p90 "
            f"{told.ttft_p90_s:.3f} s; end to end p90 {told.e2e_p90_s:.2f} s; {told.output_tokens_per_s:.0f} tokens/s; "
            f"hit rate {self.hit_rate:.1%}; answered {' + '.join(map(str, self.answered))}"
        )


def there() -> bool:
    """Whether the rival is installed."""
    return RIVAL in rivals.find_installed(rivals.ENVIRONMENT)


def forget(replicas: Sequence[Replica]) -> None:
    """Have every replica, which has nothing to do, drop what it has cached. AssertionError where one does not."""
    for replica in replicas:
        wait_until(f"{replica.name} is idle", lambda it=replica: it.gauge(RUNNING) == 0, IDLE_TIMEOUT_S)  # type: ignore[misc]
        asked = urllib.request.Request(f"{replica.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(asked, timeout=READY_TIMEOUT_S) as answer:
            assert answer.status == 200, f"{replica.name}: {answer.status}"


@contextmanager
def ours(replicas: Sequence[Replica], folder: Path, name: str, policy: str) -> Iterator[Router]:
    """warmroute with this policy and the model's tokenizer, ready."""
    more = ["--policy", policy, "--tokenizer", str(model_dir())]
    router = Router([each.url for each in replicas], folder, name, more)
    try:
        router.wait_ready()
        router.wait_replicas(len(replicas))
        yield router
    finally:
        router.server.kill()


@contextmanager
def theirs(replicas: Sequence[Replica], folder: Path, name: str) -> Iterator[str]:
    """The URL of the rival with its own cache-aware policy, ready."""
    rival = rivals.find_installed(rivals.ENVIRONMENT)[RIVAL]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = Server(
        name, rival.words(port, [each.url for each in replicas], folder), folder / f"{name}.log", os.environ, REPO
    )
    try:
        server.wait_ready(lambda: get(f"{url}/readiness")[0] == 200, READY_TIMEOUT_S)
        yield url
    finally:
        server.kill()


def counted(replicas: Sequence[Replica], metric: str) -> float:
    """A counter of all replicas together."""
    return sum(sample(each.url, metric) for each in replicas)


def seen(router: str, url: str, replicas: Sequence[Replica], load: Load, seed: int, file: Path) -> Seen:
    """Put the load on the router at `url`, whose replicas have just forgotten all."""
    before = counted(replicas, HITS), counted(replicas, QUERIES)
    answered = [each.gauge(ANSWERED) for each in replicas]
    told = bench(url, load, seed, file)
    return Seen(
        router,
        told,
        counted(replicas, HITS) - before[0],
        counted(replicas, QUERIES) - before[1],
        tuple(int(each.gauge(ANSWERED) - was) for each, was in zip(replicas, answered, strict=True)),
    )
