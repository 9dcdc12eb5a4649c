"""Runs schedules on the device: packs and launches them, and reads their outputs one step late.

With `kernels/` the only place that names devices: what differs between them leaves here as data.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from engine.config import EngineConfig, Lane
from engine.execution import plan as planning
from engine.execution.buckets import ProgramKey, powers_of_two
from engine.execution.launcher import Launcher
from engine.execution.packing import (
    carried_pages,
    check,
    pack,
    pack_installs,
    unpack_output,
)
from engine.execution.page_tables import DeviceTables, TableChanges
from engine.execution.programs import CompileGuard, Programs
from engine.execution.recipes import ProgramShapes
from engine.execution.settings import DeviceProfile, Settings, refuse_undeclared
from engine.execution.step import StepState, make_install, make_step
from engine.scheduling.config import GroupConfig
from engine.scheduling.schedule import RowKind, Schedule, StepResult
from models import sharding
from models.batch import Tiling
from models.cache import CacheSpec, PagedGroup, RecurrentGroup
from models.registry import HostTables, Model

_LARGE_CARD = 64 * 2**30
"""Bytes for the engine from which on a card takes large steps."""
_HELPER_ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}
_MAX_HELPERS = 12
"""A helper takes about 0.3 GiB of host memory; more would wait for the compiler's threads."""


def device_profile(device: sharding.Device, config: EngineConfig) -> DeviceProfile:
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
        row_rungs=powers_of_two(2, 1024),
        token_budget=128,
        token_rungs=(128,),
        max_chunk_rows=8,
        install_rows=8,
        tiling=Tiling(block_pages=16, tile_tokens=32, tiles_at_once=1),
        compiler_options={},
        probe_options={},
        memory_bytes=int(pages),
        pool_bytes=2**29,
        helper_environment=_HELPER_ENVIRONMENT,
    )


def _gpu_profile(device: sharding.Device, config: EngineConfig) -> DeviceProfile:
    stats = device.memory_stats() or {}
    num_processors = os.cpu_count() or 1
    options: dict[str, Any] = {}
    if not config.command_buffers:
        options["xla_gpu_enable_command_buffer"] = ""
    memory_bytes = int(stats.get("bytes_limit", 0))
    # More tokens fill experts better; a small card has no room for their temporaries.
    token_budget = 8192 if memory_bytes >= _LARGE_CARD else 2048
    return DeviceProfile(
        name=device.device_kind,
        dtype="bfloat16",
        page_size=64,
        max_rows=256,
        row_rungs=(1, *powers_of_two(4, 1024)),
        token_budget=token_budget,
        token_rungs=(512, 2048, 8192),
        max_chunk_rows=64,
        install_rows=16,
        tiling=Tiling(
            block_pages=128,
            tile_tokens=64,
            tiles_at_once=1024,
            # The kernels are written for Hopper.
            kernels="mosaic" if getattr(device, "compute_capability", "") == "9.0" else "plain",
        ),
        compiler_options=options,
        # What it computes is never run: compiled for an H200, the temporaries are the same.
        probe_options=options | {"xla_gpu_autotune_level": 0, "xla_backend_optimization_level": 0},
        memory_bytes=memory_bytes,
        pool_bytes=None,
        small_blocks=(2**13, 2**16, 2**20),
        # A helper lowers for Hopper too, without one: see `kernels` above.
        helpers=min(_MAX_HELPERS, num_processors - 1),
        helper_environment=_HELPER_ENVIRONMENT,
        loads_at_once=num_processors,
    )


@dataclasses.dataclass(frozen=True)
class PackedSchedule:
    """A schedule with its program and its packed arrays, which are never written again.

    What is packed is to be launched before the next one is packed.
    """

    schedule: Schedule
    key: ProgramKey
    flat: np.ndarray
    installs: tuple[np.ndarray, ...]
    """Packed arrays of the install program's runs ahead of the step."""
    changes: TableChanges
    host_rows: tuple[np.ndarray, ...] = ()
    """Embeddings [T, D] of a registration that makes them on the host; empty for others."""


@dataclasses.dataclass(frozen=True)
class Started:
    """What the call of a step's program gave."""

    output: jax.Array
    seconds: float
    """The call itself, installs included; the device works on after it."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One step under way, perhaps not begun."""

    schedule: Schedule
    key: ProgramKey
    started: concurrent.futures.Future[Started]

    @property
    def output(self) -> jax.Array:
        """The packed output. Waits for the call, not for the device; raises what the call did."""
        return self.started.result().output

    @property
    def seconds(self) -> float:
        """Of the call. Waits and raises alike."""
        return self.started.result().seconds


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
    """Owns the device side of one engine: parameters, state, programs.

    With launches in flight the programs are called by a launching thread, which owns the state as
    long as a call is queued; everybody else waits for it. All methods belong to one other thread.
    """

    def __init__(
        self,
        settings: Settings,
        model: Model,
        params: Any,
        programs: Programs,
        shapes: ProgramShapes,
        plan: planning.MemoryPlan,
        guard: CompileGuard,
        tables: HostTables | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.params = params
        self.tables = tables or {}
        self.programs = programs
        self.shapes = shapes
        self.plan = plan
        self.guard = guard
        spec = model.cache_spec(settings.page_size, settings.dtype)
        self.groups = tuple(
            _group_config(spec, group, plan.num_pages, shapes.state.num_states)
            for group in spec.groups
        )
        self._tables_held = DeviceTables(
            settings.max_slots, shapes.state.table_width, shapes.num_groups
        )
        self.counters = RunnerCounters()
        self.weights_version = 0
        self._launcher = Launcher()
        self._state: StepState = programs.fresh()
        self._eager_steps: dict[ProgramKey, Callable[..., Any]] = {}
        self._fences = _leave_holes(settings.profile.small_blocks, shapes.replicated)

    @property
    def state(self) -> StepState:
        """The state after everything that was launched. Waits for the calls, not for the device."""
        self._launcher.drain()
        return self._state

    @state.setter
    def state(self, state: StepState) -> None:
        self._launcher.drain()
        self._state = state

    def pack(self, schedule: Schedule, key: ProgramKey | None = None) -> PackedSchedule:
        """Checks a schedule and lays it out for a program, by default the smallest that holds it.

        Raises:
          ValueError: see `packing.check`; or no program holds the schedule.
        """
        refuse_undeclared(schedule, self.model.registration)
        key = key or self.settings.ladder.key_of(schedule)
        settings = self.settings
        check(
            schedule,
            key,
            max_slots=settings.max_slots,
            vocab_size=self.model.vocab_size,
            groups=self.groups,
        )
        changes = self._tables_held.changes(schedule, carried_pages(key))
        installs = pack_installs(schedule.installs, changes.before, self.programs.install_shape)
        flat = pack(schedule, key, max_slots=settings.max_slots, page_changes=changes.within)
        rows = self.host_rows(schedule, key)
        return PackedSchedule(schedule, key, flat, tuple(installs), changes, rows)

    def host_rows(self, schedule: Schedule, key: ProgramKey) -> tuple[np.ndarray, ...]:
        """The embeddings [T, D] that go in with a step, where the registration makes them here.

        A new array for every step, never written again. Padding tokens are embedded as id 0.
        """
        if self.shapes.host_row is None:
            return ()
        token_ids = np.zeros(key.tokens, np.int32)
        token_ids[: schedule.num_tokens] = schedule.token_ids
        return (self.model.host_embed(self.tables, token_ids, self.shapes.host_row.dtype),)

    def launch(self, packed: PackedSchedule) -> Launch:
        """Starts one step, or hands it to the launching thread. `settle` reads its output later.

        With one launch in flight nothing could be done meanwhile: the call is made here.

        Raises:
          Exception: of a call made here; one made in the launching thread is raised by `settle`.
        """
        if self.settings.depth > 1:
            started = self._launcher.submit(functools.partial(self._start_apart, packed))
        else:
            started = concurrent.futures.Future[Started]()
            started.set_result(self._start(packed))
        # At once, since the next step is packed against it. After a failure the state is made anew
        # and the tables with it.
        self._tables_held.note(packed.schedule, packed.changes)
        self._count(packed.schedule, packed.key)
        return Launch(packed.schedule, packed.key, started)

    def run(self, packed: PackedSchedule) -> jax.Array:
        """The step itself, not counted: the state moves on, the packed output comes back."""
        self._launcher.drain()
        output = self._run(packed)
        self._tables_held.note(packed.schedule, packed.changes)
        return output

    def _start_apart(self, packed: PackedSchedule) -> Started:
        with self.guard.step():
            return self._start(packed)

    def _start(self, packed: PackedSchedule) -> Started:
        began = time.perf_counter()
        output = self._run(packed)
        output.copy_to_host_async()
        return Started(output, time.perf_counter() - began)

    def _run(self, packed: PackedSchedule) -> jax.Array:
        for flat in packed.installs:
            self._install(flat)
        # The array goes in as it is: device_put with a sharding costs 0.4 ms more of Python (H200
        # host, 2026-11-29), and an array changed after the call was never seen (benchmarks/poison).
        self._state, output = self._step(packed.key)(
            self.params, self._state, packed.flat, *packed.host_rows
        )
        return output

    def settle(self, launch: Launch) -> StepResult:
        """Waits for a launch and reads its output, the only thing the host reads of a step.

        Raises:
          Exception: what the launch failed with; one that was behind a failed one fails alike.
        """
        flat = np.asarray(launch.output)
        return unpack_output(launch.key, flat, launch.schedule.num_rows, launch.schedule.num_tokens)

    def reset_state(self) -> None:
        """An empty state, waited for: a broken device says so here. What was in flight is void."""
        self._launcher.reset()
        _delete(self._state)
        self._state = jax.block_until_ready(self.programs.fresh())
        self._tables_held.reset()

    def enter_lane(self, lane: Lane, depth: int) -> None:
        """Goes on with the same programs on another lane, from an empty state.

        Raises:
          ValueError: from or to the eager lane, which has no programs; or to the overlap lane with
            a registration that does not declare device_token_ids.
        """
        registration = self.model.registration
        if lane == "overlap" and not registration.device_token_ids:
            raise ValueError(
                f"{registration.architecture} does not declare device_token_ids; "
                "it runs on the sync lane only"
            )
        if "eager" in (lane, self.settings.lane):
            raise ValueError(
                f"the lane is {self.settings.lane} and cannot become {lane}: eager has no "
                "programs; start another engine"
            )
        self._launcher.close()
        depth = depth if lane == "overlap" else 1
        self.settings = dataclasses.replace(self.settings, lane=lane, depth=depth)
        self.reset_state()

    def replace_params(self, params: Any, tables: HostTables | None = None) -> None:
        """Swaps the weights without a compile, and with them the tables on the host.

        Raises:
          ValueError: a leaf's shape, dtype or sharding differs from the compiled one; or a table
            is missing, left over or of another shape.
        """
        tables = tables or {}
        shapes = {path: table.shape for path, table in tables.items()}
        expected = {path: table.shape for path, table in self.tables.items()}
        if shapes != expected:
            raise ValueError(
                f"the new host tables are {shapes or 'none'}, the engine has {expected or 'none'}; "
                "give the tables that belong to the new parameters"
            )
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
        self._launcher.drain()  # what was launched runs on the old ones
        self.params, self.tables = params, tables
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
        on_device = {part.name for leaf in self.model.leaves().values() for part in leaf.parts}
        host_only = [
            leaf
            for leaf in self.model.host_leaves().values()
            if not on_device & {part.name for part in leaf.parts}
        ]
        leaves = [*jax.tree.leaves(self.shapes.params), *host_only]
        return sum(int(np.prod(x.shape)) for x in leaves)

    def close(self) -> None:
        """Gives the device's memory back: the last call on a runner."""
        self._launcher.close()
        self.guard.close()
        _delete(self._state)
        _delete(self.params)
        _delete(self._fences)
        self.params, self.tables = None, {}
        # The last references to the executables, whose code and constants lie on the device.
        del self.programs

    def install(self, packed: np.ndarray) -> None:
        """Tells the device about newly admitted slots: one run of the install program."""
        self._launcher.drain()
        self._install(packed)

    def _install(self, packed: np.ndarray) -> None:
        if self.settings.lane == "eager":
            with jax.disable_jit():
                self._state = make_install(self.programs.install_shape)(self._state, packed)
        else:
            self._state = self.programs.install(self._state, packed)

    def _step(self, key: ProgramKey) -> Callable[..., Any]:
        if self.settings.lane != "eager":
            return self.programs.step(key)
        if key not in self._eager_steps:
            step = make_step(
                self.model,
                key,
                self.shapes.tiling,
                self.shapes.num_groups,
                self.shapes.num_recurrent,
            )
            self._eager_steps[key] = _unjitted(step)
        return self._eager_steps[key]

    def _count(self, schedule: Schedule, key: ProgramKey) -> None:
        num_device = int(np.count_nonzero(schedule.kinds & RowKind.DEVICE_ID))
        self.counters.steps[self.settings.lane] += 1
        self.counters.programs[key] += 1
        self.counters.device_rows += num_device
        self.counters.host_rows += schedule.num_rows - num_device


def _group_config(
    spec: CacheSpec, group: PagedGroup | RecurrentGroup, num_pages: int, num_states: int
) -> GroupConfig:
    """What the scheduler knows of a cache group."""
    if isinstance(group, PagedGroup):
        return GroupConfig(num_pages, group.page_size, group.window, group.prefix_cacheable)
    tokens = spec.snapshot_tokens(group)
    return GroupConfig(num_states, tokens, None, group.prefix_cacheable, is_recurrent=True)


def _unjitted(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return step(*args)

    return run


_HOLES = 8
"""Free blocks of each size: more than a step's input and output of every launch in flight."""


def _leave_holes(sizes: tuple[int, ...], place: jax.sharding.Sharding) -> list[jax.Array]:
    """Small free blocks, each between two that are kept: the returned ones.

    The allocator gives small buffers the smallest block that holds them. Without holes they are cut
    from the large free region, and the temporaries of the next step, which come from there too, get
    another address; then every kernel of its recorded graph has to be told (0.84 ms a step of 451
    kernels, H200, 2026-11-30).
    """
    blocks = [
        jax.device_put(np.zeros(size, np.uint8), place) for size in sizes for _ in range(2 * _HOLES)
    ]
    jax.block_until_ready(blocks)
    _delete(blocks[::2])
    return blocks[1::2]


def _delete(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()
