"""The floors of the house as a table of Markdown, rendered from the contracts in pyproject.toml."""

from __future__ import annotations

import tomllib
from typing import Any

from loadtest.pages.markdown import PageError, table

# Contracts of type `layers` that are shown, by their container, with the heading of each.
CONTAINERS = {"router": "router/", "router.core": "router/core/", "loadtest": "loadtest/"}


def floors(pyproject_text: str) -> str:
    """A table for each container: its floors from the top one down, and the rooms on each. Raises PageError where
    pyproject.toml has no such contract."""
    contracts = tomllib.loads(pyproject_text).get("tool", {}).get("importlinter", {}).get("contracts", [])
    return "\n\n".join(_floors_of(contracts, container, title) for container, title in CONTAINERS.items())


def _floors_of(contracts: list[dict[str, Any]], container: str, title: str) -> str:
    for contract in contracts:
        if contract.get("type") == "layers" and contract.get("containers") == [container]:
            layers: list[str] = contract["layers"]
            rooms = [" ".join(f"`{room.strip()}`" for room in layer.split("|")) for layer in layers]
            numbers = map(str, reversed(range(len(rooms))))  # the ground floor is 0
            return table([f"floor of `{title}`", "rooms"], zip(numbers, rooms, strict=True))
    raise PageError(f"pyproject.toml has no contract of layers for {container}")
