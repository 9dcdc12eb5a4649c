"""A figure that only a compile can tell, kept beside the compilation cache for the next start."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import jax
import jaxlib.version

PACKAGES = ("engine", "models", "kernels")
"""What a program is made from: a changed line forgets every figure."""


def figure(name: str, about: object, make: Callable[[], int]) -> int:
    """What `make` returns, from the last process that asked the same of the same code.

    Args:
      name: of the figure.
      about: everything it depends on besides code, jax and device; told apart by its repr.
      make: finds it out; called when nothing is kept, or the compilation cache is off.
    """
    directory = jax.config.jax_compilation_cache_dir
    if not directory:
        return make()
    file = pathlib.Path(directory) / f"{name}-{digest(about)}.json"
    try:
        return int(json.loads(file.read_text())[name])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never kept, or half a file of a process that died
    found = make()
    # Renamed into place: another process may start at the same time.
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({name: found}))
    part.replace(file)
    return found


def digest(about: object) -> str:
    """Names what was made from `about`, told apart by its repr, by this code on this device."""
    state = hashlib.blake2b(digest_size=16)
    device = jax.devices()[0]
    versions = (jax.__version__, jaxlib.version.__version__, device.client.platform_version)
    for part in (*versions, device.device_kind, _processor(device), repr(about)):
        state.update(part.encode() + b"\0")
    root = pathlib.Path(__file__).parents[2]
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            state.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return state.hexdigest()


def _processor(device: Any) -> str:
    """What a CPU can do, for code made for it alone."""
    if device.platform != "cpu":
        return platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
