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

_BLOCKS = 5
"""Blocks that share out the units: few, so that each has several."""
_STAGES = 3
"""Places of a ring: few, so that each is filled several times."""


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


def tails() -> dict[str, np.ndarray]:
    """Products of tiles of which some hold few tokens, as narrow as these are and as a whole."""
    ids, x, *weights = moe_cases.ragged_inputs()
    num_experts, columns = len(moe_cases.RAGGED), moe_cases.WIDE
    most = x.shape[0] // columns

    def place(ids: jax.Array) -> tuple[jax.Array, ...]:
        padded = round_up(ids.shape[0], tables.SIDE)
        by_choice, _ = tables.by_choice(ids, jnp.ones(ids.shape), num_experts, padded)
        return tables.group(ids, by_choice, num_experts, most, columns)

    def multiply(tail: int, x: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        gate_up, down, *tiles = operands
        first, second = (permuted._tile(columns, tail, each.shape[1]) for each in (gate_up, down))
        hidden = products.gate_up(gate_up, x, *tiles, first)
        return hidden, products.down(down, hidden, *tiles, second)

    *tiles, rows = interpret(place, ids)
    found = dict(zip(("experts", "upto", "held"), tiles, strict=True)) | {"rows": rows}
    for tail in permuted._tails(columns):
        both = interpret(functools.partial(multiply, tail), x, *weights, *tiles)
        names = (f"{name} of {tail}" for name in ("hidden", "outputs"))
        found |= {name: out.astype(np.float32) for name, out in zip(names, both, strict=True)}
    return found


def interpret(call: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array | None) -> Any:
    """What a call gives in the interpreter, which raises where a kernel would hang or race."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(params):
        return tuple(map(np.asarray, jax.jit(call)(*arrays)))


def main(path: str) -> None:
    """Runs every case."""
    products.MULTIPROCESSORS = _BLOCKS
    products._MAX_STAGES = _STAGES
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
    found |= {f"tails {what}": x for what, x in tails().items()}
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
