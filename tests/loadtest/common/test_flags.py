"""Numbers on the instruments' command lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from loadtest.common import flags


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (flags.whole(1, 64), "64", 64),
        (flags.whole(0), "0", 0),
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
        (flags.whole(1, 64), "65", "'65' is not a whole number from 1 to 64"),
        (flags.whole(1), "0", "'0' is not a whole number over 0"),
        (flags.whole(1), "-3", "'-3' is not a whole number over 0"),
        (flags.whole(1), "1.5", "'1.5' is not a whole number over 0"),
        (flags.number(1), "1.01", "'1.01' is not a number from 0 to 1"),
        (flags.number(), "nan", "'nan' is not a number from 0"),
        (flags.number(), "inf", "'inf' is not a number from 0"),
        (flags.number(), "soon", "'soon' is not a number from 0"),
        (flags.positive(), "0", "'0' is not over 0"),
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
