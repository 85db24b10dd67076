"""Goal 4: unfinished streams end with an error event, finished streams are unchanged."""

from __future__ import annotations

from collections import Counter

from loadtest.common.report import Row
from loadtest.faults.bench import Bench, CaseNotApplicable, FaultAnswer, Run, row, send_concurrently
from loadtest.faults.judge import verdict
from loadtest.faults.upstream import answers
from loadtest.faults.upstream.connection import MID

REPLICAS = 4
IDLE_S = 1.0
STALL_TIMEOUT_S = 10.0
HEALTHY_TOKENS = 8
LANES = 4


async def endings(bench: Bench) -> list[Row]:
    """Goal 4: seven kinds of unfinished streams, in four APIs, with a healthy stream between any two."""
    flags = ("--set", f"upstream.idle_timeout_s={IDLE_S:g}")
    kills = bench.scale.pick_count(6, 200)
    found, invented = [], 0
    healthy: list[tuple[str, FaultAnswer]] = []
    async with bench.run_cluster(REPLICAS, flags) as run:
        apis = [name for name in answers.APIS if await _speaks(run, name)]
        if not apis:
            raise CaseNotApplicable("it answers none of the four APIs")
        note = "" if len(apis) == len(answers.APIS) else f"only {', '.join(apis)}"
        for fault in MID:
            verdicts: Counter[str] = Counter()
            for api in apis:
                for name, text in await _kills(run, api, fault, kills, healthy):
                    verdicts[name if name == "honest" else text] += 1
                    invented += name == "invented"
            total = verdicts.total()
            wrong = {text: n for text, n in verdicts.items() if text != "honest"}
            made = row(4, f"{fault}: of {total} streams not ended in the error event", 0, total - verdicts["honest"])
            made.note, made.errors_by_kind = note or None, wrong
            made.ok = made.ok and total > 0
            found.append(made)
    changed = sum(not a.ok or a.body != _make_expected_stream(api) for api, a in healthy)
    found.append(row(4, "finish reasons that no engine gave", 0, invented))
    found.append(row(4, f"of {len(healthy)} healthy streams not byte for byte", 0, changed, note=note))
    return found


def _make_expected_stream(api: str) -> bytes:
    return b"".join(answers.APIS[api].stream(HEALTHY_TOKENS))


async def _speaks(run: Run, api: str) -> bool:
    answer = await run.ask(api=api)
    return answer.status not in (404, 405, 501)


async def _kills(
    run: Run, api: str, fault: str, kills: int, healthy: list[tuple[str, FaultAnswer]]
) -> list[tuple[str, str]]:
    """Return verdicts, without streams that never began.

    A stall has fewer tries, because a router that does not detect it costs the client's full timeout. Its tries run at
    the same time and without healthy streams beside them. A silent stream may be legitimate while its replica is
    working.
    """
    stalls = fault == "mid_stall"
    kills = max(2, kills // 3) if stalls else kills
    timeout_s = STALL_TIMEOUT_S if stalls else 10.0

    async def one(i: int) -> FaultAnswer:
        if not stalls:
            healthy.append((api, await run.ask(api=api, tokens=HEALTHY_TOKENS)))
        return await run.ask(api=api, timeout_s=timeout_s, fault=fault, after=1 + i % 5)

    asked = await send_concurrently(kills if stalls else LANES, kills, one)
    begun = [a for a in asked if a.status == 200 and a.body]
    verdicts = [(verdict(api, a.body, a.error), a) for a in begun]
    return [(name, f"{api}: {name}") for name, _ in verdicts]
