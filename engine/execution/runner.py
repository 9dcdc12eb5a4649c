"""Runs schedules on the device: packs and launches them, and reads their outputs one step late.

With `kernels/` the only place that names devices: what differs between them leaves here as data.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from engine.config import EngineConfig, Lane
from engine.execution import plan as planning
from engine.execution.buckets import Ladder, ProgramKey, powers_of_two
from engine.execution.packing import (
    InstallShape,
    output_ranges,
    pack,
    pack_install,
    unpack_output,
)
from engine.execution.programs import (
    CompileGuard,
    Programs,
    ProgramShapes,
    Progress,
    compile_programs,
)
from engine.execution.step import StateShape, StepState, make_install, make_step
from engine.scheduling.schedule import Install, RowKind, Schedule, StepResult
from models import checkpoint, registry, sharding
from models.batch import Tiling
from models.cache import CacheSpec
from models.checkpoint import Leaf
from models.gguf import config_from_gguf
from models.registry import Model


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """Choices that depend on the kind of device."""

    name: str
    dtype: str
    page_size: int
    max_rows: int
    first_row_rung: int
    """Smallest decode rung. 2 on a CPU: one-row programs copy transposed weights there."""
    token_budget: int
    token_rungs: tuple[int, ...]
    max_chunk_rows: int
    tiling: Tiling
    unroll: bool
    """Write the sampler's searches out: command buffers do not record loops."""
    compiler_options: Mapping[str, Any]
    probe_options: Mapping[str, Any]
    """For programs compiled only to learn their temporaries: as quick as can be."""
    memory_bytes: int
    """What the allocator may hand out."""
    pool_bytes: int | None
    """Bound of all pools; None: whatever the plan leaves."""

    @classmethod
    def of(cls, device: sharding.Device, config: EngineConfig) -> DeviceProfile:
        """The profile of a device under an engine's settings."""
        if device.platform == "cpu":
            return _cpu_profile(device)
        return _gpu_profile(device, config)


def _cpu_profile(device: sharding.Device) -> DeviceProfile:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceProfile(
        name=device.device_kind,
        dtype="float32",
        page_size=16,
        max_rows=8,
        first_row_rung=2,
        token_budget=128,
        token_rungs=(128,),
        max_chunk_rows=8,
        tiling=Tiling(block_pages=16, tile_tokens=32, tiles_at_once=1),
        unroll=False,
        compiler_options={},
        probe_options={},
        memory_bytes=int(pages),
        pool_bytes=2**29,
    )


def _gpu_profile(device: sharding.Device, config: EngineConfig) -> DeviceProfile:
    stats = device.memory_stats() or {}
    options: dict[str, Any] = {}
    if not config.command_buffers:
        options["xla_gpu_enable_command_buffer"] = ""
    return DeviceProfile(
        name=device.device_kind,
        dtype="bfloat16",
        page_size=64,
        max_rows=256,
        first_row_rung=1,
        token_budget=2048,
        token_rungs=(512, 2048),
        max_chunk_rows=16,
        tiling=Tiling(block_pages=128, tile_tokens=64, tiles_at_once=1024),
        unroll=True,
        compiler_options=options,
        probe_options=options | {"xla_gpu_autotune_level": 0},
        memory_bytes=int(stats.get("bytes_limit", 0)),
        pool_bytes=None,
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """EngineConfig with every None resolved for one model on one device."""

    config: EngineConfig
    profile: DeviceProfile
    dtype: str
    max_model_len: int
    max_rows: int
    max_slots: int
    token_budget: int
    max_chunk_rows: int
    page_size: int
    max_pages: int
    """Pages of one request of max_model_len."""
    lane: Lane
    depth: int
    ladder: Ladder

    @classmethod
    def of(cls, config: EngineConfig, model: Model, profile: DeviceProfile) -> Settings:
        """Resolves and checks the settings.

        Raises:
          ValueError: a setting exceeds what the model or another setting allows.
        """
        model_limit = model.config.max_position_embeddings
        max_model_len = config.max_model_len or min(model_limit, 8192)
        if max_model_len > model_limit:
            raise ValueError(
                f"max_model_len is {max_model_len} but the model's positions end at {model_limit}; "
                "lower max_model_len"
            )
        max_rows = config.max_rows or profile.max_rows
        bound = model.registration.max_rows
        if bound is not None and max_rows > bound:
            raise ValueError(
                f"max_rows is {max_rows} but {model.registration.architecture} runs {bound} rows "
                f"a step; start with max_rows={bound}"
            )
        token_budget = config.token_budget or max(profile.token_budget, max_rows)
        page_size = config.page_size or profile.page_size
        max_pages = -(-max_model_len // page_size)
        lane = choose_lane(config, model)
        return cls(
            config=config,
            profile=profile,
            dtype=profile.dtype if config.dtype == "auto" else config.dtype,
            max_model_len=max_model_len,
            max_rows=max_rows,
            max_slots=max_rows + -(-max_rows // 4),
            token_budget=token_budget,
            max_chunk_rows=min(
                config.max_chunk_rows or profile.max_chunk_rows, max_rows, token_budget
            ),
            page_size=page_size,
            max_pages=max_pages,
            lane=lane,
            depth=config.depth if lane == "overlap" else 1,
            ladder=_ladder(config, profile, max_rows, token_budget, max_pages),
        )


def _ladder(
    config: EngineConfig, profile: DeviceProfile, max_rows: int, token_budget: int, max_pages: int
) -> Ladder:
    rows = config.row_rungs or powers_of_two(min(profile.first_row_rung, max_rows), max_rows)
    tokens = config.token_rungs or (
        *(rung for rung in profile.token_rungs if rung < token_budget),
        token_budget,
    )
    widths = config.page_table_rungs or (max_pages,)
    for name, rungs, last in (
        ("row_rungs", rows, max_rows),
        ("token_rungs", tokens, token_budget),
        ("page_table_rungs", widths, max_pages),
    ):
        if rungs[-1] < last:
            raise ValueError(f"{name} ends at {rungs[-1]} but steps reach {last}; add that rung")
    ladder = Ladder(
        rows=tuple(rows),
        tokens=tuple(tokens),
        widths=tuple(widths),
        query_lens=(1,),
        max_chunk_rows=min(config.max_chunk_rows or profile.max_chunk_rows, max_rows, token_budget),
        deterministic=config.deterministic,
    )
    if len(ladder.keys()) > config.max_programs:
        raise ValueError(
            f"the ladder has {len(ladder.keys())} programs but max_programs is "
            f"{config.max_programs}; give fewer row_rungs, token_rungs or page_table_rungs, or "
            "raise max_programs"
        )
    return ladder


def choose_lane(config: EngineConfig, model: Model) -> Lane:
    """The lane of a model under an engine's settings.

    Raises:
      ValueError: require_overlap is set and the model runs on another lane, with the reason.
    """
    architecture = model.registration.architecture
    lane: Lane = "overlap"
    reason = ""
    if config.eager:
        lane, reason = "eager", "eager is set"
    elif not config.overlap:
        lane, reason = "sync", "overlap is off"
    elif architecture in config.sync_lanes:
        lane, reason = "sync", f"sync_lanes names {architecture}"
    elif not model.registration.device_token_ids:
        lane, reason = "sync", f"{architecture} does not declare device_token_ids"
    if config.require_overlap and lane != "overlap":
        raise ValueError(f"require_overlap is set but the lane is {lane}: {reason}")
    return lane


@dataclasses.dataclass(frozen=True)
class PackedSchedule:
    """A schedule with its program and its packed array, which is never written again."""

    schedule: Schedule
    key: ProgramKey
    flat: np.ndarray


@dataclasses.dataclass(frozen=True)
class Launch:
    """One step under way."""

    schedule: Schedule
    key: ProgramKey
    output: jax.Array


@dataclasses.dataclass
class RunnerCounters:
    """What ran, counted on the host."""

    steps: collections.Counter[Lane] = dataclasses.field(default_factory=collections.Counter)
    device_rows: int = 0
    """Rows whose newest id came from the device."""
    host_rows: int = 0
    programs: collections.Counter[ProgramKey] = dataclasses.field(
        default_factory=collections.Counter
    )


class Runner:
    """Owns the device side of one engine: parameters, state, programs."""

    def __init__(
        self,
        settings: Settings,
        model: Model,
        params: Any,
        programs: Programs,
        shapes: ProgramShapes,
        plan: planning.MemoryPlan,
        guard: CompileGuard,
    ) -> None:
        self.settings = settings
        self.model = model
        self.params = params
        self.programs = programs
        self.shapes = shapes
        self.plan = plan
        self.guard = guard
        self.counters = RunnerCounters()
        self.weights_version = 0
        self.state: StepState = programs.fresh()
        self._eager_steps: dict[ProgramKey, Callable[..., Any]] = {}

    def pack(self, schedule: Schedule) -> PackedSchedule:
        """Checks a schedule and lays it out for its program."""
        key = self.settings.ladder.key_of(schedule)
        flat = pack(
            schedule, key, max_slots=self.settings.max_slots, vocab_size=self.model.vocab_size
        )
        return PackedSchedule(schedule, key, flat)

    def launch(self, packed: PackedSchedule) -> Launch:
        """Starts one step. Its output is read later by `settle`."""
        schedule, key = packed.schedule, packed.key
        at_once = self.programs.install_shape.rows
        for start in range(0, len(schedule.installs), at_once):
            self.install(schedule.installs[start : start + at_once])
        # The array goes in as it is: device_put with a sharding costs 0.4 ms more of Python (H200
        # host, 2026-11-29), and an array changed after the call was never seen (benchmarks/poison).
        self.state, output = self._step(key)(self.params, self.state, packed.flat)
        output.copy_to_host_async()
        self._count(schedule, key)
        return Launch(schedule, key, output)

    def settle(self, launch: Launch) -> StepResult:
        """Waits for a launch and reads its output, the only thing the host reads of a step."""
        flat = np.asarray(launch.output)
        return unpack_output(launch.key, flat, launch.schedule.num_rows, launch.schedule.num_tokens)

    def reset_state(self) -> None:
        """An empty state; what was in flight is void."""
        _delete(self.state)
        self.state = self.programs.fresh()

    def replace_params(self, params: Any) -> None:
        """Swaps the weights without a compile.

        Raises:
          ValueError: a leaf's shape, dtype or sharding differs from the compiled one.
        """
        new_leaves, new_tree = jax.tree.flatten(params)
        old_leaves, old_tree = jax.tree.flatten(self.params)
        if new_tree != old_tree:
            raise ValueError("the new parameters have another structure than the compiled ones")
        for new, old in zip(new_leaves, old_leaves, strict=True):
            if (new.shape, new.dtype, new.sharding) != (old.shape, old.dtype, old.sharding):
                raise ValueError(
                    f"a new parameter is {new.dtype}{list(new.shape)} on {new.sharding}, the "
                    f"compiled one {old.dtype}{list(old.shape)} on {old.sharding}"
                )
        self.params = params
        self.weights_version += 1

    def device_counters(self) -> tuple[int, int]:
        """Rows resolved from the device and from the host, as the state counted them. Waits."""
        device_rows, host_rows = np.asarray(self.state.counters)
        return int(device_rows), int(host_rows)

    @property
    def num_param_leaves(self) -> int:
        """Parameter arrays, the first arguments of every program."""
        return len(jax.tree.leaves(self.shapes.params))

    @property
    def num_parameters(self) -> int:
        """Weights of the model, shared ones once."""
        return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(self.shapes.params))

    def close(self) -> None:
        """Gives the device's memory back: the last call on a runner."""
        self.guard.close()
        _delete(self.state)
        _delete(self.params)
        self.params = None
        # The last references to the executables, whose code and constants lie on the device.
        del self.programs

    def install(self, installs: tuple[Install, ...]) -> None:
        """Tells the device about newly admitted slots, at most one install program's worth."""
        packed = pack_install(installs, self.programs.install_shape)
        if self.settings.lane == "eager":
            with jax.disable_jit():
                self.state = make_install(self.programs.install_shape)(self.state, packed)
        else:
            self.state = self.programs.install(self.state, packed)

    def _step(self, key: ProgramKey) -> Callable[..., Any]:
        if self.settings.lane != "eager":
            return self.programs.step(key)
        if key not in self._eager_steps:
            step = make_step(
                self.model,
                key,
                self.shapes.tiling,
                self.shapes.num_groups,
                unroll=self.shapes.unroll,
            )
            self._eager_steps[key] = _unjitted(step)
        return self._eager_steps[key]

    def _count(self, schedule: Schedule, key: ProgramKey) -> None:
        num_device = int(np.count_nonzero(schedule.kinds & RowKind.DEVICE_ID))
        self.counters.steps[self.settings.lane] += 1
        self.counters.programs[key] += 1
        self.counters.device_rows += num_device
        self.counters.host_rows += schedule.num_rows - num_device


def _unjitted(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return step(*args)

    return run


def _delete(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


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
    profile = DeviceProfile.of(device, config)
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
            ignore=model.registration.ignores,
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
        unroll=settings.profile.unroll,
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
