"""`python -m loadtest evidence`: all measurements of time or rates, one after the other, and one table of them.

`.ci/run` judges counts and correctness, which do not change on a busy machine. Figures that depend on the machine are
measured here, on an otherwise idle one, before a change is complete. The table goes into the documents.

Parts are in parts.py. The result of a part is kept in DIR with its commit. A part that was measured at this commit is
not run again, so that an interrupted run continues. The judged rows of a part are the figures of the table; a part
without any has the result of its last command. DIR/evidence.json has them all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from loadtest.common import flags
from loadtest.common.report import build_table, report_console
from loadtest.suite.parts import PARTS, Command, Part
from router.telemetry import report_header

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("evidence")
PAGE_WIDTH = 160
Row = dict[str, Any]


class EvidenceError(Exception):
    """A part could not be measured; the message names the command."""


# One part


def run_part(part: Part, folder: Path, console: Console) -> list[Row]:
    """Return the judged rows of a part. Raises EvidenceError."""
    file = folder / f"{part.name}.json"
    file.unlink(missing_ok=True)
    log = folder / f"{part.name}.log"
    log.write_text("")
    missed = False
    for step in part.steps:
        words = [word.format(json=file, folder=folder, python=sys.executable) for word in step.words]
        console.print(f"   {' '.join(words)}", highlight=False, markup=False, soft_wrap=True)
        status = _status(step, words, log, {"json": str(file), "folder": str(folder)})
        if status and not step.optional and not (step.judges and status == 1):
            raise EvidenceError(f"{' '.join(words)}: exit status {status}; see {log}")
        missed |= step.judges and status == 1
    rows = read_judged_rows(part, file)
    if not rows or (missed and all(row["ok"] for row in rows)):
        rows.append({"case": part.about, "ok": not missed})
    return rows


def _status(step: Command, words: Sequence[str], log: Path, names: Mapping[str, str]) -> int:
    """Return the exit status of a command; its output is in the log."""
    environment = os.environ | {key: value.format(**names) for key, value in step.environment.items()}
    with log.open("a") as said:
        said.write(f"== {' '.join(words)}\n")
        said.flush()
        done = subprocess.run(words, cwd=ROOT, stdout=said, stderr=said, env=environment, check=False)
    return done.returncode


def read_judged_rows(part: Part, file: Path) -> list[Row]:
    """Return the rows of a part's file that have a verdict. Raises EvidenceError."""
    if not file.exists():
        return []
    try:
        text = file.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()] if part.lines else json.loads(text)["rows"]
        return [row for row in rows if row.get("ok") is not None]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvidenceError(f"{file}: invalid rows: {error}") from error


# Stored results


def read(folder: Path) -> dict[str, Row]:
    """Return the results of earlier runs by part: commit, seconds and rows. Empty if they cannot be read."""
    try:
        parts = json.loads((folder / "evidence.json").read_text(encoding="utf-8"))["parts"]
        return {name: dict(found) for name, found in parts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(folder: Path, command: str, found: Mapping[str, Row]) -> None:
    """Write all parts into one document; it is replaced atomically."""
    rows = [{"part": name, **row} for name, part in found.items() for row in part["rows"]]
    document = report_header.document(command, rows, Path(__file__).resolve().parent) | {"parts": dict(found)}
    half = folder / "evidence.json.part"
    half.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    half.replace(folder / "evidence.json")


# Report


def name_of(row: Row) -> str:
    """Return the subject of a row."""
    words = [row.get(key) for key in ("workload", "load_name", "policy", "case", "goal")]
    return ", ".join(str(word) for word in words if word)


def print_table(console: Console, found: Mapping[str, Row]) -> None:
    """Print a line per figure, then the number of kept promises of each part, and the missed ones."""
    heads = ("part", "figure", "expected", "got", "")
    made = build_table(heads, (), "evidence", left={"part", "figure", ""}, no_wrap=False)
    for name, part in found.items():
        for row in part["rows"]:
            numbers = ["-" if row.get(key) is None else f"{row[key]:,.6g}" for key in ("expected", "got")]
            made.add_row(name, escape(name_of(row)), *numbers, "ok" if row["ok"] else "missed")
        made.add_section()
    console.print(made)
    for name, part in found.items():
        rows = part["rows"]
        took = f"{part['seconds']:.0f} s at {part['commit']}"
        console.print(f"{name}: {sum(row['ok'] for row in rows)} of {len(rows)} as promised, {took}", highlight=False)
    for name, part in found.items():
        for row in part["rows"]:
            if not row["ok"]:
                said = f"missed: {name}: {name_of(row)}: {row.get('got')} for {row.get('expected')}"
                console.print(said, highlight=False, markup=False, soft_wrap=True)


# The command


def evidence(options: argparse.Namespace, command: str, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts that are missing, and print all results."""
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console, commit = Console(stderr=True), report_header.commit(Path(__file__).resolve().parent) or "no commit"
    wanted = [part for part in parts if not options.only or part.name in options.only]
    found, failed = read(folder), list[str]()
    for part in wanted:
        if not options.again and found.get(part.name, {}).get("commit") == commit:
            console.print(f"== {part.name}: already measured at {commit}", highlight=False)
            continue
        console.print(f"== {time.strftime('%H:%M:%S')} {part.name}: some {part.minutes} minutes", highlight=False)
        began_s = time.monotonic()
        try:
            rows = run_part(part, folder, console)
        except (EvidenceError, OSError) as error:
            failed.append(f"{part.name}: {error}")
            console.print(f"   {error}", highlight=False, markup=False, soft_wrap=True)
            continue
        found[part.name] = {"commit": commit, "seconds": round(time.monotonic() - began_s, 1), "rows": rows}
        write(folder, command, found)
    told = {part.name: found[part.name] for part in wanted if part.name in found}
    print_table(report_console(PAGE_WIDTH), told)
    for line in failed:
        print(f"not measured: {line}")
    if failed:
        return 2
    return 1 if options.check and not all(row["ok"] for part in told.values() for row in part["rows"]) else 0


def parser() -> argparse.ArgumentParser:
    """Return a parser with all flags and their defaults."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest evidence", description="Run all measurements of times and rates, and print one table."
    )
    add, names = made.add_argument, flags.make_choices_parser([part.name for part in PARTS])
    add("--list", action="store_true", help="list parts and their durations")
    add("--only", type=names, default=(), metavar="PART,PART", help="parts to run (all)")
    add("--again", action="store_true", help="repeat parts that were measured at this commit")
    add("--check", action="store_true", help="exit with 1 if a figure is missed")
    add("--folder", type=Path, default=FOLDER, metavar="DIR", help=f"folder of rows and logs ({FOLDER})")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    It is 0 if everything was measured, with --check 1 if a figure was missed, and 2 if a part could not be measured.
    """
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = parser().parse_args(arguments)
    if options.list:
        for part in PARTS:
            print(f"{part.name:10} {part.minutes:4} min  {part.about}")
        return 0
    try:
        return evidence(options, " ".join(["evidence", *arguments]))
    except KeyboardInterrupt:
        return 130
