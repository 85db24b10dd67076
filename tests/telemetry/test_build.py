"""What the router says of its own build: on the command line, in the log, and on the page of metrics."""

from __future__ import annotations

import logging
import platform
from pathlib import Path

import pytest

from router import __version__
from router.cli.main import main
from router.core.types import requests
from router.telemetry.build import Build, build, log_start
from tests.telemetry.counted import metrics

NATIVE = not str(requests.__file__).endswith(".py")
HASH = "0123456789abcdef0123456789abcdef01234567"


def test_the_build_is_the_one_that_runs() -> None:
    """Version and Python are those of this process, and `native` is what the modules of the core are."""
    it = build()
    assert (it.version, it.native, it.python) == (__version__, NATIVE, platform.python_version())


@pytest.mark.parametrize(
    ("said", "commit"),
    [(HASH + "\n", HASH), (HASH, HASH), ("unknown\n", ""), ("", ""), ("a" * 65, ""), ("é\n", ""), (HASH.upper(), "")],
)
def test_a_commit_is_a_hash_or_nothing(said: str, commit: str, tmp_path: Path) -> None:
    """The file of the image holds a hash; whatever else it holds is no commit, and never a label's value."""
    file = tmp_path / "commit.txt"
    file.write_text(said, encoding="utf-8")
    assert build(file).commit == commit


def test_no_file_is_no_commit(tmp_path: Path) -> None:
    """A clone has none, and nothing is asked of git."""
    assert build(tmp_path / "absent.txt").commit == ""


def test_the_command_line_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` is one line that a report of a bug can quote."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"warmroute {build()}\n"
    assert str(Build("1.2.3", True, "abc", "3.12.4")) == "1.2.3 (native code, Python 3.12.4, commit abc)"
    assert str(Build("1.2.3", False, "", "3.12.4")) == "1.2.3 (pure Python, Python 3.12.4)"


def test_the_page_of_metrics_says_it() -> None:
    """One series, so that a fleet of routers can be told apart by build."""
    it = build()
    native = "true" if it.native else "false"
    labels = f'commit="{it.commit}",native="{native}",python="{it.python}",version="{it.version}"'
    [line] = [line for line in metrics().page().decode().splitlines() if line.startswith("warmroute_build_info{")]
    got, value = line.removeprefix("warmroute_build_info{").split("} ")
    assert sorted(got.split(",")) == labels.split(",")
    assert value == "1.0"


def test_the_log_says_it(caplog: pytest.LogCaptureFixture) -> None:
    """The line of the start has the same fields, and where the page is."""
    with caplog.at_level(logging.INFO):
        log_start("http://127.0.0.1:8001")
    [record] = caplog.records
    assert record.__dict__["event"] == "started"
    assert record.__dict__["fields"] == {
        "version": __version__, "native": NATIVE, "commit": build().commit, "python": platform.python_version(),
        "dashboard": "http://127.0.0.1:8001/dashboard",
    }  # fmt: skip
