"""`python -m loadtest pages`: the parts of README.md and loadtest/README.md that are rendered and never typed.

A figure that was typed by hand is wrong one release later. So the demo's table comes from the JSON that the demo
wrote, and the tables of settings, metrics and policies come from the code itself; the test suite fails while README
differs from what this renders. Each part stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

    python -m loadtest pages demo.json            put the demo's figures into README.md
    python -m loadtest pages --overhead FILE      put the figures of `loadtest overhead` there, from its JSON
    python -m loadtest pages --faults FILE        put the figures of `loadtest faults` there, from its JSON
    python -m loadtest pages --sizing FILE        put the figures of `loadtest sizing` there, from its JSON
    python -m loadtest pages --race FILE          put the figures of `loadtest simulate --race` on both pages, from its
                                                  JSON, and its pictures beside the second
    python -m loadtest pages --peers FILE         put the figures of `loadtest agree --peers` there, from its JSON
    python -m loadtest pages --agree FILE         put the figures of `loadtest agree` into loadtest/README.md
    python -m loadtest pages --http FILE          put the figures of `loadtest agree --peers --table` there
    python -m loadtest pages --ladder FILE        put the figures of `loadtest simulate --ladder` there
    python -m loadtest pages --tables             put the tables of settings, metrics and policies there, and those of
                                                  the race's scenarios and rows into loadtest/README.md
    python -m loadtest pages --check demo.json    exit 1 unless the demo kept what README promises; of several runs the
                                                  medians are judged
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.common.report import COLUMNS, Row, shown
from loadtest.common.rivals import OURS
from loadtest.common.traces import TraceError, shipped_trace
from loadtest.cost.sizing_report import HEADERS as SIZING_HEADS
from loadtest.cost.sizing_report import SizingError, rule_lines
from loadtest.cost.sizing_report import cells as sizing_cells
from loadtest.faults.matrix import GOALS
from loadtest.faults.report import beside, by_case, kept
from loadtest.overhead.observatory import TEXT as OF_OBSERVATORY
from loadtest.overhead.report import CASES, EXTRAS, HEADS, cells, measured
from loadtest.overhead.workers import TEXT as OF_WORKERS
from loadtest.pages.markdown import ReadmeError, rows_of, table, where, with_block
from loadtest.pages.race import (
    agree_block,
    cells_block,
    http_block,
    ladder_block,
    peers_block,
    race_block,
    rows_table,
    scenarios_table,
    write_pictures,
)
from loadtest.replay.demo import FIXED, WORKLOADS, DemoWorkload, verdicts
from loadtest.replay.demo import POLICIES as COMPARED
from router.core.cache.knowledge import Held
from router.core.facts.misses import Breakdown, Miss
from router.core.facts.placements import Grade, Reason, Receipt, Usage
from router.core.facts.replicas import Load, Replica
from router.core.facts.requests import Priority
from router.core.observatory.ledger.ledger import Ledger
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.settings import schema as settings
from router.telemetry.metrics import Figures, Metrics, RequestRecord

README = Path(__file__).resolve().parents[2] / "README.md"
PAGE = Path("loadtest/README.md")
"""Beside README.md."""
COMMAND = 'make run ARGS="--exit --json demo.json"'
OVERHEAD_COMMAND = "python -m loadtest overhead --install-rivals --json overhead.json"
FAULTS_COMMAND = "python -m loadtest faults --json faults.json"
SIZING_COMMAND = "python -m loadtest sizing --json sizing.json"
SHOWN = ("workload", "policy", "requests", "errors", "token_hit_rate", "ttft_p50_s", "ttft_p90_s", "e2e_p50_s")

AGENT_HIT_RATIO_MIN = 3.0  # warm over round robin, token hit rate
AGENT_TTFT_RATIO_MAX = 0.5  # warm over round robin, p90 time to first token


# What the code says of itself


def settings_table() -> str:
    """Every setting with its default, as YAML writes it, and its docstring."""
    defaults, texts = settings.Settings(), _setting_texts()
    rows = []
    for key in settings.field_keys():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(defaults, section) if section else defaults, name)
        rows.append((f"`{key}`", _default(key, value), texts[key]))
    return table(("key", "default", "what it is, and why that default"), rows)


def _setting_texts() -> dict[str, str]:
    """Dotted key -> the docstring under the field, which only the source has."""
    by_class: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(settings)).body:
        if isinstance(node, ast.ClassDef):
            by_class[node.name] = dict(_documented(node.body))
    sections = {name: hint.__name__ for name, hint in inspect.get_annotations(settings.Settings, eval_str=True).items()}
    texts = {}
    for key in settings.field_keys():
        section, _, name = key.rpartition(".")
        texts[key] = by_class[sections[section] if section else "Settings"][name]
    return texts


def _documented(body: Sequence[ast.stmt]) -> Iterable[tuple[str, str]]:
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), " ".join(str(text.value.value).split())


def _default(key: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and "bytes" in key and value >= 1 << 10:
        size, unit = (value >> 20, "MiB") if value >= 1 << 20 else (value >> 10, "KiB")
        return f"`{value}` ({size} {unit})"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`" if value != "" else '`""`'


def metrics_table() -> str:
    """Every metric with its type, its labels and its help text, read from the registry of a router with a replica."""
    rows = []
    for family in _exercised_metrics().registry.collect():
        if not family.samples:
            raise ReadmeError(f"{family.name} has no series: add what it needs to _exercised_metrics")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = dict.fromkeys(label for s in family.samples for label in s.labels if label != "le")
        rows.append((f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), family.documentation))
    return table(("name", "type", "labels", "meaning"), rows)


def _exercised_metrics() -> Metrics:
    """Metrics with at least one series each: a replica that reports everything, and a request that failed once."""
    id_ = "http://10.0.0.1:8000"
    router = Router(POLICIES["warm"](), index_bytes_max=1 << 20, memory_max=16, blocks_max_default=16)
    router.replace([Replica(id_)])
    router.observe_load(id_, Load(1, 0, 0.5, 4_096, 16, 100.0, 10.0, 100.0, 50.0, prefix_caching=True))
    router.knowledge.grade(id_, Grade.CATCHING_UP, "joined late", 0.0)
    held = Held(16, 16, Grade.CATCHING_UP, epoch=0)
    router.knowledge.answered(id_, held, 16, 16, 100)
    ledger = Ledger(templates_max=1, groups_max=2, steps_max=1, excerpts=False, tenant=str, now_s=0.0)
    streams, connections = {id_: {"lag_s": 0.001}}, (1, {"idle": 1})
    fresh = {"fresh": 1.0, "stale_s": 0.0, "errors": 0.0, "replicas": 1.0}
    figures = Figures(
        in_flight=lambda: 1,
        streams=lambda: streams,
        prompts=lambda: {"encoded": 1},
        connections=lambda: connections,
        discoveries=lambda: {"static": fresh},
        ledger=lambda: ledger,
    )
    metrics = Metrics(router, lambda: 0.0, figures)
    metrics.know_tenants(["acme"], 1)
    metrics.reloaded("ok", 0.0)
    metrics.joined(id_)
    receipt = Receipt(id_, "warm", Reason.WARM, Grade.ESTIMATED, 100, 50)
    record = RequestRecord("1", "/v1/completions", 1.0, "m", 200, "ok", stream=True, duration_s=1.0, overhead_s=0.001)
    record.ttft_s, record.inter_token_s, record.events = 0.1, 0.01, 10
    record.receipt, record.usage, record.retries = receipt, Usage(100, 10, 50), (("connect", id_),)
    record.tenant, record.queued_s = "acme", 0.1
    record.miss = Breakdown(100, 50, {Miss.NEW: 50})
    metrics.observe(record)
    ledger.observe(record)
    ledger.settle(1.0)
    metrics.failed(id_, "connect")
    metrics.shed("overloaded", Priority.NORMAL)
    return metrics


def policies_table() -> str:
    """Every policy with the first sentence of its module."""
    rows = []
    for name, policy in POLICIES.items():
        text = inspect.getdoc(inspect.getmodule(policy)) or ""
        first = " ".join(text.split("\n\n", maxsplit=1)[0].split()).removeprefix(f"{name}: ")
        rows.append((f"`{name}`", "yes" if policy().cache_aware else "no", first))
    return table(("name", "looks at caches", "where a request goes"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "metrics": metrics_table,
    "policies": policies_table,
}


PAGE_TABLES: dict[str, Callable[[], str]] = {"scenarios": scenarios_table, "rows": rows_table}
"""Of loadtest/README.md."""


def with_tables(text: str, rendered: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """A page's text with every table as the code has it. Raises ReadmeError."""
    for name, render in rendered.items():
        text = with_block(text, name, render())
    return text


# What the demo measured


def median_rows(documents: Sequence[dict[str, Any]]) -> list[Row]:
    """One row a workload and policy, each figure the median of the runs. Raises ReadmeError where rows differ."""
    runs = [rows_of(document) for document in documents]
    if len({tuple((row.workload, row.policy, row.requests) for row in run) for run in runs}) != 1:
        raise ReadmeError("these are not runs of the same demo")
    merged = []
    for same in zip(*runs, strict=True):
        figures = {column.name: [getattr(row, column.name) for row in same] for column in COLUMNS}
        medians = {n: median(v) for n, v in figures.items() if all(isinstance(x, float) for x in v)}
        errors = sum(row.errors or 0 for row in same)
        merged.append(replace(same[0], **medians, errors=errors))
    return merged


def demo_block(documents: Sequence[dict[str, Any]]) -> str:
    """The demo's table, with date, machine, command and fixed parameters. Raises ReadmeError, TraceError."""
    rows, document = median_rows(documents), documents[-1]
    sizes = {workload.name: workload.requests for workload in WORKLOADS}
    for row in rows:
        if sizes.get(row.workload or "") != row.requests:
            raise ReadmeError(f"{row.workload}, {row.policy}: {row.requests} requests are not the demo's own run")
    columns = [next(column for column in COLUMNS if column.name == name) for name in SHOWN]
    return "\n".join(
        [
            f"Measured on {document['date'][:10]} with `{COMMAND}` on {where(document)}; {_runs(len(documents))}.",
            "",
            table([c.title for c in columns], [[shown(row, c) for c in columns] for row in rows]),
            "",
            *(f"- {line}." for line in verdicts(rows)),
            *(
                f"- {w.name}: {100 * ceiling(w):.0f} % of its prompt tokens, in the trace's own blocks, stood at the"
                " start of an earlier prompt; even a cache that forgets nothing would hardly find more."
                for w in WORKLOADS
                if not w.think_max_s
            ),
            "",
            "What is fixed:",
            "",
            f"- {FIXED}.",
            *(f"- {workload.describe()}." for workload in WORKLOADS),
        ]
    )


def _runs(count: int) -> str:
    return "one run" if count == 1 else f"{count} runs, each figure the median of its own, errors added up"


# What a router costs


def overhead_block(document: dict[str, Any]) -> str:
    """The table of `loadtest overhead`, with date, machine, versions, command and goals. Raises ReadmeError."""
    rows = rows_of(document)
    figures = measured(rows)
    expected = {*CASES, *chain.from_iterable(EXTRAS.values())}
    if expected - {row.case for row in figures} - {row.workload for row in rows}:
        raise ReadmeError("not the JSON of a whole run of overhead: some of its cases are missing")
    if "--slack" in document.get("command", ""):
        raise ReadmeError("this run was judged with --slack: README's goals have none")
    versions = ", ".join(f"{name} {version}" for name, version in document["machine"].get("routers", {}).items())
    return "\n".join(
        [
            f"Measured on {document['date'][:10]} with `{OVERHEAD_COMMAND}` on {where(document)}; {versions}.",
            "",
            table(HEADS, [cells(figures, row) for row in figures]),
            "",
            *(f"- {case.name}: {case.text}, {case.concurrency} at a time." for case in CASES.values()),
            *(f"- {name}: {text}." for name, text in (OF_WORKERS | OF_OBSERVATORY).items()),
            "",
            table(("case", "goal", "at most", "got", ""), [_goal(row) for row in rows if row.goal is not None]),
        ]
    )


def _goal(row: Row) -> tuple[str, ...]:
    numbers = ("-" if value is None else f"{value:.2f}" for value in (row.expected, row.got))
    verdict = "not judged" if row.ok is None else "met" if row.ok else "missed"
    return (row.case or row.workload or "", row.goal or "", *numbers, verdict)


# What becomes of requests when things go wrong


def faults_block(document: dict[str, Any]) -> str:
    """The table of `loadtest faults`: what was promised, and what each router did. Raises ReadmeError."""
    by_router = by_case(rows_of(document))
    if set(map(str, GOALS)) - {goal for goal, _ in by_router.get(OURS, {})}:
        raise ReadmeError("not the JSON of a whole run of faults: some of its goals are missing")
    if loose := {"--slack", "--counts"} & set(document.get("command", "").split()):
        raise ReadmeError(f"this run was judged with {min(loose)}: README's promises have none")
    routers = [OURS, *(name for name in by_router if name != OURS)]
    known = document["machine"].get("routers", {})
    versions = [f"{name} {known[name]}" for name in routers if name in known]
    about = [f"Measured on {document['date'][:10]} with `{FAULTS_COMMAND}` on {where(document)}", *versions]
    return "\n".join(
        [
            f"{', '.join(about)}.",
            "",
            table(("goal", "case", "promised", *routers), beside(by_router, routers)),
            "",
            *(f"- {name}: {kept(by_router[name].values())} as promised." for name in routers),
        ]
    )


# What size of machine it needs


def sizing_block(document: dict[str, Any]) -> str:
    """The table of `loadtest sizing`, and the rule that follows from it. Raises ReadmeError."""
    rows = rows_of(document)
    try:
        rules = rule_lines(rows)
    except SizingError as error:
        raise ReadmeError(str(error)) from error
    if failed := [row for row in rows if row.errors]:
        raise ReadmeError(f"this run had errors: {failed[0].case}, {failed[0].errors_by_kind}")
    return "\n".join(
        [
            f"Measured on {document['date'][:10]} with `{SIZING_COMMAND}` on {where(document)}.",
            "",
            table(SIZING_HEADS, map(sizing_cells, rows)),
            "",
            *(f"- {line}." for line in rules),
        ]
    )


STORY_TEXTS = {
    "before": "as it was",
    "broken": "a release of one agent begins its system prompt with the time of day",
    "mended": "the next one says the time at the end of the newest message",
}


def story_block(document: dict[str, Any]) -> str:
    """What `loadtest story --mend` measured, phase by phase. Raises ReadmeError."""
    rows = {row.workload: row for row in rows_of(document)}
    if rows.keys() != STORY_TEXTS.keys():
        raise ReadmeError("not the JSON of a whole story: run it with --mend")
    if any(row.errors for row in rows.values()):
        raise ReadmeError("this run had errors")
    cells = [
        (phase, text, f"{100 * (row.token_hit_rate or 0):.1f} %", f"{row.ttft_p50_s:.2f} s", f"{row.ttft_p90_s:.2f} s")
        for phase, text in STORY_TEXTS.items()
        if (row := rows[phase])
    ]
    return "\n".join(
        [
            f"Measured on {document['date'][:10]} with `python -m loadtest story --mend` on {where(document)}:",
            f"{rows['before'].replicas} simulated replicas, agents in {rows['before'].load:g} conversations at a time.",
            "",
            table(("phase", "what the agents do", "token hits", "TTFT p50", "TTFT p90"), cells),
        ]
    )


def ceiling(workload: DemoWorkload) -> float:
    """Prompt tokens that one cache without a limit would find, in whole blocks of the trace, as part of all.

    Only for workloads that arrive by the clock: what others send depends on how fast they are answered.
    """
    trace = shipped_trace(workload.trace, workload.requests)
    seen: set[tuple[str, int]] = set()
    found = total = 0
    for request in (request for session in trace.sessions for request in session.requests):
        ids = [(request.namespace, block) for first, count in request.runs for block in range(first, first + count)]
        found += sum(1 for _ in takewhile(seen.__contains__, ids)) * request.block_tokens
        total += request.input_tokens
        seen.update(ids)
    return found / max(1, total)


def broken_promises(documents: Sequence[dict[str, Any]]) -> list[str]:
    """What README promises of the demo and these runs did not show, a line each. Its figures are medians of several
    runs: how often round robin meets a cache by chance differs by a third from one to the next."""
    rows = {(row.workload, row.policy): row for row in median_rows(documents)}
    unwell = [row for row in rows.values() if row.errors or row.rejected]
    failed = [f"{row.workload}, {row.policy}: {row.errors} errors, {row.rejected} rejected" for row in unwell]
    for workload, hits_min, ttft_max in (
        ("agent", AGENT_HIT_RATIO_MIN, AGENT_TTFT_RATIO_MAX),
        ("conversation", 1.0, 1.0),
    ):
        before, after = (rows.get((workload, policy)) for policy in COMPARED)
        if before is None or after is None:
            failed.append(f"{workload}: no rows of both policies")
            continue
        hits = _ratio(after.token_hit_rate or 0.0, before.token_hit_rate)
        ttft = _ratio(after.ttft_p90_s or float("inf"), before.ttft_p90_s)
        better = hits_min == 1.0  # "both better" is strict, "at least 3 times" is not
        if hits < hits_min or (better and hits == hits_min):
            failed.append(f"{workload}: {hits:.2f} x round robin's token hit rate, promised {hits_min:g} x")
        if ttft > ttft_max or (better and ttft == ttft_max):
            failed.append(f"{workload}: {ttft:.2f} x round robin's p90 TTFT, promised {ttft_max:g} x")
    return failed


def _ratio(after: float, before: float | None) -> float:
    """To six digits, as the JSON has its figures; huge where there was nothing before."""
    return round(after / max(before or 0.0, 1e-9), 6)


FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "overhead": ("overhead", overhead_block),
    "faults": ("faults", faults_block),
    "sizing": ("sizing", sizing_block),
    "race": ("simulate --race", race_block),
    "peers": ("agree --peers", peers_block),
    "story": ("story --mend", story_block),
}
"""Block of README.md, and flag -> the instrument whose JSON it is made of, and how."""
PAGE_FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "race": ("cells", cells_block),
    "agree": ("agree", agree_block),
    "http": ("http", http_block),
    "ladder": ("ladder", ladder_block),
}
"""Flag -> block of loadtest/README.md, and how it is made."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest pages", description="Render README.md's own parts.")
    parser.add_argument("demo", nargs="*", type=Path, metavar="FILE", help="the demo's JSON, one or several runs")
    parser.add_argument("--tables", action="store_true", help="render the tables that the code has")
    of_readme = {name: instrument for name, (instrument, _) in FIGURES.items()}
    instruments = {**of_readme, "agree": "agree", "http": "agree --peers --table", "ladder": "simulate --ladder"}
    for name, instrument in instruments.items():
        parser.add_argument(
            f"--{name}", type=Path, metavar="FILE", help=f"render the figures of `loadtest {instrument}`"
        )
    parser.add_argument("--check", action="store_true", help="only say whether the demo kept its promise")
    parser.add_argument(
        "--readme", type=Path, default=README, help="the page to change; loadtest/README.md is beside it"
    )
    options = parser.parse_args(argv)
    others = [options.tables, *(getattr(options, name) for name in {**FIGURES, **PAGE_FIGURES})]
    if not options.demo and (options.check or not any(others)):
        parser.error("the demo's JSON is missing")
    try:
        return _check(options.demo) if options.check else _render(options)
    except (ReadmeError, TraceError, OSError, json.JSONDecodeError) as error:
        print(f"readme: {error}", file=sys.stderr)
        return 1


def _check(files: Sequence[Path]) -> int:
    documents = _read(files)
    failed = broken_promises(documents)
    print("\n".join(failed or ["the demo kept its promise", *verdicts(median_rows(documents))]))
    return 1 if failed else 0


def _read(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _render(options: argparse.Namespace) -> int:
    text = options.readme.read_text(encoding="utf-8")
    if options.tables:
        text = with_tables(text)
    if options.demo:
        text = with_block(text, "demo", demo_block(_read(options.demo)))
    for name, (_, render) in FIGURES.items():
        if file := getattr(options, name):
            text = with_block(text, name, render(*_read([file])))
    options.readme.write_text(text, encoding="utf-8")
    if options.tables or any(getattr(options, name) for name in PAGE_FIGURES):
        _render_page(options.readme.parent / PAGE, options)
    return 0


def _render_page(page: Path, options: argparse.Namespace) -> None:
    """That of the instruments, and what is pictured beside it."""
    text = page.read_text(encoding="utf-8")
    if options.tables:
        text = with_tables(text, PAGE_TABLES)
    for name, (block, render) in PAGE_FIGURES.items():
        if file := getattr(options, name):
            text = with_block(text, block, render(*_read([file])))
    page.write_text(text, encoding="utf-8")
    if options.race:
        write_pictures(_read([options.race])[0], page.parent)


if __name__ == "__main__":
    sys.exit(main())
