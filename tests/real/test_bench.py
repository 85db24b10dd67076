"""vLLM's own load generator before two real vLLM replicas: behind warmroute, round robin and, if installed, a rival.

Counts are judged: every request is answered, and the engines' own counters say how much of the prompts they found
cached. What the generator tells of times is printed, and judged by `make evidence` as ratios within one run, of full
size and as medians of several: WARMROUTE_BENCH_RUNS says how many. The small run has the folder's own replicas, which
hold every prefix: what is computed at one of them and not at both tells the routers apart there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.real.bench_fleet import RIVAL, Seen, forget, ours, seen, theirs, there
from tests.real.bench_serve import Load
from tests.real.vllm_server import Replica, vllm_servers
from tests.support.figures import figure

RUNS = int(os.environ.get("WARMROUTE_BENCH_RUNS", "0"))
"""Runs of full size; 0 is one small run."""
KV_BLOCKS = 470  # ten prompts of 1,460 tokens with answers of 16 take 47 blocks each
PREFIXES = Load(16, 1_400, 60, 16, per_s=4.0, requests=240 if RUNS else 48)
HOT = Load(1, 1_400, 60, 128, per_s=3.0, requests=150 if RUNS else 12)
TIMEOUT_S = 3_600.0  # a limit for what hangs: three runs of full size take a quarter of an hour
WARM, ROUND_ROBIN = "warm", "round_robin"

Figures = Callable[[str], None]
pytestmark = [pytest.mark.figures, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture(scope="module")
def started_replicas(request: pytest.FixtureRequest, folder: Path, figures: Figures) -> Iterator[list[Replica]]:
    """For runs of full size, two replicas with room for some ten of the prefixes each, in place of the folder's own."""
    if not RUNS:
        yield request.getfixturevalue("shared_replicas")
        return
    yield from vllm_servers(("bench-left", "bench-right"), folder, figures, KV_BLOCKS)


def race(
    load: Load, routers: list[str], replicas: list[Replica], folder: Path, figures: Figures
) -> list[dict[str, Seen]]:
    """Every router under the same load, as often as RUNS says, each time with other prompts and in another order."""
    runs = []
    for run in range(max(1, RUNS)):
        shift = run % len(routers)
        told = {}
        for name in routers[shift:] + routers[:shift]:
            forget(replicas)
            label = f"bench-{load.prefixes}-{run}-{name}"
            file = folder / f"{label}.json"
            if name == RIVAL:
                with theirs(replicas, folder, label) as url:
                    told[name] = seen(name, url, replicas, load, run, file)
            else:
                with ours(replicas, folder, label, name) as router:
                    told[name] = seen(name, router.url, replicas, load, run, file)
            figures(f"run {run + 1}, {load.prefixes} prefixes at {load.per_s:g}/s: {told[name].line()}")
        runs.append(told)
    return runs


def judge(load: Load, runs: list[dict[str, Seen]]) -> None:
    """Every request was answered in full by one of the replicas, whichever router was before them."""
    for row in (row for told in runs for row in told.values()):
        assert (row.told.completed, row.told.failed) == (load.requests, 0), row.line()
        assert row.told.answer_tokens == load.requests * load.answer_tokens, row.line()
        assert sum(row.answered) >= load.requests, row.line()  # the generator tries the server out first


def test_prefixes_that_fit_two_replicas_and_not_one(replicas: list[Replica], folder: Path, figures: Figures) -> None:
    """Sixteen prefixes, ten of which fit into one replica: they are found again where round robin has lost them."""
    runs = race(PREFIXES, [WARM, ROUND_ROBIN, *([RIVAL] if there() else [])], replicas, folder, figures)
    judge(PREFIXES, runs)
    for told in runs:
        assert told[WARM].hit_tokens > told[ROUND_ROBIN].hit_tokens, (told[WARM].line(), told[ROUND_ROBIN].line())
        assert min(told[WARM].answered) > 0, told[WARM].line()
    for name, at_most in ((ROUND_ROBIN, 0.5), (RIVAL, 0.7)):
        ratios = [told[WARM].told.ttft_p90_s / told[name].told.ttft_p90_s for told in runs if name in told]
        if ratios:
            figure(f"vllm bench serve, 16 prefixes: p90 TTFT, times that of {name}", at_most, median(ratios))


def test_a_hot_prefix(replicas: list[Replica], folder: Path, figures: Figures) -> None:
    """One prefix for all: whether it is copied or not, it is computed no more than twice."""
    runs = race(HOT, [WARM, ROUND_ROBIN], replicas, folder, figures)
    judge(HOT, runs)
    ratios = [told[WARM].told.e2e_p90_s / told[ROUND_ROBIN].told.e2e_p90_s for told in runs]
    figure("vllm bench serve, one hot prefix: p90 end to end, times that of round_robin", 0.8, median(ratios))
