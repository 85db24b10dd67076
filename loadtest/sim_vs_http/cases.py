"""Cases of `loadtest agree`: slices of the shipped traces, each under our policies and under rivals."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace

from rich.console import Console

from loadtest.common import rivals
from loadtest.common.traces import Session, Trace, shipped_trace
from loadtest.fake_engine.calibration import CALIBRATION
from loadtest.replay import demo
from loadtest.replay.run import ReplaySettings
from loadtest.sim_vs_http import race_table as agree_table
from loadtest.sim_vs_http.over_http import HttpTarget
from loadtest.sim_vs_http.race_table import TABLE
from loadtest.simulate.policies import ROWS

POLICIES = ("warm", "round_robin", "least_loaded")
"""Policies of warmroute that are raced over HTTP."""
RULES = {name: f"{name.removesuffix('-router')}_cache_aware" for name in rivals.RIVALS}
"""The reimplemented rule of each rival, by its row's name."""
PEERS = ("warm", "round_robin", *rivals.RIVALS)
SESSIONS = 8
"""Active at a time: two per replica. With more, the set of cached prompts changes from run to run."""
SLICES = {
    "agent": demo.AGENT.replace_replay(requests_max=400, time_scale=20),
    "conversation": demo.WORKLOADS[1].replace_replay(time_scale=10),
}
TTFT_LIMIT_S = 5.0
"""Cold prompts of 100,000 tokens take longer with any router; cold prompts of a quarter of that do not."""
ROUNDED_S = 3.0
"""Mooncake's timestamps are multiples of it."""


@dataclass(frozen=True, slots=True)
class AgreeCase:
    """A slice, and its placement: a policy of warmroute or a rival."""

    settings: ReplaySettings
    behind: HttpTarget
    placed_by: str | rivals.Rival
    rule: str
    """The row in the simulation that stands for `placed_by`."""


def load_slice_trace(settings: ReplaySettings) -> Trace:
    """Return the trace of a slice: shipped with the package, or a scenario of the simulation."""
    if settings.workload in TABLE:
        return agree_table.trace_of(settings.workload)
    name = SLICES[settings.workload or ""].trace
    return spread(shipped_trace(name))


def spread(trace: Trace) -> Trace:
    """Spread the arrivals of an open trace, recorded to ROUNDED_S, over random moments within; the same in each run.

    If requests arrive at once, a millisecond decides which one is first. With placement in rotation, that decides the
    replica of all later requests. Then no two runs over HTTP would be the same.
    """
    if trace.kind != "open":
        return trace
    rng = random.Random(1)
    requests = [session.requests[0] for session in trace.sessions]
    moved = sorted((replace(r, at_s=r.at_s + rng.uniform(0, ROUNDED_S)) for r in requests), key=lambda r: r.at_s)
    return replace(trace, sessions=tuple(Session(str(number), (each,)) for number, each in enumerate(moved)))


def cases_of(options: argparse.Namespace, said: Console) -> list[AgreeCase]:
    """Return every slice under every installed router; missing routers are printed."""
    there = rivals.find_installed(options.rivals)
    cases = []
    missing: dict[str, str] = {}
    for name in options.workloads:
        for row in options.rows:
            if row in RULES and row not in there:
                missing[row] = f"not installed in {options.rivals} (use --install-rivals)"
                continue
            rule = RULES.get(row, row)
            if rule not in ROWS and not options.peers:
                missing[row] = "its policy is not reimplemented"
                continue
            cases.append(_case(name, row, there.get(row) if row in RULES else None, options))
    for row, why in missing.items():
        said.print(f"{row}: {why}; left out", highlight=False, soft_wrap=True)
    return cases


def _case(name: str, row: str, rival: rivals.Rival | None, options: argparse.Namespace) -> AgreeCase:
    if name in TABLE:
        return _make_table_case(name, row, rival, options)
    slice_ = SLICES[name]
    policy, router = ("cache_aware", rival.name) if rival else (row, rivals.OURS)
    settings = replace(
        slice_.replay,
        policy=policy,
        router=router,
        ttft_limit_s=TTFT_LIMIT_S,
        time_scale=options.time_scale or slice_.replay.time_scale,
        requests_max=options.requests or slice_.replay.requests_max,
        sessions_active=SESSIONS,
        workload=name,
        answer_limits=options.answer_limits,
        foreknowledge=options.foreknowledge,
    )
    behind = HttpTarget(options.replicas or demo.REPLICAS, demo.MODEL, CALIBRATION, slice_.kv_tokens)
    return AgreeCase(settings, behind, rival or row, RULES.get(row, row))


def _make_table_case(name: str, row: str, rival: rivals.Rival | None, options: argparse.Namespace) -> AgreeCase:
    settings = replace(
        agree_table.settings_of(name, options.requests, options.time_scale),
        model=demo.MODEL,
        policy="cache_aware" if rival else row,
        router=rival.name if rival else rivals.OURS,
        answer_limits=options.answer_limits,
        foreknowledge=options.foreknowledge,
    )
    setting = agree_table.scenario_of(name).setting
    behind = HttpTarget(
        options.replicas or setting.replicas,
        demo.MODEL,
        CALIBRATION,
        setting.kv_tokens_of(setting.calibration),
        agree_table.TICK_S,
        scaled=True,
    )
    return AgreeCase(settings, behind, rival or row, RULES.get(row, row))
