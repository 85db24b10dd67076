"""A publisher in a process of its own, as vLLM 0.32's: `python -m tests.engines.kv_process BATCHES BLOCKS`.

Theory: vllm/distributed/kv_events.py serves a replay in one loop of sends on a ROUTER socket with ZeroMQ's default
queue of 1,000 messages, and a ROUTER drops silently what its queue cannot take. Prints both ports, then serves until
its standard input ends.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def main() -> None:
    """Store `BATCHES` batches of `BLOCKS` blocks of 16 tokens; every third removes those stored two batches before."""
    batches, blocks = int(sys.argv[1]), int(sys.argv[2])
    context = zmq.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (pub, router)]
    buffer = [(seq, _payload(seq, blocks)) for seq in range(batches)]
    print(*ports, flush=True)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1):
            break
        if router not in ready:
            continue
        client, _, first = router.recv_multipart()
        for seq, payload in buffer:
            if seq >= int.from_bytes(first, "big"):
                router.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
        router.send_multipart([client, b"", b"", END, b""])
    context.destroy(linger=0)


def _payload(seq: int, blocks: int) -> bytes:
    first = seq * blocks + 1
    stored = {
        "type": "BlockStored",
        "block_hashes": list(range(first, first + blocks)),
        "parent_block_hash": None,
        "token_ids": [token % 50_000 for token in range(first * 16, (first + blocks) * 16)],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * blocks,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    events: list[object] = [stored]
    if seq % 3 == 2:
        gone = range(first - 2 * blocks, first - blocks)
        events = [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0} for name in gone]
        events.append(stored)
    return msgspec.msgpack.encode([time.time(), events, 0])


if __name__ == "__main__":
    main()
