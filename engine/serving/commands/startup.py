"""Starts an engine for a command: stages on the screen, then one line of what runs and how."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import rich.console
import rich.progress

from engine.config import EngineConfig

if TYPE_CHECKING:
    from engine.core import EngineInfo
    from engine.serving.llm import LLM, AsyncLLM
    from engine.text.tokenizer import Tokenizer

Report = Callable[[str, float, str], None]
"""(stage, fraction 0..1, detail): what `Core.start` calls while it starts."""


def error_console() -> rich.console.Console:
    """Where progress goes: standard error, so that standard output holds answers alone."""
    return rich.console.Console(stderr=True, highlight=False)


@contextlib.contextmanager
def stages(console: rich.console.Console) -> Iterator[Report]:
    """Shows start-up stages: bars on a terminal, one line for each finished stage elsewhere."""
    if not console.is_terminal:
        yield _Lines(console).report
        return
    columns = (
        rich.progress.TextColumn("{task.description:<8}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[detail]}"),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress).report


class _Lines:
    """One line for each stage, when it is done."""

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}

    def report(self, stage: str, fraction: float, detail: str) -> None:
        is_done = self._started.get(stage, 0.0) < 0.0
        began = self._started.setdefault(stage, time.monotonic())
        if fraction >= 1.0 and not is_done:
            seconds = time.monotonic() - began
            self._started[stage] = -1.0
            line = f"{stage}: done in {seconds:.1f} s {detail}"
            self._console.print(line.rstrip(), soft_wrap=True)


class _Bars:
    """One bar for each stage."""

    def __init__(self, progress: rich.progress.Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def report(self, stage: str, fraction: float, detail: str) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=1.0, detail=detail)
        self._progress.update(self._tasks[stage], completed=fraction, detail=detail)


@contextlib.contextmanager
def open_llm(config: EngineConfig, console: rich.console.Console) -> Iterator[LLM]:
    """An `LLM` for the length of a command.

    Raises:
      ValueError, OSError, RuntimeError: the model cannot be loaded or does not fit.
    """
    with stages(console) as report:
        llm = make_llm(config, report)
    with llm:
        console.print(describe(config, llm.info), soft_wrap=True)
        yield llm


@contextlib.contextmanager
def open_async_llm(config: EngineConfig, console: rich.console.Console) -> Iterator[AsyncLLM]:
    """An `AsyncLLM` for the length of a command; started before any event loop runs."""
    with stages(console) as report:
        llm = make_async_llm(config, report)
    try:
        console.print(describe(config, llm.info), soft_wrap=True)
        yield llm
    finally:
        llm.shutdown()


def make_llm(config: EngineConfig, report: Report) -> LLM:
    """The engine for scripts; imported late, because help must not wait for it."""
    from engine.serving.llm import LLM

    return LLM(config, progress=report)


def make_async_llm(
    config: EngineConfig, report: Report, tokenizer: Tokenizer | None = None
) -> AsyncLLM:
    """The engine for services.

    Args:
      config: its settings.
      report: told how far its start is.
      tokenizer: of `check_files`; None: the engine reads it.
    """
    from engine.serving.llm import AsyncLLM

    return AsyncLLM(config, progress=report, tokenizer=tokenizer)


def check_files(config: EngineConfig) -> Tokenizer | None:
    """What is wrong with a model's files, found in a few seconds; the tokenizer if nothing is.

    Raises:
      FileNotFoundError, ValueError: nothing there, or not a model, with the way out.
    """
    from engine.serving import llm

    return llm.check_files(config)


def describe(config: EngineConfig, info: EngineInfo) -> str:
    """The model, every setting that shapes the step loop, and the memory plan."""
    on = {True: "on", False: "off"}
    lanes = f"sync lanes {', '.join(config.sync_lanes)}" if config.sync_lanes else ""
    loop = [
        f"lane {info.lane}",
        f"depth {info.depth}",
        f"command buffers {on[config.command_buffers]}",
        f"prefix cache {on[info.prefix_cache]}",
        f"deterministic {on[info.deterministic]}",
        lanes,
        "overlap required" if config.require_overlap else "",
        f"policy {config.policy}",
    ]
    memory = [
        f"{info.max_rows} rows",
        f"max_model_len {info.max_model_len}",
        f"{info.num_pages} pages of {info.page_size} tokens",
        f"{info.num_programs} programs",
        f"compilation cache {config.compilation_cache or 'off'}",
    ]
    model = (
        f"{info.model_name} ({info.architecture}, {info.num_parameters / 1e6:,.1f} M parameters, "
        f"{info.dtype}) on {info.device}"
    )
    lines = [model, *(", ".join(part for part in line if part) for line in (loop, memory))]
    return "\n".join([*lines, info.plan])


def stage_line(info: EngineInfo) -> str:
    """Times of the start-up stages in one line."""
    return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in info.stage_seconds.items())
