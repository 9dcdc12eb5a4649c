"""Runs latent decode attention in the GPU interpreter and saves what came out.

    python -m tests.kernels.interpreted_mla OUT.npz

A process of its own: an interpreter that has raised is of no use afterwards. It knows no product
that is added to an array, so the kernel's sums are added apart here.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mla import api, decode
from tests.kernels import mla_decode_cases
from tests.kernels.mla_decode_cases import Case


def run(case: Case, *calls: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """Calls of one shape in the interpreter, which raises where the kernel would hang or race."""
    usual = decode._MULTIPROCESSORS
    decode._MULTIPROCESSORS = case.multiprocessors or usual
    params = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(params):
        program = jax.jit(case.decode("mosaic"))
        found = [np.asarray(program(*arrays).astype(np.float32)) for arrays in calls]
    decode._MULTIPROCESSORS = usual
    return found


def main(path: str) -> None:
    """Runs every case."""
    decode._SUMS_IN_PLACE = False
    found = {}
    for case in mla_decode_cases.VALUES:
        (found[str(case)],) = run(case, mla_decode_cases.inputs(case))
    guarded = mla_decode_cases.GUARDED
    arrays = mla_decode_cases.inputs(guarded)
    found["clean"], found["bystanders"], found["nan"] = run(
        guarded,
        arrays,
        mla_decode_cases.with_other_bystanders(guarded, arrays),
        mla_decode_cases.with_nan_in_one_query(arrays),
    )
    found["calls"] = np.array(sum(api.decode.counts.values()))
    found["mosaic calls"] = np.array(api.decode.counts["mosaic"])
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
