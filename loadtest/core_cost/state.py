"""Cost of handing a router's state over to another router: `python -m loadtest cost --state`.

A router knows REPLICAS replicas with BLOCKS blocks each, by our own estimate and by their events, in prompts of
PROMPT_BLOCKS, every second one shared by two replicas. All of it is made into pieces, written to a file, read, and
taken over by a second router, by the code that the control plane runs. All times are CPU time; the longest slice is
work on the event loop."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from loadtest.common.in_process_router import join, warm_router
from loadtest.common.report import Row
from loadtest.core_cost.world import CostError
from router.control import snapshot_builder
from router.control.snapshot_file import read_chunks, write_chunks
from router.core.kv_events.event_state_codec import BlockPage, EngineShape, EngineState, pack_numbers
from router.core.kv_events.stream import KvStream
from router.core.kv_events.stream_steps import RequestReplay
from router.core.peer_sync.snapshot_format import decode_piece
from router.core.peer_sync.snapshot_import import StateParts, import_replica, same_engine, take_models
from router.core.placement.router import Router
from router.core.types.placements import Confidence
from router.core.types.replicas import Load
from router.engines.kv_events.snapshot_resume import import_state, state_of
from router.eventloop import GC_THRESHOLDS, YIELD_AFTER_S, CooperativeBudget

REPLICAS, BLOCKS, PROMPT_BLOCKS = 64, 20_000, 250
BLOCK_TOKENS = 16
ROOM_BYTES = 4 << 30
EMPTY = msgspec.msgpack.encode([1.0, [], 0])  # a batch without events
GOALS = {"make_slice_ms": 1.0, "take_slice_ms": 1.0}
DOUBLINGS = 40  # slices in which a table doubles: of two maps of all keys, and of 64 replicas' first
WORDS = {
    "make_s": "made into pieces, on the loop",
    "write_s": "written, off the loop",
    "read_s": "read and checked, off the loop",
    "take_s": "taken over, on the loop",
    "make_slice_ms": "longest slice of making it",
    "take_slice_ms": "longest slice of taking it over, but for tables that double",
    "take_doubling_ms": "longest slice in which one doubles",
    "file_mb": "the file, MB",
    "block_bytes": "bytes of a block by estimate and by events",
}


class Slices(CooperativeBudget):
    """A pace that records the length of each slice, in CPU time of this thread."""

    def __init__(self) -> None:
        super().__init__(clock=time.thread_time)
        self.slices_s = list[float]()

    async def step(self) -> None:
        """End a step, and record the slice if it is over."""
        self.longest_s = 0.0
        await super().step()
        if self.longest_s >= YIELD_AFTER_S:  # the slice is over
            self.slices_s.append(self.longest_s)

    def longest_ms(self, but: int = 0) -> float:
        """Return the longest slice in ms, without the `but` longest ones."""
        return 1e3 * sorted([0.0] * (but + 1) + self.slices_s)[-1 - but]


@dataclass
class SeededRouter:
    """A router with known state, and its event streams."""

    router: Router
    ids: list[str]
    pace: Slices = field(default_factory=Slices)

    async def state(self, replica: str) -> EngineState | None:
        """Return the state of the replica's events."""
        stream = KvStream(replays=True)
        stream.on_connected(0.0)
        while (step := stream.next(0.0)) is not None:
            if isinstance(step, RequestReplay):
                stream.on_replay_batch(step.token, 0, EMPTY, 0.0)
                stream.replay_ended(step.token, 0.0)
        return await state_of(stream, self.router.knowledge, replica, self.pace)


def known_router(replicas: int, *, blocks: int = 0, seed: int = 1) -> SeededRouter:
    """Return a router with `blocks` blocks at each replica."""
    router = warm_router(index_bytes_max=ROOM_BYTES, stored_bytes_max=ROOM_BYTES)
    load = Load(kv_tokens_max=BLOCKS * 256, block_tokens=BLOCK_TOKENS, prompt_tokens_total=1.0, started_s=5.0)
    ids, rng = join(router, replicas, "m", load), random.Random(seed)
    shape = EngineShape(BLOCK_TOKENS, True, False, [("GPU", 0)], [])
    for n, id_ in enumerate(ids):
        router.index.resize(id_, 2 * BLOCKS)
        shared = random.Random(n // 2)
        if blocks:
            router.knowledge.reset_to(id_, shape)
        for prompt in range(blocks // PROMPT_BLOCKS):
            source = shared if prompt % 2 else rng
            keys = [source.getrandbits(64) for _ in range(PROMPT_BLOCKS)]
            router.index.touch(id_, keys, float(prompt))
            _import_blocks(router, id_, [rng.getrandbits(64) for _ in keys], keys)
        if blocks:
            router.knowledge.grade(id_, Confidence.EXACT, "joined at batch 0", 1.0)
    return SeededRouter(router, ids)


def _import_blocks(router: Router, id_: str, hashes: list[int], keys: list[int]) -> None:
    router.knowledge.import_page(id_, BlockPage(pack_numbers(hashes), pack_numbers(keys)))


@dataclass
class Spent:
    """CPU seconds of a run, and its longest slices."""

    got: dict[str, float] = field(default_factory=dict)

    def measure_cpu(self, name: str, work: Callable[[], object]) -> object:
        """Do the work, and count the CPU time of this thread."""
        began_s = time.thread_time()
        found = work()
        self.got[name] = time.thread_time() - began_s
        return found


async def one_run(known: SeededRouter, path: Path) -> dict[str, float]:
    """Make, write, read and take over the state once."""
    known.pace = pace = Slices()
    spent, began_s = Spent(), time.thread_time()
    made = snapshot_builder.snapshot_chunks(
        known.router, known, "r", bytes_max=ROOM_BYTES, clock=lambda: 1_000.0, wall=lambda: 0.0, pace=pace
    )
    pieces = [piece async for piece in made]
    spent.got["make_s"], spent.got["make_slice_ms"] = time.thread_time() - began_s, pace.longest_ms()
    size = spent.measure_cpu("write_s", lambda: write_chunks(path, pieces))
    read: list[bytes] = []
    spent.measure_cpu("read_s", lambda: read.extend(read_chunks(path, ROOM_BYTES)))
    if read != pieces or not isinstance(size, int):
        raise CostError("the data read differs from the data written")
    blocks = len(known.ids) * BLOCKS
    spent.got["file_mb"], spent.got["block_bytes"] = size / 1e6, size / blocks
    pieces.clear()
    await _restore_state(spent, read, known)
    return spent.got


async def _restore_state(spent: Spent, read: list[bytes], known: SeededRouter) -> None:
    after = known_router(len(known.ids))
    pace, began_s = Slices(), time.thread_time()
    parts, router = StateParts(), after.router
    for piece in read:
        parts.take(decode_piece(piece))
        await pace.step()
    for id_, part in parts.parts.items():
        state, member = part.events(), router.fleet.member(id_)
        if state is None or member is None or not same_engine(part.replica, member, 1.0)[0]:
            raise CostError(f"{id_} is not taken over")
        await import_state(state, router.knowledge, id_, pace)
        if parts.models is not None:
            take_models(router, parts.models)
        for _ in import_replica(router, member, part, 1.0, 2_000.0):
            await pace.step()
    spent.got["take_s"], spent.got["take_slice_ms"] = time.thread_time() - began_s, pace.longest_ms(DOUBLINGS)
    spent.got["take_doubling_ms"] = pace.longest_ms()
    for id_ in known.ids:
        was, now = known.router.index.blocks(id_), router.index.blocks(id_)
        if was != now or was < BLOCKS // 2:
            raise CostError(f"{now} blocks of {was} are known of {id_}")


def state_rows(runs: int, told: Callable[[int], None]) -> list[Row]:
    """Return all rows."""
    known, all_ = known_router(REPLICAS, blocks=BLOCKS), list[dict[str, float]]()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)  # A router collects garbage as rarely, so the pauses are the same.
    with tempfile.TemporaryDirectory() as folder:
        for n in range(runs):
            all_.append(asyncio.run(one_run(known, Path(folder) / "state")))
            told(n + 1)
    rows = []
    for case, words in WORDS.items():
        values, goal = [each[case] for each in all_], GOALS.get(case)
        got = min(values) if case in GOALS else statistics.median(values)
        ok = None if goal is None else got <= goal
        rows.append(Row(case=case, got=round(got, 3), expected=goal, ok=ok, note=words, replicas=REPLICAS, timed=True))
    return rows
