"""Origins of pages: what browsers send, and what is wrong with what somebody writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.cli.config_loader import load
from router.config.origins import origin_of, origin_problems
from router.config.schema import SettingsError

GOOD = {
    "*": "*",
    "null": "null",
    "https://chat.example.com": "https://chat.example.com",
    "https://Chat.Example.com:443": "https://chat.example.com",
    "http://localhost:80": "http://localhost",
    "http://localhost:3000": "http://localhost:3000",
    "http://[::1]:3000": "http://[::1]:3000",
    "chrome-extension://abcdefgh": "chrome-extension://abcdefgh",
    "tauri://localhost": "tauri://localhost",
    "app://.": "app://.",
}
BAD = [
    "", "chat.example.com", "localhost:3000", "https://", "https://a/", "https://a/b", "https://a?b", "https://u@a",
    "https://*.example.com", "https://a b", "https://a:0", "https://a:65536", "https://a:x", "//a", "https://bücher.de",
    "https://a,https://b", "https://a\r\nx: y", "NULL",
]  # fmt: skip


@pytest.mark.parametrize(("given", "sent"), GOOD.items())
def test_origins_are_what_browsers_send(given: str, sent: str) -> None:
    """In small letters, and without the port that is the scheme's own."""
    assert origin_of(given) == sent
    assert origin_problems([given]) == []


@pytest.mark.parametrize("given", BAD)
def test_a_bad_origin_is_named(given: str) -> None:
    """With an example of a good one."""
    (problem,) = origin_problems([given])
    assert problem.startswith(f"'listen.cors_origins': '{given}' is not an origin such as https://chat.example.com")


def test_a_star_stands_alone_and_nothing_is_given_twice() -> None:
    """Credentials are for named origins only."""
    assert len(origin_problems(["*", "https://a"])) == 1
    assert len(origin_problems(["https://a", "https://A:443"])) == 1
    assert origin_problems([]) == []


def test_the_settings_are_checked(tmp_path: Path) -> None:
    """A file with a bad origin is refused; in the environment origins stand behind commas."""
    file = tmp_path / "warmroute.yaml"
    file.write_text('listen:\n  cors_origins: ["https://a/", "*"]\n', encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load(file, env={})
    assert len(caught.value.problems) == 2
    env = {"WARMROUTE_LISTEN_CORS_ORIGINS": "https://a,http://localhost:3000"}
    assert load(None, env=env).listen.cors_origins == ("https://a", "http://localhost:3000")
    assert load(None, env={"WARMROUTE_LISTEN_CORS_ORIGINS": "*"}).listen.cors_origins == ("*",)
