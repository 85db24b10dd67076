"""`python -m deploy.observability`: write dashboards and rules into the chart; `--check`: list differences."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.observability.dashboards import BOARDS
from deploy.observability.grafana import to_json
from deploy.observability.rules import to_yaml

REPO = Path(__file__).resolve().parents[2]


def files() -> dict[str, str]:
    """Return the intended content of each file, by its path in the repository."""
    boards = {f"{DASHBOARDS}/{name}.json": to_json(board, list(BOARDS.values())) for name, board in BOARDS.items()}
    return {**boards, RULES: to_yaml()}


# In the chart, which renders only files of its own. Compose mounts the same files.
DASHBOARDS, RULES = "helm/warmroute/files/dashboards", "helm/warmroute/files/rules.yaml"


def differing() -> list[str]:
    """Return the files that differ from their intended content."""
    made = files()
    return [name for name, text in made.items() if not (REPO / name).is_file() or (REPO / name).read_text() != text]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m deploy.observability", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name the files that differ")
    options = parser.parse_args(argv)
    differ = differing()
    for name in differ:
        print(f"{'differs' if options.check else 'written'}: {name}")
        if not options.check:
            (REPO / name).parent.mkdir(parents=True, exist_ok=True)
            (REPO / name).write_text(files()[name])
    return 1 if options.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
