"""What a command says where a library is missing that an extra brings."""

from __future__ import annotations


def missing(command: str, library: str, extra: str) -> str:
    """One line that works in a clone (the extra) and beside an installed wheel (the library by its own name)."""
    return f"{command} needs '{library}': pip install '.[{extra}]' in a clone, or pip install {library}"
