"""Experts of few tokens on Hopper: every chosen expert sees all tokens, so none has to move.

Its weights are read once, however many tokens are its own; results of the others are cleared. The
products of a token's experts then add up where they are multiplied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.moe import products, tables
from kernels.moe.products import DEPTH, MULTIPROCESSORS, Tile
from kernels.mosaic import round_up
from kernels.tuning import Choice, Shape

MAX_TOKENS = 128


def experts(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    kernels: str = "plain",
    down_rows: int | None = None,
    splits: int | None = None,
) -> jax.Array:
    """Every token's weighted sum over its experts' outputs; see `reference.experts`.

    In the second product blocks take `down_rows` weight rows and `splits` of them share the
    inputs; None: by formula, which decides both or neither.

    Weights multiply silu(gate) * up in float32, before it is rounded, and a token's experts add up
    in float32 in the order of their ids, for some inputs at a time: a part each. A choice whose
    weight is 0 adds nothing, not even a NaN. The experts' own weights must be finite.

    Raises:
      NotImplementedError: the call is outside what the kernels cover.
    """
    products.decline_unless_covered(x, gate_up, down, kernels)
    num_tokens = x.shape[0]
    if num_tokens > MAX_TOKENS:
        raise NotImplementedError(f"{num_tokens} tokens, at most {MAX_TOKENS} may be")
    columns = _columns(num_tokens)
    num_experts, hidden_size, width = down.shape
    whole = num_tokens if num_tokens < 8 else round_up(num_tokens, 8)
    if num_tokens < whole:  # no copy's rows would be whole
        x = jnp.pad(x, ((0, whole - num_tokens), (0, 0)))
    by_choice = tables.by_choice(expert_ids, weights, num_experts, columns)
    token_weights, chosen, count = tables.choose(*by_choice, num_experts)
    first = _gate_up_tile(columns, 2 * width)
    hidden = products.shared_gate_up(gate_up, x, chosen, count, token_weights, first)
    if down_rows is None or splits is None:
        second, splits = _down_tile(columns, hidden_size, width)
    else:
        consumers = 2 if down_rows > 128 else 1
        second = Tile(columns, consumers, down_rows // consumers)
    parts = products.summed_down(down, hidden, chosen, count, whole, splits, second)
    return parts if num_tokens == whole else parts[:, :num_tokens]


def _columns(num_tokens: int) -> int:
    return max(8, 1 << (num_tokens - 1).bit_length())


def _gate_up_tile(columns: int, rows: int) -> Tile:
    """Many tokens are fetched again for every block of rows, so blocks are taller then."""
    consumers = 2 if columns > 32 and rows % 256 == 0 else 1
    return Tile(columns, consumers)


def _down_tile(columns: int, rows: int, width: int) -> tuple[Tile, int]:
    """A tile and a number of splits that give every multiprocessor about the same to read."""
    num_steps = width // DEPTH
    tall = [(2, 128)] if columns > 32 else [(1, 128)]
    short = [(1, 64)] if columns <= 16 else []
    tiles = [Tile(columns, consumers, height) for consumers, height in (*tall, *short)]
    tiles = [tile for tile in tiles if rows % tile.block_rows == 0]
    tiles = tiles or [Tile(columns, 1, 128 if rows % 128 == 0 else 64)]

    def plan(tile: Tile) -> tuple[int, int, Tile, int]:
        blocks = rows // tile.block_rows
        most = max(1, min(num_steps, MULTIPROCESSORS // blocks))
        longest = -(-num_steps // most)
        rounds = -(-blocks // MULTIPROCESSORS)
        return longest * tile.block_rows * rounds, -tile.rows, tile, -(-num_steps // longest)

    *_, tile, splits = min(map(plan, tiles), key=lambda found: found[:2])
    return tile, splits


def candidates(shape: Shape) -> tuple[Choice, ...]:
    """Block rows and splits of the second product, the formula's first; none for many tokens."""
    if shape["tokens"] > MAX_TOKENS:
        return ()
    columns, hidden_size = _columns(shape["tokens"]), shape["hidden_size"]
    num_steps = shape["intermediate_size"] // DEPTH
    tile, splits = _down_tile(columns, hidden_size, shape["intermediate_size"])
    found = [(tile.block_rows, splits)]
    # As in the formula: short blocks are for few tokens, tall ones for many.
    for rows in (64, 128) if columns <= 16 else (128, 256):
        if hidden_size % rows:
            continue
        blocks = hidden_size // rows
        # Those that leave the splits equal steps, keep the device busy and are under way at once.
        counts = sorted({-(-num_steps // longest) for longest in range(1, num_steps + 1)})
        busy = range(2 * MULTIPROCESSORS // 3, MULTIPROCESSORS + 1)
        found += [(rows, n) for n in counts if n * blocks in busy]
    return tuple(
        Choice.of("unpermuted", down_rows=rows, splits=n) for rows, n in dict.fromkeys(found)
    )
