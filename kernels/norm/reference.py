"""Residual and norm in plain JAX, the kernel's truth: an update is added, the sum is normed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels.qkv.reference import rms_norm


def add_norm(
    residual: jax.Array,
    parts: jax.Array,
    vectors: jax.Array,
    *,
    scale_at: int,
    eps: float,
    kernels: str = "plain",
) -> tuple[jax.Array, jax.Array]:
    """Adds an update to the residual stream and norms the sum.

    Args:
      residual: [T, D].
      parts: [S, T, D], add up to the update: in their own dtype, first to last, and rounded to the
        residual's.
      vectors: 1-D in the residual's dtype, holds the norm's scale among others.
      scale_at: where in `vectors` the scale [D] begins.
      eps: added to the mean square inside the norm's root.
      kernels: what the device can run; plain JAX runs everywhere.

    Returns:
      The sum and its norm, [T, D] each in the residual's dtype.
    """
    del kernels
    update = functools.reduce(jnp.add, [parts[i] for i in range(parts.shape[0])])
    hidden = residual + update.astype(residual.dtype)
    scale = jax.lax.slice(vectors, (scale_at,), (scale_at + residual.shape[1],))
    return hidden, rms_norm(hidden, scale, eps)
