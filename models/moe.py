"""The mixture-of-experts MLP: a router, its experts, and one that every token goes through."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.moe import api
from kernels.moe.reference import row_block
from models import layers
from models import mlp as dense
from models.batch import Batch
from models.checkpoint import Leaf, Part
from models.layers import Dense, Tap, identity
from models.stream import Stream


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Sizes and rules of one mixture of experts; the same in every layer that has one."""

    num_experts: int
    top_k: int
    """Experts of one token."""
    intermediate_size: int
    """Of one expert."""
    scoring: str = "softmax"
    """`softmax` over all experts, or `sigmoid` of each."""
    renormalize: bool = True
    """A token's weights are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights last."""
    num_groups: int = 1
    top_groups: int = 1
    """Groups of neighbouring experts that a token may choose from."""
    has_bias: bool = False
    """A float32 correction, added to the scores for the choice only."""
    shared_intermediate_size: int | None = None
    """Of the MLP that every token goes through; None: there is none."""
    router_dtype: str = "activation"
    """`float32` keeps the router's weights and product in it; `activation` computes as the rest."""

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"a token goes to {self.top_k} experts but there are {self.num_experts}; "
                "num_experts_per_tok cannot exceed the number of experts"
            )
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts in {self.num_groups} groups of which "
                f"{self.top_groups} count; the groups must be equal and hold those that count"
            )
        if self.top_k > (allowed := self.num_experts // self.num_groups * self.top_groups):
            raise ValueError(
                f"a token goes to {self.top_k} experts but its {self.top_groups} groups hold "
                f"{allowed}; raise topk_group or lower num_experts_per_tok"
            )


@dataclasses.dataclass(frozen=True)
class Names:
    """Checkpoint names of one layer, `{i}` standing for the layer and `{e}` for the expert."""

    router: str = "model.layers.{i}.mlp.gate.weight"
    bias: str = "model.layers.{i}.mlp.gate.e_score_correction_bias"
    gate: str = "model.layers.{i}.mlp.experts.{e}.gate_proj.weight"
    up: str = "model.layers.{i}.mlp.experts.{e}.up_proj.weight"
    down: str = "model.layers.{i}.mlp.experts.{e}.down_proj.weight"
    shared_gate: str = "model.layers.{i}.mlp.shared_experts.gate_proj.weight"
    shared_up: str = "model.layers.{i}.mlp.shared_experts.up_proj.weight"
    shared_down: str = "model.layers.{i}.mlp.shared_experts.down_proj.weight"


def leaves(config: MoeConfig, hidden_size: int, names: Names, i: int) -> dict[str, Leaf]:
    """Parameters of layer i's mixture of experts and the checkpoint tensors that fill them."""
    c, d = config, hidden_size
    is_float32 = c.router_dtype == "float32"
    result = {
        "router": Leaf(
            shape=(d, c.num_experts),
            parts=(Part(names.router.format(i=i), (c.num_experts, d), (), np.transpose),),
            partition=(None, None),
            dtype="float32" if is_float32 else None,
            node=Dense,
            fan_in=d,
        ),
        "experts_gate_up": _gate_up_leaf(c, d, names, i),
        "experts_down": Leaf(
            shape=(c.num_experts, d, c.intermediate_size),
            parts=tuple(
                Part(names.down.format(i=i, e=e), (d, c.intermediate_size), (e,))
                for e in range(c.num_experts)
            ),
            partition=("expert", None, "tensor"),
            fan_in=c.intermediate_size,
        ),
    }
    if c.has_bias:
        result["router_bias"] = Leaf(
            shape=(c.num_experts,),
            parts=(Part(names.bias.format(i=i), (c.num_experts,)),),
            partition=(None,),
            dtype="float32",
        )
    if c.shared_intermediate_size is not None:
        shared = (names.shared_gate, names.shared_up, names.shared_down)
        gate, up, down = (name.format(i=i) for name in shared)
        shared_leaves = dense.leaves(d, c.shared_intermediate_size, gate, up, down)
        result |= {f"shared_{path}": leaf for path, leaf in shared_leaves.items()}
    return result


def _gate_up_leaf(c: MoeConfig, hidden_size: int, names: Names, i: int) -> Leaf:
    """[E, 2 F, D], rows in blocks of gate, up, gate, up, as `moe.experts` reads them."""
    f, block = c.intermediate_size, row_block(c.intermediate_size)

    def blocks(stored: np.ndarray) -> np.ndarray:
        return stored.reshape(f // block, block, hidden_size)

    return Leaf(
        shape=(c.num_experts, 2 * f, hidden_size),
        parts_shape=(c.num_experts, f // block, 2, block, hidden_size),
        parts=tuple(
            Part(name.format(i=i, e=e), (f, hidden_size), (e, slice(None), half), blocks)
            for e in range(c.num_experts)
            for half, name in enumerate((names.gate, names.up))
        ),
        partition=("expert", "tensor", None),
        fan_in=hidden_size,
    )


def mlp(
    config: MoeConfig,
    weights: Mapping[str, Any],
    stream: Stream,
    batch: Batch,
    *,
    tap: Tap = identity,
) -> tuple[jax.Array, jax.Array]:
    """Sends the stream's norm through each token's experts.

    Padding goes to no expert. A tap sees `router_logits` f32[T, E], `topk_ids` i32[T, k] (E for
    padding) and `topk_weights` f32[T, k], and may change them.

    Returns:
      The stream's sum [T, D], and parts [S, T, D] of the experts' output.
    """
    c, kernels = config, batch.tiling.kernels
    hidden, x, router_logits = _router_logits(c, weights["router"], stream)
    router_logits = tap("router_logits", router_logits)
    topk_ids, topk_weights = api.route(
        router_logits,
        weights.get("router_bias"),
        batch.is_real,
        top_k=c.top_k,
        scoring=c.scoring,
        renormalize=c.renormalize,
        scale=c.scale,
        num_groups=c.num_groups,
        top_groups=c.top_groups,
        kernels=kernels,
    )
    topk_ids, topk_weights = tap("topk_ids", topk_ids), tap("topk_weights", topk_weights)
    out = api.experts(
        x,
        topk_ids,
        topk_weights,
        weights["experts_gate_up"],
        weights["experts_down"],
        kernels=kernels,
    )
    if c.shared_intermediate_size is None:
        return hidden, out
    shared = dense.gated(x, weights["shared_gate_up"], weights["shared_down"], kernels=kernels)
    return hidden, (layers.summed(out, x.dtype) + layers.summed(shared, x.dtype))[None]


def _router_logits(
    config: MoeConfig, router: Dense, stream: Stream
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum and norm [T, D], and f32[T, E], rounded to their dtype unless the router has float32."""
    # So few outputs keep no device busy unless their inputs are split.
    if config.router_dtype == "float32":
        hidden, x = stream.normed()
        logits = layers.summed(
            router.parts(x.astype(jnp.float32), stream.kernels), jnp.dtype(jnp.float32)
        )
        return hidden, x, logits
    hidden, x, parts = stream.times(router, "parts")
    return hidden, x, layers.summed(parts, x.dtype).astype(jnp.float32)


def expert_load(topk_ids: jax.Array, num_experts: int) -> jax.Array:
    """How many tokens went to each expert: i32[T, k] ids -> i32[E]; padding counts for none.

    The ids come from a tap, for example over the layers of one forward:

        loads = {}

        def tap(name, x):
            if name.endswith(".topk_ids"):
                loads[name] = moe.expert_load(x, num_experts)
            return x

        model.forward(params, cache, token_ids, batch, tap=tap)
    """
    number = jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    return jnp.sum(topk_ids[:, :, None] == number, axis=(0, 1), dtype=jnp.int32)
