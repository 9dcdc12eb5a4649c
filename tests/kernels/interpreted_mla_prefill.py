"""Runs latent prefill attention in the GPU interpreter and saves what came out.

    python -m tests.kernels.interpreted_mla_prefill OUT.npz

A process of its own: an interpreter that has raised is of no use afterwards. It knows no product
whose left side is in registers, so the kernel's weights go through shared memory here.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mla import api, expand, prefill
from tests.kernels import chunks, mla_prefill_cases
from tests.kernels.mla_prefill_cases import Case


def run(case: Case, *calls: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """Calls of one shape in the interpreter, which raises where a kernel would hang or race."""
    usual = prefill._MULTIPROCESSORS
    for module in (prefill, expand):
        module._MULTIPROCESSORS = case.multiprocessors or usual
    params = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(params):
        program = jax.jit(case.prefill("mosaic"))
        found = [np.asarray(program(*arrays).astype(np.float32)) for arrays in calls]
    for module in (prefill, expand):
        module._MULTIPROCESSORS = usual
    return found


def main(path: str) -> None:
    """Runs every case."""
    prefill._WEIGHTS_IN_REGISTERS = False
    found = {}
    cases = mla_prefill_cases
    for case in cases.VALUES[:-2]:
        (found[str(case)],) = run(case, cases.inputs(case))
    arrays = cases.inputs(cases.GUARDED)
    found[str(cases.GUARDED)], found["bystanders"], found["nan"] = run(
        cases.GUARDED,
        arrays,
        cases.with_other_bystanders(cases.GUARDED, arrays),
        chunks.with_nan_in_one_query(arrays),
    )
    (found["in turns"],) = run(cases.IN_TURNS, arrays)
    arrays, count = cases.inputs(cases.CUT), cases.CUT.num_tokens
    spans = ((0, count), (0, cases.CUT_AT), (cases.CUT_AT, count), (0, 0))
    found[str(cases.CUT)], found["first part"], found["last part"], found["empty"] = run(
        cases.CUT, *(chunks.part_of_chunk(arrays, start, end - start) for start, end in spans)
    )
    found["calls"] = np.array(sum(api.prefill.counts.values()))
    found["mosaic calls"] = np.array(api.prefill.counts["mosaic"])
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
