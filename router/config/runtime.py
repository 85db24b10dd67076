"""Runtime configuration: settings, and the API keys, secrets and certificates in the files that they name.

`resolve` reads each file once, checks everything, and is the only step that may fail. Parts of the router take the
result at their construction, and again at a reload (`apply`), which therefore cannot fail.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from router.config import secrets, tls
from router.config.allowed_networks import allowed_problems, is_loopback
from router.config.api_keys import OFF, Keys, KeysError
from router.config.file_contents import recording
from router.config.schema import Settings, SettingsError
from router.core.dialects.tool_normalization import REPAIRS, in_order

TOKEN_CHARS_MIN, SECRET_CHARS_MIN = 16, 32


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Settings in force, with the contents of their files."""

    settings: Settings
    files: Mapping[str, bytes]  # contents by path, for parts that use a file later (file_contents.install)
    keys: Keys | None  # None: no key is required
    admin_token: str  # "": none
    upstream_key: str  # API key for replicas; "": none
    tenant_secret: str  # secret from which salts of tenants are derived; "": none
    listener_tls: ssl.SSLContext | None  # None: the main listener has no TLS
    replica_tls: ssl.SSLContext | None  # None: certificates of replicas are checked against the machine's authorities
    extproc_pem: tls.Pem | None  # None: the picker has no TLS


def resolve(settings: Settings) -> RuntimeConfig:
    """Read the files that the settings name, and check their contents. Blocks the thread. Raises SettingsError with
    every problem."""
    s = settings
    with recording() as files:
        problems: list[str] = []
        keys = _load_keys(s, problems)
        problems += _check_access(s, keys)
        problems += tls.listener_problems(s.listen)
        problems += tls.listener_problems(s.extproc, "extproc")
        problems += tls.replica_problems(s.upstream.tls_ca, s.upstream.tls_certificate, s.upstream.tls_key)
        if problems:
            raise SettingsError(problems)
        return RuntimeConfig(
            settings=s,
            files=files,
            keys=keys,
            admin_token=secrets.read(s.admin.token, s.admin.token_file),
            upstream_key=secrets.read(s.upstream.api_key, s.upstream.api_key_file),
            tenant_secret=secrets.read(s.auth.secret, s.auth.secret_file),
            listener_tls=tls.for_listener(s.listen),
            replica_tls=tls.for_replicas(s.upstream),
            extproc_pem=tls.read_pem(s.extproc),
        )


def _load_keys(settings: Settings, problems: list[str]) -> Keys | None:
    """Return the keys of the keys file; None without a file, or after adding its problems."""
    auth, insights = settings.auth, settings.insights
    if not auth.keys_file:
        return None
    try:
        return Keys.load(
            Path(auth.keys_file),
            isolate=auth.isolate,
            receipts=auth.receipts,
            normalize_tools=in_order(name for name in insights.normalize_tools if name in REPAIRS),
            history_policy=insights.history_policy,
        )
    except KeysError as error:
        problems += [f"'auth.keys_file': {problem}" for problem in error.problems]
        return None


def _check_access(settings: Settings, keys: Keys | None) -> list[str]:
    """Return the problems of tokens, secrets and addresses, and of settings that the keys contradict."""
    admin, auth, upstream = settings.admin, settings.auth, settings.upstream
    problems = secrets.problems("admin.token", admin.token, admin.token_file, chars_min=TOKEN_CHARS_MIN)
    problems += secrets.problems("auth.secret", auth.secret, auth.secret_file, chars_min=SECRET_CHARS_MIN)
    before, file = auth.secret_before, auth.secret_before_file
    problems += secrets.problems("auth.secret_before", before, file, chars_min=SECRET_CHARS_MIN)
    if (before or file) and not (auth.secret or auth.secret_file):
        problems.append("'auth.secret_before': needs 'auth.secret', the new secret")
    problems += secrets.problems("upstream.api_key", upstream.api_key, upstream.api_key_file, chars_min=1)
    problems += allowed_problems(admin.replicas_allowed)
    host = settings.listen.admin_host
    if host and not is_loopback(host) and not (admin.token or admin.token_file):
        problems.append(f"'listen.admin_host': '{host}' is not a loopback address, so 'admin.token' is required")
    isolated = auth.isolate
    if keys is not None:
        isolated = any(tenant.isolated for tenant in keys.tenants.values())
        if not settings.insights.enabled and any(t.history_policy != OFF for t in keys.tenants.values()):
            problems.append("'auth.keys_file': history_policy needs 'insights.enabled'")
    elif isolated and not auth.keys_file:
        problems.append("'auth.isolate': needs 'auth.keys_file', which defines the tenants")
    if isolated and not (auth.secret or auth.secret_file):
        problems.append("'auth.secret': is required for isolated tenants, to derive their salts")
    return problems
