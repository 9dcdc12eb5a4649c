"""Latents of a step's chunks times k_up and v_up: each head's keys and values, on Hopper.

A block keeps 128 rows of the weights in shared memory and streams latents, 128 tokens at a time,
from their pages past them. As many blocks as run at once share out the products, neighbours of one
block having the same weights. How much is expanded is a device value; how much may be, is static.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import SWIZZLED, Ref, div_rem

TOKENS = 128
"""Tokens expanded at once."""
_COLUMNS = 128
"""Weight rows kept at once: dims of keys or values."""
_PANEL = 64
"""Dims of one copy on its way out; those of a head are a multiple of it."""
_ROWS = 64
"""Tokens of a warpgroup."""
_CONSUMERS = 2
_DEPTH = 64
"""Latent dims multiplied at once."""
_STAGES = 4
_MULTIPROCESSORS = 132
"""Of an H100 or H200; one block runs on each."""
MAX_LATENT = 512
"""Weights of more dims would not fit in shared memory beside the tokens."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static of one kernel."""

    heads: int
    """Expanded at once."""
    key_dim: int
    """Of a head, without the rotary part."""
    value_dim: int
    latent: int
    page_size: int
    width: int
    """Pages of a row of the page table."""
    blocks: int
    """Blocks of 128 tokens that the workspace holds."""

    @property
    def rows(self) -> int:
        """Of one head in the workspace."""
        return self.blocks * TOKENS

    @property
    def key_panels(self) -> int:
        return self.heads * self.key_dim // _COLUMNS

    @property
    def panels(self) -> int:
        return self.key_panels + self.heads * self.value_dim // _COLUMNS

    @property
    def chunks(self) -> int:
        return self.latent // _DEPTH

    @property
    def pages_at_once(self) -> int:
        return TOKENS // self.page_size

    @property
    def num_blocks(self) -> int:
        """Blocks of threads."""
        return min(_MULTIPROCESSORS, self.panels * self.blocks)


def is_whole(heads: int, dim: int) -> bool:
    """Whether so many heads fill the panels that are kept."""
    return dim % _PANEL == 0 and heads * dim % _COLUMNS == 0


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Shared memory and barriers of one block."""

    weights: Ref
    """[chunks, 128, 64]."""
    latents: Ref
    """[stages, 2, 64, 64]."""
    result: Ref
    """[2, 2, 64, 64]: of each warpgroup, its two panels on their way out."""
    weights_here: Ref
    weights_free: Ref
    latents_here: Ref
    latents_free: Ref


@dataclasses.dataclass(frozen=True)
class _Unit:
    """One product: a panel of weights by a block of tokens."""

    panel: jax.Array
    block: jax.Array
    """Number of the block of tokens among those of the turn."""
    is_first: jax.Array
    """Of those that the block of threads does with these weights."""
    is_last: jax.Array


def expand(
    pool: jax.Array,
    k_up: jax.Array,
    v_up: jax.Array,
    page_starts: jax.Array,
    blocks: jax.Array,
    turn: jax.Array,
    plan: Plan,
) -> tuple[jax.Array, jax.Array]:
    """Expands some blocks of tokens for some heads.

    Args:
      pool: [P * page_size, L + R].
      k_up: [N * key_dim, L].
      v_up: [N * value_dim, L].
      page_starts: i32[B, W], the pool's row at which each page begins.
      blocks: i32[blocks, 3], of each block of 128 tokens: its row of the table, its place among the
        blocks of that row, how many of its tokens are keys.
      turn: i32[5], see `prefill`.
      plan: sizes.

    Returns:
      Keys [heads * rows, key_dim] and values [heads * rows, value_dim]: of each head the turn's
      blocks, one after the other. Tokens that are no keys are zero; blocks past the turn's are not
      written.
    """

    def swizzled(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    rows = plan.heads * plan.rows
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct((rows, plan.key_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows, plan.value_dim), jnp.bfloat16),
        ),
        kernel_name="latent_expand",
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            weights=swizzled(plan.chunks, _COLUMNS, _DEPTH),
            latents=swizzled(_STAGES, _CONSUMERS, _ROWS, _DEPTH),
            result=swizzled(_CONSUMERS, _COLUMNS // _PANEL, _ROWS, _PANEL),
            weights_here=plgpu.Barrier(num_barriers=plan.chunks),
            weights_free=plgpu.Barrier(num_arrivals=_CONSUMERS),
            latents_here=plgpu.Barrier(num_barriers=_STAGES, num_arrivals=plan.pages_at_once),
            latents_free=plgpu.Barrier(num_barriers=_STAGES, num_arrivals=_CONSUMERS),
        ),
    )
    return kernel(pool, k_up, v_up, page_starts, blocks, turn)


def _kernel(
    pool: Ref,
    k_up: Ref,
    v_up: Ref,
    page_starts: Ref,
    blocks: Ref,
    turn: Ref,
    keys: Ref,
    values: Ref,
    *,
    plan: Plan,
    **scratch: Ref,
) -> None:
    """One block: a run of the units, which are a panel's tokens and then the next panel's."""
    memory = _Memory(**scratch)
    warpgroup, block = (jax.lax.axis_index(name) for name in ("warpgroup", "block"))
    first_block, num_used, first_head = turn[2], turn[3], turn[4]
    num_units = num_used * plan.panels
    start = div_rem(block * num_units, plan.num_blocks)[0]
    end = div_rem((block + 1) * num_units, plan.num_blocks)[0]

    def unit_at(i: jax.Array) -> _Unit:
        number = start + i
        panel = jax.lax.div(number, jnp.maximum(num_used, 1))
        tokens = number - panel * num_used
        is_first = jnp.logical_or(i == 0, tokens == 0)
        is_last = jnp.logical_or(number == end - 1, tokens == num_used - 1)
        return _Unit(panel, tokens, is_first, is_last)

    @pl.when(warpgroup < _CONSUMERS)
    def _() -> None:

        def consume(i: jax.Array, filled: jax.Array) -> jax.Array:
            unit = unit_at(i)
            num_keys = blocks[first_block + unit.block, 2]  # asked for early, used late
            product = _multiplied(memory, unit, filled, warpgroup, plan)
            _write(product, memory, unit, (keys, values), num_keys, warpgroup, plan)
            return filled + plan.chunks

        jax.lax.fori_loop(0, end - start, consume, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _CONSUMERS)
    def _() -> None:

        def starts_at(i: jax.Array) -> list[jax.Array]:
            """Where a unit's pages begin; past the last unit any will do."""
            unit = unit_at(jnp.minimum(i, jnp.maximum(end - start - 1, 0)))
            row, place = (blocks[first_block + unit.block, column] for column in range(2))
            pages = [place * plan.pages_at_once + page for page in range(plan.pages_at_once)]
            return [page_starts[row, jnp.minimum(page, plan.width - 1)] for page in pages]

        def produce(i: jax.Array, carry: tuple[jax.Array, list[jax.Array]]) -> Any:
            filled, starts = carry
            unit = unit_at(i)
            next_starts = starts_at(i + 1)  # asked for early, used late
            for chunk in range(plan.chunks):
                _fetch_latents(pool, memory, starts, filled + chunk, chunk, plan)
                fetch = functools.partial(
                    _fetch_weights, (k_up, v_up), memory, unit, chunk, first_head, i > 0, plan
                )
                pl.when(unit.is_first)(fetch)
            return filled + plan.chunks, next_starts

        nothing = jnp.int32(0)
        filled, _ = jax.lax.fori_loop(0, end - start, produce, (nothing, starts_at(nothing)))
        # What is freed is waited for, also when nothing takes its place.
        pl.when(end > start)(lambda: plgpu.barrier_wait(memory.weights_free))

        @pl.loop(jnp.maximum(filled - _STAGES, 0), filled)
        def _(number: jax.Array) -> None:
            plgpu.barrier_wait(memory.latents_free.at[_slot(number)])


def _fetch_latents(
    pool: Ref, memory: _Memory, starts: list[jax.Array], number: jax.Array, chunk: int, plan: Plan
) -> None:
    """Fetches 64 dims of a block's latents as soon as their place is free."""
    slot, size = _slot(number), plan.page_size
    free = memory.latents_free.at[slot]
    pl.when(number >= _STAGES)(lambda: plgpu.barrier_wait(free))
    for i, start in enumerate(starts):
        source = pool.at[pl.ds(pl.multiple_of(start, size), size), pl.ds(chunk * _DEPTH, _DEPTH)]
        warpgroup, row = divmod(i * size, _ROWS)
        target = memory.latents.at[slot, warpgroup, pl.ds(row, size)]
        plgpu.copy_gmem_to_smem(source, target, memory.latents_here.at[slot])


def _fetch_weights(
    up: tuple[Ref, Ref],
    memory: _Memory,
    unit: _Unit,
    chunk: int,
    first_head: jax.Array,
    has_predecessor: jax.Array,
    plan: Plan,
) -> None:
    """Fetches 64 dims of a panel's weights; the first ones wait until the last are done with."""
    if chunk == 0:
        pl.when(has_predecessor)(lambda: plgpu.barrier_wait(memory.weights_free))
    panels = (unit.panel, unit.panel - plan.key_panels)
    for source, dim, panel, is_its in zip(
        up, (plan.key_dim, plan.value_dim), panels, _is_key(unit, plan), strict=True
    ):
        start = pl.multiple_of(first_head * dim + panel * _COLUMNS, _PANEL)

        @pl.when(is_its)
        def _(source: Ref = source, start: jax.Array = start) -> None:
            rows = source.at[pl.ds(start, _COLUMNS), pl.ds(chunk * _DEPTH, _DEPTH)]
            here = memory.weights_here.at[chunk]
            plgpu.copy_gmem_to_smem(rows, memory.weights.at[chunk], here)


def _is_key(unit: _Unit, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Whether a unit is of keys, and whether it is of values."""
    return unit.panel < plan.key_panels, unit.panel >= plan.key_panels


def _multiplied(
    memory: _Memory, unit: _Unit, filled: jax.Array, warpgroup: jax.Array, plan: Plan
) -> jax.Array:
    """f32[64, 128]: a warpgroup's tokens times the panel's weights."""

    def release(number: jax.Array) -> None:
        plgpu.barrier_arrive(memory.latents_free.at[_slot(number)])

    def multiply(out: Ref) -> jax.Array:
        for chunk in range(plan.chunks):
            here = memory.weights_here.at[chunk]
            pl.when(unit.is_first)(functools.partial(plgpu.barrier_wait, here))
            slot = _slot(filled + chunk)
            plgpu.barrier_wait(memory.latents_here.at[slot])
            latents = memory.latents.at[slot, warpgroup]
            plgpu.wgmma(out, latents, memory.weights.at[chunk].T)
            plgpu.wgmma_wait(1)
            if chunk > 0:
                release(filled + chunk - 1)
        return out[...]

    # Public, though listed in a way that type checkers do not see.
    out = plgpu.ACC((_ROWS, _COLUMNS), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    product = pl.run_scoped(multiply, out)
    release(filled + plan.chunks - 1)
    pl.when(unit.is_last)(lambda: plgpu.barrier_arrive(memory.weights_free))
    return product


def _write(
    product: jax.Array,
    memory: _Memory,
    unit: _Unit,
    targets: tuple[Ref, Ref],
    num_keys: jax.Array,
    warpgroup: jax.Array,
    plan: Plan,
) -> None:
    """Writes a warpgroup's product by way of shared memory, zeros where a token is no key."""
    first = warpgroup * _ROWS
    token = first + plgpu.broadcasted_iota(jnp.int32, product.shape, 0, layout=plgpu.Layout.WGMMA)
    product = jnp.where(token < num_keys, product, 0.0).astype(jnp.bfloat16)
    # What was written before may still be on its way out of there.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staged = memory.result.at[warpgroup]
    panels = range(_COLUMNS // _PANEL)
    for i in panels:
        staged[i] = product[:, i * _PANEL : (i + 1) * _PANEL]
    plgpu.commit_smem()
    row = unit.block * TOKENS + first
    numbers = (unit.panel, unit.panel - plan.key_panels)
    for target, number, is_its in zip(targets, numbers, _is_key(unit, plan), strict=True):

        @pl.when(is_its)
        def _(target: Ref = target, number: jax.Array = number) -> None:
            for i in panels:
                head, part = div_rem(number * len(panels) + i, target.shape[1] // _PANEL)
                rows = pl.ds(pl.multiple_of(head * plan.rows + row, _ROWS), _ROWS)
                dims = pl.ds(pl.multiple_of(part * _PANEL, _PANEL), _PANEL)
                plgpu.copy_smem_to_gmem(staged.at[i], target.at[rows, dims])


def _slot(number: jax.Array) -> jax.Array:
    return jax.lax.rem(number, jnp.int32(_STAGES))
