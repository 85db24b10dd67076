"""Keys files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from router.config.api_keys import entry_of, make_key

SECRET = "a-secret-of-more-than-thirty-two-characters"
ADMIN = "an-admin-token-of-tests"


class Keyring:
    """Keys by tenant, and the file that they are in."""

    def __init__(self, path: Path, **tenants: dict[str, Any]) -> None:
        self.file = path / "keys.yaml"
        self.keys = {tenant: make_key() for tenant in tenants}
        entries = [_entry(self.keys[tenant], tenant, fields) for tenant, fields in tenants.items()]
        self.file.write_text("".join(entries), encoding="utf-8")

    def of(self, tenant: str) -> dict[str, str]:
        """Headers that show this tenant's key."""
        return bearer(self.keys[tenant])

    @property
    def settings(self) -> dict[str, str]:
        """For a router that asks for these keys."""
        return {"auth__keys_file": str(self.file), "auth__secret": SECRET}


def _entry(key: str, tenant: str, fields: dict[str, Any]) -> str:
    return entry_of(key, tenant, **fields)


def bearer(key: str) -> dict[str, str]:
    """The header as OpenAI's clients send it."""
    return {"Authorization": f"Bearer {key}"}
