"""From a config to a runner that can launch: open, load, plan, compile."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np

from engine.config import EngineConfig, Setting, SettingError
from engine.execution import plan as planning
from engine.execution import remembered
from engine.execution.buckets import ProgramKey
from engine.execution.helpers import Helpers
from engine.execution.packing import InstallShape, output_ranges
from engine.execution.programs import CompileGuard, Means, Programs, Progress, compile_programs
from engine.execution.recipes import ProgramShapes
from engine.execution.runner import Runner, device_profile
from engine.execution.settings import Settings
from engine.execution.step import StateShape
from models import checkpoint, registry, sharding
from models.cache import CacheSpec
from models.checkpoint import Leaf
from models.gguf import config_from_gguf
from models.registry import HostTables, Model

PROBE_LAYERS = 4
"""Layers of the program that only tells how much temporary memory the real ones will take."""


def start(config: EngineConfig, model: Model, source: Any, progress: Progress) -> Runner:
    """Loads, plans and compiles: everything between a config and a runner that can launch.

    Args:
      config: the engine's settings.
      model: the configured architecture.
      source: an opened checkpoint, or None for dummy weights.
      progress: told of stages "load", "plan", "compile"; of the first one from another thread.

    Raises:
      ValueError: settings that contradict, a checkpoint that does not suit, no room.
    """
    device = jax.devices()[0]
    profile = device_profile(device, config)
    settings = Settings.of(config, model, profile)
    use_compilation_cache(config.compilation_cache)
    mesh = sharding.make_mesh([device])
    guard = CompileGuard()
    helpers = Helpers(settings.helpers, profile.helper_environment)
    with concurrent.futures.ThreadPoolExecutor(1, "load") as pool, helpers:
        # Programs are compiled from shapes alone, so the weights arrive meanwhile.
        loading = pool.submit(_load, settings, model, source, mesh, progress)

        def report(stage: str, fraction: float, detail: str) -> None:
            if loading.done():
                loading.result()  # weights that cannot be had end the start at once
            progress(stage, fraction, detail)

        plan = _plan(settings, model, mesh, report, helpers)
        shapes = _shapes(settings, model, mesh, plan.num_pages)
        keys = settings.ladder.keys() if settings.lane != "eager" else ()
        means = Means(helpers, config.compilation_cache is not None, profile.loads_at_once)
        programs = compile_programs(shapes, keys, _install_shape(settings, model), report, means)
        params, tables = loading.result()
    plan = dataclasses.replace(plan, host_tables=planning.tree_bytes(tables))
    plan = _checked(plan, programs)
    return Runner(settings, model, params, programs, shapes, plan, guard, tables)


def _load(
    settings: Settings, model: Model, source: Any, mesh: Any, progress: Progress
) -> tuple[Any, HostTables]:
    """Parameters on the device, and the tables that stay on the host."""
    started = time.perf_counter()
    progress("load", 0.0, "")

    def shard(leaf: Leaf) -> jax.sharding.Sharding:
        return sharding.named(mesh, leaf.partition)

    def report(done: int, total: int) -> None:
        progress("load", done / total, f"{done / 2**30:.2f} GiB")

    def put(buffer: np.ndarray, leaf: Leaf) -> jax.Array:
        return jax.block_until_ready(jax.device_put(buffer, shard(leaf)))

    leaves, host_leaves = model.leaves(), model.host_leaves()
    if source is None:
        tables = checkpoint.dummy_host(host_leaves, dtype=settings.dtype, seed=settings.config.seed)
        params = checkpoint.dummy(
            leaves, dtype=settings.dtype, seed=settings.config.seed, shardings=shard
        )
        jax.block_until_ready(params)
    else:
        tables = checkpoint.load_host(host_leaves, source, dtype=settings.dtype)
        params = checkpoint.load(
            leaves,
            source,
            dtype=settings.dtype,
            put=put,
            ignore=model.ignores,
            progress=report,
        )
    progress("load", 1.0, f"{time.perf_counter() - started:.1f} s")
    return params, tables


def _shapes(
    settings: Settings, model: Model, mesh: Any, num_pages: int, num_states: int | None = None
) -> ProgramShapes:
    spec = model.cache_spec(settings.page_size, settings.dtype)
    return ProgramShapes(
        model=model,
        dtype=settings.dtype,
        page_size=settings.page_size,
        tiling=settings.profile.tiling,
        state=StateShape(
            max_slots=settings.max_slots,
            max_model_len=settings.max_model_len,
            vocab_size=model.vocab_size,
            table_width=settings.ladder.widths[-1],
            pools=spec.pool_shapes(num_pages),
            states=spec.state_shapes(num_states or _num_states(settings, spec)),
        ),
        mesh=mesh,
        compiler_options=settings.profile.compiler_options,
    )


def _num_states(settings: Settings, spec: CacheSpec) -> int:
    """States of each recurrent pool: trash, one per slot, and as many again for snapshots."""
    has_snapshots = settings.config.prefix_cache and all(g.prefix_cacheable for g in spec.groups)
    return 1 + settings.max_slots * (2 if has_snapshots else 1)


def _install_shape(settings: Settings, model: Model) -> InstallShape:
    return InstallShape(
        rows=min(settings.profile.install_rows, settings.max_rows),
        max_slots=settings.max_slots,
        max_model_len=settings.max_model_len,
        vocab_size=model.vocab_size,
        num_groups=len(model.cache_spec(settings.page_size, settings.dtype).paged),
        table_width=settings.ladder.widths[-1],
    )


def _plan(
    settings: Settings, model: Model, mesh: Any, progress: Progress, helpers: Helpers
) -> planning.MemoryPlan:
    """Plans the pools: what the weights, the state and the temporaries leave, unless given."""
    config, profile = settings.config, settings.profile
    spec = model.cache_spec(settings.page_size, settings.dtype)
    shapes = _shapes(settings, model, mesh, num_pages=2)
    state = shapes.state_shapes()
    keys = settings.ladder.keys()
    plan = planning.MemoryPlan(
        limit=int(profile.memory_bytes * config.memory_fraction),
        weights=planning.tree_bytes(shapes.params),
        small_state=planning.tree_bytes(dataclasses.replace(state, pools=(), states=())),
        states=planning.tree_bytes(state.states),
        temporaries=0,
        outputs=settings.depth * max(_output_bytes(key) for key in keys),
        page_bytes=spec.page_bytes,
        num_pages=config.num_pages or 0,
        host_rows=max(planning.tree_bytes(shapes.host_rows(key)) for key in keys),
    )
    least = settings.max_pages + 2
    if config.num_pages is not None:
        if config.num_pages < least:
            pages, length = Setting("num_pages"), Setting("max_model_len")
            raise SettingError(
                pages,
                f" is {config.num_pages} but one request of ",
                length,
                f" {settings.max_model_len} needs {least}; raise ",
                pages,
                " or lower ",
                length,
            )
        return plan
    most = settings.max_slots * settings.max_pages + 2
    if profile.pool_bytes is not None:
        most = max(least, min(most, profile.pool_bytes // spec.page_bytes))
    else:
        progress("plan", 0.0, "largest program")
        temporaries = _probe_temporaries(settings, model, mesh, helpers)
        plan = dataclasses.replace(plan, temporaries=temporaries)
    plan = dataclasses.replace(
        plan, num_pages=planning.num_pages_that_fit(plan, least=least, most=most)
    )
    progress("plan", 1.0, f"{plan.num_pages} pages")
    return plan


def _probe_temporaries(settings: Settings, model: Model, mesh: Any, helpers: Helpers) -> int:
    """Temporaries of the largest program, compiled for the model's first layers and tiny pools.

    The last program of a ladder scores prompts, with the full sampler, the most rows and the most
    tokens: it holds every part of the others. Layers use the same memory one after another:
    Qwen3-8B at 256 rows needs 551, 580, 638 and 638 MiB with 2, 4, 8 and 16 layers (compiled for
    an H200). What is missed, the slack holds, and the programs that will run are checked against
    this figure, so that it may come from an earlier start.
    """
    shallow = model.first_layers(PROBE_LAYERS)
    shapes = _shapes(settings, shallow, mesh, num_pages=2, num_states=3)
    shapes = dataclasses.replace(shapes, compiler_options=settings.profile.probe_options)
    largest = settings.ladder.keys()[-1:]

    def compiled() -> int:
        helpers.start(helpers.number)  # it is a first start: they will be asked for every program
        shape = _install_shape(settings, model)
        programs = compile_programs(shapes, largest, shape, lambda *_: None)
        return planning.temporaries_of(programs.steps.values())

    about = (largest, shallow.registration.architecture, shallow.config, shapes.state)
    about += (shapes.tiling, dict(shapes.compiler_options), settings.dtype)
    return remembered.figure("temporaries", about, compiled)


def _output_bytes(key: ProgramKey) -> int:
    return output_ranges(key).size * 4


def _checked(plan: planning.MemoryPlan, programs: Programs) -> planning.MemoryPlan:
    """The plan with the final programs' temporaries."""
    temporaries = planning.temporaries_of(programs.steps.values())
    if plan.temporaries:
        planning.check_hidden_copy(plan.temporaries, temporaries)
    plan = dataclasses.replace(plan, temporaries=max(plan.temporaries, temporaries))
    if plan.total > plan.limit:
        raise SettingError(
            "the plan exceeds its limit; lower ",
            Setting("num_pages"),
            " or ",
            Setting("max_rows"),
            ", or raise ",
            Setting("memory_fraction"),
            f"\n{plan}",
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
