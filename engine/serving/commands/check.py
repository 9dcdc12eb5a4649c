"""`treadle check`: prints the two start-up proofs of every registration."""

from __future__ import annotations

from typing import Annotated

import typer


def check(
    architectures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARCH]...", help="Architectures by name, as LlamaForCausalLM. None: all."
        ),
    ] = None,
) -> None:
    """Prove for every registered architecture that sampled ids reach the next step on the device.

    `treadle check`

    `treadle check LlamaForCausalLM Qwen3ForCausalLM`

    Runs on tiny configurations, on whatever device there is. Exits with 1 when a proof fails.
    """
    from engine.execution import check as proofs

    if not proofs.check(tuple(architectures or ()), report=typer.echo):
        raise typer.Exit(1)
