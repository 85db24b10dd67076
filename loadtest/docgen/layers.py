"""The layers of the packages as Markdown tables, rendered from the contracts in pyproject.toml."""

from __future__ import annotations

import tomllib
from typing import Any

from loadtest.docgen.markdown import PageError, table

# Containers of the contracts of type `layers` that are shown, with the heading of each table.
CONTAINERS = {"router": "router/", "router.core": "router/core/", "loadtest": "loadtest/"}


def layers(pyproject_text: str) -> str:
    """Return a table for each container: its layers from the top down, with their packages.

    Raises PageError if pyproject.toml has no contract for a container.
    """
    contracts = tomllib.loads(pyproject_text).get("tool", {}).get("importlinter", {}).get("contracts", [])
    return "\n\n".join(_layers_of(contracts, container, title) for container, title in CONTAINERS.items())


def _layers_of(contracts: list[dict[str, Any]], container: str, title: str) -> str:
    for contract in contracts:
        if contract.get("type") == "layers" and contract.get("containers") == [container]:
            named: list[str] = contract["layers"]
            packages = [" ".join(f"`{package.strip()}`" for package in layer.split("|")) for layer in named]
            numbers = map(str, reversed(range(len(packages))))  # the lowest layer is 0
            return table([f"layer of `{title}`", "packages"], zip(numbers, packages, strict=True))
    raise PageError(f"pyproject.toml has no contract of layers for {container}")
