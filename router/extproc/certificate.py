"""TLS of the picker: each new handshake uses the certificate that was read last."""

from __future__ import annotations

from typing import Any

import grpc

from router.config.tls import Pem


class PickerCertificate:
    """Certificate of the picker. `pem` may be replaced at any time, but not by None."""

    def __init__(self, pem: Pem) -> None:
        self.pem = self._shown = pem

    def credentials(self) -> Any:  # noqa: ANN401 - grpc ships no types
        """Return the credentials of a server."""
        return grpc.dynamic_ssl_server_credentials(_configuration(self.pem), self._get_new_config, bool(self.pem[2]))

    def _get_new_config(self) -> Any | None:  # noqa: ANN401 - likewise
        """Return the configuration if it is new. A thread of gRPC's calls this at each handshake."""
        pem = self.pem
        if pem == self._shown:
            return None
        self._shown = pem
        return _configuration(pem)


def _configuration(pem: Pem) -> Any:  # noqa: ANN401 - likewise
    chain, key, ca = pem
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=ca or None)
