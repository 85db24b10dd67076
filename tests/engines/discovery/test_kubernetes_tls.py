"""Certificates of API servers that are older or made by hand."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.engines.discovery.followed import Followed
from tests.engines.discovery.test_kubernetes_odd import Account
from tests.support.apiserver import ApiServer
from tests.support.podstore import pod


def signed(folder: Path, name: str, by: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None) -> Any:
    """A certificate and its key, without any key identifier; of an authority where nobody signs it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by[0].subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(by[1] if by else key, hashes.SHA256())
    )
    (folder / f"{name}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made, key


async def test_a_certificate_without_key_identifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An API server whose certificate has no Authority Key Identifier is believed within a pod, also where Python
    checks strictly (from 3.13 on), if the pod's own authority signed it; one of another authority never is."""
    create = ssl.create_default_context

    def strict(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = create(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    authority = signed(tmp_path, "authority", None)
    signed(tmp_path, "server", authority)
    signed(tmp_path, "another", None)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    monkeypatch.setattr(ssl, "create_default_context", strict)
    async with ApiServer(tls=tls) as api:
        api.store.create(pod("a"))
        account = Account(api, tmp_path, monkeypatch)
        account.token.write_text(api.token)
        account.authority.write_bytes((tmp_path / "another.crt").read_bytes())
        async with Followed(api, tmp_path, kubeconfig="", namespaces=("default",)) as view:
            await view.until(lambda: "the certificate of the API server is not trusted" in view.discovery.status().why)
            assert view.sets == []
            account.authority.write_bytes((tmp_path / "authority.crt").read_bytes())
            await view.until_names("a")
