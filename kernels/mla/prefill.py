"""Latent prefill attention on Hopper: chunks' latents are expanded to heads, then attended.

One kernel expands the latents of chunk rows into a workspace, another attends to it: two warpgroups
take 64 queries of one head each, a third streams that head's keys and values from the workspace and
the rotary keys, which all heads share, from their pages. The workspace has a bound in bytes. Where
a step's rows may be more than it holds, they take turns in it, or a few heads at a time do; neither
changes a bit. A turn writes its own tokens and heads of the output, in place.
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
from kernels.mla import expand
from kernels.mosaic import SWIZZLED, Ref, div_rem, round_up
from kernels.query_tiles import CONSUMERS, ROWS, SLAB, Partial, Tile

_PANEL = 64
"""Value dims of one copy on its way out."""
_REGISTERS = (232, 40)
"""Of a thread that multiplies and of one that fetches: three warpgroups share 65536."""
_STAGES = 2
"""Blocks of keys, and of values, on their way at once."""
_MULTIPROCESSORS = 132
"""Of an H100 or H200: on a device with fewer, some blocks wait for others to end."""
_PAGE_SIZES = (16, 32, 64)
_ROPE_DIM = 64
_DIMS = ((128, 128), (192, 256))
"""Of a head's key without its rotary part, and of its value."""
_TILE_TOKENS = ROWS * CONSUMERS
_WEIGHTS_IN_REGISTERS = True
"""False only where the kernel is interpreted, which knows no product of registers."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static of one call."""

    num_tokens: int
    rows: int
    max_chunk_rows: int
    num_heads: int
    key_dim: int
    """Without the rotary part."""
    value_dim: int
    latent: int
    page_size: int
    width: int
    """Pages of a row of the page table."""
    scale: float
    workspace_bytes: int
    """Of expanded keys and values, at most."""

    @property
    def chunk_rows(self) -> int:
        return min(self.max_chunk_rows, self.rows)

    @property
    def row_blocks(self) -> int:
        """Blocks of 128 tokens that one row has, at most."""
        return -(-self.width * self.page_size // expand.TOKENS)

    @property
    def block_bytes(self) -> int:
        """Of one head's keys and values of a block."""
        return expand.TOKENS * (self.key_dim + self.value_dim) * 2

    @property
    def heads(self) -> int:
        """Heads that take a turn together: the most of which a whole row fits; 0 if none."""
        dims = (self.key_dim, self.value_dim)
        return next(
            (
                heads
                for heads in range(self.num_heads, 0, -1)
                if self.num_heads % heads == 0
                and all(expand.is_whole(heads, dim) for dim in dims)
                and heads * self.row_blocks * self.block_bytes <= self.workspace_bytes
            ),
            0,
        )

    @property
    def blocks(self) -> int:
        """Blocks of tokens that the workspace holds."""
        fitting = self.workspace_bytes // (self.heads * self.block_bytes)
        return min(fitting, self.chunk_rows * self.row_blocks)

    @property
    def is_one_turn(self) -> bool:
        """Whether all rows and heads fit, however long the rows are."""
        is_every_row = self.blocks == self.chunk_rows * self.row_blocks
        return is_every_row and self.heads == self.num_heads

    @property
    def num_tiles(self) -> int:
        """Most tiles that T tokens of chunks can be cut into."""
        most = self.num_tokens + self.chunk_rows * (_TILE_TOKENS - 1 + SLAB - 1)
        return most // _TILE_TOKENS

    @property
    def num_blocks(self) -> int:
        """Blocks of threads: no more than run at once, for each goes on to a next unit."""
        return min(_MULTIPROCESSORS, self.num_tiles * self.heads)

    @property
    def is_wide(self) -> bool:
        return query_tiles.is_wide(self.value_dim)

    @property
    def keys_at_once(self) -> int:
        return query_tiles.keys_at_once(self.value_dim)

    @property
    def pages_at_once(self) -> int:
        return self.keys_at_once // self.page_size

    @property
    def expansion(self) -> expand.Plan:
        return expand.Plan(
            heads=self.heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            latent=self.latent,
            page_size=self.page_size,
            width=self.width,
            blocks=self.blocks,
        )


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a step's turns do; turns lie one after the other in both lists."""

    tiles: jax.Array
    """i32[num_tiles, fields of `_Tile`], of a turn those with most keys first."""
    blocks: jax.Array
    """i32[blocks, 3], what is expanded; see `expand.expand`."""
    turns: jax.Array
    """i32[chunk_rows, 4]: of each turn its first tile, its tiles, its first block, its blocks."""
    num_turns: jax.Array
    """i32[]."""


@dataclasses.dataclass(frozen=True)
class _Tile(Tile):
    """The same with the place of its row's expanded keys."""

    base: jax.Array
    """Where in the workspace they begin, in blocks of 128."""


_COLUMNS = len(dataclasses.fields(_Tile))


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A tile for one head, and the blocks of keys it sees."""

    tile: _Tile
    head: jax.Array
    """Among those of the turn."""
    query_head: jax.Array
    num_full: jax.Array | int
    """Leading blocks that every query sees whole."""
    num_steps: jax.Array


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Shared memory and barriers of one block."""

    q_tile: Ref
    """[2, 64, key_dim]."""
    q_rope: Ref
    """[2, 64, R]."""
    key_ring: Ref
    """[stages, keys_at_once, key_dim]."""
    rope_ring: Ref
    """[stages, keys_at_once, R]."""
    value_ring: Ref
    """[stages, keys_at_once, value_dim]."""
    result: Ref
    """[2, 64, 64], columns of a result on their way out: not swizzled, so that any row may go."""
    q_here: Ref
    q_free: Ref
    keys_here: Ref
    """Of keys and rotary keys."""
    values_here: Ref
    keys_free: Ref
    values_free: Ref
    turn: Ref
    """Which of the two warpgroups multiplies."""
    weights: Ref | None = None
    """[2, 64, keys_at_once], where weights do not stay in registers."""


def prefill(
    q: jax.Array,
    k_up: jax.Array,
    v_up: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decode: jax.Array,
    *,
    scale: float,
    block_pages: int,
    block_bytes: int,
    tile_tokens: int,
    max_chunk_rows: int,
    kernels: str,
) -> jax.Array:
    """Attends the chunks of a flat token batch to their pages; see `reference.prefill`.

    Positions of a chunk's tokens follow one another. What a page holds past its row's keys reaches
    no output. A NaN in a query reaches the output of that token's head alone.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    del block_pages, tile_tokens  # of the plain form
    num_tokens, num_heads, _ = q.shape
    # A copy may start near the array's end and reads zeros past it, but is not taller than it.
    padded = max(round_up(num_tokens, SLAB), ROWS)
    plan = _Plan(
        num_tokens=padded,
        rows=kv_lens.shape[0],
        max_chunk_rows=max_chunk_rows,
        num_heads=num_heads,
        key_dim=k_up.shape[1],
        value_dim=v_up.shape[1],
        latent=k_up.shape[2],
        page_size=pool.shape[1],
        width=page_table.shape[1],
        scale=scale,
        workspace_bytes=block_bytes,
    )
    _decline(q, pool, plan, kernels)
    if padded > num_tokens:
        q = jnp.pad(q, ((0, padded - num_tokens), (0, 0), (0, 0)))
    work = _work(positions, kv_lens, cu_q_lens, num_decode, plan)
    # A slice of a larger array is refused where it starts at no multiple of 16 bytes; the product
    # is an array of its own, made once a step and shared by the layers.
    page_starts = page_table * plan.page_size
    entries = pool.reshape(-1, pool.shape[-1])
    k_rows, v_rows = (x.reshape(-1, plan.latent) for x in (k_up, v_up))

    def take_turn(i: jax.Array, out: jax.Array) -> jax.Array:
        number, part = div_rem(i, num_heads // plan.heads)
        turn = jnp.append(work.turns[number], part * plan.heads)
        keys, values = expand.expand(
            entries, k_rows, v_rows, page_starts, work.blocks, turn, plan.expansion
        )
        return _attend(q, keys, values, entries, page_starts, work.tiles, turn, out, plan)

    # Zeros of all layers would be made at once, ahead of the first; see `reference.over_tiles`.
    q, zero = jax.lax.optimization_barrier((q, jnp.zeros((), q.dtype)))
    out = jnp.broadcast_to(zero, (padded, num_heads, plan.value_dim))
    if plan.is_one_turn:
        out = take_turn(jnp.int32(0), out)
    else:
        turns = work.num_turns * (num_heads // plan.heads)
        out = jax.lax.fori_loop(0, turns, take_turn, out)
    return out[:num_tokens]


def _decline(q: jax.Array, pool: jax.Array, plan: _Plan, kernels: str) -> None:
    if kernels != "mosaic":
        raise NotImplementedError(f"kernels are {kernels!r}, not 'mosaic'")
    if q.dtype != jnp.bfloat16 or pool.dtype != jnp.bfloat16:
        raise NotImplementedError(f"queries are {q.dtype} and pages {pool.dtype}, not bfloat16")
    dims = plan.key_dim, plan.value_dim
    if dims not in _DIMS:
        raise NotImplementedError(f"keys and values of a head have {dims} dims, not one of {_DIMS}")
    rope = q.shape[2] - plan.key_dim
    if rope != _ROPE_DIM:
        raise NotImplementedError(f"a rotary key has {rope} dims, not {_ROPE_DIM}")
    if plan.latent % 128 or plan.latent > expand.MAX_LATENT:
        raise NotImplementedError(
            f"a latent has {plan.latent} dims, no multiple of 128 up to {expand.MAX_LATENT}"
        )
    if plan.page_size not in _PAGE_SIZES:
        raise NotImplementedError(f"page_size is {plan.page_size}, not one of {_PAGE_SIZES}")
    if plan.chunk_rows < 1:
        raise NotImplementedError("no row may be a chunk")
    if not plan.heads:
        raise NotImplementedError(
            f"no part of {plan.num_heads} heads of a row of {plan.width} pages, expanded, is of "
            f"whole panels and at most {plan.workspace_bytes} bytes"
        )
    if pool.shape[0] * plan.page_size >= 2**31:
        raise NotImplementedError(f"a pool of {pool.shape[0]} pages is past 32-bit row numbers")


def _work(
    positions: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decode: jax.Array,
    plan: _Plan,
) -> _Work:
    """Shares the chunk rows out to turns, their tokens to tiles and their keys to blocks.

    Every array is one that all layers share: a turn reads its part.
    """
    place = jnp.arange(plan.chunk_rows, dtype=jnp.int32)
    row = jnp.minimum(num_decode + place, plan.rows - 1)
    is_row = num_decode + place < plan.rows
    starts, ends = cu_q_lens[row], jnp.where(is_row, cu_q_lens[row + 1], 0)
    num_keys = jnp.where(ends > starts, kv_lens[row], 0)
    counts = -(-num_keys // expand.TOKENS)
    stops = jnp.cumsum(counts, dtype=jnp.int32)
    block_starts = stops - counts
    # Rows that begin within one span take a turn together: the last may be as long as any.
    span = block_starts // (plan.blocks - plan.row_blocks + 1)
    turn = jnp.cumsum(jnp.diff(span, prepend=span[:1]) > 0, dtype=jnp.int32)

    def of_turns(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each turn the sum of x, i32[rows], in the turns before, and in itself."""
        before, here = (
            jnp.sum(jnp.where(is_in, x[None], 0), axis=1, dtype=jnp.int32)
            for is_in in (turn[None] < place[:, None], turn[None] == place[:, None])
        )
        return before, here

    first_block, num_blocks = of_turns(counts)
    cut = query_tiles.cut(starts, ends, positions, _TILE_TOKENS, plan.num_tiles)
    first_tile, num_tiles = of_turns(cut.counts)
    columns = (
        row[cut.row],
        cut.token // SLAB,
        cut.begin,
        cut.end,
        cut.position,
        jnp.where(cut.is_used, cut.position + cut.end, 0),
        (block_starts - first_block[turn])[cut.row],
    )
    tile_turn = jnp.where(cut.is_used, turn[cut.row], plan.chunk_rows)
    is_before = (tile_turn[None, :] < tile_turn[:, None]) | (
        (tile_turn[None, :] == tile_turn[:, None]) & query_tiles.is_longer(columns[-2])
    )
    return _Work(
        tiles=query_tiles.in_order(jnp.stack(columns, axis=1), is_before),
        blocks=_key_blocks(row, num_keys, block_starts, stops, plan),
        turns=jnp.stack([first_tile, num_tiles, first_block, num_blocks], axis=1),
        num_turns=jnp.max(jnp.where(counts > 0, turn + 1, 0)),
    )


def _key_blocks(
    row: jax.Array, num_keys: jax.Array, starts: jax.Array, stops: jax.Array, plan: _Plan
) -> jax.Array:
    """i32[blocks, 3], the blocks of every row: its row, its place in it, how many are keys."""
    block = jnp.arange(plan.chunk_rows * plan.row_blocks, dtype=jnp.int32)
    owner = jnp.sum(block[:, None] >= stops[None, :], axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, plan.chunk_rows - 1)
    place = jnp.clip(block - starts[owner], 0, plan.row_blocks - 1)
    rest = jnp.clip(num_keys[owner] - place * expand.TOKENS, 0, expand.TOKENS)
    return jnp.stack([row[owner], place, rest], axis=1)


def _attend(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pool: jax.Array,
    page_starts: jax.Array,
    tiles: jax.Array,
    turn: jax.Array,
    out: jax.Array,
    plan: _Plan,
) -> jax.Array:
    """q [T, N, H + R] against what was expanded: `out` [T, N, V] with a turn's tokens and heads."""
    at_once = plan.keys_at_once

    def swizzled(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    scratch = dict(
        q_tile=swizzled(CONSUMERS, ROWS, plan.key_dim),
        q_rope=swizzled(CONSUMERS, ROWS, _ROPE_DIM),
        key_ring=swizzled(_STAGES, at_once, plan.key_dim),
        rope_ring=swizzled(_STAGES, at_once, _ROPE_DIM),
        value_ring=swizzled(_STAGES, at_once, plan.value_dim),
        result=plgpu.SMEM((CONSUMERS, ROWS, _PANEL), jnp.bfloat16),
        q_here=plgpu.Barrier(num_barriers=CONSUMERS, num_arrivals=2),
        q_free=plgpu.Barrier(num_barriers=CONSUMERS),
        keys_here=plgpu.Barrier(num_barriers=_STAGES, num_arrivals=1 + plan.pages_at_once),
        values_here=plgpu.Barrier(num_barriers=_STAGES),
        keys_free=plgpu.Barrier(num_barriers=_STAGES, num_arrivals=CONSUMERS),
        values_free=plgpu.Barrier(num_barriers=_STAGES, num_arrivals=CONSUMERS),
        turn=plgpu.Barrier(num_arrivals=CONSUMERS),
    )
    if not _WEIGHTS_IN_REGISTERS:
        scratch["weights"] = swizzled(CONSUMERS, ROWS, at_once)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(),
        kernel_name="latent_prefill",
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )
    in_place = jax.new_ref(out)
    kernel(in_place, q, keys, values, pool, page_starts, tiles, turn)
    return jax.freeze(in_place)


def _kernel(
    out: Ref,
    q: Ref,
    keys: Ref,
    values: Ref,
    pool: Ref,
    page_starts: Ref,
    tiles: Ref,
    part: Ref,
    *,
    plan: _Plan,
    **scratch: Ref,
) -> None:
    """One block: its share of the turn's units, each a tile for one head."""
    memory = _Memory(**scratch)
    warpgroup, block = (jax.lax.axis_index(name) for name in ("warpgroup", "block"))
    first_tile, num_tiles, first_head = part[0], part[1], part[4]
    share = query_tiles.share(num_tiles * plan.heads, block, plan.num_blocks)

    def unit_at(i: jax.Array) -> _Unit:
        return _unit(tiles, first_tile, first_head, share.unit_at(i), plan)

    @pl.when(warpgroup < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[0], action="increase")
        pl.when(warpgroup == 1)(lambda: query_tiles.take_turn(memory.turn))

        def consume(i: jax.Array, filled: jax.Array) -> jax.Array:
            return _consume(out, memory, unit_at(i), filled, warpgroup, plan)

        jax.lax.fori_loop(0, share.count, consume, jnp.int32(0))
        pl.when(warpgroup == 0)(lambda: query_tiles.take_turn(memory.turn))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")

        def produce(i: jax.Array, filled: jax.Array) -> jax.Array:
            unit = unit_at(i)
            _fetch_queries(q, memory, unit, i > 0, plan)
            sources = keys, values, pool
            return _fetch_blocks(sources, page_starts, memory, unit, filled, plan)

        filled = jax.lax.fori_loop(0, share.count, produce, jnp.int32(0))
        # What is freed is waited for, also when nothing takes its place.
        for warpgroup_at in range(CONSUMERS):
            free = memory.q_free.at[warpgroup_at]
            pl.when(share.count > 0)(functools.partial(plgpu.barrier_wait, free))
        for i in range(_STAGES):
            for free in (memory.keys_free, memory.values_free):
                _await_place(free, filled + i)


def _unit(
    tiles: Ref, first_tile: jax.Array, first_head: jax.Array, index: jax.Array, plan: _Plan
) -> _Unit:
    number, head = div_rem(index, plan.heads)
    tile = _Tile(*(tiles[first_tile + number, column] for column in range(_COLUMNS)))
    end, _ = div_rem(tile.num_keys + (plan.keys_at_once - 1), plan.keys_at_once)
    if plan.is_wide:
        return _Unit(tile, head, first_head + head, 0, end)
    num_full, _ = div_rem(tile.position + tile.begin + 1, plan.keys_at_once)
    return _Unit(tile, head, first_head + head, jnp.minimum(num_full, end), end)


def _fetch_queries(
    q: Ref, memory: _Memory, unit: _Unit, has_predecessor: jax.Array, plan: _Plan
) -> None:
    """Fetches the queries of both warpgroups as soon as each is done with those it has."""
    for warpgroup in range(CONSUMERS):
        slab = unit.tile.slab + warpgroup * (ROWS // SLAB)
        # Where all 64 tokens are past the array's end, any others will do: nothing is written.
        start = jnp.minimum(slab, plan.num_tokens // SLAB - 1) * SLAB
        free = memory.q_free.at[warpgroup]
        pl.when(has_predecessor)(functools.partial(plgpu.barrier_wait, free))
        tokens = q.at[pl.ds(start, ROWS), unit.query_head]
        for first, tile in ((0, memory.q_tile), (plan.key_dim, memory.q_rope)):
            source = tokens.at[:, pl.ds(first, tile.shape[2])]
            plgpu.copy_gmem_to_smem(source, tile.at[warpgroup], memory.q_here.at[warpgroup])


def _fetch_blocks(
    sources: tuple[Ref, Ref, Ref],
    page_starts: Ref,
    memory: _Memory,
    unit: _Unit,
    filled: jax.Array,
    plan: _Plan,
) -> jax.Array:
    """Fetches keys and values as their places become free; returns how many were filled so far."""
    keys, values, pool = sources
    size, at_once = plan.page_size, plan.keys_at_once
    base = unit.head * (plan.blocks * expand.TOKENS) + unit.tile.base * expand.TOKENS

    @pl.loop(0, unit.num_steps)
    def _(i: jax.Array) -> None:
        # Asked for before the wait; past the row's end any page of the table will do.
        places = [i * plan.pages_at_once + page for page in range(plan.pages_at_once)]
        starts = [
            page_starts[unit.tile.row, jnp.minimum(place, plan.width - 1)] for place in places
        ]
        slot = _slot(filled + i)
        rows = pl.ds(pl.multiple_of(base + i * at_once, at_once), at_once)
        here = memory.keys_here.at[slot]
        _await_place(memory.keys_free, filled + i)
        plgpu.copy_gmem_to_smem(keys.at[rows], memory.key_ring.at[slot], here)
        for page, start in enumerate(starts):
            source = pool.at[
                pl.ds(pl.multiple_of(start, size), size), pl.ds(plan.latent, _ROPE_DIM)
            ]
            plgpu.copy_gmem_to_smem(
                source, memory.rope_ring.at[slot, pl.ds(page * size, size)], here
            )
        _await_place(memory.values_free, filled + i)
        here = memory.values_here.at[slot]
        plgpu.copy_gmem_to_smem(values.at[rows], memory.value_ring.at[slot], here)

    return filled + unit.num_steps


def _await_place(free: Ref, number: jax.Array) -> None:
    """Waits until the place of the block `number` is free; the first ones are from the start."""
    place = free.at[_slot(number)]
    pl.when(number >= _STAGES)(functools.partial(plgpu.barrier_wait, place))


def _consume(
    out: Ref, memory: _Memory, unit: _Unit, filled: jax.Array, warpgroup: jax.Array, plan: _Plan
) -> jax.Array:
    """Attends 64 queries of one head to every block of keys and writes their output.

    `filled` blocks came before those of this unit; returns it with them added.
    """
    skipped = warpgroup * ROWS
    plgpu.barrier_wait(memory.q_here.at[warpgroup])
    first_keys = memory.keys_here.at[_slot(filled)]
    pl.when(unit.num_steps > 0)(lambda: plgpu.barrier_wait(first_keys))

    def step(i: jax.Array, partial: Partial, *, is_masked: bool) -> Partial:
        query_at = unit.tile.position + skipped if is_masked else None
        return _attend_block(partial, i, filled, memory, unit, warpgroup, query_at, plan)

    partial = query_tiles.nothing(plan.value_dim)
    if not plan.is_wide:
        seen = functools.partial(step, is_masked=False)
        partial = jax.lax.fori_loop(0, unit.num_full, seen, partial)
    masked = functools.partial(step, is_masked=True)
    partial = jax.lax.fori_loop(unit.num_full, unit.num_steps, masked, partial)
    plgpu.barrier_arrive(memory.q_free.at[warpgroup])
    plgpu.barrier_arrive(memory.turn)  # the other's, while this one writes

    result = query_tiles.normalized(partial)
    begin = jnp.clip(unit.tile.begin - skipped, 0, ROWS)
    end = jnp.clip(unit.tile.end - skipped, 0, ROWS)
    staged = memory.result.at[warpgroup]
    for start in range(0, plan.value_dim, _PANEL):
        # What was written before may still be on its way out of there.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged[...] = result[:, start : start + _PANEL]
        plgpu.commit_smem()
        target = out.at[:, unit.query_head, pl.ds(start, _PANEL)]
        first = unit.tile.slab * SLAB + skipped
        query_tiles.write_rows(staged, target, begin, end, first)
    plgpu.barrier_wait(memory.turn)
    return filled + unit.num_steps


def _attend_block(
    partial: Partial,
    i: jax.Array,
    filled: jax.Array,
    memory: _Memory,
    unit: _Unit,
    warpgroup: jax.Array,
    query_at: jax.Array | None,
    plan: _Plan,
) -> Partial:
    """Adds the keys of one block.

    `query_at`: position of the first query, where some keys may be hidden from some queries.
    """
    slot = _slot(filled + i)

    def score(out: Ref) -> None:
        plgpu.wgmma(out, memory.q_tile.at[warpgroup], memory.key_ring.at[slot].T)
        plgpu.wgmma(out, memory.q_rope.at[warpgroup], memory.rope_ring.at[slot].T)

    def visible(shape: tuple[int, int]) -> jax.Array:
        assert query_at is not None
        first, last = query_tiles.places(shape, query_at, i * plan.keys_at_once)
        return last <= first

    def wait_for_next_keys() -> None:
        here = memory.keys_here.at[_slot(filled + i + 1)]
        pl.when(i + 1 < unit.num_steps)(lambda: plgpu.barrier_wait(here))

    block = query_tiles.Block(
        score=score,
        num_keys=plan.keys_at_once,
        values=memory.value_ring.at[slot],
        keys_free=memory.keys_free.at[slot],
        values_here=memory.values_here.at[slot],
        values_free=memory.values_free.at[slot],
        turn=memory.turn,
        weights=None if memory.weights is None else memory.weights.at[warpgroup],
    )
    return query_tiles.attend_block(
        partial,
        block,
        plan.scale * math.log2(math.e),
        None if query_at is None else visible,
        wait_for_next_keys,
    )


def _slot(i: jax.Array) -> jax.Array:
    return jax.lax.rem(i, jnp.int32(_STAGES))
