"""A layer's queries, keys and values in plain JAX, the kernel's truth: norm, rotation, KV write."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


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
    kernels: str = "plain",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes a projection to what attention reads: queries, and keys and values in their pages.

    Values that are not finite are stored as 0, so a pool is finite by construction.

    Args:
      qkv: [T, K, G + 2, H], per kv head its queries, key and value.
      cos: f32[T, H / 2].
      sin: f32[T, H / 2].
      vectors: 1-D, holds the norm's scales among others; None: queries and keys are not normed.
      pool: [P, K, 2, page_size, H], updated in place where its caller lets go of it.
      pages: i32[T], page of each token; tokens of page 0, which is trash, may overwrite each other.
      offsets: i32[T], place of each token in its page.
      scales_at: where in `vectors` the scales [G + 1, H] of queries and key begin.
      eps: added to the mean square inside the norm's root.
      kernels: what the device can run; plain JAX runs everywhere.

    Returns:
      Queries [T, N, H], the pool, and bool[T], True where a key or value was not finite.
    """
    del kernels
    scales = None
    if vectors is not None:
        shape = (qkv.shape[2] - 1, qkv.shape[3])
        end = scales_at + math.prod(shape)
        scales = jax.lax.slice(vectors, (scales_at,), (end,)).reshape(shape)
    q, keys, values = turned(qkv, cos, sin, scales, eps)
    pool, is_bad = store(pool, keys, values, pages, offsets)
    return q, pool, is_bad


def turned(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, scales: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normed and rotated queries [T, N, H] and keys [T, K, H], and values [T, K, H]."""
    num_tokens, num_kv_heads, heads, head_dim = qkv.shape
    qk, values = qkv[:, :, :-1], qkv[:, :, -1]
    if scales is not None:
        qk = rms_norm(qk, scales, eps)
    # Queries and keys turn together: one kernel instead of two.
    qk = rotate(qk, cos, sin)
    q = qk[:, :, :-1].reshape(num_tokens, num_kv_heads * (heads - 2), head_dim)
    return q, qk[:, :, -1], values


def store(
    pool: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes keys and values [T, K, H] to their pages: the pool, and where one was not finite."""
    both = jnp.stack([keys, values], axis=2)  # [T, K, 2, H]
    is_finite = jnp.isfinite(both)
    is_bad = jnp.logical_not(is_finite.all(axis=(1, 2, 3)))
    both = jnp.where(is_finite, both, jnp.zeros_like(both)).astype(pool.dtype)
    return pool.at[pages, :, :, offsets, :].set(both, mode="promise_in_bounds"), is_bad


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalises the last dimension in float32, rounds to x's dtype, then scales.

    Args:
      x: [..., D].
      scale: [..., D] in x's dtype, matching x's last dimensions.
      eps: added to the mean square inside the root.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(eps))
    return (wide * inverse).astype(x.dtype) * jnp.expand_dims(
        scale, tuple(range(x.ndim - scale.ndim))
    )


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [T, ..., H] by f32[T, H / 2]: dimension h pairs with h + H / 2."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (x.shape[-1] // 2,)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
