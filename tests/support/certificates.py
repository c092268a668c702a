"""Certificates for servers of tests."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

import pytest


def make_certificate(
    certificate: Path, key: Path, address: str = "127.0.0.1", *, names: Sequence[str] = ()
) -> None:
    """Make a certificate that is signed by itself, good for a day, for an address and names."""
    x509 = pytest.importorskip("cryptography.x509", reason="certificates need `cryptography`")
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, certificate.stem)])
    day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)
    addresses = [x509.IPAddress(ipaddress.ip_address(address)), *map(x509.DNSName, names)]
    signed = (
        x509.CertificateBuilder(name, name, secret.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
