"""Choice of experts on Hopper: a warp per token, its scores spread over the lanes.

All of a token's rounds of maximum and mask run in registers. What follows of the ids and weights,
padding among it, is left to XLA, which makes it part of what reads them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import Ref

Layout = Any  # Pallas has no public type for it.

_ROWS = 4
"""Tokens of a block, a warp each."""
_LANES = 32
_NUM_EXPERTS = (32, 64, 128, 256)
_MAX_TOP_K = 16
_SCORINGS = ("softmax", "sigmoid")
_TINY = 1e-20  # as the reference adds
_LOWEST = -3e38
"""A score that is NaN, for the choice: finite, so that experts chosen before are lower still."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static of one kernel."""

    num_tokens: int
    num_experts: int
    top_k: int
    scoring: str
    renormalize: bool
    scale: float

    @property
    def tokens(self) -> int:
        """Tokens of a block that are needed: as many as cut all of them evenly."""
        return next(n for n in (4, 2, 1) if self.num_tokens % n == 0)

    @property
    def layout(self) -> Layout:
        """Of [4, E]: a row lies in the lanes of one warp."""
        tiling = fragmented_array.Tiling(((_ROWS, self.num_experts), (self.num_experts // _LANES,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


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
    """Chooses each token's experts; see `reference.route`.

    Scores may differ from the reference's in their last bits, and a choice with them where two are
    so near each other.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    num_tokens, num_experts = logits.shape
    _decline(logits, bias, top_k, scoring, top_groups < num_groups, kernels)
    plan = _Plan(num_tokens, num_experts, top_k, scoring, renormalize, scale)
    operands = [logits] if bias is None else [logits, bias]
    ids, weights = (
        x[:, :, : plan.tokens].swapaxes(1, 2).reshape(num_tokens, top_k)
        for x in _choose(plan)(*operands)
    )
    is_real = is_real[:, None]
    return jnp.where(is_real, ids, num_experts), jnp.where(is_real, weights, 0.0)


def _decline(
    logits: jax.Array,
    bias: jax.Array | None,
    top_k: int,
    scoring: str,
    has_groups: bool,
    kernels: str,
) -> None:
    num_experts = logits.shape[1]
    if kernels != "mosaic":
        raise NotImplementedError(f"kernels are {kernels!r}, not 'mosaic'")
    if scoring not in _SCORINGS:
        raise NotImplementedError(f"scoring is {scoring!r}, not one of {_SCORINGS}")
    if logits.dtype != jnp.float32 or (bias is not None and bias.dtype != jnp.float32):
        bias_dtype = None if bias is None else bias.dtype
        raise NotImplementedError(f"logits are {logits.dtype} and bias {bias_dtype}, not float32")
    if num_experts not in _NUM_EXPERTS:
        raise NotImplementedError(f"experts are {num_experts}, not one of {_NUM_EXPERTS}")
    if top_k > _MAX_TOP_K:
        raise NotImplementedError(f"top_k is {top_k}, at most {_MAX_TOP_K} may be")
    if has_groups:
        raise NotImplementedError("the choice is limited to some groups of experts")


def _choose(plan: _Plan) -> Any:
    """(logits, bias or nothing) -> i32 and f32[blocks, k, 4], ids and weights of every token."""
    blocks = plan.num_tokens // plan.tokens
    shape = (blocks, plan.top_k, _ROWS)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        kernel_name="moe_route",
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=dict(
            staged=plgpu.SMEM((_ROWS, plan.num_experts), jnp.float32), here=plgpu.Barrier()
        ),
    )


def _kernel(logits: Ref, *others: Ref, staged: Ref, here: Ref, plan: _Plan) -> None:
    """One block: some tokens. Rows past them hold anything and are not used."""
    *biases, ids, weights = others
    block = jax.lax.axis_index("block")
    source = logits.at[pl.ds(block * plan.tokens, plan.tokens)]
    plgpu.copy_gmem_to_smem(source, staged.at[pl.ds(0, plan.tokens)], here)
    plgpu.barrier_wait(here)
    scores = _scores(plgpu.load(staged, layout=plan.layout, optimized=False), plan)
    choice = scores
    for ref in biases:
        bias = plgpu.load(ref, layout=plan.layout.reduce(0), optimized=False)
        choice = choice + jax.lax.broadcast_in_dim(bias, scores.shape, [1])
    is_bad = jnp.where(choice == choice, 0.0, 1.0).max(axis=1) > 0.0
    choice = jnp.where(choice == choice, choice, _LOWEST)
    number = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plan.layout)
    number = number.astype(jnp.float32)
    found = []
    for place in range(plan.top_k):
        high = choice.max(axis=1)
        is_highest = choice == _per_row(high, choice)
        chosen = jnp.where(is_highest, number, float(plan.num_experts)).min(axis=1)
        hit = number == _per_row(chosen, choice)
        ids[block, place] = chosen.astype(jnp.int32)
        found.append(jnp.where(hit, scores, 0.0).sum(axis=1) if biases else high)
        choice = jnp.where(hit, -jnp.inf, choice)
    if plan.renormalize:
        total = functools.reduce(jnp.add, found)
        total = total + _TINY if plan.scoring == "sigmoid" else total
        found = [weight / total for weight in found]
    for place, weight in enumerate(found):
        weights[block, place] = jnp.where(is_bad, jnp.nan, weight * plan.scale)


def _scores(logits: jax.Array, plan: _Plan) -> jax.Array:
    if plan.scoring == "sigmoid":
        return 1.0 / (1.0 + jnp.exp(-logits))
    shares = jnp.exp(logits - _per_row(logits.max(axis=1), logits))
    return shares / _per_row(shares.sum(axis=1), shares)


def _per_row(x: jax.Array, like: jax.Array) -> jax.Array:
    """x [4] -> [4, E] of `like`."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])
