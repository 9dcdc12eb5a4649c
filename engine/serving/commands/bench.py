"""`treadle bench`: offline throughput and latency on random token ids, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import re
import statistics
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import rich.box
import rich.console
import rich.table
import typer

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.serving import versions
from engine.serving.commands import options, startup

if TYPE_CHECKING:
    from engine.serving.llm import LLM

_SHAPE = re.compile(r"(\d+)x(\d+)\+(\d+)")
_WARM_UP_TOKENS = 8
_FILE_WIDTH = 160


@dataclasses.dataclass(frozen=True)
class Shape:
    """Requests of one measurement, all alike and all there at once."""

    num_requests: int
    prompt_len: int
    num_output_tokens: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads `NxIN+OUT`, as `256x128+256`.

        Raises:
          ValueError: naming the text and the form.
        """
        match = _SHAPE.fullmatch(text.replace(" ", ""))
        if match is None or "0" in match.groups():
            raise ValueError(f"--shape is {text!r}, it must be NxIN+OUT, as 256x128+256")
        return cls(*(int(number) for number in match.groups()))

    def __str__(self) -> str:
        return f"{self.num_requests}x{self.prompt_len}+{self.num_output_tokens}"


@dataclasses.dataclass(frozen=True)
class Result:
    """Figures of one shape."""

    shape: str
    seconds: float
    """First submission to last token."""
    output_tokens_per_second: float
    total_tokens_per_second: float
    """Prompt and output."""
    ms_per_output_step: float
    """`seconds` over output tokens of one request: prefill is spread over the steps."""
    median_first_token_seconds: float | None
    host_ms_per_step: float
    """What a step takes of the engine's thread, over its recent steps; launches run beside it."""
    host_ms: dict[str, float]
    """Medians of its stages, and of launch and wait."""


@options.with_engine_options
def bench(
    model: options.Model,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NxIN+OUT", help="Requests x prompt + output tokens. Repeatable."),
    ] = None,
    json_file: Annotated[
        pathlib.Path | None,
        typer.Option("--json", metavar="FILE", help="Also write figures and conditions here."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = 0,
    *,
    engine: options.EngineOptions,
) -> None:
    """Measure throughput and latency on random token ids, greedy, without stopping early.

    `treadle bench MODEL --shape 1x32+256 --shape 256x128+256`

    `treadle bench config.json --load-format dummy --shape 64x1024+256 --json out.json`

    Prompts differ, so that the prefix cache cannot help. Every shape is run twice, first with a few
    tokens to warm up.
    """
    shapes = [Shape.parse(text) for text in shape or ["1x32+256", "8x128+256"]]
    config = engine.config(model)
    console = startup.error_console()
    rng = np.random.default_rng(seed)
    with startup.open_llm(config, console) as llm:
        results = []
        for one in shapes:
            with console.status(f"measuring {one}"):
                results.append(measure(llm, one, rng))
        report = {"conditions": _conditions(config, llm), "results": [_plain(r) for r in results]}
    _print(_table(results))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")


def measure(llm: LLM, shape: Shape, rng: np.random.Generator) -> Result:
    """Runs one shape to its end.

    Raises:
      ValueError: the shape is longer than max_model_len.
    """
    total_len = shape.prompt_len + shape.num_output_tokens
    if total_len > llm.info.max_model_len:
        raise ValueError(
            f"--shape {shape} needs {total_len} tokens but max_model_len is "
            f"{llm.info.max_model_len}; shorten it or raise --max-model-len"
        )
    _generate(llm, shape, rng, min(_WARM_UP_TOKENS, shape.num_output_tokens))
    began = time.monotonic()
    outputs = _generate(llm, shape, rng, shape.num_output_tokens)
    seconds = time.monotonic() - began
    stats = llm.stats()
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    num_total = num_output + shape.num_requests * shape.prompt_len
    firsts = [output.metrics.ttft for output in outputs if output.metrics.ttft is not None]
    return Result(
        shape=str(shape),
        seconds=seconds,
        output_tokens_per_second=num_output / seconds,
        total_tokens_per_second=num_total / seconds,
        ms_per_output_step=1e3 * seconds / shape.num_output_tokens,
        median_first_token_seconds=statistics.median(firsts) if firsts else None,
        host_ms_per_step=stats.host_ms_per_step,
        host_ms=dict(stats.host_ms),
    )


def _generate(llm: LLM, shape: Shape, rng: np.random.Generator, max_tokens: int) -> list[Any]:
    ids = rng.integers(llm.info.vocab_size, size=(shape.num_requests, shape.prompt_len))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate(ids.tolist(), params, use_progress_bar=False)


def _conditions(config: EngineConfig, llm: LLM) -> dict[str, Any]:
    return {
        "command": sys.argv[1:],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": dataclasses.asdict(config),
        "engine": _plain(llm.info),
        "version": versions.own_version(),
        "versions": versions.versions(),
    }


def _plain(record: Any) -> dict[str, Any]:
    # Not dataclasses.asdict, which cannot copy a read-only mapping.
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _print(table: rich.table.Table) -> None:
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)  # a file has no edge to fold at
    console.print(table)


def _table(results: list[Result]) -> rich.table.Table:
    stages = list(dict.fromkeys(stage for result in results for stage in result.host_ms))
    table = rich.table.Table(
        caption="random ids, greedy; prefill is spread over the steps; host is schedule, pack, "
        "hand_over and settle, the engine's thread; launch runs beside it, or in hand_over",
        box=rich.box.SIMPLE,
    )
    table.add_column("shape", justify="right", no_wrap=True)
    for heading in ("out tok/s", "all tok/s", "ms/out step", "first token s", "seconds"):
        table.add_column(heading, justify="right")
    for stage in ("host", *stages):
        table.add_column(f"{stage} ms", justify="right")
    for result in results:
        first = result.median_first_token_seconds
        table.add_row(
            result.shape,
            f"{result.output_tokens_per_second:,.0f}",
            f"{result.total_tokens_per_second:,.0f}",
            f"{result.ms_per_output_step:.2f}",
            "-" if first is None else f"{first:.3f}",
            f"{result.seconds:.2f}",
            f"{result.host_ms_per_step:.3f}",
            *(f"{result.host_ms.get(stage, float('nan')):.3f}" for stage in stages),
        )
    return table
