"""What the prefill attention kernels share: tiles of queries, and two warpgroups that attend them.

Queries lie on the 64-wide side of a product, 64 of them to a warpgroup. While one of two warpgroups
exponentiates, the other multiplies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import MASKED, Ref, div_rem

ROWS = 64
"""Queries of a warpgroup: the fixed side of its product."""
CONSUMERS = 2
"""Warpgroups that attend; one more fetches."""
SLAB = 8
"""A swizzled copy starts at multiples of it; a tile therefore does too, before its row's token."""
SCORES = plgpu.Layout.WGMMA
_PER_ROW = SCORES.reduce(1)

Partial = tuple[jax.Array, jax.Array, jax.Array]
# Of the blocks seen so far: weighted values [64, H], highest score [64], sum of weights [64].


@dataclasses.dataclass(frozen=True)
class Cut:
    """Tiles of a flat token batch, [tiles] each; those that are not used come last."""

    row: jax.Array
    """0 where the tile is not used."""
    is_used: jax.Array
    token: jax.Array
    """The tile's first token, a multiple of 8."""
    begin: jax.Array
    """The first of the tile's tokens that belongs to the row; those before are a neighbour's."""
    end: jax.Array
    """Past the last one."""
    position: jax.Array
    """Of the tile's first token, were it the row's: it may be negative."""
    counts: jax.Array
    """i32[R], tiles of each row."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """One entry of a work list, in the order of its columns."""

    row: jax.Array
    slab: jax.Array
    """Flat index of the tile's first token, in eights."""
    begin: jax.Array
    """The first of the tile's tokens that belongs to the row; those before are a neighbour's."""
    end: jax.Array
    """Past the last one."""
    position: jax.Array
    """Of the tile's first token, were it the row's: it may be negative."""
    num_keys: jax.Array
    """Keys that its last token sees, from the row's first; 0: the output is zero."""


def is_wide(value_dim: int) -> bool:
    """Whether values fill so many registers that a thread does nothing in two ways.

    Then every step is masked.
    """
    return value_dim == 256


def keys_at_once(value_dim: int) -> int:
    """Keys attended at once. Scores of more would not stay in registers beside the values."""
    return 64 if is_wide(value_dim) else 128


def cut(
    starts: jax.Array, ends: jax.Array, positions: jax.Array, tile_tokens: int, num_tiles: int
) -> Cut:
    """Cuts the flat tokens into tiles of one row each.

    Args:
      starts: i32[R], first token of each row.
      ends: i32[R], past its last one.
      positions: i32[T].
      tile_tokens: most that a tile has, neighbours' included.
      num_tiles: no fewer than all rows can be cut into.
    """
    aligned = starts // SLAB * SLAB
    counts = jnp.where(ends > starts, -(-(ends - aligned) // tile_tokens), 0)
    stops = jnp.cumsum(counts, dtype=jnp.int32)

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    rows = jnp.sum(tile[:, None] >= stops[None, :], axis=1, dtype=jnp.int32)
    is_used = rows < starts.shape[0]
    rows = jnp.where(is_used, rows, 0)
    token = aligned[rows] + (tile - (stops - counts)[rows]) * tile_tokens
    begin = jnp.maximum(starts[rows] - token, 0)
    end = jnp.where(is_used, jnp.minimum(ends[rows] - token, tile_tokens), 0)
    position = positions[jnp.clip(token + begin, 0, positions.shape[0] - 1)] - begin
    return Cut(rows, is_used, token, begin, end, position, counts)


def in_order(entries: jax.Array, is_before: jax.Array) -> jax.Array:
    """Sorts i32[tiles, X]; bool[tiles, tiles]: whether the column's tile goes before the row's."""
    tile = jnp.arange(entries.shape[0], dtype=jnp.int32)
    place = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    is_placed = place[None, :] == tile[:, None]
    return jnp.sum(jnp.where(is_placed[..., None], entries[None], 0), axis=1, dtype=jnp.int32)


def is_longer(cost: jax.Array) -> jax.Array:
    """bool[tiles, tiles] for `in_order`: most costly tiles first, so that none is left for the end.

    Of equal ones the order stays.
    """
    tile = jnp.arange(cost.shape[0], dtype=jnp.int32)
    return (cost[None, :] > cost[:, None]) | (
        (cost[None, :] == cost[:, None]) & (tile[None, :] < tile[:, None])
    )


@dataclasses.dataclass(frozen=True)
class Share:
    """Units that one block works on, one after the other."""

    block: jax.Array
    count: jax.Array
    num_blocks: int

    def unit_at(self, i: jax.Array) -> jax.Array:
        """Forth and back, since units come longest first."""
        _, is_back = div_rem(i, 2)
        place = jnp.where(is_back == 1, self.num_blocks - 1 - self.block, self.block)
        return i * self.num_blocks + place


def share(num_units: jax.Array, block: jax.Array, num_blocks: int) -> Share:
    """What block number `block` works on."""
    full, rest = div_rem(num_units, num_blocks)
    last = Share(block, full, num_blocks).unit_at(full) - full * num_blocks
    return Share(block, full + (last < rest).astype(jnp.int32), num_blocks)


@dataclasses.dataclass(frozen=True)
class Block:
    """Keys and values in shared memory, as one warpgroup sees them."""

    score: Callable[[Ref], None]
    """Multiplies the queries by the keys into an accumulator [64, S]."""
    num_keys: int
    values: Ref
    """[S, H]; `values_here` says when."""
    keys_free: Ref
    values_here: Ref
    values_free: Ref
    turn: Ref
    """Which of the two warpgroups multiplies."""
    weights: Ref | None
    """[64, S], where weights do not stay in registers."""


def nothing(dims: int) -> Partial:
    """Before the first block, of values of so many dims."""
    return (
        plgpu.layout_cast(jnp.zeros((ROWS, dims), jnp.float32), SCORES),
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), _PER_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _PER_ROW),
    )


def attend_block(
    partial: Partial,
    block: Block,
    factor: float,
    visible: Callable[[tuple[int, int]], jax.Array] | None,
    meanwhile: Callable[[], None],
    capped: Callable[[jax.Array], jax.Array] | None = None,
) -> Partial:
    """Adds the keys of one block; a running softmax in powers of two.

    Args:
      partial: of the blocks before.
      block: whose keys are here.
      factor: multiplies the scores, log2(e) included.
      visible: bool[64, S] of that shape, where some keys may be hidden from some queries.
      meanwhile: what to wait for while the values are multiplied.
      capped: makes scores of products before they are multiplied; None: products are scores.
    """
    values, high, total = partial

    def score(out: Ref) -> jax.Array:
        block.score(out)
        take_turn(block.turn)
        return out[...]

    scores = _accumulated(score, (ROWS, block.num_keys))
    plgpu.barrier_arrive(block.keys_free)
    if capped is not None:
        scores = capped(scores)
    if visible is not None:
        scores = jnp.where(visible((ROWS, block.num_keys)), scores, -jnp.inf)
    new_high = jnp.maximum(high, scores.max(axis=1) * factor)
    kept = jnp.exp2(high - new_high)
    probabilities = jnp.exp2(scores * factor - per_row(new_high, scores))
    values = values * per_row(kept, values)
    total = total * kept + probabilities.sum(axis=1)
    weights = probabilities.astype(jnp.bfloat16)
    # Nothing of the softmax may sink below: the tensor cores are the other's until it is done.
    values, new_high, total, weights = jax.lax.optimization_barrier(
        (values, new_high, total, weights)
    )
    plgpu.barrier_arrive(block.turn)
    plgpu.barrier_wait(block.values_here)
    plgpu.barrier_wait(block.turn)
    values = _add_values(values, weights, block, meanwhile)
    plgpu.barrier_arrive(block.values_free)
    return values, new_high, total


def _add_values(
    values: jax.Array, weights: jax.Array, block: Block, meanwhile: Callable[[], None]
) -> jax.Array:
    """values [64, H] plus weights [64, S] times the block's values [S, H]."""
    staged = block.weights
    if staged is None:

        def add(out: Ref) -> None:
            plgpu.wgmma(out, weights, block.values)
            meanwhile()

        initial: Any = plgpu.ACC.init(values)  # pyright: ignore[reportPrivateImportUsage]
        return pl.run_state(add)(initial)

    staged[...] = weights
    plgpu.commit_smem()

    def multiply(out: Ref) -> jax.Array:
        plgpu.wgmma(out, staged, block.values)
        meanwhile()
        return out[...]

    return values + _accumulated(multiply, (ROWS, values.shape[1]))


def _accumulated(multiply: Callable[[Ref], jax.Array], shape: tuple[int, int]) -> jax.Array:
    """What `multiply` reads of a new accumulator of float32."""
    # Public, though listed in a way that type checkers do not see.
    out = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, out)


def normalized(partial: Partial) -> jax.Array:
    """The result [64, H] in bfloat16; zero of a query that saw no key."""
    values, _, total = partial
    # Only rows that saw no key have a total of 0; a NaN must stay one.
    divisor = jnp.where(total == 0, 1.0, total)
    return (values / per_row(divisor, values)).astype(jnp.bfloat16)


def places(
    shape: tuple[int, int], query_at: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Positions of each score's query and of its key, i32[64, S]."""
    query_at = query_at + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=SCORES)
    return query_at, start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=SCORES)


def write_rows(
    source: Ref, target: Ref, begin: jax.Array, end: jax.Array, start: jax.Array
) -> None:
    """Copies rows `begin` to `end` to those from `start` on; the rows beside are a neighbour's.

    Eight at once and then one by one: the size of a copy is static.
    """

    def copy(size: int, row: jax.Array) -> None:
        rows = source.at[pl.ds(row, size)]
        plgpu.copy_smem_to_gmem(rows, target.at[pl.ds(start + row, size)])

    num_eights, _ = div_rem(jnp.maximum(end - begin, 0), 8)
    pl.loop(0, num_eights)(lambda i: copy(8, begin + 8 * i))
    pl.loop(begin + 8 * num_eights, end)(lambda row: copy(1, row))


def take_turn(turn: Ref) -> None:
    """Gives the tensor cores to the other warpgroup and waits until it gives them back."""
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def per_row(x: jax.Array, like: jax.Array) -> jax.Array:
    """x [64] -> [64, X] of `like`."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])
