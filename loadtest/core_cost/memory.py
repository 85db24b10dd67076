"""Memory of the router by purpose: `python -m loadtest cost --memory`.

Counted by tracemalloc in this process:

- a block of a replica's cache by our own estimate, and by its events
- an open request
- the state of a conversation apart from its blocks
- the body and ids of a long conversation that are kept so that its next turn is parsed only from there on

Counted by the kernel, of a separate router process: a client's idle connection, an open stream, and the router before
any request. The CPU of its start up to `listening` is measured at the same time.

The total for `REPLICAS` replicas, `STREAMS` streams and `CONVERSATIONS` conversations is the sum of these.
Conversations have CONVERSATION_TOKENS tokens, each held by one replica. The router drops the oldest of them beyond its
budgets (`routing.index_bytes_max`, `events.index_bytes_max`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

from rich.console import Console

from loadtest.common.processes import HOST, LISTENING, run_process
from loadtest.common.report import Row
from loadtest.common.usage import rss_mb, usage
from loadtest.core_cost import sizing
from loadtest.core_cost.corpus import MODEL, ConversationGenerator, body_of
from loadtest.core_cost.growth import Fleet, open_bytes
from loadtest.core_cost.sizing_report import STREAMS as STREAMS_CASE
from loadtest.core_cost.world import CHAT, CostError
from router.core.cache_state.prefix_index import PrefixIndex
from router.core.dialects import PATHS
from router.core.prompts.block_keys import BLOCK_BYTES, chain_of
from router.core.prompts.incremental_parse import BodyPrefixCache

REPLICAS, STREAMS, CONVERSATIONS, CONVERSATION_TOKENS = 256, 10_000, 1_000_000, 4_000
BYTES_PER_TOKEN, BLOCK_TOKENS = 4, 16
BLOCKS, PROMPTS, CONNECTIONS, STARTS = 100_000, 500, 400, 4
STREAMS_OPEN = (200, 1_000)
LONG_TOKENS, LONG_MESSAGES = 50_000, 99
INDEX = ("*/router/core/cache/*", "*/router/core/prompts/blocks.py")  # make blocks, and the keys that name them
# Description of each row's case, in words.
WORDS = {
    "estimate_block_bytes": "a block of 512 bytes by our own estimate",
    "events_block_bytes": "a block by a replica's events",
    "open_request_bytes": "an open request, without its connections",
    "conversation_bytes": "a conversation, besides its blocks",
    "kept_message_bytes_per_token": "a token of a long conversation's body that is kept for its next turn",
    "replica_bytes": "a replica with a stream",
    "start_cpu_s": "CPU of the start, up to `listening`, in seconds",
    "start_mb": "a router that has just started, MB",
    "idle_connection_bytes": "a client's idle connection",
    "stream_bytes": "an open stream, with its request and both connections",
    "256_replicas_mb": "256 replicas, MB",
    "10000_streams_mb": "10,000 streams, MB",
    "1000000_conversations_estimated_mb": "a million conversations of 4,000 tokens by our own estimate, MB",
    "1000000_conversations_by_events_mb": "the same by events, MB",
}
GOALS = {
    "start_cpu_s": 0.5,
    "estimate_block_bytes": 192.0,
    "events_block_bytes": 192.0,
    "conversation_bytes": 2_048.0,
    "idle_connection_bytes": 16_384.0,
    "kept_message_bytes_per_token": 16.0,
    "stream_bytes": 40_960.0,
}


def judge_case(case: str, got: float, note: str | None = None) -> Row:
    """Return a row, with its goal if it has one."""
    limit = GOALS.get(case)
    if limit is None:
        return Row(case=case, got=got, note=note)
    timed = True if case.endswith("_s") else None
    return Row(case=case, goal=f"<= {limit:,g}", expected=limit, got=got, ok=got <= limit, timed=timed, note=note)


@contextmanager
def _measure_held(found: list[float]) -> Iterator[None]:
    """Count the bytes that a block of code leaves allocated."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        gc.collect()
        found.append(float(tracemalloc.get_traced_memory()[0] - before))
    finally:
        tracemalloc.stop()


# In this process


def estimate_block_bytes() -> float:
    """Return the bytes of a block that one replica holds by estimate."""
    index, held, rng = PrefixIndex(1 << 30), list[float](), random.Random(1)
    index.add("it", 2 * BLOCKS)
    with _measure_held(held):
        for _ in range(0, BLOCKS, 64):
            index.touch("it", [rng.getrandbits(64) for _ in range(64)], 1.0)
    return held[0] / BLOCKS


def conversation_bytes() -> float:
    """Return the bytes of an answered conversation, apart from its blocks in the index."""
    fleet, besides = Fleet(8), [tracemalloc.Filter(inclusive=False, filename_pattern=at) for at in INDEX]
    gc.collect()
    tracemalloc.start()
    try:
        fleet.serve_prompts(CONVERSATION_TOKENS, PROMPTS)
        gc.collect()
        taken = tracemalloc.take_snapshot().filter_traces(besides).statistics("filename")
    finally:
        tracemalloc.stop()
    return sum(each.size for each in taken) / PROMPTS


def kept_bytes_per_token() -> float:
    """Return the bytes per token of a long conversation, with decoded messages kept for its next turn."""
    dialect, seen, held = PATHS[CHAT], BodyPrefixCache(bytes_max=1 << 30, seed=1), list[float]()
    talks = ConversationGenerator(BYTES_PER_TOKEN)
    messages = talks.messages("kept", 0, LONG_MESSAGES, LONG_TOKENS // LONG_MESSAGES)
    bodies = [body_of(messages[:count], tools=False) for count in (LONG_MESSAGES - 2, LONG_MESSAGES)]
    with _measure_held(held):
        for body in bodies:
            ask = dialect.parse(CHAT, body, seen=seen)
            if chain_of(ask, MODEL) is None or ask.prompt is None:
                raise CostError("a conversation has no chain")
            ask.prompt.release()
        ask.decoded = None
    return held[0] / LONG_TOKENS


# A separate router


async def started_rows(told: Callable[[], None]) -> list[Row]:
    """Return rows of a router that is started a few times.

    They are its CPU until it listens, its memory then, and the memory of idle connections.
    """
    cpu_s, base_mb, connection = list[float](), list[float](), 0.0
    command = [sys.executable, "-m", "router", "serve", "--replica", f"http://{HOST}:9", "--port", "0"]
    with _enable_bytecode():
        for turn in range(STARTS):
            async with run_process(f"router {turn}", [*command, "--admin-port", "0"]) as process:
                [listening] = await process.wait_for_output(LISTENING)
                cpu_s.append(sum(usage(process.pid).scheduled_s.values()))
                await asyncio.sleep(1.0)
                base_mb.append(rss_mb(process.pid))
                if turn == STARTS - 1:
                    connection = await _connection_bytes(listening[1], process.pid)
            told()
    return [
        judge_case("start_cpu_s", min(cpu_s), "the least of a few starts, up to `listening`"),
        judge_case("start_mb", statistics.median(base_mb)),
        judge_case("idle_connection_bytes", connection),
    ]


@contextmanager
def _enable_bytecode() -> Iterator[None]:
    """Let children use Python's bytecode as in an installation, in any environment. The first child compiles it."""
    before = {name: os.environ.pop(name, None) for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")}
    with tempfile.TemporaryDirectory(prefix="warmroute-bytecode-") as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        try:
            yield
        finally:
            del os.environ["PYTHONPYCACHEPREFIX"]
            os.environ.update({name: value for name, value in before.items() if value is not None})


async def _connection_bytes(url: str, pid: int) -> float:
    """Return the bytes of a client's idle connection on which one request was answered.

    The first connections are left out, because they fill memory that was already reserved.
    """
    port = int(url.rsplit(":", 1)[1])
    async with AsyncExitStack() as stack:
        for _ in range(CONNECTIONS):
            await _open_connection(stack, port)
        before = rss_mb(pid)
        for _ in range(CONNECTIONS):
            await _open_connection(stack, port)
        return max(0.0, rss_mb(pid) - before) * 1e6 / CONNECTIONS


async def _open_connection(stack: AsyncExitStack, port: int) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    stack.callback(writer.close)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: it\r\n\r\n")
    if not (await reader.readline()).startswith(b"HTTP/1.1 200"):
        raise CostError("the router is not healthy")


# All of it


def sums(rows: Sequence[Row]) -> list[Row]:
    """Return the memory of many replicas, streams and conversations together, in MB."""
    got = {row.case: row.got or 0.0 for row in rows}
    blocks = CONVERSATION_TOKENS * BYTES_PER_TOKEN / BLOCK_BYTES
    estimated = CONVERSATIONS * (blocks * got["estimate_block_bytes"] + got["conversation_bytes"]) / 1e6
    exact = CONVERSATIONS * CONVERSATION_TOKENS / BLOCK_TOKENS * got["events_block_bytes"] / 1e6
    return [
        judge_case(f"{REPLICAS}_replicas_mb", REPLICAS * got["replica_bytes"] / 1e6),
        judge_case(f"{STREAMS}_streams_mb", STREAMS * got["stream_bytes"] / 1e6),
        judge_case(f"{CONVERSATIONS}_conversations_estimated_mb", estimated, "without a budget"),
        judge_case(f"{CONVERSATIONS}_conversations_by_events_mb", exact, "without a budget"),
    ]


async def stream_bytes() -> float:
    """Return the bytes of an open stream, with its request and a connection on each side.

    It is the growth of a router from a few hundred streams to a thousand.
    """
    sizes = sizing.Sizes((8,), STREAMS_OPEN, window_s=2.0, rate_per_s=2.0, index_bytes_max=1 << 20)
    rows = await sizing.measure(sizes, Console(stderr=True, quiet=True))
    if failed := [row.errors_by_kind for row in rows if row.errors]:
        raise CostError(f"streams failed: {failed[0]}")
    few, many = (row.rss_mb or 0.0 for row in rows if row.case == STREAMS_CASE)
    return max(0.0, many - few) * 1e6 / (STREAMS_OPEN[1] - STREAMS_OPEN[0])


def replica_bytes() -> float:
    """Return the bytes of a replica that serves a model and has a stream open."""
    held = list[float]()
    with _measure_held(held):
        fleet = Fleet(REPLICAS)
    del fleet
    return held[0] / REPLICAS


def memory_rows(bytes_a_block: Callable[[int], float], told: Callable[[int], None]) -> list[Row]:
    """Return all rows.

    - `bytes_a_block`: measures a block by the events of the given number of holders.
    - `told`: called with the number of finished steps, of STEPS.
    """
    rows, done = list[Row](), 0

    def step() -> None:
        nonlocal done
        done += 1
        told(done)

    fleet = Fleet(8)
    for case, measure in (
        ("estimate_block_bytes", estimate_block_bytes),
        ("events_block_bytes", lambda: bytes_a_block(1)),
        ("open_request_bytes", lambda: open_bytes(fleet)),
        ("conversation_bytes", conversation_bytes),
        ("kept_message_bytes_per_token", kept_bytes_per_token),
        ("replica_bytes", replica_bytes),
    ):
        rows.append(judge_case(case, measure()))
        step()
    rows += asyncio.run(started_rows(step))
    rows.append(judge_case("stream_bytes", asyncio.run(stream_bytes())))
    step()
    return rows + sums(rows)


STEPS = 7 + STARTS
