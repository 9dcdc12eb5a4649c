"""Paged decode attention on Hopper: a warpgroup per row, kv head and split streams pages by TMA.

Operands are swapped: tokens and head dims lie on the 64-wide side of a product, a kv head's
queries are its 8 or more columns. So a tile of 64 tokens costs two short products, and one page's
keys and values, adjacent in the pool, come in one copy.
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

from kernels.linear import few_tokens, one_token
from kernels.mosaic import (
    SWIZZLED,
    Ref,
    decline_past_32_bits,
    decline_unless_covered,
    div_rem,
    round_up,
    soft_capped,
)
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

_MIN_BLOCKS = 128
"""Fewer blocks than this leave multiprocessors idle, so rows are split."""
_MAX_SPLITS = 16
_MOST_BLOCKS = 8 * _MIN_BLOCKS
"""More blocks than this are tried only where rows are not split."""
_COPIED = 4
"""Float32 numbers of the smallest copy."""
_PREFETCHED_MB = (8, 16, 24)
"""About what memory gives while one row is attended to; never more than half the H200's cache."""
_PAGE_SIZES = (8, 16, 32, 64)
_MAX_QUERIES = 8


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static of one kernel."""

    rows: int
    queries: int
    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    width: int
    """Pages of a row of the page table."""
    scale: float
    window: int | None
    soft_cap: float | None = None
    chosen_splits: int | None = None
    """None: by formula."""
    product: few_tokens.Plan | None = None
    """Of the product that comes next, where its weights are prefetched."""
    prefetch: int = 0
    """MB of them."""

    @property
    def columns(self) -> int:
        """Queries of one block, those of all heads of the group; what does not fit is cut."""
        # The accumulators of more columns would not stay in registers.
        most = 16 if self.head_dim == 256 else 32
        return min(round_up(self.queries * self.group, 8), most)

    @property
    def cuts(self) -> int:
        """Blocks that share a row's kv head, each with its columns."""
        return -(-self.queries * self.group // self.columns)

    @property
    def stride(self) -> int:
        """Query rows from one block to the next. Of single queries no row is added between."""
        return self.group if self.queries == 1 else self.columns

    @property
    def is_dense(self) -> bool:
        """Whether weights of splits are copied as densely as the values they belong to."""
        return self.stride % _COPIED == 0

    @property
    def stages(self) -> int:
        """Tiles on their way at once; of 128-wide heads two blocks then share a multiprocessor."""
        return 2 if self.head_dim * self.columns > 2048 else 3

    @property
    def pages_per_tile(self) -> int:
        return TILE // self.page_size

    @property
    def blocks(self) -> int:
        """Blocks of one split."""
        return self.rows * self.num_kv_heads * self.cuts

    @property
    def tiles(self) -> int:
        """Of a full row."""
        return -(-self.width // self.pages_per_tile)

    @property
    def splits(self) -> int:
        """Power of two that gives enough blocks; never more than tiles."""
        if self.chosen_splits is not None:
            return self.chosen_splits
        # Merging 16 takes a second kernel (3.0 against 1.5 us), which a long row pays back. H200,
        # 2026-11-29.
        most = min(_MAX_SPLITS if self.tiles >= 128 else 8, self.tiles)
        splits = 1
        while splits * 2 <= most and splits * self.blocks < _MIN_BLOCKS:
            splits *= 2
        return splits


def decode(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    kernels: str,
    block_pages: int,
    block_bytes: int,
    soft_cap: float | None = None,
    splits: int | None = None,
) -> jax.Array:
    """Attends rows of equal query length to their pages; see `reference.decode`.

    Blocks of `splits` share a row's tiles; None: as many as keep the device busy, by formula.

    The pool must be finite in every page that the table names. A NaN in a query reaches the output
    of that query's head alone.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    del block_pages, block_bytes  # the kernel gathers nothing
    look = {"scale": scale, "window": window, "soft_cap": soft_cap, "chosen_splits": splits}
    plan = _planned(q, pool, page_table, kernels, look)
    out = _called(q, pool, page_table, positions, kv_lens, plan=plan)
    whole = out[0] if plan.splits == 1 else _merged(out[0], out[1], plan)
    return whole.reshape(q.shape) if plan.queries == 1 else _ungrouped(whole, plan)


def times(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    weight: jax.Array,
    *,
    scale: float,
    window: int | None,
    kernels: str,
    block_pages: int,
    block_bytes: int,
    soft_cap: float | None = None,
    prefetch: int = 0,
    **way: Any,
) -> jax.Array:
    """Attends one query, whose splits are merged where they are multiplied; see `api.apart`.

    `prefetch`: MB of the weight, at most, that go to the second-level cache while pages are
    attended to. `way`: how to multiply, see `one_token.merging`.

    Raises:
      NotImplementedError: the call is outside what the kernels cover.
    """
    del block_pages, block_bytes
    look = {"scale": scale, "window": window, "soft_cap": soft_cap}
    plan = _planned(q, pool, page_table, kernels, look)
    if plan.rows * plan.queries > 1:
        raise NotImplementedError(f"{plan.rows} rows of {plan.queries} queries, not one query")
    if plan.splits == 1:
        raise NotImplementedError("the row is not split, so there is nothing to merge")
    if not plan.is_dense:
        raise NotImplementedError(
            f"{plan.group} queries share a kv head, not a multiple of {_COPIED}"
        )
    num_heads = plan.num_kv_heads * plan.group
    product = one_token.merging(num_heads, plan.head_dim, weight, kernels=kernels, **way)
    weights = ()
    if prefetch:
        plan, weights = dataclasses.replace(plan, product=product, prefetch=prefetch), (weight,)
    values, logs = _called(q, pool, page_table, positions, kv_lens, *weights, plan=plan)
    return one_token.merged(
        values.reshape(plan.splits, -1, plan.head_dim),
        logs.reshape(plan.splits, -1),
        weight,
        product,
    )


def _planned(
    q: jax.Array, pool: jax.Array, page_table: jax.Array, kernels: str, look: dict[str, Any]
) -> _Plan:
    _decline(q, pool, kernels)
    rows, queries, num_heads, head_dim = q.shape
    num_kv_heads, page_size = pool.shape[1], pool.shape[3]
    return _Plan(
        rows=rows,
        queries=queries,
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        width=page_table.shape[1],
        **look,
    )


def _called(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    *weights: jax.Array,
    plan: _Plan,
) -> list[jax.Array]:
    """What `_attend` gives."""
    head_dim = plan.head_dim
    flat = q.reshape(-1, head_dim) if plan.queries == 1 else _grouped(q, plan)
    if flat.shape[0] < plan.columns:
        # A copy may start near the array's end and reads zeros past it, but is not taller than it.
        flat = jnp.pad(flat, ((0, plan.columns - flat.shape[0]), (0, 0)))
    # XLA hands a slice of a larger array to a kernel as it lies there, and one that does not start
    # at a multiple of 16 bytes is refused at run time. So small arrays are made anew, once a step:
    # the layers share them.
    page_halves = page_table * (2 * plan.num_kv_heads)
    lengths = jnp.concatenate([kv_lens[:, None], positions], axis=1)
    return _attend(flat, pool.reshape(-1, head_dim), page_halves, lengths, *weights, plan=plan)


def shape_of(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    *_: jax.Array,
    window: int | None,
    **__: object,
) -> Shape:
    """What a call is tuned by; a window of 0 is none."""
    return {
        "rows": rung(q.shape[0]),
        "queries": q.shape[1],
        "num_kv_heads": pool.shape[1],
        "group": q.shape[2] // pool.shape[1],
        "head_dim": q.shape[3],
        "page_size": pool.shape[3],
        "pages": page_table.shape[1],
        "window": window or 0,
    }


def candidates(shape: Shape) -> tuple[Choice, ...]:
    """Numbers of splits, the formula's first."""
    sizes: dict[str, Any] = {
        name: size for name, size in shape.items() if name not in ("pages", "window")
    }
    plan = _Plan(**sizes, width=shape["pages"], scale=1.0, window=shape["window"] or None)
    powers = [1 << i for i in range(_MAX_SPLITS.bit_length())]
    tried = [n for n in powers if n <= plan.tiles and (n == 1 or n * plan.blocks <= _MOST_BLOCKS)]
    return tuple(Choice.of("mosaic", splits=n) for n in dict.fromkeys([plan.splits, *tried]))


def times_shape_of(*arrays: jax.Array, window: int | None, **_: object) -> Shape:
    """What attention and its product are tuned by."""
    *rows, weight = arrays
    return {**shape_of(*rows, window=window), "outputs": weight.shape[1]}


def times_candidates(shape: Shape) -> tuple[Choice, ...]:
    """Both ways to multiply one query's attention, and depths; at the first one, prefetched MB."""
    if shape["rows"] * shape["queries"] > 1:
        return ()
    depths = [n for n in few_tokens.depths("parts", 1) if n <= shape["head_dim"]]
    weights = shape["num_kv_heads"] * shape["group"] * shape["head_dim"] * shape["outputs"]
    prefetched = [
        Choice.of(form, depth=depths[0], prefetch=n)
        for form in ("prefetched", "registers_prefetched")
        for n in _PREFETCHED_MB
        if n * 2**20 <= 2 * weights
    ]
    return (*one_token.choices(depths), *prefetched)


def _decline(q: jax.Array, pool: jax.Array, kernels: str) -> None:
    queries, num_heads = q.shape[1:3]
    decline_unless_covered(
        "queries are",
        q,
        pool,
        group=num_heads // pool.shape[1],
        page_sizes=_PAGE_SIZES,
        kernels=kernels,
    )
    if queries > _MAX_QUERIES:
        raise NotImplementedError(f"a row has {queries} queries, at most {_MAX_QUERIES} may be")
    decline_past_32_bits(pool)


def _grouped(q: jax.Array, plan: _Plan) -> jax.Array:
    """[R, Q, N, H] -> a block's columns together, [R * K * cuts * C, H]."""
    shape = (plan.rows, plan.queries, plan.num_kv_heads, plan.group, plan.head_dim)
    q = q.reshape(shape).swapaxes(1, 2)
    q = q.reshape(plan.rows, plan.num_kv_heads, plan.queries * plan.group, plan.head_dim)
    spare = plan.cuts * plan.columns - plan.queries * plan.group
    return jnp.pad(q, ((0, 0), (0, 0), (0, spare), (0, 0))).reshape(-1, plan.head_dim)


def _ungrouped(out: jax.Array, plan: _Plan) -> jax.Array:
    """Undoes `_grouped`."""
    out = out.reshape(plan.rows, plan.num_kv_heads, -1, plan.head_dim)
    out = out[:, :, : plan.queries * plan.group]
    out = out.reshape(plan.rows, plan.num_kv_heads, plan.queries, plan.group, plan.head_dim)
    return out.swapaxes(1, 2).reshape(plan.rows, plan.queries, -1, plan.head_dim)


def _attend(
    q: jax.Array,
    pool: jax.Array,
    page_halves: jax.Array,
    lengths: jax.Array,
    *weights: jax.Array,
    plan: _Plan,
) -> list[jax.Array]:
    """q [blocks * stride, H] against pool [P * K * 2 * page_size, H] -> [blocks * stride, H].

    Of several splits f32[S * blocks * stride, H], normalised, and log2 of the weights that they are
    merged with, where that `is_dense` one a row of it, else [S * blocks, C]. `lengths`
    i32[R, 1 + Q]: keys of a row, then the positions of its queries. `weights`: what is prefetched.
    """
    columns, head_dim, splits = plan.columns, plan.head_dim, plan.splits
    is_whole = splits == 1
    out_rows = plan.blocks * plan.stride
    out_dtype = jnp.dtype(jnp.bfloat16 if is_whole else jnp.float32)
    out_types = [jax.ShapeDtypeStruct((splits * out_rows, head_dim), out_dtype)]
    logs = {}
    if not is_whole:
        shape = (splits * out_rows,) if plan.is_dense else (splits * plan.blocks, columns)
        out_types.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        if plan.is_dense:
            logs["logs"] = plgpu.SMEM((columns,), jnp.float32)
    arrivals = 1 if plan.pages_per_tile == 1 else 2 * plan.pages_per_tile
    kernel = plgpu.kernel(
        functools.partial(_prefetching_kernel if plan.prefetch else _kernel, plan=plan),
        out_type=out_types,
        kernel_name="paged_decode",
        # The last axis runs fastest: the heads of one row, whose pages lie side by side.
        grid=(splits, plan.rows, plan.num_kv_heads * plan.cuts),
        grid_names=("split", "row", "head"),
        scratch_types=dict(
            q_raw=plgpu.SMEM((columns, head_dim), jnp.bfloat16),
            q_tile=plgpu.SMEM((columns, head_dim), jnp.bfloat16, transforms=SWIZZLED),
            kv_ring=plgpu.SMEM(
                (plan.stages, 2 * TILE, head_dim), jnp.bfloat16, transforms=SWIZZLED
            ),
            weights=plgpu.SMEM((columns, TILE), jnp.bfloat16, transforms=SWIZZLED),
            result=plgpu.SMEM((columns, head_dim), out_dtype),
            q_here=plgpu.Barrier(),
            kv_here=plgpu.Barrier(num_barriers=plan.stages, num_arrivals=arrivals),
            **logs,
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )
    return kernel(q, pool, page_halves, lengths, *weights)


def _merged(values: jax.Array, logs: jax.Array, plan: _Plan) -> jax.Array:
    """Merges the splits that `_attend` gives."""
    values = values.reshape(plan.splits, -1, plan.head_dim)
    highs = logs.reshape(plan.splits, plan.blocks, -1)[:, :, : plan.stride]
    highs = highs.reshape(plan.splits, -1)
    # Unrolled, so that XLA makes one fusion of it.
    high = functools.reduce(jnp.maximum, [highs[i] for i in range(plan.splits)])
    shares = [jnp.exp2(highs[i] - high) for i in range(plan.splits)]
    total = functools.reduce(jnp.add, shares)
    out = functools.reduce(jnp.add, [values[i] * x[..., None] for i, x in enumerate(shares)])
    return (out / total[..., None]).reshape(-1, plan.head_dim).astype(jnp.bfloat16)


def _kernel(
    q: Ref,
    pool: Ref,
    page_halves: Ref,
    lengths: Ref,
    out: Ref,
    *split_logs: Ref,
    q_raw: Ref,
    q_tile: Ref,
    kv_ring: Ref,
    weights: Ref,
    result: Ref,
    q_here: Ref,
    kv_here: Ref,
    logs: Ref | None = None,
    plan: _Plan,
    meanwhile: Callable[[jax.Array], None] | None = None,
) -> None:
    """One block: the tiles `split`, `split + splits`, ... of a row, for one kv head's columns.

    `meanwhile` is told the block's number as soon as its first pages are on their way.
    """
    split, row, cut_head = (jax.lax.axis_index(name) for name in ("split", "row", "head"))
    head, cut = div_rem(cut_head, plan.cuts)
    block = row * (plan.num_kv_heads * plan.cuts) + cut_head
    kv_len = lengths[row, 0]
    query_at = [lengths[row, 1 + i] for i in range(plan.queries)]
    start = split + _first_tile(query_at, plan)
    end, _ = div_rem(kv_len + (TILE - 1), TILE)
    num_tiles, _ = div_rem(end - start + (plan.splits - 1), plan.splits)

    def tile_at(i: jax.Array | int) -> jax.Array:
        return start + i * plan.splits

    def pages_of(i: jax.Array | int) -> list[jax.Array]:
        first = tile_at(i) * plan.pages_per_tile
        places = [first + page for page in range(plan.pages_per_tile)]
        return [page_halves[row, jnp.minimum(place, plan.width - 1)] for place in places]

    def fetch(slot: jax.Array | int, pages: list[jax.Array]) -> None:
        _fetch(pool, kv_ring.at[slot], kv_here.at[slot], pages, head, plan)

    # Pages do not wait for the length: both loads are under way at once.
    first_pages = [pages_of(stage) for stage in range(plan.stages)]
    plgpu.copy_gmem_to_smem(q.at[pl.ds(block * plan.stride, plan.columns)], q_raw, q_here)
    for stage, pages in enumerate(first_pages):
        pl.when(stage < num_tiles)(functools.partial(fetch, stage, pages))
    if meanwhile is not None:
        meanwhile(split * plan.blocks + block)
    plgpu.barrier_wait(q_here)
    # A swizzled copy could start at multiples of 8 rows only, a group starts anywhere.
    q_tile.T[...] = plgpu.load(q_raw.T, layout=SCORES, optimized=False)
    plgpu.commit_smem()
    column_at = column_positions(query_at, cut, plan.columns, plan.group)

    def step(i: jax.Array, partial: Partial) -> Partial:
        slot = jax.lax.rem(i, jnp.int32(plan.stages))
        next_pages = pages_of(i + plan.stages)  # asked for early, used late
        plgpu.barrier_wait(kv_here.at[slot])
        partial = _attend_tile(
            partial, kv_ring.at[slot], q_tile, weights, tile_at(i) * TILE, column_at, plan
        )
        pl.when(i + plan.stages < num_tiles)(lambda: fetch(slot, next_pages))
        return partial

    values, high, total = jax.lax.fori_loop(
        0, num_tiles, step, nothing(plan.head_dim, plan.columns)
    )
    total = total.sum(axis=0)
    # Only columns that saw no key have a total of 0; a NaN must stay one.
    divisor = jnp.where(total == 0, 1.0, total)
    values = values / per_column(divisor, values)
    where = split * plan.blocks + block
    if split_logs:
        log = high + jnp.log2(divisor)
        if logs is None:
            split_logs[0][where] = log
        else:
            logs[...] = log
        values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    result.T[...] = values.astype(result.dtype)
    plgpu.commit_smem()
    filled, places = pl.ds(0, plan.stride), pl.ds(where * plan.stride, plan.stride)
    plgpu.copy_smem_to_gmem(result.at[filled], out.at[places])
    if logs is not None:
        plgpu.copy_smem_to_gmem(logs.at[filled], split_logs[0].at[places])
    plgpu.wait_smem_to_gmem(0)


def _prefetching_kernel(
    q: Ref,
    pool: Ref,
    page_halves: Ref,
    lengths: Ref,
    weight: Ref,
    *rest: Ref,
    plan: _Plan,
    **scratch: Ref,
) -> None:
    """The same, which leaves the memory nearly idle: each block prefetches as many weights."""
    assert plan.product is not None
    meanwhile = functools.partial(
        few_tokens.prefetch, weight, plan.product, plan.prefetch, plan.splits * plan.blocks
    )
    _kernel(q, pool, page_halves, lengths, *rest, plan=plan, meanwhile=meanwhile, **scratch)


def _first_tile(query_at: list[jax.Array], plan: _Plan) -> jax.Array | int:
    """The first tile that the window of some query reaches."""
    if plan.window is None:
        return 0
    lowest = functools.reduce(jnp.minimum, query_at) - (plan.window - 1)
    return div_rem(jnp.maximum(lowest, 0), TILE)[0]


def _fetch(
    pool: Ref, tile: Ref, barrier: Ref, page_halves: list[jax.Array], head: jax.Array, plan: _Plan
) -> None:
    """Starts the copies of one tile: keys to its first half, values to its second.

    A page is a keys half and a values half per kv head; `page_halves` are the first ones' numbers.
    """
    size = plan.page_size
    for i, page_half in enumerate(page_halves):
        start = (page_half + 2 * head) * size
        if size == TILE:
            plgpu.copy_gmem_to_smem(pool.at[pl.ds(start, 2 * size)], tile, barrier)
            continue
        for half in range(2):
            source = pool.at[pl.ds(start + half * size, size)]
            target = tile.at[pl.ds(half * TILE + i * size, size)]
            plgpu.copy_gmem_to_smem(source, target, barrier)


def _attend_tile(
    partial: Partial,
    kv: Ref,
    q_tile: Ref,
    weights: Ref,
    start: jax.Array,
    column_at: jax.Array,
    plan: _Plan,
) -> Partial:
    """Adds the 64 tokens from `start` on; a running softmax in powers of two."""
    values, high, total = partial
    scores = _product(kv.at[pl.ds(0, TILE)], q_tile.T)
    if plan.soft_cap is None:
        scores = scores * (plan.scale * math.log2(math.e))
    else:
        scores = soft_capped(scores, plan.scale, plan.soft_cap) * math.log2(math.e)
    key_at = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=SCORES) + start
    query_at = column_at if plan.queries == 1 else per_column(column_at, scores)
    is_visible = key_at <= query_at
    if plan.window is not None:
        is_visible = jnp.logical_and(is_visible, key_at > query_at - plan.window)
    scores = jnp.where(is_visible, scores, -jnp.inf)
    new_high, kept, probabilities = weigh(high, scores, weights)
    added = _product(kv.at[pl.ds(TILE, TILE)].T, weights.T)
    return (
        values * per_column(kept, values) + added,
        new_high,
        total * per_column(kept, total) + probabilities,
    )


def _product(left: Ref, right: Ref) -> jax.Array:
    """[M, X] times [X, C], both in shared memory -> f32 [M, C]."""

    def multiply(out: Ref) -> jax.Array:
        plgpu.wgmma(out, left, right)
        return out[...]

    shape = (left.shape[0], right.shape[1])
    # Public, though listed in a way that type checkers do not see.
    out = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, out)
