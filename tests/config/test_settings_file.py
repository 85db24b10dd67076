"""A settings file that says a thing twice, or says very much."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from router.cli.config_loader import load
from router.config import files
from router.config.files import read_at_most
from tests.config.test_settings import problems, yaml_file


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
    (said,) = [each for each in problems(yaml_file(tmp_path, text)) if "is duplicated" in each]
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


def pipe(folder: Path) -> Path:
    """A named pipe that nobody has opened."""
    path = folder / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.promise("A file that the settings name and that cannot be read to its end holds nothing up.", "admin")
@pytest.mark.parametrize("writer", [False, True])
def test_a_pipe_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: bool) -> None:
    """A pipe without a writer, and one whose writer never closes it: an error that names the file, within seconds."""
    monkeypatch.setattr(files, "READ_S_MAX", 0.05)
    path = pipe(tmp_path)
    number = os.open(path, os.O_RDWR) if writer else -1
    try:
        if writer:
            os.write(number, b"- {name: a")
        with pytest.raises(TimeoutError, match="is a pipe that was not closed") as raised:
            read_at_most(path, 1 << 20)
        assert raised.value.filename == str(path)
    finally:
        if writer:
            os.close(number)


def test_a_pipe_with_an_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `serve --config <(command)` gives one: whatever the pieces in which it comes, and no further than allowed."""
    monkeypatch.setattr(files, "READ_S_MAX", 60)
    path = pipe(tmp_path)

    def write() -> None:
        with suppress(BrokenPipeError), path.open("wb", buffering=0) as stream:
            for piece in (b"log: {level: ", b"warning", b"}\n"):
                stream.write(piece)
                time.sleep(0.01)

    for bytes_max, read in ((1 << 20, b"log: {level: warning}\n"), (3, b"log:")):
        writing = threading.Thread(target=write, daemon=True)
        writing.start()
        assert read_at_most(path, bytes_max) == read
        writing.join(60)


@pytest.mark.promise("A file that the settings name and that cannot be read to its end holds nothing up.", "admin")
@pytest.mark.parametrize(
    "line",
    [
        "",
        "auth: {keys_file: FILE}",
        "admin: {token_file: FILE}",
        "listen: {tls_certificate: FILE}",
        "upstream: {tls_ca: FILE}",
        "prewarm: {prefixes_file: FILE}",
        "discovery: {source: kubernetes, kubeconfig: FILE}",
    ],
)
def test_a_settings_problem_names_the_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """The settings file itself, and each file that settings name: a pipe that nobody writes to is a problem."""
    monkeypatch.setattr(files, "READ_S_MAX", 0.05)
    path = pipe(tmp_path)
    file = yaml_file(tmp_path, line.replace("FILE", str(path))) if line else path
    (said,) = [each for each in problems(file) if "is a pipe" in each]
    assert str(path) in said
