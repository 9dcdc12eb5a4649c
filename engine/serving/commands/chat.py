"""`treadle chat`: a conversation on the terminal, each answer shown as it comes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import rich.console
import typer

from engine.serving.commands import options, startup

if TYPE_CHECKING:
    from engine.serving.llm import LLM

_HELP = "/clear forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer"


@options.with_engine_options
def chat(
    model: options.Model,
    system: Annotated[str | None, typer.Option(help="A first message that sets the role.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of probability kept.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of one answer at most.")] = None,
    seed: Annotated[int | None, typer.Option(help="64-bit seed, the same for each answer.")] = None,
    *,
    engine: options.EngineOptions,
) -> None:
    """Talk with a model.

    `treadle chat MODEL`

    `echo "Name a colour." | treadle chat MODEL --temperature 0`

    Reads one message a line. Needs a checkpoint with a chat template. Options that are not given
    take the model's own defaults (generation_config.json).
    """
    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    params = {name: value for name, value in given.items() if value is not None}
    start = [] if system is None else [{"role": "system", "content": system}]
    console = startup.error_console()
    config = engine.config(model)
    with startup.open_llm(config, console) as llm:
        if sys.stdin.isatty():
            console.print(_HELP)
        _converse(llm, start, params, console)


def _converse(
    llm: LLM, start: list[dict[str, str]], params: dict[str, Any], console: rich.console.Console
) -> None:
    conversation = list(start)
    while (text := _read(console)) is not None:
        match text.strip():
            case "":
                continue
            case "/exit":
                return
            case "/clear":
                conversation = list(start)
                continue
        conversation.append({"role": "user", "content": text})
        try:
            answer = _answer(llm, conversation, params)
        except ValueError as error:
            # Most often the conversation has outgrown max_model_len.
            console.print(f"error: {options.worded(error)}", markup=False, soft_wrap=True)
            conversation.pop()
        else:
            conversation.append({"role": "assistant", "content": answer})


def _read(console: rich.console.Console) -> str | None:
    """One message; None at the end."""
    if sys.stdin.isatty():
        console.print("> ", end="")
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _answer(llm: LLM, conversation: list[dict[str, str]], params: dict[str, Any]) -> str:
    """Shows the answer as it comes and returns it, as far as it came."""
    texts: list[str] = []
    try:
        for output in llm.stream(llm.render_chat(conversation), params):
            for choice in output.outputs:
                texts.append(choice.text)
                sys.stdout.write(choice.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    sys.stdout.write("\n")
    return "".join(texts)
