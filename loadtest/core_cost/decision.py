"""`python -m loadtest cost`: CPU cost of exact cache knowledge, measured in-process on the router's real path.

A decision is everything between a request's body and its replica. Its stages are parsing, the canonical chain, template
and tokens, keys and match, and the placement. The bookkeeping at the end of the answer (finish) is shown beside it. The
router follows eight replicas: one has the whole conversation in its cache, the others parts of it, and all of them
other blocks. A conversation begins (cold), continues by a turn, and by another, which is measured (extend). Stages are
measured on separate conversations, one call after the other. The difference between their sum and the whole is the
event loop and the hops between threads.

Events are processed from their bytes: decoded, and applied to the router's knowledge. Bytes per block are the memory
that tracemalloc attributes to it.

Options select another measurement instead:

- `--memory`: the router's memory by purpose, and the cost of its start (memory.py).
- `--state`: the cost of handing the whole state over to another router (state.py).
- `--replicas`: the growth of placement cost with the fleet (growth.py).
- `--sharing`: the cost of updates between several routers (sharing.py).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from loadtest.common import flags
from loadtest.common.processes import ProcessError
from loadtest.common.report import Row, build_table, progress_bar, write_json
from loadtest.core_cost.corpus import ConversationGenerator, body_of, tokenizer_folder
from loadtest.core_cost.growth import growth_rows
from loadtest.core_cost.memory import STEPS, memory_rows
from loadtest.core_cost.sharing import ROUTERS, ROUTERS_MAX, sharing_rows
from loadtest.core_cost.state import state_rows
from loadtest.core_cost.world import (
    BLOCK_TOKENS,
    REPLICAS,
    STAGES,
    CostError,
    Decision,
    PricedRouter,
    batch,
    follow,
    make_removed_event,
    make_stored_event,
    token_ids,
)
from router.core.cache_state.event_index import EventIndex
from router.core.prompts.block_keys import token_chain
from router.core.types.placements import Confidence

LONG, SHORT = (99_000, 97), (640, 7)  # tokens and messages at first; an odd number, so that the last is the user's
LONG_A_RUN, SHORT_A_RUN = 4, 40  # conversations side by side
OTHER_BLOCKS = 20_000
REPLICAS_MAX = 10_000
EVENT_BLOCKS, POOL_BLOCKS = 100_000, 30_000
# Number of events in a batch, by blocks of an event, as an engine with a few requests in each step sends them.
EVENTS_PER_BATCH = {1: 8, 8: 4, 64: 1}
GOALS = {"extend_100k_ms": 3.0, "cold_100k_ms": 8.0, "extend_1k_ms": 0.3}
BLOCKS_PER_S_GOAL = 100_000.0


def judge_case(case: str, got: float) -> Row:
    """Return a row, with its goal if it has one."""
    limit = GOALS.get(case)
    if limit is not None:
        return Row(case=case, goal=f"< {limit:g}", expected=limit, got=got, ok=got < limit)
    if case.startswith("ingest_"):
        goal = f">= {BLOCKS_PER_S_GOAL:,.0f}"
        return Row(case=case, goal=goal, expected=BLOCKS_PER_S_GOAL, got=got, ok=got >= BLOCKS_PER_S_GOAL)
    return Row(case=case, got=got)


# Decisions


async def conversations(
    world: PricedRouter,
    talks: ConversationGenerator,
    names: Sequence[str],
    size: tuple[int, int],
    *,
    staged: bool,
    measured: Callable[[bool], None] = lambda _: None,
) -> list[tuple[Decision, Decision]]:
    """Run new conversations through three turns. Returns the first and the last decision of each.

    Long conversations have tools, which are a thousand tokens. `measured` is called with True before the last turns
    begin and with False after they end.
    """
    (tokens, count), decide = size, world.stages if staged else world.decide
    turns = [[talks.messages(name, 0, count + more, tokens // count) for more in (0, 2, 4)] for name in names]
    first, second, third = ([body_of(said[i], tools=size is LONG) for said in turns] for i in range(3))
    gc.collect()
    cold = [await decide(body) for body in first]
    for each in cold:
        world.spread(each.ids)
    known = [await decide(body) for body in second]
    gc.collect()
    measured(True)
    extended = [await decide(body) for body in third]
    measured(False)
    for before, then, now in zip(cold, known, extended, strict=True):
        if before.cached_tokens > len(before.ids) // 8 or now.cached_tokens < len(then.ids) // 4 - 2 * BLOCK_TOKENS:
            raise CostError(f"{before.cached_tokens} tokens held of a cold prompt, {now.cached_tokens} when extended")
    return list(zip(cold, extended, strict=True))


async def decisions(folder: Path, runs: int, told: Callable[[int], None]) -> list[Row]:
    """Return rows of all decisions; `told` is called with the number of finished runs."""
    world = PricedRouter(folder)
    try:
        talks = await calibrate_generator(world)
        world.fill(OTHER_BLOCKS)
        found: dict[str, list[Decision]] = {}
        for run in range(runs + 1):
            for staged, (size, name, times) in product(
                (False, True), ((LONG, "100k", LONG_A_RUN), (SHORT, "1k", SHORT_A_RUN))
            ):
                names = [f"{name} {run} {n} {staged}" for n in range(times)]
                made = await conversations(world, talks, names, size, staged=staged)
                for cold, extended in made if run else ():  # the first run warms the process up
                    found.setdefault(f"cold_{name}{'_staged' * staged}", []).append(cold)
                    found.setdefault(f"extend_{name}{'_staged' * staged}", []).append(extended)
            told(run + 1)
    finally:
        world.close()
    return [row for case in ("extend_100k", "cold_100k", "extend_1k", "cold_1k") for row in rows_of(case, found)]


def rows_of(case: str, found: dict[str, list[Decision]]) -> list[Row]:
    """Return medians of one case: its size, the whole, its stages."""
    whole, staged = found[case], found[f"{case}_staged"]
    stages = {name: statistics.median(each.stages_s[name] for each in staged) * 1e3 for name in STAGES}
    return [
        Row(case=f"{case}_prompt_tokens", got=statistics.median(len(each.ids) // 4 for each in whole)),
        judge_case(f"{case}_ms", statistics.median(each.cpu_s for each in whole) * 1e3),
        *(Row(case=f"{case}_{name}_ms", got=stages[name]) for name in STAGES),
    ]


async def calibrate_generator(world: PricedRouter) -> ConversationGenerator:
    """Return text that gives prompts of the intended number of tokens."""
    talks = ConversationGenerator(4.0)
    decision = await world.decide(body_of(talks.messages("fit", 0, 9, LONG[0] // 9), tools=False))
    return ConversationGenerator(4.0 * LONG[0] / (len(decision.ids) // 4))


async def profile(folder: Path, size: tuple[int, int]) -> None:
    """Print a CPU profile of a conversation that grows by a turn, all in one thread."""
    world, profiler = PricedRouter(folder, one_thread=True), cProfile.Profile()
    try:
        talks = await calibrate_generator(world)
        world.fill(OTHER_BLOCKS)
        await conversations(world, talks, ["warm up"], size, staged=False)

        def measured(begins: bool) -> None:
            world.profiler = profiler if begins else None

        names = [f"profile {n}" for n in range(5 if size is LONG else 5 * SHORT_A_RUN)]
        await conversations(world, talks, names, size, staged=False, measured=measured)
    finally:
        world.close()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(40)


# Events


def knowledge() -> EventIndex:
    """Return the empty knowledge of a router."""
    return EventIndex(
        blocks_max=1 << 20,
        aside_max=1 << 17,
        names_max=1 << 17,
        graded=lambda *_: None,
        resync=lambda _: None,
        restarted=lambda _: None,
    )


def payloads(blocks_each: int, *, as_map: bool, evict: bool = False) -> list[bytes]:
    """Return EVENT_BLOCKS blocks as batches of events of `blocks_each` blocks, from prompts of 64 blocks.

    With `evict` the oldest blocks are removed if the pool is full.
    """
    rng, made, events, live = random.Random(blocks_each), list[bytes](), list[Any](), list[int]()
    for _ in range(EVENT_BLOCKS // 64):
        ids = token_ids(rng, 64)
        keys = token_chain(ids, BLOCK_TOKENS, 0)
        if evict and len(live) + 64 > POOL_BLOCKS:
            events += [make_removed_event(key, as_map=as_map) for key in live[:64]]
            del live[:64]
        live += keys
        for first in range(0, 64, blocks_each):
            events.append(make_stored_event(ids, keys, first, first + blocks_each, as_map=as_map))
            if len(events) >= EVENTS_PER_BATCH[blocks_each]:
                made.append(batch(events))
                events = []
    return made


def ingestion(blocks_each: int, *, as_map: bool, evict: bool = False) -> float:
    """Return the blocks stored per second of CPU, from bytes on; eight streams in rotation."""
    given, known = payloads(blocks_each, as_map=as_map, evict=evict), knowledge()
    names = [f"replica {number}" for number in range(1 if evict else REPLICAS)]
    for name in names:
        known.grade(name, Confidence.EXACT, "joined at batch 0", 0.0)
    gc.collect()
    begun_s = time.thread_time()
    for number, payload in enumerate(given):
        # A prompt's blocks come from one engine.
        prompt = number * blocks_each * EVENTS_PER_BATCH[blocks_each] // 64
        follow(known, names[prompt % len(names)], payload, 0.0)
    spent_s = time.thread_time() - begun_s
    engines = [known.engine_blocks(name) for name in names]
    held = sum(engine.blocks for engine in engines if engine)
    if not evict and held != EVENT_BLOCKS // 64 * 64:
        raise CostError(f"{held} blocks are held, of {EVENT_BLOCKS}")
    return EVENT_BLOCKS / spent_s


def bytes_a_block(holders: int) -> float:
    """Return the memory of a block per replica, in bytes, if `holders` replicas hold the same blocks."""
    given, known = payloads(8, as_map=True), knowledge()
    names = [f"replica {number}" for number in range(holders)]
    for name in names:
        known.grade(name, Confidence.EXACT, "joined at batch 0", 0.0)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for payload in given:
            for name in names:
                follow(known, name, payload, 0.0)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / EVENT_BLOCKS / holders


def event_rows(runs: int, told: Callable[[int], None]) -> list[Row]:
    """Return rows of all streams; `told` is called with the number of finished ones."""
    rows: list[Row] = []
    for blocks_each in EVENTS_PER_BATCH:
        for form in ("maps", "arrays"):
            rates = [ingestion(blocks_each, as_map=form == "maps") for _ in range(runs)]
            rows.append(judge_case(f"ingest_{form}_{blocks_each}_blocks_per_s", statistics.median(rates)))
            told(len(rows))
    rates = [ingestion(8, as_map=True, evict=True) for _ in range(runs)]
    rows.append(judge_case("ingest_maps_8_evicting_blocks_per_s", statistics.median(rates)))
    rows += [Row(case=f"held_by_{holders}_block_bytes", got=bytes_a_block(holders)) for holders in (1, REPLICAS)]
    told(len(rows))
    return rows


# The command


def table(rows: Sequence[Row], title: str) -> Table:
    """Return a table of cases, goals and results."""
    made = build_table(("case", "got", "goal", ""), (), title, left={"case", ""})
    for row in rows:
        got = row.got or 0.0
        shown = f"{got:,.0f}" if got >= 100 else f"{got:.3f}"
        case = (row.case or "") if row.replicas is None else f"{row.case}, {row.replicas:,} replicas"
        case += f", {row.router}" if row.router is not None else ""
        made.add_row(case, shown, row.goal or "", "" if row.ok is None else "ok" if row.ok else "missed")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; with --check 1 if a goal was missed, 2 if something could not be measured."""
    options = _parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        if options.replicas:
            with progress_bar(console, "sizes of fleet", len(options.replicas)) as told:
                grown = growth_rows(options.replicas, options.runs, told)
            return _report_rows(grown, "cost by number of replicas", options, argv)
        if options.sharing:
            with progress_bar(console, "fleets and routers", len(options.sharing) * len(options.routers)) as told:
                shared = sharing_rows(options.sharing, options.routers, options.runs, told)
            return _report_rows(shared, "cost of messages between routers", options, argv)
        if options.memory:
            with progress_bar(console, "memory", STEPS) as told:
                kept = memory_rows(bytes_a_block, told)
            return _report_rows(kept, "memory of the router, and its start", options, argv)
        if options.state:
            with progress_bar(console, "state", options.runs) as told:
                left = state_rows(options.runs, told)
            return _report_rows(left, "cost of saved state", options, argv)
        folder = options.tokenizer or tokenizer_folder()
        if options.profile:
            uvloop.run(profile(folder, LONG if options.profile == "long" else SHORT))
            return 0
        with progress_bar(console, "events", 9) as told:
            rows = event_rows(options.runs, told)
        with progress_bar(console, "decisions", options.runs + 1) as told:
            rows = uvloop.run(decisions(folder, options.runs, told)) + rows
    except (CostError, ProcessError, ImportError, OSError) as error:
        print(f"cost: {error}", file=sys.stderr)
        return 2
    return _report_rows(rows, "cost of exact cache state", options, argv)


def _report_rows(rows: list[Row], title: str, options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    Console().print(table(rows, title))
    if options.json:
        write_json(options.json, "cost " + " ".join(argv if argv is not None else sys.argv[1:]), rows)
    return 1 if options.check and any(row.ok is False for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest cost", description="CPU of placement with exact cache state."
    )
    add = parser.add_argument
    add("--runs", type=flags.integer(1), default=5, metavar="N", help="number of runs per median (5)")
    add(
        "--tokenizer", type=Path, metavar="PATH", help="folder of a model; default: a tokenizer trained on this machine"
    )
    sizes, text = (
        flags.make_list_parser(flags.integer(1, REPLICAS_MAX)),
        "cost of placement by number of replicas, such as 8,64,256,1000",
    )
    add("--replicas", type=sizes, metavar="N,N,...", help=f"instead: {text}")
    add(
        "--sharing",
        type=sizes,
        metavar="N,N,...",
        help="instead: cost of messages between routers by number of replicas, such as 8,64,256",
    )
    several = flags.make_list_parser(flags.integer(2, ROUTERS_MAX))
    add("--routers", type=several, default=ROUTERS, metavar="N,N,...", help="numbers of routers for --sharing (2,4,8)")
    add("--memory", action="store_true", help="instead: memory by purpose, and CPU of the start")
    add("--state", action="store_true", help="instead: seconds and bytes of saving and restoring state")
    add("--check", action="store_true", help="exit with 1 if a goal is missed")
    add("--profile", choices=("long", "short"), help="only profile a prompt that extends a known prompt")
    add("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    return parser
