"""A history file of an earlier version is read with current values."""

from __future__ import annotations

from pathlib import Path

import msgspec

from router.admin.history.file import HistoryFile
from router.admin.history.intervals import STEP_S, point
from router.admin.history.query_filters import DecisionFilter
from tests.admin.history.records import BYTES_MAX, HISTORY

OLD_SUMS = {
    "requests": 2.0,
    "place:genuine": 40.0,
    "place:held_elsewhere": 60.0,
    "held:crowd": 50.0,
    "held:unfit": 10.0,
}
NEW_SUMS = {"requests": 1.0, "place:gpu_hit": 4.0, "place:cached_on_other_replica": 6.0, "held:decode_load": 6.0}
AT_S = 2_000_040


def row(number: int, spill: str, **places: int) -> dict[str, object]:
    """A decision as a router writes it, with words of a client that look like former values."""
    texts = dict.fromkeys(("session", "conversation", "tenant", "replica", "reason"), "")
    model = '"spill":"crowd","held_elsewhere":1'
    return {"number": number, "at_s": AT_S, "id": f"id-{number}", "status": 200, "miss": {}, "model": model, **texts,
            "spill": spill, "places": places, "hit": "genuine"}  # fmt: skip


def test_decisions_have_current_values(tmp_path: Path) -> None:
    """Causes and places are replaced, and names from clients are not."""
    file = HistoryFile(str(tmp_path / HISTORY), bytes_max=BYTES_MAX, run=1)
    old = row(1, "crowd", held_elsewhere=7, genuine=3)
    file.write([old, row(2, "unfit", tail=1), row(3, "queue", gpu_hit=2)], [])
    found, _ = file.find(DecisionFilter(), before=10, limit=10, bytes_max=1 << 20)
    third, second, first = (msgspec.json.decode(text) for _, text in found)
    file.close()
    assert (first["spill"], second["spill"], third["spill"]) == ("decode_load", "unhealthy", "queue")
    assert first["places"] == {"cached_on_other_replica": 7, "gpu_hit": 3}
    assert first["hit"] == third["hit"] == "genuine"
    assert first["model"] == old["model"]
    assert third["places"] == {"gpu_hit": 2}


def test_intervals_add_up_over_an_upgrade(tmp_path: Path) -> None:
    """An interval of an earlier version and one of this version in the same minute have the same names."""
    file = HistoryFile(str(tmp_path / HISTORY), bytes_max=BYTES_MAX, run=1)
    file.write([], [(AT_S // STEP_S, OLD_SUMS), (AT_S // STEP_S + 1, NEW_SUMS)])
    ((_, fine), _) = file.intervals(STEP_S, AT_S, AT_S + 60, own=True)
    ((at_s, sums),) = file.intervals(60, AT_S, AT_S + 60, own=True)
    file.close()
    assert point(AT_S, fine)["places"] == {"cached_on_other_replica": 60, "gpu_hit": 40}
    made = point(int(at_s), sums)
    assert made["requests"] == 3
    assert made["places"] == {"cached_on_other_replica": 66, "gpu_hit": 44}
    assert made["held"] == {"decode_load": 56, "unhealthy": 10}
