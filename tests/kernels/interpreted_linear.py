"""Runs products of few tokens in the GPU interpreter and saves what came out.

    python -m tests.kernels.interpreted_linear OUT.npz

A process of its own: an interpreter that has raised is of no use afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.linear import api, few_tokens, one_token
from kernels.tuning import Choice
from tests.kernels import linear_cases

_STAGES = 3
"""Places of a ring: few, so that each is filled several times."""


def run(call: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> Any:
    """One call in the interpreter, which raises where the kernel would hang or race."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = jax.jit(call)(*arrays)
    return jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32)), out)


def run_normed(case: linear_cases.Normed) -> dict[str, np.ndarray]:
    """A norm and its product in one kernel of either form, and in two."""
    settings = dict(form=case.form, **case.norm.static, kernels="mosaic")
    kept = dataclasses.replace(case, choice=Choice("registers"))
    calls = {
        "together": case.call("mosaic"),
        "registers": kept.call("mosaic"),
        "apart": functools.partial(api.apart, **settings),
    }
    return {
        f"{case} {name} {way}": x
        for way, call in calls.items()
        for name, x in zip(linear_cases.NORMED_NAMES, run(call, case.arrays), strict=True)
    }


def main(path: str) -> None:
    """Runs every case."""
    few_tokens._MAX_STAGES = _STAGES
    one_token._ROWS_IN_REGISTERS = False
    found = {
        str(case): run(case.call("mosaic"), linear_cases.inputs(case))
        for case in linear_cases.VALUES
    }
    for case in linear_cases.GUARDED:
        arrays = linear_cases.inputs(case)
        found[f"{case} clean"] = run(case.call("mosaic"), arrays)
        found[f"{case} poisoned"] = run(case.call("mosaic"), linear_cases.poisoned(arrays))
    counts = [op.counts.copy() for op in api.FORMS.values()]
    for normed in linear_cases.NORMED:
        found |= run_normed(normed)
    found["calls"] = np.array([sum(count.values()) for count in counts])
    found["mosaic calls"] = np.array([count["mosaic"] for count in counts])
    found["normed"] = np.array([api.normed.counts[way] for way in ("mosaic", "registers", "apart")])
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
