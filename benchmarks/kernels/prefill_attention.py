"""Prefill attention on the GPU: first that it is right, then how near to a matmul's speed it runs.

    PYTHONPATH=. python benchmarks/kernels/prefill_attention.py --json OUT.json

Every class of calls that the kernel covers is compared with float64 on the host, and what must not
change a bit is checked to change none; a failure ends the run with status 1. Then one layer's time
at the shapes of `SHAPES`: a program runs over pools of several layers, and many calls of it are
under way between two waits, since a wait costs some 250 us by itself.
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

SHAPES = (
    (1, 2048, 0),
    (2, 1024, 0),
    (4, 512, 0),
    (1, 2048, 6144),
    (16, 128, 0),
    (1, 8192, 0),
)
"""Chunks, new tokens and cached tokens of each, timed with 32 query and 8 kv heads of 128."""
TOLERANCE = 3e-3
"""Of a token's norm. Weights and output are rounded to bfloat16: 2e-3 when all is well."""
_LAYERS = 8
_SAMPLE_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the op: decode rows of one token each, chunks, then padding."""

    chunks: tuple[tuple[int, int], ...]
    """New and cached tokens of each."""
    num_decode: int = 0
    num_kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    page_size: int = 64
    window: int | None = None
    padding: int = 0

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return (
            f"{len(self.chunks)} chunks, {self.num_tokens} tokens, {self.num_decode} decode rows, "
            f"{self.num_kv_heads * self.group}/{self.num_kv_heads} heads of {self.head_dim}, "
            f"pages of {self.page_size}{window}"
        )

    @property
    def query_lens(self) -> list[int]:
        return [1] * self.num_decode + [new for new, _ in self.chunks]

    @property
    def kv_lens(self) -> list[int]:
        return [9] * self.num_decode + [new + cached for new, cached in self.chunks]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens) + self.padding

    def prefill(self) -> Callable[..., jax.Array]:
        """The op with everything static bound."""
        return functools.partial(
            api.prefill,
            scale=self.head_dim**-0.5,
            window=self.window,
            kernels="mosaic",
            block_pages=128,
            block_bytes=2**29,
            tile_tokens=64,
            tiles_at_once=1024,
            max_chunk_rows=max(len(self.chunks), 16),
        )


EDGES = ((5, 0), (64, 0), (1, 127), (1, 128), (130, 70), (63, 65), (200, 301))
"""Chunks that end at both sides of tiles, pages and steps."""
LONG = ((700, 900), (333, 0))


def cases() -> Iterator[Case]:
    """Every class that the kernel covers."""
    for group in range(1, 17):
        yield Case(EDGES, num_decode=group % 5, group=group, padding=(0, 3, 70)[group % 3])
    for head_dim in (64, 256):
        for page_size in (16, 64):
            for group in (1, 4, 7):
                yield Case(EDGES, group=group, head_dim=head_dim, page_size=page_size)
    for page_size in (16, 32):
        yield Case(EDGES, page_size=page_size, num_decode=3)
    for window in (1, 64, 100, 1000):
        yield Case(LONG, window=window, page_size=(64, 16)[window % 3 % 2])
    yield Case(EDGES, head_dim=256, group=2, window=90)
    yield Case(EDGES, head_dim=64, group=5, window=90)
    yield Case(LONG, num_decode=9, num_kv_heads=8)
    yield Case(LONG, group=1, num_kv_heads=8)
    yield Case(((1, 0),))


def inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, pool, page table, positions, lengths, first tokens of the rows, and decode rows."""
    rng = np.random.default_rng(seed)
    lens, new = np.array(case.kv_lens, np.int32), np.array(case.query_lens, np.int32)
    rows, width = len(lens), -(-max(lens) // case.page_size) + 1
    pages = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    is_owned = np.arange(width) * case.page_size < lens[:, None]
    heads = case.num_kv_heads * case.group
    q = rng.standard_normal((case.num_tokens, heads, case.head_dim), np.float32)
    pool_shape = (rows * width + 1, case.num_kv_heads, 2, case.page_size, case.head_dim)
    positions = [np.arange(end - count, end) for end, count in zip(lens, new, strict=True)]
    return (
        (2 * q).astype(jnp.bfloat16),
        rng.standard_normal(pool_shape, np.float32).astype(jnp.bfloat16),
        np.where(is_owned, pages, 0),
        np.concatenate([*positions, np.zeros(case.padding)]).astype(np.int32),
        lens,
        np.cumsum([0, *new]).astype(np.int32),
        np.array(case.num_decode, np.int32),
    )


def exact(case: Case, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """The result in float64."""
    q, pool, table, positions, lens, starts, _ = arrays
    out = np.zeros(q.shape, np.float64)
    for row in range(case.num_decode, len(lens)):
        length, tokens = lens[row], slice(starts[row], starts[row + 1])
        pages = pool[table[row, : -(-length // case.page_size)]].astype(np.float64)
        keys, values = pages.transpose(2, 1, 0, 3, 4).reshape(
            2, case.num_kv_heads, 1, -1, case.head_dim
        )[:, :, :, :length]
        queries = q[tokens].astype(np.float64).swapaxes(0, 1)
        queries = queries.reshape(case.num_kv_heads, case.group, -1, case.head_dim)
        scores = queries @ keys.swapaxes(-1, -2) * case.head_dim**-0.5
        key_at, query_at = np.arange(length), positions[tokens][:, None]
        is_visible = key_at <= query_at
        if case.window is not None:
            is_visible &= key_at > query_at - case.window
        scores = np.where(is_visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        heads = (weights @ values).reshape(q.shape[1], -1, case.head_dim)
        out[tokens] = heads.swapaxes(0, 1)
    return out


def check_values() -> Checks:
    """(what was checked, whether it holds, its figure) of every covered class."""
    for case in cases():
        arrays = inputs(case)
        before = api.prefill.counts["mosaic"]
        found = np.asarray(jax.jit(case.prefill())(*arrays))
        error = harness.worst_error(found, exact(case, arrays))
        did_run = api.prefill.counts["mosaic"] == before + 1
        yield str(case), did_run and error <= TOLERANCE, f"{error:.1e}" if did_run else "declined"


def check_bits() -> Checks:
    """What must change no bit of the other tokens."""
    for name, case in (
        ("ragged chunks", Case(EDGES, num_decode=3, group=3, padding=5)),
        ("long chunks", Case(LONG, num_decode=9, num_kv_heads=8)),
    ):
        q, pool, *rest = arrays = inputs(case)
        table, lens = rest[0], rest[2]
        prefill = jax.jit(case.prefill())
        clean = np.asarray(prefill(*arrays))
        again = all(np.array_equal(np.asarray(prefill(*arrays)), clean) for _ in range(20))
        yield f"{name}: 20 more runs", again, ""
        is_key = np.zeros((pool.shape[0], case.page_size), bool)
        for row in range(case.num_decode, len(lens)):
            tokens = np.arange(lens[row])
            is_key[table[row, tokens // case.page_size], tokens % case.page_size] = True
        other = np.where(is_key[:, None, None, :, None], pool, jnp.bfloat16(-1e30))
        same = np.array_equal(np.asarray(prefill(q, other, *rest)), clean)
        yield f"{name}: other numbers where no chunk has a key", same, ""
        poisoned, token = q.copy(), 100
        poisoned[token, :, 7] = np.nan
        found = np.asarray(prefill(poisoned, pool, *rest))
        others = np.arange(case.num_tokens) != token
        alone = np.array_equal(found[others], clean[others]) and np.isnan(found[token]).all()
        yield f"{name}: a NaN in the queries of one token", bool(alone), ""


def check_cuts() -> Checks:
    """Where a chunk is cut in two must change no bit, nor where its tokens stand in the step."""
    new = 700
    for window in (None, 200):
        case = Case(((new, 900),), num_kv_heads=8, window=window)
        arrays, prefill = inputs(case), jax.jit(case.prefill())
        whole = _part(arrays, prefill, 0, new)
        for cut in (1, 64, 301):
            parts = [_part(arrays, prefill, *span) for span in ((0, cut), (cut, new - cut))]
            yield f"{case}: cut at token {cut}", np.array_equal(np.concatenate(parts), whole), ""


def _part(
    arrays: tuple[np.ndarray, ...], prefill: Callable[..., jax.Array], first: int, count: int
) -> np.ndarray:
    """The result of some tokens of the only chunk; the others are padding after them."""
    q, pool, table, positions, _, _, num_decode = arrays
    queries, places = (np.roll(x, -first, axis=0) for x in (q, positions))
    lens = places[count - 1 : count] + np.int32(1)
    starts = np.array([0, count], np.int32)
    return np.asarray(prefill(queries, pool, table, places, lens, starts, num_decode))[:count]


def measure(chunks: int, new: int, cached: int, ceilings: Ceilings | None) -> dict[str, Any]:
    """Time of one layer, and its share of a matmul's speed."""
    case = Case(((new, cached),) * chunks, num_kv_heads=8)
    pools, arguments = _layers(case)
    layer = jax.jit(case.prefill())

    def model(q: jax.Array, pools: Sequence[jax.Array], *rest: jax.Array) -> jax.Array:
        for pool in pools:
            q = layer(q, pool, *rest)
        return q

    program = jax.jit(model)
    query, *rest = arguments
    seconds = harness.seconds(lambda: program(query, pools, *rest), _SAMPLE_SECONDS) / _LAYERS
    pairs = chunks * (new * cached + new * (new + 1) // 2)
    flops = 4 * case.num_kv_heads * case.group * case.head_dim * pairs
    share = flops / seconds / ceilings.flops_per_second if ceilings else None
    figures = {
        "shape": f"{chunks}x{new}" + (f" after {cached}" if cached else ""),
        "layers": _LAYERS,
        "flops": flops,
        "us": round(1e6 * seconds, 2),
        "tflops_per_second": round(flops / seconds / 1e12, 1),
        "share_of_matmul": share and round(share, 3),
    }
    print(
        f"{figures['shape']:>18}  {figures['us']:8.1f} us  "
        f"{figures['tflops_per_second']:6.1f} TFLOP/s  {share or 0:.1%} of a matmul",
        flush=True,
    )
    return figures


def _layers(case: Case) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """Pools of random numbers made on the device, and the other arguments."""
    new, lens = np.array(case.query_lens), np.array(case.kv_lens)
    rows, width = len(lens), -(-max(lens) // case.page_size)
    shape = (rows * width, case.num_kv_heads, 2, case.page_size, case.head_dim)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    first, *rest = jax.random.split(jax.random.key(rows), _LAYERS + 1)
    heads = case.num_kv_heads * case.group
    q = jax.random.normal(first, (case.num_tokens, heads, case.head_dim), jnp.bfloat16)
    table = jax.random.permutation(first, rows * width).reshape(rows, width).astype(jnp.int32)
    positions = [np.arange(end - count, end) for end, count in zip(lens, new, strict=True)]
    numbers = (np.concatenate(positions), lens, np.cumsum([0, *new]), np.int32(0))
    on_device = tuple(jnp.asarray(x, jnp.int32) for x in numbers)
    return [make(key) for key in rest], (q, table, *on_device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, measures and writes the report; the exit status is 1 when a check failed."""
    return harness.run(
        "prefill_attention",
        "Checks and times the prefill attention kernel.",
        (check_values, check_bits, check_cuts),
        lambda ceilings: (measure(*shape, ceilings) for shape in SHAPES),
        lambda: ("dispatch", dict(api.prefill.counts), set(api.prefill.counts) == {"mosaic"}),
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
