"""The gated MLP of a dense layer and of shared experts: its parameters and its product."""

from __future__ import annotations

import jax
import numpy as np

from kernels.linear import api
from models import layers
from models.checkpoint import Leaf, Part
from models.layers import Dense
from models.stream import Stream


def leaves(
    hidden_size: int, intermediate_size: int, gate: str, up: str, down: str
) -> dict[str, Leaf]:
    """Parameters `gate_up` [D, 2, F] and `down` [F, D], read from the tensors of these names."""
    d, f = hidden_size, intermediate_size
    return {
        "gate_up": Leaf(
            shape=(d, 2, f),
            parts=tuple(
                Part(name, (f, d), (slice(None), half), np.transpose)
                for half, name in enumerate((gate, up))
            ),
            partition=(None, None, "tensor"),
            node=Dense,
            fan_in=d,
        ),
        "down": Leaf(
            shape=(f, d),
            parts=(Part(down, (d, f), (), np.transpose),),
            partition=("tensor", None),
            node=Dense,
            fan_in=f,
        ),
    }


def gated(x: jax.Array, gate_up: Dense, down: Dense, *, kernels: str) -> jax.Array:
    """down(silu(gate(x)) * up(x)), x [T, D] -> parts [S, T, D] of it."""
    return down.parts(api.gated(x, gate_up.kernel, kernels=kernels), kernels)


def normed_and_gated(
    stream: Stream,
    gate_up: Dense,
    down: Dense,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The stream's sum [T, D], and parts [S, T, D] of what `gated` makes of its norm.

    Biases are [2, F] and [D].
    """
    if gate_up_bias is None:
        hidden, _, inner = stream.times(gate_up, "gated")
    else:
        hidden, _, halves = stream.times(gate_up, "product")  # [T, 2, F]
        halves = halves + gate_up_bias[None]
        inner = jax.nn.silu(halves[:, 0]) * halves[:, 1]
    if down_bias is None:
        return hidden, down.parts(inner, stream.kernels)
    out = layers.linear(inner, down, kernels=stream.kernels)
    return hidden, (out + down_bias[None])[None]
