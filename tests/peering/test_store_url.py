"""URLs of stores, and the settings around them: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from router.cli.config_loader import load
from router.config.schema import SettingsError
from router.peering.store_url import BadAddress, StoreAddress, StoreKind, parse_address, url_problem


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", StoreAddress(StoreKind.SINGLE, (("h", 6379),))),
        ("valkey://h:7/3", StoreAddress(StoreKind.SINGLE, (("h", 7),), database=3)),
        ("rediss://u:p%40w@h", StoreAddress(StoreKind.SINGLE, (("h", 6379),), True, "u", "p@w")),
        ("redis://:p@[::1]:7", StoreAddress(StoreKind.SINGLE, (("::1", 7),), password="p")),
        (
            "redis+sentinel://a,b:1/main/2?sentinel_password=x",
            StoreAddress(
                StoreKind.SENTINEL, (("a", 26379), ("b", 1)), database=2, service="main", sentinel_password="x"
            ),
        ),
        ("valkeys+cluster://a:1,b", StoreAddress(StoreKind.CLUSTER, (("a", 1), ("b", 6379)), True)),
    ],
)
def test_what_urls_mean(url: str, address: StoreAddress) -> None:
    """Each form, with its defaults; a password that is given beside goes before; what people are shown has none."""
    assert parse_address(url) == address
    assert parse_address(url, "other").password == "other"
    assert "p@w" not in f"{parse_address(url)} {parse_address(url)!r}"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("h:6379", "must begin with"),
        ("http://h", "must begin with"),
        ("redis+proxy://h", "must begin with"),
        ("redis://", "has no host"),
        ("redis://h:x", "an invalid host or port"),
        ("redis://127.0.0.1:0", "has the invalid port 0"),
        ("redis+cluster://a,b:0", "has the invalid port 0"),
        ("redis://h/x", "number of a database"),
        ("redis://h/1/2", "number of a database"),
        ("redis://a,b", "several hosts"),
        ("redis+sentinel://a", "name of the Sentinel service"),
        ("redis+cluster://a/1", "only database 0"),
        ("redis://h?x=1", "only the options"),
        ("redis+cluster://" + "a," * 40 + "a", "41 hosts"),
    ],
)
def test_what_urls_must_not_be(url: str, why: str) -> None:
    """Each mistake is told in words of its own."""
    with pytest.raises(BadAddress, match=why):
        parse_address(url)


@given(st.text(max_size=60))
def test_no_text_breaks_it(text: str) -> None:
    """Any text is an address or a BadAddress, and what is said of it never has what stands before the @."""
    for url in (text, f"redis://{text}", f"redis+sentinel://{text}", f"redis://u:s3cret@{text}"):
        assert "s3cret" not in url_problem(url)


def test_settings_are_checked(tmp_path: Path) -> None:
    """Mistakes are found before the start, without a password in what is said; a URL in a file is as good as one in the
    settings."""
    file = tmp_path / "url"
    file.write_text("redis://:s3cret@h\n")
    assert load(overrides={"peering.redis_url_file": str(file)}).peering.redis_url_file
    for settings, said in (
        ({"peering.redis_url": "redis://:s3cret@h/x"}, "'peering.redis_url'"),
        ({"peering.redis_url": "redis://h", "peering.redis_url_file": str(file)}, "set only one of them"),
        ({"peering.redis_url": "redis://h", "peering.tls_ca": str(file)}, "'peering.tls_ca'"),
        ({"peering.redis_url": "redis://h", "peering.fleet": "a b"}, "'peering.fleet'"),
        ({"peering.redis_url": "redis://h", "peering.router_id": "a b"}, "'peering.router_id'"),
        ({"peering.redis_url": "redis://h", "peering.timeout_s": 5}, "above 0, at most 0.5"),
        ({"peering.redis_url": "redis://127.0.0.1:0"}, "has the invalid port 0"),
        ({"peering.redis_url_file": str(tmp_path / "none")}, "'peering.redis_url_file'"),
    ):
        with pytest.raises(SettingsError) as refused:
            load(overrides=settings)
        assert said in str(refused.value)
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("name", ["password", "password_file", "tls_ca", "tls_certificate"])
def test_what_is_for_a_store_needs_one(tmp_path: Path, name: str) -> None:
    """A password or a file of TLS without a URL is a mistake: the router would share nothing, and not say so."""
    file, value = tmp_path / "file", "s3cret"
    if name != "password":
        value = str(file)
        file.write_text("s3cret")
    if name.startswith("tls"):
        trustme.CA().issue_cert("router").private_key_and_cert_chain_pem.write_to_path(value)
    with pytest.raises(SettingsError) as refused:
        load(overrides={f"peering.{name}": value})
    assert str(refused.value) == f"'peering.{name}': needs 'peering.redis_url' or 'peering.redis_url_file' too"


def test_what_shares_nothing_imports_nothing() -> None:
    """Without a store a whole router imports no client of Redis."""
    script = (
        "import asyncio, sys\n"
        "from router.router_server import RouterServer\n"
        "from router.cli.config_loader import load_config\n"
        "async def main():\n"
        "    over = {'listen.port': 0, 'listen.admin_port': 0, 'listen.lame_duck_s': 0}\n"
        "    async with RouterServer(load_config(overrides=over)):\n"
        "        print(sorted(name for name in sys.modules if name.split('.')[0] in ('redis', 'hiredis')))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
