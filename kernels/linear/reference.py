"""Products with a dense weight in plain JAX, the kernels' truth; XLA picks the device's kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LEAST_ROWS, _LARGE = 8, 2**20
"""Rows of the smallest product of a tensor core, and elements of a weight that is worth one."""


def product(x: jax.Array, weight: jax.Array, *, kernels: str = "plain") -> jax.Array:
    """x [T, K] times weight [K, N...] -> [T, N...], summed in float32, rounded to x's dtype.

    Args:
      x: of one dtype with the weight.
      weight: as models store it, inputs first.
      kernels: what the device can run; plain JAX runs everywhere.
    """
    if x.shape[0] == 1 and weight.size >= _LARGE and x.dtype == jnp.bfloat16:
        # XLA may make a product and a sum of one row: 28 us for 4096 x 2048, 6 us for 8 rows.
        return product(jnp.pad(x, ((0, _LEAST_ROWS - 1), (0, 0))), weight, kernels=kernels)[:1]
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (0,)), ((), ())),
        precision=precision_of(x.dtype),
        preferred_element_type=x.dtype,
    )


def parts(x: jax.Array, weight: jax.Array, *, kernels: str = "plain") -> jax.Array:
    """The same as parts [S, T, N...] that add up to it, first to last; float32 where S is not 1.

    Whoever takes a product to add it to something adds up the parts as well.
    """
    return product(x, weight, kernels=kernels)[None]


def gated(x: jax.Array, weight: jax.Array, *, kernels: str = "plain") -> jax.Array:
    """silu(gate) * up of x [T, K], for weight [K, 2, F] of gate and up -> [T, F].

    Both products are rounded to x's dtype, and so is silu of the first.
    """
    halves = product(x, weight, kernels=kernels)
    return jax.nn.silu(halves[:, 0]) * halves[:, 1]


def precision_of(dtype: jnp.dtype) -> jax.lax.Precision:
    """Float32 operands are multiplied as float32 everywhere (a GPU would round them to TF32)."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
