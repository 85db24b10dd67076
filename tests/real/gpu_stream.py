"""Record what one vLLM with CPU memory says of its blocks, request by request: `python -m tests.real.gpu_stream OUT`.

Needs a GPU and a vLLM built for it in this Python (gpu_tiers.py). One request after the other, each of token ids, to an
engine whose KV pool has 1,008 tokens and whose memory has half as much again. Behind each answer its own counters say
how much of the prompt its GPU had and how much it loaded. The file is as those of tests/data/kv (NOTICE there), and a
request has `loaded` besides: of its `cached` tokens those that came from CPU memory.
"""

from __future__ import annotations

import argparse
import base64
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import zmq

from tests.real.gpu_server import BLOCK_TOKENS, SMALL, GpuReplica, lay_model
from tests.real.gpu_tiers import FROM_GPU, LOADED, page, write
from tests.real.vllm_server import MODEL, sample

GPU_BLOCKS, CPU_BLOCKS = 64, 96
REST_S = 0.06  # in which the events of an answer come
TURNS = {"reuse": 130, "after a reset of the GPU's cache": 20, "after a reset of both": 20}
RESETS = {"reuse": "", "after a reset of the GPU's cache": "false", "after a reset of both": "true"}
END = b"\xff" * 8


def turns(seed: str, count: int) -> Iterator[dict[str, Any]]:
    """Conversations of token ids that grow, some of them salted, the same for the same seed."""
    rng = random.Random(seed)
    open_: list[tuple[str, str, list[int]]] = []
    for number in range(count):
        if len(open_) < 8 or rng.random() < 0.12:
            first = rng.randrange(300, 3_000)
            shared = list(range(1_000, 1_000 + 100)) if rng.random() < 0.5 else []
            ids = [*shared, *range(first, first + rng.randint(30, 300))]
            open_.append((f"{seed} {number}", "tenant" if rng.random() < 0.2 else "", ids))
        at = rng.randrange(len(open_))
        label, salt, ids = open_[at]
        more = [*ids, *range(rng.randrange(300, 3_000), 4_000)[: rng.randint(5, 90)]]
        if len(more) > 800:
            del open_[at]
            continue
        open_[at] = label, salt, more
        yield {"label": label, "salt": salt, "ids": more}


class Recording:
    """The rows of one stream, in the order in which things happened."""

    def __init__(self, replica: GpuReplica, context: zmq.Context[Any]) -> None:
        self.replica = replica
        self.rows: list[dict[str, Any]] = []
        self._events = context.socket(zmq.SUB)
        self._events.set_hwm(0)
        self._events.subscribe(b"")
        self._events.connect(replica.events_endpoint)

    def drain(self, rest_s: float = REST_S) -> None:
        """Take what is published within that time."""
        until_s = time.monotonic() + rest_s
        while (left_s := until_s - time.monotonic()) > 0 and self._events.poll(1_000 * left_s):
            self._note("batch", self._events.recv_multipart())

    def _note(self, kind: str, parts: list[bytes]) -> None:
        topic, seq, payload = parts
        number = int.from_bytes(seq, "big", signed=True)
        said = {"kind": kind, "at": time.time(), "topic": topic.decode(), "seq": number}
        self.rows.append({**said, "payload": base64.b64encode(payload).decode()})

    def ask(self, client: httpx.Client, turn: dict[str, Any], tokens: int) -> None:
        """One request, how much of it was cached and loaded, and what was published meanwhile."""
        body = {"model": MODEL, "prompt": turn["ids"], "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        body |= {"cache_salt": turn["salt"]} if turn["salt"] else {}
        before = [sample(self.replica.url, name) for name in (FROM_GPU, LOADED)]
        began_s = time.monotonic()
        usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
        took_s = time.monotonic() - began_s
        at = len(self.rows)
        self.drain()
        hit, loaded = (sample(self.replica.url, n) - was for n, was in zip((FROM_GPU, LOADED), before, strict=True))
        row = {"kind": "request", "label": turn["label"], "prompts": [{"ids": turn["ids"]}], "took_s": round(took_s, 4)}
        row |= {"salt": turn["salt"]} if turn["salt"] else {}
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        self.rows.insert(at, row | {"cached": cached, "loaded": int(loaded), "gpu": int(hit)})

    def replay(self, context: zmq.Context[Any]) -> None:
        """Ask for all batches again."""
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{self.replica.replay_port}")
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while socket.poll(2_000):
            parts = socket.recv_multipart()
            self._note("replay", parts[-3:])
            if parts[-2] == END:
                break
        socket.close(linger=0)


def record(replica: GpuReplica, context: zmq.Context[Any]) -> list[dict[str, Any]]:
    """All rows: requests of each part, resets between them, and a replay."""
    recording, rng = Recording(replica, context), random.Random("answers")
    with httpx.Client(base_url=replica.url, timeout=60.0, trust_env=False) as client:
        recording.drain(0.5)
        for part, count in TURNS.items():
            if RESETS[part]:
                done = client.post("/reset_prefix_cache", params={"reset_external": RESETS[part]})
                print(f"{part}: reset {done.status_code}", flush=True)
            for turn in turns("reuse" if RESETS[part] else part, count):
                recording.ask(client, turn | {"label": f"{part}: {turn['label']}"}, rng.randint(1, 24))
        recording.drain(0.5)
        recording.replay(context)
    return recording.rows


def main(words: Sequence[str] | None = None) -> int:
    """Start the engine, record, end it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/warmroute-gpu/stream"))
    parser.add_argument("--chunk", type=int, default=1, help="blocks that CPU memory keeps together")
    told = parser.parse_args(words)
    model = lay_model(told.folder / "model", SMALL)
    extra = {"blocks_per_chunk": told.chunk} if told.chunk > 1 else {}
    replica = GpuReplica(f"stream-{told.chunk}", told.out, model, SMALL, GPU_BLOCKS, CPU_BLOCKS, **extra)
    with zmq.Context() as context:
        try:
            replica.start()
            print(f"{replica.name} ready after {replica.wait_ready():.0f} s of waiting", flush=True)
            rows = record(replica, context)
            head = {"engine": "vllm", "block_tokens": BLOCK_TOKENS, "command": replica.command()}
            metrics = {"kind": "metrics", "lines": page(replica)}
            write(told.out / f"stream-{told.chunk}.jsonl.gz", [head, *rows, metrics])
            asked = [row for row in rows if row["kind"] == "request"]
            print(f"{len(asked)} requests, {sum(row['loaded'] > 0 for row in asked)} loaded")
        finally:
            if replica.server is not None:
                replica.server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
