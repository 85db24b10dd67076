"""Records of requests, by the names of their fields alone."""

from __future__ import annotations

from typing import Any

from router.core.types.ended_requests import CacheUse, ClientInfo, RequestTimes
from router.telemetry.request_record import FailoverOutcome, RequestRecord, begin_record

_PARTS = {"client": ClientInfo, "times": RequestTimes, "cache": CacheUse, "failover": FailoverOutcome}


def make_record(id_: str = "1", route: str = "/v1/completions", at_s: float = 0.0, **fields: Any) -> RequestRecord:
    """Return a record with these fields, each in the part that has it."""
    record = begin_record(id_, route, at_s)
    put(record, **fields)
    return record


def put(record: RequestRecord, **fields: Any) -> None:
    """Set these fields."""
    for name, value in fields.items():
        part = next((part for part, kind in _PARTS.items() if name in kind.__struct_fields__), None)
        assert part or name in RequestRecord.__struct_fields__, name
        setattr(getattr(record, part) if part else record, name, value)
