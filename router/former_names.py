"""Former names of the outer surface, which are still read or emitted until version 0.3.

One table for each kind of name. A former setting is read from every source, with one warning. Former metrics, headers
and log events are emitted beside the new ones. The page docs/reference/former-names.md is rendered from these tables.
"""

from __future__ import annotations

UNTIL = "0.3"
"""The first version without the former names."""

SETTINGS: dict[str, str] = {}
"""Former dotted key -> key."""
