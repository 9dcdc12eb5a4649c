"""Runs products of tiles of which some hold few tokens in the GPU interpreter, and saves both.

    python -m tests.kernels.interpreted_moe_tails OUT.npz

A process of its own: an interpreter that has raised is of no use afterwards.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from kernels.moe import permuted, products, tables
from kernels.mosaic import round_up
from tests.kernels import moe_cases
from tests.kernels.interpreted_moe import interpret, make_small


def place(ids: jax.Array) -> tuple[jax.Array, ...]:
    """Tiles, and where each choice goes."""
    num_experts, padded = len(moe_cases.RAGGED), round_up(ids.shape[0], tables.SIDE)
    by_choice, _ = tables.by_choice(ids, jnp.ones(ids.shape), num_experts, padded)
    return tables.group(ids, by_choice, num_experts, tables.SIDE, moe_cases.WIDE)


def multiply(tail: int, x: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Both products of the tiles."""
    gate_up, down, *tiles = operands
    columns = moe_cases.WIDE
    first, second = (permuted._tile(columns, tail, each.shape[1]) for each in (gate_up, down))
    hidden = products.gate_up(gate_up, x, *tiles, first)
    return hidden, products.down(down, hidden, *tiles, second)


def main(path: str) -> None:
    """Runs the products with tails as narrow as their tokens, and with whole tiles."""
    make_small()
    ids, x, *weights = moe_cases.ragged_inputs()
    *tiles, rows = interpret(place, ids)
    found = dict(zip(("experts", "upto", "held"), tiles, strict=True)) | {"rows": rows}
    for tail in permuted._tails(moe_cases.WIDE):
        both = interpret(functools.partial(multiply, tail), x, *weights, *tiles)
        names = (f"{name} of {tail}" for name in ("hidden", "outputs"))
        found |= {name: out.astype(np.float32) for name, out in zip(names, both, strict=True)}
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
