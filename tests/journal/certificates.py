"""Certificates for TLS tests: an authority of our own, a server, a client, and one that nobody trusts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates into a folder; each as NAME.pem and NAME.key."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"belayer test {name}")])
        self.path = self._write(name, self._build(self._name, self._key, authority=True), self._key)

    def issue(self, name: str, host: str = "127.0.0.1", valid_days: float = 2) -> tuple[Path, Path]:
        """Certificate and key for a host or address, valid for so many days from now on; expired when negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        path = self._write(name, self._build(subject, key, host=host, valid_days=valid_days), key)
        return path, path.with_suffix(".key")

    def _build(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        authority: bool = False,
        host: str = "",
        valid_days: float = 2,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=valid_days))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if host:
            name = x509.IPAddress(ip_address(host)) if host[0].isdigit() else x509.DNSName(host)
            builder = builder.add_extension(x509.SubjectAlternativeName([name]), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Path:
        path = self._folder / f"{name}.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        path.with_suffix(".key").write_bytes(key.private_bytes(*encoding))
        return path
