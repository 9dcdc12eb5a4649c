"""Paged latent decode attention on Hopper: a warpgroup per row and split streams entries by TMA.

Operands are swapped: tokens and latent dims lie on the 64-wide side of a product, a row's heads are
its 8 or more columns. So few heads cost no more than they are, and a page's latents, read once, lie
in shared memory as keys of the first product and, transposed, as values of the second.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import SWIZZLED, Ref, div_rem, round_up
from kernels.running_softmax import (
    SCORES,
    TILE,
    Partial,
    column_positions,
    nothing,
    per_column,
    weigh,
)
from kernels.tuning import Choice, Shape, rung

_STAGES = 2
"""Tiles on their way at once: a third, 72 KB, would not fit beside the queries."""
_MULTIPROCESSORS = 132
"""Of an H100 or H200; one block runs on each."""
_EXTRA_TILES = 3
"""What a block costs besides its tiles, in tiles: it starts, waits once and writes."""
_MAX_SPLITS = 32
_PAGE_SIZES = (8, 16, 32, 64)
_LATENT_DIMS = (128, 256, 512)
_ROPE_DIM = 64
_MAX_QUERIES = 8
_MAX_COLUMNS = 32
"""Sums of more columns would not stay in registers: 512 latent dims take 4 of a thread for each."""
_MAX_LOOSE_COLUMNS = 24
"""Where queries do not start at multiples of 8, they take shared memory twice."""

_COPIED_DIMS = 256
"""A copy that is not swizzled takes no more of a row."""
_SUMS_IN_PLACE = True
"""False only where the kernel is interpreted, which knows no product added to an array."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static of one kernel."""

    rows: int
    queries: int
    num_heads: int
    latent: int
    page_size: int
    width: int
    """Pages of a row of the page table."""
    scale: float
    chosen_splits: int | None = None
    """None: by formula."""

    @property
    def row_columns(self) -> int:
        """Of a row: every query of every head."""
        return self.queries * self.num_heads

    @property
    def cuts(self) -> int:
        """Blocks that share a row, each with its columns."""
        return -(-self.row_columns // _MAX_COLUMNS)

    @property
    def columns(self) -> int:
        """Of one block."""
        return round_up(-(-self.row_columns // self.cuts), 8)

    @property
    def stride(self) -> int:
        """Query rows from one block to the next; more than a row has where rows are filled up."""
        if self.cuts == 1 and self.columns <= _MAX_LOOSE_COLUMNS:
            return self.row_columns
        return self.columns

    @property
    def is_loose(self) -> bool:
        """Whether blocks' queries start anywhere: a swizzled copy starts at multiples of 8 rows."""
        return self.stride % 8 != 0

    @property
    def blocks(self) -> int:
        """Blocks of one split."""
        return self.rows * self.cuts

    @property
    def pages_per_tile(self) -> int:
        return TILE // self.page_size

    @property
    def split_counts(self) -> tuple[int, ...]:
        """Powers of two that leave no split without a tile of a full row."""
        tiles = -(-self.width // self.pages_per_tile)
        return tuple(1 << i for i in range(_MAX_SPLITS.bit_length()) if 1 << i <= tiles)

    @property
    def splits(self) -> int:
        """The power of two with which the device is done first, were all rows full."""
        if self.chosen_splits is not None:
            return self.chosen_splits
        tiles = -(-self.width // self.pages_per_tile)

        def cost(splits: int) -> int:
            turns = -(-splits * self.blocks // _MULTIPROCESSORS)
            merged = 0 if splits == 1 else 1
            return turns * (-(-tiles // splits) + _EXTRA_TILES) + merged

        return min(self.split_counts, key=cost)

    def panel(self, itemsize: int) -> int:
        """Latent dims written at once: what shared memory is left for."""
        most = 2**14 if self.is_loose else 2**15
        is_full = _COPIED_DIMS * self.columns * itemsize <= most
        return min(self.latent, _COPIED_DIMS if is_full else _COPIED_DIMS // 2)


def decode(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    block_pages: int,
    block_bytes: int,
    kernels: str,
    splits: int | None = None,
) -> jax.Array:
    """Attends rows of equal query length to the latents of their pages; see `reference.decode`.

    Blocks of `splits` share a row's tiles; None: as many as keep the device busy, by formula.

    The pool must be finite in every page that the table names. A NaN in a query reaches the output
    of that query's head alone.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    del block_pages, block_bytes  # the kernel gathers nothing
    _decline(q_latent, q_rope, pool, kernels)
    rows, queries, num_heads, latent = q_latent.shape
    plan = _Plan(
        rows=rows,
        queries=queries,
        num_heads=num_heads,
        latent=latent,
        page_size=pool.shape[1],
        width=page_table.shape[1],
        scale=scale,
        chosen_splits=splits,
    )
    # A slice of a larger array is refused where it starts at no multiple of 16 bytes; these are
    # arrays of their own, made once a step and shared by the layers.
    page_starts = page_table * plan.page_size
    lengths = jnp.concatenate([kv_lens[:, None], positions], axis=1)
    flat = (_columns(q_latent, plan), _columns(q_rope, plan))
    out = _attend(*flat, pool.reshape(-1, pool.shape[-1]), page_starts, lengths, plan)
    out = out.reshape(rows, -1, latent)[:, : plan.row_columns]
    return out.reshape(q_latent.shape)


def shape_of(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    *_: jax.Array,
    **__: object,
) -> Shape:
    """What a call is tuned by."""
    del q_rope
    rows, queries, num_heads, latent = q_latent.shape
    return {
        "rows": rung(rows),
        "queries": queries,
        "num_heads": num_heads,
        "latent": latent,
        "page_size": pool.shape[1],
        "pages": page_table.shape[1],
    }


def candidates(shape: Shape) -> tuple[Choice, ...]:
    """Numbers of splits, the formula's first."""
    sizes = {name: size for name, size in shape.items() if name != "pages"}
    plan = _Plan(**sizes, width=shape["pages"], scale=1.0)
    most = 8 * _MULTIPROCESSORS
    tried = [n for n in plan.split_counts if n == 1 or n * plan.blocks <= most]
    return tuple(Choice.of("mosaic", splits=n) for n in dict.fromkeys([plan.splits, *tried]))


def _decline(q_latent: jax.Array, q_rope: jax.Array, pool: jax.Array, kernels: str) -> None:
    queries, latent, rope = q_latent.shape[1], q_latent.shape[-1], q_rope.shape[-1]
    page_size = pool.shape[1]
    if kernels != "mosaic":
        raise NotImplementedError(f"kernels are {kernels!r}, not 'mosaic'")
    if q_latent.dtype != jnp.bfloat16 or pool.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"queries are {q_latent.dtype} and pages {pool.dtype}, not bfloat16"
        )
    if latent not in _LATENT_DIMS:
        raise NotImplementedError(f"a latent has {latent} dims, not one of {_LATENT_DIMS}")
    if rope != _ROPE_DIM:
        raise NotImplementedError(f"a rotary key has {rope} dims, not {_ROPE_DIM}")
    if page_size not in _PAGE_SIZES:
        raise NotImplementedError(f"page_size is {page_size}, not one of {_PAGE_SIZES}")
    if queries > _MAX_QUERIES:
        raise NotImplementedError(f"a row has {queries} queries, at most {_MAX_QUERIES} may be")
    if pool.shape[0] * page_size >= 2**31:
        raise NotImplementedError(f"a pool of {pool.shape[0]} pages is past 32-bit row numbers")


def _columns(q: jax.Array, plan: _Plan) -> jax.Array:
    """[R, Q, N, X] -> the blocks' columns, [blocks * stride, X] and no fewer than a copy has."""
    spare = plan.cuts * plan.stride - plan.row_columns
    q = q.reshape(plan.rows, plan.row_columns, -1)
    if spare:
        q = jnp.pad(q, ((0, 0), (0, spare), (0, 0)))
    flat = q.reshape(-1, q.shape[-1])
    if flat.shape[0] < plan.columns:
        # A copy may start near the array's end and reads zeros past it, but is not taller than it.
        flat = jnp.pad(flat, ((0, plan.columns - flat.shape[0]), (0, 0)))
    return flat


def _attend(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool: jax.Array,
    page_starts: jax.Array,
    lengths: jax.Array,
    plan: _Plan,
) -> jax.Array:
    """q [blocks * stride, L and R] against pool [P * page_size, L + R] -> [blocks * stride, L].

    `lengths` i32[B, 1 + Q]: keys of a row, then the positions of its queries.
    """
    columns, latent, splits = plan.columns, plan.latent, plan.splits
    is_whole = splits == 1
    out_rows = plan.blocks * plan.stride
    out_dtype = jnp.dtype(jnp.bfloat16 if is_whole else jnp.float32)
    out_types = [jax.ShapeDtypeStruct((splits * out_rows, latent), out_dtype)]
    if not is_whole:
        out_types.append(jax.ShapeDtypeStruct((splits * plan.blocks, columns), jnp.float32))

    width = min(latent, _COPIED_DIMS)

    def swizzled(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    scratch = dict(
        latent_tile=swizzled(columns, latent),
        rope_tile=swizzled(columns, _ROPE_DIM),
        latent_ring=swizzled(_STAGES, TILE, latent),
        rope_ring=swizzled(_STAGES, TILE, _ROPE_DIM),
        weights=swizzled(columns, TILE),
        result=plgpu.SMEM((columns, plan.panel(out_dtype.itemsize)), out_dtype),
        q_here=plgpu.Barrier(num_arrivals=1 + (latent // width if plan.is_loose else 1)),
        entries_here=plgpu.Barrier(num_barriers=_STAGES, num_arrivals=2 * plan.pages_per_tile),
    )
    if plan.is_loose:
        scratch["latent_raw"] = plgpu.SMEM((latent // width, columns, width), jnp.bfloat16)
        scratch["rope_raw"] = plgpu.SMEM((1, columns, _ROPE_DIM), jnp.bfloat16)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_types,
        kernel_name="latent_decode",
        # The last axis runs fastest: the blocks of one row, which read the same pages.
        grid=(splits, plan.rows, plan.cuts),
        grid_names=("split", "row", "cut"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )
    out = kernel(q_latent, q_rope, pool, page_starts, lengths)
    return out[0] if is_whole else _merged(out[0], out[1], plan)


def _merged(values: jax.Array, highs: jax.Array, plan: _Plan) -> jax.Array:
    """Merges the splits: normalised values [S * blocks * stride, L], log2 of weights [.., C]."""
    values = values.reshape(plan.splits, plan.blocks, plan.stride, plan.latent)
    highs = highs.reshape(plan.splits, plan.blocks, plan.columns)[:, :, : plan.stride]
    shares = jnp.exp2(highs - highs.max(axis=0, keepdims=True))
    shares = shares / shares.sum(axis=0, keepdims=True)
    # Unrolled, so that XLA makes one fusion of it and sums in this order.
    out = functools.reduce(jnp.add, [values[i] * shares[i][..., None] for i in range(plan.splits)])
    return out.reshape(-1, plan.latent).astype(jnp.bfloat16)


def _kernel(
    q_latent: Ref,
    q_rope: Ref,
    pool: Ref,
    page_starts: Ref,
    lengths: Ref,
    out: Ref,
    *highs: Ref,
    latent_tile: Ref,
    rope_tile: Ref,
    latent_ring: Ref,
    rope_ring: Ref,
    weights: Ref,
    result: Ref,
    q_here: Ref,
    entries_here: Ref,
    plan: _Plan,
    latent_raw: Ref | None = None,
    rope_raw: Ref | None = None,
) -> None:
    """One block: the tiles `split`, `split + splits`, ... of a row, for some of its columns."""
    split, row, cut = (jax.lax.axis_index(name) for name in ("split", "row", "cut"))
    block = row * plan.cuts + cut
    query_at = [lengths[row, 1 + i] for i in range(plan.queries)]
    end, _ = div_rem(lengths[row, 0] + (TILE - 1), TILE)
    num_tiles, _ = div_rem(end - split + (plan.splits - 1), plan.splits)

    def tile_at(i: jax.Array | int) -> jax.Array:
        return split + i * plan.splits

    def starts_of(i: jax.Array | int) -> list[jax.Array]:
        first = tile_at(i) * plan.pages_per_tile
        places = [first + page for page in range(plan.pages_per_tile)]
        starts = [page_starts[row, jnp.minimum(place, plan.width - 1)] for place in places]
        return [pl.multiple_of(start, plan.page_size) for start in starts]

    def fetch(slot: jax.Array | int, starts: list[jax.Array]) -> None:
        tiles = (latent_ring.at[slot], rope_ring.at[slot])
        _fetch(pool, tiles, entries_here.at[slot], starts, plan)

    # Pages do not wait for the length: both loads are under way at once.
    first_starts = [starts_of(stage) for stage in range(_STAGES)]
    for source, tile, raw in ((q_latent, latent_tile, latent_raw), (q_rope, rope_tile, rope_raw)):
        _fetch_queries(source, tile, raw, q_here, block * plan.stride, plan)
    for stage, starts in enumerate(first_starts):
        pl.when(stage < num_tiles)(functools.partial(fetch, stage, starts))
    plgpu.barrier_wait(q_here)
    for tile, raw in ((latent_tile, latent_raw), (rope_tile, rope_raw)):
        if raw is not None:
            _arrange_queries(tile, raw)
    if plan.is_loose:
        plgpu.commit_smem()
    column_at = column_positions(query_at, cut, plan.columns, plan.num_heads)

    def step(i: jax.Array, partial: Partial) -> Partial:
        slot = jax.lax.rem(i, jnp.int32(_STAGES))
        next_starts = starts_of(i + _STAGES)  # asked for early, used late
        plgpu.barrier_wait(entries_here.at[slot])
        entries = (latent_ring.at[slot], rope_ring.at[slot])
        partial = _attend_tile(
            partial, entries, (latent_tile, rope_tile), weights, tile_at(i) * TILE, column_at, plan
        )
        pl.when(i + _STAGES < num_tiles)(lambda: fetch(slot, next_starts))
        return partial

    values, high, total = jax.lax.fori_loop(0, num_tiles, step, nothing(plan.latent, plan.columns))
    total = total.sum(axis=0)
    # Only columns that saw no key have a total of 0; a NaN must stay one.
    divisor = jnp.where(total == 0, 1.0, total)
    values = values / per_column(divisor, values)
    where = split * plan.blocks + block
    if highs:
        highs[0][where] = high + jnp.log2(divisor)
        values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    _write(values, result, out.at[pl.ds(where * plan.stride, plan.stride)], plan)


def _write(values: jax.Array, result: Ref, target: Ref, plan: _Plan) -> None:
    """Writes values [L, C] by way of shared memory, some latent dims at once."""
    width = result.shape[1]
    for start in range(0, plan.latent, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        result.T[...] = values[start : start + width].astype(result.dtype)
        plgpu.commit_smem()
        panel = target.at[:, pl.ds(start, width)]
        plgpu.copy_smem_to_gmem(result.at[pl.ds(0, plan.stride)], panel)
    plgpu.wait_smem_to_gmem(0)


def _fetch_queries(
    source: Ref, tile: Ref, raw: Ref | None, barrier: Ref, start: jax.Array, plan: _Plan
) -> None:
    """Starts the copies of a block's latent or rotary queries, to `raw` where there is one."""
    rows = source.at[pl.ds(start, plan.columns)]
    if raw is None:
        plgpu.copy_gmem_to_smem(rows, tile, barrier)
        return
    for i in range(raw.shape[0]):
        panel = rows.at[:, pl.ds(i * raw.shape[2], raw.shape[2])]
        plgpu.copy_gmem_to_smem(panel, raw.at[i], barrier)


def _arrange_queries(tile: Ref, raw: Ref) -> None:
    """Moves queries to where a product reads them."""
    for i in range(raw.shape[0]):
        panel = tile.at[:, pl.ds(i * raw.shape[2], raw.shape[2])]
        panel.T[...] = plgpu.load(raw.at[i].T, layout=SCORES, optimized=False)


def _fetch(
    pool: Ref, tiles: tuple[Ref, Ref], barrier: Ref, starts: list[jax.Array], plan: _Plan
) -> None:
    """Starts the copies of one tile: latents to its first part, rotary keys to its second.

    `starts`: the pool's row at which each page begins.
    """
    size, column = plan.page_size, 0
    for tile in tiles:
        dims = tile.shape[1]
        for i, start in enumerate(starts):
            source = pool.at[pl.ds(start, size), pl.ds(column, dims)]
            plgpu.copy_gmem_to_smem(source, tile.at[pl.ds(i * size, size)], barrier)
        column += dims


def _attend_tile(
    partial: Partial,
    entries: tuple[Ref, Ref],
    queries: tuple[Ref, Ref],
    weights: Ref,
    start: jax.Array,
    column_at: jax.Array,
    plan: _Plan,
) -> Partial:
    """Adds the 64 tokens from `start` on; a running softmax in powers of two."""
    values, high, total = partial

    def score(out: Ref) -> jax.Array:
        for tile, query_tile in zip(entries, queries, strict=True):
            plgpu.wgmma(out, tile, query_tile.T)
        return out[...]

    scores = _accumulated(score, (TILE, plan.columns)) * (plan.scale * math.log2(math.e))
    key_at = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=SCORES) + start
    query_at = column_at if plan.queries == 1 else per_column(column_at, scores)
    scores = jnp.where(key_at <= query_at, scores, -jnp.inf)
    new_high, kept, probabilities = weigh(high, scores, weights)
    return (
        _add_product(values * per_column(kept, values), entries[0].T, weights.T),
        new_high,
        total * per_column(kept, total) + probabilities,
    )


def _add_product(values: jax.Array, left: Ref, right: Ref) -> jax.Array:
    """values [L, C] plus left [L, 64] times right [64, C], both in shared memory."""

    def add(out: Ref) -> None:
        plgpu.wgmma(out, left, right)

    def multiply(out: Ref) -> jax.Array:
        plgpu.wgmma(out, left, right)
        return out[...]

    if not _SUMS_IN_PLACE:
        return values + _accumulated(multiply, values.shape)
    initial: Any = plgpu.ACC.init(values)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_state(add)(initial)


def _accumulated(multiply: Callable[[Ref], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """What `multiply` reads of a new accumulator of float32."""
    height, width = shape
    # Public, though listed in a way that type checkers do not see.
    out = plgpu.ACC((height, width), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, out)
