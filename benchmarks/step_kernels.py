"""The kernels of one decode step, by name with count and time, from the profiler's trace.

    python benchmarks/step_kernels.py --model benchmarks/configs/qwen3_8b.json --rows 64 \
        --txt benchmarks/results/kernels_qwen3_8b_b64.txt

Starts an engine on one decode program, brings every row past its prompt and traces some steps. XLA
records no CUDA graph while it is profiled, so each kernel has a time of its own. `--in-graphs`
tells it to go on with graphs, and says what share of a step's kernels lies inside them instead.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a machine that only borrows the tree has nothing installed

if TYPE_CHECKING:
    from engine.core import Core

_UNTRACED_STEPS = 20
_GRAPHS_FLAG = "--xla_enable_command_buffers_during_profiling=true"
_NUMBER = re.compile(r"(\.\d+)+$|_\d+$")


def main(arguments: Sequence[str] | None = None) -> int:
    """Traces the steps and writes the list; the exit status is 1 when the trace names no kernel."""
    options = _parser().parse_args(arguments)
    if options.in_graphs:  # read when jax starts its backend
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_GRAPHS_FLAG}".strip()
    report = traced(options)
    text = page(report)
    print(text)
    if options.txt is not None and report["num_kernels"]:
        options.txt.parent.mkdir(parents=True, exist_ok=True)
        options.txt.write_text(text, encoding="utf-8")
    return 0 if report["num_kernels"] else 1


def _parser() -> argparse.ArgumentParser:
    from benchmarks import offline

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=int, default=64, help="of the decode step")
    add("--prompt", type=int, default=128, help="tokens of each prompt")
    add("--steps", type=int, default=8, help="traced steps")
    add("--in-graphs", action="store_true", help="the share inside graphs, and no times")
    add("--txt", type=pathlib.Path, help="where the list goes besides standard output")
    offline.add_engine_options(parser)
    parser.set_defaults(max_model_len=1024, token_budget=512, token_rungs=(512,))
    return parser


def traced(options: argparse.Namespace) -> dict[str, Any]:
    """Starts the engine, runs it into its decode steps and traces some of them."""
    import jax

    from benchmarks import conditions, offline
    from engine.core import Core

    options.max_rows, options.row_rungs = options.rows, (options.rows,)
    core = Core.start(offline.engine_config(options))
    try:
        _fill(core, options)
        began = time.perf_counter()
        _steps(core, options.steps)
        seconds = (time.perf_counter() - began) / options.steps
        with tempfile.TemporaryDirectory() as folder:
            profiling = jax.profiler.ProfileOptions()
            profiling.python_tracer_level = profiling.host_tracer_level = 0
            with jax.profiler.trace(folder, profiler_options=profiling):
                _steps(core, options.steps)
            events = _events(pathlib.Path(folder))
        report = kernels_of(events, options.steps)
        report["conditions"] = conditions.of_machine() | conditions.of_engine(core)
    finally:
        core.close()
    return report | {
        "rows": options.rows,
        "ms_per_step_untraced": round(1e3 * seconds, 3),
        "in_graphs_asked": options.in_graphs,
    }


def _fill(core: Core, options: argparse.Namespace) -> None:
    """Every row decodes, and has enough to say for the steps to come."""
    from benchmarks import offline
    from engine.request import Request, SamplingParams
    from engine.serving.commands.bench import Shape

    num_tokens = 2 * (options.steps + _UNTRACED_STEPS)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    shape = Shape(options.rows, options.prompt, num_tokens)
    prompts = offline.prompts(core.info.vocab_size, shape, options.seed)
    for index, prompt in enumerate(prompts):
        core.submit(Request(str(index), prompt, params, (), (), num_tokens, seed=index))
    begun: set[str] = set()
    while len(begun) < options.rows:
        core.step()
        begun |= {delta.request_id for delta in core.poll()}
    _steps(core, _UNTRACED_STEPS // 2)


def _steps(core: Core, count: int) -> None:
    for _ in range(count):
        core.step()
        core.poll()


def _events(folder: pathlib.Path) -> list[dict[str, Any]]:
    (file,) = folder.rglob("*.trace.json.gz")
    with gzip.open(file) as stream:
        return json.load(stream)["traceEvents"]


def kernels_of(events: Iterable[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Kernels of one step, the costliest first, from a trace of several.

    Args:
      events: of the trace, times in microseconds.
      num_steps: that were traced.
    """
    events = list(events)
    named = [event for event in events if event.get("ph") == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    times: dict[str, list[float]] = collections.defaultdict(list)
    num_in_graphs = 0
    for event in events:
        place = (event.get("pid"), event.get("tid"))
        is_device = "/device:" in processes.get(place[0], "")
        # Other lines of a device repeat its kernels under the names of operations.
        if event.get("ph") != "X" or not is_device or "Stream" not in threads.get(place, "Stream"):
            continue
        if event["name"].startswith(("Mem", "mem")):  # copies and fills
            continue
        times[_NUMBER.sub("", event["name"])].append(event["dur"])
        num_in_graphs += bool(int(event.get("args", {}).get("cuda_graph_id", 0) or 0))
    num_kernels = sum(map(len, times.values()))
    return {
        "kernels": [
            {
                "name": name,
                "per_step": round(len(each) / num_steps, 2),
                "us": round(statistics.median(each), 2),
                "us_per_step": round(sum(each) / num_steps, 1),
            }
            for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))
        ],
        "num_kernels": round(num_kernels / num_steps, 1),
        "us_per_step": round(sum(map(sum, times.values())) / num_steps, 1),
        "share_in_graphs": round(num_in_graphs / num_kernels, 4) if num_kernels else None,
    }


def page(report: dict[str, Any]) -> str:
    """The list with its conditions, or the share inside graphs."""
    c = report["conditions"]
    lines = [
        f"One decode step of {c['model']}, {report['rows']} rows, {c['dtype']}, on {c['device']}",
        f"driver {c['driver']}, jax {c['versions']['jax']}, commit {c['commit']}, {c['date']}",
        f"{report['num_kernels']} kernels, {report['us_per_step']} us; a step takes "
        f"{report['ms_per_step_untraced']} ms when nothing is traced",
    ]
    if report["in_graphs_asked"]:
        share = report["share_in_graphs"]
        lines.append("" if share is None else f"{share:.1%} of the kernels inside CUDA graphs")
        return "\n".join(lines) + "\n"
    lines += ["", f"{'us a step':>10} {'a step':>8} {'us each':>8}  name"]
    lines += [
        f"{one['us_per_step']:>10.1f} {one['per_step']:>8.2f} {one['us']:>8.2f}  {one['name']}"
        for one in report["kernels"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
