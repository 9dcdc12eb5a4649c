"""Runs the mixture of experts in the GPU interpreter and saves what came out.

    python -m tests.kernels.interpreted_moe OUT.npz

A process of its own: an interpreter that has raised is of no use afterwards.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.moe import permuted, products, tables
from kernels.mosaic import round_up
from models import layers
from tests.kernels import moe_cases
from tests.kernels.moe_cases import Case


@functools.cache
def _program(form: str) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(moe_cases.FORMS[form], kernels="mosaic"))


def run(case: Case, arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """One call in the interpreter, which raises where a kernel would hang or race."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(params):
        out = _program(case.form)(*arrays)
    return np.asarray(layers.summed(out, jnp.dtype(jnp.bfloat16)).astype(jnp.float32))


def choose_experts(num_tokens: int, padding: int) -> dict[str, np.ndarray]:
    """Which experts some token counts, and where each token goes."""
    ids, weights = moe_cases.table_inputs(num_tokens, padding)
    num_experts, columns = moe_cases.TABLE_EXPERTS, round_up(num_tokens, tables.SIDE)

    def call(ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        by_choice = tables.by_choice(ids, weights, num_experts, columns)
        most = permuted._num_tiles(ids.size, num_experts, moe_cases.TILE)
        places = tables.group(ids, by_choice[0], num_experts, most, moe_cases.TILE)
        return *tables.choose(*by_choice, num_experts), *places

    found = interpret(call, ids, weights)
    names = ("of tokens", "chosen", "upto", "tiles", "tiles upto", "held", "rows")
    return dict(zip(names, found, strict=True))


def place() -> tuple[np.ndarray, ...]:
    """Tiles and rows of many blocks."""
    options = {"num_blocks": moe_cases.PLACED_BLOCKS, "num_experts": 64}
    options |= {"num_tiles": moe_cases.PLACED_TILES, "columns": moe_cases.TILE}
    return interpret(functools.partial(tables._place, **options), moe_cases.block_counts())


def interpret(call: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array | None) -> Any:
    """What a call gives in the interpreter, which raises where a kernel would hang or race."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(params):
        return tuple(map(np.asarray, jax.jit(call)(*arrays)))


def make_small() -> None:
    """Makes do with so few blocks and places of a ring that each has several turns."""
    products.MULTIPROCESSORS, products._MAX_STAGES = 5, 3


def main(path: str) -> None:
    """Runs every case."""
    make_small()
    found = {}
    for case in moe_cases.VALUES:
        found[str(case)] = run(case, moe_cases.inputs(case))
    for case in moe_cases.GUARDED:
        arrays, kept = moe_cases.inputs(case), moe_cases.KEPT
        others = moe_cases.inputs(case, seed=1)
        calls = {
            "other": moe_cases.with_other_tokens(arrays, others, kept),
            "nonfinite": moe_cases.with_nonfinite_tokens(arrays, kept),
            "padding": moe_cases.with_padding_alone(arrays),
        }
        found |= {f"{case} {name}": run(case, call) for name, call in calls.items()}
    for choice in moe_cases.CHOICES:
        out = interpret(choice.call(), *moe_cases.choice_inputs(choice))
        found[f"{choice} ids"], found[f"{choice} weights"] = out
    for case in moe_cases.TABLES:
        found |= {f"{case} {what}": x for what, x in choose_experts(*case).items()}
    names = ("placed tiles", "placed upto", "placed held", "placed bases")
    found |= dict(zip(names, place(), strict=True))
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
