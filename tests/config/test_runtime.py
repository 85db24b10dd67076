"""Runtime configuration: each file is read once, and nothing changes before everything is checked."""

from __future__ import annotations

import io
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trustme

from router.config.runtime import resolve
from router.config.schema import AdminSettings, AuthSettings, Settings, SettingsError
from tests.config.reloaded import in_force, running
from tests.support.fakes import FakeEngine
from tests.support.keyring import Keyring


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """Counts how often each file of the test's folder is opened, by name."""
    counts, real, plain = Counter[str](), os.open, io.open

    def note(path: Any) -> None:
        if isinstance(path, str | os.PathLike) and Path(path).parent == tmp_path:
            counts[Path(path).name] += 1

    def counted(path: Any, *rest: Any, **more: Any) -> int:
        note(path)
        return real(path, *rest, **more)

    def counted_plain(path: Any, *rest: Any, **more: Any) -> Any:
        note(path)
        return plain(path, *rest, **more)

    monkeypatch.setattr(os, "open", counted)
    monkeypatch.setattr(io, "open", counted_plain)  # pathlib calls it
    return counts


@pytest.mark.promise("A reload reads the settings file, and each file that it names, once.", "admin")
async def test_a_reload_reads_each_file_once(tmp_path: Path, engine: FakeEngine, opens: Counter[str]) -> None:
    """Settings, keys, secrets, certificates and prefixes are opened once by a reload, also if a changed setting has to
    wait for a restart."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    texts = {"token": "t" * 16, "secret": "s" * 32, "key": "k" * 16, "prefixes": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    Keyring(tmp_path, acme={})
    named = {
        "auth__keys_file": "keys.yaml", "auth__secret_file": "secret", "admin__token_file": "token",
        "upstream__api_key_file": "key", "upstream__tls_ca": "ca.pem", "upstream__tls_certificate": "own.pem",
        "listen__tls_certificate": "own.pem", "listen__tls_client_ca": "ca.pem",
        "extproc__tls_certificate": "own.pem", "prewarm__prefixes_file": "prefixes",
    }  # fmt: skip
    settings = {key: str(tmp_path / name) for key, name in named.items()}
    async with running(tmp_path / "settings", engine, **settings) as router:
        for changed in ({}, {"routing__policy": "round_robin"}):
            await router.set(engine, **settings, **changed)
            opens.clear()
            await router.reloader.reload()
            assert await router.metric('warmroute_reloads_total{result="refused"}') == 0
            assert opens == Counter(["settings", *set(named.values())])


@pytest.mark.promise("Broken settings never take effect, not in part.", "admin")
async def test_a_certificate_that_cannot_be_loaded_changes_nothing(tmp_path: Path, engine: FakeEngine) -> None:
    """No part takes other settings, although only connections to replicas need the certificate."""
    pem, token = tmp_path / "own.pem", tmp_path / "token"
    trustme.CA().issue_cert("router").private_key_and_cert_chain_pem.write_to_path(str(pem))
    token.write_text("t" * 16)
    settings = {"upstream__tls_certificate": str(pem), "admin__token_file": str(token)}
    async with running(tmp_path / "settings", engine, **settings) as router:
        before = in_force(router)
        pem.write_text("no certificate")
        token.write_text("u" * 16)
        await router.set(engine, **settings, upstream__retries_max=7, listen__cors_origins=["http://a"])
        assert in_force(router) == before


def test_every_problem_of_files_is_reported(tmp_path: Path) -> None:
    """The first problem hides no other."""
    missing = str(tmp_path / "missing")
    settings = Settings(auth=AuthSettings(keys_file=missing), admin=AdminSettings(token_file=missing))
    with pytest.raises(SettingsError) as raised:
        resolve(settings)
    assert [problem.partition(":")[0] for problem in raised.value.problems] == [
        "'auth.keys_file'",
        "'admin.token_file'",
    ]
