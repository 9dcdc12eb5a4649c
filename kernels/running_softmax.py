"""What the decode attention kernels share: a running softmax with queries as columns.

Tokens lie on the 64-wide side of a product, 64 of them a tile, and a block's queries are its
columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import MASKED, Ref

TILE = 64
"""Tokens attended at once: the fixed side of a warpgroup's product."""
SCORES = plgpu.Layout.WGMMA
COLUMNS = SCORES.reduce(0)

Partial = tuple[jax.Array, jax.Array, jax.Array]
# Of the tiles seen so far: weighted values [H, C], highest score [C], and weights [64, C] that are
# summed over tiles only: the sum over the 64 waits for the end.


def nothing(dims: int, columns: int) -> Partial:
    """Before the first tile."""
    return (
        plgpu.layout_cast(jnp.zeros((dims, columns), jnp.float32), SCORES),
        plgpu.layout_cast(jnp.full((columns,), MASKED, jnp.float32), COLUMNS),
        plgpu.layout_cast(jnp.zeros((TILE, columns), jnp.float32), SCORES),
    )


def column_positions(
    query_at: list[jax.Array], cut: jax.Array, columns: int, group: int
) -> jax.Array:
    """Position of each column's query: a scalar of single queries, else i32[C].

    Args:
      query_at: positions of a row's queries.
      cut: number of the block among those that share the queries out.
      columns: of a block.
      group: columns of one query.
    """
    if len(query_at) == 1:
        return query_at[0]
    shape = (columns,)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=COLUMNS) + cut * columns
    column_at = jnp.full(shape, query_at[0], jnp.int32)
    for i in range(1, len(query_at)):
        column_at = jnp.where(column >= i * group, query_at[i], column_at)
    return column_at


def weigh(
    high: jax.Array, scores: jax.Array, weights: Ref
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Turns a tile's scores [64, C], in powers of two, into weights, which a product then reads.

    Returns:
      The highest score so far [C], what earlier weights are worth now [C], the weights [64, C].
    """
    new_high = jnp.maximum(high, scores.max(axis=0))
    kept = jnp.exp2(high - new_high)
    probabilities = jnp.exp2(scores - per_column(new_high, scores))
    weights.T[...] = probabilities.astype(weights.dtype)
    plgpu.commit_smem()
    return new_high, kept, probabilities


def per_column(x: jax.Array, like: jax.Array) -> jax.Array:
    """x [C] -> [M, C] of `like`."""
    return jax.lax.broadcast_in_dim(x, like.shape, [1])
