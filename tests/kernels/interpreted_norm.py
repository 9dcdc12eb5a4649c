"""Runs sum and norm in the GPU interpreter and saves what came out.

    python -m tests.kernels.interpreted_norm OUT.npz

A process of its own: an interpreter that has raised is of no use afterwards.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.norm import api
from tests.kernels import norm_cases
from tests.kernels.norm_cases import Case

NAMES = ("hidden", "normed")


def run(case: Case, arrays: tuple[jax.Array, ...]) -> dict[str, np.ndarray]:
    """One call in the interpreter, which raises where the kernel would race."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = jax.jit(case.call("mosaic"))(*arrays)
    return {name: np.asarray(x.astype(jnp.float32)) for name, x in zip(NAMES, out, strict=True)}


def main(path: str) -> None:
    """Runs every case."""
    runs = {str(case): (case, norm_cases.inputs(case)) for case in norm_cases.VALUES}
    guarded = norm_cases.GUARDED
    runs["clean"] = (guarded, norm_cases.inputs(guarded))
    runs["poisoned"] = (guarded, norm_cases.poisoned(runs["clean"][1]))
    found = {}
    for name, (case, arrays) in runs.items():
        found |= {f"{name} {what}": x for what, x in run(case, arrays).items()}
    found["calls"] = np.array(sum(api.add_norm.counts.values()))
    found["mosaic calls"] = np.array(api.add_norm.counts["mosaic"])
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
