"""`treadle tune`: measures the kernels' choices at a model's shapes, and keeps those that pay."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import rich.box
import rich.console
import rich.table
import typer

from engine.config import EngineConfig
from engine.serving import versions
from engine.serving.commands import startup

if TYPE_CHECKING:
    from engine.execution.candidates import Bench, Job, Measured
    from engine.execution.settings import Settings
    from models.registry import Model

_FILE_WIDTH = 160


def tune(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Folders, .gguf files or config.json files; weights are not read.",
            show_default=False,
        ),
    ] = None,
    ops: Annotated[
        list[str] | None,
        typer.Option(metavar="OP", help="Only this op, as linear.parts. Repeatable. Default: all."),
    ] = None,
    json_file: Annotated[
        pathlib.Path | None,
        typer.Option("--json", metavar="FILE", help="Also write every figure here."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Measure six shapes that nothing is kept for; exit with 1 where the formula "
            "loses more than 10 %.",
        ),
    ] = False,
) -> None:
    """Measure the choices of the kernels on this GPU and keep those that beat the formulas.

    `treadle tune path/to/model`

    `treadle tune --check`

    Times every candidate of every tunable op at the model's shapes and rungs. What gains 3 % or
    more goes into the file of this device beside the kernels, which every later start reads.
    """
    from engine.execution import candidates
    from kernels import tuning

    known = tuple(ops or candidates.TUNED)
    for op in known:
        if op not in candidates.TUNED:
            names = ", ".join(candidates.TUNED)
            raise ValueError(f"--ops is {op!r}, it must be one of {names}")
    if not models and not check:
        raise ValueError("nothing to measure; name a MODEL, or give --check")
    console = startup.error_console()
    with console.status("") as status:
        bench = open_bench(status.update)
        jobs: list[Job] = []
        for model in models or ():
            for job in candidates.jobs_of(*_opened(model, bench), known):
                if job not in jobs:
                    jobs.append(job)
        held_out = [candidates.Job(*one) for one in candidates.HELD_OUT if one[0] in known]
        found: list[Measured] = []
        checked: list[Measured] = []
        # A run cut short keeps what it measured.
        for one in bench.measure(jobs):
            found.append(one)
            _write(json_file, bench, {"tuned": found, "held_out": checked})
            _keep(one, bench.profile.name)
        for one in bench.measure(held_out if check else []):
            checked.append(one)
            _write(json_file, bench, {"tuned": found, "held_out": checked})
    _print(_table([*found, *checked]))
    if found:
        file = tuning.file_of(bench.profile.name)
        typer.echo(f"{file}: {len(tuning.read(file).entries)} choices")
    if not check:
        return
    if not checked or max(one.loss for one in checked) > candidates.MOST_LOSS:
        typer.echo(f"a formula loses more than {candidates.MOST_LOSS:.0%}, or nothing ran")
        raise typer.Exit(1)
    typer.echo(f"no formula loses more than {candidates.MOST_LOSS:.0%} at {len(checked)} shapes")


def open_bench(report: Callable[[str], None]) -> Bench:
    """What is measured on; imported late, because help must not wait for it."""
    from engine.execution.timing import DeviceBench

    return DeviceBench(report)


def _opened(path: str, bench: Bench) -> tuple[Model, Settings]:
    from engine.execution.settings import Settings
    from engine.execution.startup import open_model

    config = EngineConfig(model=path, load_format="dummy")
    model, *_ = open_model(config)
    return model, Settings.of(config, model, bench.profile)


def _keep(one: Measured, device: str) -> None:
    """Writes the device's file anew, with what was measured in place of what it said before."""
    from kernels import tuning

    file = tuning.file_of(device)
    table = tuning.read(file) if file.exists() else tuning.Table(device)
    table = one.kept_in(table, f"{_today()}, jax {versions.versions()['jax']}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(table.text(), encoding="utf-8")


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _write(file: pathlib.Path | None, bench: Bench, found: dict[str, list[Measured]]) -> None:
    if file is None:
        return
    conditions = {
        "device": bench.profile.name,
        "date": _today(),
        "versions": versions.versions(),
    }
    results = {name: [_figures(one) for one in many] for name, many in found.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    report = {"conditions": conditions, **results}
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _figures(one: Measured) -> dict[str, Any]:
    candidates = [
        {"choice": str(choice), "us": round(1e6 * seconds, 2) if math.isfinite(seconds) else None}
        for choice, seconds in zip(one.job.candidates, one.seconds, strict=True)
    ]
    return {
        **dataclasses.asdict(one.job),
        "floor_us": round(1e6 * one.floor_seconds, 2),
        "chosen": str(one.best),
        "formula": str(one.job.candidates[0]),
        "formula_loss": round(one.loss, 4),
        "candidates": candidates,
    }


def _print(table: rich.table.Table) -> None:
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)  # a file has no edge to fold at
    console.print(table)


def _table(found: Iterable[Measured]) -> rich.table.Table:
    table = rich.table.Table(
        caption="us of one call with cold weights or pages; floor: a plain read of as many bytes; "
        "loss: of the formula's choice, to the fastest",
        box=rich.box.SIMPLE,
    )
    table.add_column("op and shape")
    table.add_column("candidate")
    for heading in ("us", "of floor"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in found:
        name = f"{one.job.op} {' '.join(f'{key}={n}' for key, n in one.job.shape.items())}"
        for choice, seconds in zip(one.job.candidates, one.seconds, strict=True):
            is_known = math.isfinite(seconds)
            notes = ["chosen"] if choice == one.best else []
            if choice == one.job.candidates[0]:
                notes.append(f"formula, loses {one.loss:.1%}")
            if not is_known:
                notes.append("wrong, or does not compile")
            table.add_row(
                name,
                str(choice),
                f"{1e6 * seconds:.2f}" if is_known else "-",
                f"{one.floor_seconds / seconds:.0%}" if is_known else "-",
                ", ".join(notes),
            )
            name = ""
        table.add_section()
    return table
