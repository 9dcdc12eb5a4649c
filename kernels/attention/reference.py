"""Paged attention in plain JAX, every kernel's truth: walks page blocks with a running softmax."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a row with no visible key yet must not turn into NaN

Partial = tuple[jax.Array, jax.Array, jax.Array]
# Of one or more blocks: highest score, sum of weights (both [B, K, QG, 1]), weighted values.

Read = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""Keys [B, K, S, H] and values [B, K, S, H'] of i32[B, W] pages, tokens in order."""

AttendTiles = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""q [B, Q, K, G, H], i32[B] rows, i32[B, Q] positions, i32[B] kv_lens -> f32 [B, Q, K, G, H']."""


def decode(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    block_pages: int,
    block_bytes: int,
    soft_cap: float | None = None,
    kernels: str = "plain",
) -> jax.Array:
    """Attends rows of equal query length to their pages.

    Args:
      q: [R, Q, N, H], rotated.
      pool: [P, K, 2, page_size, H], this step's keys and values included.
      page_table: i32[R, W].
      positions: i32[R, Q], position of each query.
      kv_lens: i32[R]; 0 marks a padding row, whose output is zero.
      scale: multiplies the scores.
      window: positions a query sees, itself included; None: all before it.
      block_pages: pages attended at once, at most; the result's last bits depend on it.
      block_bytes: bytes of gathered pages at once, at most.
      soft_cap: c, scores s become c tanh(s / c); None: they stay.
      kernels: what the device can run; plain JAX runs everywhere.

    Returns:
      [R, Q, N, H] in q's dtype.
    """
    del kernels
    rows, queries, num_heads, head_dim = q.shape
    num_kv_heads = pool.shape[1]
    grouped = q.reshape(rows, queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = _attend(
        grouped,
        pool,
        page_table,
        positions,
        kv_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        block_pages=block_pages,
        block_bytes=block_bytes,
    )
    return out.reshape(rows, queries, num_heads, head_dim).astype(q.dtype)


def prefill(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decode: jax.Array,
    *,
    scale: float,
    window: int | None,
    block_pages: int,
    block_bytes: int,
    tile_tokens: int,
    tiles_at_once: int,
    max_chunk_rows: int,
    soft_cap: float | None = None,
    kernels: str = "plain",
) -> jax.Array:
    """Attends the chunks of a flat token batch to their pages, tile by tile.

    Args:
      q: [T, N, H], rotated; tokens of a row are adjacent.
      pool: [P, K, 2, page_size, H].
      page_table: i32[R, W].
      positions: i32[T].
      kv_lens: i32[R].
      cu_q_lens: i32[R + 1].
      num_decode: i32[], leading rows that are not chunks.
      scale: multiplies the scores.
      window: positions a query sees, itself included.
      block_pages: pages attended at once, at most.
      block_bytes: bytes of gathered pages at once, at most.
      tile_tokens: queries of one tile.
      tiles_at_once: tiles attended at once.
      max_chunk_rows: rows that can be chunks.
      soft_cap: as in `decode`.
      kernels: what the device can run; plain JAX runs everywhere.

    Returns:
      [T, N, H] in q's dtype; tokens that belong to no chunk are zero.
    """
    del kernels
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pool.shape[1]
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)

    def attend_tiles(
        q: jax.Array, rows: jax.Array, positions: jax.Array, kv_lens: jax.Array
    ) -> jax.Array:
        table = page_table[rows]
        return _attend(
            q,
            pool,
            table,
            positions,
            kv_lens,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            block_pages=block_pages,
            block_bytes=block_bytes,
        )

    out = over_tiles(
        attend_tiles,
        grouped,
        positions,
        kv_lens,
        cu_q_lens,
        num_decode,
        value_dim=head_dim,
        tile_tokens=tile_tokens,
        tiles_at_once=tiles_at_once,
        max_chunk_rows=max_chunk_rows,
    )
    return out.reshape(num_tokens, num_heads, head_dim)


def over_tiles(
    attend_tiles: AttendTiles,
    q: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decode: jax.Array,
    *,
    value_dim: int,
    tile_tokens: int,
    tiles_at_once: int,
    max_chunk_rows: int,
) -> jax.Array:
    """Cuts the chunks of a flat token batch into tiles of queries and attends those that hold any.

    Args:
      attend_tiles: attends some tiles; a lane without a query stands at position -1, and a tile
        without any has kv_len 0.
      q: [T, K, G, H]; tokens of a row are adjacent.
      positions: i32[T].
      kv_lens: i32[R].
      cu_q_lens: i32[R + 1].
      num_decode: i32[], leading rows that are not chunks.
      value_dim: what attend_tiles gives of each head.
      tile_tokens: queries of one tile, at most.
      tiles_at_once: tiles of one call, at most.
      max_chunk_rows: rows that can be chunks.

    Returns:
      [T, K, G, value_dim] in q's dtype; tokens that belong to no chunk are zero.
    """
    num_tokens = q.shape[0]
    tile_tokens = min(tile_tokens, num_tokens)
    num_tiles = -(-num_tokens // tile_tokens) + max_chunk_rows
    tiles_at_once = min(tiles_at_once, num_tiles)
    num_groups = -(-num_tiles // tiles_at_once)
    tiles = _tiles(cu_q_lens, num_decode, tile_tokens, num_groups * tiles_at_once)
    lanes = jnp.arange(tile_tokens, dtype=jnp.int32)

    def attend_group(out: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        rows, starts, lens = group
        is_query = lanes[None, :] < lens[:, None]
        tokens = jnp.where(is_query, starts[:, None] + lanes[None, :], 0)
        tile_kv = jnp.where(lens > 0, kv_lens[rows], 0)
        tile_positions = jnp.where(is_query, positions[tokens], -1)
        values = attend_tiles(q[tokens], rows, tile_positions, tile_kv)
        # Lanes past a tile's end carry an index past the array, which the scatter drops.
        targets = jnp.where(is_query, tokens, num_tokens)
        return out.at[targets].set(values.astype(q.dtype), mode="drop"), None

    def step(out: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return jax.lax.cond(
            jnp.any(group[2] > 0), attend_group, lambda out, group: (out, None), out, group
        )

    # Zeros of all layers would be made at once, ahead of the first: 21 MB each of GLM-4.7-Flash,
    # 47 times. The barrier ties a layer's to its queries.
    q, zero = jax.lax.optimization_barrier((q, jnp.zeros((), q.dtype)))
    empty = jnp.broadcast_to(zero, (*q.shape[:-1], value_dim))
    if num_groups == 1:
        out, _ = attend_group(empty, tiles)
        return out
    groups = jax.tree.map(lambda x: x.reshape(num_groups, tiles_at_once), tiles)
    out, _ = jax.lax.scan(step, empty, groups)
    return out


def _tiles(
    cu_q_lens: jax.Array, num_decode: jax.Array, tile_tokens: int, num_tiles: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts chunk rows into tiles: (row, first token, tokens) of each, i32[num_tiles].

    Unused tiles are empty.
    """
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    row_index = jnp.arange(q_lens.shape[0], dtype=jnp.int32)
    counts = jnp.where(row_index >= num_decode, -(-q_lens // tile_tokens), 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    rows = jnp.sum(tile[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    is_used = tile < ends[-1]
    rows = jnp.where(is_used, rows, 0)
    offsets = (tile - (ends - counts)[rows]) * tile_tokens
    lens = jnp.clip(q_lens[rows] - offsets, 0, tile_tokens)
    return rows, cu_q_lens[rows] + offsets, jnp.where(is_used, lens, 0)


def _attend(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    block_pages: int,
    block_bytes: int,
) -> jax.Array:
    """q [B, Q, K, G, H] against the first kv_lens[B] tokens of each row -> f32 [B, Q, K, G, H]."""
    batch, _, num_kv_heads, _, head_dim = q.shape
    bytes_per_page = batch * pool[0].size * pool.dtype.itemsize

    def read(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        kv = pool[pages]  # [B, W, K, 2, page_size, H]
        kv = kv.transpose(0, 2, 3, 1, 4, 5).reshape(batch, num_kv_heads, 2, -1, head_dim)
        return kv[:, :, 0], kv[:, :, 1]

    return attend_read(
        q,
        read,
        page_table,
        positions,
        kv_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        page_size=pool.shape[3],
        block_pages=min(block_pages, block_bytes // bytes_per_page),
    )


def attend_read(
    q: jax.Array,
    read: Read,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    page_size: int,
    block_pages: int,
    soft_cap: float | None = None,
) -> jax.Array:
    """Walks each row's pages block by block with a running softmax, in float32.

    Args:
      q: [B, Q, K, G, H].
      read: keys and values of some pages.
      page_table: i32[B, W].
      positions: i32[B, Q]; a query at -1 sees nothing.
      kv_lens: i32[B]; a row of 0 sees nothing.
      scale: multiplies the scores.
      window: positions a query sees, itself included; None: all before it.
      page_size: tokens of one page.
      block_pages: pages read at once, at most; fewer than 1 counts as 1.
      soft_cap: as in `decode`.

    Returns:
      f32 [B, Q, K, G, H'], H' that of the values; zero for queries that see nothing.
    """
    batch, queries, num_kv_heads, group, head_dim = q.shape
    width = page_table.shape[1]
    block_pages = max(1, min(block_pages, width))
    num_blocks = -(-width // block_pages)
    table = jnp.pad(page_table, ((0, 0), (0, num_blocks * block_pages - width)))
    blocks = table.reshape(batch, num_blocks, block_pages).swapaxes(0, 1)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    # One product per row and kv head, its queries and their group as the rows of one matrix.
    flat = q.swapaxes(1, 2).reshape(batch, num_kv_heads, queries * group, head_dim)
    query_at = jnp.where(kv_lens[:, None] > 0, positions, -1)  # no key is visible at -1
    query_at = jnp.broadcast_to(query_at[:, :, None], (batch, queries, group))
    query_at = query_at.reshape(batch, 1, queries * group, 1)

    def attend_block(start: jax.Array, pages: jax.Array) -> Partial:
        keys, values = read(pages)
        scores = jnp.einsum(
            "BKQH,BKSH->BKQS",
            flat,
            keys,
            precision=precision,
            preferred_element_type=jnp.float32,
        ) * jnp.float32(scale)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        key_at = start + jnp.arange(block_pages * page_size, dtype=jnp.int32)[None, None, None, :]
        is_visible = key_at <= query_at
        if window is not None:
            is_visible = jnp.logical_and(is_visible, key_at > query_at - window)
        scores = jnp.where(is_visible, scores, _MASKED)
        high = scores.max(axis=-1, keepdims=True)
        weights = jnp.where(is_visible, jnp.exp(scores - high), 0.0)
        weighted = jnp.einsum(
            "BKQS,BKSH->BKQH",
            weights.astype(q.dtype),
            values,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return high, weights.sum(axis=-1, keepdims=True), weighted

    if num_blocks == 1:
        _, total, values = attend_block(jnp.int32(0), blocks[0])
    else:
        _, total, values = _walk(attend_block, blocks, kv_lens.max(), block_pages * page_size)
    # Only rows that see no key have a total of 0; a NaN must stay one, so that its row is flagged.
    is_empty = total == 0
    out = jnp.where(is_empty, 0.0, values / jnp.where(is_empty, 1.0, total))
    return out.reshape(batch, num_kv_heads, queries, group, -1).swapaxes(1, 2)


def _walk(
    attend_block: Callable[[jax.Array, jax.Array], Partial],
    blocks: jax.Array,
    longest: jax.Array,
    block_tokens: int,
) -> Partial:
    """Merges every block of pages that some row reaches; skipping the others changes no bit."""

    def merge(carry: Partial, start: jax.Array, pages: jax.Array) -> Partial:
        high, total, values = carry
        block_high, block_total, block_values = attend_block(start, pages)
        new_high = jnp.maximum(high, block_high)
        old, new = jnp.exp(high - new_high), jnp.exp(block_high - new_high)
        return new_high, total * old + block_total * new, values * old + block_values * new

    def step(carry: Partial, item: tuple[jax.Array, jax.Array]) -> tuple[Partial, None]:
        start, pages = item
        return jax.lax.cond(
            start < longest, merge, lambda carry, start, pages: carry, carry, start, pages
        ), None

    starts = jnp.arange(blocks.shape[0], dtype=jnp.int32) * block_tokens
    first = attend_block(starts[0], blocks[0])
    carry, _ = jax.lax.scan(step, first, (starts[1:], blocks[1:]))
    return carry
