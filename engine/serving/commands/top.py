"""`treadle top`: what a server is doing, live in a terminal."""

from __future__ import annotations

from typing import Annotated

import rich.console
import rich.live
import typer

_FILE_WIDTH = 100


def top(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="HOST:PORT of the server's metrics, or a whole http:// address.",
        ),
    ] = "127.0.0.1:9400",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, print one screen, and end.")
    ] = False,
) -> None:
    """Watch a running server: load, speed, steps, faults.

    `treadle serve MODEL --metrics-port 9400`, and in another terminal `treadle top`
    """
    from engine.serving import top as view

    url = address if "://" in address else f"http://{address}/metrics"
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)  # a file has no edge to fold at
    if once:
        screens: list[rich.console.RenderableType] = []
        view.watch(url, screens.append, interval=interval, count=2)
        console.print(screens[-1])
        return
    with rich.live.Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        view.watch(
            url, lambda screen: live.update(screen, refresh=True), interval=interval, count=None
        )
