"""The table of the constants of a price, from the policy `warm` and from the values that `simulate --sweep` tries."""

from __future__ import annotations

from loadtest.docgen.markdown import table
from loadtest.simulate.results import sweep
from router.core.placement.policies.warm.constants import PRICE_CONSTANTS


def constants_table() -> str:
    """Return every constant with its value, unit and reason, and the other values of the sweep."""
    tried = {
        each.name: each.list_alternatives() for each in sweep.CONSTANTS if each.module.startswith(sweep.WARM_PACKAGE)
    }
    rows = [
        (
            f"`{each.name}`",
            f"{each.value:g}",
            each.unit,
            each.reason,
            ", ".join(f"{value:.3g}" for value in tried.get(each.name, ())) or "-",
        )
        for each in PRICE_CONSTANTS
    ]
    return table(("constant", "value", "unit", "reason", "other values in `--sweep`"), rows)
