"""Shapes, inputs and truth of prefill attention, for tests and the processes they start."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention import api, reference
from tests.kernels import chunks

PLAIN = {"block_pages": 16, "block_bytes": 2**29, "tile_tokens": 32, "tiles_at_once": 4}


@dataclasses.dataclass(frozen=True)
class Case(chunks.Rows):
    """One call."""

    group: int = 4
    head_dim: int = 128
    page_size: int = 64
    window: int | None = None
    soft_cap: float | None = None
    num_kv_heads: int = 1
    padding: int = 0
    spare_chunk_rows: int = 1
    multiprocessors: int | None = None
    """Blocks that run at once; None: as the kernel has it."""

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, pool, page_table, positions, kv_lens, cu_q_lens, num_decode."""
        kv, size, head_dim = self.num_kv_heads, self.page_size, self.head_dim
        shapes = (
            ((self.num_tokens, kv * self.group, head_dim), "bfloat16"),
            ((self.num_pages, kv, 2, size, head_dim), "bfloat16"),
            *self.row_shapes,
        )
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)

    @property
    def static(self) -> dict[str, object]:
        max_chunk_rows = len(self.chunks) + self.spare_chunk_rows
        scale = self.head_dim**-0.5
        look: dict[str, object] = {"scale": scale, "window": self.window, "soft_cap": self.soft_cap}
        return look | {"max_chunk_rows": max_chunk_rows} | PLAIN

    def prefill(self, kernels: str):
        """The op with everything static bound."""
        return functools.partial(api.prefill, kernels=kernels, **self.static)


def inputs(case: Case) -> tuple[jax.Array, ...]:
    """Random queries and pages; entries of the table past a row's end name the trash page."""
    rng = np.random.default_rng(len(str(case)))
    q, pool, *_ = case.structs
    rows = case.row_arrays(rng)
    return (
        jnp.asarray(2 * rng.standard_normal(q.shape), jnp.bfloat16),
        jnp.asarray(rng.standard_normal(pool.shape), jnp.bfloat16),
        *rows,
    )


def with_other_bystanders(case: Case, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same call with other numbers in queries and pages that belong to no chunk."""
    q, pool, table, *rest = arrays
    is_key = case.is_chunk_key(table)
    keep = jnp.asarray(is_key)[:, None, None, :, None]
    is_query = jnp.asarray(case.is_chunk_token)[:, None, None]
    return (
        jnp.where(is_query, q, jnp.bfloat16(7.0)),
        jnp.where(keep, pool, jnp.bfloat16(-1e30)),
        table,
        *rest,
    )


def exact(case: Case, arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """The reference in float32."""
    q, pool, *rest = arrays
    wide = (q.astype(jnp.float32), pool.astype(jnp.float32))
    prefill = jax.jit(functools.partial(reference.prefill, **case.static))
    return np.asarray(prefill(*wide, *rest), np.float64)


VALUES = (
    # Chunks that start and end anywhere, beside decode rows and much padding; an odd group. One
    # block works on many tiles.
    Case(((5, 100), (66, 200)), (9, 30, 1), group=3, padding=70, multiprocessors=2),
    # Whole tiles and ragged ones; chunks of one token, whose last key ends a step or starts one.
    Case(((200, 130), (9, 0), (1, 127), (1, 128)), page_size=16, multiprocessors=3),
    # Fewer tokens than a copy has.
    Case(((40, 300),), group=1, num_kv_heads=2, multiprocessors=1),
    # More steps than are on their way at once.
    Case(((140, 500),), group=1, head_dim=64, multiprocessors=2),
    Case(((70, 60), (64, 5)), (8,), group=2, head_dim=256, page_size=16, multiprocessors=2),
    # The first visible key is in no first step and starts none; a window of one.
    Case(((130, 230),), group=2, window=100, multiprocessors=1),
    Case(((70, 70),), (50,), group=5, head_dim=64, page_size=32, window=1, padding=1),
    Case(((20, 3),), group=16, head_dim=64, page_size=16, multiprocessors=3),
    # Scores that a cap bends.
    Case(((70, 60), (9, 0)), group=2, soft_cap=2.0, multiprocessors=1),
)
GUARDED = Case(((8, 57), (70, 30)), (50, 3), group=3, padding=5, multiprocessors=2)
"""Run clean, with other bystanders, and with a NaN."""
CUT = Case(((130, 170),), group=2, page_size=16, window=150, multiprocessors=3)
"""Run whole, and in two parts."""
CUT_AT = 77
EMPTY = Case(((0, 0),), (5, 9), group=2)
"""No chunk at all."""
