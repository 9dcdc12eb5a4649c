"""Latent decode attention on the GPU: first that it is right, then how near to its floor it runs.

    PYTHONPATH=. python benchmarks/kernels/mla.py [--quick] --json OUT.json

Classes of calls that the kernel covers are compared with float64 on the host, and what must not
change a bit is checked to change none; a failure ends the run with status 1. Then one layer's time:
a program runs over pools of several layers, more than the cache holds, and many calls of it are
under way between two waits, since a wait costs some 250 us by itself. The floor is the larger of
the bytes over the device's read speed and the products, columns filled up, over its matmul speed.
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
from kernels.mla import api
from kernels.mosaic import round_up

DECODE = ((64, 4096), (64, 1024), (256, 512), (8, 1024), (1, 8192))
"""Rows and keys of each, timed with pages of 64 and the heads of `HEADS`."""
HEADS = (16, 20)
"""Of DeepSeek-V2-Lite and of GLM-4.7-Flash."""
TOLERANCE = 3e-3
"""Of a row's norm. Weights and output are rounded to bfloat16: 2e-3 when all is well."""
LATENT, ROPE = 512, 64
_POOL_BYTES = 10**9
_MAX_LAYERS = 27
_SAMPLE_SECONDS = 0.06
_PLAIN = {"block_pages": 128, "block_bytes": 2**29, "kernels": "mosaic"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the absorbed op."""

    kv_lens: tuple[int, ...]
    num_heads: int = 16
    page_size: int = 64
    queries: int = 1

    def __str__(self) -> str:
        return (
            f"{len(self.kv_lens)} rows, {self.queries} queries, {self.num_heads} heads, "
            f"pages of {self.page_size}"
        )

    @property
    def scale(self) -> float:
        return (LATENT + ROPE) ** -0.5

    def decode(self) -> Callable[..., jax.Array]:
        """The op with everything static bound."""
        return functools.partial(api.decode, scale=self.scale, **_PLAIN)


EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 128, 129, 200, 577)
"""Lengths at both sides of pages and tiles."""
MANY = EDGES * 12
"""Enough rows that none is split."""


def cases(*, is_quick: bool) -> Iterator[Case]:
    """Classes that the kernel covers, split rows and whole ones."""
    for num_heads in HEADS:
        for page_size in (16, 64):
            yield Case(EDGES, num_heads, page_size)
        yield Case(MANY, num_heads)
    if is_quick:
        return
    for num_heads in (1, 4, 8, 12, 24, 30, 32, 40, 64, 128):
        yield Case(EDGES, num_heads, page_size=16)
    for page_size in (8, 32):
        yield Case(EDGES, page_size=page_size)
    for queries in (2, 4, 8):
        yield Case(EDGES, queries=queries)
        yield Case(MANY, 20, page_size=16, queries=queries)
    yield Case((9000, 20))


def inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Latent and rotary queries, pool, page table, positions and lengths.

    Past a row's end the table names page 0.
    """
    rng = np.random.default_rng(seed)
    rows, lens = len(case.kv_lens), np.array(case.kv_lens, np.int32)
    width = -(-max(case.kv_lens) // case.page_size) + 1
    pages = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    is_owned = np.arange(width) * case.page_size < lens[:, None]
    shape = (rows, case.queries, case.num_heads)
    pool = (rows * width + 2, case.page_size, LATENT + ROPE)
    q_latent, q_rope = (2 * rng.standard_normal((*shape, n), np.float32) for n in (LATENT, ROPE))
    positions = lens[:, None] - case.queries + np.arange(case.queries)
    return (
        q_latent.astype(jnp.bfloat16),
        q_rope.astype(jnp.bfloat16),
        rng.standard_normal(pool, np.float32).astype(jnp.bfloat16),
        np.where(is_owned, pages, 0),
        np.maximum(positions, 0).astype(np.int32),
        lens,
    )


def exact(case: Case, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """The result in float64."""
    q_latent, q_rope, pool, table, positions, lens = arrays
    q = np.concatenate([q_latent, q_rope], axis=-1).astype(np.float64)
    out = np.zeros(q_latent.shape, np.float64)
    for row, length in enumerate(lens):
        if not length:
            continue
        pages = pool[table[row, : -(-length // case.page_size)]].astype(np.float64)
        entries = pages.reshape(-1, pages.shape[-1])[:length]
        scores = q[row] @ entries.T * case.scale
        is_visible = np.arange(length) <= positions[row][:, None]
        scores = np.where(is_visible[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[row] = weights / weights.sum(-1, keepdims=True) @ entries[:, :LATENT]
    return out


def check_decode_values(*, is_quick: bool) -> Checks:
    """(what was checked, whether it holds, its figure) of every covered class."""
    for case in cases(is_quick=is_quick):
        arrays = inputs(case)
        before = api.decode.counts["mosaic"]
        found = np.asarray(jax.jit(case.decode())(*arrays))
        error = harness.worst_error(found, exact(case, arrays))
        did_run = api.decode.counts["mosaic"] == before + 1
        yield str(case), did_run and error <= TOLERANCE, f"{error:.1e}" if did_run else "declined"


def check_decode_bits() -> Checks:
    """What must change no bit of the other rows."""
    for name, case in (("split", Case(EDGES, 20)), ("whole", Case(MANY))):
        q_latent, q_rope, pool, table, positions, lens = arrays = inputs(case)
        decode = jax.jit(case.decode())
        clean = np.asarray(decode(*arrays))
        again = all(np.array_equal(np.asarray(decode(*arrays)), clean) for _ in range(20))
        yield f"{name} rows: 20 more runs", again, ""
        is_key = np.zeros(pool.shape[:2], bool)
        for row, length in enumerate(lens):
            tokens = np.arange(length)
            is_key[table[row, tokens // case.page_size], tokens % case.page_size] = True
        other = np.where(is_key[..., None], pool, jnp.bfloat16(-1e30))
        is_named = np.isin(np.arange(pool.shape[0]), table)
        other = np.where(is_named[:, None, None], other, jnp.bfloat16(np.nan))
        found = np.asarray(decode(q_latent, q_rope, other, table, positions, lens))
        same = np.array_equal(found, clean)
        yield f"{name} rows: NaN in pages nobody names, others where no key is", same, ""
        poisoned = q_latent.copy()
        poisoned[5, 0, :, 7] = np.nan
        found = np.asarray(decode(poisoned, q_rope, pool, table, positions, lens))
        rest = np.arange(len(lens)) != 5
        alone = np.array_equal(found[rest], clean[rest]) and np.isnan(found[5]).all()
        yield f"{name} rows: a NaN in the queries of one row", bool(alone), ""


def measure_decode(
    rows: int, keys: int, num_heads: int, ceilings: Ceilings | None
) -> dict[str, Any]:
    """Time of one layer, and its share of the floor."""
    case = Case((keys,) * rows, num_heads)
    num_bytes = rows * keys * (LATENT + ROPE) * 2
    num_layers = min(max(-(-_POOL_BYTES // num_bytes), 4), _MAX_LAYERS)
    pools, (q_latent, *rest) = _decode_layers(case, num_layers)
    layer = jax.jit(case.decode())

    def model(q: jax.Array, pools: Sequence[jax.Array], q_rope: jax.Array, *rest: jax.Array):
        for pool in pools:
            q = layer(q, q_rope, pool, *rest)
        return q

    program = jax.jit(model)
    seconds = harness.seconds(lambda: program(q_latent, pools, *rest), _SAMPLE_SECONDS) / num_layers
    flops = 2 * rows * keys * round_up(num_heads, 8) * (2 * LATENT + ROPE)
    return _figures(f"decode {rows}x{keys}, {num_heads} heads", seconds, num_bytes, flops, ceilings)


def _decode_layers(case: Case, num_layers: int) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """Pools of random numbers made on the device; queries, table, positions and lengths."""
    rows, keys = len(case.kv_lens), case.kv_lens[0]
    width = keys // case.page_size
    shape = (rows * width, case.page_size, LATENT + ROPE)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    first, *rest = jax.random.split(jax.random.key(rows + keys), num_layers + 1)
    q_latent, q_rope = (
        jax.random.normal(first, (rows, 1, case.num_heads, n), jnp.bfloat16) for n in (LATENT, ROPE)
    )
    table = jax.random.permutation(first, rows * width).reshape(rows, width).astype(jnp.int32)
    positions = jnp.full((rows, 1), keys - 1, jnp.int32)
    lens = jnp.full((rows,), keys, jnp.int32)
    return [make(key) for key in rest], (q_latent, q_rope, table, positions, lens)


def _figures(
    shape: str, seconds: float, num_bytes: int, flops: int, ceilings: Ceilings | None
) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "shape": shape,
        "us": round(1e6 * seconds, 2),
        "tb_per_second": round(num_bytes / seconds / 1e12, 3),
        "tflops_per_second": round(flops / seconds / 1e12, 1),
    }
    if ceilings is not None:
        times = {
            "bytes": num_bytes / ceilings.read_bytes_per_second,
            "products": flops / ceilings.flops_per_second,
        }
        bound = max(times, key=lambda name: times[name])
        figures["floor_us"] = round(1e6 * times[bound], 2)
        figures["bound_by"] = bound
        figures["share_of_floor"] = round(times[bound] / seconds, 3)
    print("  ".join(str(value) for value in figures.values()), flush=True)
    return figures


def measure_all(ceilings: Ceilings | None) -> Iterator[dict[str, Any]]:
    """Every shape."""
    for rows, keys in DECODE:
        for num_heads in HEADS:
            yield measure_decode(rows, keys, num_heads, ceilings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, measures and writes the report; the exit status is 1 when a check failed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_quick = "--quick" in words
    return harness.run(
        "mla",
        "Checks and times latent decode attention; --quick checks the served shapes alone.",
        (
            functools.partial(check_decode_values, is_quick=is_quick),
            check_decode_bits,
        ),
        measure_all,
        lambda: ("dispatch", dict(api.decode.counts), set(api.decode.counts) == {"mosaic"}),
        [word for word in words if word != "--quick"],
    )


if __name__ == "__main__":
    raise SystemExit(main())
