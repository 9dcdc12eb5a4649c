"""Decode attention on the GPU: first that it is right, then how near to the memory's speed it runs.

    PYTHONPATH=. python benchmarks/kernels/decode_attention.py --json OUT.json

Every class of calls that the kernel covers is compared with float64 on the host, and what must not
change a bit is checked to change none; a failure ends the run with status 1. Then one layer's time
at the shapes of `SHAPES`: a program runs over pools of several layers, more than the cache holds,
and many calls of it are under way between two waits, since a wait costs some 250 us by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.kernels import harness
from benchmarks.kernels.harness import Checks
from benchmarks.roofline import Ceilings
from kernels.attention import api

SHAPES = ((64, 1024), (64, 4096), (256, 512), (256, 1024), (8, 1024), (1, 1024), (1, 8192))
"""Rows and keys of each, timed with 32 query and 8 kv heads of 128 and pages of 64."""
TOLERANCE = 3e-3
"""Of a row's norm. Weights and output are rounded to bfloat16: 2e-3 when all is well."""
_POOL_BYTES = 10**9
_MAX_LAYERS = 36
_SAMPLE_SECONDS = 0.06


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the op."""

    kv_lens: tuple[int, ...]
    num_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_size: int = 64
    queries: int = 1
    window: int | None = None

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return (
            f"{len(self.kv_lens)} rows, {self.queries} queries, {self.num_kv_heads * self.group}/"
            f"{self.num_kv_heads} heads of {self.head_dim}, pages of {self.page_size}{window}"
        )

    def decode(self) -> Callable[..., jax.Array]:
        """The op with everything static bound."""
        return functools.partial(
            api.decode,
            scale=self.head_dim**-0.5,
            window=self.window,
            kernels="mosaic",
            block_pages=128,
            block_bytes=2**29,
        )


EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 128, 129, 200, 577)
"""Lengths at both sides of pages and tiles."""
MANY = EDGES * 2
"""Enough rows of 8 heads that none is split."""


def cases() -> Iterator[Case]:
    """Every class that the kernel covers, split rows and whole ones."""
    for group in range(1, 17):
        yield Case((EDGES, MANY)[group % 2], group=group)
    for head_dim in (64, 256):
        for page_size in (16, 64):
            for group in (1, 7, 16):
                for lens in (EDGES[4:], MANY):
                    yield Case(lens, group=group, head_dim=head_dim, page_size=page_size)
    for page_size in (8, 16, 32):
        yield Case(EDGES, page_size=page_size)
    for window, page_size in ((1, 64), (64, 16), (100, 64), (130, 16), (1000, 64)):
        yield Case(EDGES, window=window, page_size=page_size)
    for queries in range(2, 9):
        group, head_dim = ((4, 128), (5, 64), (16, 256), (3, 128))[queries % 4]
        yield Case(EDGES, group=group, head_dim=head_dim, queries=queries)
        yield Case(MANY, group=group, head_dim=head_dim, queries=queries, window=90, page_size=16)
    yield Case((5000,), num_kv_heads=1, group=1)
    yield Case((9000, 20), num_kv_heads=2)


def inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, pool, page table, positions and lengths; past a row's end the table names page 0."""
    rng = np.random.default_rng(seed)
    rows, lens = len(case.kv_lens), np.array(case.kv_lens, np.int32)
    width = -(-max(case.kv_lens) // case.page_size) + 1
    pages = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    is_owned = np.arange(width) * case.page_size < lens[:, None]
    q = rng.standard_normal(
        (rows, case.queries, case.num_kv_heads * case.group, case.head_dim), np.float32
    )
    pool_shape = (rows * width + 1, case.num_kv_heads, 2, case.page_size, case.head_dim)
    positions = lens[:, None] - case.queries + np.arange(case.queries)
    return (
        (2 * q).astype(jnp.bfloat16),
        rng.standard_normal(pool_shape, np.float32).astype(jnp.bfloat16),
        np.where(is_owned, pages, 0),
        np.maximum(positions, 0).astype(np.int32),
        lens,
    )


def exact(case: Case, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """The result in float64."""
    q, pool, table, positions, lens = arrays
    out = np.zeros(q.shape, np.float64)
    grouped = q.astype(np.float64).reshape(*q.shape[:2], case.num_kv_heads, case.group, -1)
    for row, length in enumerate(lens):
        if not length:
            continue
        pages = pool[table[row, : -(-length // case.page_size)]].astype(np.float64)
        keys, values = pages.transpose(2, 1, 0, 3, 4).reshape(
            2, case.num_kv_heads, -1, case.head_dim
        )[:, :, :length]
        scores = np.einsum("QKGH,KSH->QKGS", grouped[row], keys) * case.head_dim**-0.5
        seen_at, query_at = np.arange(length), positions[row][:, None]
        is_visible = seen_at <= query_at
        if case.window is not None:
            is_visible &= seen_at > query_at - case.window
        scores = np.where(is_visible[:, None, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[row] = np.einsum("QKGS,KSH->QKGH", weights, values).reshape(out[row].shape)
    return out


def check_values() -> Checks:
    """(what was checked, whether it holds, its figure) of every covered class."""
    for case in cases():
        arrays = inputs(case)
        before = api.decode.counts["mosaic"]
        found = np.asarray(jax.jit(case.decode())(*arrays))
        error = harness.worst_error(found, exact(case, arrays))
        did_run = api.decode.counts["mosaic"] == before + 1
        yield str(case), did_run and error <= TOLERANCE, f"{error:.1e}" if did_run else "declined"


def check_bits() -> Checks:
    """What must change no bit of the other rows."""
    for name, case in (("split", Case(EDGES, group=3)), ("whole", Case(MANY, group=3))):
        q, pool, table, positions, lens = arrays = inputs(case)
        decode = jax.jit(case.decode())
        clean = np.asarray(decode(*arrays))
        again = all(np.array_equal(np.asarray(decode(*arrays)), clean) for _ in range(20))
        yield f"{name} rows: 20 more runs", again, ""
        is_key = np.zeros((pool.shape[0], case.page_size), bool)
        for row, length in enumerate(lens):
            tokens = np.arange(length)
            is_key[table[row, tokens // case.page_size], tokens % case.page_size] = True
        other = np.where(is_key[:, None, None, :, None], pool, jnp.bfloat16(-1e30))
        same = np.array_equal(np.asarray(decode(q, other, table, positions, lens)), clean)
        yield f"{name} rows: other numbers in pages without keys", same, ""
        poisoned = q.copy()
        poisoned[5, 0, :, 7] = np.nan
        found = np.asarray(decode(poisoned, pool, table, positions, lens))
        rest = np.arange(len(lens)) != 5
        alone = np.array_equal(found[rest], clean[rest]) and np.isnan(found[5]).all()
        yield f"{name} rows: a NaN in the queries of one row", bool(alone), ""


def measure(rows: int, keys: int, ceilings: Ceilings | None) -> dict[str, Any]:
    """Time of one layer, and its share of the device's read speed."""
    case = Case((keys,) * rows)
    num_bytes = rows * keys * case.num_kv_heads * 2 * case.head_dim * 2
    num_layers = min(max(-(-_POOL_BYTES // num_bytes), 4), _MAX_LAYERS)
    pools, arguments = _layers(case, num_layers)
    layer = jax.jit(case.decode())

    def model(q: jax.Array, pools: Sequence[jax.Array], *rest: jax.Array) -> jax.Array:
        for pool in pools:
            q = layer(q, pool, *rest)
        return q

    program = jax.jit(model)
    query, *rest = arguments
    seconds = harness.seconds(lambda: program(query, pools, *rest), _SAMPLE_SECONDS) / num_layers
    return _figures(f"{rows}x{keys}", num_layers, num_bytes, seconds, ceilings)


def measure_read(rows: int, keys: int, ceilings: Ceilings | None) -> dict[str, Any]:
    """The same for a plain reduction over the same pools: what reading them costs at least."""
    case = Case((keys,) * rows)
    pools, _ = _layers(case, 4)
    read = jax.jit(lambda pools: [pool.max() for pool in pools])
    seconds = harness.seconds(lambda: read(pools), _SAMPLE_SECONDS) / len(pools)
    return _figures(f"read {rows}x{keys}", 4, pools[0].nbytes, seconds, ceilings)


def _layers(case: Case, num_layers: int) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """Pools of random numbers made on the device; query, table, positions and lengths."""
    rows, keys = len(case.kv_lens), case.kv_lens[0]
    width = keys // case.page_size
    shape = (rows * width, case.num_kv_heads, 2, case.page_size, case.head_dim)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    first, *rest = jax.random.split(jax.random.key(rows + keys), num_layers + 1)
    heads = case.num_kv_heads * case.group
    q = jax.random.normal(first, (rows, 1, heads, case.head_dim), jnp.bfloat16)
    table = jax.random.permutation(first, rows * width).reshape(rows, width).astype(jnp.int32)
    positions = jnp.full((rows, 1), keys - 1, jnp.int32)
    return [make(key) for key in rest], (q, table, positions, jnp.full((rows,), keys, jnp.int32))


def _figures(
    shape: str, num_layers: int, num_bytes: int, seconds: float, ceilings: Ceilings | None
) -> dict[str, Any]:
    share = num_bytes / seconds / ceilings.read_bytes_per_second if ceilings else None
    figures = {
        "shape": shape,
        "layers": num_layers,
        "bytes": num_bytes,
        "us": round(1e6 * seconds, 2),
        "tb_per_second": round(num_bytes / seconds / 1e12, 3),
        "share_of_read": share and round(share, 3),
    }
    print(
        f"{shape:>14}  {figures['us']:8.1f} us  {figures['tb_per_second']:.2f} TB/s  "
        f"{share or 0:.1%} of a plain read",
        flush=True,
    )
    return figures


def measure_all(ceilings: Ceilings | None) -> Iterator[dict[str, Any]]:
    """Every shape, then the plain read."""
    for rows, keys in SHAPES:
        yield measure(rows, keys, ceilings)
    yield measure_read(64, 4096, ceilings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, measures and writes the report; the exit status is 1 when a check failed."""
    return harness.run(
        "decode_attention",
        "Checks and times the decode attention kernel.",
        (check_values, check_bits),
        measure_all,
        lambda: ("dispatch", dict(api.decode.counts), set(api.decode.counts) == {"mosaic"}),
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
