"""Numbers on the instruments' command lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.common import flags


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (flags.integer(1, 64), "64", 64),
        (flags.integer(0), "0", 0),
        (flags.number(1), "1", 1.0),
        (flags.number(), "0", 0.0),
        (flags.positive(), "1e-3", 0.001),
    ],
)
def test_what_is_allowed_is_taken(kind: Callable[[str], Any], text: str, value: float) -> None:
    """The least and the most are allowed themselves."""
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (flags.integer(1, 64), "65", "'65' is not an integer from 1 to 64"),
        (flags.integer(1), "0", "'0' is not an integer over 0"),
        (flags.integer(1), "-3", "'-3' is not an integer over 0"),
        (flags.integer(1), "1.5", "'1.5' is not an integer over 0"),
        (flags.number(1), "1.01", "'1.01' is not a number from 0 to 1"),
        (flags.number(), "nan", "'nan' is not a number from 0"),
        (flags.number(), "inf", "'inf' is not a number from 0"),
        (flags.number(), "soon", "'soon' is not a number from 0"),
        (flags.positive(), "0", "'0' is not above 0"),
        (flags.positive(100), "101", "'101' is not a number from 0 to 100"),
    ],
)
def test_what_is_not_is_said(
    kind: Callable[[str], Any], text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the flag, what was given and what was expected; the exit code is 2."""
    parser = argparse.ArgumentParser(prog="x")
    parser.add_argument("--n", type=kind)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([f"--n={text}"])
    assert f"argument --n: {said}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("instrument", "flag", "value"),
    [
        ("replay", "--spread-s", "-3"),
        ("replay", "--think-max-s", "-1"),
        ("replay", "--ramp-s", "nan"),
        ("routers", "--requests", "0"),
        ("routers", "--time-scale", "0"),
        ("faces", "--slack", "-1"),
        ("faults", "--soak", "-1"),
        ("overhead", "--slack", "inf"),
        ("sizing", "--seconds", "0"),
        ("sidechannel", "--probes", "0"),
        ("story", "--time-scale", "-1"),
    ],
)
def test_a_number_that_means_nothing_is_refused_before_anything_starts(
    instrument: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No instrument begins with less than nothing: it names the flag, and exits with 2."""
    with pytest.raises(SystemExit) as ended:
        main([instrument, f"{flag}={value}"])
    assert ended.value.code == 2
    assert f"argument {flag}" in capsys.readouterr().err
