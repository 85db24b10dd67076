"""Settings of the store: their problems, and the address that they make."""

from __future__ import annotations

import importlib.util
import re

from router.config import secrets
from router.config.schema import PeeringSettings
from router.config.tls import replica_problems
from router.peering.store_url import BadAddress, StoreAddress, parse_address

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ROUTER = re.compile(r"[!-~]{1,200}")
_NEED_A_STORE = ("password", "password_file", "tls_ca", "tls_certificate", "tls_key")


def is_shared(shared: PeeringSettings) -> bool:
    """True if a store is configured."""
    return bool(shared.redis_url or shared.redis_url_file)


def address_of(shared: PeeringSettings) -> StoreAddress:
    """Return the store's address. Raises BadAddress, OSError and UnicodeDecodeError."""
    password = secrets.read(shared.password, shared.password_file)
    return parse_address(secrets.read(shared.redis_url, shared.redis_url_file), password)


def shared_problems(shared: PeeringSettings) -> list[str]:
    """Return the problems of these settings; no line has a password or a URL."""
    problems = secrets.problems("peering.redis_url", shared.redis_url, shared.redis_url_file, chars_min=1)
    problems += secrets.problems("peering.password", shared.password, shared.password_file, chars_min=1)
    problems += replica_problems(shared.tls_ca, shared.tls_certificate, shared.tls_key, "peering")
    if not _NAME.fullmatch(shared.fleet):
        problems.append(f"'peering.fleet': '{shared.fleet:.64}' is not up to 64 letters, digits and . _ -")
    if shared.router_id and not _ROUTER.fullmatch(shared.router_id):
        problems.append("'peering.router_id': must be up to 200 printable ASCII characters without a space")
    if problems:
        return problems
    if not is_shared(shared):
        named = [name for name in _NEED_A_STORE if getattr(shared, name)]
        return [f"'peering.{name}': needs 'peering.redis_url' or 'peering.redis_url_file' too" for name in named]
    where = "peering.redis_url_file" if shared.redis_url_file else "peering.redis_url"
    try:
        address = address_of(shared)
    except BadAddress as error:
        return [f"'{where}': {error}"]
    if not address.tls and (shared.tls_ca or shared.tls_certificate):
        problems.append(
            f"'{where}': must begin with rediss where 'peering.tls_ca' or 'peering.tls_certificate' is given"
        )
    if any(importlib.util.find_spec(name) is None for name in ("redis", "hiredis")):
        problems.append(f"'{where}': needs the client of Redis: pip install '.[shared]'")
    return problems
