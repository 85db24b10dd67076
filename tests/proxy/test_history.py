"""What the router does to requests at their tenant's wish: tools put in order, conversations held to their history, an
agent's step taken note of."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import ClientSession

from router.core.dialects.tenant_isolation import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from router.core.insights.prompt_memory.diff_candidate import DiffCandidate
from router.core.insights.prompt_memory.texts import Match
from router.core.prompts.block_keys import Chain
from router.core.types.cache_misses import Difference, DifferenceKind, PromptAnalysis
from router.core.types.requests import RequestSpec
from router.ingress.prompt_observer import PromptObserver
from router.router_server import RouterServer
from router.telemetry import logs
from router.telemetry.request_record import RequestRecord
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import Keyring

SORT, CANONICAL = "sort_tools", "canonical_tools"
BODIES: dict[str, bytes] = {
    CHAT: b'{"model":"m" , "messages":[{"role":"user","content":"x"}],"tools":%b}',
    MESSAGES: b'{"model":"m" , "messages":[{"role":"user","content":"x"}],"max_tokens":1,"tools":%b}',
    RESPONSES: b'{"model":"m" , "input":"x","tools":%b}',
}
ONE, TWO = b'{"name" : "a","x":[2,1]}', b'{"name": "b"}'
SHUFFLED, SORTED = b"[" + TWO + b" , " + ONE + b"]", b"[" + ONE + b"," + TWO + b"]"


class Sees:
    """Says of every prompt what it was told to say, and notes what it was shown."""

    def __init__(self, **said: Any) -> None:
        self.said = said
        self.shown: list[RequestSpec] = []
        self.rejects: list[bool] = []
        self.told: list[PromptAnalysis] = []

    def inspect(self, ask: RequestSpec, chain: Chain | None, *_: Any, **__: Any) -> DiffCandidate:
        """A glance is not enough."""
        self.shown.append(ask)
        return DiffCandidate([], 0, 0, b"", 0, 0, 0, PromptAnalysis(), 0, "", b"", 0, Match())

    async def compare(self, *_: Any, rejects: bool = False, **__: Any) -> PromptAnalysis:
        """A sighting of its own for each."""
        self.rejects.append(rejects)
        self.told.append(PromptAnalysis(**self.said))
        return self.told[-1]


@asynccontextmanager
async def seen_by(observer: Sees, engine: FakeEngine, **overrides: Any) -> AsyncIterator[RouterServer]:
    """A router whose prompts this one sees."""
    async with running(engine, **overrides) as app:
        app.http.reader._observer = cast("PromptObserver", observer)
        yield app


def difference(path: str = "messages[3].content", **fields: Any) -> Difference:
    """In the fourth message."""
    return Difference(DifferenceKind.EDITED_HISTORY, 3, "tool", path, 400, 7, 90, **fields)


async def post(client: ClientSession, url: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any, Any]:
    """Status, headers and JSON of the answer."""
    async with client.post(url, data=body, headers={"Content-Type": "application/json"} | headers) as response:
        return response.status, response.headers, await response.json()


@pytest.mark.parametrize("offload", [0, 1 << 20])
@pytest.mark.parametrize("path", BODIES)
async def test_tools_are_put_in_order_for_whom_it_is_wanted(
    client: ClientSession, tmp_path: Path, engine: FakeEngine, path: str, offload: int
) -> None:
    """By the settings, unless the tenant's key says otherwise; in every dialect, long or short, and for isolated
    tenants; the engine gets the tools in order and every other byte as it came; what was done is counted."""
    ring = Keyring(tmp_path, acme={}, own={"normalize_tools": [CANONICAL]}, apart={"isolate": True})
    engine.owned_by = "vllm"
    settings = {"insights__normalize_tools": (SORT,), "limits__offload_bytes_min": offload}
    body = BODIES[path] % SHUFFLED
    async with running(engine, **settings, **ring.settings) as app:
        for tenant, sent in (("acme", BODIES[path] % SORTED), ("own", body), ("apart", BODIES[path] % SORTED)):
            status, *_ = await post(client, app.url + path, body, ring.of(tenant))
            assert status == 200
            got = engine.seen[-1].body
            assert got == sent or (tenant == "apart" and got.startswith(sent[:-1] + b',"cache_salt"'))
        await post(client, app.url + path, BODIES[path] % SORTED, ring.of("acme"))
        page = (await app.control.metrics.page_in_slices()).decode()
    assert f'warmroute_tool_normalizations_total{{repair="{SORT}"}} 2.0' in page
    assert f'warmroute_tool_normalizations_total{{repair="{CANONICAL}"}} 0.0' in page


async def test_a_key_may_want_none(client: ClientSession, tmp_path: Path, engine: FakeEngine) -> None:
    """An empty list in the keys file is an answer, too; paths without tools pass as they are."""
    ring = Keyring(tmp_path, acme={})
    with ring.file.open("a") as file:
        file.write("  normalize_tools: []\n")
    async with running(engine, insights__normalize_tools=(SORT,), **ring.settings) as app:
        await post(client, app.url + CHAT, BODIES[CHAT] % SHUFFLED, ring.of("acme"))
    assert engine.seen[-1].body == BODIES[CHAT] % SHUFFLED
    async with running(engine, insights__normalize_tools=(SORT,)) as app:
        await post(client, app.url + CHAT, BODIES[CHAT] % SHUFFLED, {})
        assert engine.seen[-1].body == BODIES[CHAT] % SORTED
        prompt = b'{"model":"m","prompt":"x","tools":%b}' % SHUFFLED
        await post(client, app.url + COMPLETIONS, prompt, {})
    assert engine.seen[-1].body == prompt


@pytest.mark.parametrize("normalize_tools", [(SORT,), ()])
async def test_what_is_hashed_is_what_is_sent(
    client: ClientSession, engine: FakeEngine, normalize_tools: tuple[str, ...]
) -> None:
    """Two orders of the same tools are one prompt to the router where they are sorted, and only there: the second is
    predicted to be cached."""
    more = b'{"name":"c","description":"%b"}' % (b"x" * 4_000)
    async with running(engine, insights__normalize_tools=normalize_tools) as app:
        for tools in (b"[" + more + b"," + ONE + b"]", b"[" + ONE + b"," + more + b"]"):
            _, headers, _ = await post(client, app.url + CHAT, BODIES[CHAT] % tools, {})
    assert (int(headers["x-warmroute-predicted-cached-tokens"]) > 0) == bool(normalize_tools)


@pytest.mark.inside  # an observer of its own
@pytest.mark.parametrize("path", BODIES)
async def test_a_changed_history_is_refused_where_it_is_wanted(
    client: ClientSession, tmp_path: Path, engine: FakeEngine, path: str
) -> None:
    """With 409 in the dialect's error body, saying where and not what; clients are told not to try again, no replica
    hears of it, and whoever sees prompts is told not to remember it. Others are warned, or pass."""
    observer = Sees(appended=False, difference=difference())
    ring = Keyring(tmp_path, strict={}, mild={"history_policy": "warn"}, free={"history_policy": "off"})
    async with seen_by(observer, engine, insights__history_policy="reject", **ring.settings) as app:
        before = len(engine.seen)
        status, headers, answer = await post(client, app.url + path, BODIES[path] % b"[]", ring.of("strict"))
        assert (status, headers["x-should-retry"], len(engine.seen)) == (409, "false", before)
        said = answer["error"]["message"]
        assert "message 3 (tool)" in said
        assert "edited_history at messages[3].content, byte 7." in said
        assert answer["error"]["code"] == "history_changed"
        status, headers, _ = await post(client, app.url + path, BODIES[path] % b"[]", ring.of("mild"))
        assert status == 200
        told = "history_changed message=3 path=messages[3].content at_bytes=7 change=edited_history"
        assert headers["x-warmroute-warning"] == told
        status, headers, _ = await post(client, app.url + path, BODIES[path] % b"[]", ring.of("free"))
        assert status == 200
        assert "x-warmroute-warning" not in headers
    assert observer.rejects == [True, False, False]


@pytest.mark.inside  # an observer of its own
@pytest.mark.parametrize(
    "said", [{"appended": True, "difference": difference()}, {"appended": False}, {}], ids=["template", "where", "new"]
)
async def test_what_is_not_known_to_have_changed_passes(
    client: ClientSession, engine: FakeEngine, said: dict[str, Any]
) -> None:
    """A template that differs from that of other conversations, a conversation that was forgotten, a new one."""
    async with seen_by(Sees(**said), engine, insights__history_policy="reject") as app:
        status, headers, _ = await post(client, app.url + CHAT, BODIES[CHAT] % b"[]", {})
    assert status == 200
    assert "x-warmroute-warning" not in headers


@pytest.mark.inside  # an observer of its own
async def test_a_refusal_quotes_only_what_it_is_given(client: ClientSession, engine: FakeEngine) -> None:
    """Text is in the message where excerpts are in the difference, which they are only if wanted."""
    observer = Sees(appended=False, difference=difference(before="at 10:00", after="at 10:01"))
    async with seen_by(observer, engine, insights__history_policy="reject") as app:
        *_, answer = await post(client, app.url + CHAT, BODIES[CHAT] % b"[]", {})
    assert "Before: 'at 10:00'. Now: 'at 10:01'." in answer["error"]["message"]


@pytest.mark.parametrize("isolate", [True, False])
async def test_a_refusal_quotes_no_other_tenant(
    client: ClientSession, tmp_path: Path, engine: FakeEngine, isolate: bool
) -> None:
    """A tenant is compared with its own prompts alone, whether or not it shares caches, and whatever session it
    names."""
    engine.owned_by = "vllm"
    ring = Keyring(tmp_path, acme={}, spy={})
    question, rest = "Where is my order, and when will it come to me at last?", "And thank you for all of this. " * 20
    wanted = {"insights__history_policy": "reject", "insights__excerpts": "true", "auth__isolate": isolate}
    async with running(engine, **wanted, **ring.settings) as app:
        for tenant, secret in (("acme", "CANARY"), ("spy", "a guess")):
            messages = [(question, "user"), (f"It is {secret}. {rest}", "assistant"), (rest, "user")]
            said = {"model": "m", "messages": [{"role": role, "content": text} for text, role in messages]}
            status, _, answer = await post(
                client, app.url + CHAT, json.dumps(said).encode(), ring.of(tenant) | {"x-session-id": "7"}
            )
    assert status == 200
    assert "CANARY" not in json.dumps(answer)


@pytest.mark.inside  # an observer of its own
async def test_a_path_makes_no_header_of_its_own(
    client: ClientSession, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names in it are clients' words: whatever they hold, the warning is one header of printable ASCII, and a field of
    the log line."""
    found = difference(path="tools[0].a\r\nSet-Cookie: é=中\x00" + "x" * 10_000)
    observer = Sees(appended=False, difference=found)
    records: list[RequestRecord] = []
    monkeypatch.setattr(logs, "log_requests", records.extend)
    async with seen_by(observer, engine, insights__history_policy="warn") as app:
        _, headers, _ = await post(client, app.url + CHAT, BODIES[CHAT] % b"[]", {})
    warning = headers["x-warmroute-warning"]
    assert "Set-Cookie" not in headers
    assert warning.isascii()
    assert warning.isprintable()
    assert len(warning) < 1_000
    assert "path=tools[0].a%0D%0ASet-Cookie:%20%C3%A9=%E4%B8%AD%00xxx" in warning
    assert [record.warning for record in records] == [warning]
    assert json.loads(logs_line(records[0]))["warning"] == warning


def logs_line(record: RequestRecord) -> bytes:
    """As it is written."""
    return logs._Json().request(0.0, record)


STEPS: list[tuple[str | None, Any, str]] = [
    ("plan", None, "plan"),
    ("plan", {"agent_step": "act"}, "plan"),
    (None, {"agent_step": "act:2-b.c_d"}, "act:2-b.c_d"),
    (None, {"agent_step": "a b"}, ""),
    ("a b", {"agent_step": "act"}, ""),
    ("x" * 64, None, "x" * 64),
    ("x" * 65, None, ""),
    ("é", None, ""),
    (None, {"agent_step": 3}, ""),
    (None, ["agent_step"], ""),
    (None, None, ""),
]


@pytest.mark.inside  # an observer of its own
@pytest.mark.parametrize("path", BODIES)
async def test_a_step_is_noted_and_not_passed_on(client: ClientSession, engine: FakeEngine, path: str) -> None:
    """The header counts before the body's metadata; what is no sane name is none. Replicas never see the header; the
    body is theirs as it came."""
    observer = Sees()
    async with seen_by(observer, engine) as app:
        for header, metadata, step in STEPS:
            body = json.dumps(json.loads(BODIES[path] % b"[]") | {"metadata": metadata}).encode()
            headers = {"X-Warmroute-Step": header} if header is not None else {}
            status, *_ = await post(client, app.url + path, body, headers)
            assert status == 200
            assert observer.told[-1].step == step, (header, metadata)
            assert "x-warmroute-step" not in {name.lower() for name in engine.seen[-1].headers}
            assert engine.seen[-1].body == body
    assert all(ask.metadata == b"" for ask in observer.shown), "not kept while the answer comes"


@pytest.mark.inside  # an observer of its own
async def test_another_header_and_field_may_be_named(client: ClientSession, engine: FakeEngine) -> None:
    """By the settings; the default header is then one like any other."""
    observer = Sees()
    async with seen_by(observer, engine, insights__step_header="X-Step", insights__step_field="step") as app:
        for headers, metadata in (
            ({"x-step": "a", "x-warmroute-step": "b"}, {}),
            ({}, {"step": "c", "agent_step": "d"}),
        ):
            body = json.dumps({"model": "m", "messages": [], "metadata": metadata}).encode()
            await post(client, app.url + CHAT, body, headers)
    assert [sighting.step for sighting in observer.told] == ["a", "c"]
    passed = [{name.lower(): value for name, value in seen.headers.items()} for seen in engine.seen]
    assert [("x-step" in each, each.get("x-warmroute-step")) for each in passed] == [(False, "b"), (False, None)]
