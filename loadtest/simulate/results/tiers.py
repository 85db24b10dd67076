"""Price of a hit behind the GPU: `python -m loadtest simulate --tiers`.

The workload has prefixes of three times the GPUs' caches, on tiers of twice their size (scenarios/tiers.py), with
links of several speeds. All rows run the same requests. `free` is `warm`, which has no price of loads. The other rows
differ only in such a price (policies/tier_credit.py), and one has no knowledge of tiers. The cost of a load (`price`)
is learned from a first guess that is right for none of these links. Figures are means over seeds. The error by chance
shows on links that are so fast that no price of a load can matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich.console import Console

from loadtest.common.report import Row, build_table
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.world import Simulation
from loadtest.simulate.policies.tier_credit import TierCredit
from loadtest.simulate.results.metrics import row_of
from loadtest.simulate.results.race import freeze_objects
from loadtest.simulate.scenarios.scenario import LOADS
from loadtest.simulate.scenarios.tiers import TIER, churn
from router.core.placement.policies import Policy
from router.core.placement.policies.warm import Warm

KV_TOKENS = 153_600
WARM_UP, REQUESTS = 75, 150  # requests for each replica
FLOOR_S = 2e-3
PREFILL_TOKEN_S = 60e-6  # prefill of a token of a prompt of 12,000; unit of a token's load time
LINKS = {"1/50": 1 / 50, "1/13": 1 / 13, "1/4": 1 / 4, "1": 1.0, "2": 2.0}
"""A link's name -> the load time of a token in parts of its prefill: CPU memory as measured, disks, and a store."""
SIZES = (4, 8)
SHARES = ("below", "at", "above")
UNTOLD = "no tiers"
PRICES: dict[str, Callable[[], Policy]] = {
    "free": Warm,
    "price": lambda: TierCredit(None),
    "0.8": lambda: TierCredit(0.8),
    "0.75": lambda: TierCredit(0.75),
    "0.4": lambda: TierCredit(0.4),
    UNTOLD: Warm,
}
"""The value of a hit in a tier -> its policy. The values, in order: a hit on the GPU (the product's choice); such a hit
less the learned time of its load; parts of a hit on the GPU; zero."""
FIGURES: dict[str, Callable[[Row], float | None]] = {
    "TTFT mean": lambda row: row.got,
    "TTFT p90": lambda row: row.ttft_p90_s,
    "end-to-end p90": lambda row: row.e2e_p90_s,
}


@dataclass(frozen=True, slots=True)
class TierJob:
    """One workload on tiers with one link, and the prices that run it."""

    link: str
    replicas: int
    load: str
    seed: int
    prices: tuple[str, ...] = tuple(PRICES)
    requests: int = REQUESTS
    """For each replica."""


def run_tiers(job: TierJob) -> list[Row]:
    """Return a row for each price, in their order."""
    limits = TierLimits(TIER * KV_TOKENS, FLOOR_S, LINKS[job.link] * PREFILL_TOKEN_S)
    setting = ClusterSpec(replicas=job.replicas, seed=job.seed, grade="exact", kv_tokens=KV_TOKENS, tier=limits)
    warm_up, requests = WARM_UP * job.replicas, job.requests * job.replicas
    scenario, rows = churn(job.load, setting, warm_up=warm_up, requests=requests), list[Row]()
    with freeze_objects():
        for price in job.prices:
            told = replace(scenario.setting, tier_told=price != UNTOLD)
            result = Simulation(scenario.workload, told, PRICES[price]).run()
            row = row_of(replace(scenario, setting=told), result)
            ttfts_s = [each.ttft_s for each in result.sent[warm_up:] if each.ttft_s is not None]
            row.workload, row.policy, row.case, row.seed = "tier_churn", price, job.link, job.seed
            row.load_name, row.replicas, row.got = job.load, job.replicas, fmean(ttfts_s)
            row.goal = "TTFT mean, s"
            rows.append(row)
    return rows


HEADS = ("load of a token / prefill", "replicas", "load", "figure, s", *PRICES)


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a row of the table for each link, size, load and figure, under HEADS. Figures are means over the seeds
    that all prices ran. The least is bold if it is 3 % or more below that of a free hit, the product's choice."""
    links, shares, made = list(LINKS), list(LOADS), list[tuple[str, ...]]()
    of: dict[tuple[int, int, int], dict[str, dict[int, Row]]] = {}
    for row in rows:
        if row.case in LINKS and row.policy in PRICES and row.load_name in LOADS:
            key = links.index(row.case or ""), row.replicas or 0, shares.index(row.load_name or "")
            of.setdefault(key, {}).setdefault(row.policy or "", {})[row.seed or 0] = row
    for (link, replicas, load), prices in sorted(of.items()):
        seeds = set[int].intersection(*(set(each) for each in prices.values()))
        if not seeds:
            continue
        for name, figure in FIGURES.items():
            means = {price: fmean(figure(each[seed]) or 0.0 for seed in seeds) for price, each in prices.items()}
            cells = [_cell(means, price) for price in PRICES]
            made.append((links[link], f"{replicas}", shares[load], name, *cells))
    return made


def _cell(means: dict[str, float], price: str) -> str:
    if price not in means:
        return "-"
    said = f"{means[price]:.2f}"
    better = means[price] <= min(means.values()) and means[price] < 0.97 * means.get("free", 0.0)
    return f"**{said}**" if better else said


def print_tiers(console: Console, rows: Sequence[Row]) -> None:
    """Print the table."""
    title = "price of a token in a tier: means over seeds; ** more than 3 % below a free hit"
    made = build_table(HEADS, (), title, left={HEADS[0], "load", "figure, s"}, no_wrap=False)
    for cells in lines(rows):
        made.add_row(*cells)
    console.print(made)
