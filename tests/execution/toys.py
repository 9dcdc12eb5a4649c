"""The tiny engine of these tests: Llama's example with one layer, on the smallest ladder."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from engine.config import EngineConfig
from engine.execution import startup
from engine.execution.buckets import ProgramKey
from engine.execution.programs import compile_programs
from engine.execution.runner import Runner
from engine.scheduling.schedule import POISON_ID, SAMPLING_COLUMNS, RowKind, Schedule
from models import registry
from models.registry import Model, Registration

CONFIG = EngineConfig(
    model="toy",
    load_format="dummy",
    dtype="float32",
    max_model_len=32,
    max_rows=2,
    row_rungs=(2,),
    token_budget=8,
    token_rungs=(8,),
    num_pages=10,
    compilation_cache=None,
)

LLAMA = registry.get("LlamaForCausalLM")


def model_of(registration: Registration, **fields: Any) -> Model:
    """The example of a registration with one layer."""
    example = dict(registration.example) | {"num_hidden_layers": 1} | fields
    return registration.bind(registration.parse_config(example))


def start(registration: Registration, **fields: Any) -> Runner:
    return startup.start(
        dataclasses.replace(CONFIG, **fields), model_of(registration), None, lambda *_: None
    )


def llama_with(forward: Callable[..., Any], **fields: Any) -> Registration:
    return dataclasses.replace(LLAMA, forward=forward, **fields)


def runner_of(base: Runner, registration: Registration, *keys: ProgramKey) -> Runner:
    """Another forward on a runner's parameters, with programs of some keys only."""
    shapes = dataclasses.replace(base.shapes, model=model_of(registration))
    programs = compile_programs(shapes, keys, base.programs.install_shape, lambda *_: None)
    return Runner(base.settings, shapes.model, base.params, programs, shapes, base.plan, base.guard)


def jaxpr_of(base: Runner, registration: Registration, key: ProgramKey) -> Any:
    """What a step with another forward would be compiled from."""
    return dataclasses.replace(base.shapes, model=model_of(registration)).step(key).trace().jaxpr


def decode_key(**fields: Any) -> ProgramKey:
    """A greedy decode program of two rows."""
    defaults = {
        "is_decode": True,
        "head": "sample",
        "rows": 2,
        "query_len": 1,
        "width": 2,
        "sampler": "greedy",
        "max_chunk_rows": 0,
    } | fields
    tokens = defaults["rows"] * defaults["query_len"]
    return ProgramKey(**({"tokens": tokens} | defaults))


def mixed_key(**fields: Any) -> ProgramKey:
    """A greedy mixed program of eight tokens in up to four rows."""
    defaults = {
        "is_decode": False,
        "head": "sample",
        "rows": 4,
        "tokens": 8,
        "query_len": 1,
        "width": 3,
        "sampler": "greedy",
        "max_chunk_rows": 2,
    }
    return ProgramKey(**(defaults | fields))


def schedule_of(rows: list[tuple[int, RowKind, list[int], int]], **fields: Any) -> Schedule:
    """A step of rows (slot, kind, ids, tokens with KV before it), each owning three pages."""
    q_lens = np.array([len(ids) for _, _, ids, _ in rows], np.int32)
    kinds = np.array([int(kind) for _, kind, _, _ in rows], np.int32)
    before = np.array([length for *_, length in rows], np.int32)
    slots = np.array([slot for slot, *_ in rows], np.int32)
    defaults = {
        "step": 0,
        "is_decode": bool((kinds & RowKind.DECODE).all()),
        "is_full_sampler": False,
        "scores_prompt": bool((kinds & RowKind.SCORES).any()),
        "slots": slots,
        "generations": np.zeros(len(rows), np.int64),
        "kinds": kinds,
        "q_lens": q_lens,
        "token_ids": np.array([i for _, _, ids, _ in rows for i in ids], np.int32),
        "kv_lens": before + q_lens,
        "page_tables": (1 + 3 * slots[:, None] + np.arange(3, dtype=np.int32)[None],),
        "sampling": {name: np.zeros(len(rows), dtype) for name, dtype in SAMPLING_COLUMNS},
    }
    return Schedule(**(defaults | fields))


DECODE = RowKind.DECODE | RowKind.SAMPLES
LATE = DECODE | RowKind.DEVICE_ID
"""A decode row whose newest id only the device knows."""
CHUNK = RowKind(0)
LAST_CHUNK = RowKind.SAMPLES
POISON = POISON_ID


def on_device(tree: Any) -> Any:
    return jax.tree.map(jax.numpy.asarray, tree)
