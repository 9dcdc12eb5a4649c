"""Offline throughput and start-up on dummy or real weights, with their conditions, as JSON.

    python benchmarks/offline.py --model benchmarks/configs/qwen3_8b.json --shapes baseline \
        --json benchmarks/results/qwen3_8b_h200.json
    python benchmarks/offline.py --model benchmarks/configs/qwen3_8b.json --startup --max-rows 1 \
        --json benchmarks/results/qwen3_8b_h200_startup_1.json

Throughput drives `engine.core.Core` in this process: all requests of a shape are submitted at
once, prompts are distinct random ids, decoding is greedy, end ids are ignored and the prefix cache
is off. Each shape runs a few tokens to warm up and then `--repeats` times; figures are medians.

Start-up runs in fresh processes, first with an empty compilation cache and then with the one it
left, from the start of the process to the first token.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a machine that only borrows the tree has nothing installed

if TYPE_CHECKING:
    import numpy as np

    from engine.config import EngineConfig
    from engine.core import Core
    from engine.serving.commands.bench import Shape

BASELINE = (
    "1x32+256",
    "8x128+256",
    "32x128+256",
    "64x1024+256",
    "256x128+256",
    "256x1024+128",
    "512x512+256",
    "16x4096+1",
)
"""The shapes that peers were measured on."""
_FIRST = "1x32+1"
"""What a start is timed to the end of."""
WARM_UP_TOKENS = 8
_PEERS = ROOT / "benchmarks" / "peers"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the arguments name and writes the report."""
    options = _parser().parse_args(arguments)
    report: dict[str, Any] = {}
    with tuned(options):
        if options.first_token:
            from benchmarks import startup
            from engine.serving.commands.bench import Shape

            one = functools.partial(run, shape=Shape.parse(_FIRST), seed=options.seed)
            report = startup.first_token(engine_config(options), one)
        elif options.startup:
            from benchmarks import startup

            words = sys.argv[1:] if arguments is None else list(arguments)
            report = startup.cold_and_warm(words, options.compilation_cache)
        else:
            for report in throughput(options):
                _write(options.json, report)  # a run cut short keeps what it measured
    if options.json is None:
        print(_text(report))
    _write(options.json, report)


def _text(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=1, default=str) + "\n"


def _write(path: pathlib.Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text(report), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", default="baseline", help="baseline, or NxIN+OUT,NxIN+OUT,...")
    add("--repeats", type=int, default=3, help="measured runs of each shape")
    add("--json", type=pathlib.Path, help="where the report goes; default: standard output")
    add("--startup", action="store_true", help="measure process start to first token instead")
    add("--first-token", action="store_true", help="one start-up in this process")
    add("--tuned", metavar="FILE", help="kernels' choices in place of the device's; none: formulas")
    add_engine_options(parser)
    return parser


def tuned(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Puts the choices that the arguments name in place of those measured for the device."""
    if options.tuned is None:
        return contextlib.nullcontext()
    from kernels import tuning

    is_none = options.tuned == "none"
    table = tuning.Table("none") if is_none else tuning.read(pathlib.Path(options.tuned))
    return tuning.TUNING.using(table)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that `engine_config` reads."""
    add = parser.add_argument
    add("--model", required=True, help="config.json (dummy weights), folder or .gguf")
    add("--seed", type=int, default=0, help="of the prompts and of dummy weights")
    add("--compilation-cache", help="folder; default: the engine's own, for --startup a fresh one")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    for name in ("max-model-len", "max-rows", "token-budget", "max-chunk-rows", "num-pages"):
        add(f"--{name}", type=int, help="as in EngineConfig")
    for name in ("row-rungs", "token-rungs", "page-table-rungs"):
        add(f"--{name}", type=_rungs, metavar="N,N", help="as in EngineConfig")
    add("--memory-fraction", type=float, default=0.9)
    add("--max-programs", type=int, default=25)
    add("--depth", type=int, default=2, help="launches in flight")
    add("--no-overlap", action="store_true", help="the sync lane")
    add("--no-command-buffers", action="store_true", help="no CUDA graphs")


def _rungs(text: str) -> tuple[int, ...]:
    return tuple(int(rung) for rung in text.split(","))


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's settings: the prefix cache is off, dummy weights stand in for a config.json."""
    from engine.config import EngineConfig

    return EngineConfig(
        model=options.model,
        load_format="dummy" if options.model.endswith(".json") else "auto",
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_rows=options.max_rows,
        token_budget=options.token_budget,
        max_chunk_rows=options.max_chunk_rows,
        num_pages=options.num_pages,
        row_rungs=options.row_rungs,
        token_rungs=options.token_rungs,
        page_table_rungs=options.page_table_rungs,
        memory_fraction=options.memory_fraction,
        max_programs=options.max_programs,
        prefix_cache=False,
        overlap=not options.no_overlap,
        depth=options.depth,
        command_buffers=not options.no_command_buffers,
        compilation_cache=options.compilation_cache or "auto",
        seed=options.seed,
    )


def throughput(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Starts an engine and measures every shape on it; yields the report after each one."""
    from benchmarks import conditions
    from engine.core import Core
    from kernels.tuning import TUNING

    works = shapes(options.shapes)
    core = Core.start(engine_config(options), progress=_say)
    try:
        work = {"work": "greedy, ignore_eos, prefix cache off, distinct random prompts, medians"}
        choices = {"tuned_choices": len(TUNING.in_force().entries)}
        report: dict[str, Any] = {
            "benchmark": "offline",
            "conditions": conditions.of_machine() | conditions.of_engine(core) | work | choices,
            "results": [],
        }
        for shape in works:
            report["results"].append(measure(core, shape, options.repeats, options.seed))
            yield report
    finally:
        core.close()


def shapes(text: str) -> list[Shape]:
    """`baseline`, or NxIN+OUT,NxIN+OUT,..."""
    from engine.serving.commands.bench import Shape

    return [Shape.parse(name) for name in (BASELINE if text == "baseline" else text.split(","))]


def _say(stage: str, fraction: float, detail: str) -> None:
    if fraction in (0.0, 1.0):
        print(f"{stage} {fraction:.0%} {detail}", file=sys.stderr, flush=True)


def measure(core: Core, shape: Shape, repeats: int, seed: int = 0) -> dict[str, Any]:
    """Medians of one shape.

    Raises:
      ValueError: the shape is longer than max_model_len.
    """
    length = shape.prompt_len + shape.num_output_tokens
    if length > core.info.max_model_len:
        raise ValueError(
            f"shape {shape} needs {length} tokens but max_model_len is {core.info.max_model_len}; "
            "raise --max-model-len or choose other --shapes"
        )
    run(core, shape, seed, num_output_tokens=min(WARM_UP_TOKENS, shape.num_output_tokens))
    core.reset_times()
    before = core.stats()
    runs = [run(core, shape, seed + 1 + repeat) for repeat in range(repeats)]
    after = core.stats()
    result = _figures(shape, runs)
    result["steps"] = (sum(after.steps.values()) - sum(before.steps.values())) // repeats
    result["preemptions"] = (after.preemptions - before.preemptions) // repeats
    result["host_ms"] = {stage: round(ms, 4) for stage, ms in after.host_ms.items()}
    result["host_ms_per_step"] = round(after.host_ms_per_step, 4)
    result["bound"] = _bound(core, shape)
    result["peer"] = _peer(core, shape)
    print(_line(result), file=sys.stderr, flush=True)
    return result


def run(
    core: Core, shape: Shape, seed: int, num_output_tokens: int | None = None
) -> dict[str, float]:
    """One run of a shape: seconds in all, to the median first token, and of a token after it.

    Raises:
      RuntimeError: a request failed, or fewer tokens came than were asked for.
    """
    requests = _requests(core, shape, seed, num_output_tokens or shape.num_output_tokens)
    firsts: dict[str, float] = {}
    lasts: dict[str, float] = {}
    num_tokens = 0
    began = time.perf_counter()
    for request in requests:
        core.submit(request)
    while not core.is_idle:
        core.step()
        now = time.perf_counter()
        for delta in core.poll():
            if delta.error is not None:
                raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
            num_tokens += len(delta.token_ids)
            firsts.setdefault(delta.request_id, now)
            lasts[delta.request_id] = now
    seconds = time.perf_counter() - began
    expected = sum(request.max_tokens for request in requests)
    if num_tokens != expected:
        raise RuntimeError(f"shape {shape} gave {num_tokens} tokens, {expected} were asked for")
    gaps = [
        (lasts[request.request_id] - firsts[request.request_id]) / (request.max_tokens - 1)
        for request in requests
        if request.max_tokens > 1
    ]
    return {
        "seconds": seconds,
        "first_token_seconds": statistics.median(firsts.values()) - began,
        "token_seconds": statistics.median(gaps) if gaps else 0.0,
    }


def prompts(vocab_size: int, shape: Shape, seed: int) -> np.ndarray:
    """i32[requests, tokens]: distinct random ids, the same for every engine."""
    import numpy as np

    size = (shape.num_requests, shape.prompt_len)
    return np.random.default_rng(seed).integers(vocab_size, size=size, dtype=np.int32)


def _requests(core: Core, shape: Shape, seed: int, max_tokens: int) -> list[Any]:
    from engine.request import Request, SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return [
        Request(
            request_id=f"{seed}-{index}",
            prompt_ids=prompt,
            params=params,
            stop_ids=(),
            eos_ids=(),
            max_tokens=max_tokens,
            seed=index,
        )
        for index, prompt in enumerate(prompts(core.info.vocab_size, shape, seed))
    ]


def _figures(shape: Shape, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    seconds = statistics.median(run["seconds"] for run in runs)
    first, gap = (
        1e3 * statistics.median(run[name] for run in runs)
        for name in ("first_token_seconds", "token_seconds")
    )
    return {
        "shape": str(shape),
        "run_seconds": [round(run["seconds"], 5) for run in runs],
        **rates(shape, seconds),
        "first_token_ms": round(first, 3),
        "ms_per_token_after_first": round(gap, 4) if shape.num_output_tokens > 1 else None,
    }


def rates(shape: Shape, seconds: float) -> dict[str, float]:
    """Tokens per second and milliseconds per output step of a shape done in `seconds`."""
    num_output = shape.num_requests * shape.num_output_tokens
    num_total = num_output + shape.num_requests * shape.prompt_len
    return {
        "seconds": round(seconds, 5),
        "output_tokens_per_second": round(num_output / seconds, 1),
        "total_tokens_per_second": round(num_total / seconds, 1),
        "ms_per_output_step": round(1e3 * seconds / shape.num_output_tokens, 4),
    }


def _bound(core: Core, shape: Shape) -> dict[str, float] | None:
    """The roofline's figures; None on a device whose ceilings nobody measured."""
    from benchmarks.roofline import Ceilings, Costs, bound_seconds

    ceilings = Ceilings.of(core.info.device)
    if ceilings is None:
        return None
    costs = Costs.of(core.model)
    return rates(shape, bound_seconds(costs, ceilings, shape, core.info.max_rows))


def _peer(core: Core, shape: Shape) -> dict[str, Any] | None:
    """Another engine's figures for this model, shape and device; None where there are none."""
    model = pathlib.Path(core.info.model_path).stem
    for file in sorted(_PEERS.glob("*.json")):
        peer = json.loads(file.read_text(encoding="utf-8"))
        figures = peer["models"].get(model, {}).get("shapes", {}).get(str(shape))
        if figures is not None and peer["device"] == core.info.device:
            return {"engine": peer["engine"], "conditions": peer["conditions"], **figures}
    return None


def _line(result: dict[str, Any]) -> str:
    peer, bound = result["peer"] or {}, result["bound"] or {}
    name = "output_tokens_per_second"
    return (
        f"{result['shape']:>14}  {result[name]:>9,.0f} out tok/s (peer {peer.get(name, '-')}, "
        f"bound {bound.get(name, '-')})  {result['total_tokens_per_second']:>9,.0f} tok/s  "
        f"{result['ms_per_output_step']:.3f} ms/step  host {result['host_ms_per_step']:.3f} ms"
    )


if __name__ == "__main__":
    main()
