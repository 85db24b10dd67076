"""No bytes of others break a parser: the same short part of `make attack` each time, and the attackers' own tests."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest

from tests.attack import drive
from tests.attack.drive import Finding, attacks, broken, shrunk
from tests.attack.meter import metered
from tests.attack.target import Hangs, Target, TooCostly, limited
from tests.attack.targets import TARGETS
from tests.compiled import COMPILED
from tests.support.examples import examples

pytestmark = pytest.mark.promise(
    "Any foreign bytes end in a value or a documented error, within bounds of memory and steps.", "clients"
)

ATTACKS = examples(int(os.environ.get("WARMROUTE_ATTACKS", "100")))
SEED = 20_262


@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name: str) -> None:
    """Against each kept input, every finding among them, the parser holds, and within its bounds."""
    target = TARGETS[name]
    seeds = target.seeds()
    assert len(seeds) >= 1
    for file, data in seeds.items():
        try:
            target.try_once(data) if COMPILED else target.try_metered(data)
        except Exception as error:
            error.add_note(f"seed {file}")
            raise


@pytest.mark.parametrize("name", TARGETS)
def test_mutations(name: str) -> None:
    """Against changes of the kept inputs, drawn once and for all, the parser holds."""
    target = TARGETS[name]
    for data, judged in islice(attacks(target, SEED), len(target.seeds()), len(target.seeds()) + ATTACKS):
        error = broken(target, data, metered=judged and not COMPILED)
        if error is not None:
            pytest.fail(Finding(target, data, error).told())


def fragile(data: bytes) -> None:
    """Breaks on two bytes that stand together."""
    if b"ab" in data:
        raise KeyError("ab")


def slow(data: bytes) -> None:
    """Takes the square of its input in steps, and its thousandfold in bytes."""
    kept = []
    for _ in range(len(data) ** 2):
        kept.append(bytes(1_000))


def test_findings_are_small_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks a target is made small, written to a file, and told with the command that runs it again."""
    monkeypatch.setattr(drive, "ROOT", tmp_path)
    monkeypatch.setattr(drive, "FOLDER", tmp_path / ".attack")
    target = Target(fragile)
    error = broken(target, b"x" * 500 + b"ab" + b"y" * 700, metered=False)
    assert error is not None
    found = shrunk(Finding(target, b"x" * 500 + b"ab" + b"y" * 700, error), metered=False)
    assert found.data == b"ab"
    told = found.told()
    (file,) = (tmp_path / ".attack" / "findings").iterdir()
    assert file.read_bytes() == b"ab"
    assert f"replay: .venv/bin/python -m tests.attack --replay .attack/findings/{file.name}" in told
    assert "tests/attack/seeds/fragile/" in told


@pytest.mark.inside
def test_what_costs_too_much_is_told() -> None:
    """Steps and bytes that grow faster than the input are findings, and so is what has no end."""
    target = Target(slow)
    target.try_metered(b"x" * 20)
    assert isinstance(broken(target, b"x" * 400, metered=True), TooCostly)
    assert broken(target, b"x" * 20, metered=False) is None
    cost = metered(lambda: [bytes(1 << 20) for _ in range(3)])
    assert 3 << 20 <= cost.held_bytes < 4 << 20


def test_what_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attack without an end is ended."""
    monkeypatch.setattr("tests.attack.target.HANGS_S", 0.05)

    def endless() -> None:
        while True:
            pass

    with pytest.raises(Hangs), limited():
        endless()
