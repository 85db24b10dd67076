"""TLS contexts for the main listener and for connections to replicas.

Each call uses its files as they were last accepted, so that one call applies a renewed certificate; existing
connections keep their negotiated parameters. TLS 1.2 is the least (RFC 8996).
"""

from __future__ import annotations

import ssl

from router.config.file_contents import PEM_BYTES_MAX, content, materialize_file
from router.config.schema import ExtProcSettings, ListenSettings, UpstreamSettings

Pem = tuple[bytes, bytes, bytes]  # certificate chain, private key, authorities of clients' certificates


def listener_context(certificate: str, key: str, client_ca: str) -> ssl.SSLContext | None:
    """Return the context of the main listener; None without a certificate. A `key` of "" means that `certificate` has
    the key. With a `client_ca` clients must present a certificate signed by it. Raises OSError (ssl.SSLError is one).
    """
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, certificate, key)
    if client_ca:
        _trust(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def replica_context(ca: str, certificate: str, key: str) -> ssl.SSLContext:
    """Return the context for replicas. A `ca` of "" means the machine's authorities, which take 20 ms and a megabyte to
    read. Raises OSError (ssl.SSLError is one)."""
    if ca:
        with materialize_file(ca) as path:
            context = ssl.create_default_context(cafile=path)
    else:
        context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate:
        _load_chain(context, certificate, key)
    return context


def renew(context: ssl.SSLContext | None, files: UpstreamSettings) -> None:
    """Apply the current certificate and authorities to new connections of a context for replicas. It continues to trust
    earlier authorities, because OpenSSL removes none. Raises OSError."""
    if context is None:
        return
    if files.tls_ca:
        _trust(context, files.tls_ca)
    if files.tls_certificate:
        _load_chain(context, files.tls_certificate, files.tls_key)


def for_listener(files: ListenSettings) -> ssl.SSLContext | None:
    """Return the main listener's context by the settings; None without a certificate. Raises OSError."""
    return listener_context(files.tls_certificate, files.tls_key, files.tls_client_ca)


def for_replicas(files: UpstreamSettings) -> ssl.SSLContext | None:
    """Return the context for replicas by the settings. None if no file is set: the machine's authorities are then read
    when they are needed. Raises OSError."""
    named = files.tls_ca or files.tls_certificate
    return replica_context(files.tls_ca, files.tls_certificate, files.tls_key) if named else None


def read_pem(files: ExtProcSettings) -> Pem | None:
    """Return the contents of the files, or None if no certificate is configured. Raises OSError."""
    if not files.tls_certificate:
        return None
    names = (files.tls_certificate, files.tls_key or files.tls_certificate, files.tls_client_ca)
    chain, key, ca = (content(file, PEM_BYTES_MAX) if file else b"" for file in names)
    return chain, key, ca


def listener_problems(files: ListenSettings | ExtProcSettings, section: str = "listen") -> list[str]:
    """Return the problems of a listener's files, by the names of their settings in this section."""
    certificate, key, client_ca = files.tls_certificate, files.tls_key, files.tls_client_ca
    if not certificate:
        named = [name for name, value in (("tls_key", key), ("tls_client_ca", client_ca)) if value]
        return [f"'{section}.{name}': needs '{section}.tls_certificate' too" for name in named]
    return _chain_problem(section, certificate, key) + _ca_problem(f"{section}.tls_client_ca", client_ca)


def replica_problems(ca: str, certificate: str, key: str, section: str = "upstream") -> list[str]:
    """Return the problems of the files for connections to replicas or other servers, by the names of their settings."""
    if key and not certificate:
        return [f"'{section}.tls_key': needs '{section}.tls_certificate' too"]
    return _ca_problem(f"{section}.tls_ca", ca) + (_chain_problem(section, certificate, key) if certificate else [])


def _chain_problem(section: str, certificate: str, key: str) -> list[str]:
    for name, path in (("tls_certificate", certificate), ("tls_key", key)):
        if path and (why := _unreadable(path)):
            return [f"'{section}.{name}': {path}: {why}"]
    try:
        _load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
    except ssl.SSLError as error:
        name = "tls_key" if key and error.reason == "KEY_VALUES_MISMATCH" else "tls_certificate"
        return [f"'{section}.{name}': {certificate}, {key or 'its key in it'}: {_describe_error(error)}"]
    return []


def _ca_problem(name: str, path: str) -> list[str]:
    if not path:
        return []
    if why := _unreadable(path):
        return [f"'{name}': {path}: {why}"]
    try:
        _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), path)
    except ssl.SSLError as error:
        return [f"'{name}': {path}: {_describe_error(error)}"]
    return []


def _unreadable(path: str) -> str:
    try:
        content(path, PEM_BYTES_MAX)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _load_chain(context: ssl.SSLContext, certificate: str, key: str) -> None:
    with materialize_file(certificate) as chain_path:
        if not key:
            context.load_cert_chain(chain_path, password=_no_password)
            return
        with materialize_file(key) as key_path:
            context.load_cert_chain(chain_path, key_path, password=_no_password)


def _trust(context: ssl.SSLContext, ca: str) -> None:
    with materialize_file(ca) as path:
        context.load_verify_locations(path)


def _describe_error(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    return f"not valid PEM ({error.reason or error})"


def _no_password() -> str:
    """Return no password: otherwise OpenSSL would prompt for one on the terminal."""
    return ""
