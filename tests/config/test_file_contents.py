"""Contents of files that settings name."""

from __future__ import annotations

from pathlib import Path

import trustme

from router.config import file_contents, tls
from router.config.api_keys import Keys
from router.config.schema import ListenSettings
from tests.support.keyring import Keyring


def test_what_was_checked_is_what_is_handed_on(tmp_path: Path) -> None:
    """A file that changes while it is checked is noted as it was checked, whoever reads it again, and certificates
    can be loaded from what was noted when their files are gone."""
    ring, pem = Keyring(tmp_path, acme={}), tmp_path / "all.pem"
    trustme.CA().issue_cert("here").private_key_and_cert_chain_pem.write_to_path(pem)
    with file_contents.recording() as files:
        Keys.load(ring.file, isolate=False, receipts=False)
        assert not tls.listener_problems(ListenSettings(tls_certificate=str(pem), tls_client_ca=str(pem)))
        ring.file.write_text("- {")
        Keys.load(ring.file, isolate=False, receipts=False)
    assert files.keys() == {str(ring.file), str(pem)}
    before = file_contents.install(files)
    try:
        pem.unlink()
        assert "acme" in Keys.load(ring.file, isolate=False, receipts=False).tenants
        assert tls.listener_context(str(pem), str(pem), str(pem)) is not None
        tls.replica_context(str(pem), str(pem), "")
    finally:
        file_contents.install(before)
