"""Shapes, inputs and truth of decode attention, for tests and the processes they start."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention import api, reference
from kernels.tuning import FORMULA, Choice

PLAIN = {"block_pages": 16, "block_bytes": 2**29}
POISONED_ROW = 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of one call; W is as wide as the longest row needs, and `spare_pages` more."""

    kv_lens: tuple[int, ...]
    group: int = 4
    head_dim: int = 128
    page_size: int = 64
    queries: int = 1
    window: int | None = None
    soft_cap: float | None = None
    num_kv_heads: int = 2
    spare_pages: int = 0
    min_blocks: int | None = None
    """Below it rows are split; None: as the kernel has it."""

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
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, pool, page_table, positions, kv_lens."""
        rows, kv = len(self.kv_lens), self.num_kv_heads
        num_pages = rows * self.width + 1
        return (
            jax.ShapeDtypeStruct((rows, self.queries, kv * self.group, self.head_dim), "bfloat16"),
            jax.ShapeDtypeStruct((num_pages, kv, 2, self.page_size, self.head_dim), "bfloat16"),
            jax.ShapeDtypeStruct((rows, self.width), "int32"),
            jax.ShapeDtypeStruct((rows, self.queries), "int32"),
            jax.ShapeDtypeStruct((rows,), "int32"),
        )

    @property
    def static(self) -> dict[str, float | int | None]:
        return {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}

    def decode(self, kernels: str):
        """The op with everything static bound."""
        return functools.partial(api.decode, **self.static, kernels=kernels, **PLAIN)


@dataclasses.dataclass(frozen=True)
class Times:
    """A call whose result is multiplied."""

    attention: Case
    outputs: int = 64
    choice: Choice = FORMULA

    def __str__(self) -> str:
        name = f"{self.attention}-times{self.outputs}"
        return name if self.choice == FORMULA else f"{name}, {self.choice}"

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        *_, num_heads, head_dim = self.attention.structs[0].shape
        weight = jax.ShapeDtypeStruct((num_heads * head_dim, self.outputs), jnp.bfloat16)
        return (*self.attention.structs, weight)

    def call(self, kernels: str, op: Callable[..., jax.Array] = api.decode_times):
        """The op with everything static bound."""
        chosen = {} if self.choice == FORMULA else {"choice": self.choice}
        return functools.partial(op, **self.attention.static, kernels=kernels, **PLAIN, **chosen)

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Random values."""
        struct = self.structs[-1]
        weight = np.random.default_rng(0).standard_normal(struct.shape) * struct.shape[0] ** -0.5
        return (*inputs(self.attention), jnp.asarray(weight, jnp.bfloat16))


def inputs(case: Case) -> tuple[jax.Array, ...]:
    """Random queries and pages; entries of the table past a row's end name the trash page."""
    rng = np.random.default_rng(len(str(case)))
    q, pool, table, *_ = case.structs
    lens = np.array(case.kv_lens, np.int32)
    pages = 1 + rng.permutation(table.size).reshape(table.shape).astype(np.int32)
    is_owned = np.arange(case.width)[None] * case.page_size < lens[:, None]
    first = lens[:, None] - case.queries
    return (
        jnp.asarray(2 * rng.standard_normal(q.shape), jnp.bfloat16),
        jnp.asarray(rng.standard_normal(pool.shape), jnp.bfloat16),
        jnp.asarray(np.where(is_owned, pages, 0)),
        jnp.asarray(np.maximum(first + np.arange(case.queries), 0).astype(np.int32)),
        jnp.asarray(lens),
    )


def with_other_bystanders(case: Case, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same call, with other numbers wherever no row has a key."""
    q, pool, table, positions, kv_lens = arrays
    is_key = np.zeros((pool.shape[0], case.page_size), bool)
    for row, length in enumerate(case.kv_lens):
        for token in range(length):
            is_key[table[row, token // case.page_size], token % case.page_size] = True
    keep = jnp.asarray(is_key)[:, None, None, :, None]
    return q, jnp.where(keep, pool, jnp.bfloat16(-1e30)), table, positions, kv_lens


def with_nan_in_one_query(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same call, with a NaN in each head of one row."""
    q, *rest = arrays
    return q.at[POISONED_ROW, :, :, 3].set(jnp.nan), *rest


def exact(case: Case, arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """The reference in float32."""
    q, pool, *rest = arrays
    wide = (q.astype(jnp.float32), pool.astype(jnp.float32))
    decode = functools.partial(reference.decode, **case.static, **PLAIN)
    return np.asarray(jax.jit(decode)(*wide, *rest), np.float64)


def row_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Norm of the error over the norm of the truth, for each row; 0 of a row of zeros."""
    axes = (1, 2, 3)
    size = np.sqrt((expected**2).sum(axes))
    error = np.sqrt(((found.astype(np.float64) - expected) ** 2).sum(axes))
    return error / np.where(size == 0, 1, size)


VALUES = (
    # Lengths at both sides of a tile; groups that fill no column tile, whose last block reads past
    # the queries' end.
    Case((0, 1, 63, 64, 65, 128), group=3, min_blocks=1),
    Case((130, 5), group=1, head_dim=64, spare_pages=2),
    Case((70, 200), group=5, num_kv_heads=1),
    # More tiles than are on their way at once.
    Case((330, 64), group=6, num_kv_heads=1, min_blocks=1),
    Case((129, 3, 0), group=7, head_dim=64, num_kv_heads=1),
    Case((66, 9), group=8, head_dim=256, num_kv_heads=1),
    Case((100, 3), group=16, head_dim=256, num_kv_heads=1, min_blocks=1),
    # Several pages to a tile, the last tile not full of them.
    Case((17, 100, 0, 64), page_size=16, num_kv_heads=1),
    Case((70, 33), page_size=32, head_dim=256, num_kv_heads=1, min_blocks=1),
    Case((9, 66), page_size=8, head_dim=64, num_kv_heads=1),
    # The first visible page is not the first one, nor does it start a tile.
    Case((200, 70, 5), window=70, num_kv_heads=1),
    Case((350, 190), window=260, page_size=16, num_kv_heads=1, min_blocks=1),
    # Several queries: one block, and columns cut over several.
    Case((66, 2, 0), queries=2, group=3),
    Case((129, 70), queries=8, group=6, num_kv_heads=1, window=40),
    Case((90, 64), queries=5, group=4, head_dim=256, page_size=16, num_kv_heads=1, min_blocks=1),
    # Scores that a cap bends, the one of them far.
    Case((200, 66, 0), group=3, soft_cap=4.0, num_kv_heads=1),
    Case((129, 70), queries=2, group=4, soft_cap=0.5, window=40, num_kv_heads=1),
)
PREFETCHED = tuple(
    Choice.of(form, depth=128, prefetch=16) for form in ("prefetched", "registers_prefetched")
)
"""Weights of the product come nearer while pages are attended to."""
GUARDED = Case((65, 70, 3), group=3, num_kv_heads=1)
"""Run clean, with other bystanders, and with a NaN."""
TIMES = (
    Times(Case((130,))),
    Times(Case((70,), head_dim=64, group=8, page_size=16), outputs=128),
)
"""One query, split."""
