"""Prepares a layer's queries, keys and values on Hopper: one kernel from projection to attention.

A warpgroup takes some tokens of one kv head: they come in one copy, are normed and turned where
they lie in shared memory, and leave as one copy per token to the queries and one to the pool.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import Ref, decline_unless_covered

_PAGE_SIZES = (8, 16, 32, 64)
_ALIGNED = 8
"""Scales are loaded in 16 bytes, so they start at multiples of as many values."""

Layout = Any  # Pallas has no public type for it.
Halves = tuple[jax.Array, jax.Array]
# The first and the second half of a head's dimensions, [rows, H / 2] each: they turn as pairs.


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static of one kernel."""

    num_tokens: int
    num_kv_heads: int
    group: int
    head_dim: int
    scales_at: int | None
    """Where among the vectors the norm's scales begin; None: there is no norm."""
    eps: float

    @property
    def half(self) -> int:
        return self.head_dim // 2

    @property
    def tokens(self) -> int:
        """Tokens of a block: as many as it computes rows, where that cuts the tokens evenly.

        Blocks of 8 and 16 rows of 128-wide heads normed wrongly on an H200 (2026-11-29), though
        not in the interpreter; blocks of the fewest rows are right, and there are enough of them.
        """
        return next(n for n in (8, 4, 2, 1) if n <= self.rows and self.num_tokens % n == 0)

    @property
    def rows(self) -> int:
        """Tokens that a block computes, needed or not: a warp has one, a lane two of its values."""
        return max(4, 256 // self.half)

    @property
    def layout(self) -> Layout:
        """Of [rows, half]: a row lies in neighbouring lanes of one warp, by 16 bytes at most."""
        rows, half = self.rows, self.half
        vector = rows * half // 128
        if rows == 4:
            return _tiled((rows, half), (vector,), warp_dims=(-3,), lane_dims=(-2,))
        tiles = (rows, half), (rows // 4, half), (vector,)
        return _tiled(*tiles, warp_dims=(-5,), lane_dims=(-3, -2))


def _tiled(*tiles: tuple[int, ...], **dims: tuple[int, ...]) -> Layout:
    return plgpu.Layout.TILED(fragmented_array.Tiling(tiles), **dims, vector_dim=-1)


def prepare(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    vectors: jax.Array | None,
    pool: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    scales_at: int,
    eps: float,
    kernels: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norms, turns and stores one layer's tokens; see `reference.prepare`.

    Every step is rounded as the reference's text has it; sums run in another order.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    _decline(qkv, vectors, pool, scales_at, kernels)
    num_tokens, num_kv_heads, heads, head_dim = qkv.shape
    plan = _Plan(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        group=heads - 2,
        head_dim=head_dim,
        scales_at=None if vectors is None else scales_at,
        eps=eps,
    )
    in_place = jax.new_ref(pool)
    operands = [in_place, pages, offsets, qkv, cos, sin]
    if vectors is not None:
        operands.append(vectors)
    q, is_bad = _prepare(plan)(*operands)
    # Unrolled, so that XLA makes one fusion of it, for all layers.
    flags = [is_bad[:, head, : plan.tokens] for head in range(num_kv_heads)]
    flags = functools.reduce(jnp.bitwise_or, flags).reshape(num_tokens)
    return q.reshape(num_tokens, -1, head_dim), jax.freeze(in_place), flags != 0


def _decline(
    qkv: jax.Array, vectors: jax.Array | None, pool: jax.Array, scales_at: int, kernels: str
) -> None:
    decline_unless_covered(
        "qkv is",
        qkv,
        pool,
        group=qkv.shape[2] - 2,
        page_sizes=_PAGE_SIZES,
        kernels=kernels,
    )
    if vectors is None:
        return
    if vectors.dtype != jnp.bfloat16:
        raise NotImplementedError(f"scales are {vectors.dtype}, not bfloat16")
    if scales_at % _ALIGNED:
        raise NotImplementedError(f"scales start at {scales_at}, not a multiple of {_ALIGNED}")


def _prepare(plan: _Plan) -> Any:
    """(pool, pages, offsets, qkv, cos, sin, scales or nothing) -> q, what is not finite."""
    blocks = plan.num_tokens // plan.tokens
    heads, rows, half = plan.num_kv_heads, plan.rows, plan.half
    q_shape = (plan.num_tokens, heads, plan.group, plan.head_dim)
    scratch = dict(
        tile=plgpu.SMEM((rows, plan.group + 2, plan.head_dim), jnp.bfloat16),
        cos_tile=plgpu.SMEM((rows, half), jnp.float32),
        sin_tile=plgpu.SMEM((rows, half), jnp.float32),
        here=plgpu.Barrier(num_arrivals=3 if plan.scales_at is None else 4 + plan.group),
    )
    if plan.scales_at is not None:
        scratch["scales"] = plgpu.SMEM((plan.group + 1, plan.head_dim), jnp.bfloat16)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct(q_shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((blocks, heads, rows), jnp.int32),
        ),
        kernel_name="prepare_qkv",
        # The last axis runs fastest: the heads of one token, which lie side by side.
        grid=(blocks, heads),
        grid_names=("block", "head"),
        scratch_types=scratch,
    )


def _kernel(
    pool: Ref,
    pages: Ref,
    offsets: Ref,
    qkv: Ref,
    cos: Ref,
    sin: Ref,
    *others: Ref,
    tile: Ref,
    cos_tile: Ref,
    sin_tile: Ref,
    here: Ref,
    scales: Ref | None = None,
    plan: _Plan,
) -> None:
    """One block: some tokens of one kv head. Rows of the tile past them hold anything."""
    *vectors, q, is_bad = others
    block, head = jax.lax.axis_index("block"), jax.lax.axis_index("head")
    start = block * plan.tokens
    tokens, filled = pl.ds(start, plan.tokens), pl.ds(0, plan.tokens)
    plgpu.copy_gmem_to_smem(qkv.at[tokens, head], tile.at[filled], here)
    plgpu.copy_gmem_to_smem(cos.at[tokens], cos_tile.at[filled], here)
    plgpu.copy_gmem_to_smem(sin.at[tokens], sin_tile.at[filled], here)
    if scales is not None:
        _fetch_scales(vectors[0], scales, here, plan)
    places = [(pages[start + i], offsets[start + i]) for i in range(plan.tokens)]
    plgpu.barrier_wait(here)
    turn = _load(cos_tile, plan), _load(sin_tile, plan)

    def turn_head(i: jax.Array, carry: None) -> None:
        _write(tile, i, _turned(_read(tile, i, plan), i, scales, turn, plan), plan)
        return carry

    key, value = plan.group, plan.group + 1
    # A loop, since layouts of straight code for many heads take seconds to infer.
    jax.lax.fori_loop(0, value, turn_head, None)
    is_worst = jnp.maximum(*(_zero_nonfinite(tile, i, plan) for i in (key, value)))
    is_bad[block, head] = is_worst.astype(jnp.int32)
    plgpu.commit_smem()
    for i, (page, offset) in enumerate(places):
        plgpu.copy_smem_to_gmem(tile.at[i, pl.ds(0, plan.group)], q.at[start + i, head])
        plgpu.copy_smem_to_gmem(tile.at[i, pl.ds(key, 2)], pool.at[page, head, :, offset])
    plgpu.wait_smem_to_gmem(0)


def _fetch_scales(vectors: Ref, scales: Ref, here: Ref, plan: _Plan) -> None:
    """With the tokens: loads where they are used would wait for memory once a head."""
    assert plan.scales_at is not None
    for i in range(plan.group + 1):
        source = vectors.at[pl.ds(plan.scales_at + i * plan.head_dim, plan.head_dim)]
        plgpu.copy_gmem_to_smem(source, scales.at[i], here)


def _load(x: Ref, plan: _Plan) -> jax.Array:
    return plgpu.load(x, layout=plan.layout, optimized=False)


def _read(tile: Ref, i: jax.Array | int, plan: _Plan) -> Halves:
    """Head i of the group, of every token."""
    first, second = (tile.at[:, i, pl.ds(start, plan.half)] for start in (0, plan.half))
    return _load(first, plan), _load(second, plan)


def _write(tile: Ref, i: jax.Array | int, x: Halves, plan: _Plan) -> None:
    for start, part in zip((0, plan.half), x, strict=True):
        tile[:, i, pl.ds(start, plan.half)] = part


def _zero_nonfinite(tile: Ref, i: int, plan: _Plan) -> jax.Array:
    """f32[rows], 1 where something of head i was not finite and is 0 now."""
    x = _read(tile, i, plan)
    is_finite = [jnp.abs(part.astype(jnp.float32)) < jnp.inf for part in x]
    first, second = (
        jnp.where(ok, part, jnp.zeros_like(part)) for ok, part in zip(is_finite, x, strict=True)
    )
    _write(tile, i, (first, second), plan)
    return jnp.where(jnp.logical_and(*is_finite), 0.0, 1.0).max(axis=1)


def _turned(
    x: Halves, i: jax.Array, scales: Ref | None, turn: tuple[jax.Array, jax.Array], plan: _Plan
) -> Halves:
    """Head i, normed where there are scales, then rotated."""
    first, second = (part.astype(jnp.float32) for part in x)
    if scales is not None:
        first, second = _normed((first, second), i, scales, plan)
    cos, sin = turn
    return (
        (first * cos - second * sin).astype(jnp.bfloat16),
        (second * cos + first * sin).astype(jnp.bfloat16),
    )


def _normed(x: Halves, i: jax.Array, scales: Ref, plan: _Plan) -> Halves:
    """f32 in, f32 out, rounded to bfloat16 twice as the reference is."""
    squares = [(part * part).sum(axis=1) for part in x]
    inverse = jax.lax.rsqrt((squares[0] + squares[1]) * (1 / plan.head_dim) + plan.eps)

    def scaled(part: jax.Array, start: int) -> jax.Array:
        source = scales.at[i, pl.ds(start, plan.half)]
        scale = plgpu.load(source, layout=plan.layout.reduce(0), optimized=False)
        scale = jax.lax.broadcast_in_dim(scale.astype(jnp.float32), part.shape, [1])
        part = part * jax.lax.broadcast_in_dim(inverse, part.shape, [0])
        return _rounded(_rounded(part) * scale)

    return scaled(x[0], 0), scaled(x[1], plan.half)


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)
