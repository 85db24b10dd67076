"""Former label values in history files of earlier versions (router/former_names.py), replaced when the file is read."""

from __future__ import annotations

from router.admin.history.intervals import Sums, merge
from router.former_names import SPILL_CAUSES, TOKEN_FATES

# A quotation mark within a JSON string is escaped, so these bytes occur as keys and values of rows only.
_IN_ROWS = [
    *((f'"{former}":'.encode(), f'"{fate}":'.encode()) for former, fate in TOKEN_FATES.items()),
    *((f'"spill":"{former}"'.encode(), f'"spill":"{cause}"'.encode()) for former, cause in SPILL_CAUSES.items()),
]
_IN_SUMS = {
    **{f"place:{former}": f"place:{fate}" for former, fate in TOKEN_FATES.items()},
    **{f"held:{former}": f"held:{cause}" for former, cause in SPILL_CAUSES.items()},
}


def with_current_row(row: bytes) -> bytes:
    """Return a decision's row, as JSON, with current values."""
    for former, current in _IN_ROWS:
        row = row.replace(former, current)
    return row


def with_current_names(sums: Sums) -> Sums:
    """Return an interval with current names; `sums` is changed and returned."""
    for former in _IN_SUMS.keys() & sums.keys():
        merge(sums, {_IN_SUMS[former]: sums.pop(former)})
    return sums
