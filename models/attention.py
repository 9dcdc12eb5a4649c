"""Attention of one layer over its cache group: writes new KV, attends decode rows and chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels.attention import api
from kernels.qkv import api as qkv_api
from models.batch import Batch
from models.cache import kv_places, write_kv
from models.layers import Dense, Rotation


@dataclasses.dataclass(frozen=True)
class Queries:
    """A step's queries, and pages that hold its keys and values: all that attention takes."""

    q: jax.Array
    """[T, N, H], rotated."""
    pool: jax.Array
    """[P, K, 2, page_size, H], with this step's tokens."""
    batch: Batch
    page_table: jax.Array
    """i32[R, W] of the layer's group."""
    scale: float
    """Multiplies the scores."""
    window: int | None
    """Positions a query sees, itself included; None: all before it."""

    def attended(self) -> jax.Array:
        """[T, N, H] in q's dtype; zero for padding."""
        if self.batch.is_decode:
            return api.decode(*self._rows, **self.look).reshape(self.q.shape)
        return _attend_mixed(self)

    def times(self, weight: Dense) -> jax.Array:
        """Parts [S, T, D] of the product with a weight [N * H, D]."""
        if self.batch.is_decode:
            return api.decode_times(*self._rows, weight.kernel, **self.look)
        out = self.attended()
        return weight.parts(out.reshape(out.shape[0], -1), self.batch.tiling.kernels)

    @property
    def _rows(self) -> tuple[jax.Array, ...]:
        batch = self.batch
        rows, queries = batch.kv_lens.shape[0], batch.query_len
        q = self.q.reshape(rows, queries, *self.q.shape[1:])
        return q, self.pool, self.page_table, batch.positions.reshape(rows, queries), batch.kv_lens

    @property
    def look(self) -> dict[str, Any]:
        """What both ops take beside arrays."""
        tiling = self.batch.tiling
        return {
            "scale": self.scale,
            "window": self.window,
            "block_pages": tiling.block_pages,
            "block_bytes": tiling.block_bytes,
            "kernels": tiling.kernels,
        }


def prepared(
    qkv: jax.Array,
    turn: Rotation,
    vectors: jax.Array | None,
    pool: jax.Array,
    batch: Batch,
    page_table: jax.Array,
    *,
    scales_at: int,
    eps: float,
    scale: float,
    window: int | None,
) -> tuple[Queries, jax.Array]:
    """Makes a layer's queries of its projection, and writes its keys and values.

    Args:
      qkv: [T, K, G + 2, H], per kv head its queries, key and value.
      turn: of the step's positions.
      vectors: 1-D, holds the norm's scales among others; None: queries and keys are not normed.
      pool: [P, K, 2, page_size, H].
      batch: lengths and rows of the step.
      page_table: i32[R, W] of the layer's group.
      scales_at: where in `vectors` the scales [G + 1, H] of queries and key begin.
      eps: of the norm.
      scale: as in `Queries`.
      window: as in `Queries`.

    Returns:
      The queries, and bool[T] where a key or value was not finite.
    """
    pages, offsets = kv_places(batch, page_table, pool.shape[3])
    q, pool, is_bad = qkv_api.prepare(
        qkv,
        turn.cos,
        turn.sin,
        vectors,
        pool,
        pages,
        offsets,
        scales_at=scales_at,
        eps=eps,
        kernels=batch.tiling.kernels,
    )
    queries = Queries(q, pool, batch, page_table, scale, window)
    return queries, jnp.logical_and(batch.is_real, is_bad)


def written(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pool: jax.Array,
    batch: Batch,
    page_table: jax.Array,
    *,
    scale: float,
    window: int | None,
) -> tuple[Queries, jax.Array]:
    """The same of queries [T, N, H], keys and values [T, K, H] that are rotated already."""
    pool, is_bad = write_kv(pool, keys, values, batch, page_table)
    return Queries(q, pool, batch, page_table, scale, window), is_bad


def _attend_mixed(queries: Queries) -> jax.Array:
    """Decode rows and chunks."""
    q, pool, batch, table = queries.q, queries.pool, queries.batch, queries.page_table
    tiling = batch.tiling
    out = api.prefill(
        q,
        pool,
        table,
        batch.positions,
        batch.kv_lens,
        batch.cu_q_lens,
        batch.num_decode,
        tile_tokens=tiling.tile_tokens,
        tiles_at_once=tiling.tiles_at_once,
        max_chunk_rows=batch.max_chunk_rows,
        **queries.look,
    )

    def decode_rows(num_rows: int, kv_lens: jax.Array) -> jax.Array:
        rows = api.decode(
            q[:num_rows, None],
            pool,
            table[:num_rows],
            batch.positions[:num_rows, None],
            kv_lens,
            **queries.look,
        )
        return rows[:, 0]

    # A kernel skips rows without keys at once; a branch would cost launches and compile time.
    return with_decode_rows(out, batch, decode_rows, has_branch=tiling.kernels != "mosaic")


def with_decode_rows(
    out: jax.Array,
    batch: Batch,
    attend_rows: Callable[[int, jax.Array], jax.Array],
    *,
    has_branch: bool,
) -> jax.Array:
    """Fills a mixed step's leading tokens, one per decode row, which `prefill` left at zero.

    Args:
      out: [T, N, H].
      batch: rows of the step.
      attend_rows: attends the first rows, with i32[rows] kv_lens of which 0 marks those that are
        no decode rows -> [rows, N, H].
      has_branch: a step without decode rows does not call attend_rows.

    Returns:
      [T, N, H].
    """
    num_rows = min(batch.kv_lens.shape[0], out.shape[0])
    is_decode_row = jnp.arange(num_rows, dtype=jnp.int32) < batch.num_decode

    def fill(out: jax.Array) -> jax.Array:
        rows = attend_rows(num_rows, jnp.where(is_decode_row, batch.kv_lens[:num_rows], 0))
        return out.at[:num_rows].set(jnp.where(is_decode_row[:, None, None], rows, out[:num_rows]))

    if not has_branch:
        return fill(out)
    return jax.lax.cond(batch.num_decode > 0, fill, lambda out: out, out)
