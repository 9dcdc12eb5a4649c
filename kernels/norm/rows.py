"""Adds an update to the residual stream and norms the sum on Hopper: a block per token, all in one.

A token's values lie in the registers of one warpgroup, so memory is read once and written once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.mosaic import Ref

_THREADS = 128
_VECTOR = 8
"""Values of one load of 16 bytes."""
_MOST = 64
"""Values of one thread, at most: more would not stay in its registers."""
_MOST_PARTS = 16
_MOST_TOGETHER = 2**15
"""Values of all parts of a token, at most: more would not stay in registers either."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static of one kernel."""

    num_tokens: int
    hidden_size: int
    num_parts: int
    scale_at: int
    eps: float

    @property
    def layout(self) -> Any:
        """Of [D]: neighbouring threads hold neighbouring values, by 16 bytes at most."""
        vector = next(n for n in (_VECTOR, 4, 2, 1) if self.hidden_size % (_THREADS * n) == 0)
        return plgpu.Layout.WG_STRIDED((self.hidden_size,), vec_size=vector)


def add_norm(
    residual: jax.Array,
    parts: jax.Array,
    vectors: jax.Array,
    *,
    scale_at: int,
    eps: float,
    kernels: str,
) -> tuple[jax.Array, jax.Array]:
    """Adds and norms every token; see `reference.add_norm`.

    Every step is rounded as the reference's text has it; the sum of squares runs in another order,
    which is that of a token alone.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    plan = planned(residual, parts, vectors, scale_at=scale_at, eps=eps, kernels=kernels)
    return _add_norm(plan)(residual, parts, vectors)


def planned(
    residual: jax.Array,
    parts: jax.Array,
    vectors: jax.Array,
    *,
    scale_at: int,
    eps: float,
    kernels: str,
) -> Plan:
    """What `normed` has to know.

    Raises:
      NotImplementedError: the call is outside what the kernel covers.
    """
    _decline(residual, parts, vectors, scale_at, kernels)
    num_tokens, hidden_size = residual.shape
    return Plan(
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        num_parts=parts.shape[0],
        scale_at=scale_at,
        eps=eps,
    )


def _decline(
    residual: jax.Array, parts: jax.Array, vectors: jax.Array, scale_at: int, kernels: str
) -> None:
    hidden_size = residual.shape[1]
    if kernels != "mosaic":
        raise NotImplementedError(f"kernels are {kernels!r}, not 'mosaic'")
    if residual.dtype != jnp.bfloat16 or vectors.dtype != jnp.bfloat16:
        dtypes = f"{residual.dtype} and {vectors.dtype}"
        raise NotImplementedError(f"residual and scale are {dtypes}, not bfloat16")
    if parts.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"parts are {parts.dtype}, not bfloat16 or float32")
    if parts.dtype == jnp.bfloat16 and parts.shape[0] > 1:
        raise NotImplementedError(f"{parts.shape[0]} parts are bfloat16, only one may be")
    most = min(_MOST_PARTS, _MOST_TOGETHER // hidden_size)
    if parts.shape[0] > most:
        raise NotImplementedError(f"{parts.shape[0]} parts, at most {most} may be")
    if hidden_size % _THREADS or hidden_size > _THREADS * _MOST:
        raise NotImplementedError(
            f"hidden_size is {hidden_size}, not a multiple of {_THREADS} up to {_THREADS * _MOST}"
        )
    if scale_at % _VECTOR:
        raise NotImplementedError(f"the scale starts at {scale_at}, not a multiple of {_VECTOR}")


def _add_norm(plan: Plan) -> Any:
    """(residual, parts, vectors) -> sum, norm."""
    out = jax.ShapeDtypeStruct((plan.num_tokens, plan.hidden_size), jnp.bfloat16)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(out, out),
        kernel_name="add_norm",
        grid=(plan.num_tokens,),
        grid_names=("token",),
    )


def _kernel(
    residual: Ref, parts: Ref, vectors: Ref, hidden: Ref, normed: Ref, *, plan: Plan
) -> None:
    """One block: one token."""
    token = jax.lax.axis_index("token")
    total, result = normed_token(residual, parts, vectors, token, plan)
    hidden[token] = total
    normed[token] = result


def normed_token(
    residual: Ref, parts: Ref, vectors: Ref, token: jax.Array | int, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """The sum [D] of one token's values, read from global memory by a warpgroup, and its norm."""

    def load(source: Ref) -> jax.Array:
        values = plgpu.load(source, layout=plan.layout, optimized=False)
        return values.astype(jnp.float32)

    # Asked for before anything waits: the loads are under way together.
    scale = load(vectors.at[pl.ds(plan.scale_at, plan.hidden_size)])
    before = load(residual.at[token])
    update = functools.reduce(jnp.add, [load(parts.at[i, token]) for i in range(plan.num_parts)])
    total = _rounded(before + _rounded(update))
    mean = (total * total).sum() / plan.hidden_size
    inverse = jax.lax.rsqrt(mean + plan.eps)
    normed = _rounded(total * inverse) * scale
    return total.astype(jnp.bfloat16), normed.astype(jnp.bfloat16)


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)
