"""Paged attention: every new token attends to its own request's pages."""

from __future__ import annotations

import functools
from typing import Any

import jax

from kernels.attention import decode as mosaic_decode
from kernels.attention import prefill as mosaic_prefill
from kernels.attention import reference
from kernels.dispatch import Dispatch
from kernels.linear import api as linear_api
from kernels.tuning import Tunable

decode = Dispatch(
    "attention.decode",
    [("mosaic", mosaic_decode.decode), ("reference", reference.decode)],
    Tunable(mosaic_decode.shape_of, mosaic_decode.candidates),
)
"""Rows of a fixed query length. See `reference.decode` for the contract."""

prefill = Dispatch(
    "attention.prefill", [("mosaic", mosaic_prefill.prefill), ("reference", reference.prefill)]
)
"""Chunks of any length. See `reference.prefill` for the contract."""


def apart(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    kv_lens: jax.Array,
    weight: jax.Array,
    *,
    kernels: str,
    **look: Any,
) -> jax.Array:
    """Attends rows of equal query length and multiplies what comes of it.

    Args:
      q: [R, Q, N, H], as in `reference.decode`, and so are the others.
      pool: pages.
      page_table: of each row.
      positions: of each query.
      kv_lens: of each row.
      weight: [N * H, D].
      kernels: what the device can run.
      **look: the rest of `reference.decode`.

    Returns:
      Parts [S, R * Q, D], which add up to the product.
    """
    out = decode(q, pool, page_table, positions, kv_lens, kernels=kernels, **look)
    return linear_api.parts(out.reshape(-1, weight.shape[0]), weight, kernels=kernels)


decode_times = Dispatch(
    "attention.decode_times",
    [
        ("mosaic", mosaic_decode.times),
        ("registers", functools.partial(mosaic_decode.times, from_registers=True)),
        # As the first two, with weights prefetched; how many is a setting.
        ("prefetched", mosaic_decode.times),
        ("registers_prefetched", functools.partial(mosaic_decode.times, from_registers=True)),
        ("apart", apart),
    ],
    Tunable(mosaic_decode.times_shape_of, mosaic_decode.times_candidates),
)
"""Decode attention and the product of it. See `apart` for the contract."""
