"""Message of a command for a missing library of an extra."""

from __future__ import annotations


def describe_missing_extra(command: str, library: str, extra: str) -> str:
    """Return one line that is valid both in a clone (the extra) and with an installed wheel (the library by its own
    name)."""
    return f"{command} needs '{library}': pip install '.[{extra}]' in a clone, or pip install {library}"
