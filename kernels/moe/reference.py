"""Mixture of experts in plain JAX, every kernel's truth: choose, group rows by expert, combine."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_TINY = 1e-20  # what published sigmoid routers add to the sum that they divide by
_MIN_TILE_ROWS = 8
_MAX_TILE_ROWS = 64
_MAX_ROW_BLOCK = 64


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    is_real: jax.Array,
    *,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int = 1,
    top_groups: int = 1,
    kernels: str = "plain",
) -> tuple[jax.Array, jax.Array]:
    """Chooses each token's experts; equal scores go to the lowest id.

    Args:
      logits: f32[T, E].
      bias: f32[E], added to the scores for the choice only; None: nothing is.
      is_real: bool[T], False for padding.
      top_k: experts of one token.
      scoring: "softmax" over all experts, or "sigmoid" of each.
      renormalize: weights are divided by their sum.
      scale: multiplies the weights last.
      num_groups: groups of neighbouring experts.
      top_groups: groups a token may choose from. A group counts as much as its best expert
        (softmax) or the sum of its two best (sigmoid); a tie goes to the lowest group.
      kernels: what the device can run; plain JAX runs everywhere.

    Returns:
      i32[T, top_k] ids, best first and all different, and their f32[T, top_k] weights. Padding
      has id E and weight 0. A token with a score that is NaN has valid ids and weights of NaN.

    Raises:
      ValueError: for a scoring that is not known.
    """
    del kernels
    num_experts = logits.shape[-1]
    scores = _scores(logits, scoring)
    choice = scores if bias is None else scores + bias[None]
    is_bad = jnp.isnan(choice).any(axis=-1, keepdims=True)
    choice = jnp.where(jnp.isnan(choice), -jnp.inf, choice)
    if top_groups < num_groups:
        choice = _within_groups(choice, num_groups, top_groups, scoring)
    ids, hits = _best(choice, top_k)
    weights = [jnp.sum(jnp.where(hit, scores, 0.0), axis=-1) for hit in hits]
    if renormalize:
        total = sum(weights[1:], weights[0])
        total = total + _TINY if scoring == "sigmoid" else total
        weights = [weight / total for weight in weights]
    scaled = jnp.stack(weights, axis=-1) * jnp.float32(scale)
    scaled = jnp.where(is_bad, jnp.nan, scaled)
    is_real = is_real[:, None]
    ids = jnp.where(is_real, jnp.stack(ids, axis=-1), num_experts)
    return ids, jnp.where(is_real, scaled, 0.0)


def _scores(logits: jax.Array, scoring: str) -> jax.Array:
    if scoring == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    if scoring == "sigmoid":
        return jax.nn.sigmoid(logits)
    raise ValueError(f"scoring is {scoring!r}; known: softmax, sigmoid")


def _within_groups(choice: jax.Array, num_groups: int, top_groups: int, scoring: str) -> jax.Array:
    """The scores [T, E] of the best groups; those of the others can no longer win."""
    num_tokens, num_experts = choice.shape
    grouped = choice.reshape(num_tokens, num_groups, num_experts // num_groups)
    if scoring == "softmax":
        group_scores = grouped.max(axis=-1)
    else:
        _, hits = _best(grouped, min(2, grouped.shape[-1]))
        best = [jnp.sum(jnp.where(hit, grouped, 0.0), axis=-1) for hit in hits]
        group_scores = sum(best[1:], best[0])
    _, hits = _best(group_scores, top_groups)
    is_kept = jnp.any(jnp.stack(hits), axis=0)[:, :, None]
    return jnp.where(is_kept, grouped, -jnp.inf).reshape(num_tokens, num_experts)


def _best(scores: jax.Array, count: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """The `count` best of the last axis, best first: ids i32[...] and one-hot bool[..., E] each.

    Rounds of max and mask, so that a tie goes to the lowest id; no id is chosen twice, whatever
    the scores are.
    """
    size, axis = scores.shape[-1], scores.ndim - 1
    number = jax.lax.broadcasted_iota(jnp.int32, scores.shape, axis)
    is_open = jnp.ones(scores.shape, jnp.bool_)
    ids, hits = [], []
    for _ in range(count):
        high = jnp.max(jnp.where(is_open, scores, -jnp.inf), axis=-1, keepdims=True)
        is_highest = jnp.logical_and(is_open, scores == high)
        chosen = jnp.min(jnp.where(is_highest, number, size), axis=-1)
        hit = number == chosen[..., None]
        is_open = jnp.logical_and(is_open, jnp.logical_not(hit))
        ids.append(chosen)
        hits.append(hit)
    return ids, hits


def row_block(intermediate_size: int) -> int:
    """Rows of one block of gate or up in `gate_up`: the largest power of two up to 64 in F."""
    return math.gcd(intermediate_size, _MAX_ROW_BLOCK)


def experts(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    kernels: str = "plain",
) -> jax.Array:
    """Every token's weighted sum over its experts' outputs, down(silu(gate(x)) * up(x)).

    A token's result depends on nothing but its own row: not on its neighbours, nor its place.

    Args:
      x: [T, D].
      expert_ids: i32[T, k], all different within a token; E for a choice that does not count.
      weights: f32[T, k].
      gate_up: [E, 2 F, D], rows in blocks of `row_block(F)`: gate, up, gate, up, ...
      down: [E, D, F].
      kernels: what the device can run; plain JAX runs everywhere.

    Returns:
      Parts [S, T, D] that add up to it, first to last: float32, or one in x's dtype. Products are
      summed in float32, silu(gate) * up is rounded to x's dtype, and the outputs are weighted and
      summed in float32, in the order of the choices.
    """
    del kernels
    num_tokens, top_k = expert_ids.shape
    num_experts, hidden_size = down.shape[0], x.shape[-1]
    tile_rows = _tile_rows(num_tokens * top_k, num_experts)
    tiles = tile_table(expert_ids, num_experts, tile_rows)

    def run_tile(out: jax.Array, expert: jax.Array, start: jax.Array) -> jax.Array:
        tokens = jax.lax.dynamic_slice(tiles.tokens, (start,), (tile_rows,))
        rows = _expert(x[tokens], _at(gate_up, expert), _at(down, expert))
        # Rows past the expert's last one are the next expert's, whose own tile comes later.
        return jax.lax.dynamic_update_slice(out, rows, (start, 0))

    def step(out: jax.Array, tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        expert, start = tile
        is_used = expert < num_experts
        return jax.lax.cond(is_used, run_tile, lambda out, *_: out, out, expert, start), None

    out = jnp.zeros((tiles.tokens.shape[0], hidden_size), jnp.float32)
    out, _ = jax.lax.scan(step, out, (tiles.experts, tiles.starts))
    total = jnp.zeros((num_tokens, hidden_size), jnp.float32)
    for choice in range(top_k):
        # A choice that does not count has a row past the end, which reads as zeros.
        rows = out.at[tiles.rows[:, choice]].get(mode="fill", fill_value=0)
        total = total + rows * weights[:, choice, None]
    return total.astype(x.dtype)[None]


class Tiles(NamedTuple):
    """Rows grouped by expert, in token order within one, and cut into tiles of one expert each."""

    experts: jax.Array
    """i32[tiles], in rising order; E for an unused tile."""
    starts: jax.Array
    """i32[tiles], first row of each; it may reach past its expert's last row."""
    tokens: jax.Array
    """i32[T k + tile rows], token of each row; 0 past the last one."""
    rows: jax.Array
    """i32[T, k], row of each choice; T k + tile rows for one that does not count."""


def tile_table(expert_ids: jax.Array, num_experts: int, tile_rows: int) -> Tiles:
    """Sorts nothing: a row's place is its expert's first row and the tokens before it there.

    Args:
      expert_ids: i32[T, k], all different within a token; E for a choice that does not count.
      num_experts: E.
      tile_rows: rows of a tile.
    """
    num_tokens, top_k = expert_ids.shape
    size = num_tokens * top_k
    number = jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    hits = jnp.sum(expert_ids[:, :, None] == number, axis=1, dtype=jnp.int32)  # [T, E]
    upto = jnp.cumsum(hits, axis=0, dtype=jnp.int32)
    counts = upto[-1]
    first_rows = jnp.cumsum(counts, dtype=jnp.int32) - counts
    num_tiles = -(-counts // tile_rows)
    last_tiles = jnp.cumsum(num_tiles, dtype=jnp.int32)
    most = (size + min(num_experts, size) * (tile_rows - 1)) // tile_rows
    tile = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.sum(tile[:, None] >= last_tiles[None], axis=1, dtype=jnp.int32)
    is_used = expert < num_experts
    known = jnp.where(is_used, expert, 0)
    starts = first_rows[known] + (tile - (last_tiles - num_tiles)[known]) * tile_rows
    is_counted = expert_ids < num_experts
    known = jnp.where(is_counted, expert_ids, 0)
    before = jnp.take_along_axis(upto - hits, known, axis=1)
    rows = jnp.where(is_counted, first_rows[known] + before, size + tile_rows)
    token = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], rows.shape)
    tokens = jnp.zeros(size + tile_rows, jnp.int32).at[rows].set(token, mode="drop")
    return Tiles(expert, jnp.where(is_used, starts, 0), tokens, rows)


def _tile_rows(size: int, num_experts: int) -> int:
    """The mean rows of an expert, as a power of two."""
    mean = -(-size // num_experts)
    return min(_MAX_TILE_ROWS, max(_MIN_TILE_ROWS, 1 << (mean - 1).bit_length()))


def _at(stacked: jax.Array, expert: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stacked, expert, keepdims=False)


def _expert(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """x [rows, D] through one expert, [2 F, D] and [D, F] -> f32 [rows, D]."""
    block = row_block(down.shape[-1])
    halves = _product(x, gate_up).reshape(x.shape[0], -1, 2, block)
    hidden = jax.nn.silu(halves[:, :, 0]) * halves[:, :, 1]
    return _product(hidden.reshape(x.shape[0], -1).astype(x.dtype), down)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [rows, in] by a weight [out, in] -> f32 [rows, out]."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
