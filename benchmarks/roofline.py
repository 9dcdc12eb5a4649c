"""The time below which no engine can go: bytes and operations over what the device can do."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.serving.commands.bench import Shape
    from models.decoder_config import DecoderConfig
    from models.registry import Model

_CEILINGS = pathlib.Path(__file__).parent / "configs" / "ceilings.json"
_BYTES = 2
"""Of one bfloat16 value; the bound is that of bfloat16 weights and cache."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What one device was measured to do at most."""

    read_bytes_per_second: float
    flops_per_second: float

    @classmethod
    def of(cls, device: str) -> Ceilings | None:
        """Measured ceilings of a device by its name; None when nobody measured it."""
        measured = json.loads(_CEILINGS.read_text(encoding="utf-8"))["devices"].get(device)
        return None if measured is None else cls(**measured)


@dataclasses.dataclass(frozen=True)
class Costs:
    """What one model reads and computes, per token or once a step."""

    weight_bytes: float
    """Read by every decode step: layers and vocabulary matrix, not the embedding table."""
    decode_flops: float
    """Of one decoded token, its attention aside (that is bound by reads)."""
    prompt_flops: float
    """Of one prompt token, without attention and vocabulary matrix."""
    attention_flops: float
    """Of a prompt of S tokens, per S squared: scores and values, the causal half."""
    kv_bytes: float
    """What the cache keeps of one token over all layers."""
    expert_bytes: float = 0.0
    """All experts of all layers; a step reads those that its tokens go to."""
    expert_share: float = 0.0
    """Part of the experts that one token goes to."""

    @classmethod
    def of(cls, model: Model) -> Costs:
        """Costs of a decoder, from the shapes of its own parameters."""
        config: DecoderConfig = model.config
        sizes = {path: math.prod(leaf.shape) for path, leaf in model.leaves().items()}
        experts = sum(size for path, size in sizes.items() if ".experts_" in path)
        layers = sum(size for path, size in sizes.items() if path.startswith("layers.")) - experts
        share = config.moe.top_k / config.moe.num_experts if config.moe else 0.0
        head = config.vocab_size * config.hidden_size
        mla = config.mla
        per_head = 2 * config.head_dim if mla is None else mla.qk_head_dim + mla.v_head_dim
        entry = 2 * config.num_kv_heads * config.head_dim if mla is None else mla.entry_dim
        return cls(
            weight_bytes=_BYTES * (layers + head),
            decode_flops=2 * (layers + share * experts + head),
            prompt_flops=2 * (layers + share * experts),
            attention_flops=config.num_layers * config.num_heads * per_head,
            kv_bytes=_BYTES * config.num_layers * entry,
            expert_bytes=_BYTES * experts,
            expert_share=share,
        )

    def read_bytes(self, rows: int) -> float:
        """Weights that one decode step of `rows` tokens reads, each going to experts by chance."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** rows)


def bound_seconds(costs: Costs, ceilings: Ceilings, shape: Shape, max_rows: int) -> float:
    """Least seconds for all requests of a shape, prefilled first and then decoded in full batches.

    prompt flops / matmul + (out - 1) x (max(weights / read, rows x flops / matmul) + KV / read);
    the cache is read at its mean length. More requests than `max_rows` come in waves.
    """
    read, matmul = ceilings.read_bytes_per_second, ceilings.flops_per_second
    of_prompt = shape.prompt_len * costs.prompt_flops + shape.prompt_len**2 * costs.attention_flops
    seconds = shape.num_requests * of_prompt / matmul
    mean_len = shape.prompt_len + shape.num_output_tokens / 2
    for first in range(0, shape.num_requests, max_rows):
        rows = min(max_rows, shape.num_requests - first)
        step = max(costs.read_bytes(rows) / read, rows * costs.decode_flops / matmul)
        step += rows * mean_len * costs.kv_bytes / read
        seconds += (shape.num_output_tokens - 1) * step
    return seconds
