"""What one tenant may learn of another that shares its caches: nothing of what it said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from router.core.dialects.tenancy import CHAT
from router.placer import REQUESTS
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import Keyring

SECRET = "The merger price is 73.50 per share and Zoe signs on Friday."
OTHER = "Quite another thing, which is told to nobody and is as long."
ALPHABET = "Themrg picsn"  # letters of the beginning, and the space
SYSTEM = "You are the assistant of a bank, and answer each question in one sentence. " * 8
CANNED = "I am sorry, I cannot help with that. Is there anything else?"
GO_ON = "No, thank you very much, this is all that I wanted to know."
ALL: dict[str, Any] = {"observatory__compare_ms_per_s_max": 1_000}  # nothing is assumed to save time
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


@pytest.mark.parametrize(
    ("allowed", "session"),
    [({"append_only": "reject"}, ""), ({"append_only": "reject"}, "7"), ({"append_only": "warn"}, ""),
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
    ring = Keyring(tmp_path, acme={"append_only": "reject"}, beta={"append_only": "reject"})
    async with running(engine, **ring.settings) as app:
        acme, beta = (Spy(client, app.url, ring, tenant) for tenant in ("acme", "beta"))
        assert (await acme.ask(SECRET)).startswith("200")
        assert (await beta.ask(SECRET.replace("73", "74"))).startswith("200")
        assert (await beta.ask(SECRET.replace("73", "74"))).startswith("200")
        refused = await beta.ask(SECRET)
        assert refused.startswith("409")
        assert "byte 21" in refused
        assert (await acme.ask(SECRET)).startswith("200")
