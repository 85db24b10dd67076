"""Hold what a router believes of vLLM's tiers against a vLLM on a GPU: `python -m tests.real.gpu_tiers FLEET OUT`.

Needs a GPU and a vLLM built for it in this Python; nothing of CI runs it. Each FLEET is one or two engines with a
router in front of them and the mixed workload of exact_workload.py, so much of it that both the KV pool and the memory
behind it evict all the time. Every request, and every message that the engines publish, goes to `OUT/FLEET.jsonl.gz`
in the order of their times, and what was foretold to the token is printed, GPU and tier together, since an engine's
usage does not tell them apart. What it loaded by its own counters is printed beside what the router said it would load.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gzip
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from tests.real.conftest import CLIENT_TIMEOUT_S
from tests.real.exact_drive import Drive, Seen
from tests.real.exact_workload import scripts
from tests.real.gpu_server import BLOCK_TOKENS, SMALL, GpuReplica, lay_model
from tests.real.processes import wait_until
from tests.real.router_process import Router
from tests.real.talk import prose, word_tokens
from tests.real.vllm_server import MODEL, get, sample

GPU_BLOCKS = 704  # 11,264 tokens, as the test on CPUs has
CPU_BLOCKS = 1_056
REQUESTS, CONCURRENCY = 400, 2
EXACT_TIMEOUT_S = 30.0
LOADED, FROM_GPU = "vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"
TOLD = ("offload", "prefix_cache", "by_source", "preemption")
TIERING: dict[str, Any] = {"spec_name": "TieringOffloadingSpec"}
FLEETS: dict[str, tuple[int, dict[str, Any]]] = {
    "pair": (2, {}),
    "answers": (1, {"offload_prompt_only": False}),
    "chunks": (1, {"blocks_per_chunk": 3}),
    "placeholders": (1, {"self_describing_kv_events": False}),
    "files": (1, TIERING),
}
"""How many engines each fleet has, and what it tells the connector."""


@dataclass
class Heard:
    """One message of an engine, and when it came."""

    at_s: float
    replica: str
    topic: str
    seq: int
    payload: bytes

    def line(self) -> dict[str, Any]:
        """As it is written down."""
        payload = base64.b64encode(self.payload).decode()
        named = {"kind": "batch", "at": self.at_s, "replica": self.replica}
        return {**named, "topic": self.topic, "seq": self.seq, "payload": payload}


@dataclass
class Listener:
    """Hears all that replicas publish, in a thread of its own."""

    replicas: Sequence[GpuReplica]
    heard: list[Heard] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with zmq.Context() as context:
            sockets: dict[Any, str] = {}
            for replica in self.replicas:
                socket = context.socket(zmq.SUB)
                socket.set_hwm(0)
                socket.subscribe(b"")
                socket.connect(replica.events_endpoint)
                sockets[socket] = replica.url
            poller = zmq.Poller()
            for socket in sockets:
                poller.register(socket, zmq.POLLIN)
            while not self._over.is_set():
                for socket, _ in poller.poll(100):
                    topic, seq, payload = socket.recv_multipart()
                    number = int.from_bytes(seq, "big")
                    self.heard.append(Heard(time.time(), sockets[socket], topic.decode(), number, payload))
            for socket in sockets:
                socket.close(linger=0)

    def close(self) -> None:
        """Hear no more."""
        self._over.set()
        self._thread.join()

    def events(self) -> Counter[str]:
        """Blocks by kind of event and medium."""
        counted: Counter[str] = Counter()
        for each in self.heard:
            for event in msgspec.msgpack.decode(each.payload)[1]:
                counted[f"{event['type']} {event.get('medium', '')}"] += len(event.get("block_hashes", ()))
        return counted


def replicas_of(fleet: str, folder: Path, out: Path) -> list[GpuReplica]:
    """The engines of a fleet, not started yet."""
    count, extra = FLEETS[fleet]
    model = lay_model(folder / "model", SMALL)
    if extra is TIERING:
        files = {"type": "fs", "root_dir": str(folder / "files"), "enable_kv_events": True}
        extra = extra | {"secondary_tiers": [files]}
    names = [f"{fleet}-{number}" for number in range(count)]
    return [GpuReplica(name, out, model, SMALL, GPU_BLOCKS, CPU_BLOCKS, **extra) for name in names]


def page(replica: GpuReplica) -> list[str]:
    """The lines of its metrics that speak of caches and transfers."""
    lines = get(f"{replica.url}/metrics")[1].splitlines()
    return [line for line in lines if line.startswith("vllm:") and any(word in line for word in TOLD)]


def request_line(seen: Seen, skew_s: float) -> dict[str, Any]:
    """A request and its answer, as they are written down; `skew_s` is the wall clock less the monotonic one."""
    said = seen.answer
    times = {"at": seen.sent_s + skew_s, "end": seen.ended_s + skew_s}
    asked = {"number": seen.number, "label": seen.call.kind, "path": seen.call.path, "body": seen.call.body}
    placed = {"replica": said.replica, "grade": said.grade, "reason": said.reason}
    foretold = {"predicted": said.predicted_tokens, "predicted_tier": said.tier_tokens}
    found = {"cached": said.cached_tokens, "prompt_tokens": said.prompt_tokens, "failure": said.failure}
    return {"kind": "request", **times, **asked, **placed, **foretold, **found}


def judge(name: str, seen: list[Seen], loaded: float, say: Callable[[str], None]) -> None:
    """Print how much was foretold; `loaded` are tokens by the engines' own count."""
    failed = [each for each in seen if each.answer.failure]
    exact = [each for each in seen if each.answer.grade == "exact" and not each.answer.failure]
    wrong = [each for each in exact if not each.equal]
    over = [(each.answer.predicted_tokens or 0) - each.answer.cached_tokens for each in wrong]
    too_many = sum(tokens > BLOCK_TOKENS for tokens in over)
    tier = [each for each in exact if each.answer.tier_tokens]
    say(
        f"{name}: {len(seen)} requests, {len(failed)} failed, {len(exact)} graded exact; of these "
        f"{len(exact) - len(wrong)} foretold to the token ({1 - len(wrong) / max(1, len(exact)):.2%}), "
        f"{too_many} more than a block too many; {len(tier)} with something to load, of these "
        f"{sum(each.equal for each in tier)} foretold; tokens: {sum(e.answer.prompt_tokens for e in seen)} asked, "
        f"{sum(e.answer.cached_tokens for e in seen)} cached; to load {sum(e.answer.tier_tokens for e in seen)} by the "
        f"router, {loaded:.0f} by the engines"
    )
    for each in [*failed[:5], *wrong[:25]]:
        say(f"  {each.line()} tier {each.answer.tier_tokens} {each.answer.failure[:200]}")


async def touch(replicas: Sequence[GpuReplica]) -> None:
    """Have every replica publish something, and load what it compiles for its first requests."""
    for replica in replicas:
        async with httpx.AsyncClient(base_url=replica.url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as direct:
            body = {"model": MODEL, "prompt": prose(f"touch {replica.name}", 3 * BLOCK_TOKENS), "max_tokens": 2}
            (await direct.post("/v1/completions", json=body)).raise_for_status()


def all_exact(router: Router, count: int) -> bool:
    """Whether all replicas are graded so."""
    return sum(row["grade"] == "exact" for row in router.replica_rows()) == count


async def ask_fleet(
    fleet: str, replicas: list[GpuReplica], router: Router, requests: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The mixed workload through the router, two at a time and then eight; the lines to write down."""
    listener = Listener(replicas)
    await asyncio.sleep(0.3)
    await touch(replicas)
    await asyncio.to_thread(wait_until, "exact", lambda: all_exact(router, len(replicas)), EXACT_TIMEOUT_S)
    before = [page(replica) for replica in replicas]
    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as direct:
        allowed = await word_tokens(direct)
    seen: list[Seen] = []
    async with httpx.AsyncClient(base_url=router.url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as client:
        drive = Drive(client, scripts(fleet, allowed), fleet, 18 * len(replicas))
        for count, concurrency in ((requests, CONCURRENCY), (requests // 4, 8)):
            was = sum(sample(replica.url, LOADED) for replica in replicas)
            began_s, some = time.monotonic(), await drive.run(count, concurrency)
            now = sum(sample(replica.url, LOADED) for replica in replicas)
            say(f"{fleet}: {count} requests in {time.monotonic() - began_s:.1f} s")
            judge(f"{fleet}, {concurrency} at a time", some, now - was, say)
            seen += some
    listener.close()
    say(f"{fleet}: blocks {dict(listener.events())}")
    skew_s = time.time() - time.monotonic()
    rows = [request_line(each, skew_s) for each in seen] + [each.line() for each in listener.heard]
    rows.sort(key=lambda row: row["at"])
    metrics = {"kind": "metrics", "before": before, "after": [page(replica) for replica in replicas]}
    return [*rows, metrics, {"kind": "router", "rows": router.replica_rows()}]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON line for each."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    """Start a fleet and a router, ask, judge, write down, end all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fleet", choices=sorted(FLEETS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/warmroute-gpu"))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    told = parser.parse_args(words)
    folder = told.folder / told.fleet
    folder.mkdir(parents=True, exist_ok=True)
    replicas = replicas_of(told.fleet, folder, told.out)
    router: Router | None = None

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        for replica in replicas:
            replica.start()
        for replica in replicas:
            say(f"{replica.name} ready after {replica.wait_ready():.0f} s of waiting")
        more = ["--tokenizer", str(folder / "model"), "--set", f"tiers.kv_bytes_per_token={SMALL.block_bytes // 16}"]
        router = Router([replica.url for replica in replicas], told.out, f"{told.fleet}-router", more)
        router.wait_ready()
        rows = asyncio.run(ask_fleet(told.fleet, replicas, router, told.requests, say))
        write(told.out / f"{told.fleet}.jsonl.gz", [{"kind": "head", "command": replicas[0].command()}, *rows])
    finally:
        for server in [each.server for each in replicas] + [router.server if router else None]:
            if server is not None:
                server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
