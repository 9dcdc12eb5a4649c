"""From a config to a runner that can launch: open, load, plan, compile."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np

from engine.config import EngineConfig
from engine.execution import plan as planning
from engine.execution.buckets import ProgramKey
from engine.execution.packing import InstallShape, output_ranges
from engine.execution.programs import (
    CompileGuard,
    Programs,
    ProgramShapes,
    Progress,
    compile_programs,
)
from engine.execution.runner import Runner, device_profile
from engine.execution.settings import Settings
from engine.execution.step import StateShape
from models import checkpoint, registry, sharding
from models.cache import CacheSpec
from models.checkpoint import Leaf
from models.gguf import config_from_gguf
from models.registry import Model


def start(config: EngineConfig, model: Model, source: Any, progress: Progress) -> Runner:
    """Loads, plans and compiles: everything between a config and a runner that can launch.

    Args:
      config: the engine's settings.
      model: the configured architecture.
      source: an opened checkpoint, or None for dummy weights.
      progress: told of stages "load", "plan", "compile".

    Raises:
      ValueError: settings that contradict, a checkpoint that does not suit, no room.
    """
    device = jax.devices()[0]
    profile = device_profile(device, config)
    settings = Settings.of(config, model, profile)
    use_compilation_cache(config.compilation_cache)
    mesh = sharding.make_mesh([device])
    guard = CompileGuard()
    params = _load(settings, model, source, mesh, progress)
    spec = model.cache_spec(settings.page_size, settings.dtype)
    shapes = _shapes(settings, model, params, spec, mesh, num_pages=2)
    plan = _plan(settings, shapes, spec, progress)
    shapes = _shapes(settings, model, params, spec, mesh, num_pages=plan.num_pages)
    keys = settings.ladder.keys() if settings.lane != "eager" else ()
    programs = compile_programs(shapes, keys, _install_shape(settings, model), progress)
    plan = _checked(plan, programs)
    return Runner(settings, model, params, programs, shapes, plan, guard)


def _load(settings: Settings, model: Model, source: Any, mesh: Any, progress: Progress) -> Any:
    started = time.perf_counter()
    progress("load", 0.0, "")

    def shard(leaf: Leaf) -> jax.sharding.Sharding:
        return sharding.named(mesh, leaf.partition)

    def report(done: int, total: int) -> None:
        progress("load", done / total, f"{done / 2**30:.2f} GiB")

    def put(buffer: np.ndarray, leaf: Leaf) -> jax.Array:
        return jax.block_until_ready(jax.device_put(buffer, shard(leaf)))

    leaves = model.leaves()
    if source is None:
        params = checkpoint.dummy(
            leaves, dtype=settings.dtype, seed=settings.config.seed, shardings=shard
        )
        jax.block_until_ready(params)
    else:
        params = checkpoint.load(
            leaves,
            source,
            dtype=settings.dtype,
            put=put,
            ignore=model.ignores,
            progress=report,
        )
    progress("load", 1.0, f"{time.perf_counter() - started:.1f} s")
    return params


def _shapes(
    settings: Settings, model: Model, params: Any, spec: CacheSpec, mesh: Any, num_pages: int
) -> ProgramShapes:
    return ProgramShapes(
        model=model,
        tiling=settings.profile.tiling,
        state=StateShape(
            max_slots=settings.max_slots,
            max_model_len=settings.max_model_len,
            vocab_size=model.vocab_size,
            pools=spec.pool_shapes(num_pages),
        ),
        params=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
        ),
        replicated=sharding.named(mesh),
        pool_sharding=sharding.named(mesh, (None, "tensor")),
        compiler_options=settings.profile.compiler_options,
    )


def _install_shape(settings: Settings, model: Model) -> InstallShape:
    return InstallShape(
        rows=settings.max_chunk_rows,
        max_slots=settings.max_slots,
        max_model_len=settings.max_model_len,
        vocab_size=model.vocab_size,
    )


def _plan(
    settings: Settings, shapes: ProgramShapes, spec: CacheSpec, progress: Progress
) -> planning.MemoryPlan:
    """Plans the pools. Temporaries are those of the largest programs, compiled with a tiny pool."""
    config, profile = settings.config, settings.profile
    state = shapes.state_shapes()
    keys = settings.ladder.keys()
    plan = planning.MemoryPlan(
        limit=int(profile.memory_bytes * config.memory_fraction),
        weights=planning.tree_bytes(shapes.params),
        small_state=planning.tree_bytes(dataclasses.replace(state, pools=())),
        temporaries=0,
        outputs=settings.depth * max(_output_bytes(key) for key in keys),
        page_bytes=spec.page_bytes,
        num_pages=config.num_pages or 0,
    )
    least = settings.max_pages + 2
    if config.num_pages is not None:
        if config.num_pages < least:
            raise ValueError(
                f"num_pages is {config.num_pages} but one request of max_model_len "
                f"{settings.max_model_len} needs {least}; raise num_pages or lower max_model_len"
            )
        return plan
    most = settings.max_slots * settings.max_pages + 2
    if profile.pool_bytes is not None:
        most = max(least, min(most, profile.pool_bytes // spec.page_bytes))
        return dataclasses.replace(
            plan, num_pages=planning.num_pages_that_fit(plan, least=least, most=most)
        )
    progress("plan", 0.0, "largest programs")
    probes = dataclasses.replace(shapes, compiler_options=profile.probe_options)
    programs = compile_programs(
        probes, _largest(keys), _install_shape(settings, shapes.model), lambda *_: None
    )
    plan = dataclasses.replace(plan, temporaries=planning.temporaries_of(programs.steps.values()))
    plan = dataclasses.replace(
        plan, num_pages=planning.num_pages_that_fit(plan, least=least, most=most)
    )
    progress("plan", 1.0, f"{plan.num_pages} pages")
    return plan


def _largest(keys: tuple[ProgramKey, ...]) -> tuple[ProgramKey, ...]:
    """The programs whose temporaries can be the most: the last of each kind, head and sampler."""
    return tuple({(key.is_decode, key.head, key.sampler): key for key in keys}.values())


def _output_bytes(key: ProgramKey) -> int:
    return output_ranges(key).size * 4


def _checked(plan: planning.MemoryPlan, programs: Programs) -> planning.MemoryPlan:
    """The plan with the final programs' temporaries."""
    temporaries = planning.temporaries_of(programs.steps.values())
    if plan.temporaries:
        planning.check_hidden_copy(plan.temporaries, temporaries)
    plan = dataclasses.replace(plan, temporaries=max(plan.temporaries, temporaries))
    if plan.total > plan.limit:
        raise ValueError(
            "the plan exceeds its limit; lower num_pages or max_rows, or raise memory_fraction\n"
            f"{plan}"
        )
    return plan


@functools.cache
def use_compilation_cache(directory: str | None) -> None:
    """Turns the persistent compilation cache on, in a private directory, for short compiles too."""
    if directory is None:
        return
    path = pathlib.Path("~/.cache/treadle/xla" if directory == "auto" else directory).expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def open_model(config: EngineConfig) -> tuple[Model, Any, dict[str, Any], dict[str, Any]]:
    """(model, source or None, config.json, generation_config.json) of a path.

    Raises:
      FileNotFoundError, ValueError: nothing there, or not a model, with the way out.
    """
    path = config.path
    if not path.exists():
        raise FileNotFoundError(
            f"model {config.model!r} does not exist; give a directory or a .gguf"
        )
    if path.suffix == ".gguf":
        described, generation = config_from_gguf(path), {}
    elif path.suffix == ".json":
        described, generation = json.loads(path.read_text()), {}
        if config.load_format != "dummy":
            raise ValueError(f"{path} holds no weights; start with load_format='dummy'")
    else:
        described, generation = checkpoint.read_json_config(path)
    model = registry.of_config(described)
    source = None if config.load_format == "dummy" else checkpoint.open_source(path)
    return model, source, described, generation
