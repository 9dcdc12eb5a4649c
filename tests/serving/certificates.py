"""Authorities and certificates for tests of TLS, made by the openssl command."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess


@dataclasses.dataclass(frozen=True)
class Files:
    """An authority, and what it signed."""

    ca: pathlib.Path
    cert: pathlib.Path
    key: pathlib.Path


def _openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def authority(folder, name, names="DNS:localhost,IP:127.0.0.1"):
    """An authority with one certificate for `names` that server and client show alike."""
    ca, ca_key = folder / f"{name}-ca.pem", folder / f"{name}-ca.key"
    cert, key, request = (folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    _openssl("req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-subj", f"/CN={name}")
    _openssl("req", *curve, "-keyout", key, "-out", request, "-subj", "/CN=localhost")
    extension = folder / "names"
    extension.write_text(f"subjectAltName={names}\n")
    signed = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", extension, "-days", 2)
    _openssl("x509", "-req", "-in", request, "-out", cert, *signed)
    return Files(ca, cert, key)
