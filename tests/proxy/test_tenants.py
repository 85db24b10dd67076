"""What one tenant may learn of another that shares its caches: nothing of what it said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from router.core.dialects.tenant_isolation import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES
from router.placement_api import REQUESTS
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import Keyring

SECRET = "The merger price is 73.50 per share and Zoe signs on Friday."
OTHER = "Quite another thing, which is told to nobody and is as long."
ALPHABET = "Themrg picsn"  # letters of the beginning, and the space
SYSTEM = "You are the assistant of a bank, and answer each question in one sentence. " * 8
CANNED = "I am sorry, I cannot help with that. Is there anything else?"
GO_ON = "No, thank you very much, this is all that I wanted to know."
ALL: dict[str, Any] = {"insights__diff_budget_ms_per_s": 1_000}  # nothing is assumed to save time
FILLER = " and there is more to be said of this." * 20
GUESSED = 6  # letters of the secret that the loop is given time for
_AT = re.compile(r"byte (\d+)|at_bytes=(\d+)")


def conversation(said: str) -> dict[str, Any]:
    """Everything but `said` is known to whoever uses the same assistant."""
    turns = (("system", SYSTEM), ("user", said), ("assistant", CANNED), ("user", GO_ON))
    return {"model": "m", "messages": [{"role": role, "content": text} for role, text in turns]}


class Spy:
    """A tenant, and all that it is told of its prompts."""

    def __init__(self, client: ClientSession, url: str, ring: Keyring, tenant: str, *, session: str = "") -> None:
        self._client, self._url, self._headers = client, url, ring.of(tenant)
        self._session = {"x-session-id": session} if session else {}
        self.told: list[str] = []

    async def ask(self, said: str) -> str:
        """Whatever this answer tells of earlier prompts."""
        headers = self._headers | self._session | {"x-request-id": f"spy-{len(self.told)}"}
        async with self._client.post(self._url + CHAT, json=conversation(said), headers=headers) as answer:
            words = await answer.text() if answer.status != 200 else ""
            told = f"{answer.status} {answer.headers.get('x-warmroute-warning')} {words}"
            told += f" {answer.headers.get('x-warmroute-miss')}"
        async with self._client.get(f"{self._url}{REQUESTS}spy-{len(self.told)}", headers=self._headers) as page:
            row = await page.json()
            told += json.dumps([row.get(name) for name in ("miss", "difference", "turn", "hit_tokens")])
        self.told.append(told)
        return told

    async def guess(self) -> str:
        """The beginning of what somebody else said, read letter by letter from the first byte that differs."""
        known = ""
        while len(known) < GUESSED:
            for letter in ALPHABET:
                found = _AT.search(await self.ask(known + letter + FILLER))
                if found is not None and int(found[1] or found[2]) > len(known):
                    known += letter
                    break
            else:
                break
        return known


@pytest.mark.promise("A tenant learns of its own earlier prompts only, isolated or not.", "tenants")
@pytest.mark.parametrize(
    ("allowed", "session"),
    [({"history_policy": "reject"}, ""), ({"history_policy": "reject"}, "7"), ({"history_policy": "warn"}, ""),
     ({"receipts": True}, ""), ({"receipts": True}, "7")],
    ids=["reject", "reject, session", "warn", "receipts", "receipts, session"],
)  # fmt: skip
async def test_no_loop_of_guesses_reads_what_another_tenant_said(
    client: ClientSession, tmp_path: Path, allowed: dict[str, Any], session: str
) -> None:
    """A tenant that knows all of another's conversation but one message is told, guess by guess, the very same whatever
    that message is: in refusals, warnings, receipts and pages of its requests."""
    ring = Keyring(tmp_path, acme=allowed, beta=allowed)
    worlds = []
    for secret in (SECRET, OTHER):
        async with FakeEngine() as engine, running(engine, **ring.settings, **ALL) as app:
            await Spy(client, app.url, ring, "acme", session=session).ask(secret)
            spy = Spy(client, app.url, ring, "beta", session=session)
            await spy.guess()
            for guess in ("gamma", SECRET[:20] + FILLER, SECRET[:40] + FILLER):
                await spy.ask(guess)
            worlds.append(spy.told)
    assert worlds[0] == worlds[1]


async def test_a_tenants_own_history_is_still_compared(
    client: ClientSession, engine: FakeEngine, tmp_path: Path
) -> None:
    """Each tenant is held to what it said itself, though another said nearly the same: what it edits is refused, what
    it adds passes."""
    ring = Keyring(tmp_path, acme={"history_policy": "reject"}, beta={"history_policy": "reject"})
    async with running(engine, **ring.settings) as app:
        acme, beta = (Spy(client, app.url, ring, tenant) for tenant in ("acme", "beta"))
        assert (await acme.ask(SECRET)).startswith("200")
        assert (await beta.ask(SECRET.replace("73", "74"))).startswith("200")
        assert (await beta.ask(SECRET.replace("73", "74"))).startswith("200")
        refused = await beta.ask(SECRET)
        assert refused.startswith("409")
        assert "byte 21" in refused
        assert (await acme.ask(SECRET)).startswith("200")


PATHS_OF_BODIES = {
    CHAT: conversation("x"),
    COMPLETIONS: {"model": "m", "prompt": "x"},
    MESSAGES: {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    RESPONSES: {"model": "m", "input": "x"},
    GENERATE: {"model": "m", "text": "x"},
    "/tokenize": {"model": "m", "prompt": "x"},
}


@pytest.mark.promise("A tenant's request has no other's id at an engine and sends no engine to other hosts.", "tenants")
@pytest.mark.parametrize("path", PATHS_OF_BODIES)
async def test_no_tenant_reaches_anothers_request_by_its_id(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, path: str
) -> None:
    """The same id of two tenants, or of one tenant twice, in header and body, is another one each time at the engine,
    which nobody can guess; each client is told its own, and finds its request by it and by the engine's."""
    ring = Keyring(tmp_path, acme={}, beta={})
    ids = set()
    async with running(engine, **ring.settings) as app:
        for tenant in ("acme", "beta", "beta"):
            headers = ring.of(tenant) | {"X-Request-Id": "job-1"}
            body = PATHS_OF_BODIES[path] | {"request_id": "job-1", "rid": "job-1"}
            async with client.post(app.url + path, json=body, headers=headers) as answer:
                assert answer.headers["x-warmroute-request-id"] == "job-1"
            got = engine.seen[-1]
            named = {got.headers["X-Request-Id"], got.json["request_id"], got.json["rid"]}
            assert not named & ids
            assert "job-1" not in named
            assert len(got.headers.getall("X-Request-Id")) == 1
            ids |= named
            for known in ("job-1", "chatcmpl-" + got.headers["X-Request-Id"]):
                async with client.get(f"{app.url}{REQUESTS}{known}", headers=ring.of(tenant)) as page:
                    assert (page.status, (await page.json())["id"]) == (200, "job-1")
    async with running(engine) as app:
        headers, body = {"X-Request-Id": "job-1"}, PATHS_OF_BODIES[path] | {"request_id": "job-1"}
        async with client.post(app.url + path, json=body, headers=headers):
            got = engine.seen[-1]
            assert (got.headers["X-Request-Id"], got.json) == ("job-1", body), "without keys it is the client's"


@pytest.mark.promise("A tenant's request has no other's id at an engine and sends no engine to other hosts.", "tenants")
async def test_no_id_is_an_address_for_an_engine(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """vLLM's connector between GPUs reads hosts and ports out of ids, at these marks."""
    ring = Keyring(tmp_path, acme={})
    given = "___prefill_addr_10.0.0.1:20001___decode_addr_169.254.169.254:80_" + "x" * 60
    async with running(engine, **ring.settings) as app:
        async with client.post(
            app.url + CHAT, json=conversation("x"), headers=ring.of("acme") | {"x-request-id": given}
        ) as answer:
            assert answer.headers["x-warmroute-request-id"] == given
        got = engine.seen[-1].headers["X-Request-Id"]
    assert not set("_:") & set(got)
    assert len(got) < 100


@pytest.mark.promise("A tenant's request has no other's id at an engine and sends no engine to other hosts.", "tenants")
@pytest.mark.parametrize("path", PATHS_OF_BODIES)
async def test_no_tenant_sends_engines_elsewhere(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, path: str
) -> None:
    """Parameters of transfers, and sessions that an engine keeps, reach no engine from any tenant, isolated or not;
    without keys they pass as they are, for routers behind which prefill and decode are apart."""
    asked = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80},
        "ec_transfer_params": {"remote_host": "169.254.169.254"},
        "bootstrap_host": "169.254.169.254", "bootstrap_port": 80, "bootstrap_room": 1, "bootstrap_pair_key": "x",
        "decode_tp_size": 8, "disagg_prefill_dp_rank": 3, "session_params": {"id": "another's"},
        "routed_dp_rank": 1, "data_parallel_rank": 1,
    }  # fmt: skip
    ring = Keyring(tmp_path, acme={}, few={"models": ["m"]})
    body = PATHS_OF_BODIES[path] | asked | {"vllm_xargs": {"kv_transfer_params": "169.254.169.254", "a": 1}}
    async with running(engine, **ring.settings) as app:
        for tenant in ("acme", "few"):
            async with client.post(app.url + path, json=body, headers=ring.of(tenant)) as answer:
                assert answer.status == 200
            got = engine.seen[-1].json
            assert [got[name] for name in asked] == [None] * len(asked)
            assert got["vllm_xargs"] == {"a": 1}
    async with running(engine) as app, client.post(app.url + path, json=body):
        assert engine.seen[-1].json == body
