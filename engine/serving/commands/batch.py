"""`treadle generate` and `treadle score`: requests from a file, records in order, resumable."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import pathlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from typing import TYPE_CHECKING, Annotated, Any

import rich.console
import rich.progress
import typer

from engine.config import EngineConfig
from engine.serving.commands import jsonl, options, startup

if TYPE_CHECKING:
    from engine.serving.llm import AsyncLLM
    from engine.serving.outputs import CompletionOutput, PositionLogprobs, RequestOutput

_ROWS_AHEAD = 4
"""Requests handed to the engine, in multiples of its rows: enough that no row waits for a file."""

Handle = Callable[["AsyncLLM", jsonl.Line], Awaitable[dict[str, Any]]]
"""Answers one line with the fields of its record; ValueError or TypeError: the line is at fault."""

InputFile = Annotated[
    pathlib.Path,
    typer.Option("--input", "-i", metavar="FILE", help="JSON lines; - is standard input."),
]
OutputFile = Annotated[
    pathlib.Path,
    typer.Option("--output", "-o", metavar="FILE", help="JSON lines; - is standard output."),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Begin anew where the output file exists; else resume it."),
]


@options.with_engine_options
def generate(
    model: options.Model,
    input_file: InputFile = jsonl.STANDARD,
    output_file: OutputFile = jsonl.STANDARD,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt in place of --input. Repeatable.")
    ] = None,
    n: Annotated[int | None, typer.Option("-n", "--n", help="Choices of each prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of probability kept.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Likeliest tokens kept; 0: all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the likeliest's probability.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of one output at most.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an output. Repeatable.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="64-bit seed; drawn for each line when not given.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Report log-probabilities and this many alternatives.")
    ] = None,
    overwrite: Overwrite = False,
    *,
    engine: options.EngineOptions,
) -> None:
    """Generate text for every line of a file.

    `treadle generate MODEL --prompt "Once upon a time" --max-tokens 40`

    `treadle generate MODEL -i prompts.jsonl -o out.jsonl --temperature 0`

    A line is `{"prompt": "text"}` or `{"prompt": [1, 2, 3]}` or
    `{"messages": [{"role": "user", "content": "Hi"}]}`, with an `"id"` and
    `"params"` (sampling parameters of this line) when wanted. Options that are not given
    take the model's own defaults (generation_config.json).

    Records come in the order of the lines. An interrupted run goes on where it stopped when it is
    started again; OUT.conditions.json tells how the records were made. A line that cannot be served
    gets a record with "error", and the command exits with 1.
    """
    given = {
        "n": n,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "max_tokens": max_tokens,
        "stop": tuple(stop) if stop else None,
        "seed": seed,
        "logprobs": logprobs,
    }
    params = {name: value for name, value in given.items() if value is not None}
    if prompt:
        if input_file != jsonl.STANDARD:
            raise ValueError("--prompt and --input are both given; give one of them")
        source = jsonl.given_input([{"prompt": text} for text in prompt])
    else:
        source = jsonl.read_input(
            input_file, ("prompt", "messages", "params", "priority", "cache_salt")
        )

    async def handle(llm: AsyncLLM, line: jsonl.Line) -> dict[str, Any]:
        return await _generate(llm, line, params)

    _run("generate", engine.config(model), source, output_file, overwrite, params, handle)


@options.with_engine_options
def score(
    model: options.Model,
    input_file: InputFile = jsonl.STANDARD,
    output_file: OutputFile = jsonl.STANDARD,
    overwrite: Overwrite = False,
    *,
    engine: options.EngineOptions,
) -> None:
    """Report the log-likelihood of given continuations.

    `treadle score MODEL -i pairs.jsonl -o scores.jsonl`

    A line is `{"prompt": "The capital of France is", "continuation": " Paris"}`, with
    an `"id"` when wanted; prompt and continuation may both be lists of token ids. A
    record holds the sum over the continuation, the log-probability of each of its tokens, and
    whether it is what greedy decoding would have said.

    Order, resuming and errors are as in `treadle generate`.
    """
    source = jsonl.read_input(input_file, ("prompt", "continuation", "priority", "cache_salt"))
    _run("score", engine.config(model), source, output_file, overwrite, {}, _score)


def _run(
    command: str,
    config: EngineConfig,
    source: jsonl.Input,
    output_file: pathlib.Path,
    overwrite: bool,
    command_options: dict[str, Any],
    handle: Handle,
) -> None:
    conditions = jsonl.base_conditions(command, config, command_options)
    output = jsonl.Output(output_file, source=source, conditions=conditions, overwrite=overwrite)
    is_finished = False
    try:
        console = startup.error_console()
        lines = [line for line in source.lines if line.record_id not in output.done]
        if len(lines) < len(source.lines):
            console.print(f"resuming: {len(source.lines) - len(lines)} records are there already")
        if lines:
            with startup.open_async_llm(config, console) as llm:
                output.describe(**_engine_facts(llm))
                asyncio.run(_answer_all(llm, lines, handle, output, console))
        is_finished = True
    finally:
        output.close(finished=is_finished)
    if output.num_errors:
        console.print(f"error: {output.num_errors} of {len(lines)} lines could not be served")
        raise typer.Exit(1)


def _engine_facts(llm: AsyncLLM) -> dict[str, Any]:
    info = llm.info
    names = ("architecture", "dtype", "device", "lane", "depth", "max_model_len", "num_parameters")
    return {name: getattr(info, name) for name in names}


async def _answer_all(
    llm: AsyncLLM,
    lines: Sequence[jsonl.Line],
    handle: Handle,
    output: jsonl.Output,
    console: rich.console.Console,
) -> None:
    async def record(line: jsonl.Line) -> dict[str, Any]:
        try:
            return {"id": line.record_id, **await handle(llm, line)}
        except (ValueError, TypeError) as error:
            return {"id": line.record_id, "error": f"line {line.number}: {options.worded(error)}"}

    width = max(_ROWS_AHEAD * llm.info.max_rows, 1)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(
        *columns, console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("lines", total=len(lines))
        jobs = (lambda line=line: record(line) for line in lines)
        async with contextlib.aclosing(in_order(jobs, width)) as records:
            async for one in records:
                output.write(one)
                progress.advance(task)


async def in_order[T](jobs: Iterable[Callable[[], Awaitable[T]]], width: int) -> AsyncGenerator[T]:
    """Runs up to `width` jobs side by side and gives their results in the order of the jobs.

    Closing it cancels what runs.
    """
    running: collections.deque[asyncio.Task[T]] = collections.deque()
    waiting = iter(jobs)
    try:
        while True:
            while len(running) < width and (job := next(waiting, None)) is not None:
                running.append(asyncio.ensure_future(job()))
            if not running:
                return
            await running[0]
            yield running.popleft().result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _generate(llm: AsyncLLM, line: jsonl.Line, params: dict[str, Any]) -> dict[str, Any]:
    fields = dict(line.fields)
    own = _json_params(fields.pop("params", {}))
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError("give one of 'prompt' and 'messages'")
    prompt = fields.pop("prompt", None)
    if "messages" in fields:
        prompt = llm.render_chat(fields.pop("messages"))
    output = await _final(llm.generate(prompt, {**params, **own}, mode="final", **fields))
    return {
        "outputs": [_choice_record(choice) for choice in output.outputs],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "seed": output.seed,
    }


async def _final(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


def _json_params(fields: Any) -> dict[str, Any]:
    """Sampling parameters as JSON writes them: keys of an object are strings."""
    if not isinstance(fields, dict):
        raise TypeError(f"params is {fields!r}, it must be an object of sampling parameters")
    bias = fields.get("logit_bias")
    if not isinstance(bias, dict):
        return fields
    return {**fields, "logit_bias": {int(token_id): value for token_id, value in bias.items()}}


def _choice_record(choice: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        record["cumulative_logprob"] = json_number(choice.cumulative_logprob)
        record["logprobs"] = [_position_record(position) for position in choice.logprobs]
    return record


def _position_record(position: PositionLogprobs) -> list[dict[str, Any]]:
    """The candidates of one position, the chosen one first."""
    return [
        {"token_id": token_id, "logprob": json_number(one.logprob), "rank": one.rank}
        for token_id, one in position.items()
    ]


async def _score(llm: AsyncLLM, line: jsonl.Line) -> dict[str, Any]:
    fields = dict(line.fields)
    missing = [name for name in ("prompt", "continuation") if name not in fields]
    if missing:
        raise ValueError(f"field {missing[0]!r} is missing")
    result = await llm.score(fields.pop("prompt"), fields.pop("continuation"), **fields)
    return {
        "logprob": json_number(result.logprob),
        "is_greedy": result.is_greedy,
        "token_ids": list(result.token_ids),
        "token_logprobs": [json_number(value) for value in result.token_logprobs],
    }


def json_number(value: float | None) -> float | None:
    """`value`, or None where JSON has no number for it (a masked token's minus infinity)."""
    return value if value is not None and math.isfinite(value) else None
