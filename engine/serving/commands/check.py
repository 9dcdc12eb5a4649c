"""`treadle check`: prints the start-up proofs of registrations, or a checkpoint's battery."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated

import typer

from engine.serving.commands import options, startup

if TYPE_CHECKING:
    from engine.config import EngineConfig

_NUM_RANDOM_IDS = 400


@options.with_engine_options
def check(
    architectures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARCH]...", help="Architectures by name, as LlamaForCausalLM. None: all."
        ),
    ] = None,
    battery: Annotated[
        bool,
        typer.Option(
            "--battery",
            help="Serve prompts with --model, and hold the overlap lane against the sync lane.",
        ),
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="The battery's checkpoint.")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Only the battery's exact parts: its tolerance is for trained weights.",
        ),
    ] = False,
    *,
    engine: options.EngineOptions,
) -> None:
    """Prove for every registered architecture that sampled ids reach the next step on the device.

    `treadle check`

    `treadle check LlamaForCausalLM Qwen3ForCausalLM`

    Runs on tiny configurations, on whatever device there is. Exits with 1 when a proof fails.

    `treadle check --battery --model path/to/model`

    Serves one prompt five times, four at once and a mixed set of 64 on the overlap lane, and
    compares with the sync lane. The engine settings below are the battery's.
    """
    if battery:
        if model is None or architectures:
            raise ValueError("--battery checks one checkpoint: name it with --model, and no ARCH")
        holds = _run_battery(engine.config(model), is_strict=strict)
    else:
        if model is not None or strict or engine != options.EngineOptions():
            raise ValueError("--model, --strict and engine settings are for --battery; add it")
        from engine.execution import check as proofs

        holds = proofs.check(tuple(architectures or ()), report=typer.echo)
    if not holds:
        raise typer.Exit(1)


def _run_battery(config: EngineConfig, *, is_strict: bool) -> bool:
    from engine.core import Core
    from engine.execution import battery

    console = startup.error_console()
    with startup.stages(console) as report:
        core = Core.start(config, progress=report)
    try:
        console.print(startup.describe(config, core.info), soft_wrap=True)
        result = battery.run(core, _prompt_ids(config, core.info.vocab_size), is_strict=is_strict)
    finally:
        core.close()
    for line in result.lines():
        typer.echo(line)
    return result.holds


def _prompt_ids(config: EngineConfig, vocab_size: int) -> list[int]:
    """A text in the checkpoint's own ids; random ids where it has no tokenizer."""
    from engine.execution import battery
    from engine.text.tokenizer import load_tokenizer

    path = config.path
    try:
        tokenizer = load_tokenizer(path.parent if path.suffix == ".json" else path)
    except FileNotFoundError:
        draw = random.Random(config.seed)
        return [draw.randrange(vocab_size) for _ in range(_NUM_RANDOM_IDS)]
    return list(tokenizer.encode(battery.TEXT, add_special_tokens=False))
