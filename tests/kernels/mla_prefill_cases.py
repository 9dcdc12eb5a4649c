"""Shapes, inputs and truth of latent prefill attention, for tests and the processes they start."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels.mla import api, reference

PLAIN = {"block_pages": 16, "tile_tokens": 32}
HEAD_BLOCK = 128 * (128 + 128) * 2
"""Bytes that 128 tokens of one head take expanded."""
POISONED_TOKEN = 9


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: decode rows of one token each, chunks, a row without tokens, padding."""

    chunks: tuple[tuple[int, int], ...]
    """New and cached tokens of each."""
    decode_lens: tuple[int, ...] = ()
    """Keys of each decode row."""
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

    def __str__(self) -> str:
        fields = dataclasses.fields(self)
        changed = [f for f in fields[1:] if getattr(self, f.name) != f.default]
        parts = [f"{field.name}{getattr(self, field.name)}" for field in changed]
        return "-".join(["_".join(f"{new}after{cached}" for new, cached in self.chunks), *parts])

    @property
    def query_lens(self) -> list[int]:
        return [1] * len(self.decode_lens) + [new for new, _ in self.chunks] + [0]

    @property
    def kv_lens(self) -> list[int]:
        return [*self.decode_lens, *(new + cached for new, cached in self.chunks), 0]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens) + self.padding

    @property
    def width(self) -> int:
        return -(-max(self.kv_lens) // self.page_size)

    @property
    def is_chunk_token(self) -> np.ndarray:
        token = np.arange(self.num_tokens)
        return (token >= len(self.decode_lens)) & (token < sum(self.query_lens))

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k_up, v_up, pool, page_table, positions, kv_lens, cu_q_lens, num_decode."""
        rows = len(self.kv_lens)
        shapes = (
            ((self.num_tokens, self.num_heads, self.nope + self.rope), "bfloat16"),
            ((self.num_heads, self.nope, self.latent), "bfloat16"),
            ((self.num_heads, self.value, self.latent), "bfloat16"),
            ((rows * self.width + 1, self.page_size, self.latent + self.rope), "bfloat16"),
            ((rows, self.width), "int32"),
            ((self.num_tokens,), "int32"),
            ((rows,), "int32"),
            ((rows + 1,), "int32"),
            ((), "int32"),
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
    q, k_up, v_up, pool, table, *_ = case.structs
    lens, new = np.array(case.kv_lens, np.int32), np.array(case.query_lens, np.int32)
    pages = 1 + rng.permutation(table.size).reshape(table.shape).astype(np.int32)
    is_owned = np.arange(case.width)[None] * case.page_size < lens[:, None]
    positions = [np.arange(end - count, end) for end, count in zip(lens, new, strict=True)]
    positions = np.concatenate([*positions, np.zeros(case.padding)])
    up = [rng.standard_normal(x.shape) * case.latent**-0.5 for x in (k_up, v_up)]
    return (
        jnp.asarray(2 * rng.standard_normal(q.shape), jnp.bfloat16),
        *(jnp.asarray(x, jnp.bfloat16) for x in up),
        jnp.asarray(rng.standard_normal(pool.shape), jnp.bfloat16),
        jnp.asarray(np.where(is_owned, pages, 0)),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(lens),
        jnp.asarray(np.cumsum([0, *new]), jnp.int32),
        jnp.int32(len(case.decode_lens)),
    )


def with_other_bystanders(case: Case, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same call with other queries of no chunk, and NaN in pages wherever no chunk has a key.

    What follows a row's keys is the pool's own business here: expanded, it might overflow.
    """
    q, k_up, v_up, pool, table, *rest = arrays
    is_key = np.zeros((pool.shape[0], case.page_size), bool)
    for row, length in enumerate(case.kv_lens):
        tokens = np.arange(length if row >= len(case.decode_lens) else 0)
        is_key[np.asarray(table)[row, tokens // case.page_size], tokens % case.page_size] = True
    return (
        jnp.where(jnp.asarray(case.is_chunk_token)[:, None, None], q, jnp.bfloat16(7.0)),
        k_up,
        v_up,
        jnp.where(jnp.asarray(is_key)[..., None], pool, jnp.bfloat16(jnp.nan)),
        table,
        *rest,
    )


def with_nan_in_one_query(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same call, with a NaN in each head of one token."""
    q, *rest = arrays
    return q.at[POISONED_TOKEN, :, 3].set(jnp.nan), *rest


def exact(case: Case, arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """The reference in float32."""
    wide = [x.astype(jnp.float32) for x in arrays[:4]]
    prefill = jax.jit(functools.partial(reference.prefill, **case.static))
    return np.asarray(prefill(*wide, *arrays[4:]), np.float64)


def token_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Norm of the error over the norm of the truth, for each token; 0 of a token of zeros."""
    axes = (1, 2)
    size = np.sqrt((expected**2).sum(axes))
    error = np.sqrt(((found.astype(np.float64) - expected) ** 2).sum(axes))
    return error / np.where(size == 0, 1, size)


def part_of_chunk(arrays: tuple[jax.Array, ...], first: int, count: int) -> tuple[jax.Array, ...]:
    """The call with some tokens of its only chunk; the others are padding after them."""
    q, k_up, v_up, pool, table, positions, lens, starts, num_decode = arrays
    q, positions = (jnp.roll(x, -first, axis=0) for x in (q, positions))
    lens = lens.at[0].set(positions[count - 1] + 1)
    starts = jnp.where(jnp.arange(starts.shape[0]) > 0, count, 0).astype(jnp.int32)
    return q, k_up, v_up, pool, table, positions, lens, starts, num_decode


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
