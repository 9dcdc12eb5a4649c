"""Shapes, inputs and truth of latent prefill attention, for tests and the processes they start."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels.mla import api, reference
from tests.kernels import chunks

PLAIN = {"block_pages": 16, "tile_tokens": 32}
HEAD_BLOCK = 128 * (128 + 128) * 2
"""Bytes that 128 tokens of one head take expanded."""


@dataclasses.dataclass(frozen=True)
class Case(chunks.Rows):
    """One call."""

    num_heads: int = 2
    nope: int = 128
    value: int = 128
    latent: int = 512
    rope: int = 64
    page_size: int = 64
    padding: int = 0
    workspace: int = 2**29
    """Bytes."""
    multiprocessors: int | None = None
    """Blocks that run at once; None: as the kernels have it."""

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k_up, v_up, pool, page_table, positions, kv_lens, cu_q_lens, num_decode."""
        shapes = (
            ((self.num_tokens, self.num_heads, self.nope + self.rope), "bfloat16"),
            ((self.num_heads, self.nope, self.latent), "bfloat16"),
            ((self.num_heads, self.value, self.latent), "bfloat16"),
            ((self.num_pages, self.page_size, self.latent + self.rope), "bfloat16"),
            *self.row_shapes,
        )
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)

    @property
    def static(self) -> dict[str, object]:
        scale = (self.nope + self.rope) ** -0.5
        changing = {"scale": scale, "block_bytes": self.workspace}
        return changing | {"max_chunk_rows": len(self.chunks) + 1} | PLAIN

    def prefill(self, kernels: str, **changed: int) -> Callable[..., jax.Array]:
        """The op with everything static bound."""
        return functools.partial(api.prefill, kernels=kernels, **(self.static | changed))


def inputs(case: Case) -> tuple[jax.Array, ...]:
    """Random numbers; entries of the table past a row's end name the trash page."""
    rng = np.random.default_rng(len(str(case)))
    q, k_up, v_up, pool, *_ = case.structs
    rows = case.row_arrays(rng)
    up = [rng.standard_normal(x.shape) * case.latent**-0.5 for x in (k_up, v_up)]
    return (
        jnp.asarray(2 * rng.standard_normal(q.shape), jnp.bfloat16),
        *(jnp.asarray(x, jnp.bfloat16) for x in up),
        jnp.asarray(rng.standard_normal(pool.shape), jnp.bfloat16),
        *rows,
    )


def with_other_bystanders(case: Case, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same call with other queries of no chunk, and NaN in pages wherever no chunk has a key.

    What follows a row's keys is the pool's own business here: expanded, it might overflow.
    """
    q, k_up, v_up, pool, table, *rest = arrays
    is_key = case.is_chunk_key(table)
    return (
        jnp.where(jnp.asarray(case.is_chunk_token)[:, None, None], q, jnp.bfloat16(7.0)),
        k_up,
        v_up,
        jnp.where(jnp.asarray(is_key)[..., None], pool, jnp.bfloat16(jnp.nan)),
        table,
        *rest,
    )


def exact(case: Case, arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """The reference in float32."""
    wide = [x.astype(jnp.float32) for x in arrays[:4]]
    prefill = jax.jit(functools.partial(reference.prefill, **case.static))
    return np.asarray(prefill(*wide, *arrays[4:]), np.float64)


CUT = Case(((70, 250),), num_heads=1, multiprocessors=2)
"""Run whole, in two parts, and without any token; more steps than are on their way at once."""
CUT_AT = 27
GUARDED = Case(
    ((8, 57), (70, 130), (0, 0), (3, 140)),
    (50, 3),
    num_heads=2,
    latent=128,
    padding=5,
    multiprocessors=2,
)
"""Run clean, with other bystanders, with a NaN, and in turns."""
IN_TURNS = dataclasses.replace(GUARDED, workspace=3 * HEAD_BLOCK)
"""The first two rows take a turn together, and each head takes its own."""
VALUES = (
    # Chunks that start and end anywhere, beside decode rows and padding; chunks of one token, whose
    # last key ends a block or starts one. One block works on many tiles.
    Case(
        ((66, 200), (5, 100), (1, 127), (1, 128)),
        (9, 30, 1),
        num_heads=1,
        latent=128,
        page_size=16,
        padding=70,
        multiprocessors=2,
    ),
    # Wider heads, whose keys are of one and a half panels.
    Case(
        ((70, 60), (9, 0)),
        (8,),
        num_heads=2,
        nope=192,
        value=256,
        latent=128,
        page_size=32,
        multiprocessors=2,
    ),
    CUT,
    GUARDED,
)
