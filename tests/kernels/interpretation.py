"""Runs a module of this folder in the GPU interpreter, and compares what comes of it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
_THREADS = "16"
"""Of XLA's pool, which has one a core: a warpgroup that waits keeps a thread.

On two cores the one that is waited for then found none, in a third of a large kernel's runs.
"""


def run(module: str, folder: pathlib.Path) -> Any:
    """The arrays that a module saves, by name; its own process, which an error must not outlive."""
    path = folder / "found.npz"
    command = [sys.executable, "-m", f"tests.kernels.{module}", str(path)]
    environment = os.environ | {"NPROC": _THREADS}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return np.load(path)


def steps_between(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """How many bfloat16 numbers apart two arrays of such are."""

    def ordered(x: np.ndarray) -> np.ndarray:
        bits = np.asarray(x, np.float32).view(np.int32) >> 16
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    return np.abs(ordered(found) - ordered(expected))
