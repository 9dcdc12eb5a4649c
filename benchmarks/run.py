"""Everything a GPU machine measures, in one command: ops, models, serving, start-up, peers.

    python benchmarks/run.py                                # all of it, about an hour on an H200
    python benchmarks/run.py --minutes 25                   # what fits, the most telling first
    python benchmarks/run.py --only qwen3_8b,op:moe         # these, by name
    python benchmarks/run.py --list                         # names, commands and minutes; runs none

Each measurement is a script of its own in a process of its own, whose JSON goes to --out, named by
the device; then benchmarks/table.py makes tables (Markdown) and charts (SVG; PNG where matplotlib
is installed) of all that lies there. Figures of other engines come from benchmarks/peers/: where
vLLM is installed they are measured here first. A script that is out of time keeps what it wrote.
Other words go to every engine alike, as --max-rows 64.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a machine that only borrows the tree has nothing installed

from benchmarks import conditions, table  # noqa: E402

BENCHMARKS = ROOT / "benchmarks"
CONFIGS = BENCHMARKS / "configs"
_RUNGS = ("--row-rungs", "1,8,32,64,256")
MODELS = {
    "qwen3_8b": "1x32+256,32x128+256,256x128+256,16x4096+1,64x1024+256,512x512+256",
    "qwen3_30b_a3b": "1x32+256,256x128+256,8x128+256,32x128+256,16x4096+1",
}
"""Shapes of each model that peers were measured on, the most telling first."""
_OP_FILES = {"mla": "mla_decode"}
"""Names of reports that are not their scripts'."""
_NO_OPS = ("harness",)


@dataclasses.dataclass(frozen=True)
class Step:
    """One measurement."""

    name: str
    words: tuple[str, ...]
    """The script, below benchmarks/, and its arguments."""
    result: pathlib.Path
    minutes: float
    """On an H200 with an empty compilation cache, about; less time left is not worth a start."""

    @property
    def command(self) -> list[str]:
        script, *rest = self.words
        return [sys.executable, str(BENCHMARKS / script), *rest]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was chosen and writes the tables; the exit status is 1 when a step failed."""
    options, engine = _parser().parse_known_args(arguments)
    tag = conditions.tag(conditions.of_driver("name") or "cpu")
    steps = chosen(plan(options, engine, tag), options.only)
    if options.list:
        for step in steps:
            print(f"{step.minutes:5.1f} min  {step.name:<24} {' '.join(step.words)}")
        return 0
    outcomes = run(steps, options.minutes, options.out / f"run_{tag}.json")
    table.main(["--out", str(options.out), *map(str, sorted(reports(options.out)))])
    for outcome in outcomes:
        print(f"{outcome['outcome']:<16} {outcome['seconds']:7.1f} s  {outcome['name']}")
    return int(any(one["outcome"].startswith("failed") for one in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=float("inf"), help="for all steps together")
    add("--only", help="names with commas between; a name with `*` at its end stands for several")
    add("--list", action="store_true", help="print the steps and run none")
    add("--out", type=pathlib.Path, default=table.RESULTS, help="folder of JSON, tables, charts")
    add("--model", type=pathlib.Path, help="a config.json instead of the models of the table")
    add("--shapes", help="instead of the table's, NxIN+OUT,...")
    add("--repeats", type=int, default=3, help="measured runs of each shape")
    add("--tokenizer", help="of the masked rows' grammar; default: that of the demo model")
    return parser


def plan(options: argparse.Namespace, engine: Sequence[str], tag: str) -> list[Step]:
    """Every step in its order: what peers are compared by first, then ops, then the rest."""
    models = {name: CONFIGS / f"{name}.json" for name in MODELS}
    if options.model is not None:
        models = {options.model.stem: options.model}
    steps: list[Step] = []

    def add(name: str, script: str, file: str, minutes: float, *words: object) -> None:
        result = options.out / file
        target = "--txt" if result.suffix == ".txt" else "--json"
        given = (script, *map(str, words), target, str(result))
        steps.append(Step(name, given, result, minutes))

    for name, path in models.items():
        shapes = options.shapes or MODELS.get(name, "baseline")
        end_to_end = ("--model", path, "--shapes", shapes, "--repeats", options.repeats)
        if importlib.util.find_spec("vllm") is not None:
            peers = BENCHMARKS / "peers" / f"vllm_{tag}.json"
            words = ("peers/run_vllm.py", *map(str, end_to_end), "--json", str(peers))
            steps.append(Step(f"{name}:vllm", words, peers, 8))
        length = () if engine else ("--max-model-len", 8192, *_RUNGS)
        add(name, "offline.py", f"{name}_{tag}.json", 4, *end_to_end, *length, *engine)
    for script in sorted((BENCHMARKS / "kernels").glob("*.py")):
        if script.stem not in _NO_OPS:
            file = f"{_OP_FILES.get(script.stem, script.stem)}_{tag}.json"
            add(f"op:{script.stem}", f"kernels/{script.name}", file, 1)
    for name, path in models.items():
        given = ("--model", path, *engine)
        for rows in (1, 64, 256):
            words = (*given, "--rows", rows)
            file = f"kernels_{name}_{tag}_b{rows}.txt"
            add(f"{name}:kernels:{rows}", "step_kernels.py", file, 1, *words)
        file = f"graphs_{name}_{tag}_b64.txt"
        add(f"{name}:graphs", "step_kernels.py", file, 1, *given, "--rows", 64, "--in-graphs")
    name, path = next(iter(models.items()))
    given = ("--model", path, *engine)
    repeats = ("--repeats", options.repeats)
    shape = ("--shape", options.shapes.split(",")[0]) if options.shapes else ()
    add(f"{name}:startup", "offline.py", f"{name}_{tag}_startup.json", 2, *given, "--startup")
    add(f"{name}:served", "served.py", f"{name}_{tag}_served.json", 4, *given, *repeats, *shape)
    words = ("--tokenizer", options.tokenizer) if options.tokenizer else ()
    add(f"{name}:masked", "masked.py", f"{name}_{tag}_masked.json", 3, *given, *repeats, *words)
    for name, path in models.items():
        words = ("--model", path, *engine)
        add(f"{name}:memory", "memory.py", f"{name}_{tag}_memory.json", 3, *words)
    return steps


def chosen(steps: Sequence[Step], only: str | None) -> list[Step]:
    """The steps that `only` names, in their own order.

    Raises:
      ValueError: a name stands for no step.
    """
    if only is None:
        return list(steps)

    def stands_for(word: str, step: Step) -> bool:
        return step.name.startswith(word[:-1]) if word.endswith("*") else step.name == word

    words = only.split(",")
    for word in words:
        if not any(stands_for(word, step) for step in steps):
            known = ", ".join(step.name for step in steps)
            raise ValueError(f"--only names {word!r}, which is no step; there are: {known}")
    return [step for step in steps if any(stands_for(word, step) for word in words)]


def run(
    steps: Sequence[Step],
    minutes: float,
    record: pathlib.Path,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Runs one step after another until the time is over, and keeps how each one ended."""
    end = clock() + 60 * minutes
    outcomes: list[dict[str, Any]] = []
    record.parent.mkdir(parents=True, exist_ok=True)
    for step in steps:
        began = clock()
        outcome = "no time left"
        if end - began >= 60 * step.minutes:
            print(f"--- {step.name}", flush=True)
            outcome = _run_one(step, end - began)
        outcomes.append(
            {
                "name": step.name,
                "command": conditions.without_folders(step.words),
                "outcome": outcome,
                "seconds": round(clock() - began, 1),
            }
        )
        report = {"benchmark": "run", "minutes": _finite(minutes), "steps": outcomes}
        record.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return outcomes


def _run_one(step: Step, seconds: float) -> str:
    """How it ended. The report of a step that is stopped holds what was measured before."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,  # a script's own processes end with it
    ) as process:
        try:
            status = process.wait(_finite(seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "cut short"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return "done" if status == 0 else f"failed with {status}"


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value


def reports(folder: pathlib.Path) -> list[pathlib.Path]:
    """What the tables are made from."""
    found = []
    for path in folder.glob("*.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report.get("benchmark") in table.KINDS and report.get("results", True):
            found.append(path)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
