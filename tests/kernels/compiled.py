"""Compiles decode forwards of two and three layers for an H200 and prints their kernels, as JSON.

    python -m tests.kernels.compiled ROWS plain|mosaic

Needs no GPU. Kernels of a layer are those that the third one adds.
"""

from __future__ import annotations

import collections
import json
import pathlib
import re
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from models import registry
from models.batch import Batch, Tiling
from models.cache import open_cache

HERE = pathlib.Path(__file__).parent
CONFIG = HERE.parents[1] / "benchmarks" / "configs" / "qwen3_8b.json"
PAGES, WIDTH, PAGE_SIZE = 2000, 16, 64
_NO_KERNEL = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant"}
_OPERATION = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([\w\-]+)\(")


def compiled(num_layers: int, rows: int, kernels: str) -> str:
    """Optimised HLO of a forward whose batch is a slice of one packed array, as an engine's is."""
    config = json.loads(CONFIG.read_text(encoding="utf-8")) | {"num_hidden_layers": num_layers}
    model = registry.of_config(config)
    jax.devices()  # the plugins register
    target = (HERE / "h200.pbtxt").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=target, topology="1x1x1"
    )
    device = SingleDeviceSharding(topology.devices[0])

    def struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=device)

    leaves = {
        path: leaf.node(struct(leaf.shape, leaf.dtype or "bfloat16"))
        for path, leaf in model.leaves().items()
    }
    pools = jax.tree.map(
        lambda pool: struct(pool.shape, pool.dtype),
        model.cache_spec(PAGE_SIZE, "bfloat16").pool_shapes(PAGES),
    )
    tiling = Tiling(block_pages=128, tile_tokens=64, tiles_at_once=1024, kernels=kernels)

    def forward(params, pools, flat):
        token_ids, lens, _, table = jnp.split(flat, (rows, 2 * rows, 2 * rows + 1))
        batch = Batch(
            positions=jnp.maximum(lens - 1, 0),
            rows=jnp.arange(rows, dtype=jnp.int32),
            is_real=lens > 0,
            kv_lens=lens,
            cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32),
            num_decode=jnp.int32(rows),
            page_tables=(table.reshape(rows, WIDTH),),
            is_decode=True,
            max_chunk_rows=0,
            tiling=tiling,
        )
        hidden, cache = model.forward(params, open_cache(pools, rows), token_ids, batch)
        return hidden, cache.pools, cache.is_nonfinite

    arguments = (
        traverse_util.unflatten_dict(leaves, sep="."),
        pools,
        struct((2 * rows + 1 + rows * WIDTH,), "int32"),
    )
    traced = jax.jit(forward, donate_argnums=1, out_shardings=device).trace(*arguments)
    lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()


def operations(text: str) -> Iterator[str]:
    """What each kernel of the entry is: its operation, a fusion's kind or a call's target."""
    for line in text[text.index("\nENTRY") :].splitlines():
        found = _OPERATION.match(line)
        if found and found[1] not in _NO_KERNEL:
            detail = re.search(r'custom_call_target="([^"]+)"|kind=(\w+)', line)
            yield next(filter(None, detail.groups())) if detail else found[1]


def main(rows: str, kernels: str) -> None:
    """Compiles both programs."""
    two, three = (compiled(layers, int(rows), kernels) for layers in (2, 3))
    counts = [collections.Counter(operations(text)) for text in (two, three)]
    calls = three.count('custom_call_target="mosaic_gpu_v2"')
    print(json.dumps({"all": counts[1], "layer": counts[1] - counts[0], "calls": calls}))


if __name__ == "__main__":
    main(*sys.argv[1:])
