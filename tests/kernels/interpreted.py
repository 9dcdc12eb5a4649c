"""Runs decode attention in the GPU interpreter and saves what came out.

    python -m tests.kernels.interpreted OUT.npz

A process of its own: an interpreter that has raised is of no use afterwards.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.attention import api, decode
from kernels.linear import one_token
from kernels.tuning import Choice
from tests.kernels import decode_cases
from tests.kernels.decode_cases import Case


def run(case: Case, arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """One call."""
    if case.min_blocks is not None:
        decode._MIN_BLOCKS = case.min_blocks
    return interpret(case.decode("mosaic"), arrays)


def interpret(call: Callable[..., jax.Array], arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """A call in the interpreter, which raises where the kernel would hang or race."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(params):
        out = jax.jit(call)(*arrays)
    return np.asarray(out.astype(np.float32))


def main(path: str) -> None:
    """Runs every case."""
    usual = decode._MIN_BLOCKS
    found = {}
    for case in decode_cases.VALUES:
        found[str(case)] = run(case, decode_cases.inputs(case))
        decode._MIN_BLOCKS = usual
    guarded = decode_cases.GUARDED
    arrays = decode_cases.inputs(guarded)
    found["clean"] = run(guarded, arrays)
    found["bystanders"] = run(guarded, decode_cases.with_other_bystanders(guarded, arrays))
    found["nan"] = run(guarded, decode_cases.with_nan_in_one_query(arrays))
    found["calls"] = np.array(sum(api.decode.counts.values()))
    found["mosaic calls"] = np.array(api.decode.counts["mosaic"])
    one_token._ROWS_IN_REGISTERS = False
    for times in decode_cases.TIMES:
        kept = dataclasses.replace(times, choice=Choice("registers"))
        ahead = dataclasses.replace(times, choice=Choice.of("prefetched", prefetch=1))
        found[f"{times} registers"] = interpret(kept.call("mosaic"), times.arrays)
        found[f"{times} prefetched"] = interpret(ahead.call("mosaic"), times.arrays)
        found[f"{times} together"] = interpret(times.call("mosaic"), times.arrays)
        found[f"{times} apart"] = interpret(times.call("mosaic", api.apart), times.arrays)
    forms = ("mosaic", "registers", "prefetched")
    found["times"] = np.array([api.decode_times.counts[form] for form in forms])
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
