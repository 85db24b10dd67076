"""What the command line says to those who mistype it, and to those who ask for help."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from loadtest.__main__ import main as loadtest
from router.cli.main import main
from router.config.schema import Settings
from router.control.wiring import warn_if_unauthenticated


@pytest.mark.parametrize(
    ("line", "usage", "said"),
    [
        ("serve --prot 9000", "serve", "unknown flag '--prot'; the nearest is '--port'"),
        ("serve --admin-prt=1 --replca x", "serve", "unknown flag '--replca'; the nearest is '--replica'"),
        ("serve --log-level debug", "serve", "'--log-level'; it is a setting: --set log.level=VALUE"),
        ("serve --routing.policy warm", "serve", "it is a setting: --set routing.policy=VALUE"),
        ("serve --bananas", "serve", "unknown flag '--bananas'\n"),
        ("serve --replicas http://a", "serve", "unknown flag '--replicas'; use --replica URL, once for each engine"),
        ("serve --worker-urls=http://a", "serve", "'--worker-urls'; use --replica URL, once for each engine"),
        ("serve --cache-threshold 0.5", "serve", "'--cache-threshold'; not needed: the price"),
        ("serve --workers 2", "serve", "unknown flag '--workers'; listen.workers was removed: start several routers"),
        ("serve http://a:1", "serve", "unexpected argument 'http://a:1'; warmroute serve --help lists the arguments"),
        ("check-config a b", "check-config", "unexpected argument 'b'"),
        ("top --ulr x", "top", "unknown flag '--ulr'; the nearest is '--url'"),
        ("serv", "", "unknown command 'serv'; the nearest is 'serve'"),
        ("bananas", "", "unknown command 'bananas'\n"),
    ],
)
def test_a_typing_error_gets_the_right_usage_and_a_hint(
    line: str, usage: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usage is that of the command, the status is 2, and what was meant is named, or nothing."""
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert shown.startswith(f"usage: warmroute {usage}".rstrip())
    assert said in shown


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("serve", ["warmroute serve --replica http://", "WARMROUTE_LISTEN_PORT", "--set listen.port=", "SIGHUP"]),
        ("config", ["Secrets are masked", "--replica", "warmroute config --config warmroute.yaml"]),
        ("check-config", ["FILE", "YAML file of settings", "warmroute check-config warmroute.yaml"]),
    ],
)
def test_help_has_an_example_and_the_environment(
    command: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever asks for help can go on without a document, and in a terminal of 100 columns."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert all(words in shown for words in said)
    assert max(map(len, shown.splitlines())) <= 100


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "TAKEN", "--admin-port", "0"], "set another port with --port N (listen.port)"),
        (["--port", "0", "--admin-port", "TAKEN"], "set another port with --admin-port N (listen.admin_port)"),
        (["--port", "TAKEN", "--admin-port", "0", "--set", "listen.reuse_port=true"], "(listen.port)"),
        (["--host", "192.0.2.1", "--port", "0", "--admin-port", "0"], "(listen.host)"),
    ],
)
@pytest.mark.usefixtures("bare_environment")
def test_a_port_that_is_taken_is_told_with_its_own_setting(flags: list[str], said: str, taken: int) -> None:
    """Which of the two listeners has no place, and what mends it."""
    port = str(taken)
    command = [sys.executable, "-m", "router", "serve", *(port if flag == "TAKEN" else flag for flag in flags)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert re.search(rf"^warmroute: cannot listen on \S+:({port}|0): ", ended.stderr, re.MULTILINE)
    assert said in ended.stderr


def test_an_unknown_instrument_is_said_to_be_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """The list of instruments is shown, and what was meant."""
    assert loadtest(["simulat"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("usage: python -m loadtest INSTRUMENT")
    assert shown.endswith("unknown instrument 'simulat'; the nearest is 'simulate'\n")


@pytest.mark.parametrize("name", ["replay", "simulate"])
def test_an_instrument_is_called_as_it_is_started(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Usage names the command that was typed."""
    with pytest.raises(SystemExit):
        loadtest([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: python -m loadtest {name}")


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({"listen.host": "0.0.0.0"}, 1),
        ({"listen.host": "::"}, 1),
        ({"listen.host": "127.0.0.1"}, 0),
        ({"listen.host": "localhost"}, 0),
        ({"listen.host": "0.0.0.0", "auth.keys_file": "KEYS"}, 0),
        ({"listen.host": "0.0.0.0", "listen.tls_client_ca": "ca.pem"}, 0),
    ],
)
def test_a_router_that_is_open_to_all_says_so_once(
    given: dict[str, str], warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of warning where others can reach the router and neither keys nor certificates are asked for."""
    settings = Settings()
    for key, value in given.items():
        section, name = key.split(".")
        settings = replace(settings, **{section: replace(getattr(settings, section), **{name: value})})
    warn_if_unauthenticated(settings)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
