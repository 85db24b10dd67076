"""TLS of the picker. Its files are looked at when a gateway connects, so that a renewed certificate is shown then."""

from __future__ import annotations

import logging
import time
from typing import Any

import grpc

from router.settings.contents import PEM_BYTES_MAX, content

log = logging.getLogger(__name__)
LOOK_S = 5.0  # least time between two looks at the files


def credentials(certificate: str, key: str, client_ca: str) -> Any | None:  # noqa: ANN401 - grpc ships no types
    """Credentials of a server; None without a certificate. A `key` of "" means that `certificate` has the key. With a
    `client_ca` gateways must show a certificate signed by it. Raises OSError."""
    if not certificate:
        return None
    files = (certificate, key or certificate, client_ca)
    seen = _read(files)
    looked_s = time.monotonic()

    def fetch() -> Any | None:  # noqa: ANN401 - likewise
        """The new configuration; None where nothing has changed."""
        nonlocal seen, looked_s
        if time.monotonic() - looked_s < LOOK_S:
            return None
        looked_s = time.monotonic()
        try:
            found = _read(files)
        except OSError:
            log.warning("the picker's certificate cannot be read again", extra={"event": "certificate_unreadable"})
            return None
        if found == seen:
            return None
        seen = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(_configuration(seen), fetch, bool(client_ca))


def _read(files: tuple[str, str, str]) -> tuple[bytes, bytes, bytes]:
    chain, key, ca = (content(file, PEM_BYTES_MAX) if file else b"" for file in files)
    return chain, key, ca


def _configuration(pem: tuple[bytes, bytes, bytes]) -> Any:  # noqa: ANN401 - likewise
    chain, key, ca = pem
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=ca or None)
