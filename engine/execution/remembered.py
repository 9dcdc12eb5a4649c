"""A figure that only a compile can tell, kept beside the compilation cache for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import platform
from collections.abc import Callable

import jax
import jaxlib.version

from kernels.tuning import TUNING

_log = logging.getLogger(__name__)

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
    put(file, json.dumps({name: found}).encode())
    return found


def put(file: pathlib.Path, content: bytes) -> None:
    """Writes a file of this user alone; in a folder that cannot be written, says so and goes on."""
    part = file.with_suffix(f".{os.getpid()}")
    try:
        part.touch(mode=0o600)
        part.write_bytes(content)
        part.replace(file)  # whole, though another process may do the same at the same time
    except OSError as error:
        _log.warning("the next start will be slower: %s cannot be written: %s", file, error)
        part.unlink(missing_ok=True)


def digest(about: object) -> str:
    """Names what was made from `about`, told apart by its repr, by this code on this device.

    What was measured for the device's kernels belongs to the code.
    """
    state = hashlib.blake2b(digest_size=16)
    device = jax.devices()[0]
    versions = (jax.__version__, jaxlib.version.__version__, device.client.platform_version)
    for part in (*versions, device.device_kind, _processor(), repr(about)):
        state.update(part.encode() + b"\0")
    state.update(CODE + TUNING.fingerprint())
    return state.hexdigest()


def sources() -> bytes:
    """A digest of the sources as they lie there now."""
    state = hashlib.blake2b(digest_size=16)
    root = pathlib.Path(__file__).parents[2]
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            state.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return state.digest()


def _processor() -> str:
    """What the host's processor can do: code may be made for it alone."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def is_current() -> bool:
    """Whether a later process would run the code that this one imported."""
    return sources() == CODE


CODE = sources()
"""Of the code that this process runs: read as it is imported, not after somebody has changed it."""
