"""Norm and product of one token on Hopper in one kernel: weights stream while the token is normed.

Every block norms the token for itself, in the order of `kernels.norm`. Its first weights are on
their way meanwhile, so that costs little. The rest is as in `few_tokens`, but that a block takes
its inputs from the token that it has normed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.linear import few_tokens
from kernels.linear.few_tokens import Memory, Plan, Share
from kernels.mosaic import SWIZZLED, Ref
from kernels.norm import rows

_MULTIPROCESSORS = 132
"""Of an H100 or H200."""
_TILES = 2
"""Steps whose inputs lie ready: one is multiplied while the next is written."""
_PER_INPUT = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class _Plan(Plan):
    """Everything static of one kernel's product."""

    @property
    def blocks(self) -> int:
        """So few have a multiprocessor each: more weights are on their way then."""
        num_blocks = self.outputs // few_tokens.WIDTH * self.splits
        return 1 if num_blocks <= _MULTIPROCESSORS else super().blocks

    @property
    def token_bytes(self) -> tuple[int, int]:
        """Nothing comes with a step; the token, its tiles and a reduction's scratch are kept."""
        return 0, self.inputs * 2 + _TILES * 64 * self.depth * 2 + 1024


def normed(
    residual: jax.Array,
    parts: jax.Array,
    vectors: jax.Array,
    weight: jax.Array,
    *,
    form: str,
    scale_at: int,
    eps: float,
    kernels: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds, norms and multiplies; see `api.normed`.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    num_tokens, hidden_size = residual.shape
    if num_tokens > 1:
        raise NotImplementedError(f"{num_tokens} tokens, not one")
    norm = rows.planned(residual, parts, vectors, scale_at=scale_at, eps=eps, kernels=kernels)
    plan, shape = few_tokens.planned(form, residual, weight, kernels)
    plan = _Plan(**dataclasses.asdict(plan))
    total, token, out = _normed(plan, norm)(
        residual, parts, vectors, weight.reshape(hidden_size, -1)
    )
    return total, token, out.reshape(shape)


def _normed(plan: _Plan, norm: rows.Plan) -> Any:
    """(residual, parts, vectors, weight) -> sum, norm, and what `Plan.out_type` says."""
    token = jax.ShapeDtypeStruct((1, plan.inputs), jnp.bfloat16)
    tiles = (_TILES, 64, plan.depth)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan, norm=norm),
        out_type=(token, token, plan.out_type),
        kernel_name=f"normed_{few_tokens.NAMES[plan.form]}",
        grid=(plan.outputs // few_tokens.WIDTH, plan.splits),
        grid_names=("panel", "split"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=dict(
            token=plgpu.SMEM((plan.inputs,), jnp.bfloat16),
            tiles=plgpu.SMEM(tiles, jnp.bfloat16, transforms=SWIZZLED),
            **plan.scratch,
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )


def _kernel(
    residual: Ref,
    parts: Ref,
    vectors: Ref,
    weight: Ref,
    hidden: Ref,
    normed: Ref,
    out: Ref,
    *,
    token: Ref,
    tiles: Ref,
    plan: _Plan,
    norm: rows.Plan,
    **scratch: Ref,
) -> None:
    """One block."""
    memory, share = Memory(**scratch), few_tokens.own_share(plan)

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def _() -> None:
        total, result = rows.normed_token(residual, parts, vectors, 0, norm)
        token[...] = result
        plgpu.commit_smem()

        @pl.when(share.panel + share.split == 0)
        def _() -> None:
            hidden[0] = total
            normed[0] = result

        inputs_of = functools.partial(_tile, token, tiles, share, plan)
        sums = few_tokens.multiplied(memory, share, inputs_of, plan)
        few_tokens.write(sums, out, memory, share, plan)

    @pl.when(jax.lax.axis_index("warpgroup") == 1)
    def _() -> None:
        few_tokens.fetch(weight, memory, share, plan)


def _tile(token: Ref, tiles: Ref, share: Share, plan: _Plan, i: jax.Array) -> Ref:
    """The inputs of step i as rows of a product: the first 8 are alike, others hold anything."""
    slot = jax.lax.rem(i, jnp.int32(_TILES))
    start = pl.multiple_of((share.first + i) * plan.depth, plan.depth)
    inputs = plgpu.load(token.at[pl.ds(start, plan.depth)], layout=_PER_INPUT, optimized=False)
    rows_of = tiles.at[slot, pl.ds(0, 8)]
    rows_of.T[...] = jax.lax.broadcast_in_dim(inputs, (plan.depth, 8), [0])
    plgpu.commit_smem()
    return tiles.at[slot]
