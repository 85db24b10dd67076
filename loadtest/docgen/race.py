"""Results of the race and of the race of real routers, on the pages.

docs/evidence/placement.md has the standings over everything. docs/evidence/race.md has every cell and every claim that
does not hold. The shown command is made from the rows, not from the actual command lines. A race may be run in parts
that are merged, and its figures are the same in both cases.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from loadtest.common.report import Row
from loadtest.common.rivals import OURS
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.sim_vs_http.race_table import JUDGED, table_cells, verdict_lines
from loadtest.sim_vs_http.report import HEADS, HTTP, SIMULATED, peer_cells
from loadtest.sim_vs_http.report import markdown as peers_table
from loadtest.simulate.options import parser
from loadtest.simulate.policies import ROWS
from loadtest.simulate.results import ladder, tables
from loadtest.simulate.results.charts import write_charts
from loadtest.simulate.results.claims import MISSED_HEADS, WARM, beaten_bounds, lines_missed
from loadtest.simulate.scenarios.registry import CLAIM_SEEDS, SCENARIOS, Make, loads_of

PICTURED = ("mooncake", "claude_code", "ladder_honest")
"""Workloads in the picture beside the standings; the other picture has all."""
PICTURES = {"race.svg": PICTURED, "race-all.svg": tuple(SCENARIOS)}
"""Picture, beside those pages -> the workloads that it shows."""
_OTHER_CLUSTER = (
    *("requests", "replicas", "calibration", "kv_tokens", "routers", "grade", "event_delay_s", "event_loss"),
    *("probe_interval_s", "fault", "trace", "sweep"),
)


def rows_table() -> str:
    """Return every row of the race with its source and defaults."""
    return table(("row", "source, version and defaults"), ((f"`{name}`", str(row)) for name, row in ROWS.items()))


SCENARIO_HEADS = ("scenario", "workload", "replicas", "requests", "load `at`", "TTFT limit")


def scenarios_table() -> str:
    """Return every scenario that claims are made on, with its text and its figures at `at` for the first such seed."""
    return table(SCENARIO_HEADS, [_scenario_cells(name, make) for name, make in SCENARIOS.items()])


def _scenario_cells(name: str, make: Make) -> tuple[str, ...]:
    made = make("at", CLAIM_SEEDS[0])
    return (
        f"`{name}`",
        " ".join((inspect.getdoc(make) or "").split("\n\n", maxsplit=1)[0].split()),
        str(made.setting.replicas),
        f"{made.workload.request_count - made.workload.warm_up:,}",
        f"{made.load:.3g} {made.load_unit}",
        f"{made.ttft_limit_s:g} s",
    )


def race_block(document: dict[str, Any]) -> str:
    """Return the block of placement: the standings, the number of claims that hold, and the worst cell of each.

    Raises PageError.
    """
    rows = _read_race_rows(document)
    judged = [row for row in rows if row.goal is not None]
    return "\n".join(
        [
            *_describe_simulation(document, rows),
            "",
            f"![p90 time to first token, hit rate and load on {', '.join(PICTURED)}](race.svg)",
            "",
            table(tables.STANDING_HEADS, tables.standing_lines(rows)),
            "",
            *(f"- {line}." for line in tables.verdict_lines(judged, missed_too=False)),
        ]
    )


def cells_block(document: dict[str, Any]) -> str:
    """Return the block of the race: a table per load, missed goals, and bounds that were beaten. Raises PageError."""
    rows = _read_race_rows(document)
    judged = [row for row in rows if row.goal is not None]
    said = [*tables.verdict_lines(judged, missed_too=False), *beaten_bounds(rows)]
    return "\n".join(
        [
            *_describe_simulation(document, rows),
            "",
            "![p90 time to first token, hit rate and load on every workload](race-all.svg)",
            "",
            tables.markdown(rows),
            "",
            *(f"- {line}." for line in said),
            "",
            table(MISSED_HEADS, lines_missed(judged)),
        ]
    )


def write_pictures(document: dict[str, Any], folder: Path) -> None:
    """Write PICTURES. Raises PageError, OSError."""
    rows = [row for row in _read_race_rows(document) if row.seeds is not None and row.goal is None and row.case is None]
    for name, workloads in PICTURES.items():
        shown = [row for row in rows if row.workload in workloads]
        write_charts(folder / name, shown or rows, "Placement policies in simulated time")


AGREE_HEADS = ("workload", "router", "policy", "token hits", "TTFT p90", "goal", "at most", "got", "")


def agree_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest agree`: each slice over HTTP and simulated, and their differences.

    Raises PageError.
    """
    rows = rows_of(document)
    by_case = {(row.workload, row.router, row.policy, row.case): row for row in rows if row.goal is None}
    judged = [row for row in rows if row.case == "agreement"]
    if not judged:
        raise PageError("not the JSON of a comparison: nothing was judged")
    lines = []
    for row in judged:
        http, virtual = (by_case[row.workload, row.router, row.policy, case] for case in (HTTP, SIMULATED))
        lines.append(
            (
                *(name or "" for name in (row.workload, row.router, row.policy)),
                f"{100 * (http.token_hit_rate or 0):.1f} / {100 * (virtual.token_hit_rate or 0):.1f} %",
                f"{http.ttft_p90_s or 0:.2f} / {virtual.ttft_p90_s or 0:.2f} s",
                (row.goal or "").removeprefix("simulated against http: "),
                f"{row.expected or 0:g}",
                f"{row.got or 0:+.1f}",
                "agrees" if row.ok else "does not",
            )
        )
    return "\n".join([*_describe_measurement(document), "", table(AGREE_HEADS, lines)])


def peers_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest agree --peers`. Raises PageError."""
    rows = rows_of(document)
    if not {row.policy for row in rows if row.router == OURS} >= {WARM} or not any(row.router != OURS for row in rows):
        raise PageError("not the JSON of a race of peers: rows of warmroute and of others are needed")
    if any(row.case == "agreement" for row in rows):
        raise PageError("not the JSON of a race of peers, but of a comparison with the simulation")
    if any(row.case == JUDGED for row in rows):
        raise PageError("not the JSON of a race on traces, but of one on scenarios, which is rendered with --http")
    return "\n".join([*_describe_measurement(document), "", peers_table([HEADS, *peer_cells(rows)])])


def http_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest agree --peers --table`, and the verdicts. Raises PageError."""
    rows = rows_of(document)
    if not (said := verdict_lines(rows)):
        raise PageError("not the JSON of a race on scenarios over HTTP: nothing was judged")
    lines = [*_describe_measurement(document), "", peers_table(table_cells(rows)), "", *(f"- {line}." for line in said)]
    return "\n".join(lines)


def ladder_block(document: dict[str, Any]) -> str:
    """Return llm-d's ladder beside the published figures, a table for each variant. Raises PageError."""
    rows = [row for row in rows_of(document) if row.goal is None]
    found = {(row.workload, row.policy, row.case) for row in rows}
    if found != set(product((ladder.PUBLISHED, ladder.HONEST), ladder.CONTENDERS, map(ladder.case_of, ladder.RATES))):
        raise PageError("not the JSON of the whole ladder: rows or stages are missing, or it is another instrument's")
    seeds = sorted({row.seed for row in rows if row.seed is not None})
    asked = [] if seeds == [ladder.SEED] else ["--seed", *_seeds(seeds)]
    lines = [f"{_simulated_with(document, shlex.join(['simulate', '--ladder', *asked]))}."]
    for title, heads, cells in ladder.grids(rows):
        lines += ["", f"`{title}`:", "", table(heads, cells)]
    return "\n".join([*lines, "", *(f"- {line}." for line in ladder.verdict_lines(rows))])


def _describe_measurement(document: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in document["machine"].get("routers", {}).items())
    words = shlex.split(document["command"])  # absolute paths differ between machines
    command = shlex.join(Path(word).name if word.startswith("/") else word for word in words)
    return [
        f"Measured on {document['date'][:10]} with `{command}` on {describe_machine(document)}. Versions: {versions}."
    ]


def _read_race_rows(document: dict[str, Any]) -> list[Row]:
    rows = rows_of(document)
    if not any(row.goal is not None for row in rows):
        raise PageError("not the JSON of a race: nothing was judged")
    said = shlex.split(document["command"])
    asked = vars(parser().parse_args(said[1:]))
    for name in _OTHER_CLUSTER:
        if asked[name]:
            raise PageError(f"not the race itself: it was run with --{name.replace('_', '-')}")
    return rows


def _describe_simulation(document: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    single = [row for row in rows if row.seed is not None and row.goal is None]
    requests = sum(row.requests or 0 for row in single)
    return [f"{_simulated_with(document, _command(single))}:", f"{len(single):,} runs, {requests:,} requests."]


def _simulated_with(document: dict[str, Any], command: str) -> str:
    commit = f" at commit {document['commit']}" if document.get("commit") else ""
    run = f"Simulated on {document['date'][:10]} with `python -m loadtest {command}`{commit}"
    return f"{run} on {describe_machine(document)}"


def _command(rows: Sequence[Row]) -> str:
    """Return the command that makes these rows; a flag with all known names is left out."""
    words = ["simulate", "--race", "--seeds", *_seeds(sorted({row.seed for row in rows if row.seed is not None}))]
    workloads, loads = (tables.names_in(getattr(row, name) for row in rows) for name in ("workload", "load_name"))
    for flag, known, found in (
        ("--scenario", SCENARIOS, workloads),
        (
            "--load",
            {load for name in workloads for load in loads_of(name)},
            loads,
        ),
        ("--policy", ROWS, tables.names_in(row.policy for row in rows)),
    ):
        if set(found) != set(known):
            words += [flag, *found]
    return shlex.join(words)


def _seeds(found: Sequence[int]) -> list[str]:
    if found == list(CLAIM_SEEDS):
        return ["claim"]
    whole = len(found) > 1 and found == list(range(found[0], found[-1] + 1))
    return [f"{found[0]}-{found[-1]}"] if whole else [str(seed) for seed in found]
