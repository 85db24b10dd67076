"""Promises of the cost instrument: it measures what it says, on its own tokenizer, and fails when a goal is missed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from loadtest.common.report import Row
from loadtest.core_cost import corpus as cost_model
from loadtest.core_cost import decision as cost
from loadtest.core_cost import growth as cost_growth
from loadtest.core_cost.corpus import MODEL
from loadtest.core_cost.world import BLOCK_TOKENS, REPLICAS, STAGES, PricedRouter, follow
from loadtest.docgen.growth import growth_block
from loadtest.docgen.markdown import PageError
from router.core.kv_events.batch_decoder import Removed, Stored, decode
from router.core.types.placements import Confidence

VOCABULARY, CORPUS_BYTES = 600, 150_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer, trained once for these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("cost")))
        made = cost_model.tokenizer_folder(VOCABULARY, CORPUS_BYTES)
        again = made.stat().st_mtime_ns, (made / "tokenizer.json").stat().st_mtime_ns
        assert cost_model.tokenizer_folder(VOCABULARY, CORPUS_BYTES) == made
        assert again == (made.stat().st_mtime_ns, (made / "tokenizer.json").stat().st_mtime_ns), "trained again"
    return made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time."""
    monkeypatch.setattr(cost, "LONG", (6_000, 9))
    monkeypatch.setattr(cost, "SHORT", (300, 3))
    monkeypatch.setattr(cost, "LONG_A_RUN", 1)
    monkeypatch.setattr(cost, "SHORT_A_RUN", 1)
    monkeypatch.setattr(cost, "OTHER_BLOCKS", 0)
    monkeypatch.setattr(cost, "EVENT_BLOCKS", 1_280)
    monkeypatch.setattr(cost, "POOL_BLOCKS", 640)


@pytest.mark.parametrize("as_map", [True, False], ids=["maps", "arrays"])
@pytest.mark.parametrize("blocks_each", [1, 8, 64])
@pytest.mark.usefixtures("small")
def test_streams_say_what_they_are_measured_by(blocks_each: int, as_map: bool) -> None:
    """Every payload is readable, no event is of another size, and all blocks are in it."""
    batches = [decode(payload) for payload in cost.payloads(blocks_each, as_map=as_map)]

    stored = [event for each in batches for event in each.events if isinstance(event, Stored)]
    assert not any(each.skipped for each in batches)
    assert {len(event.hashes) for event in stored} == {blocks_each}
    assert sum(len(event.hashes) for event in stored) == 1_280
    assert {event.block_tokens for event in stored} == {BLOCK_TOKENS}


@pytest.mark.usefixtures("small")
def test_an_evicting_stream_keeps_to_its_pool() -> None:
    """What is stored beyond the pool makes the oldest go, so that the router never holds more."""
    payloads = cost.payloads(8, as_map=True, evict=True)
    removed = [e for p in payloads for e in decode(p).events if isinstance(e, Removed)]
    known = cost.knowledge()
    known.grade("it", Confidence.EXACT, "joined at batch 0", 0.0)
    most = 0
    for payload in payloads:
        follow(known, "it", payload, 0.0)
        ledger = known.engine_blocks("it")
        assert ledger is not None
        assert not ledger.unknown_removals
        most = max(most, ledger.blocks)

    assert len(removed) == 1_280 - 640
    assert 0 < most <= 640


async def test_a_decision_finds_what_engines_said(folder: Path) -> None:
    """A prompt goes through the router's own reader and is placed where events say it is held, whole or in stages."""
    world = PricedRouter(folder)
    try:
        talks = cost_model.ConversationGenerator(3.0)
        for staged in (False, True):
            names = [f"it {staged}"]
            [(cold, extended)] = await cost.conversations(world, talks, names, (2_000, 5), staged=staged)
            assert cold.cached_tokens < len(cold.ids) // 4 // 20
            assert extended.replica == cold.replica
            assert extended.cached_tokens >= len(cold.ids) // 4 - 2 * BLOCK_TOKENS
            assert extended.cpu_s > 0
            assert set(STAGES) >= set(extended.stages_s)
        assert all(value > 0 for value in extended.stages_s.values())
        assert len(world.replicas) == REPLICAS
        assert world.router.knowledge.grade_of(world.replicas[0])[0] is Confidence.EXACT
    finally:
        world.close()


@pytest.mark.usefixtures("small")
def test_command_reports(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows carry case, goal, got and ok: every case, every stage, every stream."""
    monkeypatch.setattr(cost, "GOALS", {"extend_100k_ms": 1e9, "cold_100k_ms": 1e-9})
    monkeypatch.setattr(cost, "BLOCKS_PER_S_GOAL", 1.0)
    file = tmp_path / "cost.json"

    assert cost.main(["--runs", "1", "--tokenizer", str(folder), "--json", str(file)]) == 0
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    assert (rows["extend_100k_ms"]["goal"], rows["extend_100k_ms"]["ok"]) == ("< 1e+09", True)
    assert (rows["cold_100k_ms"]["expected"], rows["cold_100k_ms"]["ok"]) == (0.0, False)
    assert {f"cold_1k_{stage}_ms" for stage in STAGES} < set(rows)
    assert all(row["got"] > 0 for row in rows.values()), rows
    assert rows["held_by_1_block_bytes"]["got"] < 1_000
    assert {row["ok"] for case, row in rows.items() if case.startswith("ingest_")} == {True}


@pytest.mark.parametrize(("got", "words", "code"), [(2.9, ["--check"], 0), (3.0, ["--check"], 1), (3.0, [], 0)])
def test_check_fails_when_a_goal_is_missed(
    got: float, words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status says whether all goals were met, where it was asked to."""

    async def decisions(*_: object) -> list[Row]:
        return [cost.judge_case("extend_100k_ms", got), cost.judge_case("extend_100k_place_ms", 99.0)]

    monkeypatch.setattr(cost, "decisions", decisions)
    monkeypatch.setattr(cost, "event_rows", lambda *_: [cost.judge_case("ingest_maps_1_blocks_per_s", 100_000.0)])

    assert cost.main(["--tokenizer", str(tmp_path), *words]) == code


def test_a_tokenizer_that_is_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without a tokenizer ends the command with one line, not with a traceback."""
    assert cost.main(["--runs", "1", "--tokenizer", str(tmp_path), "--profile", "short"]) == 2
    assert capsys.readouterr().err.startswith("cost: ")


def test_conversations_are_the_same_each_time() -> None:
    """Same seed, same text; another name, another text."""
    talks = cost_model.ConversationGenerator(4.0)

    assert talks.messages("a", 0, 4, 50) == cost_model.ConversationGenerator(4.0).messages("a", 0, 4, 50)
    assert talks.messages("a", 2, 2, 50) == talks.messages("a", 0, 4, 50)[2:]
    assert talks.text("a", 50) != talks.text("b", 50)
    assert json.loads(cost_model.body_of(talks.messages("a", 0, 1, 50), tools=True))["model"] == MODEL


def test_goals_of_placing_grow_with_the_fleet() -> None:
    """They are those that were set for 8, 64, 256 and 1,000 replicas, and between and beyond these in proportion."""
    assert [cost_growth.place_goal_ms(n) for n in (8, 64, 256, 1_000)] == pytest.approx([0.08, 0.12, 0.3, 1.0])
    assert cost_growth.place_goal_ms(1) == 0.08
    assert cost_growth.place_goal_ms(160) == pytest.approx(0.21)
    assert cost_growth.place_goal_ms(2_000) == pytest.approx(2.0)


def test_growth_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size of fleet has a row of each case, with what was expected; without a tokenizer, and judged on request."""
    for name, value in {"PROMPTS": 2, "OPEN": 8, "JOINS": 2}.items():
        monkeypatch.setattr(cost_growth, name, value)
    file, words = tmp_path / "growth.json", ["--runs", "1", "--replicas", "3,20"]

    assert cost.main([*words, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    cases = ["place_estimated", "open_request", "join", "look_slice", "place_exact", "place_blip"]
    units = dict.fromkeys(cases, "ms") | {"open_request": "bytes"}
    assert [(row["replicas"], row["case"]) for row in rows] == [
        (n, f"{case}_{units[case]}") for n in (3, 20) for case in cases
    ]
    assert all(row["got"] > 0 for row in rows)
    assert all(row["ok"] is (row["got"] <= row["expected"]) for row in rows)
    assert all(row.get("timed", False) is (row["case"] != "open_request_bytes") for row in rows)
    block = growth_block(json.loads(file.read_text())).splitlines()
    assert [line.split("|")[1].strip() for line in block if line.startswith("| ")][2:] == ["3", "20"]
    assert f"{rows[0]['got']:.2f} of 0.08" in block[-2]
    with pytest.raises(PageError):
        growth_block({**json.loads(file.read_text()), "rows": []})
    monkeypatch.setattr(cost_growth, "OPEN_GOAL_BYTES", 1.0)
    assert cost.main([*words, "--check"]) == 1


@pytest.mark.parametrize("words", ["0", "8,x", "", "8,,9", "20000"])
def test_sizes_that_are_none_are_refused(words: str) -> None:
    """What is no list of whole numbers ends the command before anything is measured."""
    with pytest.raises(SystemExit) as ended:
        cost.main(["--replicas", words])
    assert ended.value.code == 2
