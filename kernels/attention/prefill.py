"""Paged prefill attention on Hopper: two warpgroups attend 64 queries each, a third streams pages.

A tile is a run of tokens of one chunk, for one kv head. A warpgroup takes 64 of its tokens for one
query head of the group; of an even group both take the same tokens and different heads, so that
both see the same keys. While one warpgroup exponentiates, the other multiplies. As many blocks as
run at once share out the tiles, so that pages of a next one arrive while the last is written.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import query_tiles
from kernels.mosaic import (
    SWIZZLED,
    Ref,
    decline_past_32_bits,
    decline_unless_covered,
    div_rem,
    round_up,
    soft_capped,
)
from kernels.query_tiles import CONSUMERS, ROWS, SLAB, Partial, Tile

_PANEL = 64
"""Head dims of one copy of a tile that is not written whole."""
_MULTIPROCESSORS = 132
"""Of an H100 or H200: on a device with fewer, some blocks wait for others to end."""
_PAGE_SIZES = (16, 32, 64)
_WEIGHTS_IN_REGISTERS = True
"""False only where the kernel is interpreted, which knows no product of registers."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static of one kernel."""

    num_tokens: int
    rows: int
    max_chunk_rows: int
    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    width: int
    """Pages of a row of the page table."""
    scale: float
    window: int | None
    soft_cap: float | None = None

    @property
    def heads_at_once(self) -> int:
        """Query heads of one unit: its warpgroups take a head each, or else half of the tokens."""
        return CONSUMERS if self.group % CONSUMERS == 0 and not self.is_wide else 1

    @property
    def tile_tokens(self) -> int:
        return ROWS * CONSUMERS // self.heads_at_once

    @property
    def cuts(self) -> int:
        """Units that share a tile's kv head, each with its query heads."""
        return self.group // self.heads_at_once

    @property
    def units_per_tile(self) -> int:
        return self.num_kv_heads * self.cuts

    @property
    def num_blocks(self) -> int:
        """Blocks of threads: no more than run at once, for each goes on to a next unit."""
        return min(_MULTIPROCESSORS, self.num_tiles * self.units_per_tile)

    @property
    def num_tiles(self) -> int:
        """Most tiles that T tokens can be cut into; those of no chunk count as two more rows."""
        rows = min(self.max_chunk_rows, self.rows) + 2
        most = self.num_tokens + rows * (self.tile_tokens - 1 + SLAB - 1)
        return most // self.tile_tokens

    @property
    def keys_at_once(self) -> int:
        return query_tiles.keys_at_once(self.head_dim)

    @property
    def is_wide(self) -> bool:
        """See `query_tiles`. Every output is then written row by row."""
        return query_tiles.is_wide(self.head_dim)

    @property
    def masks_every_step(self) -> bool:
        return self.window is not None or self.is_wide

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that multiplies and of one that fetches: three warpgroups share 65536."""
        return (240, 24) if self.is_wide and self.page_size == 64 else (232, 40)

    @property
    def pages_at_once(self) -> int:
        return self.keys_at_once // self.page_size

    @property
    def stages(self) -> int:
        """Blocks of keys, and of values, on their way at once: 128 KB."""
        return 4 if self.head_dim == 64 else 2


_COLUMNS = len(dataclasses.fields(Tile))


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A tile for one kv head's `heads_at_once` query heads, and the blocks of keys it sees."""

    tile: Tile
    head: jax.Array
    """The kv head."""
    query_head: jax.Array
    """The first one."""
    first: jax.Array | int
    num_full: jax.Array | int
    """Leading blocks that every query sees whole."""
    num_steps: jax.Array


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Shared memory and barriers of one block."""

    q_tile: Ref
    """[2, 64, H]."""
    keys: Ref
    """[stages, keys_at_once, H]."""
    values: Ref
    ragged: Ref
    """[2, 64, 64], columns of a result on their way out: not swizzled, so that any row may go."""
    q_here: Ref
    q_free: Ref
    keys_here: Ref
    values_here: Ref
    keys_free: Ref
    values_free: Ref
    turn: Ref
    """Which of the two warpgroups multiplies."""
    whole: Ref | None = None
    """[2, 64, H], a result of which every row goes out."""
    weights: Ref | None = None
    """[2, 64, keys_at_once], where weights do not stay in registers."""


def prefill(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decode: jax.Array,
    *,
    scale: float,
    window: int | None,
    kernels: str,
    block_pages: int,
    block_bytes: int,
    tile_tokens: int,
    tiles_at_once: int,
    max_chunk_rows: int,
    soft_cap: float | None = None,
) -> jax.Array:
    """Attends the chunks of a flat token batch to their pages; see `reference.prefill`.

    Positions of a chunk's tokens follow one another. The pool must be finite in every page that the
    table names. A NaN in a query reaches the output of that token's head alone.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    del block_pages, block_bytes, tile_tokens, tiles_at_once  # of the plain form
    _decline(q, pool, kernels)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = pool.shape[1], pool.shape[3]
    # A copy may start near the array's end and reads zeros past it, but is not taller than it.
    padded = max(round_up(num_tokens, SLAB), ROWS)
    plan = _Plan(
        num_tokens=padded,
        rows=kv_lens.shape[0],
        max_chunk_rows=max_chunk_rows,
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        width=page_table.shape[1],
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    if padded > num_tokens:
        q = jnp.pad(q, ((0, padded - num_tokens), (0, 0), (0, 0)))
    work = _work_list(positions, kv_lens, cu_q_lens, num_decode, plan)
    # A slice of a larger array is refused where it starts at no multiple of 16 bytes; the product
    # is an array of its own, made once a step and shared by the layers.
    page_halves = page_table * (2 * num_kv_heads)
    out = _attend(q, pool.reshape(-1, head_dim), page_halves, work, plan)
    return out[:num_tokens]


def _decline(q: jax.Array, pool: jax.Array, kernels: str) -> None:
    decline_unless_covered(
        "queries are",
        q,
        pool,
        group=q.shape[1] // pool.shape[1],
        page_sizes=_PAGE_SIZES,
        kernels=kernels,
    )
    decline_past_32_bits(pool)


def _work_list(
    positions: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decode: jax.Array,
    plan: _Plan,
) -> tuple[jax.Array, jax.Array]:
    """Cuts the flat tokens into tiles of one row each.

    Tokens of no chunk make tiles too, without keys: their zeros are written like any output. Tiles
    with most keys come first, so that no long one is left for the end.

    Returns:
      i32[num_tiles, fields of `Tile`], and how many of them are used, i32[1].
    """
    row = jnp.arange(plan.rows, dtype=jnp.int32)
    chunk_ends = jnp.where(row >= num_decode, cu_q_lens[1:], cu_q_lens[:-1])
    # Two rows more: the decode rows' tokens, and the padding.
    starts = jnp.concatenate([cu_q_lens[:-1], jnp.zeros((1,), jnp.int32), cu_q_lens[-1:]])
    ends = jnp.concatenate(
        [chunk_ends, cu_q_lens[num_decode][None], jnp.full((1,), plan.num_tokens, jnp.int32)]
    )
    lens = jnp.pad(kv_lens, (0, 2))
    cut = query_tiles.cut(starts, ends, positions, plan.tile_tokens, plan.num_tiles)
    num_keys = jnp.where((lens[cut.row] > 0) & cut.is_used, cut.position + cut.end, 0)
    in_table = jnp.minimum(cut.row, plan.rows - 1)
    columns = (in_table, cut.token // SLAB, cut.begin, cut.end, cut.position, num_keys)
    seen = num_keys
    if plan.window is not None:
        seen = jnp.minimum(seen, cut.end - cut.begin + plan.window)
    is_before = query_tiles.is_longer(jnp.where(cut.is_used, seen, -1))
    return query_tiles.in_order(jnp.stack(columns, axis=1), is_before), cut.counts.sum(
        keepdims=True
    )


def _attend(
    q: jax.Array,
    pool: jax.Array,
    page_halves: jax.Array,
    work: tuple[jax.Array, jax.Array],
    plan: _Plan,
) -> jax.Array:
    """q [T, N, H] against pool [P * K * 2 * page_size, H] -> [T, N, H]."""
    head_dim, keys, stages = plan.head_dim, plan.keys_at_once, plan.stages

    def swizzled(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    scratch = dict(
        q_tile=swizzled(CONSUMERS, ROWS, head_dim),
        keys=swizzled(stages, keys, head_dim),
        values=swizzled(stages, keys, head_dim),
        ragged=plgpu.SMEM((CONSUMERS, ROWS, _PANEL), jnp.bfloat16),
        q_here=plgpu.Barrier(num_barriers=CONSUMERS),
        q_free=plgpu.Barrier(num_barriers=CONSUMERS),
        keys_here=plgpu.Barrier(num_barriers=stages, num_arrivals=plan.pages_at_once),
        values_here=plgpu.Barrier(num_barriers=stages, num_arrivals=plan.pages_at_once),
        keys_free=plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS),
        values_free=plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS),
        turn=plgpu.Barrier(num_arrivals=CONSUMERS),
    )
    if not plan.is_wide:
        scratch["whole"] = swizzled(CONSUMERS, ROWS, head_dim)
    if not _WEIGHTS_IN_REGISTERS:
        scratch["weights"] = swizzled(CONSUMERS, ROWS, keys)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        kernel_name="paged_prefill",
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )
    return kernel(q, pool, page_halves, *work)


def _kernel(
    q: Ref,
    pool: Ref,
    page_halves: Ref,
    tiles: Ref,
    num_used: Ref,
    out: Ref,
    *,
    plan: _Plan,
    **scratch: Ref,
) -> None:
    """One block: its share of the units, each a tile for `heads_at_once` heads of one kv head."""
    memory = _Memory(**scratch)
    warpgroup = jax.lax.axis_index("warpgroup")
    num_units = num_used[0] * plan.units_per_tile
    share = query_tiles.share(num_units, jax.lax.axis_index("block"), plan.num_blocks)

    def unit_at(i: jax.Array) -> _Unit:
        return _unit(tiles, share.unit_at(i), plan)

    @pl.when(warpgroup < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(plan.registers[0], action="increase")
        pl.when(warpgroup == 1)(lambda: query_tiles.take_turn(memory.turn))

        def consume(i: jax.Array, filled: jax.Array) -> jax.Array:
            return _consume(out, memory, unit_at(i), filled, warpgroup, plan)

        jax.lax.fori_loop(0, share.count, consume, jnp.int32(0))
        pl.when(warpgroup == 0)(lambda: query_tiles.take_turn(memory.turn))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(plan.registers[1], action="decrease")

        def produce(i: jax.Array, filled: jax.Array) -> jax.Array:
            unit = unit_at(i)
            _fetch_queries(q, memory, unit, i > 0, plan)
            return _fetch_blocks(pool, page_halves, memory, unit, filled, plan)

        filled = jax.lax.fori_loop(0, share.count, produce, jnp.int32(0))
        # What is freed is waited for, also when nothing takes its place.
        for warpgroup_at in range(CONSUMERS):
            free = memory.q_free.at[warpgroup_at]
            pl.when(share.count > 0)(functools.partial(plgpu.barrier_wait, free))
        for i in range(plan.stages):
            for free in (memory.keys_free, memory.values_free):
                _await_place(free, filled + i, plan)


def _unit(tiles: Ref, index: jax.Array, plan: _Plan) -> _Unit:
    tile_at, cut_head = div_rem(index, plan.units_per_tile)
    head, cut = div_rem(cut_head, plan.cuts)
    tile = Tile(*(tiles[tile_at, column] for column in range(_COLUMNS)))
    query_head = head * plan.group + cut * plan.heads_at_once
    end, _ = div_rem(tile.num_keys + (plan.keys_at_once - 1), plan.keys_at_once)
    if plan.window is not None:
        lowest = jnp.maximum(tile.position + tile.begin - (plan.window - 1), 0)
        first, _ = div_rem(lowest, plan.keys_at_once)
        return _Unit(tile, head, query_head, first, 0, jnp.maximum(end - first, 0))
    if plan.masks_every_step:
        return _Unit(tile, head, query_head, 0, 0, end)
    num_full, _ = div_rem(tile.position + tile.begin + 1, plan.keys_at_once)
    return _Unit(tile, head, query_head, 0, jnp.minimum(num_full, end), end)


def _place(unit: _Unit, warpgroup: jax.Array | int, plan: _Plan) -> tuple[Any, Any, Any]:
    """A warpgroup's first eight tokens by number, tokens of the tile before them, query head."""
    if plan.heads_at_once == 1:
        skipped, query_head = warpgroup * (ROWS // SLAB), unit.query_head
    else:
        skipped, query_head = 0, unit.query_head + warpgroup
    return unit.tile.slab + skipped, skipped * SLAB, query_head


def _fetch_queries(
    q: Ref, memory: _Memory, unit: _Unit, has_predecessor: jax.Array, plan: _Plan
) -> None:
    """Fetches the queries of both warpgroups as soon as each is done with those it has."""
    for warpgroup in range(CONSUMERS):
        slab, _, query_head = _place(unit, warpgroup, plan)
        # Where all 64 tokens are past the array's end, any others will do: nothing is written.
        start = jnp.minimum(slab, plan.num_tokens // SLAB - 1) * SLAB
        free = memory.q_free.at[warpgroup]
        pl.when(has_predecessor)(functools.partial(plgpu.barrier_wait, free))
        plgpu.copy_gmem_to_smem(
            q.at[pl.ds(start, ROWS), query_head],
            memory.q_tile.at[warpgroup],
            memory.q_here.at[warpgroup],
        )


def _fetch_blocks(
    pool: Ref, page_halves: Ref, memory: _Memory, unit: _Unit, filled: jax.Array, plan: _Plan
) -> jax.Array:
    """Fetches keys and values as their places become free; returns how many were filled so far."""

    @pl.loop(0, unit.num_steps)
    def _(i: jax.Array) -> None:
        # Asked for before the wait; past the row's end any page of the table will do.
        first = (unit.first + i) * plan.pages_at_once
        places = [first + page for page in range(plan.pages_at_once)]
        pages = [page_halves[unit.tile.row, jnp.minimum(place, plan.width - 1)] for place in places]
        slot = _slot(filled + i, plan)
        for half, (ring, here, free) in enumerate(
            (
                (memory.keys, memory.keys_here, memory.keys_free),
                (memory.values, memory.values_here, memory.values_free),
            )
        ):
            _await_place(free, filled + i, plan)
            starts = [(page + 2 * unit.head + half) * plan.page_size for page in pages]
            _fetch(pool, ring.at[slot], here.at[slot], starts, plan)

    return filled + unit.num_steps


def _await_place(free: Ref, number: jax.Array, plan: _Plan) -> None:
    """Waits until the place of the block `number` is free; the first ones are from the start."""
    place = free.at[_slot(number, plan)]
    pl.when(number >= plan.stages)(functools.partial(plgpu.barrier_wait, place))


def _fetch(pool: Ref, block: Ref, barrier: Ref, starts: list[jax.Array], plan: _Plan) -> None:
    """Starts the copies of one block's keys or values, a page each."""
    size = plan.page_size
    for i, start in enumerate(starts):
        source = pool.at[pl.ds(start, size)]
        plgpu.copy_gmem_to_smem(source, block.at[pl.ds(i * size, size)], barrier)


def _consume(
    out: Ref, memory: _Memory, unit: _Unit, filled: jax.Array, warpgroup: jax.Array, plan: _Plan
) -> jax.Array:
    """Attends 64 queries of one head to every block of keys and writes their output.

    `filled` blocks came before those of this unit; returns it with them added.
    """
    slab, skipped, query_head = _place(unit, warpgroup, plan)
    q_tile = memory.q_tile.at[warpgroup]
    weights = None if memory.weights is None else memory.weights.at[warpgroup]
    plgpu.barrier_wait(memory.q_here.at[warpgroup])
    first_keys = memory.keys_here.at[_slot(filled, plan)]
    pl.when(unit.num_steps > 0)(lambda: plgpu.barrier_wait(first_keys))

    def step(i: jax.Array, partial: Partial, *, is_masked: bool) -> Partial:
        query_at = unit.tile.position + skipped if is_masked else None
        return _attend_block(partial, i, filled, q_tile, weights, memory, unit, query_at, plan)

    partial = query_tiles.nothing(plan.head_dim)
    if not plan.masks_every_step:
        seen = functools.partial(step, is_masked=False)
        partial = jax.lax.fori_loop(0, unit.num_full, seen, partial)
    cut = functools.partial(step, is_masked=True)
    partial = jax.lax.fori_loop(unit.num_full, unit.num_steps, cut, partial)
    plgpu.barrier_arrive(memory.q_free.at[warpgroup])
    plgpu.barrier_arrive(memory.turn)  # the other's, while this one writes

    result = query_tiles.normalized(partial)
    begin = jnp.clip(unit.tile.begin - skipped, 0, ROWS)
    end = jnp.clip(unit.tile.end - skipped, 0, ROWS)
    target = out.at[:, query_head]

    def write_rows() -> None:
        _write(result, memory.ragged.at[warpgroup], target, slab, plan, (begin, end))

    if memory.whole is None:
        write_rows()
    else:
        whole = memory.whole.at[warpgroup]
        is_whole = jnp.logical_and(begin == 0, end == ROWS)
        pl.when(is_whole)(lambda: _write(result, whole, target, slab, plan))
        pl.when(jnp.logical_not(is_whole))(write_rows)
    plgpu.barrier_wait(memory.turn)
    return filled + unit.num_steps


def _write(
    result: jax.Array,
    staged: Ref,
    target: Ref,
    slab: jax.Array,
    plan: _Plan,
    rows: tuple[jax.Array, jax.Array] | None = None,
) -> None:
    """Writes a warpgroup's result, or some rows of it, by way of shared memory."""
    width = staged.shape[1]
    for start in range(0, plan.head_dim, width):
        # What was written before may still be on its way out of there.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged[...] = result[:, start : start + width]
        plgpu.commit_smem()
        panel = target.at[:, pl.ds(start, width)]
        if rows is None:
            plgpu.copy_smem_to_gmem(staged, panel.at[pl.ds(slab * SLAB, ROWS)])
        else:
            query_tiles.write_rows(staged, panel, *rows, slab * SLAB)


def _attend_block(
    partial: Partial,
    i: jax.Array,
    filled: jax.Array,
    q_tile: Ref,
    weights_tile: Ref | None,
    memory: _Memory,
    unit: _Unit,
    query_at: jax.Array | None,
    plan: _Plan,
) -> Partial:
    """Adds the keys of one block.

    `query_at`: position of the first query, where some keys may be hidden from some queries.
    """
    slot = _slot(filled + i, plan)
    block = query_tiles.Block(
        score=lambda out: plgpu.wgmma(out, q_tile, memory.keys.at[slot].T),
        num_keys=plan.keys_at_once,
        values=memory.values.at[slot],
        keys_free=memory.keys_free.at[slot],
        values_here=memory.values_here.at[slot],
        values_free=memory.values_free.at[slot],
        turn=memory.turn,
        weights=weights_tile,
    )

    def visible(shape: tuple[int, int]) -> jax.Array:
        assert query_at is not None
        return _is_visible(shape, query_at, (unit.first + i) * plan.keys_at_once, plan)

    def wait_for_next_keys() -> None:
        here = memory.keys_here.at[_slot(filled + i + 1, plan)]
        pl.when(i + 1 < unit.num_steps)(lambda: plgpu.barrier_wait(here))

    def capped(scores: jax.Array) -> jax.Array:
        assert plan.soft_cap is not None
        return soft_capped(scores, plan.scale, plan.soft_cap)

    has_cap = plan.soft_cap is not None
    return query_tiles.attend_block(
        partial,
        block,
        (1.0 if has_cap else plan.scale) * math.log2(math.e),
        None if query_at is None else visible,
        wait_for_next_keys,
        capped if has_cap else None,
    )


def _is_visible(
    shape: tuple[int, int], query_at: jax.Array, start: jax.Array, plan: _Plan
) -> jax.Array:
    """bool[64, keys_at_once]: the key is no later than the query, and within its window."""
    query_at, key_at = query_tiles.places(shape, query_at, start)
    is_visible = key_at <= query_at
    if plan.window is not None:
        is_visible = jnp.logical_and(is_visible, key_at > query_at - plan.window)
    return is_visible


def _slot(i: jax.Array, plan: _Plan) -> jax.Array:
    return jax.lax.rem(i, jnp.int32(plan.stages))
