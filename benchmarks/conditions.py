"""What a figure depends on: machine, versions, settings, programs and memory of one measurement."""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.core import Core


def without_folders(words: Sequence[str]) -> list[str]:
    """Arguments as a report keeps them: where files lie on one machine says nothing to a reader."""
    return [pathlib.Path(word).name if word.startswith("/") else word for word in words]


def of_machine() -> dict[str, Any]:
    """Date, command, versions and device. Starts JAX's backend."""
    import jax

    from engine.serving import versions

    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [pathlib.Path(sys.argv[0]).name, *without_folders(sys.argv[1:])],
        "device": device.device_kind,
        "platform": device.platform,
        "driver": of_driver("driver_version"),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "versions": versions.versions(),
        "commit": commit(),
    }


def of_engine(core: Core) -> dict[str, Any]:
    """Settings, ladder, start-up times, programs and memory plan of a running engine."""
    info, settings, plan = core.info, core.runner.settings, core.runner.plan
    config = dataclasses.asdict(settings.config)
    del config["limits"]
    # Where it lies is the machine's affair.
    config["compilation_cache"] = config["compilation_cache"] is not None
    return {
        "model": pathlib.Path(config.pop("model")).stem,
        "architecture": info.architecture,
        "num_parameters": info.num_parameters,
        "dtype": info.dtype,
        "lane": info.lane,
        "depth": info.depth,
        "max_rows": info.max_rows,
        "max_model_len": info.max_model_len,
        "token_budget": settings.token_budget,
        "page_size": info.page_size,
        "num_pages": info.num_pages,
        "settings": config,
        "ladder": dataclasses.asdict(settings.ladder),
        "num_programs": info.num_programs,
        "stage_seconds": dict(info.stage_seconds),
        "program_seconds": dict(core.runner.programs.seconds),
        "memory_bytes": dataclasses.asdict(plan) | {"pools": plan.pools, "total": plan.total},
    }


def tag(device: str) -> str:
    """The end of a result's name: NVIDIA H200 -> h200."""
    return device.lower().removeprefix("nvidia ").replace(" ", "_")


def of_driver(field: str) -> str | None:
    """What the NVIDIA driver says of the first device, without units; None where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.split("\n")[0].strip() or None


def commit() -> str | None:
    """The working tree's commit; None outside a repository."""
    git = shutil.which("git")
    if git is None:
        return None
    folder = pathlib.Path(__file__).parent
    answer = subprocess.run(
        [git, "-C", str(folder), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return answer.stdout.strip() or None
