"""Real certificates for tests: an authority, and certificates that it signs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from core.config import SecurityConfig

TIMEOUT_S = 20


class Authority:
    """A certificate authority in a new directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.certificate = directory / "ca.pem"
        _openssl(
            "req", "-x509", *_new_key(directory / "ca.key"), "-subj", "/CN=authority", "-days", "2",
            "-out", self.certificate,
        )  # fmt: skip

    def sign(self, name: str, alternative_name: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """(certificate, key), PEM both."""
        certificate, key, request = (self.directory / f"{name}{suffix}" for suffix in (".pem", ".key", ".csr"))
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternative_name}\n")
        _openssl("req", *_new_key(key), "-subj", f"/CN={name}", "-out", request)
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.directory / "ca.key",
            "-days", "2", "-extfile", extensions, "-out", certificate,
        )  # fmt: skip
        return certificate, key

    def config(self, name: str, ca: Path | None = None, **options: object) -> SecurityConfig:
        """The config of a process with a certificate of this authority. It trusts `ca`, by default this authority."""
        certificate, key = self.sign(name)
        return SecurityConfig(
            tls_cert=str(certificate), tls_key=str(key), tls_ca=str(ca or self.certificate), **options  # type: ignore[arg-type]
        )  # fmt: skip


def _new_key(path: Path) -> tuple[object, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)


def _openssl(*arguments: object) -> None:
    command = ["openssl", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
