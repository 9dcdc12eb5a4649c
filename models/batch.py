"""What a forward reads of a step besides token ids: where tokens stand, what pages they may see."""

from __future__ import annotations

from typing import Literal

import flax.struct
import jax


@flax.struct.dataclass
class Tiling:
    """How attention is computed on the device at hand: data, chosen by the runner.

    All but `kernels` is about the plain form, which also takes the calls that kernels decline.
    """

    block_pages: int = flax.struct.field(pytree_node=False, default=16)
    """Pages of keys and values attended at once, at most."""
    block_bytes: int = flax.struct.field(pytree_node=False, default=2**29)
    """Bytes of gathered keys and values attended at once, at most."""
    tile_tokens: int = flax.struct.field(pytree_node=False, default=32)
    """Query tokens of one chunk attended at once."""
    tiles_at_once: int = flax.struct.field(pytree_node=False, default=1)
    """Chunk tiles attended at once."""
    kernels: Literal["plain", "mosaic"] = flax.struct.field(pytree_node=False, default="plain")
    """What the device can run besides plain JAX."""


@flax.struct.dataclass
class Batch:
    """Padded arrays of one step. Rows: decode rows first, then chunks, then padding.

    T tokens and R rows are padded sizes; tokens of a row are adjacent and in row order.
    """

    positions: jax.Array
    """i32[T], position of each token in its request; 0 for padding."""
    rows: jax.Array
    """i32[T], row of each token; 0 for padding."""
    is_real: jax.Array
    """bool[T], False for padding."""
    kv_lens: jax.Array
    """i32[R], tokens with KV including this step; 0 for padding rows."""
    cu_q_lens: jax.Array
    """i32[R + 1], first token of each row, then the number of real tokens."""
    num_decode: jax.Array
    """i32[], leading decode rows."""
    page_tables: tuple[jax.Array, ...]
    """Per paged group i32[R, W]; page 0 is trash and stands wherever no page is owned."""
    is_decode: bool = flax.struct.field(pytree_node=False)
    """True: every row is a decode row of T // R tokens."""
    max_chunk_rows: int = flax.struct.field(pytree_node=False)
    """Chunks this program can hold; 0 for a decode program."""
    tiling: Tiling = flax.struct.field(pytree_node=False, default_factory=Tiling)
    state_ids: tuple[jax.Array, ...] = ()
    """Per recurrent group i32[R, 2], the state a row goes on from and the one it writes.

    Equal ids update in place, different ones leave the first as it was; 0 is trash.
    """
    embeddings: jax.Array | None = None
    """[T, D] in the model's dtype, made on the host; None: the forward embeds its ids itself."""

    @property
    def query_len(self) -> int:
        """Tokens of one decode row."""
        return self.positions.shape[0] // self.kv_lens.shape[0] if self.is_decode else 1
