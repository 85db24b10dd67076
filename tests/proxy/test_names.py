"""Which model a request means: names that lists have, names that engines take besides, and lists that were wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, FormData

from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, running, status
from tests.support.keyring import Keyring

CHAT = "/v1/chat/completions"
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/rerank": {"query": "q", "documents": ["d"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/classify": {"input": "a"},
    "/invocations": {"prompt": "hi"},
}


def row(name: str, parent: str | None = None, *, owned_by: str = "sglang", **fields: Any) -> dict[str, Any]:
    """A row of an engine's page of models."""
    return {"id": name, "object": "model", "created": 1, "owned_by": owned_by, "root": name, "parent": parent, **fields}


async def ask(client: ClientSession, app: RouterServer, path: str = CHAT, **fields: Any) -> tuple[int, Any]:
    """The status of an answer, and its body."""
    async with client.post(app.url + path, json={**PATHS.get(path, {}), **fields}) as response:
        return response.status, json.loads(await response.read() or b"null")


def identities(app: RouterServer) -> int:
    """How many prompts the router knows to be held, which is one for each identity if all texts are equal."""
    return app.router.index.keys


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}], ids=["missing", "null", "empty"])
async def test_no_name_means_the_only_base_model(client: ClientSession, path: str, named: dict[str, Any]) -> None:
    """Where several are served, it is 400 on every path."""
    async with FakeEngine() as one, FakeEngine(models=("n",)) as two:
        async with running(one) as app:
            assert (await ask(client, app, path, **named))[0] == 200
        async with running(one, two) as app:
            code, said = await ask(client, app, path, **named)
            assert code == 400
            assert "served are: m, n" in json.dumps(said)


async def test_a_form_without_a_model(client: ClientSession) -> None:
    """It is 400 before two fleets; with one it goes where that model is."""
    async with FakeEngine() as chat, FakeEngine(models=("whisper",)) as speech, running(chat, speech) as app:
        for named, code in ((None, 400), ("", 400), ("whisper", 200), ("nothing", 404)):
            form = FormData()
            form.add_field("file", b"RIFF", filename="a.wav")
            if named is not None:
                form.add_field("model", named)
            async with client.post(app.url + "/v1/audio/transcriptions", data=form) as response:
                assert response.status == code, named
        assert not chat.seen
        assert len(speech.seen) == 1


async def test_an_adapter_behind_its_base(client: ClientSession) -> None:
    """SGLang's `base:adapter` goes where the adapter is, on every API, byte for byte; `lora_path` counts less."""
    base, sql = row("org/base"), row("sql", "org/base")
    async with (
        FakeEngine(rows=[base]) as plain,
        FakeEngine(rows=[base, sql]) as adapted,
        running(plain, adapted) as app,
    ):
        for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"):
            for fields in ({"model": "org/base:sql"}, {"model": "org/base:sql", "lora_path": "other"}):
                assert (await ask(client, app, path, **fields))[0] == 200, path
                assert json.loads(adapted.seen[-1].body)["model"] == "org/base:sql"
        for fields in ({"model": "org/base", "lora_path": "sql"}, {"lora_path": "sql"}):
            assert (await ask(client, app, **fields))[0] == 200
        assert (await ask(client, app, "/generate", text="hi", lora_path="sql"))[0] == 200
        assert not plain.seen
        assert (await ask(client, app, model="org/bases:sql"))[0] == 404


async def test_caches_of_adapters_do_not_mix(client: ClientSession) -> None:
    """A prompt with an adapter is another one than without; by whichever name, it is the same."""
    text = "word " * 1_000
    rows = [row("b"), row("b:x"), row("ad", "b")]
    async with FakeEngine(rows=rows) as engine, running(engine) as app:
        held = []
        for fields in (
            {"model": "b"}, {"model": "b:ad"}, {"model": "b", "lora_path": "ad"}, {"lora_path": "ad"},
            {"model": "b:unlisted"}, {"model": "b:x"}, {"model": "b:x:ad2"}, {"model": "b", "lora_path": ["ad"]},
        ):  # fmt: skip
            assert (await ask(client, app, "/v1/completions", prompt=text, **fields))[0] == 200
            held.append(identities(app))
        one = held[0]
        assert held == [one, 2 * one, 2 * one, 2 * one, 3 * one, 4 * one, 5 * one, 6 * one]
        assert (await ask(client, app, "/generate", text=text, lora_path="ad"))[0] == 200
        assert identities(app) == held[-1]
        models = {record.model for record in app.control.pages.decisions}
        assert models <= {"b", "ad", "b:x"}  # no label is a client's word


async def test_adapters_are_none_of_other_engines(client: ClientSession) -> None:
    """vLLM takes a colon for part of a name, and passes over `lora_path`."""
    rows = [row("b", owned_by="vllm"), row("ad", "b", owned_by="vllm")]
    async with FakeEngine(rows=rows) as engine, running(engine) as app:
        assert (await ask(client, app, model="b:ad"))[0] == 404
        assert (await ask(client, app, "/v1/completions", prompt="x" * 1_000, model="b"))[0] == 200
        held = identities(app)
        assert (await ask(client, app, "/v1/completions", prompt="x" * 1_000, model="b", lora_path="ad"))[0] == 200
        assert identities(app) == held


async def test_an_adapter_that_was_just_loaded(client: ClientSession) -> None:
    """An unknown name has all replicas asked again, once for all who ask, and is served where it is found."""
    async with FakeEngine() as one, FakeEngine() as two, running(one, two) as app:
        two.models, before = ("m", "new"), (one.probes["models"], two.probes["models"])
        codes = await asyncio.gather(*(ask(client, app, model="new") for _ in range(9)))
        assert {code for code, _ in codes} == {200}
        assert len(two.seen) == 9
        looks = one.probes["models"], two.probes["models"]
        assert looks == (before[0] + 1, before[1] + 1)
        async with client.get(app.url + "/v1/models/new") as response:
            assert response.status == 200
        assert looks == (one.probes["models"], two.probes["models"])


async def test_unknown_names_do_not_make_many_looks(client: ClientSession) -> None:
    """However many there are, replicas are asked once a second."""
    async with FakeEngine() as engine, running(engine) as app:
        before = engine.probes["models"]
        codes = await asyncio.gather(*(ask(client, app, model=f"no-{n}") for n in range(30)))
        assert {code for code, _ in codes} == {404}
        assert engine.probes["models"] == before + 1
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert (await ask(client, app, model="no"))[0] == 404
        assert loop.time() - began_s < 5.0
        assert engine.probes["models"] == before + 2


async def test_unknown_names_may_pass(client: ClientSession) -> None:
    """`api.unknown_models: pass`: where one base model is served the engine gets them as they are, and their prompts
    are nobody else's. Where several are, the name does not say whose it is."""
    async with FakeEngine() as one, FakeEngine(models=("n",)) as two:
        async with running(one, api__unknown_models="pass") as app:
            for name in ("m", "resolved", "m:x", "resolved"):
                assert (await ask(client, app, "/v1/completions", prompt="x" * 600, model=name))[0] == 200
            assert [json.loads(seen.body)["model"] for seen in one.seen] == ["m", "resolved", "m:x", "resolved"]
            assert identities(app) == 3
            assert {record.model for record in app.control.pages.decisions} == {"m"}
        async with running(one, two, api__unknown_models="pass") as app:
            assert (await ask(client, app, model="resolved"))[0] == 404


async def test_keys_for_adapters(client: ClientSession, tmp_path: Path) -> None:
    """`base:adapter` is for who may use the adapter, or has it named so; not for who may use the base alone."""
    ring = Keyring(tmp_path, all={}, base={"models": ["b"]}, ad={"models": ["ad"]}, full={"models": ["b:ad"]})
    names = [{"model": "b"}, {"model": "ad"}, {"model": "b:ad"}, {"model": "b", "lora_path": "ad"}, {"model": "b:no"}]
    expected = {
        "all": [200, 200, 200, 200, 200],
        "base": [200, 403, 403, 403, 403],
        "ad": [403, 200, 200, 403, 403],
        "full": [403, 403, 200, 403, 403],
    }
    settings = {**ring.settings, "api__unknown_models": "pass"}
    async with FakeEngine(rows=[row("b"), row("ad", "b")]) as engine, running(engine, **settings) as app:
        for tenant, codes in expected.items():
            got = []
            for fields in names:
                body = {**PATHS[CHAT], **fields}
                async with client.post(app.url + CHAT, json=body, headers=ring.of(tenant)) as response:
                    got.append(response.status)
            assert got == codes, tenant
        for header, code in ((None, 200), ("ad", 403)):
            headers = ring.of("base") | ({"X-Amzn-SageMaker-Adapter-Identifier": header} if header else {})
            async with client.post(app.url + "/invocations", json={"model": "b"}, headers=headers) as response:
                assert response.status == code


GONE = status(404, json.dumps({"error": {"message": "The model `ad` does not exist.", "param": "model", "code": 404}}))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_a_replica_has_lost(client: ClientSession, stream: bool) -> None:
    """The list of one replica is wrong: the request is served by the other one, and those that follow go there at once.
    Nobody is blamed, and no retry is spent."""
    async with FakeEngine(models=("m", "ad")) as one, FakeEngine(models=("m", "ad")) as two:
        async with running(one, two, upstream__retries_max=0) as app:
            one.models = ("m",)
            one.script.extend([GONE] * 9)
            codes = []
            for n in range(8):
                body = {"messages": [{"role": "user", "content": f"{n} " * 500}], "model": "ad", "stream": stream}
                async with client.post(app.url + CHAT, json=body) as response:
                    await response.read()
                    codes.append(response.status)
            assert codes == [200] * 8
            assert len(one.seen) <= 1
            member = app.router.fleet.member(one.url)
            assert member is not None
            assert not one.seen or "ad" not in member.models
            assert member.breaker.failures == 0


async def test_a_model_that_nobody_has_any_more(client: ClientSession) -> None:
    """Two replicas are asked, and the engine's answer is the client's; other 404s are nobody's business."""
    async with FakeEngine(models=("m", "ad")) as one, FakeEngine(models=("m", "ad")) as two:
        async with FakeEngine(models=("m", "ad")) as three, running(one, two, three) as app:
            for each in (one, two, three):
                each.script.append(GONE)
            code, said = await ask(client, app, model="ad")
            assert (code, said["error"]["message"]) == (404, "The model `ad` does not exist.")
            assert sum(len(each.seen) for each in (one, two, three)) == 2
        other = status(404, '{"error":{"message":"Response not found: The model `ad` does not exist."}}')
        for each in (one, two):
            each.script.clear()
            each.script.append(other)
        async with running(one, two) as app:
            one.seen.clear()
            two.seen.clear()
            assert (await ask(client, app, model="ad"))[0] == 404
            assert len(one.seen) + len(two.seen) == 1
            assert all("ad" in member.models for member in app.router.members)


async def test_a_list_is_read_again_when_a_replica_comes_back(client: ClientSession) -> None:
    """Its process may be another one, which serves something else."""
    async with FakeEngine(models=("m", "ad")) as engine, running(engine) as app:
        prober, looks = app.control.prober, engine.probes["models"]
        await prober.probe(engine.url, models=False)
        assert engine.probes["models"] == looks
        engine.healthy, engine.models = False, ("m",)
        for _ in range(2):
            await prober.probe(engine.url, models=False)
        engine.healthy = True
        await prober.probe(engine.url, models=engine.url in prober._stale)
        member = app.router.fleet.member(engine.url)
        assert member is not None
        assert list(member.models) == ["m"]


async def test_rows_are_the_engines(client: ClientSession) -> None:
    """Whatever an engine says of a model is in the list, and in the page of that model."""
    base = row("org/m", max_model_len=8, permission=[{"id": "p"}], capabilities={"vision": True}, parent_id=None)
    sql = row("sql", "org/m", description="long" * 2_000, odd=[1, None])
    async with FakeEngine(rows=[base, sql]) as engine, running(engine) as app:
        async with client.get(app.url + "/v1/models") as response:
            listed = (await response.json())["data"]
        assert listed[0] == base
        assert {name: listed[1][name] for name in ("id", "parent", "root")} == {
            "id": "sql",
            "parent": "org/m",
            "root": "sql",
        }
        assert "odd" not in listed[1]  # a row that is too long is cut to what the router knows of it
        async with client.get(app.url + "/v1/models/org/m") as response:
            assert await response.json() == base
        engine.rows = [base | {"capabilities": {}}, sql]
        await app.control.probe_now()
        async with client.get(app.url + "/v1/models/org/m") as response:
            assert (await response.json())["capabilities"] == {}


async def test_models_beyond_the_limit_are_told(client: ClientSession, caplog: pytest.LogCaptureFixture) -> None:
    """Those that are read are served; how many are left out is logged once, and shown to operators."""
    async with FakeEngine(models=tuple(f"m{n}" for n in range(30))) as engine:
        async with running(engine, probe__models_max=20) as app:
            await app.control.probe_now()
            assert (await ask(client, app, model="m19"))[0] == 200
            assert (await ask(client, app, model="m20"))[0] == 404
            events = [record for record in caplog.records if getattr(record, "event", "") == "models_left_out"]
            assert [event.__dict__["fields"]["left_out"] for event in events] == [10]
            async with client.get(app.control.admin_url + "/admin/replicas") as response:
                why = (await response.json())["replicas"][0]["why"]
            assert "10 of its models are ignored" in why
