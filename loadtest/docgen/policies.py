"""The table of placement policies, from POLICIES and the first sentence of each policy's module."""

from __future__ import annotations

import inspect

from loadtest.docgen.markdown import table
from router.core.placement.policies import POLICIES


def policies_table() -> str:
    """Return every policy with the first sentence of its module."""
    rows = []
    for name, policy in POLICIES.items():
        text = inspect.getdoc(inspect.getmodule(policy)) or ""
        first = " ".join(text.split("\n\n", maxsplit=1)[0].split()).removeprefix(f"{name}: ")
        rows.append((f"`{name}`", "yes" if policy().cache_aware else "no", first))
    return table(("name", "looks at caches", "where a request goes"), rows)
