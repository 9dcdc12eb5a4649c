"""What one request with a grammar costs the free rows beside it, as JSON.

    python benchmarks/masked.py --model benchmarks/configs/qwen3_8b.json --rows 256 \
        --json benchmarks/results/masked_h200.json

One engine that takes masks runs `--rows` requests at once, the last of them free or bounded by a
JSON schema that does not end; the others are free in both cases, greedy or sampled. The figure is
the median time of a token of those others after their first. Cases alternate, `--repeats` times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a machine that only borrows the tree has nothing installed

if TYPE_CHECKING:
    from engine.core import Core
    from engine.request import Grammar, Request

ENDLESS = '{"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 100000}'
_WARM_UP_TOKENS = 8


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the arguments name and writes the report."""
    options = _parser().parse_args(arguments)
    report = measure(options)
    text = json.dumps(report, indent=1, default=str) + "\n"
    print(text)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    from benchmarks import offline

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokenizer", help="folder or .gguf; default: that of the demo model")
    add("--rows", type=int, default=256, help="requests at once, one of them masked or not")
    add("--prompt", type=int, default=128, help="tokens of each prompt")
    add("--output", type=int, default=256, help="tokens of each output")
    add("--masked-rows", type=int, default=16, help="as in EngineConfig")
    add("--repeats", type=int, default=3, help="measured runs of each case")
    add("--json", type=pathlib.Path, help="where the report goes besides standard output")
    offline.add_engine_options(parser)
    parser.set_defaults(max_model_len=1024)
    return parser


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Starts an engine and runs every case on it."""
    from benchmarks import conditions, offline
    from engine.core import Core

    config = dataclasses.replace(
        offline.engine_config(options), max_rows=options.rows, masked_rows=options.masked_rows
    )
    core = Core.start(config)
    try:
        grammar = _grammar(core, options.tokenizer)
        report = {
            "benchmark": "masked",
            "conditions": conditions.of_machine() | conditions.of_engine(core),
            "results": [_compared(core, grammar, options, t) for t in (0.0, 1.0)],
        }
    finally:
        core.close()
    return report


def _grammar(core: Core, path: str | None) -> Grammar:
    from engine.request import StructuredOutput
    from engine.serving.commands.demo import model_path
    from engine.text.grammar import GrammarCompiler
    from engine.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path or model_path())
    compiler = GrammarCompiler(tokenizer, core.info.vocab_size, tokenizer.eos_ids)
    return compiler.compile(StructuredOutput("json_schema", ENDLESS))


def _compared(
    core: Core, grammar: Grammar, options: argparse.Namespace, temperature: float
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"free": [], "masked": []}
    for repeat in range(options.repeats + 1):
        for case, found in seconds.items():
            output = options.output if repeat else _WARM_UP_TOKENS
            requests = _requests(core, options, output, temperature)
            if case == "masked":
                requests[-1] = _bounded(requests[-1], grammar)
            core.reset_times()
            token_seconds = run(core, requests)
            if repeat:
                found.append(token_seconds)
    free, masked = (statistics.median(seconds[case]) for case in ("free", "masked"))
    return {
        "temperature": temperature,
        "free_rows": options.rows - 1,
        "token_ms_without_masked_row": round(1e3 * free, 4),
        "token_ms_with_masked_row": round(1e3 * masked, 4),
        "slower_percent": round(100 * (masked / free - 1), 2),
        "host_ms_with_masked_row": {k: round(v, 4) for k, v in core.stats().host_ms.items()},
    }


def _requests(
    core: Core, options: argparse.Namespace, max_tokens: int, temperature: float
) -> list[Request]:
    import numpy as np

    from engine.request import Request, SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    prompts = np.random.default_rng(0).integers(
        core.info.vocab_size, size=(options.rows, options.prompt), dtype=np.int32
    )
    return [
        Request(str(index), prompt, params, (), (), max_tokens, seed=index)
        for index, prompt in enumerate(prompts)
    ]


def _bounded(request: Request, grammar: Grammar) -> Request:
    from engine.request import StructuredOutput

    structured = StructuredOutput("json_schema", ENDLESS)
    params = dataclasses.replace(request.params, structured=structured)
    return dataclasses.replace(request, params=params, grammar=grammar)


def run(core: Core, requests: Sequence[Request]) -> float:
    """Median seconds of a token, after the first, of every request but the last.

    Raises:
      RuntimeError: a request failed.
    """
    firsts: dict[str, float] = {}
    lasts: dict[str, float] = {}
    num_running = len(requests)
    for request in requests:
        core.submit(request)
    while not core.is_idle:
        core.step()
        now = time.perf_counter()
        for delta in core.poll():
            if delta.error is not None:
                raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
            firsts.setdefault(delta.request_id, now)
            lasts[delta.request_id] = now
            num_running -= delta.finish_reason is not None
        if num_running == 1 and requests[-1].grammar is not None:
            core.abort(requests[-1].request_id)  # it advances half as fast; the others are done
    return statistics.median(
        (lasts[one.request_id] - firsts[one.request_id]) / (one.max_tokens - 1)
        for one in requests[:-1]
    )


if __name__ == "__main__":
    main()
