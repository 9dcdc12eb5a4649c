"""Products of chosen experts' weights on Hopper: one warpgroup streams weights, others multiply.

Operands are swapped: weight rows lie on the 64-wide side of a product and tokens are its columns,
8 or more, so that few tokens waste nothing. Weights and tokens of 64 inputs at a time come into a
ring of places in shared memory, which is never drained between units of work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import SWIZZLED, SWIZZLED_FLOATS, Ref, div_rem

DEPTH = 64
"""Inputs of one step: a swizzled row of 128 bytes."""
BLOCK = 64
"""Rows of gate, then as many of up: a warpgroup's 128 rows hold both of the same outputs."""
MULTIPROCESSORS = 132
"""Of an H100 or H200: on a device with fewer, some blocks wait for others to end."""
SIDE = 64
"""The fixed side of a warpgroup's product."""
_SHARED_BYTES = 226 * 1024
"""What a block's ring and results may take; its barriers are beside them."""
_MAX_STAGES = 12

_PRODUCT = plgpu.Layout.WGMMA
_COLUMNS = _PRODUCT.reduce(0)


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a block multiplies at once."""

    columns: int
    """Tokens."""
    consumers: int = 1
    """Warpgroups that multiply, each its own weight rows."""
    rows: int = 128
    """Weight rows of one of them."""
    is_late: bool = False
    """Whether a step's product may still be under way when the next one starts."""
    tail: int = 0
    """One that is not full is multiplied as the next multiple of so many tokens; 0: as if full."""

    @property
    def block_rows(self) -> int:
        """Weight rows of a block."""
        return self.rows * self.consumers

    @property
    def widths(self) -> tuple[int, ...]:
        """How many tokens a tile may be multiplied as, rising."""
        step = self.tail or self.columns
        return tuple(range(step, self.columns + 1, step))

    @property
    def stages(self) -> int:
        """Steps on their way at once: as many as memory holds."""
        return self._stages(self.consumers * self.columns * BLOCK * 2)

    @property
    def summed_stages(self) -> int:
        """The same beside a result that is float32 and SIDE tokens high."""
        return self._stages(self.block_rows * SIDE * 4 + SIDE * DEPTH * 2)

    def _stages(self, result: int) -> int:
        step = (self.block_rows + self.columns) * DEPTH * 2
        return min(_MAX_STAGES, (_SHARED_BYTES - result) // step)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that multiplies and of one that fetches: three warpgroups share 65536."""
        return (232 if self.consumers > 1 or self.columns > 64 else 160), 40


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Shared memory and barriers of one block."""

    weight_ring: Ref
    """[stages, block rows, 64]."""
    token_ring: Ref
    """A step's tokens after the other's, [stages * columns or more, 64]."""
    here: Ref
    free: Ref
    result: Ref | None = None
    """On its way out, of each warpgroup: [columns, 64], or of sums [columns, rows]."""


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where one unit's operands start in device memory."""

    expert: jax.Array
    row: jax.Array
    """First weight row, within the expert."""
    start: jax.Array | int
    """First row of the tokens."""
    first: jax.Array | int = 0
    """First step of 64 inputs."""


def shared_gate_up(
    weights: jax.Array,
    x: jax.Array,
    experts: jax.Array,
    count: jax.Array,
    token_weights: jax.Array,
    tile: Tile,
) -> jax.Array:
    """silu(gate) * up of the same tokens for each of some experts, weighted in float32.

    Args:
      weights: [E, 2 F, D], rows in blocks of 64: gate, up, gate, up, ...
      x: [columns, D].
      experts: i32[E], the chosen ones first.
      count: i32[...], its last number is how many are chosen.
      token_weights: f32[E, columns], multiplies each result before it is rounded; where it is 0 the
        result is 0, whatever the token holds.
      tile: its block rows divide 2 F.

    Returns:
      [E * columns, F] in x's dtype, by place in `experts`; places past the count are not written.
    """
    width = weights.shape[1] // 2
    operands = (weights, x, experts, count, token_weights)
    return _grouped(_SHARED_GATE_UP, width, "moe_shared_gate_up", tile, operands)


def gate_up(
    weights: jax.Array,
    x: jax.Array,
    experts: jax.Array,
    count: jax.Array,
    held: jax.Array,
    tile: Tile,
) -> jax.Array:
    """silu(gate) * up of every tile of tokens, computed in float32.

    Args:
      weights: [E, 2 F, D], rows in blocks of 64: gate, up, gate, up, ...
      x: [tiles * columns, D], a tile after the other.
      experts: i32[tiles], whose weights a tile takes.
      count: i32[...], its last number is how many tiles are used: the first ones.
      held: i32[tiles], tokens of each used tile, at least one: its first rows.
      tile: its block rows divide 2 F.

    Returns:
      [tiles * columns, F] in x's dtype, a tile after the other; rows that hold no token may not be
      written.
    """
    width = weights.shape[1] // 2
    return _grouped(_TILED_GATE_UP, width, "moe_gate_up", tile, (weights, x, experts, count, held))


def down(
    weights: jax.Array,
    hidden: jax.Array,
    experts: jax.Array,
    count: jax.Array,
    held: jax.Array,
    tile: Tile,
) -> jax.Array:
    """The product of every tile of tokens, rounded to the dtype of its inputs.

    Args:
      weights: [E, D, F].
      hidden: [tiles * columns, F], a tile after the other.
      experts: i32[tiles], whose weights a tile takes.
      count: i32[...], its last number is how many tiles are used: the first ones.
      held: i32[tiles], tokens of each used tile, at least one: its first rows.
      tile: its block rows divide D.

    Returns:
      [tiles * columns, D], a tile after the other; rows that hold no token may not be written.
    """
    operands = (weights, hidden, experts, count, held)
    return _grouped(_TILED_DOWN, weights.shape[1], "moe_down", tile, operands)


class _Form(NamedTuple):
    """What distinguishes one grouped product from another."""

    finish: Callable[..., None]
    """(product, where it goes, the tiles' experts, further operands): writes the result."""
    is_shared: bool = False
    """Whether all tiles are the same tokens; otherwise the first further operand is `held`."""


class _Target(NamedTuple):
    """Where a warpgroup's result goes."""

    staged: Ref
    """[width, 64] of shared memory."""
    out: Ref
    number: jax.Array
    """Of the tile."""
    start: jax.Array
    """Its first row in `out`."""
    place: jax.Array
    """Of the warpgroup's weight rows among those of an expert."""


def _grouped(
    form: _Form, width: int, name: str, tile: Tile, operands: tuple[jax.Array, ...]
) -> jax.Array:
    """Blocks share out units, a tile of tokens by a block's weight rows, at a fixed stride."""
    weights, x, experts, *_ = operands
    num_units = experts.shape[0] * (weights.shape[1] // tile.block_rows)
    result = _swizzled(tile.consumers, tile.columns, BLOCK)
    kernel = plgpu.kernel(
        functools.partial(_grouped_kernel, form=form, tile=tile),
        out_type=jax.ShapeDtypeStruct((experts.shape[0] * tile.columns, width), x.dtype),
        kernel_name=name,
        grid=(min(MULTIPROCESSORS, num_units),),
        grid_names=("block",),
        num_threads=tile.consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(tile, tile.stages) | dict(result=result),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(*operands)


def _grouped_kernel(
    weights: Ref,
    x: Ref,
    experts: Ref,
    count: Ref,
    *others: Ref,
    form: _Form,
    tile: Tile,
    **scratch: Ref,
) -> None:
    """One block: its share of the units."""
    *further, out = others
    memory = _Memory(**scratch)
    assert memory.result is not None
    result = memory.result
    warpgroup, block = (jax.lax.axis_index(name) for name in ("warpgroup", "block"))
    num_blocks = jax.lax.axis_size("block")
    row_blocks, num_steps = weights.shape[1] // tile.block_rows, x.shape[1] // DEPTH
    num_units = _last(count) * row_blocks
    share = div_rem(num_units - block + (num_blocks - 1), num_blocks)[0]

    def unit_at(i: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Number of the tile, and of its block of weight rows."""
        return div_rem(block + i * num_blocks, row_blocks)

    def held_at(i: jax.Array | int) -> jax.Array:
        """How many tokens a unit's tile holds; past the last unit, those of some tile."""
        if form.is_shared:
            return jnp.int32(tile.columns)
        number, _ = unit_at(i)
        return further[0][jnp.minimum(number, experts.shape[0] - 1)]

    @pl.when(warpgroup < tile.consumers)
    def _() -> None:
        plgpu.set_max_registers(tile.registers[0], action="increase")

        def consume(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            filled, held = carry
            number, row_block = unit_at(i)
            place = row_block * tile.consumers + warpgroup
            # Asked for one unit ahead, so that no product waits for it.
            next_held = held_at(i + 1)

            def multiply(width: int) -> None:
                product = _multiplied(memory, filled, num_steps, warpgroup, tile, width)
                staged = result.at[warpgroup, pl.ds(0, width)]
                target = _Target(staged, out, number, number * tile.columns, place)
                form.finish(product, target, experts, *further)

            _at_width(tile, held, multiply)
            return filled + num_steps, next_held

        jax.lax.fori_loop(0, share, consume, (jnp.int32(0), held_at(0)))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == tile.consumers)
    def _() -> None:
        plgpu.set_max_registers(tile.registers[1], action="decrease")

        def produce(i: jax.Array, filled: jax.Array) -> jax.Array:
            number, row_block = unit_at(i)
            # Of few tokens the rows past them come as zeros; a start that is known is checked.
            start = div_rem(block, num_blocks)[0] * 8 if form.is_shared else number * tile.columns
            source = _Source(experts[number], row_block * tile.block_rows, start)
            fetch = functools.partial(_fetch, weights, x, memory, source, filled, num_steps, tile)
            _at_width(tile, held_at(i), fetch)
            return filled + num_steps

        filled = jax.lax.fori_loop(0, share, produce, jnp.int32(0))
        _await_places(memory, filled)


def _at_width(tile: Tile, held: jax.Array, body: Callable[[int], None]) -> None:
    """Runs the body, given the least of the tile's widths that so many tokens fit in."""
    number = div_rem(held - 1, tile.widths[0])[0]
    jax.lax.switch(number, [functools.partial(body, width) for width in tile.widths])


def _activate_weighted(
    product: jax.Array, target: _Target, experts: Ref, token_weights: Ref
) -> None:
    """Writes silu(gate) * up of 64 outputs, weighted, and zeros for the other experts' tokens."""
    hidden = _activated(product)
    of_expert = token_weights.at[experts[target.number]]
    factor = plgpu.load(of_expert, layout=_COLUMNS, optimized=False)
    factor = jax.lax.broadcast_in_dim(factor, hidden.shape, [1])
    _write(jnp.where(factor == 0.0, 0.0, hidden * factor), target, target.place)


def _activate(product: jax.Array, target: _Target, *_: Ref) -> None:
    """Writes silu(gate) * up of 64 outputs."""
    _write(_activated(product), target, target.place)


def _activated(product: jax.Array) -> jax.Array:
    gate, up = product[:BLOCK], product[BLOCK:]
    return gate / (1.0 + jnp.exp(-gate)) * up


def _store(product: jax.Array, target: _Target, *_: Ref) -> None:
    """Writes every output."""
    panels = product.shape[0] // BLOCK
    for i in range(panels):
        part = product[i * BLOCK : (i + 1) * BLOCK] if panels > 1 else product
        _write(part, target, target.place * panels + i)


def _write(values: jax.Array, target: _Target, panel: jax.Array) -> None:
    """Writes values [64, width], transposed, to 64 outputs of the tile's tokens."""
    staged = target.staged
    # What was written before may still be on its way out of there.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staged.T[...] = values.astype(staged.dtype)
    plgpu.commit_smem()
    rows = pl.ds(pl.multiple_of(target.start, 8), staged.shape[0])
    outputs = pl.ds(pl.multiple_of(panel * BLOCK, BLOCK), BLOCK)
    plgpu.copy_smem_to_gmem(staged, target.out.at[rows, outputs])


_SHARED_GATE_UP = _Form(_activate_weighted, is_shared=True)
_TILED_GATE_UP = _Form(_activate)
_TILED_DOWN = _Form(_store)


def summed_down(
    weights: jax.Array,
    hidden: jax.Array,
    experts: jax.Array,
    count: jax.Array,
    num_tokens: int,
    splits: int,
    tile: Tile,
) -> jax.Array:
    """The products of some experts, added up in the accumulator, expert after expert.

    Here tokens lie on the fixed side of a product, so that sums leave token by token. A split takes
    some inputs of every expert, always the same ones: what a token adds up does not depend on which
    others are chosen, as long as they hold zeros for it.

    Args:
      weights: [E, D, F].
      hidden: [E * columns, F], by place in `experts`.
      experts: i32[E], the chosen ones first, in rising order.
      count: i32[...], its last number is how many are chosen.
      num_tokens: at most a tile's columns; up to 8 of them, or a multiple of 8.
      splits: parts of the inputs, at most F / 64.
      tile: its block rows divide D; steps are not late.

    Returns:
      f32[splits, num_tokens, D], zero when none is chosen.
    """
    assert not tile.is_late
    hidden_size = weights.shape[1]
    result = plgpu.SMEM((tile.consumers, SIDE, tile.rows), jnp.float32, transforms=SWIZZLED_FLOATS)
    kernel = plgpu.kernel(
        functools.partial(_summed_kernel, splits=splits, tile=tile),
        out_type=jax.ShapeDtypeStruct((splits, num_tokens, hidden_size), jnp.float32),
        kernel_name="moe_summed_down",
        grid=(hidden_size // tile.block_rows, splits),
        grid_names=("row_block", "split"),
        num_threads=tile.consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(tile, tile.summed_stages, SIDE) | dict(result=result),
    )
    return kernel(weights, hidden, experts, count)


def _summed_kernel(
    weights: Ref,
    hidden: Ref,
    experts: Ref,
    count: Ref,
    out: Ref,
    *,
    splits: int,
    tile: Tile,
    **scratch: Ref,
) -> None:
    """One block: some weight rows and some inputs of every tile."""
    memory = _Memory(**scratch)
    warpgroup, row_block, split = (
        jax.lax.axis_index(name) for name in ("warpgroup", "row_block", "split")
    )
    all_steps = hidden.shape[1] // DEPTH
    first = div_rem(split * all_steps, splits)[0]
    end = div_rem((split + 1) * all_steps, splits)[0]
    num_steps, num_experts = end - first, _last(count)
    row = row_block * tile.block_rows

    @pl.when(warpgroup < tile.consumers)
    def _() -> None:
        plgpu.set_max_registers(tile.registers[0], action="increase")
        sums = _summed(memory, num_experts * num_steps, warpgroup, tile)
        columns = pl.ds(pl.multiple_of(row + warpgroup * tile.rows, tile.rows), tile.rows)
        target, num_tokens = out.at[split, :, columns], min(tile.columns, SIDE)
        # A start that is not known is not checked against the tokens: none is written past them.
        zero = div_rem(split, splits)[0] * 8
        for i, total in enumerate(sums):
            _write_sums(total, memory, warpgroup, target, zero + i * SIDE, num_tokens)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == tile.consumers)
    def _() -> None:
        plgpu.set_max_registers(tile.registers[1], action="decrease")

        def produce(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            filled, expert = carry
            # Asked for one tile ahead, so that no step waits for it.
            next_expert = experts[jnp.minimum(i + 1, experts.shape[0] - 1)]
            source = _Source(expert, row, i * tile.columns, first)
            _fetch(weights, hidden, memory, source, filled, num_steps, tile, tile.columns)
            return filled + num_steps, next_expert

        filled, _ = jax.lax.fori_loop(0, num_experts, produce, (jnp.int32(0), experts[0]))
        _await_places(memory, filled)


def _summed(
    memory: _Memory, num_steps: jax.Array, warpgroup: jax.Array, tile: Tile
) -> tuple[jax.Array, ...]:
    """f32[64, rows] for every 64 tokens, the sum of all steps.

    Rows past the tokens hold anything: what lies behind a step's tokens is another's.
    """
    rows = pl.ds(warpgroup * tile.rows, tile.rows)
    sides = -(-tile.columns // SIDE)

    def multiply(*sums: Ref) -> tuple[jax.Array, ...]:
        @pl.loop(0, num_steps)
        def _(number: jax.Array) -> None:
            slot = jax.lax.rem(number, _stages(memory))
            plgpu.barrier_wait(memory.here.at[slot])
            for i, total in enumerate(sums):
                tokens = memory.token_ring.at[_tokens_at(slot, tile, SIDE, i * SIDE)]
                plgpu.wgmma(total, tokens, memory.weight_ring.at[slot, rows].T)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(memory.free.at[slot])

        return tuple(total[...] for total in sums)

    # Public, though listed in a way that type checkers do not see.
    total = plgpu.ACC((SIDE, tile.rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, *[total] * sides)


def _write_sums(
    total: jax.Array,
    memory: _Memory,
    warpgroup: jax.Array,
    target: Ref,
    start: jax.Array,
    num_tokens: int,
) -> None:
    """Writes the leading tokens of f32[64, rows] to where they begin in a split's outputs."""
    assert memory.result is not None
    staged = memory.result.at[warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staged[...] = total
    plgpu.commit_smem()
    tokens = pl.ds(pl.multiple_of(start, 8), num_tokens)
    plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, num_tokens)], target.at[tokens])


def decline_unless_covered(x: jax.Array, gate_up: jax.Array, down: jax.Array, kernels: str) -> None:
    """Declines what no kernel here multiplies; arguments are those of `reference.experts`.

    Raises:
      NotImplementedError: with the reason.
    """
    hidden_size, intermediate_size = down.shape[1:]
    if kernels != "mosaic":
        raise NotImplementedError(f"kernels are {kernels!r}, not 'mosaic'")
    if any(array.dtype != jnp.bfloat16 for array in (x, gate_up, down)):
        dtypes = f"{x.dtype}, {gate_up.dtype} and {down.dtype}"
        raise NotImplementedError(f"tokens and weights are {dtypes}, not bfloat16")
    for name, size in ("hidden_size", hidden_size), ("intermediate_size", intermediate_size):
        if size % DEPTH:
            raise NotImplementedError(f"{name} is {size}, not a multiple of {DEPTH}")


def _scratch(tile: Tile, stages: int, least_tokens: int = 0) -> dict[str, Any]:
    """Rings and barriers; `least_tokens` rows lie in the ring from each step's first one on."""
    tokens = max(stages * tile.columns, (stages - 1) * tile.columns + least_tokens)
    return dict(
        weight_ring=_swizzled(stages, tile.block_rows, DEPTH),
        token_ring=_swizzled(tokens, DEPTH),
        here=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        free=plgpu.Barrier(num_barriers=stages, num_arrivals=tile.consumers),
    )


def _swizzled(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)


def _fetch(
    weights: Ref,
    x: Ref,
    memory: _Memory,
    source: _Source,
    filled: jax.Array,
    num_steps: jax.Array | int,
    tile: Tile,
    width: int,
) -> None:
    """Fetches a unit's steps, the first `width` of its tokens, as places become free.

    Each copy adds its own bytes to what its step's barrier waits for.
    """
    rows = pl.ds(pl.multiple_of(source.row, 64), tile.block_rows)
    tokens = pl.ds(_aligned(source.start, 8), width)

    @pl.loop(0, num_steps)
    def _(i: jax.Array) -> None:
        slot = jax.lax.rem(filled + i, _stages(memory))
        free = memory.free.at[slot]
        pl.when(filled + i >= _stages(memory))(functools.partial(plgpu.barrier_wait, free))
        inputs = pl.ds(pl.multiple_of((source.first + i) * DEPTH, DEPTH), DEPTH)
        here = memory.here.at[slot]
        plgpu.copy_gmem_to_smem(
            weights.at[source.expert, rows, inputs], memory.weight_ring.at[slot], here
        )
        target = memory.token_ring.at[_tokens_at(slot, tile, width)]
        plgpu.copy_gmem_to_smem(x.at[tokens, inputs], target, here)


def _await_places(memory: _Memory, filled: jax.Array) -> None:
    """Waits until the last places are free, also when nothing takes them."""

    @pl.loop(jnp.maximum(filled - _stages(memory), 0), filled)
    def _(number: jax.Array) -> None:
        plgpu.barrier_wait(memory.free.at[jax.lax.rem(number, _stages(memory))])


def _multiplied(
    memory: _Memory,
    filled: jax.Array,
    num_steps: jax.Array | int,
    warpgroup: jax.Array,
    tile: Tile,
    width: int,
) -> jax.Array:
    """f32[rows, width], the sum of the steps that follow the first `filled` ones."""
    rows = pl.ds(warpgroup * tile.rows, tile.rows)

    def release(number: jax.Array) -> None:
        plgpu.barrier_arrive(memory.free.at[jax.lax.rem(number, _stages(memory))])

    def multiply(out: Ref) -> jax.Array:
        @pl.loop(0, num_steps)
        def _(i: jax.Array) -> None:
            number = filled + i
            slot = jax.lax.rem(number, _stages(memory))
            plgpu.barrier_wait(memory.here.at[slot])
            tokens = memory.token_ring.at[_tokens_at(slot, tile, width)]
            plgpu.wgmma(out, memory.weight_ring.at[slot, rows], tokens.T)
            plgpu.wgmma_wait(int(tile.is_late))
            if tile.is_late:
                pl.when(i > 0)(lambda: release(number - 1))
            else:
                release(number)

        return out[...]

    # Public, though listed in a way that type checkers do not see.
    out = plgpu.ACC((tile.rows, width), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    product = pl.run_scoped(multiply, out)
    if tile.is_late:
        release(filled + num_steps - 1)
    return product


def _aligned(start: jax.Array | int, multiple: int) -> jax.Array | int:
    """Says of a start that is not known that it is a multiple."""
    return start if isinstance(start, int) else pl.multiple_of(start, multiple)


def _stages(memory: _Memory) -> jax.Array:
    return jnp.int32(memory.weight_ring.shape[0])


def _last(numbers: Ref) -> jax.Array:
    return numbers[numbers.shape[0] - 1]


def _tokens_at(slot: jax.Array, tile: Tile, size: int, start: int = 0) -> Any:
    """Where in the ring so many of a step's tokens lie, from one of them on."""
    return pl.ds(pl.multiple_of(slot * tile.columns + start, 8), size)
