"""Runs a model's pure forward over one prompt as the engine would: paged, in chunks, row by row."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from models import checkpoint
from models.batch import Batch, Tiling
from models.cache import Cache, open_cache
from models.checkpoint import Leaf
from models.registry import Model


def load_params(
    model: Model,
    source: checkpoint.Source,
    leaves: Mapping[str, Leaf] | None = None,
    dtype: str = "float32",
) -> Mapping[str, object]:
    """Parameters, host tables under "host"; `leaves` stands in for the model's own."""
    tables = checkpoint.load_host(model.host_leaves(), source, dtype=dtype)
    params = checkpoint.load(
        model.leaves() if leaves is None else leaves,
        source,
        dtype=dtype,
        put=lambda buffer, leaf: jax.device_put(buffer),
        ignore=model.ignores,
    )
    return params | {"host": tables}


PLAIN = Tiling()
# One size serves every prompt of the goldens, so that a model compiles once for all lengths.
MAX_TOKENS = 144


def full_logits(
    model: Model,
    params: Mapping[str, object],
    ids: np.ndarray,
    page_size: int,
    chunk: int = MAX_TOKENS,
    num_decoded: int = 0,
    dtype: str = "float32",
    tiling: Tiling = PLAIN,
) -> np.ndarray:
    """f32[T, V] logits of every position of one prompt.

    Args:
      model: configured registration.
      params: as from load_params.
      ids: i32[T], at most MAX_TOKENS.
      page_size: tokens of a page; pages lie in the pool in descending order.
      chunk: tokens of one prefill step; the last one is padded to it.
      num_decoded: tokens at the end that go one by one through a decode program.
      dtype: of the cache.
      tiling: how attention is computed.
    """
    num_pages = -(-MAX_TOKENS // page_size)
    table = np.arange(num_pages, 0, -1, dtype=np.int32)
    spec = model.cache_spec(page_size, dtype)
    pools = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec.pool_shapes(num_pages + 1)
    )
    split = len(ids) - num_decoded
    out = []
    for start in range(0, split, chunk):
        some = ids[start : min(start + chunk, split)]
        step = prefill_step(len(spec.groups), table, start, len(some), chunk)
        step = step.replace(tiling=tiling)
        logits, pools = _run(model, params, pools, _padded(some, chunk), step)
        out.append(logits[: len(some)])
    for position in range(split, len(ids)):
        step = _decode_step(len(spec.groups), table, position).replace(tiling=tiling)
        logits, pools = _run(model, params, pools, _padded(ids[position : position + 1], 2), step)
        out.append(logits[:1])
    return np.concatenate(out)


@functools.partial(jax.jit, static_argnums=0)
def _step(
    model: Model,
    params: Mapping[str, object],
    pools: tuple[tuple[jax.Array, ...], ...],
    ids: jax.Array,
    batch: Batch,
) -> tuple[jax.Array, Cache]:
    hidden, cache = model.forward(params, open_cache(pools, ids.shape[0]), ids, batch)
    return model.logits(params, hidden), cache


def _run(
    model: Model,
    params: Mapping[str, object],
    pools: tuple[tuple[jax.Array, ...], ...],
    ids: np.ndarray,
    batch: Batch,
) -> tuple[np.ndarray, tuple[tuple[jax.Array, ...], ...]]:
    params = dict(params)
    tables = params.pop("host")
    if model.registration.host_embed is not None:
        batch = batch.replace(embeddings=model.host_embed(tables, ids, np.float32))
    logits, cache = _step(model, params, pools, ids, batch)
    assert not np.asarray(cache.is_nonfinite).any()
    return np.asarray(logits), cache.pools


def _padded(ids: np.ndarray, size: int) -> np.ndarray:
    return np.pad(ids, (0, size - len(ids)))


def prefill_step(num_groups: int, table: np.ndarray, start: int, count: int, size: int) -> Batch:
    """One chunk of `count` tokens in a batch of `size`, one row."""
    token = np.arange(size, dtype=np.int32)
    return Batch(
        positions=np.where(token < count, start + token, 0).astype(np.int32),
        rows=np.zeros(size, np.int32),
        is_real=token < count,
        kv_lens=np.array([start + count], np.int32),
        cu_q_lens=np.array([0, count], np.int32),
        num_decode=np.int32(0),
        page_tables=(table[None],) * num_groups,
        is_decode=False,
        max_chunk_rows=1,
    )


def _decode_step(num_groups: int, table: np.ndarray, position: int) -> Batch:
    """One decode row and one padding row."""
    return Batch(
        positions=np.array([position, 0], np.int32),
        rows=np.array([0, 1], np.int32),
        is_real=np.array([True, False]),
        kv_lens=np.array([position + 1, 0], np.int32),
        cu_q_lens=np.array([0, 1, 1], np.int32),
        num_decode=np.int32(1),
        page_tables=(np.stack([table, np.zeros_like(table)]),) * num_groups,
        is_decode=True,
        max_chunk_rows=0,
    )
