"""`treadle serve`: the gRPC service, from the first compile to the last running request."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING, Annotated

import rich.console
import typer

from engine.config import EngineConfig
from engine.serving.commands import options, startup

if TYPE_CHECKING:
    from engine.serving.grpc_server import ServerSettings
    from engine.serving.llm import AsyncLLM

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PANEL = "Server"


@options.with_engine_options
def serve(
    model: options.Model,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. There is no authentication: keep to loopback, or put a "
            "gateway in front.",
            rich_help_panel=_PANEL,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="gRPC port; 0 takes a free one.", rich_help_panel=_PANEL)
    ] = 50051,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve Prometheus metrics here. Default: none.", rich_help_panel=_PANEL),
    ] = None,
    drain_seconds: Annotated[
        float,
        typer.Option(
            help="How long running requests may go on after SIGTERM.", rich_help_panel=_PANEL
        ),
    ] = 30.0,
    max_receive_mib: Annotated[
        int, typer.Option(help="Size of one request at most.", rich_help_panel=_PANEL)
    ] = 4,
    *,
    engine: options.EngineOptions,
) -> None:
    """Serve a model over gRPC, on loopback by default.

    `treadle serve MODEL --port 50051 --metrics-port 9400`

    Then, from another terminal:

    `grpcurl -plaintext -d '{"text": "Once upon", "params": {"max_tokens": 8}}'
    127.0.0.1:50051 treadle.v1.GenerationService/Generate`

    Health says NOT_SERVING until every program is compiled. SIGTERM drains: nothing new is taken,
    what runs may finish, and the command exits with 0; a second signal does not wait.
    """
    from engine.serving.grpc_server import ServerSettings

    settings = ServerSettings(
        host=host,
        port=port,
        metrics_port=metrics_port,
        drain_seconds=drain_seconds,
        max_receive_bytes=max_receive_mib * 2**20,
    )
    console = startup.error_console()
    if host not in _LOOPBACK:
        console.print(f"warning: {host} is reachable without authentication", soft_wrap=True)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(engine.config(model), settings, console)


def run(config: EngineConfig, settings: ServerSettings, console: rich.console.Console) -> None:
    """Serves until told to stop.

    Raises:
      OSError: a port cannot be used, or the model's files cannot be read.
      ValueError, RuntimeError: the engine does not start or was lost.
    """
    from engine.serving import grpc_server

    def make_llm(report: startup.Report) -> AsyncLLM:
        with startup.stages(console) as shown:

            def tell(stage: str, fraction: float, detail: str) -> None:
                report(stage, fraction, detail)
                shown(stage, fraction, detail)

            llm = startup.make_async_llm(config, tell)
        console.print(startup.describe(config, llm.info), soft_wrap=True)
        return llm

    async def main() -> None:
        signals = grpc_server.StopSignals()
        with signals.installed():
            await grpc_server.serve(
                make_llm,
                settings,
                settings_text(config),
                signals=signals,
                announce=lambda line: console.print(line, markup=False, soft_wrap=True),
            )

    asyncio.run(main())


def settings_text(config: EngineConfig) -> dict[str, str]:
    """Every engine setting as text, for GetServerInfo."""
    return {
        field.name: str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name != "limits"
    } | {f"limits.{name}": str(value) for name, value in dataclasses.asdict(config.limits).items()}
