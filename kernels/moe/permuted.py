"""Experts of many tokens on Hopper: tokens are grouped by expert and multiplied a tile at a time.

One kernel copies each token to its experts' rows, two multiply tiles of them, and each token's
outputs are then gathered, weighted and summed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.moe import products, tables
from kernels.moe.products import Tile
from kernels.mosaic import Ref, round_up
from kernels.tuning import Choice, Shape

_THREADS = 128
"""Of a warpgroup."""


def experts(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    kernels: str = "plain",
    columns: int | None = None,
    tail: int | None = None,
) -> jax.Array:
    """Every token's weighted sum over its experts' outputs; see `reference.experts`.

    A tile has `columns` tokens, an expert's last one the next multiple of `tail`; None: by formula.

    Outputs are rounded before they are weighted and summed, in float32, in the order of the
    choices.

    Raises:
      NotImplementedError: the call is outside what the kernels cover.
    """
    products.decline_unless_covered(x, gate_up, down, kernels)
    num_tokens, top_k = expert_ids.shape
    num_experts, hidden_size, width = down.shape
    columns = columns or _columns(num_tokens * top_k, num_experts)
    num_tiles = _num_tiles(num_tokens * top_k, num_experts, columns)
    padded = round_up(num_tokens, tables.SIDE)
    ids, _ = tables.by_choice(expert_ids, weights, num_experts, padded)
    tile_experts, upto, held, rows = tables.group(expert_ids, ids, num_experts, num_tiles, columns)
    grouped = _dispatch(x, rows, num_tiles * columns)
    tail = tail or _tails(columns)[0]
    first, second = (_tile(columns, tail, rows) for rows in (2 * width, hidden_size))
    hidden = products.gate_up(gate_up, grouped, tile_experts, upto, held, first)
    outputs = products.down(down, hidden, tile_experts, upto, held, second)
    return _combine(outputs, rows, weights)[None]


def _columns(size: int, num_experts: int) -> int:
    """Tokens of a tile, by the mean rows of an expert. H200, 2026-11-29."""
    mean = size / num_experts
    return 32 if mean <= 32 else 64 if mean < 256 else 128


def _tails(columns: int) -> tuple[int, ...]:
    """What the tokens of an expert's last tile may be a multiple of, the formula's first."""
    return (32, columns) if columns >= 128 else (columns,)


def candidates(shape: Shape) -> tuple[Choice, ...]:
    """Tokens of a tile and of its tail, the formula's first; none where a tile holds hardly one."""
    size, num_experts = shape["tokens"] * shape["top_k"], shape["num_experts"]
    if size < 2 * num_experts:
        return ()
    tried = [n for n in (32, 64, 128) if n <= 4 * size // num_experts]
    columns = dict.fromkeys([_columns(size, num_experts), *tried])
    return tuple(Choice.of("permuted", columns=n, tail=tail) for n in columns for tail in _tails(n))


def _tile(columns: int, tail: int, rows: int) -> Tile:
    consumers, height = 2 if rows % 256 == 0 else 1, 128 if rows % 128 == 0 else 64
    return Tile(columns, consumers, height, is_late=columns > 32, tail=tail)


def _num_tiles(size: int, num_experts: int, columns: int) -> int:
    """How many there can be, or more: each expert may fill its last one with a single row."""
    return max(tables.SIDE, (size + min(num_experts, size) * (columns - 1)) // columns)


def _dispatch(x: jax.Array, rows: jax.Array, num_rows: int) -> jax.Array:
    """Copies token t to `rows[t]`, where that is not -1 -> [num_rows, D]; others hold anything."""
    num_tokens, hidden_size = x.shape
    tokens = next(n for n in (8, 4, 2, 1) if num_tokens % n == 0)
    panel = next(n for n in (256, 128, 64) if hidden_size % n == 0)
    shape = (hidden_size // panel, panel)  # no side of a copy is over 256 long
    kernel = plgpu.kernel(
        functools.partial(_dispatch_kernel, tokens=tokens),
        out_type=jax.ShapeDtypeStruct((num_rows, *shape), x.dtype),
        kernel_name="moe_dispatch",
        grid=(num_tokens // tokens,),
        grid_names=("block",),
        scratch_types=dict(staged=plgpu.SMEM((tokens, *shape), x.dtype), here=plgpu.Barrier()),
    )
    return kernel(x.reshape(num_tokens, *shape), rows).reshape(num_rows, hidden_size)


def _dispatch_kernel(x: Ref, rows: Ref, out: Ref, *, staged: Ref, here: Ref, tokens: int) -> None:
    """One block: some tokens."""
    start = jax.lax.axis_index("block") * tokens
    plgpu.copy_gmem_to_smem(x.at[pl.ds(start, tokens)], staged, here)
    plgpu.barrier_wait(here)

    @pl.loop(0, tokens)
    def _(i: jax.Array) -> None:
        # All asked for before one is used.
        targets = [rows[start + i, choice] for choice in range(rows.shape[1])]
        for target in targets:
            copy = functools.partial(plgpu.copy_smem_to_gmem, staged.at[i], out.at[target])
            pl.when(target >= 0)(copy)

    plgpu.wait_smem_to_gmem(0)


def _combine(outputs: jax.Array, rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Each token's outputs, weighted and summed in the order of its choices -> [T, D]."""
    num_tokens, hidden_size = rows.shape[0], outputs.shape[1]
    if hidden_size % _THREADS:
        return _combine_unaligned(outputs, rows, weights)
    kernel = plgpu.kernel(
        _combine_kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens, hidden_size), outputs.dtype),
        kernel_name="moe_combine",
        grid=(num_tokens,),
        grid_names=("token",),
    )
    return kernel(outputs, rows, weights)


def _combine_kernel(outputs: Ref, rows: Ref, weights: Ref, out: Ref) -> None:
    """One block: one token."""
    token, (hidden_size,) = jax.lax.axis_index("token"), out.shape[1:]
    choices = range(rows.shape[1])
    vector = next(n for n in (8, 4, 2, 1) if hidden_size % (_THREADS * n) == 0)
    layout = plgpu.Layout.WG_STRIDED((hidden_size,), vec_size=vector)
    targets = [rows[token, choice] for choice in choices]
    shares = [weights[token, choice] for choice in choices]
    # All asked for before one is used. One that does not count reads what nobody may have written.
    values = [
        plgpu.load(outputs.at[jnp.maximum(target, 0)], layout=layout, optimized=False)
        for target in targets
    ]
    total = plgpu.layout_cast(jnp.zeros((hidden_size,), jnp.float32), layout)
    for target, share, value in zip(targets, shares, values, strict=True):
        weighted = value.astype(jnp.float32) * share
        is_counted = jnp.broadcast_to(target, weighted.shape) >= 0
        total = total + jnp.where(is_counted, weighted, 0.0)
    out[token] = total.astype(out.dtype)


def _combine_unaligned(outputs: jax.Array, rows: jax.Array, weights: jax.Array) -> jax.Array:
    """The same of outputs that a warpgroup's threads cannot share out evenly."""
    num_tokens, top_k = weights.shape
    is_counted = rows >= 0
    rows = jnp.maximum(rows, 0)  # one that nobody may have written
    total = jnp.zeros((num_tokens, outputs.shape[1]), jnp.float32)
    for choice in range(top_k):
        values = outputs.at[rows[:, choice]].get(mode="promise_in_bounds")
        weighted = values.astype(jnp.float32) * weights[:, choice, None]
        total = total + jnp.where(is_counted[:, choice, None], weighted, 0.0)
    return total.astype(outputs.dtype)
