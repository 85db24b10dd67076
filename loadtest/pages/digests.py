"""README's short tables: rows and columns of the whole tables in docs/evidence, so that no figure is typed twice."""

from __future__ import annotations

from loadtest.common.rivals import OURS
from loadtest.pages.markdown import PageError, block_of, cells_of, table

WORKLOADS = ("agent", "conversation")
COSTS = {"short": "a short request", "long": "a request of 200 KB", "stream300": "an event, 300 streams"}
"""Cases of `loadtest overhead` -> what one unit of their work is."""


def demo_digest(page: str) -> str:
    """Both kinds of traffic with and without us, and by how much, from the demo's page. Raises PageError."""
    whole = block_of(page, "demo")
    head, *rows = cells_of(whole)
    columns = _columns(head, ("workload", "policy", "token hits", "TTFT p50", "TTFT p90"))
    shown = [row for row in rows if row[0] in WORKLOADS]
    won = [
        line for line in whole.splitlines() for name in WORKLOADS if line.startswith(f"- {name}: ") and " x " in line
    ]
    cells = table([head[i] for i in columns], [[row[i] for i in columns] for row in shown])
    return _measured(whole) + "\n".join([cells, "", *won])


def costs_digest(page: str) -> str:
    """Microseconds of CPU, a router a row and a case a column, from the text of the page of costs. Raises PageError."""
    whole = block_of(page, "overhead")
    head, *rows = cells_of(whole)
    case, router, cpu = _columns(head, ("case", "router", "CPU, µs"))
    found = {(row[router], row[case]): row[cpu] for row in rows}
    routers = dict.fromkeys(row[router] for row in rows)
    return _measured(whole) + table(
        ("CPU, µs", *COSTS.values()),
        [(f"**{name}**" if name == OURS else name, *(found[name, each] for each in COSTS)) for name in routers],
    )


def race_digest(page: str) -> str:
    """Every rule's mean p90 time to first token, from the text of the page of placement. Raises PageError."""
    whole = block_of(page, "race")
    head, *rows = cells_of(whole)
    columns = _columns(head, ("policy", "mean p90 TTFT", "warm = 1", "requests in time"))
    return _measured(whole) + table([head[i] for i in columns], [[row[i] for i in columns] for row in rows])


def _measured(whole: str) -> str:
    """The paragraph that says when, with which command and on which machine."""
    return whole.partition("\n\n")[0] + "\n\n"


def _columns(head: list[str], names: tuple[str, ...]) -> list[int]:
    if missing := set(names) - set(head):
        raise PageError(f"the whole table has no column {min(missing)}")
    return [head.index(name) for name in names]
