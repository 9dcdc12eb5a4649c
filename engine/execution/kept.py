"""Compiled programs kept beside the compilation cache: what was compiled once is not lowered again.

jax's own cache is asked with the lowered program, and lowering takes longer than loading: a Mosaic
kernel is lowered in Python, for every program anew. A traced program is enough to tell two apart.
"""

from __future__ import annotations

import os
import pathlib
import stat
import threading
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.monitoring
from jax.experimental import serialize_executable

from engine.execution import remembered

_SUFFIX = ".program"
_OF_CACHE = ("jax_compilation_cache", "jax_persistent_cache")
"""Settings that say where programs are kept, not what they are."""


def file_of(traced: jax.stages.Traced, about: object) -> pathlib.Path | None:
    """Where the compiled form of a traced program lies or would lie; None: it cannot be kept.

    The name tells apart everything a compiled program depends on: its jaxpr with the kernels in it,
    shapes and donation, what `about` adds, jax's settings, the code, the versions and the device.

    Args:
      traced: a program without array constants; one with them is never kept, since a jaxpr's text
        does not tell their values.
      about: the compiler's options and where the arguments lie; told apart by its repr.
    """
    directory = jax.config.jax_compilation_cache_dir
    if not directory or traced.jaxpr.consts:
        return None
    about = (
        str(traced.jaxpr),
        [repr(leaf) for leaf in jax.tree.leaves((traced.args_info, traced.out_info))],
        about,
        os.environ.get("XLA_FLAGS", ""),
        [item for item in sorted(jax.config.values.items()) if not item[0].startswith(_OF_CACHE)],
    )
    return pathlib.Path(directory) / f"{remembered.digest(about)}{_SUFFIX}"


def load(file: pathlib.Path, traced: jax.stages.Traced) -> jax.stages.Compiled | None:
    """The program a file holds, or None when it holds none that can be loaded.

    What it holds is run as code, so a file that somebody else could have written is not read.
    """
    if not _is_own(file):
        return None
    in_tree, out_tree = (jax.tree.structure(x) for x in (traced.args_info, traced.out_info))
    devices = sorted(_devices(traced), key=lambda device: device.id)
    try:
        # Its checksum stands before anything is unpickled: half a file is no program.
        kept = zlib.decompress(file.read_bytes())
        return serialize_executable.deserialize_and_load(
            kept, in_tree, out_tree, execution_devices=devices
        )
    except (OSError, zlib.error, ValueError, jax.errors.JaxRuntimeError):
        return None  # gone, broken or of another driver: it will be compiled and kept anew


def compiled(
    lowered: jax.stages.Lowered, file: pathlib.Path | None, options: Mapping[str, Any]
) -> jax.stages.Compiled:
    """Compiles a program and keeps it, unless it cannot be kept.

    One that jax found in its own cache stays there alone: on a CPU what was loaded cannot be
    written again, its functions are not found when it runs.
    """
    before = _found.number
    program = lowered.compile(compiler_options=dict(options) or None)
    if file is not None and _found.number == before:
        serialized, *_ = serialize_executable.serialize(program)
        remembered.put(file, zlib.compress(serialized, level=1))
    return program


class _Found(threading.local):
    """Programs that jax found in its cache, by the thread that asked."""

    number = 0


_found = _Found()


def _heard(event: str, **kwargs: str | int) -> None:
    del kwargs
    if event == "/jax/compilation_cache/cache_hits":
        _found.number += 1


jax.monitoring.register_event_listener(_heard)


def _is_own(file: pathlib.Path) -> bool:
    """Whether only this user can write a file and its folder."""
    try:
        found = (file.stat(), file.parent.stat())
    except OSError:
        return False
    writable_by_others = stat.S_IWGRP | stat.S_IWOTH
    return all(x.st_uid == os.getuid() and not x.st_mode & writable_by_others for x in found)


def _devices(traced: jax.stages.Traced) -> set[Any]:
    """Where a program's results lie."""
    shardings = (leaf.sharding for leaf in jax.tree.leaves(traced.out_info))
    return {device for sharding in shardings if sharding for device in sharding.device_set}
