"""Words a call that found no connection: what was tried, what happened, the way out."""

from __future__ import annotations

import dataclasses

_NOT_CONNECTED = ("failed to connect to all addresses", "errors resolving ")
"""How gRPC (1.85) begins the details of a call that found no connection; nothing was sent."""
_CLOSED = ("Socket closed", "Connection reset by peer")


@dataclasses.dataclass(frozen=True)
class Ways:
    """How the caller at hand changes the connection, each in the words of an imperative."""

    to_tls: str
    to_plain: str
    to_authority: str
    to_certificate: str


PYTHON = Ways(
    to_tls="pass tls=grpc.ssl_channel_credentials(root_certificates=...)",
    to_plain="leave tls out",
    to_authority="pass the PEM of its authority as root_certificates of tls",
    to_certificate="pass private_key and certificate_chain to grpc.ssl_channel_credentials too",
)
"""For the clients of `engine.serving.client`."""
COMMAND = Ways(
    to_tls="pass --tls-ca",
    to_plain="leave --tls-ca out",
    to_authority="pass the file of its authority as --tls-ca",
    to_certificate="pass --tls-cert and --tls-key too",
)
"""For commands."""


def is_unreached(detail: str) -> bool:
    """Whether the details of an UNAVAILABLE are gRPC's own, of a call that found no connection."""
    return detail.startswith(_NOT_CONNECTED)


def described(detail: str, address: str, *, is_tls: bool, ways: Ways) -> str:
    """One line for a call that found no connection.

    Args:
      detail: gRPC's details, which `is_unreached` knows.
      address: host and port, as the caller gave them.
      is_tls: whether TLS was tried; else plain text.
      ways: the way out in the caller's own terms.
    """
    tried = f"{address} cannot be reached {'over TLS' if is_tls else 'in plain text'}: "
    return tried + _reason(detail, is_tls=is_tls, ways=ways)


def _reason(detail: str, *, is_tls: bool, ways: Ways) -> str:
    if "Connection refused" in detail:
        return "nothing listens there; start the server, or name its address"
    if "errors resolving " in detail:
        return "the name is not known; name another address"
    if not is_tls and any(words in detail for words in _CLOSED):
        return "it closed the connection before the first call; it may speak TLS: " + ways.to_tls
    if "WRONG_VERSION_NUMBER" in detail:
        return "its answer is no TLS; it may speak plain text: " + ways.to_plain
    if "Hostname Verification Check failed" in detail:
        return "its certificate is of another name; call it by that name"
    if "CERTIFICATE_VERIFY_FAILED" in detail:
        return "its certificate is not of the given authority: " + ways.to_authority
    if is_tls and any(words in detail for words in _CLOSED):
        return (
            "it closed the connection before the first call; it may want a client certificate of "
            "an authority of its own: " + ways.to_certificate
        )
    return f"{detail.partition('last error: ')[2] or detail}; check that this is its gRPC port"
