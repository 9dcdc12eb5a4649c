"""Runs prefill attention in the GPU interpreter and saves what came out.

    python -m tests.kernels.interpreted_prefill OUT.npz

A process of its own: an interpreter that has raised is of no use afterwards. It knows no product
whose left side is in registers, so the kernel's weights go through shared memory here.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.attention import api, prefill
from tests.kernels import chunks, prefill_cases
from tests.kernels.prefill_cases import Case


def run(case: Case, *calls: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """Calls of one shape in the interpreter, which raises where the kernel would hang or race."""
    usual = prefill._MULTIPROCESSORS
    prefill._MULTIPROCESSORS = case.multiprocessors or usual
    params = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(params):
        program = jax.jit(case.prefill("mosaic"))
        found = [np.asarray(program(*arrays).astype(np.float32)) for arrays in calls]
    prefill._MULTIPROCESSORS = usual
    return found


def main(path: str) -> None:
    """Runs every case."""
    prefill._WEIGHTS_IN_REGISTERS = False
    found = {}
    for case in (*prefill_cases.VALUES, prefill_cases.EMPTY):
        (found[str(case)],) = run(case, prefill_cases.inputs(case))
    guarded = prefill_cases.GUARDED
    arrays = prefill_cases.inputs(guarded)
    found["clean"], found["bystanders"], found["nan"] = run(
        guarded,
        arrays,
        prefill_cases.with_other_bystanders(guarded, arrays),
        chunks.with_nan_in_one_query(arrays),
    )
    cut, count = prefill_cases.CUT, prefill_cases.CUT.num_tokens
    arrays = prefill_cases.inputs(cut)
    spans = ((0, count), (0, prefill_cases.CUT_AT), (prefill_cases.CUT_AT, count))
    calls = [chunks.part_of_chunk(arrays, start, end - start) for start, end in spans]
    found["whole"], found["first part"], found["last part"] = run(cut, *calls)
    found["calls"] = np.array(sum(api.prefill.counts.values()))
    found["mosaic calls"] = np.array(api.prefill.counts["mosaic"])
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
