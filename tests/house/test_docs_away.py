"""The page of what is open while a part is away is rendered from the cells that tests/away keeps."""

from __future__ import annotations

import pytest

from tests.away import table
from tests.away.cells import DOORS, SERVED, STATES
from tests.house.documents import ROOT, page

# Open by nature, as the page says: what a file says counts, and what is only in memory is lost with it.
OPEN = {
    ("Keys file", "old"): ("revoked key",),
    ("Picker", "emptied"): ("rate",),
    ("Picker", "old"): ("rate",),
}


def test_the_page_is_what_the_cells_say() -> None:
    """`python -m tests.away.table` changes nothing."""
    text = page("docs/reference/unavailable-components.md")
    assert table.rendered(text) == text, "render it again: python -m tests.away.table"


@pytest.mark.parametrize("part", table.PARTS, ids=lambda part: part.PART)
def test_every_state_has_its_cell(part: object) -> None:
    """Each part has all six states, in known words; with keys the answer is never more, but for what is open by
    nature."""
    cells = part.CELLS  # type: ignore[attr-defined]
    assert list(cells) == list(STATES)
    for state, cell in cells.items():
        assert set(cell.opens) <= set(DOORS)
        assert set(cell.serves) <= set(SERVED)
        assert cell.opens == OPEN.get((part.PART, state), ())  # type: ignore[attr-defined]
        assert not cell.elsewhere or (ROOT / cell.elsewhere).is_file()
        assert cell.why or (not cell.opens and len(cell.serves) == len(SERVED)), state
