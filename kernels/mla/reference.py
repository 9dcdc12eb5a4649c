"""Paged attention over latents in plain JAX, every kernel's truth: in latents or expanded to heads.

A token's page entry is its latent [L] and its rotary key [R], which all heads share. A head's key
is k_up times the latent [H], then the rotary key; its value is v_up times the latent [V]. Chunks
expand the latents to that. A decode row has too few queries to pay for it: there k_up is absorbed
in the query and v_up follows the sum, so that keys are the entries and values the latents.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.attention.reference import attend_read, over_tiles


def decode(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    block_pages: int,
    block_bytes: int,
    kernels: str = "plain",
) -> jax.Array:
    """Attends rows of equal query length to the latents of their pages.

    Args:
      q_latent: [B, Q, N, L], each head's query times its k_up.
      q_rope: [B, Q, N, R], rotated.
      pool: [P, page_size, L + R], this step's entries included.
      page_table: i32[B, W].
      positions: i32[B, Q], position of each query.
      kv_lens: i32[B]; 0 marks a padding row, whose output is zero.
      scale: multiplies the scores; that of the heads' own keys, (nope + R)^-0.5 without scaling.
      block_pages: pages attended at once, at most; the result's last bits depend on it.
      block_bytes: bytes of gathered pages at once, at most.
      kernels: what the device can run; plain JAX runs everywhere.

    Returns:
      [B, Q, N, L] in q_latent's dtype, each head's weighted latents: v_up is still to be applied.
    """
    del kernels
    batch, latent = q_latent.shape[0], q_latent.shape[-1]
    bytes_per_page = batch * pool[0].size * pool.dtype.itemsize

    def read(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        entries = pool[pages].reshape(batch, 1, -1, pool.shape[-1])
        return entries, entries[..., :latent]

    # One kv head, whose queries are all heads'.
    q = jnp.concatenate([q_latent, q_rope], axis=-1)[:, :, None]
    out = attend_read(
        q,
        read,
        page_table,
        positions,
        kv_lens,
        scale=scale,
        window=None,
        page_size=pool.shape[1],
        block_pages=min(block_pages, block_bytes // bytes_per_page),
    )
    return out[:, :, 0].astype(q_latent.dtype)


def prefill(
    q: jax.Array,
    k_up: jax.Array,
    v_up: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decode: jax.Array,
    *,
    scale: float,
    block_pages: int,
    block_bytes: int,
    tile_tokens: int,
    max_chunk_rows: int,
    kernels: str = "plain",
) -> jax.Array:
    """Attends the chunks of a flat token batch to their pages, one tile of queries at a time.

    Every tile expands the latents that its row can see, so tiles should hold more queries than
    those of plain attention: the expansion costs as much as L * (H + V) / (H + R + V) queries.

    Args:
      q: [T, N, H + R], rotated, the part without rotation first; tokens of a row are adjacent.
      k_up: [N, H, L].
      v_up: [N, V, L].
      pool: [P, page_size, L + R], this step's entries included.
      page_table: i32[B, W].
      positions: i32[T].
      kv_lens: i32[B].
      cu_q_lens: i32[B + 1].
      num_decode: i32[], leading rows that are not chunks.
      scale: multiplies the scores.
      block_pages: pages attended at once, at most; the result's last bits depend on it.
      block_bytes: bytes of expanded keys, values and scores at once, at most.
      tile_tokens: queries of one tile, at most.
      max_chunk_rows: rows that can be chunks.
      kernels: what the device can run; plain JAX runs everywhere.

    Returns:
      [T, N, V] in q's dtype; tokens that belong to no chunk are zero.
    """
    del kernels
    num_heads, _, latent = k_up.shape
    page_size = pool.shape[1]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def read(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        entries = pool[pages].reshape(pages.shape[0], -1, pool.shape[-1])
        latents, rope = entries[..., :latent], entries[:, None, :, latent:]
        keys = jnp.einsum("BSL,NHL->BNSH", latents, k_up, precision=precision)
        rope = jnp.broadcast_to(rope, (*keys.shape[:-1], rope.shape[-1]))
        values = jnp.einsum("BSL,NVL->BNSV", latents, v_up, precision=precision)
        return jnp.concatenate([keys, rope], axis=-1), values

    def attend_tiles(
        q: jax.Array, rows: jax.Array, positions: jax.Array, kv_lens: jax.Array
    ) -> jax.Array:
        batch, queries = positions.shape
        return attend_read(
            q,
            read,
            page_table[rows],
            positions,
            kv_lens,
            scale=scale,
            window=None,
            page_size=page_size,
            block_pages=min(block_pages, block_bytes // (batch * page_size * _key_bytes(queries))),
        )

    def _key_bytes(queries: int) -> int:
        """What one key takes: itself with its value, and a float32 score and weight per query."""
        expanded = q.shape[-1] + v_up.shape[1]
        return num_heads * (expanded * q.dtype.itemsize + queries * (4 + q.dtype.itemsize))

    out = over_tiles(
        attend_tiles,
        q[:, :, None],
        positions,
        kv_lens,
        cu_q_lens,
        num_decode,
        value_dim=v_up.shape[1],
        tile_tokens=tile_tokens,
        tiles_at_once=1,
        max_chunk_rows=max_chunk_rows,
    )
    return out[:, :, 0]


def store(
    pool: jax.Array, entries: jax.Array, pages: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes entries [T, L + R] to their pages: the pool, and bool[T] where one was not finite.

    Values that are not finite are stored as 0, so a pool is finite by construction.
    """
    is_finite = jnp.isfinite(entries)
    is_bad = jnp.logical_not(is_finite.all(axis=-1))
    entries = jnp.where(is_finite, entries, jnp.zeros_like(entries)).astype(pool.dtype)
    return pool.at[pages, offsets].set(entries, mode="promise_in_bounds"), is_bad
