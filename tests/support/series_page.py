"""What `/admin/series` and `/admin/decisions` answer, made up and in agreement with `observatory_page`.

The router began `KEPT_S` ago and was down for ten minutes three hours ago. Points are a function of the time that they
are of, whatever stretch they are asked in.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from tests.support import observatory_page as page

KEPT_S = 20_000
DOWN_S = (11_400, 10_800)  # how long ago nobody counted
WIDTHS_S = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 86_400)
POINTS_MAX = 720
REQUESTS = 60  # that are kept
APART_S = 3.0
TIMES = {"ttft": 0.16, "itl": 0.021, "e2e": 4.1}


def series(now_s: float, query: Mapping[str, str], seen: Any = None) -> dict[str, Any]:
    """The answer at that time, with the models and groups of the observatory's page `seen`.

    Raises ValueError with the router's words for a step that is too short."""
    to_s = float(query.get("to_s", now_s))
    from_s = float(query.get("from_s", to_s - 600))
    fitting = next(width for width in WIDTHS_S if (to_s - from_s) / width <= POINTS_MAX - 1)
    step_s = int(query.get("step_s", fitting))
    if step_s < fitting:
        raise ValueError(f"step_s: {step_s} s gives too many points; the smallest step that fits is {fitting}")
    first, last = int(from_s // step_s), int(-(-to_s // step_s))
    points = [_point(number * step_s, step_s, now_s) for number in range(first, last)]
    kept = {"since_s": now_s - KEPT_S, "memory_s": 3_600, "path": True, "state": "ok", "why": ""}
    bounds = {"from_s": first * step_s, "to_s": last * step_s, "step_s": step_s}
    long = (last - first) * step_s / 600
    made = seen or page.observatory(now_s)
    models = [{**row, "requests": int(row["requests"] * long / 144)} for row in made["models"]]
    groups = [
        {**row, "requests": int(row["requests"] * long / 144), "prompt_tokens": int(row["prompt_tokens"] * long / 144),
         "hit_tokens": int(row["prompt_tokens"] * row["hit_rate"] * long / 144), "replay_tokens": 0}
        for row in made["groups"]
    ]  # fmt: skip
    return {"now_s": now_s, **bounds, "kept": kept, "points": points, "models": models, "groups": groups}


def places_of(point: Mapping[str, Any]) -> dict[str, int]:
    """Where its prompt tokens ended: a third of the evicted ones was dropped by other replicas, a twentieth of the hits
    came from behind GPUs."""
    misses, tier = point["misses"], point["genuine_tokens"] // 20
    by_others = misses["evicted"] // 3
    found = {
        "never_seen": misses["cold"] + misses["new"], "tail": misses["tail"], "rewritten": misses["diverged"],
        "replica_lost": misses.get("replica_lost", 0), "evicted_here": misses["evicted"] - by_others,
        "evicted_by_others": by_others, "cached_on_other_replica": misses["spilled"],
        "mispredicted": misses["mispredicted"], "tier": tier, "replay": point["replay_tokens"],
        "gpu_hit": point["genuine_tokens"] - tier,
    }  # fmt: skip
    return {place: tokens for place, tokens in found.items() if tokens}


def _point(at_s: int, step_s: int, now_s: float) -> dict[str, Any]:
    ago_s = now_s - at_s
    if ago_s > KEPT_S or DOWN_S[1] < ago_s < DOWN_S[0]:
        return {"at_s": at_s, "known": False}
    rng = random.Random(f"series {at_s}")
    number = page.STEPS - 1 - int(ago_s // page.STEP_S)
    base = page.point(at_s, max(number, 0), 7)
    wide = step_s / page.STEP_S
    counts = {name: int(value * wide) for name, value in base.items() if isinstance(value, int) and name != "at_s"}
    requests = counts["requests"]
    failed = int(requests * (0.06 if number > 112 else 0.001) * rng.uniform(0.5, 1.5))
    slow = base["ttft_p50_s"] / TIMES["ttft"]
    times = {
        f"{name}_p{part}_s": each_s * slow ** (name != "itl") * factor
        for name, each_s in TIMES.items()
        for part, factor in ((50, 1.0), (90, 2.6), (99, 6.3))
    }
    waiting = max(0, number - 110) * rng.randrange(3)
    return {
        "at_s": at_s, "known": True, **counts, "placed": requests, "errors_5xx": failed,
        "errors_4xx": int(requests * 0.004), "shed": waiting // 2, "left": int(requests * 0.01), "broken": failed // 3,
        "retries": failed, "completion_tokens": requests * 212, **times,
        "misses": {name: int(tokens * wide) for name, tokens in base["misses"].items()},
        "places": {place: int(tokens * wide) for place, tokens in places_of(base).items()},
        "held": {"queue": int(base["misses"]["spilled"] * wide)},
        "waited_p90_s": 0.4 if waiting else None, "in_flight": 41 + rng.randrange(9), "in_flight_max": 60,
        "waiting": waiting, "waiting_max": waiting * 2,
    }  # fmt: skip


def decisions(now_s: float, query: Mapping[str, str]) -> dict[str, Any]:
    """The answer to a search at that time, newest first. Raises ValueError for parameters that are none."""
    known = {"id", "session", "model", "reason", "tenant", "replica", "status", "from_s", "to_s", "limit",
             "before"}  # fmt: skip
    if wrong := sorted(set(query) - known):
        raise ValueError(f"{wrong[0]} is no parameter; there are {', '.join(sorted(known))}")
    if not re.fullmatch("([45]xx|[1-5][0-9]{2})?", query.get("status", "")):
        raise ValueError("'status' must be a status, or 4xx, 5xx.")
    fitting = [row for row in _requests(now_s) if _fits(row, query)]
    limit = int(query.get("limit", 20))
    shown = fitting[:limit]
    more = len(fitting) > limit
    since_s = now_s - REQUESTS * APART_S
    kept = {"decisions_since_s": since_s, "decisions_in_memory": REQUESTS, "state": "ok", "why": "", "path": True}
    return {"decisions": shown, "more": more, "next_before": shown[-1]["number"] if more else None, "kept": kept}


def _requests(now_s: float) -> list[dict[str, Any]]:
    replicas = page.fleet(now_s)
    newest = int(now_s // APART_S)
    rows = []
    for number in range(newest, newest - REQUESTS, -1):
        row = page.decision(number * APART_S, number % 21, replicas)
        row |= {
            "number": number,
            "id": f"req-{number}",
            "model": page.MODELS[number % 4 == 0],
            "tenant": ("acme", "bank")[number % 2],
        }
        rows.append({**row, "session": f"s-{number % 5}", "policy": "warm", "verified": True, "inter_token_s": 0.021})
    return rows


def _fits(row: dict[str, Any], query: Mapping[str, str]) -> bool:
    status = query.get("status", "")
    judged = [
        *(row[name] == query[name] for name in ("id", "session", "model", "tenant", "replica") if name in query),
        "reason" not in query or row["reason"] == query["reason"] or bool(row["miss"].get(query["reason"])),
        str(row["status"]).startswith(status.removesuffix("xx")),
        row["number"] < int(query.get("before", 1 << 62)),
        float(query.get("from_s", 0)) <= row["at_s"] < float(query.get("to_s", 1e12)),
    ]
    return all(judged)
