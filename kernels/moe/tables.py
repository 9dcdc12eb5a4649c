"""Who goes where, by kernels of one warpgroup: the experts chosen, and rows grouped by expert.

Experts, tokens and blocks of tokens lie on the sides of matrices of 64 rows. Sums along a row stay
within a few lanes; sums up to a place are products with a triangle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import SWIZZLED, Ref, round_up

SIDE = 64
"""Rows of a warpgroup's matrix: experts, tokens or blocks looked at together."""
_MATRIX = plgpu.Layout.WGMMA


def by_choice(
    expert_ids: jax.Array, weights: jax.Array, num_experts: int, columns: int
) -> tuple[jax.Array, jax.Array]:
    """Turns ids and weights [T, k], so that a choice's lie side by side.

    Returns:
      i32 and f32[k, columns], -1 and 0 where no expert is chosen.
    """
    is_counted = expert_ids < num_experts
    spare = ((0, 0), (0, columns - expert_ids.shape[0]))
    ids = jnp.where(is_counted, expert_ids, -1).T
    # No kernel looks at the weight of -1; of both together XLA makes one fusion.
    weights = jnp.where(is_counted, weights, 0.0).T
    return jnp.pad(ids, spare, constant_values=-1), jnp.pad(weights, spare)


# --- experts that some token counts ---


def choose(
    ids: jax.Array, weights: jax.Array, num_experts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which experts some token counts.

    Args:
      ids: i32[k, columns].
      weights: f32[k, columns].
      num_experts: at least as many; E is the next multiple of 64.

    Returns:
      f32[E, columns], what each expert counts for each token, 0 where it was not chosen; i32[E],
      the chosen ones in rising order and then the last one; i32[E], how many are chosen up to each.
    """
    size = round_up(num_experts, SIDE)
    kernel = plgpu.kernel(
        functools.partial(_choose_kernel, num_experts=num_experts),
        out_type=(_out("float32", size, ids.shape[1]), _out("int32", size), _out("int32", size)),
        kernel_name="moe_choose",
        grid=(1,),
        grid_names=("block",),
        scratch_types=dict(marks=_vector(size), sums=_vector(size)),
    )
    return kernel(ids, weights)


def _choose_kernel(
    ids: Ref,
    weights: Ref,
    token_weights: Ref,
    chosen: Ref,
    upto: Ref,
    *,
    marks: Ref,
    sums: Ref,
    num_experts: int,
) -> None:
    """One block does it all, 64 experts at a time."""
    (size,), columns = chosen.shape, ids.shape[1]
    for start in range(0, size, SIDE):
        shape, rows = (SIDE, columns), pl.ds(start, SIDE)
        expert = _iota(shape, 0) + start
        of_tokens = _zeros(shape)
        for choice in range(ids.shape[0]):
            id_of, weight_of = (_per_column(ref.at[choice], shape) for ref in (ids, weights))
            of_tokens = jnp.where(id_of == expert, weight_of, of_tokens)
        token_weights[rows] = of_tokens
        marks[rows] = jnp.where(of_tokens == 0.0, 0.0, 1.0).max(axis=1)  # 1 for a NaN too
    plgpu.commit_smem()
    _add_up(_per_column(marks, (SIDE, size)), sums, upto)
    _first_past(sums, chosen, num_experts)


def _add_up(counts: jax.Array, sums: Ref, upto: Ref) -> None:
    """Writes the sums up to each expert of counts [64, E], whose rows are equal."""
    other = _iota(counts.shape, 1)
    for start in range(0, counts.shape[1], SIDE):
        rows = pl.ds(start, SIDE)
        total = jnp.where(other <= _iota(counts.shape, 0) + start, counts, 0.0).sum(axis=1)
        sums[rows] = total
        upto[rows] = total.astype(jnp.int32)
    plgpu.commit_smem()


def _first_past(sums: Ref, found: Ref, num_experts: int) -> None:
    """Writes for each number the first expert whose sum [E] is past it, or else the last one."""
    total = _per_column(sums, (SIDE, sums.shape[0]))

    def first(number: jax.Array) -> jax.Array:
        before = jnp.where(total <= number, 1.0, 0.0).sum(axis=1)
        return jnp.minimum(before, num_experts - 1.0)

    _write_each(first, total.shape, found)


def _write_each(value: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], out: Ref) -> None:
    """Writes a value for every number, of 64 numbers at a time: f32[64, E], columns equal."""
    (size,) = out.shape

    @pl.loop(0, -(-size // SIDE))
    def _(i: jax.Array) -> None:
        start = jnp.minimum(i * SIDE, size - SIDE)
        number = (_iota(shape, 0) + start).astype(jnp.float32)
        out[pl.ds(start, SIDE)] = value(number).astype(jnp.int32)


# --- rows grouped by expert ---


def group(
    expert_ids: jax.Array, ids: jax.Array, num_experts: int, num_tiles: int, columns: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gives every choice a row, an expert's rows side by side in tiles of their own.

    Args:
      expert_ids: i32[T, k], all different within a token; `num_experts` or more do not count.
      ids: the same i32[k, columns] of them, -1 where none is chosen, a multiple of 64 wide.
      num_experts: E.
      num_tiles: as many as there can be, at least 64.
      columns: rows of a tile, a power of two.

    Returns:
      i32[num_tiles], each tile's expert; i32[E or more], tiles up to each expert; i32[num_tiles],
      how many choices each tile holds, in its first rows; i32[T, k], row of each choice, -1 for one
      that does not count.
    """
    local, counts = _count(ids, round_up(num_experts, SIDE))
    experts, upto, held, bases = _place(
        counts, ids.shape[1] // SIDE, num_experts, num_tiles, columns
    )
    is_counted = expert_ids < num_experts
    known = jnp.where(is_counted, expert_ids, 0)
    token = jnp.arange(expert_ids.shape[0], dtype=jnp.int32)[:, None]
    base = bases.at[token // SIDE, known].get(mode="promise_in_bounds")
    rows = base + local.at[known, token].get(mode="promise_in_bounds")
    return experts, upto, held, jnp.where(is_counted, rows, -1)


def _count(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Of each expert and 64 tokens: who of them choose it before each, and how many do.

    Returns:
      i32[E, T] and f32[blocks, E], whose blocks past the last one are not written.
    """
    num_blocks = ids.shape[1] // SIDE
    kernel = plgpu.kernel(
        _count_kernel,
        out_type=(
            _out("int32", size, ids.shape[1]),
            _out("float32", round_up(num_blocks, SIDE), size),
        ),
        kernel_name="moe_count",
        grid=(num_blocks, size // SIDE),
        grid_names=("block", "part"),
        scratch_types=dict(hits=_matrix(SIDE, SIDE), triangle=_matrix(SIDE, SIDE)),
    )
    return kernel(ids)


def _count_kernel(ids: Ref, local: Ref, counts: Ref, *, hits: Ref, triangle: Ref) -> None:
    """64 tokens and 64 experts."""
    block, part = jax.lax.axis_index("block"), jax.lax.axis_index("part")
    shape = (SIDE, SIDE)
    tokens, experts = (pl.ds(pl.multiple_of(x * SIDE, SIDE), SIDE) for x in (block, part))
    expert = _iota(shape, 0) + part * SIDE
    is_hit = _zeros(shape)
    for choice in range(ids.shape[0]):
        is_hit = jnp.where(_per_column(ids.at[choice, tokens], shape) == expert, 1.0, is_hit)
    hits[...] = is_hit.astype(hits.dtype)
    triangle[...] = jnp.where(_iota(shape, 0) < _iota(shape, 1), 1.0, 0.0).astype(triangle.dtype)
    plgpu.commit_smem()
    local[experts, tokens] = _product(hits, triangle).astype(jnp.int32)
    counts[block, experts] = is_hit.sum(axis=1)


def _place(
    counts: jax.Array, num_blocks: int, num_experts: int, num_tiles: int, columns: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Lays out the tiles.

    Returns:
      i32[num_tiles], each tile's expert; i32[E], tiles up to each; i32[num_tiles], how many choices
      each tile holds; i32[blocks, E], the row of each expert's first choice among a block's tokens.
    """
    size = counts.shape[1]
    kernel = plgpu.kernel(
        functools.partial(
            _place_kernel, num_blocks=num_blocks, num_experts=num_experts, columns=columns
        ),
        out_type=(
            _out("int32", num_tiles),
            _out("int32", size),
            _out("int32", num_tiles),
            _out("int32", *counts.shape),
        ),
        kernel_name="moe_place",
        grid=(1,),
        grid_names=("block",),
        scratch_types=dict(
            sums=_vector(size), staged=_matrix(SIDE, size), triangle=_matrix(SIDE, SIDE)
        ),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=16 * size),
    )
    return kernel(counts)


def _place_kernel(
    counts: Ref,
    experts: Ref,
    upto: Ref,
    held: Ref,
    bases: Ref,
    *,
    sums: Ref,
    staged: Ref,
    triangle: Ref,
    num_blocks: int,
    num_experts: int,
    columns: int,
) -> None:
    """One block does it all, 64 blocks of tokens at a time."""
    size = counts.shape[1]
    shape, num_parts = (SIDE, size), counts.shape[0] // SIDE

    def rows_of(part: jax.Array) -> Any:
        return pl.ds(pl.multiple_of(part * SIDE, SIDE), SIDE)

    def counts_of(part: jax.Array) -> jax.Array:
        found = plgpu.load(counts.at[rows_of(part)], layout=_MATRIX, optimized=False)
        return jnp.where(_iota(shape, 0) + part * SIDE < num_blocks, found, 0.0)

    def add(part: jax.Array, total: jax.Array) -> jax.Array:
        return total + counts_of(part).sum(axis=0)

    nothing = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), _MATRIX.reduce(0))
    total = jax.lax.fori_loop(0, num_parts, add, nothing)
    num_tiles = (total + (columns - 1)) * (1 / columns)
    num_tiles = num_tiles.astype(jnp.int32).astype(jnp.float32)
    _add_up(jax.lax.broadcast_in_dim(num_tiles, shape, [1]), sums, upto)
    _first_past(sums, experts, num_experts)
    upto_each = plgpu.load(sums, layout=_MATRIX.reduce(0), optimized=False)
    _fill(upto_each, num_tiles * float(columns) - total, held, columns)
    corner = (SIDE, SIDE)
    is_before = jnp.where(_iota(corner, 1) < _iota(corner, 0), 1.0, 0.0)
    triangle[...] = is_before.astype(triangle.dtype)

    def place(part: jax.Array, base: jax.Array) -> jax.Array:
        found = counts_of(part)
        staged[...] = found.astype(staged.dtype)  # at most 64: exact
        plgpu.commit_smem()
        rows = _product(triangle, staged) + jax.lax.broadcast_in_dim(base, shape, [1])
        bases[rows_of(part)] = rows.astype(jnp.int32)
        return base + found.sum(axis=0)

    jax.lax.fori_loop(0, num_parts, place, (upto_each - num_tiles) * float(columns))


def _fill(upto: jax.Array, spare: jax.Array, held: Ref, columns: int) -> None:
    """Writes how many choices each tile holds: all rows, less what an expert's last one has spare.

    `upto` and `spare` [E] are tiles up to each expert and rows that it leaves free.
    """
    shape = (SIDE, upto.shape[0])
    upto, spare = (jax.lax.broadcast_in_dim(x, shape, [1]) for x in (upto, spare))

    def choices(number: jax.Array) -> jax.Array:
        return float(columns) - jnp.where(upto == number + 1.0, spare, 0.0).sum(axis=1)

    _write_each(choices, shape, held)


def _product(left: Ref, right: Ref) -> jax.Array:
    """[64, X] times [X, Y], both in shared memory -> f32 [64, Y]."""

    def multiply(out: Ref) -> jax.Array:
        plgpu.wgmma(out, left, right)
        return out[...]

    # Public, though listed in a way that type checkers do not see.
    out = plgpu.ACC((SIDE, right.shape[1]), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, out)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_MATRIX)


def _zeros(shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _MATRIX)


def _per_column(x: Ref, shape: tuple[int, ...]) -> jax.Array:
    """x [columns] in memory -> [rows, columns]."""
    x = plgpu.load(x, layout=_MATRIX.reduce(0), optimized=False)
    return jax.lax.broadcast_in_dim(x, shape, [1])


def _out(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _vector(size: int) -> Any:
    return plgpu.SMEM((size,), jnp.float32)


def _matrix(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)
