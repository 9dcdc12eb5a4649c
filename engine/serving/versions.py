"""Versions of what computes an answer, for records of conditions and GetServerInfo."""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = ("jax", "jaxlib", "numpy", "tokenizers", "grpcio")


def own_version() -> str:
    """Version of the installed distribution; "unknown" when it runs from a bare folder."""
    return _version("treadle")


def versions() -> dict[str, str]:
    """Version by name: python, then every package of `PACKAGES`."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
