"""The closed set of one engine's compiled programs, and the guard that notices a later compile."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.monitoring

from engine.execution import contract, helper, kept, remembered
from engine.execution.buckets import ProgramKey
from engine.execution.contract import Finding
from engine.execution.helpers import Help, Helpers
from engine.execution.packing import InstallShape
from engine.execution.recipes import ProgramShapes, Recipe
from models import registry

_LOG = logging.getLogger(__name__)

Progress = Callable[[str, float, str], None]


@dataclasses.dataclass(frozen=True)
class Means:
    """What a start may use to have its programs sooner."""

    helpers: Helpers | None = None
    """None: steps are traced and lowered in this process alone."""
    keeps: bool = False
    """Programs are kept by what they are made from, and loaded before anything is traced."""
    loads_at_once: int = 1


@dataclasses.dataclass(frozen=True)
class Programs:
    """Every compiled program: a key without one is an error, never a compile."""

    steps: Mapping[ProgramKey, jax.stages.Compiled]
    findings: Mapping[ProgramKey, Sequence[Finding]]
    """What the structural proof found against each step as it was traced: nothing, if it holds.

    A step that was loaded had none when it was kept.
    """
    install: jax.stages.Compiled
    install_shape: InstallShape
    fresh: jax.stages.Compiled
    seconds: Mapping[str, float]
    """Seconds of tracing, with lowering, and of compiling or loading, by program.

    A step that a helper lowered has that helper's seconds too.
    """

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
    means: Means | None = None,
) -> Programs:
    """Has everything that an engine will ever run: loaded, or lowered and compiled."""
    making = _Making(shapes, keys, install_shape, means or Means(), progress)
    making.load()
    making.compile()
    return Programs(
        steps={key: making.done[key] for key in keys},
        findings={key: making.findings.get(key, ()) for key in keys},
        install=making.done["install"],
        install_shape=install_shape,
        fresh=making.done["fresh"],
        seconds=making.seconds,
    )


@dataclasses.dataclass(frozen=True)
class _Lowered:
    """A program to be compiled, and where it is kept then."""

    name: Any
    lowered: jax.stages.Lowered
    file: pathlib.Path | None


class _Making:
    """Programs on the way to being compiled, by name: a step's is its key."""

    def __init__(
        self,
        shapes: ProgramShapes,
        keys: Sequence[ProgramKey],
        install_shape: InstallShape,
        means: Means,
        progress: Progress,
    ) -> None:
        self.done: dict[Any, jax.stages.Compiled] = {}
        self.findings: dict[Any, Sequence[Finding]] = {}
        self.seconds: dict[str, float] = {}
        self._shapes = shapes
        self._recipes: dict[Any, Recipe] = {
            "fresh": shapes.fresh(),
            "install": shapes.install(install_shape),
            **{key: shapes.step(key) for key in keys},
        }
        self._means = means
        self._progress = progress
        self._about = (shapes.about, install_shape)
        is_own = registry.is_own(shapes.model.registration)
        self._is_known = means.keeps and is_own and remembered.is_current()

    def load(self) -> None:
        """Loads what was kept, before anything is traced."""
        self._progress("compile", 0.0, f"{len(self._recipes)} programs")
        files = {name: self._file(name) for name in self._recipes}
        present = {name: file for name, file in files.items() if file and file.exists()}
        with _threads(self._means.loads_at_once, "load") as pool:
            self._wait({pool.submit(self._load, *one): one[0] for one in present.items()})

    def compile(self) -> None:
        """Compiles all others, each as soon as it is lowered."""
        missing = [name for name in self._recipes if name not in self.done]
        # Tracing holds the interpreter lock and compiling does not: lower here, compile there.
        with _threads(min(len(missing), os.cpu_count() or 1), "compile") as pool:
            self._wait(
                {pool.submit(self._compile, one): one.name for one in self._lowered(missing)}
            )

    def _wait(self, futures: Mapping[concurrent.futures.Future[None], Any]) -> None:
        for future in concurrent.futures.as_completed(futures):
            future.result()
            self._tell(str(futures[future]))

    def _tell(self, detail: str) -> None:
        self._progress("compile", len(self.done) / len(self._recipes), detail)

    def _load(self, name: Any, file: pathlib.Path) -> None:
        recipe, started = self._recipes[name], time.perf_counter()
        program = kept.load(file, recipe.in_tree, recipe.out_tree, recipe.devices)
        if program is not None:
            self.seconds[f"load {name}"] = time.perf_counter() - started
            self.done[name] = program

    def _compile(self, one: _Lowered) -> None:
        started = time.perf_counter()
        program = kept.compiled(one.lowered, one.file, self._shapes.compiler_options)
        self.seconds[f"compile {one.name}"] = time.perf_counter() - started
        self.done[one.name] = program

    def _lowered(self, names: Sequence[Any]) -> Iterator[_Lowered]:
        """Programs as they are lowered: what no helper does, or one fails to do, is done here."""
        asked = self._asked(names)
        for name in names:
            if name not in asked.values():
                yield from self._traced(name)
        for future in concurrent.futures.as_completed(asked):
            name = asked[future]
            self._tell(f"{name} is lowered")
            try:
                lowered = self._imported(name, future.result())
            except Exception as error:
                # Where the step and not a helper is at fault, that shows again.
                _LOG.warning("%s is lowered without a helper: %s", name, error)
                yield from self._traced(name)
            else:
                yield lowered

    def _asked(self, names: Sequence[Any]) -> dict[concurrent.futures.Future[Help], ProgramKey]:
        """The steps that helpers are lowering: large ones, the last of a ladder, take longest."""
        helpers = self._means.helpers
        if helpers is None or not helpers.number:
            return {}
        keys = [name for name in reversed(names) if isinstance(name, ProgramKey)]
        try:
            jobs = [helper.job_of(self._shapes, key) for key in keys]
        except TypeError as error:
            _LOG.info("no helper can lower the steps: %s", error)
            return {}
        return dict(zip(helpers.ask(jobs), keys, strict=True))

    def _imported(self, key: ProgramKey, help: Help) -> _Lowered:
        started = time.perf_counter()
        lowered = self._recipes[key].imported(help.export).trace().lower()
        self.seconds[f"help {key}"] = help.seconds
        self.seconds[f"lower {key}"] = time.perf_counter() - started
        self.findings[key] = help.findings
        return self._to_keep(key, lowered, self._file(key))

    def _traced(self, name: Any) -> Iterator[_Lowered]:
        """The program, unless one of its traced form was kept and has been loaded."""
        started = time.perf_counter()
        traced = self._recipes[name].trace()
        if isinstance(name, ProgramKey):
            self.findings[name] = contract.check_traced(name, traced.jaxpr, self._shapes)
        file = self._file(name) or kept.file_of(traced, self._shapes.placing)
        if file is not None and not self._is_known and file.exists():
            self._load(name, file)
        is_loaded = name in self.done
        lowered = None if is_loaded else traced.lower()
        self.seconds[f"{'trace' if is_loaded else 'lower'} {name}"] = time.perf_counter() - started
        if lowered is not None:
            yield self._to_keep(name, lowered, file)

    def _file(self, name: Any) -> pathlib.Path | None:
        """Where the program is kept by what it is made from."""
        return kept.file_about((self._about, name)) if self._is_known else None

    def _to_keep(
        self, name: Any, lowered: jax.stages.Lowered, file: pathlib.Path | None
    ) -> _Lowered:
        """A kept step is loaded without a structural proof: only one that passed it is kept."""
        return _Lowered(name, lowered, None if self.findings.get(name) else file)


@contextlib.contextmanager
def _threads(number: int, name: str) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Waits for what was begun; after an error, for as little of it as can be."""
    with concurrent.futures.ThreadPoolExecutor(max(1, number), name) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # nobody wants the others any more
            raise


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
        if not self._is_armed or event != kept.COMPILE_EVENT:
            return
        if threading.get_ident() in self._stepping_threads:
            self.num_own += 1
        else:
            self.num_others += 1
