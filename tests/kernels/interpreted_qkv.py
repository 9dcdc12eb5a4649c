"""Runs the preparation of q, k and v in the GPU interpreter and saves what came out.

    python -m tests.kernels.interpreted_qkv OUT.npz

A process of its own: an interpreter that has raised is of no use afterwards.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.qkv import api
from tests.kernels import qkv_cases
from tests.kernels.qkv_cases import Case

NAMES = ("q", "pool", "is_bad")


def run(case: Case, arrays: tuple[jax.Array | None, ...]) -> dict[str, np.ndarray]:
    """One call in the interpreter, which raises where the kernel would hang or race."""
    # Rows of padding race in the trash page, as they may.
    params = plgpu.InterpretGPUParams(detect_races=case.padding < 2)
    with plgpu.force_gpu_interpret_mode(params):
        out = jax.jit(case.prepare("mosaic"))(*arrays)
    return {name: np.asarray(x.astype(jnp.float32)) for name, x in zip(NAMES, out, strict=True)}


def main(path: str) -> None:
    """Runs every case."""
    found = {}
    runs = {str(case): (case, qkv_cases.inputs(case)) for case in qkv_cases.VALUES}
    guarded = qkv_cases.GUARDED
    runs["clean"] = (guarded, qkv_cases.inputs(guarded))
    runs["poisoned"] = (guarded, qkv_cases.poisoned(runs["clean"][1]))
    for name, (case, arrays) in runs.items():
        found |= {f"{name} {what}": x for what, x in run(case, arrays).items()}
    found["calls"] = np.array(sum(api.prepare.counts.values()))
    found["mosaic calls"] = np.array(api.prepare.counts["mosaic"])
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
