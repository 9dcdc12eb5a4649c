"""Cache groups: what a registration declares, the pools made from it, and the writes into them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp

from kernels.mla import reference as mla_reference
from kernels.qkv import reference
from models.batch import Batch

TRASH_PAGE = 0
"""Page (or state) of every group that is never allocated: padding writes go there."""


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """One kind of paged cache shared by some layers, with one pool per layer."""

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
    def partition(self) -> tuple[str | None, ...]:
        """Mesh axis per dimension of a pool: kv heads are cut."""
        return (None, "tensor")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the group."""
        return len(self.layers) * math.prod(self.page_shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class LatentGroup:
    """A paged cache of one entry per token that all heads share, with one pool per layer."""

    layers: tuple[int, ...]
    """Layers that own a pool of this group."""
    entry_dim: int
    """Values of one token: its latent, then its rotary key. Nothing else is kept of values."""
    page_size: int
    """Tokens of one page."""
    dtype: str
    prefix_cacheable: bool = True
    kind: Literal["latent"] = "latent"

    @property
    def window(self) -> None:
        """A query sees all positions before it."""
        return None

    @property
    def page_shape(self) -> tuple[int, ...]:
        """[page_size, entry_dim]."""
        return (self.page_size, self.entry_dim)

    @property
    def partition(self) -> tuple[str | None, ...]:
        """Mesh axis per dimension of a pool: all heads read it, so every device has it whole."""
        return ()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the group."""
        return len(self.layers) * math.prod(self.page_shape) * jnp.dtype(self.dtype).itemsize


PagedGroup = CacheGroup | LatentGroup
"""A cache made of pages; `page_shape` alone decides what one holds."""


@dataclasses.dataclass(frozen=True)
class RecurrentGroup:
    """State of fixed size per request and layer, with one pool of states per layer."""

    layers: tuple[int, ...]
    """Layers that own a pool of this group."""
    state_shape: tuple[int, ...]
    """What one layer keeps of one request."""
    dtype: str
    snapshot_tokens: int | None = None
    """Prefixes of a multiple of it may be kept as snapshots. None: page borders of other groups."""
    prefix_cacheable: bool = True
    kind: Literal["recurrent"] = "recurrent"

    @property
    def state_bytes(self) -> int:
        """Bytes of one state over all layers of the group."""
        return len(self.layers) * math.prod(self.state_shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """All groups of a registration."""

    groups: tuple[PagedGroup | RecurrentGroup, ...]

    def __post_init__(self) -> None:
        if not self.paged:
            raise ValueError("no group has pages; a model needs at least one that does")

    @property
    def paged(self) -> tuple[PagedGroup, ...]:
        """Groups whose pools are made of pages, in the order of `Batch.page_tables`."""
        return tuple(group for group in self.groups if isinstance(group, PagedGroup))

    @property
    def recurrent(self) -> tuple[RecurrentGroup, ...]:
        """Groups whose pools are made of states, in the order of `Batch.state_ids`."""
        return tuple(group for group in self.groups if isinstance(group, RecurrentGroup))

    def pool_shapes(self, num_pages: int) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """Shapes of every pool of pages: per group, per layer [num_pages, *page_shape]."""
        return tuple(
            tuple(
                jax.ShapeDtypeStruct((num_pages, *group.page_shape), jnp.dtype(group.dtype))
                for _ in group.layers
            )
            for group in self.paged
        )

    def state_shapes(self, num_states: int) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """Shapes of every pool of states: per group, per layer [num_states, *state_shape]."""
        return tuple(
            tuple(
                jax.ShapeDtypeStruct((num_states, *group.state_shape), jnp.dtype(group.dtype))
                for _ in group.layers
            )
            for group in self.recurrent
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in every group."""
        return sum(group.page_bytes for group in self.paged)

    def snapshot_tokens(self, group: RecurrentGroup) -> int:
        """Tokens between two lengths at which a prefix of the group may be kept."""
        if group.snapshot_tokens is not None:
            return group.snapshot_tokens
        return math.lcm(*(paged.page_size for paged in self.paged))


@flax.struct.dataclass
class Cache:
    """The pools during one step, and which tokens tried to store a value that is not finite."""

    pools: tuple[tuple[jax.Array, ...], ...]
    """Per paged group, per layer [P, *page_shape]."""
    is_nonfinite: jax.Array
    """bool[T]"""
    states: tuple[tuple[jax.Array, ...], ...] = ()
    """Per recurrent group, per layer [states, *state_shape]."""


def open_cache(
    pools: tuple[tuple[jax.Array, ...], ...],
    num_tokens: int,
    states: tuple[tuple[jax.Array, ...], ...] = (),
) -> Cache:
    """Pools of the state as a forward sees them for one step of `num_tokens` padded tokens."""
    is_nonfinite = jnp.zeros((num_tokens,), jnp.bool_)
    return Cache(pools=pools, is_nonfinite=is_nonfinite, states=states)


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
    pages, offsets = kv_places(batch, page_table, pool.shape[3])
    pool, is_bad = reference.store(pool, keys, values, pages, offsets)
    return pool, jnp.logical_and(batch.is_real, is_bad)


def write_latents(
    pool: jax.Array, entries: jax.Array, batch: Batch, page_table: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Stores this step's entries of a latent group in their pages.

    Values that are not finite are stored as 0, so a pool is finite by construction.

    Args:
      pool: [P, page_size, C].
      entries: [T, C], the normed latent, then the rotated key.
      batch: positions and rows; padding tokens go to the trash page.
      page_table: i32[R, W] of the group.

    Returns:
      The pool and bool[T], True where a token's entry was not finite.
    """
    pages, offsets = kv_places(batch, page_table, pool.shape[1])
    pool, is_bad = mla_reference.store(pool, entries, pages, offsets)
    return pool, jnp.logical_and(batch.is_real, is_bad)


def kv_places(batch: Batch, page_table: jax.Array, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Where what a step's tokens leave goes: i32[T] pages, trash for padding, and offsets."""
    pages = page_table[batch.rows, batch.positions // page_size]
    return jnp.where(batch.is_real, pages, TRASH_PAGE), batch.positions % page_size


def read_states(pool: jax.Array, batch: Batch, state_ids: jax.Array) -> jax.Array:
    """The state each row goes on from: zeros for a row without a cached token.

    Args:
      pool: [states, *S].
      batch: lengths of the step.
      state_ids: i32[R, 2] of the group.

    Returns:
      [R, *S]; a padding row has zeros.
    """
    starts = batch.kv_lens - jnp.diff(batch.cu_q_lens)
    states = pool.at[state_ids[:, 0]].get(mode="promise_in_bounds")
    # The pool still holds what the last owner of the id left.
    is_begun = (starts > 0).reshape(-1, *[1] * (pool.ndim - 1))
    return jnp.where(is_begun, states, jnp.zeros_like(states))


def write_states(
    pool: jax.Array, states: jax.Array, batch: Batch, state_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Stores the state each row ends with: in place, or beside the one it came from.

    Values that are not finite are stored as 0, so a pool is finite by construction.

    Args:
      pool: [states, *S].
      states: [R, *S]; of padding rows anything, it goes to the trash state.
      batch: rows of the step.
      state_ids: i32[R, 2] of the group.

    Returns:
      The pool and bool[T], True for the tokens of a row whose state was not finite.
    """
    is_finite = jnp.isfinite(states)
    is_bad_row = jnp.logical_not(is_finite.reshape(states.shape[0], -1).all(axis=1))
    is_bad = jnp.logical_and(batch.is_real, is_bad_row[batch.rows])
    states = jnp.where(is_finite, states, jnp.zeros_like(states)).astype(pool.dtype)
    return pool.at[state_ids[:, 1]].set(states, mode="promise_in_bounds"), is_bad
