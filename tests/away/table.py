"""Renders docs/reference/unavailable-components.md from the cells of the tests: `python -m tests.away.table`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from loadtest.docgen.markdown import table, with_block
from tests.away import (
    test_api_server,
    test_collector,
    test_engine,
    test_keys_file,
    test_name_server,
    test_picker,
    test_store,
)
from tests.away.cells import DOORS, SERVED, STATES, Cell

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "reference" / "unavailable-components.md"
PARTS = (test_picker, test_store, test_api_server, test_name_server, test_keys_file, test_collector, test_engine)
HEAD = ("state", "test", "possible access", "remaining service", "reason")


def rendered(page: str) -> str:
    """The page's text with all its tables anew. Raises PageError."""
    page = with_block(page, "away states", table(("state", "meaning"), STATES.items()))
    page = with_block(page, "away questions", table(("question", "unauthorized access"), DOORS.items()))
    return with_block(page, "away", "\n\n".join(map(_of_part, PARTS)))


def _of_part(module: ModuleType) -> str:
    path = f"tests/away/{module.__name__.rpartition('.')[2]}.py"
    cells: dict[str, Cell] = module.CELLS
    return f"### {module.PART}\n\n{table(HEAD, [_row(state, cells[state], path) for state in STATES])}"


def _row(state: str, cell: Cell, path: str) -> tuple[str, ...]:
    opens = "nothing" if not cell.opens else "**" + "; ".join(DOORS[door] for door in cell.opens) + "**"
    named = "; ".join(SERVED[each] for each in cell.serves) or "nothing"
    serves = "all" if len(cell.serves) == len(SERVED) else named
    return f"[{state}](../../{cell.elsewhere or path})", cell.how, opens, serves, cell.why


def main() -> int:
    """Write the page."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
