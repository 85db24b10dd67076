"""Long inputs, their recipes and the search for slow ones; no test here judges a time.

The clock of the tests is a counter: a call of theirs says itself what it costs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack import clock, drive, grown, reach
from tests.attack.calls import CALLS, Call, calls_of
from tests.attack.clock import Cost, Search, cost_of
from tests.attack.grown import MIB, kept, recipe_of
from tests.attack.target import Target
from tests.attack.targets import TARGETS

SIZE = 16 << 10  # of kept recipes in the suite, where lines of Python are counted


def parser(data: bytes) -> None:
    """A target that takes anything."""


class Spends:
    """CPU time in place of the machine's: so many seconds for each pair of equal bytes that stand together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, s_per_pair: float) -> None:
        self.now_s, self._s_per_pair = 0.0, s_per_pair
        monkeypatch.setattr(clock.time, "process_time", lambda: self.now_s)

    def run(self, data: bytes) -> None:
        """The call."""
        self.now_s += self._s_per_pair * data.count(b"[[")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for findings."""
    for module in (drive, clock):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "FOLDER", tmp_path / ".attack")
    (tmp_path / ".attack").mkdir()
    return tmp_path / ".attack"


def test_a_call_is_judged_by_its_best_run_for_each_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 ms a megabyte, and as much for less than one; memory likewise."""
    spends = Spends(monkeypatch, 0.001)
    call = Call("pairs", spends.run)
    assert cost_of(call, b"[[" * 20, held=False) == Cost(pytest.approx(39 / 39 * 0.02 / 0.02, abs=0.1))
    assert cost_of(call, b"[[ " * 200 + b" " * 4 * MIB, held=False).time == pytest.approx(2.5, abs=0.1)
    held: list[bytes] = []
    grows = Call("grows", lambda data: held.append(bytes(128 * MIB)))
    assert cost_of(grows, b"x", held=True).held == pytest.approx(2.0, abs=0.1)


def test_the_search_climbs_to_what_is_slow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is slow on one kind of bytes alone is found, and its recipe is written down and replayed."""
    spends = Spends(monkeypatch, 0.000_01)
    target = Target(parser, words=(b"[", b"{"))
    monkeypatch.setitem(CALLS, "parser", (Call("pairs", spends.run),))
    monkeypatch.setattr(Target, "seeds", lambda _: {"seed": b'{"a": [1]}'})
    search = Search(target, 1)
    for _ in range(60):
        search.judge(search._next(), held=False)
    slow = search.slow["pairs"]
    assert slow.cost.time > 1.0
    told = slow.told()
    (file,) = (folder / "findings").iterdir()
    assert f"replay: make attack ARGS='--replay .attack/findings/{file.name}'" in told
    assert recipe_of(file.read_text("utf-8")) == slow.recipe
    assert [each.call.name for each in clock.replayed(target, file)] == ["pairs"]


@pytest.mark.long
def test_every_kept_recipe_is_within_the_counts() -> None:
    """Recipes of slow inputs that were found stay, and cost few lines of Python and bytes for each byte."""
    names = {folder.name for folder in grown.RECIPES.iterdir()}
    assert names <= set(TARGETS)
    for name in names:
        for file, recipe in kept(name).items():
            try:
                TARGETS[name].try_metered(recipe.data(SIZE))
            except Exception as error:
                error.add_note(f"recipe {file}")
                raise


def test_every_call_belongs_to_a_target() -> None:
    """Calls are those of targets that there are; a target without any has its attack for one."""
    assert set(CALLS) <= set(TARGETS)
    assert [call.name for call in calls_of(Target(parser))] == ["attack"]
    for name in CALLS:
        assert all(call.ms_per_mb > 0 and call.bytes_max > 0 for call in calls_of(TARGETS[name]))


def test_parsers_are_files_and_functions_that_there_are() -> None:
    """A parser that is renamed, or a function of one, is renamed in the list too."""
    for parser_, names in reach.PARSERS.items():
        assert (reach.ROOT / "router" / parser_).is_file(), parser_
        known = reach.functions(reach.ROOT / "router" / parser_)
        assert {name.removeprefix("-") for name in names} <= set(known), parser_
