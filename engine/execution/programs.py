"""The closed set of one engine's compiled programs, and the guard that notices a later compile."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.monitoring

from engine.execution import kept
from engine.execution.buckets import ProgramKey
from engine.execution.packing import InstallShape, batch_ranges, install_ranges
from engine.execution.step import StateShape, StepState, make_install, make_step
from models.batch import Tiling
from models.registry import Model

Progress = Callable[[str, float, str], None]

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class ProgramShapes:
    """What every program of an engine has in common."""

    model: Model
    tiling: Tiling
    state: StateShape
    params: Any
    """Pytree of jax.ShapeDtypeStruct with shardings."""
    replicated: jax.sharding.Sharding
    """Where packed arrays and small state leaves lie."""
    pool_shardings: tuple[jax.sharding.Sharding, ...]
    """One for all pools of a paged group."""
    compiler_options: Mapping[str, Any]
    host_row: jax.ShapeDtypeStruct | None = None
    """One token's embedding [D] that the host makes; None: the forward embeds ids itself."""

    @property
    def num_groups(self) -> int:
        """Paged cache groups of the model."""
        return len(self.state.pools)

    @property
    def num_recurrent(self) -> int:
        """Recurrent groups of the model."""
        return len(self.state.states)

    def state_shapes(self) -> StepState:
        """Abstract StepState with shardings."""
        shapes = jax.eval_shape(self.state.fresh)
        small = dataclasses.replace(shapes, pools=())
        small = jax.tree.map(lambda s: self._placed(s, self.replicated), small)
        pools = tuple(
            tuple(self._placed(pool, sharding) for pool in group)
            for group, sharding in zip(shapes.pools, self.pool_shardings, strict=True)
        )
        return dataclasses.replace(small, pools=pools)

    def _placed(self, shape: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    def packed(self, size: int) -> jax.ShapeDtypeStruct:
        """Abstract packed array."""
        return jax.ShapeDtypeStruct((size,), jax.numpy.int32, sharding=self.replicated)

    def trace_step(self, key: ProgramKey) -> jax.stages.Traced:
        """The step of one key. `keep_unused`: parameter numbers stay leaf numbers."""
        step = make_step(self.model, key, self.tiling, self.num_groups, self.num_recurrent)
        state = self.state_shapes()
        out_shardings = (jax.tree.map(lambda s: s.sharding, state), self.replicated)
        jitted = jax.jit(step, donate_argnums=(1,), keep_unused=True, out_shardings=out_shardings)
        ranges = batch_ranges(key, self.num_groups, self.num_recurrent)
        return jitted.trace(self.params, state, self.packed(ranges.size), *self.host_rows(key))

    def host_rows(self, key: ProgramKey) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Abstract embeddings [T, D], the last argument where the host makes them, else none."""
        if self.host_row is None:
            return ()
        row = self.host_row
        rows = jax.ShapeDtypeStruct((key.tokens, *row.shape), row.dtype, sharding=self.replicated)
        return (rows,)

    def trace_install(self, shape: InstallShape) -> jax.stages.Traced:
        """The install program."""
        state = self.state_shapes()
        jitted = jax.jit(
            make_install(shape),
            donate_argnums=(0,),
            keep_unused=True,
            out_shardings=jax.tree.map(lambda s: s.sharding, state),
        )
        return jitted.trace(state, self.packed(install_ranges(shape).size))

    def trace_fresh(self) -> jax.stages.Traced:
        """The program that makes an empty state."""
        shardings = jax.tree.map(lambda s: s.sharding, self.state_shapes())
        return jax.jit(self.state.fresh, out_shardings=shardings).trace()


@dataclasses.dataclass(frozen=True)
class Programs:
    """Every compiled program: a key without one is an error, never a compile."""

    steps: Mapping[ProgramKey, jax.stages.Compiled]
    jaxprs: Mapping[ProgramKey, Any]
    """What each step was compiled from."""
    install: jax.stages.Compiled
    install_shape: InstallShape
    fresh: jax.stages.Compiled
    seconds: Mapping[str, float]
    """Seconds of tracing, with lowering, and of compiling or loading, by program."""

    def step(self, key: ProgramKey) -> jax.stages.Compiled:
        """The program of a key.

        Raises:
          KeyError: the ladder has no such program, with its shape.
        """
        program = self.steps.get(key)
        if program is None:
            raise KeyError(f"no compiled program for {key}; the ladder holds {len(self.steps)}")
        return program


def compile_programs(
    shapes: ProgramShapes,
    keys: Sequence[ProgramKey],
    install_shape: InstallShape,
    progress: Progress,
) -> Programs:
    """Compiles everything an engine will ever run, in parallel threads."""
    jobs: dict[Any, Callable[[], jax.stages.Traced]] = {
        "fresh": shapes.trace_fresh,
        "install": functools.partial(shapes.trace_install, install_shape),
    }
    jobs |= {key: functools.partial(shapes.trace_step, key) for key in keys}
    jaxprs: dict[Any, Any] = {}
    arguments = jax.tree.leaves((shapes.params, shapes.state_shapes()))
    about = (sorted(shapes.compiler_options.items()), [leaf.sharding for leaf in arguments])
    progress("compile", 0.0, f"{len(jobs)} programs")
    done: dict[Any, jax.stages.Compiled] = {}
    seconds: dict[str, float] = {}
    # Tracing holds the interpreter lock and compiling does not: lower here, compile there.
    workers = max(1, min(len(jobs), os.cpu_count() or 1))
    with concurrent.futures.ThreadPoolExecutor(workers, "compile") as pool:
        futures = {}
        for name, trace in jobs.items():
            started = time.perf_counter()
            traced = trace()
            jaxprs[name] = traced.jaxpr
            file = kept.file_of(traced, about)
            is_kept = file is not None and file.exists()
            lowered = None if is_kept else traced.lower()
            seconds[f"{'trace' if is_kept else 'lower'} {name}"] = time.perf_counter() - started
            futures[pool.submit(_compiled, traced, lowered, file, shapes.compiler_options)] = name
        try:
            for future in concurrent.futures.as_completed(futures):
                name = futures[future]
                done[name], verb, spent = future.result()
                seconds[f"{verb} {name}"] = spent
                progress("compile", len(done) / len(jobs), str(name))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # nobody wants the others any more
            raise
    return Programs(
        steps={key: done[key] for key in keys},
        jaxprs={key: jaxprs[key] for key in keys},
        install=done["install"],
        install_shape=install_shape,
        fresh=done["fresh"],
        seconds=seconds,
    )


def _compiled(
    traced: jax.stages.Traced,
    lowered: jax.stages.Lowered | None,
    file: pathlib.Path | None,
    options: Mapping[str, Any],
) -> tuple[jax.stages.Compiled, str, float]:
    """(program, how it was had, seconds); not lowered yet: one that a file should hold."""
    started = time.perf_counter()
    if file is not None and lowered is None:
        found = kept.load(file, traced)
        if found is not None:
            return found, "load", time.perf_counter() - started
    compiled = kept.compiled(lowered or traced.lower(), file, options)
    return compiled, "compile", time.perf_counter() - started


class CompileGuard:
    """Counts compiles after ready: those made inside a step are faults, all others are legal.

    Others are a notebook's cell, or another engine that starts on the same thread.
    """

    def __init__(self) -> None:
        self._is_armed = False
        self._stepping_threads: set[int] = set()
        self.num_own = 0
        self.num_others = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def arm(self) -> None:
        """From now on a step may not compile."""
        self._is_armed = True

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Stands around one step of the engine, and around a launch in a thread of its own.

        Not to be nested in one thread.

        Raises:
          RuntimeError: the step compiled something, in this thread or in the other.
        """
        thread = threading.get_ident()
        self._stepping_threads.add(thread)
        try:
            yield
        finally:
            self._stepping_threads.discard(thread)
        self.check()

    def check(self) -> None:
        """Raises when a step compiled something.

        Raises:
          RuntimeError: with the number of compiles so far.
        """
        if self.num_own:
            raise RuntimeError(
                f"{self.num_own} compiles after ready on the engine's thread; every shape must be "
                "a program of the ladder"
            )

    def close(self) -> None:
        """Stops listening."""
        self._is_armed = False
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if not self._is_armed or event != _COMPILE_EVENT:
            return
        if threading.get_ident() in self._stepping_threads:
            self.num_own += 1
        else:
            self.num_others += 1
