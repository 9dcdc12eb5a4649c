"""What a helper does: traces, proves and lowers one step after another for the engine's process.

    python -m engine.execution.helper

Reads a job a line, answers each with a line of JSON and the bytes of the lowered step, and ends
with the process that it reads from. It never touches the device that a step is lowered for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import sys
import threading
import time
import traceback
from typing import Any

import jax

from engine.execution import contract, kept, plain, remembered
from engine.execution.buckets import ProgramKey
from engine.execution.recipes import ProgramShapes
from kernels import tuning
from models import registry, sharding


def job_of(shapes: ProgramShapes, key: ProgramKey) -> str:
    """The line that asks for a step.

    Raises:
      TypeError: another process would not find the model, or not find it the same.
    """
    model = shapes.model
    if not registry.is_own(model.registration):
        raise TypeError(f"{model.registration.architecture} is registered in this process alone")
    described = {
        "architecture": model.registration.architecture,
        "config": model.config,
        "dtype": shapes.dtype,
        "page_size": shapes.page_size,
        "tiling": shapes.tiling,
        "state": shapes.state,
        "key": key,
    }
    job = {
        "code": remembered.CODE.hex(),
        "settings": kept.settings(),
        "tuned": tuning.TUNING.in_force().text(),
        "platform": jax.export.default_export_platform(),
        "step": plain.text_of(described),
    }
    return json.dumps(job)


def answer(job: str) -> tuple[dict[str, Any], bytes]:
    """(findings and seconds, the lowered step) of a job.

    Raises:
      RuntimeError: the code here is not that of the process that asks.
    """
    started = time.perf_counter()
    asked = json.loads(job)
    if asked["code"] != remembered.CODE.hex():
        raise RuntimeError("the sources have changed since the engine's process was started")
    for name, value in asked["settings"].items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    with tuning.TUNING.using(tuning.parsed(asked["tuned"], "the table of the engine's process")):
        shapes, key = _read(asked["step"])
        recipe = shapes.step(key)
        findings = contract.check_traced(key, recipe.trace().jaxpr, shapes)
        export = recipe.export(asked["platform"])
    found = [dataclasses.asdict(finding) for finding in findings]
    return {"findings": found, "seconds": time.perf_counter() - started}, export


def _read(text: str) -> tuple[ProgramShapes, ProgramKey]:
    described = plain.value_of(text)
    key, config = described.pop("key"), described.pop("config")
    model = registry.get(described.pop("architecture")).bind(config)
    mesh = sharding.make_mesh(jax.devices()[:1])
    return ProgramShapes(model=model, mesh=mesh, compiler_options={}, **described), key


def main() -> None:
    """Answers until nobody asks any more."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever is printed goes to the log
        for job in iter(_jobs().get, ""):
            try:
                head, export = answer(job)
            except Exception:
                head, export = {"error": traceback.format_exc()}, b""
            line = json.dumps(head | {"size": len(export)})
            out.write(line.encode() + b"\n" + export)
            out.flush()


def _jobs() -> queue.SimpleQueue[str]:
    """Lines as they come; at their end this process ends, whatever it is doing."""
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return jobs


if __name__ == "__main__":
    main()
