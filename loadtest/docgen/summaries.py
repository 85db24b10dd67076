"""Short tables and single figures, taken from the full tables in docs/evidence, so that no figure is typed twice."""

from __future__ import annotations

from loadtest.common.rivals import OURS
from loadtest.docgen.markdown import PageError, block_of, cells_of, table

WORKLOADS = ("agent", "conversation")
COSTS = {"short": "a short request", "long": "a request of 200 KB", "stream300": "an event, 300 streams"}
"""Cases of `loadtest overhead` -> one unit of their work."""


def demo_digest(page: str) -> str:
    """Return both kinds of traffic with and without warmroute, and the ratios, from its page. Raises PageError."""
    whole = block_of(page, "demo")
    head, *rows = cells_of(whole)
    columns = _columns(head, ("workload", "policy", "token hits", "TTFT p50", "TTFT p90"))
    shown = [row for row in rows if row[0] in WORKLOADS]
    won = [
        line for line in whole.splitlines() for name in WORKLOADS if line.startswith(f"- {name}: ") and " x " in line
    ]
    cells = table([head[i] for i in columns], [[row[i] for i in columns] for row in shown])
    return _extract_provenance(whole) + "\n".join([cells, "", *won])


def costs_digest(page: str) -> str:
    """Return microseconds of CPU, a row per router and a column per case, from the page of costs. Raises PageError."""
    whole = block_of(page, "overhead")
    head, *rows = cells_of(whole)
    case, router, cpu = _columns(head, ("case", "router", "CPU, µs"))
    found = {(row[router], row[case]): row[cpu] for row in rows}
    routers = dict.fromkeys(row[router] for row in rows)
    return _extract_provenance(whole) + table(
        ("CPU, µs", *COSTS.values()),
        [(f"**{name}**" if name == OURS else name, *(found[name, each] for each in COSTS)) for name in routers],
    )


def race_digest(page: str) -> str:
    """Return every rule's mean p90 time to first token, from the text of the page of placement. Raises PageError."""
    whole = block_of(page, "race")
    head, *rows = cells_of(whole)
    columns = _columns(head, ("policy", "mean p90 TTFT", "warm = 1", "requests in time"))
    return _extract_provenance(whole) + table([head[i] for i in columns], [[row[i] for i in columns] for row in rows])


def demo_claim(page: str) -> str:
    """Return README's sentence on the demo: token hits and p90 time to first token on agents. Raises PageError."""
    head, *rows = cells_of(block_of(page, "demo"))
    workload, policy, hits, ttft = _columns(head, ("workload", "policy", "token hits", "TTFT p90"))
    found = {row[policy]: row for row in rows if row[workload] == WORKLOADS[0]}
    ours, other = found["warm"], found["round_robin"]
    return (
        f"- **Hit rate**: {ours[hits]} of prompt tokens on agent traces, {other[hits]} behind round robin; "
        f"p90 TTFT is {ours[ttft]} instead of {other[ttft]} ([demo](docs/evidence/demo.md), simulated engines)."
    )


def race_claim(page: str) -> str:
    """Return README's sentence on the race: mean p90 TTFT of warm and of the best other rule. Raises PageError."""
    head, *rows = cells_of(block_of(page, "race"))
    policy, ttft = _columns(head, ("policy", "mean p90 TTFT"))
    ours, best = rows[0], rows[1]
    if ours[policy] != "warm":
        raise PageError(f"the race's best rule is {ours[policy]}")
    return (
        f"- **Placement**: mean p90 TTFT over all workloads is {ours[ttft]}; the best of the other routers' rules, "
        f"`{best[policy]}`, has {best[ttft]} ([placement](docs/evidence/placement.md), in virtual time)."
    )


def costs_claim(page: str) -> str:
    """Return README's sentence on costs: CPU for a short request, of warmroute and the cheapest other LLM router.

    Raises PageError.
    """
    head, *rows = cells_of(block_of(page, "overhead"))
    case, router, cpu = _columns(head, ("case", "router", "CPU, µs"))
    short = {row[router]: row[cpu] for row in rows if row[case] == "short"}
    others = {name: value for name, value in short.items() if not name.startswith((OURS, "nginx"))}
    cheapest = min(others, key=lambda name: float(others[name].replace(",", "")))
    return (
        f"- **CPU**: {short[OURS]} µs for a short request with native code; {cheapest}, the cheapest other LLM router, "
        f"takes {others[cheapest]} µs ([overhead](docs/evidence/overhead.md))."
    )


def _extract_provenance(whole: str) -> str:
    """Return the paragraph with the date, the command and the machine."""
    return whole.partition("\n\n")[0] + "\n\n"


def _columns(head: list[str], names: tuple[str, ...]) -> list[int]:
    if missing := set(names) - set(head):
        raise PageError(f"the whole table has no column {min(missing)}")
    return [head.index(name) for name in names]
