"""Compiled programs kept beside the compilation cache: what was compiled once is not lowered again.

jax's own cache is asked with the lowered program, and lowering takes longer than loading: a Mosaic
kernel is lowered in Python, for every program anew. What a program is made from is enough to tell
two apart, as long as the code that makes it is known; else its traced form is.
"""

from __future__ import annotations

import os
import pathlib
import stat
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.monitoring
from jax.experimental import serialize_executable

from engine.execution import remembered

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_SUFFIX = ".program"
_OF_PLACE = ("jax_compilation_cache", "jax_persistent_cache", "jax_platform")
"""Settings that say where programs are kept or run, not what they are; a digest has the device."""


def file_of(traced: jax.stages.Traced, about: object) -> pathlib.Path | None:
    """Where the compiled form of a traced program lies or would lie; None: it cannot be kept.

    The name tells apart everything a compiled program depends on: its jaxpr with the kernels in it,
    shapes and donation, what `about` adds, jax's settings, the code, the versions and the device.

    Args:
      traced: a program without array constants; one with them is never kept, since a jaxpr's text
        does not tell their values.
      about: the compiler's options and where the arguments lie; told apart by its repr.
    """
    if traced.jaxpr.consts:
        return None
    leaves = jax.tree.leaves((traced.args_info, traced.out_info))
    return _file(("traced", str(traced.jaxpr), [repr(leaf) for leaf in leaves], about))


def file_about(about: object) -> pathlib.Path | None:
    """Where the compiled form of a program of this code lies or would lie, before it is traced.

    Args:
      about: everything that it depends on besides jax's settings, the code, the versions and the
        device; told apart by its repr.
    """
    return _file(("made", about))


def _file(about: object) -> pathlib.Path | None:
    directory = jax.config.jax_compilation_cache_dir
    if not directory:
        return None
    about = (about, os.environ.get("XLA_FLAGS", ""), sorted(settings().items()))
    return pathlib.Path(directory) / f"{remembered.digest(about)}{_SUFFIX}"


def settings() -> dict[str, Any]:
    """jax's settings, but for those that say where programs are kept or run."""
    values: dict[str, Any] = dict(jax.config.values)
    return {name: one for name, one in values.items() if not name.startswith(_OF_PLACE)}


def load(
    file: pathlib.Path, in_tree: Any, out_tree: Any, devices: Sequence[Any]
) -> jax.stages.Compiled | None:
    """The program a file holds, or None when it holds none that can be loaded.

    What it holds is run as code, so a file that somebody else could have written is not read.

    Args:
      file: of `file_of` or `file_about`.
      in_tree: structure of (arguments, {}).
      out_tree: structure of what the program returns.
      devices: where that lies, by number.
    """
    if not _is_own(file):
        return None
    try:
        # Its checksum stands before anything is unpickled: half a file is no program.
        kept = zlib.decompress(file.read_bytes())
        return serialize_executable.deserialize_and_load(
            kept, in_tree, out_tree, execution_devices=list(devices)
        )
    except (OSError, zlib.error, ValueError, jax.errors.JaxRuntimeError):
        return None  # gone, broken or of another driver: it will be compiled and kept anew


def compiled(
    lowered: jax.stages.Lowered, file: pathlib.Path | None, options: Mapping[str, Any]
) -> jax.stages.Compiled:
    """Compiles a program and keeps it, unless it cannot be kept.

    One that jax found in its own cache stays there alone, and so does one that it still had: on a
    CPU what was loaded cannot be written again, its functions are not found when it runs.
    """
    before = (_seen.compiles + 1, _seen.hits)
    program = lowered.compile(compiler_options=dict(options) or None)
    if file is not None and (_seen.compiles, _seen.hits) == before:
        serialized, *_ = serialize_executable.serialize(program)
        remembered.put(file, zlib.compress(serialized, level=1))
    return program


class _Seen(threading.local):
    """What jax did for the thread that asks."""

    compiles = 0
    """Programs that it did not have in memory, those of its cache among them."""
    hits = 0
    """Of those, the ones that its cache had."""


_seen = _Seen()


def _count_compile(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    if event == COMPILE_EVENT:
        _seen.compiles += 1


def _count_hit(event: str, **kwargs: str | int) -> None:
    del kwargs
    if event == "/jax/compilation_cache/cache_hits":
        _seen.hits += 1


jax.monitoring.register_event_duration_secs_listener(_count_compile)
jax.monitoring.register_event_listener(_count_hit)


def _is_own(file: pathlib.Path) -> bool:
    """Whether only this user can write a file and its folder."""
    try:
        found = (file.stat(), file.parent.stat())
    except OSError:
        return False
    writable_by_others = stat.S_IWGRP | stat.S_IWOTH
    return all(x.st_uid == os.getuid() and not x.st_mode & writable_by_others for x in found)
