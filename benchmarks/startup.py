"""Process start to first token, in fresh processes with a cold and a warm compilation cache."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.core import Core

_SCRIPT = pathlib.Path(__file__).with_name("offline.py")
_START_TIME_FIELD = 19
"""Of /proc/PID/stat, counted behind the command's name: clock ticks from boot to process start."""


def process_seconds() -> float:
    """Seconds since this process started, interpreter start-up included."""
    text = pathlib.Path("/proc/self/stat").read_text(encoding="ascii")
    ticks = int(text.rpartition(")")[2].split()[_START_TIME_FIELD])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def first_token(config: EngineConfig, answer: Callable[[Core], object]) -> dict[str, Any]:
    """Starts an engine in this process and says when its first token was there.

    Args:
      config: of the engine.
      answer: has it make one token.
    """
    from benchmarks import conditions
    from engine.core import Core

    imported = process_seconds()
    core = Core.start(config)
    ready = process_seconds()
    try:
        answer(core)
        first = process_seconds()
        return {
            "conditions": conditions.of_machine() | conditions.of_engine(core),
            "imported_seconds": round(imported, 2),
            "ready_seconds": round(ready, 2),
            "first_token_seconds": round(first, 2),
        }
    finally:
        core.close()


def cold_and_warm(words: Sequence[str], cache: str | None) -> dict[str, Any]:
    """Two start-ups in processes of their own: the second finds the programs of the first compiled.

    Args:
      words: arguments of offline.py.
      cache: folder of the compilation cache, which must be empty; None makes one for the while.

    Raises:
      ValueError: the folder is not empty.
      RuntimeError: a process failed, with the end of what it said.
    """
    from benchmarks import conditions

    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(cache or pathlib.Path(scratch) / "xla")
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty; name an empty folder for a cold start")
        starts = {}
        for name in ("cold", "warm"):
            starts[name] = _child(words, folder, pathlib.Path(scratch) / f"{name}.json")
            print(_line(name, starts[name]), flush=True)
    command = [_SCRIPT.name, *conditions.without_folders(words)]
    return {
        "benchmark": "startup",
        "conditions": starts["warm"].pop("conditions") | {"command": command},
        "cold": {name: value for name, value in starts["cold"].items() if name != "conditions"},
        "warm": starts["warm"],
    }


def _child(words: Sequence[str], cache: pathlib.Path, report: pathlib.Path) -> dict[str, Any]:
    child = [
        *(sys.executable, str(_SCRIPT), *words),
        *("--first-token", "--compilation-cache", str(cache), "--json", str(report)),
    ]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a start-up exited with {done.returncode}: {done.stderr[-2000:]}")
    start = json.loads(report.read_text(encoding="utf-8"))
    return start | {
        name: start["conditions"][name]
        for name in ("stage_seconds", "program_seconds", "num_programs")
    }


def _line(name: str, start: dict[str, Any]) -> str:
    stages = ", ".join(f"{stage} {value:.1f}" for stage, value in start["stage_seconds"].items())
    return (
        f"{name}: first token after {start['first_token_seconds']:.1f} s "
        f"(imports {start['imported_seconds']:.1f}; {stages}), {start['num_programs']} programs"
    )
