"""Latent attention on the GPU: first that it is right, then how near to its floor it runs.

    PYTHONPATH=. python benchmarks/kernels/mla.py [--quick] [--decode | --prefill] --json OUT.json

Classes of calls that the kernels cover are compared with the truth, for decode float64 on the host,
for chunks the reference in float32 at the highest precision, and what must not change a bit is
checked to change none; a failure ends the run with status 1. Then one layer's time:
a program runs over pools of several layers, more than the cache holds, and many calls of it are
under way between two waits, since a wait costs some 250 us by itself. The floor is the larger of
the bytes over the device's read speed and the products, columns filled up, over its matmul speed.
Of chunks the products are the attention's and those that expand each row's latents once.
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
from kernels.mla import api, reference
from kernels.mosaic import round_up

DECODE = ((64, 4096), (64, 1024), (256, 512), (8, 1024), (1, 8192))
"""Rows and keys of each, timed with pages of 64 and the heads of `HEADS`."""
HEADS = (16, 20)
"""Of DeepSeek-V2-Lite and of GLM-4.7-Flash."""
TOLERANCE = 3e-3
"""Of a row's norm. Weights and output are rounded to bfloat16: 2e-3 when all is well."""
LATENT, ROPE = 512, 64
CHUNK_TOLERANCE = 8e-3
"""Of a token's norm. Expanded keys and values are rounded too: 5e-3 when all is well."""
DIMS = {16: (128, 128), 20: (192, 256), 128: (128, 128)}
"""By heads: of a key without its rotary part, and of a value."""
CHUNKS = ((1, 2048, 0), (4, 512, 0), (1, 2048, 6144), (2, 4096, 0))
"""Chunks, their new and their cached tokens, timed with pages of 64 and the heads of `HEADS`."""
SERVED = (64, (2, 4096, 0))
"""Rows of a step whose pages are too many for the workspace: its turns are taken in a loop."""
_CHUNK_LAYERS = 4
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


@dataclasses.dataclass(frozen=True)
class Chunks:
    """One call of the un-absorbed op: decode rows of one token each, chunks, padding."""

    chunks: tuple[tuple[int, int], ...]
    """New and cached tokens of each."""
    num_heads: int = 16
    page_size: int = 64
    num_decode: int = 0
    padding: int = 0
    workspace: int = 2**29
    """Bytes."""
    rows: int = 0
    """Of the call, at least: those that are left over are empty."""

    def __str__(self) -> str:
        turns = "" if self.workspace == 2**29 else f", {self.workspace >> 20} MiB of workspace"
        return (
            f"{len(self.chunks)} chunks, {self.num_tokens} tokens, {self.num_decode} decode rows, "
            f"{self.num_heads} heads, pages of {self.page_size}{turns}"
        )

    @property
    def query_lens(self) -> list[int]:
        used = [1] * self.num_decode + [new for new, _ in self.chunks]
        return used + [0] * (self.rows - len(used))

    @property
    def kv_lens(self) -> list[int]:
        used = [9] * self.num_decode + [new + cached for new, cached in self.chunks]
        return used + [0] * (self.rows - len(used))

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens) + self.padding

    @property
    def width(self) -> int:
        return -(-max(self.kv_lens) // self.page_size)

    @property
    def static(self) -> dict[str, Any]:
        key_dim, _ = DIMS[self.num_heads]
        return {
            "scale": (key_dim + ROPE) ** -0.5,
            "block_pages": 128,
            "block_bytes": self.workspace,
            "tile_tokens": 512,
            "max_chunk_rows": max(len(self.query_lens) - self.num_decode, 1),
        }

    def prefill(self) -> Callable[..., jax.Array]:
        """The op with everything static bound."""
        return functools.partial(api.prefill, kernels="mosaic", **self.static)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the queries, k_up, v_up and the pool."""
        key_dim, value_dim = DIMS[self.num_heads]
        pages = len(self.kv_lens) * self.width + 2
        return (
            (self.num_tokens, self.num_heads, key_dim + ROPE),
            (self.num_heads, key_dim, LATENT),
            (self.num_heads, value_dim, LATENT),
            (pages, self.page_size, LATENT + ROPE),
        )

    def numbers(self) -> tuple[np.ndarray, ...]:
        """Page table, positions, lengths, first tokens of the rows, and decode rows.

        Past a row's end the table names page 0.
        """
        rng = np.random.default_rng(0)
        lens, new = np.array(self.kv_lens, np.int32), np.array(self.query_lens, np.int32)
        shape = (len(lens), self.width)
        pages = 1 + rng.permutation(len(lens) * self.width).reshape(shape).astype(np.int32)
        is_owned = np.arange(self.width) * self.page_size < lens[:, None]
        positions = [np.arange(end - count, end) for end, count in zip(lens, new, strict=True)]
        return (
            np.where(is_owned, pages, 0),
            np.concatenate([*positions, np.zeros(self.padding)]).astype(np.int32),
            lens,
            np.cumsum([0, *new]).astype(np.int32),
            np.array(self.num_decode, np.int32),
        )


RAGGED = ((5, 0), (64, 0), (1, 127), (1, 128), (130, 70), (63, 65), (200, 301))
"""Chunks that end at both sides of tiles, pages and blocks."""
LONG = ((700, 900), (333, 0))


def _ragged(num_heads: int) -> Chunks:
    return Chunks(RAGGED, num_heads, num_decode=3, padding=5)


@functools.cache
def _program(case: Chunks) -> Callable[..., jax.Array]:
    """The op of a case, compiled once."""
    return jax.jit(case.prefill())


def chunk_cases(*, is_quick: bool) -> Iterator[Chunks]:
    """Classes that the kernels cover, in one turn and in several."""
    for num_heads in HEADS:
        yield _ragged(num_heads)
        yield Chunks(LONG, num_heads, page_size=16, workspace=2**24)
    if is_quick:
        return
    for num_heads in HEADS:
        yield Chunks(LONG, num_heads, num_decode=9)
        yield Chunks(RAGGED, num_heads, page_size=32, padding=5)
    yield Chunks(LONG, 128, workspace=2**27)
    yield Chunks(((1, 0),))


def chunk_inputs(case: Chunks) -> tuple[jax.Array, ...]:
    """Arguments of the op, random ones made on the device."""
    factors = (2.0, LATENT**-0.5, LATENT**-0.5, 1.0)
    keys = jax.random.split(jax.random.key(case.num_tokens), len(factors))
    drawn = (
        (factor * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)
        for key, shape, factor in zip(keys, case.shapes(), factors, strict=True)
    )
    return (*drawn, *map(jnp.asarray, case.numbers()))


def exact_chunks(case: Chunks, arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """The reference in float32, whose products are then of the highest precision."""
    wide = [x.astype(jnp.float32) for x in arrays[:4]]
    call = jax.jit(functools.partial(reference.prefill, **case.static))
    return np.asarray(call(*wide, *arrays[4:]))


def check_chunk_values(*, is_quick: bool) -> Checks:
    """(what was checked, whether it holds, its figure) of every covered class."""
    for case in chunk_cases(is_quick=is_quick):
        arrays = chunk_inputs(case)
        before = api.prefill.counts["mosaic"]
        found = np.asarray(_program(case)(*arrays))
        error = harness.worst_error(found, exact_chunks(case, arrays))
        did_run = api.prefill.counts["mosaic"] == before + 1
        figure = f"{error:.1e}" if did_run else f"declined: {api.prefill.declined['mosaic']}"
        yield str(case), did_run and error <= CHUNK_TOLERANCE, figure


def check_chunk_bits() -> Checks:
    """What must change no bit of the other tokens."""
    for num_heads in HEADS:
        case = _ragged(num_heads)
        q, k_up, v_up, pool, *rest = arrays = chunk_inputs(case)
        prefill = _program(case)
        clean = np.asarray(prefill(*arrays))
        again = all(np.array_equal(np.asarray(prefill(*arrays)), clean) for _ in range(20))
        yield f"{case}: 20 more runs", again, ""
        table, _, lens, *_ = case.numbers()
        is_key = np.zeros(pool.shape[:2], bool)
        for row in range(case.num_decode, len(lens)):
            tokens = np.arange(lens[row])
            is_key[table[row, tokens // case.page_size], tokens % case.page_size] = True
        other = jnp.where(jnp.asarray(is_key)[..., None], pool, jnp.bfloat16(jnp.nan))
        same = np.array_equal(np.asarray(prefill(q, k_up, v_up, other, *rest)), clean)
        yield f"{case}: NaN in pages where no chunk has a key", same, ""
        token = 100
        found = np.asarray(prefill(q.at[token, :, 7].set(jnp.nan), k_up, v_up, pool, *rest))
        others = np.arange(case.num_tokens) != token
        alone = np.array_equal(found[others], clean[others]) and np.isnan(found[token]).all()
        yield f"{case}: a NaN in the queries of one token", bool(alone), ""
        small = dataclasses.replace(case, workspace=2**21)
        found = np.asarray(jax.jit(small.prefill())(*arrays))
        yield f"{small}: in turns", np.array_equal(found, clean), ""


def check_chunk_cuts() -> Checks:
    """Where a chunk is cut in two must change no bit, nor where its tokens stand in the step."""
    new = 700
    for num_heads in HEADS:
        case = Chunks(((new, 900),), num_heads)
        arrays, prefill = chunk_inputs(case), jax.jit(case.prefill())
        whole = _part(arrays, prefill, 0, new)
        for cut in (1, 301):
            parts = [_part(arrays, prefill, *span) for span in ((0, cut), (cut, new - cut))]
            yield f"{case}: cut at token {cut}", np.array_equal(np.concatenate(parts), whole), ""


def _part(
    arrays: tuple[jax.Array, ...], prefill: Callable[..., jax.Array], first: int, count: int
) -> np.ndarray:
    """The result of some tokens of the only chunk; the others are padding after them."""
    q, k_up, v_up, pool, table, positions, _, _, num_decode = arrays
    queries, places = (jnp.roll(x, -first, axis=0) for x in (q, positions))
    lens = places[count - 1 : count] + jnp.int32(1)
    starts = jnp.array([0, count], jnp.int32)
    out = prefill(queries, k_up, v_up, pool, table, places, lens, starts, num_decode)
    return np.asarray(out)[:count]


def measure_chunks(case: Chunks, name: str, ceilings: Ceilings | None) -> dict[str, Any]:
    """Time of one layer, and its share of the floor."""
    arrays = chunk_inputs(case)
    make = jax.jit(lambda key: jax.random.normal(key, case.shapes()[3], jnp.bfloat16))
    pools = [make(key) for key in jax.random.split(jax.random.key(1), _CHUNK_LAYERS)]
    layer = jax.jit(case.prefill())

    def model(pools: Sequence[jax.Array], q: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        k_up, v_up, _, *numbers = rest
        return [layer(q, k_up, v_up, pool, *numbers) for pool in pools]

    program = jax.jit(model)
    seconds = harness.seconds(lambda: program(pools, *arrays), _SAMPLE_SECONDS) / _CHUNK_LAYERS
    key_dim, value_dim = DIMS[case.num_heads]
    pairs = sum(new * cached + new * (new + 1) // 2 for new, cached in case.chunks)
    keys = sum(new + cached for new, cached in case.chunks)
    flops = 2 * case.num_heads * (key_dim + ROPE + value_dim) * pairs
    expansion = 2 * case.num_heads * LATENT * (key_dim + value_dim) * keys
    num_bytes = keys * (LATENT + ROPE) * 2 + case.num_tokens * case.num_heads * 2 * (
        key_dim + ROPE + value_dim
    )
    name = f"prefill {name}, {case.num_heads} heads"
    return _figures(name, seconds, num_bytes, flops + expansion, ceilings) | {
        "attention_flops": flops
    }


def measure_decodes(ceilings: Ceilings | None) -> Iterator[dict[str, Any]]:
    """Every shape of decode."""
    for rows, keys in DECODE:
        for num_heads in HEADS:
            yield measure_decode(rows, keys, num_heads, ceilings)


def measure_prefills(ceilings: Ceilings | None) -> Iterator[dict[str, Any]]:
    """Every shape of chunks, and chunks among as many rows as a step has."""
    for num_heads in HEADS:
        for rows, (chunks, new, cached) in (*((0, shape) for shape in CHUNKS), SERVED):
            name = f"{chunks}x{new}" + (f" after {cached}" if cached else "")
            name += f" of {rows} rows" if rows else ""
            case = Chunks(((new, cached),) * chunks, num_heads, rows=rows)
            yield measure_chunks(case, name, ceilings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, measures and writes the report; the exit status is 1 when a check failed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_quick = "--quick" in words
    decodes = (functools.partial(check_decode_values, is_quick=is_quick), check_decode_bits)
    chunks = (
        functools.partial(check_chunk_values, is_quick=is_quick),
        check_chunk_bits,
        *(() if is_quick else (check_chunk_cuts,)),
    )
    parts = [
        (api.decode, decodes, measure_decodes)
        if name == "--decode"
        else (api.prefill, chunks, measure_prefills)
        for name in ("--decode", "--prefill")
        if name in words or not {"--decode", "--prefill"} & set(words)
    ]

    def outcome() -> tuple[str, Any, bool]:
        counts = {op.op: dict(op.counts) for op, *_ in parts}
        return "dispatch", counts, all(set(count) == {"mosaic"} for count in counts.values())

    return harness.run(
        "mla",
        "Checks and times latent attention; --quick checks the served shapes alone, --decode and "
        "--prefill one op.",
        [check for _, checks, _ in parts for check in checks],
        lambda ceilings: (x for _, _, measure in parts for x in measure(ceilings)),
        outcome,
        [word for word in words if word not in ("--quick", "--decode", "--prefill")],
    )


if __name__ == "__main__":
    raise SystemExit(main())
