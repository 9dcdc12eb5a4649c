"""The gated MLP of a dense layer and of shared experts: its parameters and its product."""

from __future__ import annotations

import jax
import numpy as np

from models import layers
from models.checkpoint import Leaf, Part
from models.layers import Dense, Weight


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


def gated(
    x: jax.Array,
    gate_up: Weight,
    down: Weight,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> jax.Array:
    """down(silu(gate(x)) * up(x)), x [T, D] -> [T, D]; biases are [2, F] and [D]."""
    halves = layers.linear(x, gate_up)  # [T, 2, F]
    if gate_up_bias is not None:
        halves = halves + gate_up_bias[None]
    out = layers.linear(jax.nn.silu(halves[:, 0]) * halves[:, 1], down)
    return out if down_bias is None else out + down_bias[None]
