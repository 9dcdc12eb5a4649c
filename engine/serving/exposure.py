"""Who may reach a server: loopback, TLS, client certificates, and what is refused without them."""

from __future__ import annotations

import ipaddress
import pathlib
import ssl

import grpc


def is_loopback(host: str) -> bool:
    """True for an address that no other machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(host: str, *, has_tls: bool, has_tokens: bool, is_insecure: bool) -> str | None:
    """What the operator should know of a host that is allowed; None when nothing.

    Raises:
      ValueError: other machines could call without TLS or a token and nobody said that they may.
    """
    if is_loopback(host):
        return None
    if not has_tls and not has_tokens:
        if not is_insecure:
            raise ValueError(
                f"host {host} is reachable from other machines without TLS or a token; give "
                "--tls-cert and --tls-key, or --token-file, or listen on 127.0.0.1; --insecure "
                "allows it where only trusted machines can reach the port"
            )
        return f"{host} is open to every machine that reaches it (--insecure)"
    if not has_tls:
        return f"tokens and prompts travel to {host} in clear text; add --tls-cert and --tls-key"
    return None


def credentials(
    certificate: pathlib.Path, key: pathlib.Path, client_ca: pathlib.Path | None
) -> grpc.ServerCredentials:
    """Server credentials of PEM files.

    Args:
      certificate: of the server, its chain behind it.
      key: of the certificate, not encrypted.
      client_ca: clients must show a certificate of it; None: they need none.

    Raises:
      OSError: a file cannot be read.
      ValueError: a file does not hold what it should, or the key is another certificate's.
    """
    chain, secret = certificate.read_bytes(), key.read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except ssl.SSLError as error:
        raise ValueError(
            f"--tls-cert {certificate} and --tls-key {key} are no pair of PEM certificate and "
            f"unencrypted key ({error.reason or 'unreadable'}); give both as PEM"
        ) from error
    roots = None if client_ca is None else client_ca.read_bytes()
    if client_ca is not None:
        try:
            context.load_verify_locations(cafile=client_ca)
        except ssl.SSLError as error:
            raise ValueError(
                f"--tls-client-ca {client_ca} holds no PEM certificate; give the authority that "
                "signs client certificates"
            ) from error
    return grpc.ssl_server_credentials(
        [(secret, chain)], root_certificates=roots, require_client_auth=roots is not None
    )
