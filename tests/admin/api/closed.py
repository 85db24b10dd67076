"""The OpenAPI document as strict as the code is: an object with named fields has no others."""

from __future__ import annotations

from typing import Any

OPEN = ("EngineBody",)  # schemas of what may have any field


def closed(part: Any) -> Any:
    """A copy of a part of the document in which no object takes a field that it does not name. Clients must expect new
    fields; tests must not."""
    if isinstance(part, list):
        return [closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    same = {name: value if name in OPEN else closed(value) for name, value in part.items()}
    if same.get("type") == "object" and "properties" in same:
        same.setdefault("additionalProperties", False)
    return same
