"""Products of a larger decode step: XLA multiplies some inputs apart and leaves the parts.

So many tokens make too few tiles to keep the device busy. XLA then splits the inputs by itself and
adds the parts up in a kernel of its own; left as they are, the next norm adds them up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.linear import few_tokens

MAX_TOKENS = 256
"""Of more, tiles of the whole product keep an H100 or H200 busy."""


def parts(x: jax.Array, weight: jax.Array, *, kernels: str) -> jax.Array:
    """See `reference.parts`: f32[S, T, N] of as many splits as fewer tokens have.

    Raises:
      NotImplementedError: the call is outside what gains by it.
    """
    if kernels != "mosaic":
        raise NotImplementedError(f"kernels are {kernels!r}, not 'mosaic'")
    if x.dtype != jnp.bfloat16 or weight.ndim != 2:
        raise NotImplementedError(f"x is {x.dtype} and weight of {weight.ndim} dimensions")
    num_tokens, inputs = x.shape
    if num_tokens > MAX_TOKENS:
        raise NotImplementedError(f"{num_tokens} tokens, at most {MAX_TOKENS} may be")
    splits = few_tokens.splits_of(inputs, weight.shape[1])
    if splits == 1 or inputs % splits:
        raise NotImplementedError(f"{inputs} inputs in {splits} splits")
    return jax.lax.dot_general(
        x.reshape(num_tokens, splits, -1),
        weight.reshape(splits, -1, weight.shape[1]),
        (((2,), (1,)), ((1,), (0,))),
        preferred_element_type=jnp.float32,
    )
