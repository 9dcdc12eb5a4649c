"""Runs products of few tokens in the GPU interpreter and saves what came out.

    python -m tests.kernels.interpreted_linear OUT.npz

A process of its own: an interpreter that has raised is of no use afterwards.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.linear import api, few_tokens
from tests.kernels import linear_cases
from tests.kernels.linear_cases import Case

_STAGES = 3
"""Places of a ring: few, so that each is filled several times."""


def run(case: Case, arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """One call in the interpreter, which raises where the kernel would hang or race."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = jax.jit(case.call("mosaic"))(*arrays)
    return np.asarray(out.astype(jnp.float32))


def main(path: str) -> None:
    """Runs every case."""
    few_tokens._MAX_STAGES = _STAGES
    found = {str(case): run(case, linear_cases.inputs(case)) for case in linear_cases.VALUES}
    for case in linear_cases.GUARDED:
        arrays = linear_cases.inputs(case)
        found[f"{case} clean"] = run(case, arrays)
        found[f"{case} poisoned"] = run(case, linear_cases.poisoned(arrays))
    counts = [getattr(api, form).counts for form in ("product", "parts", "gated")]
    found["calls"] = np.array([sum(count.values()) for count in counts])
    found["mosaic calls"] = np.array([count["mosaic"] for count in counts])
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
