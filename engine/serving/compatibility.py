"""Adds the service that gateways know to a server, where its messages (extra `gateway`) are."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc.aio

    from engine.serving.grpc_service import GenerationService

SERVICE = "vllm.grpc.engine.VllmEngine"
"""Name under which gateways, health and reflection know it."""


def names() -> tuple[str, ...]:
    """The service's name; nothing without the extra."""
    return (SERVICE,) if importlib.util.find_spec("smg_grpc_proto") else ()


def described() -> str:
    """Whether it is served, for people to read."""
    return f"on, {SERVICE}" if names() else "off, install the extra `gateway` to serve gateways"


def add_to_server(service: GenerationService, server: grpc.aio.Server) -> tuple[str, ...]:
    """Adds it to a server that is not started yet; the names that were added.

    Args:
      service: lends the engine.
      server: of the same event loop.
    """
    if names():
        from engine.serving import vllm_service

        vllm_service.add_to_server(service, server)
    return names()
