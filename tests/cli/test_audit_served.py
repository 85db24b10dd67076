"""`warmroute audit` of routers' own logs, alone and beside prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.test_audit import CHAT, Auditing, audited

__all__ = ["audited"]


def served(places: dict[str, int] | None, held: str = "", event: str = "request", logger: str = "requests") -> bytes:
    """A line of a router's own log."""
    line: dict[str, Any] = {"level": "info", "logger": f"router.{logger}", "event": event, "status": 200}
    return json.dumps(line | ({"places": places} if places else {}) | ({"held": held} if held else {})).encode()


def test_a_routers_own_log_says_where_tokens_ended(audited: Auditing, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines of requests are added up by place, its other lines are passed over, and a place of another release is
    no line that can be used. Beside prompts both are told; what is left behind a place is a share of all."""
    own = [
        served({"never_seen": 60, "gpu_hit": 40}),
        served({"cached_on_other_replica": 75, "evicted_by_others": 5, "tail": 20}, "queue at http://10.0.0.7:8000"),
        served({"cached_on_other_replica": 25}, "a new cause at http://10.0.0.7:8000"),
        served(None),
        served(None, event="replica_up", logger="control.lifecycle"),
        served({"lost_in_space": 1}),
    ]
    found = audited([*own, CHAT, CHAT])
    (figures,) = found["log"]
    assert (figures["served_requests"], figures["served_untold"]) == (4, 1)
    assert figures["served_held"] == {"queue": 75, "other": 25}
    assert (figures["requests"], figures["unread_lines"]) == (2, 1)
    rows = {row["place"]: row for row in found["place"]}
    assert list(rows) == ["never_seen", "tail", "evicted_by_others", "cached_on_other_replica", "replay", "gpu_hit"]
    assert [row["served_tokens"] for row in rows.values()] == [60, 20, 5, 100, 0, 40]
    assert [row["served_left_share"] for row in rows.values()] == [0.7333, 0.6444, 0.6222, 0.1778, None, None]
    assert rows["replay"]["tokens"] == figures["hit_tokens"]
    assert sum(row["tokens"] for row in rows.values()) == figures["prompt_tokens"]
    out = capsys.readouterr().out
    assert "more cached tokens: queue 75%, other 25%" in out
    assert "its token places have the format of another release" in out

    audited(own[:1])
    out = capsys.readouterr().out
    assert "60.0%  40.0%" in out
    assert "one cache" not in out
    assert "GPU seconds" not in out


def test_lines_of_an_earlier_version_are_read(audited: Auditing) -> None:
    """Former names of places and causes count as the current ones."""
    found = audited(
        [
            served({"held_elsewhere": 75, "genuine": 25}, "crowd at http://10.0.0.7:8000"),
            served({"cached_on_other_replica": 20, "gpu_hit": 5}, "decode_load at http://10.0.0.7:8000"),
            served({"held_elsewhere": 10}, "unfit at http://10.0.0.7:8000"),
        ]
    )
    (figures,) = found["log"]
    assert figures["served_held"] == {"decode_load": 95, "unhealthy": 10}
    assert {row["place"]: row["served_tokens"] for row in found["place"]} == {
        "cached_on_other_replica": 105,
        "gpu_hit": 30,
    }
