"""What `/admin/observatory` answers, made up but plausible and moving: for the dashboard and `warmroute top`.

A fleet of four, of which one is lost after a while; a template whose system prompt begins to hold the time of day at
`DAMAGED`, so that the hit rate falls and `diverged` rises. Figures add up as the router's do: hit + misses = prompt
tokens. It is a function of the time that it is asked at, and of a seed.
"""

from __future__ import annotations

import math
import random
from typing import Any

from router.core.types.cache_misses import FUNNEL_STAGES

STEP_S = 5
STEPS = 120
DAMAGED = 80  # of the steps that are shown
REASONS = (
    "diverged", "evicted", "spilled", "replica_lost", "identity", "mispredicted", "unsupported", "cold", "new", "tail",
)  # fmt: skip
HOSTILE = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>'
ROUTE = "/v1/chat/completions"
MODELS = ("qwen3-32b", "llama-70b")
PAGES = ["/admin/decisions", "/admin/series", "/metrics", "/runbook"]
VERIFIED = 0.34  # share of prompt tokens whose engine told how many it found


def observatory(now_s: float, *, seed: int = 7, label: str = "You are a coding agent. Work in small steps") -> Any:
    """The page at that time. `label` is that of the widest template: a client's own words."""
    first_s = (int(now_s) // STEP_S - STEPS + 1) * STEP_S
    points = [point(first_s + n * STEP_S, n, seed) for n in range(STEPS)]
    replicas = fleet(now_s)
    return {
        "now_s": now_s,
        "version": "0.8.0",
        "uptime_s": 93_784.0,
        "excerpts": True,
        "pages": PAGES,
        "links": {},
        "totals": _totals(points),
        "timeline": {"step_s": STEP_S, "points": points},
        "stages": FUNNEL_STAGES,
        "replicas": replicas,
        "split": None,
        "models": _models(),
        "unserved_models": [],
        "map": _map(label),
        "advice": _advice(label),
        "groups": _groups(),
        "tenants": _tenants(),
        "decisions": [decision(first_s + STEPS * STEP_S - 3 * n, n, replicas) for n in range(20)],
    }


def empty(now_s: float) -> Any:
    """A router that has just begun: nothing was asked, nobody is there."""
    page = observatory(now_s)
    nothing = {"requests": 0, "prompt_tokens": 0, "predicted_tokens": 0, "hit_tokens": 0, "genuine_tokens": 0}
    quiet = {**nothing, "replay_tokens": 0, "misses": {}, "ttft_p50_s": None, "ttft_p90_s": None}
    quiet |= {"verified_tokens": 0, "verified_hit_tokens": 0, "verified_predicted_tokens": 0}
    points = [{"at_s": point["at_s"], **quiet} for point in page["timeline"]["points"]]
    misses = dict.fromkeys(REASONS, 0)
    totals = {**quiet, "misses": misses, "diversity": None, "ttft_p99_s": None}
    lists: dict[str, Any] = {
        name: [] for name in ("replicas", "models", "map", "advice", "groups", "tenants", "decisions")
    }
    return {**page, **lists, "uptime_s": 4.0, "totals": totals, "timeline": {"step_s": STEP_S, "points": points}}


def point(at_s: int, n: int, seed: int) -> dict[str, Any]:
    """Step number `n` of STEPS, of STEP_S."""
    rng = random.Random(f"{seed} {at_s}")
    damage = min(1.0, max(0, n - DAMAGED) / 5) * 0.2
    prompt = int(190_000 + 40_000 * math.sin(n / 17) + rng.randrange(30_000))
    shares = {"diverged": 0.012 + damage, "evicted": 0.03, "spilled": 0.02, "replica_lost": 0.05 if n > 112 else 0.0}
    shares |= {"mispredicted": 0.006, "cold": 0.03, "new": 0.11, "tail": 0.02}
    misses = {name: int(prompt * share * rng.uniform(0.75, 1.25)) for name, share in shares.items() if share}
    hit = prompt - sum(misses.values())
    replay = int(hit * 0.07)
    ttft_s = (0.16 + 0.5 * damage) * rng.uniform(0.85, 1.2)
    return {
        "at_s": at_s,
        "requests": prompt // 9_000,
        "prompt_tokens": prompt,
        "predicted_tokens": hit + misses["mispredicted"],
        "hit_tokens": hit,
        "genuine_tokens": hit - replay,
        "replay_tokens": replay,
        "verified_tokens": int(VERIFIED * prompt),
        "verified_hit_tokens": int(VERIFIED * hit),
        "verified_predicted_tokens": int(VERIFIED * (hit + misses["mispredicted"])),
        "misses": misses,
        "ttft_p50_s": ttft_s,
        "ttft_p90_s": ttft_s * (3.1 + 9 * damage) * rng.uniform(0.9, 1.2),
    }


def _totals(points: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = ("requests", "prompt_tokens", "predicted_tokens", "hit_tokens", "genuine_tokens", "replay_tokens",
               "verified_tokens", "verified_hit_tokens", "verified_predicted_tokens")  # fmt: skip
    sums = {name: 60 * sum(point[name] for point in points) for name in numbers}
    misses = {name: 60 * sum(point["misses"].get(name, 0) for point in points) for name in REASONS}
    return {**sums, "misses": misses, "diversity": 0.91, "ttft_p50_s": 0.187, "ttft_p90_s": 0.812, "ttft_p99_s": 2.41}


def split() -> dict[str, Any]:
    """The first two replicas of the fleet prefill, the others decode; of their pairs one rests, and one is new."""
    ids = [f"http://10.0.0.{n + 1}:8000" for n in range(4)]
    counts = [(1, 1, 0), (1, 0, 1), (1, 0, 1), (1, 1, 0)]
    replicas = [
        {
            "id": id_,
            "role": "prefill" if n < 2 else "decode",
            "handshake": "nixl",
            "answers": n != 1,
            "pairs": dict(zip(("warm", "new", "resting"), counts[n], strict=True)),
        }
        for n, id_ in enumerate(ids)
    ]
    pairs = [
        (ids[1], ids[2], "resting", 75.0, 12, 2, 5),
        (ids[0], ids[3], "new", 0.0, 0, 0, 0),
        (ids[0], ids[2], "warm", 0.0, 12_345, 3, 1),
        (ids[1], ids[3], "warm", 0.0, 1_234, 0, 0),
    ]
    names = ("prefill", "decode", "state", "rests_s", "sent", "prefills_failed", "broken")
    return {
        "replicas": replicas,
        "pairs": [dict(zip(names, pair, strict=True)) for pair in pairs],
        "pairs_in_all": len(pairs),
    }


def fleet(now_s: float) -> list[dict[str, Any]]:
    """Rows of replicas at that time; the last one takes no requests."""
    rows = []
    for n in range(4):
        lost = n == 3
        wave = 0.5 + 0.3 * math.sin(now_s / 9 + n)
        rows.append(
            {
                "id": f"http://10.0.0.{n + 1}:8000",
                "name": f"prod/vllm-{n}",
                "ready": not lost,
                "why": "connection refused" if lost else "",
                "state": "closed",
                "slow": "",
                "idle": "",
                "grade": "estimated" if n == 2 or lost else "exact",
                "grade_why": "no event stream" if n == 2 or lost else "",
                "grade_falls": 0,
                "requests_per_s": 0.0 if lost else 4.25 - n,
                "request_share": 0.0 if lost else round((4.25 - n) / 9.75, 4),
                "ttft_p50_s": None if lost else 0.18 + n / 100,
                "ttft_p90_s": None if lost else 0.82 + n / 10,
                "in_flight": 0 if lost else int(20 * wave),
                "window": 24,
                "pending_prefill_ms": 0.0 if lost else round(400 * wave, 1),
                "running": 0 if lost else int(18 * wave),
                "waiting": 0 if lost else max(0, int(6 * wave) - 3),
                "kv_usage": None if lost else round(0.55 + 0.4 * wave, 3),
                "blocks": 0 if lost else 210_000 - 9_000 * n,
                "blocks_max": 262_144,
                "warming": False,
                "models": list(MODELS[: 1 + n % 2]),
            }
        )
    return rows


def _models() -> list[dict[str, Any]]:
    rows = [(MODELS[0], 171_000, 310, 41, 3, 1_120, 800_000_000, 96_000_000, 0.66), (MODELS[1], 11_300, 0, 4, 0, 0,
            91_000_000, 4_100_000, 0.81)]  # fmt: skip
    names = ("model", "requests", "failed", "in_flight", "waiting", "shed", "prompt_tokens", "completion_tokens")
    found = [{**dict(zip(names, row, strict=False)), "hit_tokens": int(row[6] * row[8])} for row in rows]
    told = ({"verified_tokens": VERIFIED * row["prompt_tokens"], "verified_hit_tokens": 0} for row in found)
    return [{**row, **more} for row, more in zip(found, told, strict=True)]


def _map(label: str) -> list[dict[str, Any]]:
    ids = [f"http://10.0.0.{n + 1}:8000" for n in range(4)]
    rows = [
        ("a1", "", label, 5_200, 5_200, 41_000_000, 0.61, ids[:3]),
        ("a2", "a1", "tools: read_file, write_file, run, search", 9_800, 4_600, 25_000_000, 0.58, ids[:2]),
        ("a3", "a2", "Repository: payments. Conventions follow", 14_100, 4_300, 14_500_000, 0.55, ids[:1]),
        ("a4", "a2", "Repository: ledger. Conventions follow", 13_200, 3_400, 7_400_000, 0.72, ids[1:2]),
        ("a5", "a1", "tools: search only", 6_100, 900, 9_000_000, 0.74, ids[2:3]),
        ("b1", "", "You answer customers of a bank. Be brief", 2_300, 2_300, 17_000_000, 0.83, ids[1:3]),
        ("b2", "b1", "Answer in German", 2_420, 120, 4_000_000, 0.8, ids[2:3]),
        ("b3", "b1", "", 2_900, 600, 6_100_000, 0.79, ids[1:2]),
        ("c1", "", "Summarise the document below in five points", 700, 700, 3_900_000, 0.12, []),
        *((f"d{n}", "a1", "", 5_400, 200, 190_000 - 9_000 * n, 0.3, []) for n in range(8)),
    ]
    names = ("id", "parent", "label", "prompt_tokens", "own_tokens", "served_tokens", "hit_rate", "holders")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    widened = {row["id"]: str(row["id"]) * 8 for row in found}
    for row in found:
        row["id"], row["parent"] = widened[row["id"]], widened.get(row["parent"], "")
        row["requests"] = row["served_tokens"] // 9_000
    return found


def _advice(label: str) -> list[dict[str, Any]]:
    stamp = "message 0 holds a time of day at byte 41 that changes with every request: "
    order = "the tools come in 6 orders: sort them (insights.normalize_tools: sort_tools)"
    history = "history is rewritten at message 4: append instead of editing what was said"
    rows = [
        ("a1" * 8, label, "timestamp", 0, "system", "messages[0].content", 41, 4_700, 8_100_000.0, 1_240.0,
         stamp + "move it to the end, or into the last user message", "00:00:00", "09:14:07", "09:14:09"),
        ("a2" * 8, "tools: read_file, write_file, run, search", "tool_order", -1, "", "tools[2].function.name", 0, 310,
         1_900_000.0, 280.0, order, "aaaa_aaaa", "read_file", "search"),
        ("b1" * 8, "You answer customers of a bank. Be brief", "edited_history", 4, "assistant", "messages[4].content",
         118, 96, 240_000.0, 36.0, history, "aaaaa", "", ""),
    ]  # fmt: skip
    names = ("template", "label", "change", "message", "role", "path", "at_bytes", "requests", "lost_tokens_per_h",
             "gpu_s_per_h", "text", "shape", "before", "after")  # fmt: skip
    found = [dict(zip(names, row, strict=True)) for row in rows]
    for number, row in enumerate(found, 1):
        row |= {"recent": True, "tenants": ["acme"], "last_at_s": 0.0}
        row |= {"rank": number, "templates": 1, "evicted_tokens": 0, "lost_tokens": row["lost_tokens_per_h"]}
        row["cost"] = f"{row['lost_tokens_per_h'] / 1e6:.3g}M tokens an hour"
    return found


def _groups() -> list[dict[str, Any]]:
    rows = [
        (ROUTE, "acme", True, "edit", "claude-code", 51_000, 512_000_000, 0.58, 0.55, 0.21, 1.02, 9_900, 6.2),
        (ROUTE, "acme", True, "plan", "claude-code/sub", 9_100, 47_000_000, 0.66, 0.61, 0.17, 0.61, 5_100, 0.4),
        (ROUTE, "bank", False, "", "", 120_000, 301_000_000, 0.82, 0.71, 0.09, 0.34, 2_600, 0.0),
        ("/v1/messages", "acme", True, "", "", 2_200, 31_000_000, 0.71, 0.7, 0.24, 0.9, 12_400, 9.8),
    ]
    names = ("route", "tenant", "tools", "step", "agent", "requests", "prompt_tokens", "hit_rate", "genuine_hit_rate",
             "ttft_p50_s", "ttft_p90_s", "prompt_tokens_p50", "tool_calls_mean")  # fmt: skip
    return [dict(zip(names, row, strict=True)) for row in rows]


def _tenants() -> list[dict[str, Any]]:
    rows = [("acme", 6.1, 0.6256, 0.55, 21, 0), ("bank", 3.65, 0.3744, 0.45, 34, 3)]
    names = ("tenant", "requests_per_s", "request_share", "computed_share", "in_flight", "waiting")
    return [dict(zip(names, row, strict=True)) for row in rows]


def decision(at_s: float, n: int, replicas: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a request; the fifth failed, every third one lost tokens to a time of day in its prompt."""
    rng = random.Random(int(at_s))
    prompt = rng.randrange(1_200, 15_000)
    hit = 0 if n % 7 == 3 else int(prompt * rng.uniform(0.3, 0.95))
    diverged = int((prompt - hit) * 0.8) if n % 3 == 0 else 0
    misses = {"diverged": diverged, "new": prompt - hit - diverged - 11, "tail": 11}
    failed = n == 5
    where = replicas[rng.randrange(3)]["id"]
    difference = {
        "change": "timestamp", "message": 0, "role": "system", "path": "messages[0].content", "offset_bytes": 44,
        "at_bytes": 41, "lost_bytes": 4 * diverged, "shape": "00:00:00", "piece_hash": "9f3c61d2a0b4e871",
        "before": "It is 09:14:07", "after": "It is 09:14:09",
    }  # fmt: skip
    return {
        "id": f"req-{int(at_s):x}-{n}", "at_s": at_s, "route": ROUTE, "model": "qwen3-32b", "tenant": "acme",
        "status": 502 if failed else 200, "ending": "failed" if failed else "ok",
        "error": "upstream_reset" if failed else "", "detail": "", "retries": [], "queued_s": 0.0,
        "ttft_s": None if failed else rng.uniform(0.08, 0.9), "duration_s": rng.uniform(1, 9),
        "usage": None if failed else {"prompt_tokens": prompt, "completion_tokens": 212, "cached_tokens": hit},
        "replica": where, "reason": "warm" if hit else "cold", "grade": "exact", "prompt_tokens": prompt,
        "predicted_cached_tokens": hit,
        "candidates": [_candidate(row["id"], where, prompt, hit) for row in replicas[:3]],
        "miss": {name: tokens for name, tokens in misses.items() if tokens > 0}, "hit_tokens": hit,
        "hit": "genuine" if hit else None, "saved_ms": 0.0, "template": "a1" * 8, "conversation": f"{n:016x}",
        "turn": n % 5, "step": "edit", "difference": difference if diverged else None,
    }  # fmt: skip


def _candidate(id_: str, where: str, prompt: int, hit: int) -> dict[str, Any]:
    held = hit if id_ == where else hit // 4
    return {
        "id": id_, "cached_tokens": held, "uncached_tokens": prompt - held,
        "pending_ms": 41.2 if id_ == where else 12.0,
        "uncached_ms": (prompt - held) / 21, "evicted_ms": 3.4,
        "kv_wait_ms": 0.0, "in_flight": 7,
        "grade": "exact", "estimated_tokens": held,
    }  # fmt: skip
