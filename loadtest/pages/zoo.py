"""The table of engines that the simulated one can resemble."""

from __future__ import annotations

from loadtest.engine.zoo.members import MEMBERS
from loadtest.pages.markdown import table


def zoo_table() -> str:
    """Every member with its difference and where that was read."""
    rows = ((f"`{member.name}`", member.text, member.source) for member in MEMBERS.values())
    return table(("`--like`", "difference from the dense engine", "read in"), rows)
