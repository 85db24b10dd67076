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


def is_shared(peering: PeeringSettings) -> bool:
    """True if a store is configured."""
    return bool(peering.redis_url or peering.redis_url_file)


def address_of(peering: PeeringSettings) -> StoreAddress:
    """Return the store's address. Raises BadAddress, OSError and UnicodeDecodeError."""
    password = secrets.read(peering.password, peering.password_file)
    return parse_address(secrets.read(peering.redis_url, peering.redis_url_file), password)


def shared_problems(peering: PeeringSettings) -> list[str]:
    """Return the problems of these settings; no line has a password or a URL."""
    problems = secrets.problems("peering.redis_url", peering.redis_url, peering.redis_url_file, chars_min=1)
    problems += secrets.problems("peering.password", peering.password, peering.password_file, chars_min=1)
    problems += replica_problems(peering.tls_ca, peering.tls_certificate, peering.tls_key, "peering")
    if not _NAME.fullmatch(peering.fleet):
        problems.append(f"'peering.fleet': '{peering.fleet:.64}' must have up to 64 letters, digits and . _ -")
    if peering.router_id and not _ROUTER.fullmatch(peering.router_id):
        problems.append("'peering.router_id': must be up to 200 printable ASCII characters without a space")
    if problems:
        return problems
    if not is_shared(peering):
        named = [name for name in _NEED_A_STORE if getattr(peering, name)]
        return [f"'peering.{name}': needs 'peering.redis_url' or 'peering.redis_url_file' too" for name in named]
    where = "peering.redis_url_file" if peering.redis_url_file else "peering.redis_url"
    try:
        address = address_of(peering)
    except BadAddress as error:
        return [f"'{where}': {error}"]
    if not address.tls and (peering.tls_ca or peering.tls_certificate):
        problems.append(f"'{where}': must begin with rediss if 'peering.tls_ca' or 'peering.tls_certificate' is set")
    if importlib.util.find_spec("redis") is None:
        problems.append(f"'{where}': needs the Redis client: pip install '.[shared]'")
    return problems
