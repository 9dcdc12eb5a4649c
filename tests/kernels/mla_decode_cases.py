"""Shapes, inputs and truth of latent decode attention, for tests and the processes they start."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels.mla import api, reference

PLAIN = {"block_pages": 16, "block_bytes": 2**29}
POISONED_ROW = 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of one call; W is as wide as the longest row needs, and `spare_pages` more."""

    kv_lens: tuple[int, ...]
    num_heads: int = 16
    latent: int = 512
    rope: int = 64
    page_size: int = 64
    queries: int = 1
    spare_pages: int = 0
    multiprocessors: int | None = None
    """Blocks that run at once; None: as the kernel has it."""

    def __str__(self) -> str:
        fields = dataclasses.fields(self)
        changed = [f for f in fields[1:] if getattr(self, f.name) != f.default]
        parts = [f"{field.name}{getattr(self, field.name)}" for field in changed]
        lens = self.kv_lens
        rows = f"{len(lens)}x{lens[0]}" if len(set(lens)) == 1 else "_".join(map(str, lens))
        return "-".join([f"lens{rows}", *parts])

    @property
    def width(self) -> int:
        return -(-max(self.kv_lens) // self.page_size) + self.spare_pages

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q_latent, q_rope, pool, page_table, positions, kv_lens."""
        rows = len(self.kv_lens)
        pool = (rows * self.width + 1, self.page_size, self.latent + self.rope)
        queries = (rows, self.queries, self.num_heads)
        return (
            jax.ShapeDtypeStruct((*queries, self.latent), "bfloat16"),
            jax.ShapeDtypeStruct((*queries, self.rope), "bfloat16"),
            jax.ShapeDtypeStruct(pool, "bfloat16"),
            jax.ShapeDtypeStruct((rows, self.width), "int32"),
            jax.ShapeDtypeStruct((rows, self.queries), "int32"),
            jax.ShapeDtypeStruct((rows,), "int32"),
        )

    @property
    def scale(self) -> float:
        return (self.latent + self.rope) ** -0.5

    def decode(self, kernels: str) -> Callable[..., jax.Array]:
        """The op with everything static bound."""
        return functools.partial(api.decode, scale=self.scale, kernels=kernels, **PLAIN)


def inputs(case: Case) -> tuple[jax.Array, ...]:
    """Random queries and pages; entries of the table past a row's end name the trash page."""
    rng = np.random.default_rng(len(str(case)))
    q_latent, q_rope, pool, table, *_ = case.structs
    lens = np.array(case.kv_lens, np.int32)
    pages = 1 + rng.permutation(table.size).reshape(table.shape).astype(np.int32)
    is_owned = np.arange(case.width)[None] * case.page_size < lens[:, None]
    first = lens[:, None] - case.queries
    return (
        jnp.asarray(2 * rng.standard_normal(q_latent.shape), jnp.bfloat16),
        jnp.asarray(2 * rng.standard_normal(q_rope.shape), jnp.bfloat16),
        jnp.asarray(rng.standard_normal(pool.shape), jnp.bfloat16),
        jnp.asarray(np.where(is_owned, pages, 0)),
        jnp.asarray(np.maximum(first + np.arange(case.queries), 0).astype(np.int32)),
        jnp.asarray(lens),
    )


def with_other_bystanders(case: Case, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same call: NaN in pages nobody names, other numbers where a named one has no key."""
    q_latent, q_rope, pool, table, positions, kv_lens = arrays
    is_named = np.isin(np.arange(pool.shape[0]), np.asarray(table))
    is_key = np.zeros((pool.shape[0], case.page_size), bool)
    for row, length in enumerate(case.kv_lens):
        tokens = np.arange(length)
        is_key[np.asarray(table)[row, tokens // case.page_size], tokens % case.page_size] = True
    pool = jnp.where(jnp.asarray(is_key)[:, :, None], pool, jnp.bfloat16(-1e30))
    pool = jnp.where(jnp.asarray(is_named)[:, None, None], pool, jnp.bfloat16(jnp.nan))
    return q_latent, q_rope, pool, table, positions, kv_lens


def with_nan_in_one_query(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same call, with a NaN in each head of one row."""
    q_latent, *rest = arrays
    return q_latent.at[POISONED_ROW, :, :, 3].set(jnp.nan), *rest


def exact(case: Case, arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """The reference in float32."""
    wide = [x.astype(jnp.float32) for x in arrays[:3]]
    decode = functools.partial(reference.decode, scale=case.scale, **PLAIN)
    return np.asarray(jax.jit(decode)(*wide, *arrays[3:]), np.float64)


def row_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Norm of the error over the norm of the truth, for each row; 0 of a row of zeros."""
    axes = (1, 2, 3)
    size = np.sqrt((expected**2).sum(axes))
    error = np.sqrt(((found.astype(np.float64) - expected) ** 2).sum(axes))
    return error / np.where(size == 0, 1, size)


VALUES = (
    # Lengths at both sides of a tile.
    Case((0, 1, 63, 64, 65, 128)),
    # Rows that are split, of which some splits have no tile.
    Case((0, 3, 64, 260)),
    Case((330, 70), num_heads=20, latent=256, page_size=16),
    # Whole rows, more tiles than are on their way at once.
    Case((330, 64), multiprocessors=2),
    # Heads that fill no eight, several pages to a tile; the last block reads past the queries' end.
    Case((17, 100, 0, 64), num_heads=20, page_size=16),
    Case((130, 5), num_heads=20, multiprocessors=2, spare_pages=2),
    Case((3,), num_heads=4, latent=128, page_size=8),
    # Several queries; columns cut over several blocks, of which the last is not full.
    Case((66, 2, 0), num_heads=8, queries=2, latent=256, multiprocessors=3),
    Case((90, 64), num_heads=20, queries=3, latent=128, page_size=16),
    Case((70,), num_heads=128, latent=256, page_size=32),
    Case((40, 9), num_heads=30, latent=128),
)
GUARDED = Case((65, 70, 3), num_heads=12, spare_pages=3)
"""Run clean, with other bystanders, and with a NaN."""
