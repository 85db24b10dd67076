"""`loadtest transfers`: what a GPU's transfers took, beside computing the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.docgen import transfers as page
from loadtest.kernels import transfers_command as command
from loadtest.kernels.command import read_file
from router.core.estimators.tier_load import FLOOR_MS, GB_PER_S
from router.core.types.tiers import CPU

KEPT = command.read_transfers(command.TRANSFERS)


def fits(way: str, *, load: bool) -> dict[str, command.TransferFit]:
    """By shape, what was kept of one way."""
    return {fit.shape: fit for fit in KEPT.fits if (fit.way, fit.load) == (way, load)}


def beside(traffic: str, step: str) -> list[command.StepBeside]:
    """Every shape's step beside some traffic."""
    return [row for row in KEPT.contention if (row.traffic, row.step) == (traffic, step)]


def test_what_is_kept_is_whole_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The file that the documents speak of has no failure and nothing left out, and the command shows all of it."""
    assert (KEPT.failed, KEPT.skipped) == ([], [])
    assert command.main([str(command.TRANSFERS)]) == 0
    out = capsys.readouterr().out
    assert "H100" in out
    assert out.count("1/") == len(list(command.loads_beside_prefills(KEPT, read_file(command.KERNELS).points)))
    assert len([line for line in out.splitlines() if line.startswith("│") and " load " in line]) >= len(KEPT.shapes) * 9


def test_kept_points_are_near_their_fits() -> None:
    """The line of a way that moves whole blocks is within a fifth of each of its points, so what the documents say of
    speeds holds for short transfers, too."""
    for way in ("whole", "blocks", "kernel"):
        for fit in fits(way, load=True).values():
            points = [p for p in KEPT.transfers if (p.shape, p.way, p.load) == (fit.shape, way, True)]
            assert len(points) == 5
            assert all(abs(fit.ms(point.tokens) / point.ms - 1) < 0.2 for point in points)


def test_the_router_guesses_what_was_measured() -> None:
    """The first guess of memory is within a tenth of what whole blocks take, within a factor of 1.7 of what vLLM's
    calls take, and its floor is no less than any transfer's."""
    for fit in fits("blocks", load=True).values():
        assert fit.gb_per_s == pytest.approx(GB_PER_S[CPU], rel=0.1)
    for name, shape in KEPT.shapes.items():
        fit = fits(shape.way, load=True)[name]
        assert GB_PER_S[CPU] / 1.7 < fit.gb_per_s < GB_PER_S[CPU]
        assert fit.floor_ms < FLOOR_MS[CPU]


def test_loading_is_always_quicker_than_computing() -> None:
    """As vLLM loads, no measured prefill is within a factor of six of the load of its tokens."""
    compared = list(command.loads_beside_prefills(KEPT, read_file(command.KERNELS).points))
    assert {name for name, *_ in compared} == set(KEPT.shapes)
    assert all(point.ms > 6 * load_ms for _, _, point, load_ms in compared)


def test_what_an_engine_adds_decides_below_which_length_loads_are_slower() -> None:
    """At the length that is told, computing and loading take as long; without anything added it is a few tokens, and
    with the router's first guess some hundreds."""
    kernels = read_file(command.KERNELS)
    for name, tokens in command.even_tokens(KEPT, kernels, 10.0).items():
        load_ms = fits(KEPT.shapes[name].way, load=True)[name].ms(tokens) + 10.0
        assert load_ms == pytest.approx(kernels.fits[name]["prefill"]["token_ms"] * tokens)
        assert 200 < tokens < 700
    assert all(tokens < 32 for tokens in command.even_tokens(KEPT, kernels, 0.0).values())


def test_a_load_hardly_slows_decoding() -> None:
    """By the copy engines steps take less than 6 % longer and by vLLM's kernel 12 %, as the simulated engine's loads
    that slow nothing rely on; with nothing beside them they take as long as alone."""
    for traffic, most in (("none", 1.01), ("load whole", 1.06), ("load blocks", 1.06), ("load kernel", 1.12)):
        rows = beside(traffic, "decode")
        assert len(rows) == len(KEPT.shapes)
        assert all(0.99 < row.ratio < most for row in rows)


def test_the_page_has_every_shape_and_way() -> None:
    """The page's tables have a row for each way, and columns for each shape."""
    text = page.transfers_block()
    for fit in KEPT.fits:
        assert f"| {fit.way} |" in text
    assert all(text.count(name) >= 3 for name in KEPT.shapes)


def broken(**changed: Any) -> str:
    """The kept file with some of it changed."""
    return json.dumps(json.loads(command.TRANSFERS.read_text()) | changed)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is not a result of"), ('{"rows": []}', "is not a result of"), (broken(fits=[]), "no fits")],
)
def test_another_file_is_told_from_one_of_transfers(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no such file ends with 2 and says so; so does one that is not there."""
    path = tmp_path / "transfers.json"
    assert command.main([str(path)]) == 2
    path.write_text(text)
    capsys.readouterr()
    assert command.main([str(path)]) == 2
    assert said in capsys.readouterr().err
