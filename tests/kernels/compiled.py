"""Compiles forwards of two and three layers for an H200 and prints their kernels, as JSON.

    python -m tests.kernels.compiled ROWS plain|mosaic [TOKENS [MODEL]]

More tokens than rows: the program is a mixed one. MODEL names one of the benchmarks'
configurations. Needs no GPU. Kernels of a layer are those that the third one adds.
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
import numpy as np
from flax import traverse_util
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from models import registry
from models.batch import Batch, Tiling
from models.cache import open_cache

HERE = pathlib.Path(__file__).parent
CONFIGS = HERE.parents[1] / "benchmarks" / "configs"
PAGES, PAGE_SIZE = 2000, 64
WIDTHS = {"qwen3_8b": 16, "deepseek_v2_lite": 128}
"""Pages of a row by model; of the latter so many that expanded rows take turns."""
MAX_CHUNK_ROWS = 16
_NO_KERNEL = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant"}
_LATENT_CALL = re.compile(r' custom-call\(.*op_name="[^"]*/(latent_expand|latent_prefill)/')
_OPERATION = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([\w\-]+)\(")


def decode_batch(flat: jax.Array, rows: int, width: int, tiling: Tiling) -> tuple[jax.Array, Batch]:
    """Token ids and the batch in one packed array."""
    token_ids, lens, _, table = jnp.split(flat, (rows, 2 * rows, 2 * rows + 1))
    return token_ids, Batch(
        positions=jnp.maximum(lens - 1, 0),
        rows=jnp.arange(rows, dtype=jnp.int32),
        is_real=lens > 0,
        kv_lens=lens,
        cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32),
        num_decode=jnp.int32(rows),
        page_tables=(table.reshape(rows, width),),
        is_decode=True,
        max_chunk_rows=0,
        tiling=tiling,
    )


def mixed_batch(
    flat: jax.Array, rows: int, tokens: int, width: int, tiling: Tiling
) -> tuple[jax.Array, Batch]:
    """The same of decode rows and chunks."""
    sizes = (tokens, rows, rows, 1)
    token_ids, lens, q_lens, num_decode, table = jnp.split(flat, np.cumsum(sizes))
    ends = jnp.cumsum(q_lens, dtype=jnp.int32)
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(token[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), rows - 1)
    return token_ids, Batch(
        positions=jnp.maximum(token + (lens - ends)[row], 0),
        rows=row,
        is_real=token < ends[-1],
        kv_lens=lens,
        cu_q_lens=jnp.concatenate([jnp.zeros((1,), jnp.int32), ends]),
        num_decode=num_decode[0],
        page_tables=(table.reshape(rows, width),),
        is_decode=False,
        max_chunk_rows=MAX_CHUNK_ROWS,
        tiling=tiling,
    )


def compiled(
    num_layers: int, rows: int, kernels: str, tokens: int, name: str
) -> jax.stages.Compiled:
    """A forward whose batch is a slice of one packed array, as an engine's is."""
    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    width = WIDTHS[name]
    config |= {"num_hidden_layers": num_layers}
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
        if tokens == rows:
            token_ids, batch = decode_batch(flat, rows, width, tiling)
        else:
            token_ids, batch = mixed_batch(flat, rows, tokens, width, tiling)
        hidden, cache = model.forward(params, open_cache(pools, tokens), token_ids, batch)
        return hidden, cache.pools, cache.is_nonfinite

    num_entries = tokens + rows + 1 + rows * width + (rows if tokens > rows else 0)
    arguments = (
        traverse_util.unflatten_dict(leaves, sep="."),
        pools,
        struct((num_entries,), "int32"),
    )
    traced = jax.jit(forward, donate_argnums=1, out_shardings=device).trace(*arguments)
    lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})


def operations(text: str) -> Iterator[str]:
    """What each kernel of the entry is: its operation, a fusion's kind or a call's target."""
    for line in text[text.index("\nENTRY") :].splitlines():
        found = _OPERATION.match(line)
        if found and found[1] not in _NO_KERNEL:
            detail = re.search(r'custom_call_target="([^"]+)"|kind=(\w+)', line)
            yield next(filter(None, detail.groups())) if detail else found[1]


def pool_facts(text: str) -> dict[str, int]:
    """How many calls hand a pool back where they got it, and what else makes an array of its size.

    The alias of a call's output names its first operand, the pool.
    """
    pool = rf"bf16\[{PAGES},[\d,]+\]\S*"
    call = rf'= \([^=]*{pool}\) custom-call\(.*"mosaic_gpu_v2".*output_to_operand_aliasing=.*: \(0,'
    latents = rf"bf16\[(?:{PAGES},{PAGE_SIZE}|{PAGES * PAGE_SIZE}),576\]\S*"
    return {
        "pools updated": len(re.findall(call, text)),
        "pools made": len(re.findall(rf"= {pool} (?!parameter|get-tuple-element|bitcast)", text)),
        # Plain JAX writes latents, in one fusion of which the pool is an operand.
        "latent pools made": len(re.findall(rf"= {latents} (?:fusion|copy|custom-call)", text)),
    }


def main(rows: str, kernels: str, tokens: str | None = None, name: str = "qwen3_8b") -> None:
    """Compiles both programs."""
    programs = [compiled(n, int(rows), kernels, int(tokens or rows), name) for n in (2, 3)]
    two, three = (program.as_text() or "" for program in programs)
    counts = [collections.Counter(operations(text)) for text in (two, three)]
    temporary = programs[1].memory_analysis().temp_size_in_bytes
    calls = three.count('custom_call_target="mosaic_gpu_v2"')
    found = {"all": counts[1], "layer": counts[1] - counts[0], "calls": calls}
    found["latent kernels"] = collections.Counter(_LATENT_CALL.findall(three))
    print(json.dumps(found | pool_facts(three) | {"temporary bytes": temporary}))


if __name__ == "__main__":
    main(*sys.argv[1:])
