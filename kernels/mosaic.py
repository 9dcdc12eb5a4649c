"""What the Mosaic kernels have in common: the calls they take, their tiles in memory, division."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
"""Query heads that share a kv head, at most."""
MASKED = -1e30
"""Below every score, but finite: keys of which none is visible must not turn into NaN."""
SWIZZLED = (  # jax declares a method of both abstract that only its interpreter needs
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
"""How a tile lies in shared memory for a product to read it."""
SWIZZLED_FLOATS = (
    plgpu.TilingTransform((8, 32)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
"""The same of float32, on its way out."""

CUSTOM_CALLS = ("mosaic_gpu_v2",)
"""Calls in a lowered program that stand for a kernel, itself a part of the program."""

Ref = Any
"""A reference inside a kernel; Pallas has no public type for it."""


def decline_unless_covered(
    what: str,
    x: jax.Array,
    pool: jax.Array,
    *,
    group: int,
    page_sizes: tuple[int, ...],
    kernels: str,
) -> None:
    """Declines what no kernel over paged keys and values takes.

    Args:
      what: x in words, with its verb.
      x: [..., H].
      pool: [P, K, 2, page_size, H].
      group: query heads that share a kv head.
      page_sizes: what the kernel takes.
      kernels: as in `Tiling.kernels`.

    Raises:
      NotImplementedError: with the reason.
    """
    head_dim, page_size = x.shape[-1], pool.shape[3]
    if kernels != "mosaic":
        raise NotImplementedError(f"kernels are {kernels!r}, not 'mosaic'")
    if x.dtype != jnp.bfloat16 or pool.dtype != jnp.bfloat16:
        raise NotImplementedError(f"{what} {x.dtype} and pages {pool.dtype}, not bfloat16")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim is {head_dim}, not one of {HEAD_DIMS}")
    if group > MAX_GROUP:
        raise NotImplementedError(f"{group} queries share a kv head, at most {MAX_GROUP} may")
    if page_size not in page_sizes:
        raise NotImplementedError(f"page_size is {page_size}, not one of {page_sizes}")


def decline_past_32_bits(pool: jax.Array) -> None:
    """Declines a pool [P, K, 2, page_size, H] whose rows of H have no 32-bit number.

    Raises:
      NotImplementedError: with the pages.
    """
    if pool.size // pool.shape[-1] >= 2**31:
        raise NotImplementedError(f"a pool of {pool.shape[0]} pages is past 32-bit row numbers")


def soft_capped(scores: jax.Array, scale: float, soft_cap: float) -> jax.Array:
    """c tanh(scale * scores / c), as c - 2 c / (1 + e^(2 scale * scores / c)).

    The device's own tanh knows 11 bits; a division's special cases would not stay in registers.
    """
    grown = jnp.exp2(scores * (2 * math.log2(math.e) * scale / soft_cap))
    return soft_cap - 2 * soft_cap * jnp.exp2(-jnp.log2(1 + grown))


def div_rem(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient rounded towards zero, and remainder."""
    return jax.lax.div(x, jnp.int32(divisor)), jax.lax.rem(x, jnp.int32(divisor))


def round_up(x: int, multiple: int) -> int:
    """The least multiple that is not below x."""
    return -(-x // multiple) * multiple
