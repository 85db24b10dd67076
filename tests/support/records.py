"""Records (deploy/compiled_sources.py) with other values, whether they are Structs or compiled."""

from __future__ import annotations

from typing import Any, TypeVar, cast

T = TypeVar("T")


def replace(record: T, **fields: Any) -> T:
    """As msgspec.structs.replace: another one, with these fields."""
    names = cast("Any", record).__struct_fields__
    return type(record)(**{name: getattr(record, name) for name in names} | fields)
