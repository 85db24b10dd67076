"""Sums by model and by group of requests over time, for any range that the pages show.

Both are counted elsewhere since the router began (telemetry/metrics/per_model.py, core/insights/ledger/groups.py). At
the end of each minute, the differences from the minute before are added to its last interval, so a request costs
nothing here. The parts of a minute are bounded: after the first ones, the rest are summed as `other`. A name in an
interval is

    by:KIND:KEY:FIELD      KIND is `model` or `group`, and KEY the model's name, or the group's label as JSON
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from router.admin.history.intervals import Sums
from router.config.api_keys import OTHER
from router.core.insights.ledger.decaying_sums import HIT, PROMPT, REPLAY, REQUESTS
from router.core.insights.ledger.groups import REST, Group, Label

MODELS_MAX, GROUPS_MAX = 20, 40  # parts of a minute
ROWS_MAX = 50  # rows of a page
PREFIX = "by:"
_MODEL = ("requests", "failed", "shed", "prompt_tokens", "completion_tokens", "hit_tokens", "verified_tokens")
_GROUP = {"requests": REQUESTS, "prompt_tokens": PROMPT, "hit_tokens": HIT, "replay_tokens": REPLAY}
_REST = msgspec.json.encode(REST).decode()

Parts = dict[str, dict[str, float]]  # key -> sums by field
Counts = dict[str, Parts]  # kind -> parts


def count_now(models: Iterable[Mapping[str, Any]], groups: Mapping[Label, Group]) -> Counts:
    """Return the sums since the router began. `models` are rows of per_model.py, and `groups` are settled."""
    return {
        "model": {row["model"]: {name: row[name] for name in _MODEL} for row in models},
        "group": {
            msgspec.json.encode(label).decode(): {name: group.sums[at] for name, at in _GROUP.items()}
            for label, group in groups.items()
        },
    }


class Breakdown:
    """Differences between sums, minute by minute."""

    def __init__(self, counts: Callable[[], Counts]) -> None:
        """`counts()`: the sums since the router began."""
        self._counts = counts
        self._before: Counts = {"model": {}, "group": {}}

    def take(self) -> Sums:
        """Return the sums since the last call."""
        return self._difference(keep=True)

    def peek(self) -> Sums:
        """Return the same, and count them again in the next call."""
        return self._difference(keep=False)

    def _difference(self, *, keep: bool) -> Sums:
        sums: Sums = {}
        for kind, parts in self._counts().items():
            before = self._before[kind]
            changed = {key: _subtract(fields, before.get(key, {})) for key, fields in parts.items()}
            most = sorted((key for key in changed if changed[key]), key=lambda key: -changed[key].get("requests", 0))
            named, rest = (MODELS_MAX, OTHER) if kind == "model" else (GROUPS_MAX, _REST)
            for place, key in enumerate(most):
                for field, value in changed[key].items():
                    name = f"{PREFIX}{kind}:{key if place < named else rest}:{field}"
                    sums[name] = sums.get(name, 0) + value
            if keep:
                before.update(parts)
        return sums


def _subtract(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: change for name, value in now.items() if (change := value - before.get(name, 0)) > 0}


class RangeRows:
    """Rows of models and groups over a range of time."""

    def __init__(self) -> None:
        self._parts: Counts = {"model": {}, "group": {}}

    def add(self, sums: Mapping[str, float]) -> None:
        """Add an interval."""
        for name, value in sums.items():
            if name.startswith(PREFIX):
                kind, _, rest = name.removeprefix(PREFIX).partition(":")
                key, _, field = rest.rpartition(":")
                fields = self._parts.setdefault(kind, {}).setdefault(key, {})
                fields[field] = fields.get(field, 0) + value

    def models(self) -> list[dict[str, Any]]:
        """Return rows of models, those with the most requests first."""
        return [
            {"model": key, **{name: round(fields.get(name, 0)) for name in _MODEL}}
            for key, fields in self._most("model")
        ]

    def groups(self) -> list[dict[str, Any]]:
        """Return rows of groups, those with the most prompt tokens first."""
        return [
            {
                **msgspec.json.decode(key, type=Label)._asdict(),
                **{name: round(fields.get(name, 0)) for name in _GROUP},
            }
            for key, fields in self._most("group")
        ]

    def _most(self, kind: str) -> Iterator[tuple[str, dict[str, float]]]:
        by = "requests" if kind == "model" else "prompt_tokens"
        most = sorted(self._parts[kind].items(), key=lambda each: -each[1].get(by, 0))
        yield from most[:ROWS_MAX]
