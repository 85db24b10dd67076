"""`warmroute explain ID` against real routers: what it says, and what it says where there is nothing to say."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from router.admin.decision_rows import decision_row
from router.cli.explain.prose import explain_row
from router.core.insights.token_funnel import token_fates
from router.core.placement.spill import SpillCause
from router.core.types.cache_misses import Difference, DifferenceKind, MissReason, PromptAnalysis, TokenBreakdown
from router.core.types.disagg_types import KvConnector, PrefillStage
from router.core.types.placements import (
    Candidate,
    Confidence,
    EndReason,
    ExternalKv,
    FirstTokenExtras,
    PlacementReason,
    Receipt,
    Usage,
)
from router.telemetry.request_record import session_key
from tests.support.fakes import FakeEngine, reset, running
from tests.support.keyring import ADMIN, bearer
from tests.support.request_records import make_record

CHAT = "/v1/chat/completions"
NEAR, FAR = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


async def explain(*arguments: str) -> tuple[int, str, str]:
    """The command, as people run it: exit status, output, errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "explain", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={"PATH": ""},
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def test_a_request_is_explained(client: ClientSession, engine: FakeEngine) -> None:
    """By the id that its client gave: where it went and why, whom it tried before, what was predicted and what the
    engine counted, and each miss. The id that the engine made of it finds it, too."""
    async with FakeEngine() as other, running(engine, other) as app:
        for each in (engine, other):
            each.script.append(reset)
        body = {"model": "m", "messages": [{"role": "user", "content": "tell me more " * 300}]}
        async with client.post(app.url + CHAT, json=body, headers={"x-request-id": "mine"}) as answer:
            assert answer.status == 502
        async with client.post(app.url + CHAT, json=body, headers={"x-request-id": "ours"}) as answer:
            where = answer.headers["x-warmroute-replica"]
        failed = await explain("mine", "--admin", app.admin_url)
        for id_ in ("ours", "chatcmpl-ours"):
            status, out, errors = await explain(id_, "--admin", app.admin_url)
            assert (status, errors) == (0, "")
            for words in ("Request ours\n", f"Placed on {where}", "* " + where,
                          "Cached by the engine's count: 32 of 100.",
                          "Hits: 32 tokens", "Possible improvements:", "total", "model m"):  # fmt: skip
                assert words in out, words
    assert failed[0] == 0
    for words in (
        "ended     502",
        "Failed attempt: http://127.0.0.1",
        "An earlier attempt failed",
        "The engine failed",
    ):
        assert words in failed[1], words


def test_everything_that_is_known_is_said() -> None:
    """A spilled prompt that diverged, waited and was retried: each is said, with its figures and what to do."""
    difference = Difference(DifferenceKind.TIMESTAMP, 0, "system", "messages[0].content", 64, 14, 2_000, "00:00", 7)
    here = Candidate(FAR, 100, 900, 60.0, 40.0, 5.0, 0.0, 3, decode_ms=80.0, price_ms=185.0)
    here.extras = FirstTokenExtras(delay_ms=3_100.0)
    there = Candidate(NEAR, 600, 400, 900.0, 20.0, 0.0, 0.0, 9, decode_ms=80.0, price_ms=1_000.0)
    receipt = Receipt(
        FAR, "warm", PlacementReason.RETRY, Confidence.EXACT, 1_000, 100, (there, here), SpillCause.QUEUE, 500
    )
    receipt.weighed = 4
    misses = {MissReason.DIVERGED: 300, MissReason.EVICTED: 100, MissReason.SPILLED: 500, MissReason.TAIL: 10}
    miss = TokenBreakdown(1_000, 90, misses, dropped_elsewhere=60, held=(NEAR, SpillCause.QUEUE))
    record = make_record(
        "x\x1b[31m", CHAT, 1_795_620_000.0, model="m", status=200, ending=EndReason.OK, duration_s=2.5, ttft_s=0.3,
        receipt=receipt, usage=Usage(1_000, 20, 90), retries=(("connect", NEAR),), tenant="acme", queued_s=0.75,
        miss=miss,
        analysis=PromptAnalysis(conversation=9, turn=2, step="plan", difference=difference), trace_id="ab" * 16,
        places=token_fates(miss, replay=False),
    )  # fmt: skip
    text = "\n".join(explain_row(decision_row(record, 1)))
    for words in (
        "2026-11-25 15:20:00.000 UTC", "tenant acme", "turn 3 of conversation 0000000000000009, step plan",
        "200, complete answer, 20 tokens, after 2.5 s", f"Placed on {FAR}: retry", f"Failed attempt: {NEAR}",
        f"{NEAR}, with 500 more cached tokens, was not chosen: prefill work was queued there", "2 of 4 with a price",
        "Predicted: 100 of 1,000 prompt tokens cached (grade exact).", "Cached by the engine's count: 90 of 1,000.",
        "300  diverged", "60 were evicted by other replicas", "timestamp at messages[0].content, byte 14",
        "2,000 bytes after it", "'00:00'",
        "750 ms  in the router's queue", "contains a date or time that changes, at byte 14", "(300 tokens)",
        "waited 750 ms in the router's queue", "About 60.0 ms", "An earlier attempt failed",
        f"First tokens of {FAR} come 3.1 s later than its work explains",
    ):  # fmt: skip
        assert words in text or words.replace("60.0", "60") in text, words
    assert "\x1b" not in text


def test_a_request_in_two_legs_is_told_so() -> None:
    """Why, who prefilled it, and how long that and the way of its blocks were to take; and of a holder that only
    prefills, that this was the reason to pass it over."""
    here = Candidate(FAR, 0, 20_000, 0.0, 1_200.0, 0.0, 0.0, 3)
    receipt = Receipt(FAR, "warm", PlacementReason.SPLIT, Confidence.ESTIMATED, 20_000, 500, (here,))
    receipt.brought = ExternalKv(0, None, PrefillStage(NEAR, KvConnector.NIXL, "", 500, 300.0, 1_170.0, 240.0))
    usage = Usage(20_000, 20, 500)
    record = make_record(
        "x", CHAT, 1_795_620_000.0, model="m", status=200, ending=EndReason.OK, receipt=receipt, usage=usage
    )
    text = "\n".join(explain_row(decision_row(record, 1)))
    assert f"Placed on {FAR}: split - another replica prefills the prompt" in text
    assert f"{NEAR} prefills the prompt in 1,470 ms and transfers its blocks in 240 ms." in text
    assert "Predicted: 500 of 20,000 prompt tokens cached" in text
    receipt.brought, receipt.spill, receipt.spilled_tokens = None, SpillCause.ROLE, 19_000
    text = "\n".join(explain_row(decision_row(record, 1)))
    assert "was not chosen: it only prefills, and the request was placed on one replica." in text
    older = decision_row(record, 1) | {"spill": "crowd"}  # of a router before 0.2
    assert "was not chosen: too many answers were decoded there at the time." in "\n".join(explain_row(older))


CLAUDE, SUB, OVER = {"x-claude-code-session-id": "s"}, {"x-claude-code-agent-id": "a"}, {"x-dynamo-session-final": "1"}
MAIN = session_key(b"s")


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (CLAUDE | SUB, f"claude-code/sub, conversation {session_key(b's/a')}, started by {MAIN}"),
        (CLAUDE | OVER, f"claude-code, conversation {MAIN}; marked as final by the client"),
        ({"x-session-id": "s"}, f"unknown client, conversation {MAIN}"),
        ({}, ""),
    ],
)
async def test_an_agents_request(client: ClientSession, engine: FakeEngine, headers: dict[str, str], said: str) -> None:
    """Whose conversation it is, what started that and whether it is over, by keys that the admin pages have too; and
    nothing of it where the client says nothing."""
    async with running(engine) as app:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
        async with client.post(app.url + CHAT, json=body, headers={"x-request-id": "mine", **headers}) as answer:
            assert answer.status == 200
        status, out, _ = await explain("mine", "--admin", app.admin_url)
    assert status == 0
    assert [line for line in out.splitlines() if line.startswith("  agent ")] == (
        [f"  agent     {said}"] if said else []
    )


async def test_what_is_not_found_is_told_with_how_far_back_it_looked(
    client: ClientSession, engine: FakeEngine, tmp_path: Path
) -> None:
    """The exit status is 1. The message says how far back decisions reach, and what would make them reach further."""
    async with running(engine) as app:
        nothing = await explain("nobody", "--admin", app.admin_url)
        await client.post(app.url + CHAT, json={"model": "m", "messages": []})
        some = await explain("nobody", "--admin", app.admin_url)
    async with running(engine, admin__history_path=str(tmp_path / "history.db")) as app:
        kept = await explain("nobody", "--admin", app.admin_url)
    assert nothing[:2] == some[:2] == kept[:2] == (1, "")
    assert "No request has ended since the router started. Set admin.history_path" in nothing[2]
    assert "(1 in memory)" in some[2]
    assert "admin.history_path" not in kept[2]


async def test_a_router_that_cannot_be_asked(engine: FakeEngine, tmp_path: Path) -> None:
    """The exit status is 2, and the message says what is missing: an address, the token, an admin listener."""
    (tmp_path / "token").write_text(ADMIN + "\n")
    token = ("--token-file", str(tmp_path / "token"))
    async with running(engine, admin__token=ADMIN) as app:
        assert (await explain("x", "--url", app.admin_url, *token))[0] == 1
        wanted: list[tuple[tuple[str, ...], str]] = [
            (("--admin", app.admin_url), "requires the admin token: set --token-file"),
            (("--admin", app.url, *token), "it is not an admin listener (tenants use /v1/warmroute/requests/ID)"),
            (("--admin", "http://127.0.0.1:1"), "cannot reach http://127.0.0.1:1"),
            (("--admin", "nonsense"), "is not a URL"),
            (("--admin", app.admin_url, "--token-file", "/nowhere"), "/nowhere: No such file"),
        ]
        for arguments, words in wanted:
            status, out, errors = await explain("x", *arguments)
            assert (status, out) == (2, "")
            assert words in errors
            assert len(errors.splitlines()) == 1


async def test_it_needs_no_library_beside_the_routers() -> None:
    """It works where `rich`, which `top` needs, is not installed."""
    code = "import sys; sys.modules['rich'] = None; from router.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, "explain", "x", "--admin", "http://127.0.0.1:1", stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"cannot reach" in errors


@pytest.mark.parametrize("again", [2, 7])
async def test_an_id_that_was_used_again(client: ClientSession, engine: FakeEngine, again: int) -> None:
    """Requests of one id are all explained, newest first, up to five."""
    async with running(engine) as app:
        for _ in range(again):
            body: dict[str, Any] = {"model": "m", "messages": []}
            await client.post(app.url + CHAT, json=body, headers={"x-request-id": "same"} | bearer("x"))
        status, out, _ = await explain("same", "--admin", app.admin_url)
    assert status == 0
    assert out.count("Request same") == min(again, 5)
    assert out.startswith(f"{min(again, 5)} {'or more ' * (again > 5)}requests have this id")


async def test_the_terms_of_a_candidate_add_up_to_its_price(client: ClientSession, engine: FakeEngine) -> None:
    """Of each candidate, all columns between the open requests and the price are terms of it, the largest included."""
    async with FakeEngine() as other, running(engine, other) as app:
        for number in range(4):
            text = f"conversation {number} " * 500
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            headers = {"x-request-id": f"n{number}"}
            async with client.post(app.url + CHAT, json=body, headers=headers) as answer:
                assert answer.status == 200
        async with client.get(f"{app.admin_url}/admin/decisions") as answer:
            decisions = (await answer.json())["decisions"]
        _, out, _ = await explain("n3", "--admin", app.admin_url)
    candidates = [each for row in decisions for each in row["candidates"]]
    assert len(candidates) == 8
    for each in candidates:
        assert each["price_ms"] > 0
        assert sum(each["price_terms"].values()) == pytest.approx(each["price_ms"], abs=0.05)
    lines = out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("  replica "))
    columns = [column.strip() for column in lines[head].split("  ") if column.strip()]
    first, last = sum(c in ("replica", "cached", "to compute", "open") for c in columns), columns.index("price")
    assert last > first
    for line in lines[head + 1 : head + 3]:
        cells = [cell.replace(",", "") for cell in line.removeprefix("* ").split()]
        assert sum(map(float, cells[first:last])) == pytest.approx(float(cells[last]), abs=0.5 * (last - first + 1))
