"""A settings file that says a thing twice, or says very much."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.commands.loading import load
from tests.settings.test_settings import problems, yaml_file


@pytest.mark.finding("2026-11-28/6")
@pytest.mark.promise("A settings key that is given twice is an error.", "admin")
@pytest.mark.parametrize(
    "text",
    [
        "auth: {keys_file: keys.yaml}\nlog: {level: info}\nauth: {receipts: true}\n",
        "listen: {port: 1, port: 2}\n",
        '"auth": {}\nauth: {}\n',
        "listen.port: 1\nlisten: {port: 2}\n",
        "x: &x {port: 1}\nlisten: {<<: *x, <<: *x}\n",
    ],
)
def test_a_key_that_is_given_twice_is_a_problem(tmp_path: Path, text: str) -> None:
    """At any level, and in either spelling: the first one would be lost, and with it `auth.keys_file`, say."""
    (said,) = [each for each in problems(yaml_file(tmp_path, text)) if "is given twice" in each]
    assert said


def test_a_merge_may_be_overridden(tmp_path: Path) -> None:
    """YAML's `<<` is there for that."""
    path = yaml_file(tmp_path, "listen: {<<: {port: 1, host: a}, port: 2}\n")
    assert (load(path).listen.port, load(path).listen.host) == (2, "a")


@pytest.mark.finding("2026-11-28/23")
def test_a_large_file_is_a_problem(tmp_path: Path) -> None:
    """It is not read to its end."""
    large = yaml_file(tmp_path, "replicas:\n" + "- http://10.0.0.1:8000\n" * 200_000)
    assert problems(large) == [f"{large}: has more than 2 MiB"]


@pytest.mark.finding("2026-11-28/23")
def test_many_problems_are_cut_short(tmp_path: Path) -> None:
    """Unknown names are listed 20 times, all else 200 times, and what is left out is counted."""
    unknown = problems(yaml_file(tmp_path, "".join(f"key{n}: 1\n" for n in range(5_000))))
    assert len(unknown) == 21
    assert unknown[-1] == "and 4,980 more unknown settings"
    assert len(problems(env={f"WARMROUTE_X{n}": "" for n in range(100)})) == 21
    wrong = problems(yaml_file(tmp_path, "replicas:\n" + "- ftp://host\n" * 5_000))
    assert len(wrong) <= 201
