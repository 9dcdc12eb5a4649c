"""Which implementation every traced call of an op took, held against what each model is promised.

A GPU machine records the start of an engine; any other traces a forward for the kernels and runs
nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from kernels.dispatch import Dispatch
from models import registry
from models.batch import Batch, Tiling
from models.cache import open_cache
from tests.kernels import compiled


@dataclasses.dataclass(frozen=True)
class Call:
    """One traced call."""

    op: str
    chosen: str
    """The implementation that took it."""
    declined: tuple[str, ...]
    """Reasons of those before it."""
    has_kernel: bool
    """The op has more than a reference."""
    shapes: str
    """Of its arrays."""

    @property
    def is_kernel(self) -> bool:
        return self.chosen not in ("reference", "apart")

    def __str__(self) -> str:
        why = f" ({'; '.join(self.declined)})" if self.declined else ""
        return f"{self.op} ran {self.chosen} for {self.shapes}{why}"


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """Every call that is traced meanwhile; what was traced before is traced again."""
    calls: list[Call] = []
    original = Dispatch.__call__

    def call(self: Dispatch, *args: Any, **kwargs: Any) -> Any:
        before = self.counts.copy()
        self.declined.clear()
        result = original(self, *args, **kwargs)
        (chosen,) = self.counts - before
        reasons = tuple(self.declined.values())
        shapes = ", ".join(f"{x.dtype}{list(jnp.shape(x))}" for x in jax.tree.leaves(args))
        calls.append(Call(self.op, chosen, reasons, len(self._implementations) > 1, shapes))
        return result

    jax.clear_caches()
    with mock.patch.object(Dispatch, "__call__", call):
        yield calls


_MANY_TOKENS = r"\d+ tokens, at most \d+ may be"
_ALLOWED = {
    "linear.product": (_MANY_TOKENS, r"\d+ outputs are too few for blocks"),
    # Routers keep float32.
    "linear.parts": (_MANY_TOKENS, r"x is float32 and weight", r"\d+ inputs in 1 splits"),
    "linear.gated": (_MANY_TOKENS,),
    "linear.normed": (r"\d+ tokens, not one",),
    "attention.decode_times": (r"\d+ rows of \d+ queries, not one query", "the row is not split"),
    "moe.experts": (_MANY_TOKENS,),  # of the form before the one that took it
}
"""Reasons that are no gap in the coverage: XLA's product is as fast for those."""


@dataclasses.dataclass(frozen=True)
class Promise:
    """A model and the ops that kernels are to run for it in bfloat16."""

    config: Mapping[str, Any] | None
    """config.json of dummy weights; None: SmolLM2's own file."""
    ops: tuple[str, ...]


_WIDTH = 16
"""Pages of a row."""
_EVERYWHERE = ("norm.add_norm", "linear.product", "linear.parts", "linear.normed")
_PAGED = ("qkv.prepare", "attention.decode", "attention.prefill")
_COMMON = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMISES = {
    # Its 576 hidden dimensions are no multiple of 128: products and norms stay with XLA.
    "smollm2": Promise(None, _PAGED),
    "qwen3": Promise(
        _COMMON
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "head_dim": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 3072,
        },
        (*_PAGED, *_EVERYWHERE, "linear.gated"),
    ),
    "qwen3_moe": Promise(
        _COMMON
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "intermediate_size": 2048,
            "moe_intermediate_size": 256,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        (*_PAGED, *_EVERYWHERE, "moe.route", "moe.experts"),
    ),
    "glm4_moe_lite": Promise(
        _COMMON
        | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "intermediate_size": 2048,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "rope_scaling": None,
        },
        ("mla.decode", "mla.prefill", *_EVERYWHERE, "linear.gated", "moe.route", "moe.experts"),
    ),
}
"""Small models of every form of layer, of sizes that the kernels cover."""


def broken(calls: Sequence[Call], ops: Sequence[str]) -> list[str]:
    """What of the promise was not kept: ops that no kernel ran, and calls that went past one."""
    found = [
        f"{op}: no call of {sum(call.op == op for call in calls)} ran a kernel"
        for op in ops
        if not any(call.op == op and call.is_kernel for call in calls)
    ]
    # An op that has but a reference today is promised to nobody.
    return found + [
        str(call)
        for call in calls
        if call.op in ops and call.has_kernel and not call.is_kernel and not _is_allowed(call)
    ]


def _is_allowed(call: Call) -> bool:
    allowed = _ALLOWED.get(call.op, ())
    return all(any(re.match(one, reason) for one in allowed) for reason in call.declined)


def summary(calls: Sequence[Call]) -> str:
    """One line an op: how often each implementation took a call, and why others declined."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: dict[str, set[str]] = collections.defaultdict(set)
    for call in calls:
        counts[call.op][call.chosen] += 1
        reasons[call.op].update(call.declined)
    return "\n".join(
        f"{op:<18} {', '.join(f'{name} {n}' for name, n in chosen.items())}"
        + (f"  declined: {'; '.join(sorted(reasons[op]))}" if reasons[op] else "")
        for op, chosen in sorted(counts.items())
    )


def traced(model: registry.Model, rows: int, tokens: int) -> list[Call]:
    """Calls of a decode step and of a mixed one, traced for a device that has the kernels."""
    tiling = Tiling(block_pages=128, tile_tokens=64, tiles_at_once=1024, kernels="mosaic")
    params = {
        path: leaf.node(jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype or "bfloat16")))
        for path, leaf in model.leaves().items()
    }
    params = compiled.traverse_util.unflatten_dict(params, sep=".")
    pools = model.cache_spec(compiled.PAGE_SIZE, "bfloat16").pool_shapes(compiled.PAGES)

    def decode(flat: jax.Array) -> tuple[jax.Array, Batch]:
        return compiled.decode_batch(flat, rows, _WIDTH, tiling)

    def mixed(flat: jax.Array) -> tuple[jax.Array, Batch]:
        return compiled.mixed_batch(flat, rows, tokens, _WIDTH, tiling)

    with recorded() as calls:
        for batch_of, size in ((decode, 2 * rows + 1), (mixed, tokens + 2 * rows + 1)):
            flat = jax.ShapeDtypeStruct((size + rows * _WIDTH,), jnp.int32)

            def forward(params, pools, flat, batch_of=batch_of):
                token_ids, batch = batch_of(flat)
                cache = open_cache(pools, token_ids.shape[0])
                return model.forward(params, cache, token_ids, batch)

            jax.eval_shape(forward, params, pools, flat)
    return calls
