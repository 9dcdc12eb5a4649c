"""Compiles a layer's mixture of experts for an H200 and prints its kernels, as JSON by tokens.

    python -m tests.kernels.compiled_moe

At the sizes of Qwen3-30B-A3B: router, choice, experts and residual. Needs no GPU.
"""

from __future__ import annotations

import collections
import json

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from kernels.moe import api
from models import layers
from tests.kernels.compiled import HERE, operations
from tests.kernels.moe_cases import QWEN

TOKENS = {1: (4, 10), 8: (4, 9), 64: (4, 9), 256: (7, 12), 2048: (7, 13)}
"""Of each number of tokens, how many kernels are ours and how many there are at most."""


def layer(
    x: jax.Array, is_real: jax.Array, router: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """x [T, D] and what the experts add to it."""
    logits = jnp.dot(x, router).astype(jnp.float32)
    ids, weights = api.route(
        logits,
        None,
        is_real,
        top_k=QWEN.top_k,
        scoring="softmax",
        renormalize=True,
        scale=1.0,
        kernels="mosaic",
    )
    return x + layers.summed(api.experts(x, ids, weights, gate_up, down, kernels="mosaic"), x.dtype)


def compiled(num_tokens: int) -> jax.stages.Compiled:
    """The layer as a program."""
    target = (HERE / "h200.pbtxt").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=target, topology="1x1x1"
    )
    device = SingleDeviceSharding(topology.devices[0])

    def on_device(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=device)

    x, _, _, gate_up, down = QWEN.case(num_tokens).structs
    is_real = jax.ShapeDtypeStruct((num_tokens,), jnp.bool_)
    router = jax.ShapeDtypeStruct((QWEN.hidden_size, QWEN.num_experts), jnp.bfloat16)
    arguments = map(on_device, (x, is_real, router, gate_up, down))
    lowered = jax.jit(layer, out_shardings=device).trace(*arguments)
    lowered = lowered.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})


def main() -> None:
    """Compiles every program."""
    jax.devices()  # the plugins register
    found = {}
    for num_tokens in TOKENS:
        program = compiled(num_tokens)
        text, memory = program.as_text() or "", program.memory_analysis()
        assert memory is not None
        found[num_tokens] = {
            "layer": collections.Counter(operations(text)),
            "calls": text.count('custom_call_target="mosaic_gpu_v2"'),
            "temporary bytes": memory.temp_size_in_bytes,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
