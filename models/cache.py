"""Cache groups: what a registration declares, the pools made from it, and the writes into them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp

from models.batch import Batch

TRASH_PAGE = 0
"""Page of every group that is never allocated: padding writes go there."""


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """One kind of cache shared by some layers, with one pool per layer."""

    kind: Literal["kv", "window"]
    layers: tuple[int, ...]
    """Layers that own a pool of this group."""
    num_kv_heads: int
    head_dim: int
    page_size: int
    """Tokens of one page."""
    dtype: str
    window: int | None = None
    """Positions a query sees, itself included; pages wholly below may be freed."""
    prefix_cacheable: bool = True

    @property
    def page_shape(self) -> tuple[int, ...]:
        """[kv_heads, 2, page_size, head_dim]: K and V of one page and head in one piece."""
        return (self.num_kv_heads, 2, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the group."""
        return len(self.layers) * math.prod(self.page_shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """All groups of a registration, in the order of `Batch.page_tables`."""

    groups: tuple[CacheGroup, ...]

    def pool_shapes(self, num_pages: int) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """Shapes of every pool: per group, per layer [num_pages, K, 2, page_size, H]."""
        return tuple(
            tuple(
                jax.ShapeDtypeStruct((num_pages, *group.page_shape), jnp.dtype(group.dtype))
                for _ in group.layers
            )
            for group in self.groups
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in every group."""
        return sum(group.page_bytes for group in self.groups)


@flax.struct.dataclass
class Cache:
    """The pools during one step, and which tokens tried to store a value that is not finite."""

    pools: tuple[tuple[jax.Array, ...], ...]
    """Per group, per layer [P, K, 2, page_size, H]."""
    is_nonfinite: jax.Array
    """bool[T]"""


def open_cache(pools: tuple[tuple[jax.Array, ...], ...], num_tokens: int) -> Cache:
    """Pools of the state as a forward sees them for one step of `num_tokens` padded tokens."""
    return Cache(pools=pools, is_nonfinite=jnp.zeros((num_tokens,), jnp.bool_))


def write_kv(
    pool: jax.Array, keys: jax.Array, values: jax.Array, batch: Batch, page_table: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Stores this step's keys and values in their pages.

    Values that are not finite are stored as 0, so a pool is finite by construction.

    Args:
      pool: [P, K, 2, page_size, H].
      keys: [T, K, H], rotated.
      values: [T, K, H].
      batch: positions and rows; padding tokens go to the trash page.
      page_table: i32[R, W] of the group.

    Returns:
      The pool and bool[T], True where a token's key or value was not finite.
    """
    page_size = pool.shape[3]
    both = jnp.stack([keys, values], axis=2)  # [T, K, 2, H]
    is_finite = jnp.isfinite(both)
    is_bad = jnp.logical_and(batch.is_real, jnp.logical_not(is_finite.all(axis=(1, 2, 3))))
    both = jnp.where(is_finite, both, jnp.zeros_like(both)).astype(pool.dtype)
    pages = page_table[batch.rows, batch.positions // page_size]
    pages = jnp.where(batch.is_real, pages, TRASH_PAGE)
    pool = pool.at[pages, :, :, batch.positions % page_size, :].set(both, mode="promise_in_bounds")
    return pool, is_bad
