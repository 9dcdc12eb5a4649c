"""What calls of prefill attention have in common, whatever their pages hold: rows, errors, cuts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

POISONED_TOKEN = 9


@dataclasses.dataclass(frozen=True)
class Rows:
    """Decode rows of one token each, chunks, a row without tokens, padding.

    A case adds its sizes, `page_size` and `padding` among them.
    """

    chunks: tuple[tuple[int, int], ...]
    """New and cached tokens of each."""
    decode_lens: tuple[int, ...] = ()
    """Keys of each decode row."""

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
    def num_pages(self) -> int:
        """Of a pool in which every entry of the table has its own, and of the trash page."""
        return len(self.kv_lens) * self.width + 1

    @property
    def is_chunk_token(self) -> np.ndarray:
        token = np.arange(self.num_tokens)
        return (token >= len(self.decode_lens)) & (token < sum(self.query_lens))

    @property
    def row_shapes(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """page_table, positions, kv_lens, cu_q_lens, num_decode."""
        rows = len(self.kv_lens)
        return (
            ((rows, self.width), "int32"),
            ((self.num_tokens,), "int32"),
            ((rows,), "int32"),
            ((rows + 1,), "int32"),
            ((), "int32"),
        )

    def row_arrays(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """The same; entries of the table past a row's end name the trash page."""
        lens, new = np.array(self.kv_lens, np.int32), np.array(self.query_lens, np.int32)
        shape = len(lens), self.width
        pages = 1 + rng.permutation(self.num_pages - 1).reshape(shape).astype(np.int32)
        is_owned = np.arange(self.width)[None] * self.page_size < lens[:, None]
        positions = [np.arange(end - count, end) for end, count in zip(lens, new, strict=True)]
        positions = np.concatenate([*positions, np.zeros(self.padding)])
        return (
            jnp.asarray(np.where(is_owned, pages, 0)),
            jnp.asarray(positions, jnp.int32),
            jnp.asarray(lens),
            jnp.asarray(np.cumsum([0, *new]), jnp.int32),
            jnp.int32(len(self.decode_lens)),
        )

    def is_chunk_key(self, table: jax.Array) -> np.ndarray:
        """bool[pages, page_size]: a chunk has a key there."""
        is_key = np.zeros((self.num_pages, self.page_size), bool)
        for row, length in enumerate(self.kv_lens):
            tokens = np.arange(length if row >= len(self.decode_lens) else 0)
            is_key[np.asarray(table)[row, tokens // self.page_size], tokens % self.page_size] = True
        return is_key


def with_nan_in_one_query(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same call, with a NaN in each head of one token."""
    q, *rest = arrays
    return q.at[POISONED_TOKEN, :, 3].set(jnp.nan), *rest


def part_of_chunk(arrays: tuple[jax.Array, ...], first: int, count: int) -> tuple[jax.Array, ...]:
    """The call with some tokens of its only chunk; the others are padding after them."""
    q, *others, positions, lens, starts, num_decode = arrays
    q, positions = (jnp.roll(x, -first, axis=0) for x in (q, positions))
    lens = lens.at[0].set(positions[count - 1] + 1)
    starts = jnp.where(jnp.arange(starts.shape[0]) > 0, count, 0).astype(jnp.int32)
    return q, *others, positions, lens, starts, num_decode


def token_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Norm of the error over the norm of the truth, for each token; 0 of a token of zeros."""
    axes = (1, 2)
    size = np.sqrt((expected**2).sum(axes))
    error = np.sqrt(((found.astype(np.float64) - expected) ** 2).sum(axes))
    return error / np.where(size == 0, 1, size)
