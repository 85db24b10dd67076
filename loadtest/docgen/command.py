"""`python -m loadtest pages`: the blocks of README.md and docs/ that are rendered and never typed.

A figure that was typed by hand is wrong one release later. So tables of figures come from the JSON of a benchmark, and
tables of settings, metrics, policies and scenarios from the code itself. The test suite fails while a page differs from
the rendered output. A block is between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, and BLOCKS has its page. README's
short tables are always taken from the full tables of docs/evidence.

    python -m loadtest pages                      render all blocks from the code and other pages
    python -m loadtest pages demo.json            render the demo's figures; of several runs their medians
    python -m loadtest pages --overhead FILE      render the figures of a benchmark from its JSON; `--help` has all
    python -m loadtest pages --check demo.json    exit 1 unless the demo kept the promises of the documents
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loadtest.common.traces import TraceError
from loadtest.docgen.constants import constants_table
from loadtest.docgen.curve import curve_block
from loadtest.docgen.demo import broken_promises, demo_block, median_rows
from loadtest.docgen.faults import faults_block
from loadtest.docgen.first_signs import on_call_block
from loadtest.docgen.forecasts import forecasts_block
from loadtest.docgen.former_names import former_names_tables
from loadtest.docgen.growth import growth_block
from loadtest.docgen.layers import layers
from loadtest.docgen.linked_replicas import pulls_block, split_block
from loadtest.docgen.markdown import PageError, with_block
from loadtest.docgen.metrics import metrics_table
from loadtest.docgen.overhead import overhead_block, shared_block
from loadtest.docgen.policies import policies_table
from loadtest.docgen.promises import findings_block, promises_block
from loadtest.docgen.race import (
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
from loadtest.docgen.replay import replayed_block
from loadtest.docgen.settings import settings_table
from loadtest.docgen.sharing import cost_block, multi_router_block
from loadtest.docgen.sizing import memory_block, sizing_block
from loadtest.docgen.story import story_block
from loadtest.docgen.summaries import costs_claim, costs_digest, demo_claim, demo_digest, race_claim, race_digest
from loadtest.docgen.tiers import tiers_block
from loadtest.docgen.transfers import transfers_block
from loadtest.docgen.zoo import figures_block as zoo_figures
from loadtest.docgen.zoo import zoo_table
from loadtest.replay.demo import verdicts

ROOT = Path(__file__).resolve().parents[2]
README = "README.md"
SUMMARY = "docs/evidence/summary.md"
PICTURES = "docs/evidence"
"""Folder of the race's pictures."""

BLOCKS = {
    "settings": "docs/reference/settings.md",
    "metrics": "docs/reference/metrics.md",
    "former-names": "docs/reference/former-names.md",
    "policies": "docs/reference/policies.md",
    "constants": "docs/architecture/price.md",
    "zoo": "docs/reference/benchmarks.md",
    "zoo-figures": "docs/evidence/simulation.md",
    "layers": "docs/architecture/packages.md",
    "promises": "docs/reference/promises.md",
    "findings": "docs/reference/promises.md",
    "scenarios": "docs/evidence/race.md",
    "rows": "docs/evidence/race.md",
    "demo": "docs/evidence/demo.md",
    "overhead": "docs/evidence/overhead.md",
    "growth": "docs/evidence/overhead.md",
    "faults": "docs/evidence/faults.md",
    "curve": "docs/evidence/faults.md",
    "on-call": "docs/evidence/faults.md",
    "race": "docs/evidence/placement.md",
    "peers": "docs/evidence/placement.md",
    "cells": "docs/evidence/race.md",
    "ladder": "docs/evidence/ladder.md",
    "agree": "docs/evidence/http.md",
    "http": "docs/evidence/http.md",
    "sharing": "docs/evidence/routers.md",
    "several": "docs/evidence/routers.md",
    "replayed": "docs/evidence/routers.md",
    "shared": "docs/evidence/routers.md",
    "tiers": "docs/evidence/tiers.md",
    "pulls": "docs/evidence/p2p-kv-transfer.md",
    "split": "docs/evidence/disaggregated-prefill.md",
    "forecasts": "docs/evidence/reuse-prediction.md",
    "transfers": "docs/evidence/tiers.md",
    "sizing": "docs/guide/sizing.md",
    "memory": "docs/guide/sizing.md",
    "story": "docs/guide/cache-misses.md",
    "demo-short": SUMMARY,
    "costs-short": SUMMARY,
    "race-short": SUMMARY,
    "demo-claim": README,
    "race-claim": README,
    "costs-claim": README,
}
"""Block -> the page that has its markers."""
TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "metrics": metrics_table,
    "former-names": former_names_tables,
    "policies": policies_table,
    "constants": constants_table,
    "zoo": zoo_table,
    "layers": lambda: layers((ROOT / "pyproject.toml").read_text(encoding="utf-8")),
    "promises": lambda: promises_block(ROOT / "tests"),
    "findings": lambda: findings_block(ROOT / "tests"),
    "scenarios": scenarios_table,
    "rows": rows_table,
    "transfers": transfers_block,
}
"""Blocks rendered from the code or the data beside it."""
DIGESTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "demo-short": ("demo", demo_digest),
    "costs-short": ("overhead", costs_digest),
    "race-short": ("race", race_digest),
    "demo-claim": ("demo", demo_claim),
    "race-claim": ("race", race_claim),
    "costs-claim": ("overhead", costs_claim),
}
"""Short block -> the full one, and the function that makes the short one from the full one's page."""
FIGURES: dict[str, tuple[str, dict[str, Callable[[dict[str, Any]], str]]]] = {
    "overhead": ("overhead", {"overhead": overhead_block}),
    "faults": ("faults", {"faults": faults_block}),
    "curve": ("faults --requests", {"curve": curve_block}),
    "on_call": ("faults --on-call", {"on-call": on_call_block}),
    "growth": ("cost --replicas", {"growth": growth_block}),
    "sharing": ("cost --sharing", {"sharing": cost_block}),
    "several": ("simulate --several", {"several": multi_router_block}),
    "replayed": ("routers", {"replayed": replayed_block}),
    "shared": ("overhead --cases sharing", {"shared": shared_block}),
    "zoo": ("simulate --zoo", {"zoo-figures": zoo_figures}),
    "tiers": ("simulate --tiers", {"tiers": tiers_block}),
    "pulls": ("simulate --pulls", {"pulls": pulls_block}),
    "split": ("simulate --split", {"split": split_block}),
    "forecasts": ("forecasts", {"forecasts": forecasts_block}),
    "sizing": ("sizing", {"sizing": sizing_block}),
    "memory": ("cost --memory", {"memory": memory_block}),
    "race": ("simulate --race", {"race": race_block, "cells": cells_block}),
    "peers": ("agree --peers", {"peers": peers_block}),
    "story": ("story --mend", {"story": story_block}),
    "agree": ("agree", {"agree": agree_block}),
    "http": ("agree --peers --table", {"http": http_block}),
    "ladder": ("simulate --ladder", {"ladder": ladder_block}),
}
"""Flag -> the benchmark that writes its JSON, and the blocks that are made of that."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        return _check(options.demo) if options.check else _render(options)
    except (PageError, TraceError, OSError, json.JSONDecodeError) as error:
        print(f"pages: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest pages", description="Render parts of the documents.")
    parser.add_argument("demo", nargs="*", type=Path, metavar="FILE", help="JSON of the demo, one or several runs")
    parser.add_argument("--tables", action="store_true", help="render tables from code; this is the default")
    for name, (instrument, _) in FIGURES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=Path,
            metavar="FILE",
            help=f"render the figures of `loadtest {instrument}`",
        )
    parser.add_argument("--check", action="store_true", help="only check the promise of the demo")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder with README.md and docs/")
    return parser


def _check(files: Sequence[Path]) -> int:
    if not files:
        raise PageError("JSON of the demo is missing")
    documents = _read(files)
    failed = broken_promises(documents)
    print("\n".join(failed or ["the demo kept its promise", *verdicts(median_rows(documents))]))
    return 1 if failed else 0


def _read(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _render(options: argparse.Namespace) -> int:
    pages = Pages(options.root)
    for name, body in _asked_for(options):
        pages.put(name, body)
    pages.put_digests()
    pages.write()
    if options.race:
        write_pictures(_read([options.race])[0], options.root / PICTURES)
    return 0


def _asked_for(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the selected blocks with their new bodies."""
    files = {name: file for name in FIGURES if (file := getattr(options, name))}
    if options.tables or not (options.demo or files):
        yield from ((name, render()) for name, render in TABLES.items())
    if options.demo:
        yield "demo", demo_block(_read(options.demo))
    for flag, file in files.items():
        (document,) = _read([file])
        yield from ((name, render(document)) for name, render in FIGURES[flag][1].items())


class Pages:
    """Texts of the pages in a folder; all blocks are rendered before anything is written."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._texts: dict[str, str] = {}

    def text(self, page: str) -> str:
        """Return the page with all replaced blocks. Raises OSError."""
        if page not in self._texts:
            self._texts[page] = (self._root / page).read_text(encoding="utf-8")
        return self._texts[page]

    def put(self, name: str, body: str) -> None:
        """Replace one block. Raises PageError, OSError."""
        page = BLOCKS[name]
        self._texts[page] = with_block(self.text(page), name, body)

    def put_digests(self) -> None:
        """Render the short blocks from the pages with the full ones; without README, do nothing."""
        if (self._root / README).exists():
            for name, (whole, digest) in DIGESTS.items():
                self.put(name, digest(self.text(BLOCKS[whole])))

    def write(self) -> None:
        """Write every page that was read or changed. Raises OSError."""
        for page, text in self._texts.items():
            (self._root / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
