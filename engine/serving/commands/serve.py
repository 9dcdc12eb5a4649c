"""`treadle serve`: the gRPC service, from the first compile to the last running request."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Literal

import rich.console
import typer

from engine.config import LIMITS, EngineConfig
from engine.serving.commands import options, startup

if TYPE_CHECKING:
    from engine.serving.grpc_server import ServerSettings
    from engine.serving.llm import AsyncLLM

_PANEL = "Server"
_SECURITY = "Security"
_SWITCH_SECONDS = 1e-4
_LOST_SECONDS = 4.0
"""From the loss of the engine to the end of the process, whatever a broken device holds up."""


@options.with_engine_options
def serve(
    model: options.Model,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Others than loopback need TLS, a token file or --insecure.",
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
    metrics_host: Annotated[
        str,
        typer.Option(help="Address of the metrics, which need no token.", rich_help_panel=_PANEL),
    ] = "127.0.0.1",
    drain_seconds: Annotated[
        float,
        typer.Option(
            help="How long running requests may go on after SIGTERM.", rich_help_panel=_PANEL
        ),
    ] = 30.0,
    max_receive_mib: Annotated[
        int, typer.Option(help="Size of one request at most.", rich_help_panel=_PANEL)
    ] = 4,
    max_queued: Annotated[
        int,
        typer.Option(
            help="Requests that may wait; more are refused with RESOURCE_EXHAUSTED.",
            rich_help_panel=_PANEL,
        ),
    ] = LIMITS.queued_requests,
    request_seconds: Annotated[
        float | None,
        typer.Option(
            help="How long a request may take, whatever its own deadline. Default: no limit.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    step_seconds: Annotated[
        float,
        typer.Option(
            help="How long one step may take until the engine counts as lost and the command ends "
            "with 1; 0: no limit.",
            rich_help_panel=_PANEL,
        ),
    ] = 300.0,
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="Form of log lines on standard error.", rich_help_panel=_PANEL),
    ] = "text",
    otel_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send OpenTelemetry spans to this collector, as http://127.0.0.1:4317.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    tls_cert: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM certificate of the server, its chain behind it.",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    tls_key: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="PEM key of it.", rich_help_panel=_SECURITY),
    ] = None,
    tls_client_ca: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Clients must show a certificate of this authority (mTLS).",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    token_file: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Bearer tokens, one a line: every call but health needs one.",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Let other machines call without TLS and token.",
            rich_help_panel=_SECURITY,
        ),
    ] = False,
    admin: Annotated[
        bool,
        typer.Option(
            "--admin", help="Serve treadle.v1.AdminService too.", rich_help_panel=_SECURITY
        ),
    ] = False,
    profile_dir: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where AdminService/Profile puts its recordings.",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    *,
    engine: options.EngineOptions,
) -> None:
    """Serve a model over gRPC, on loopback by default.

    `treadle serve MODEL --port 50051 --metrics-port 9400`

    Then, from another terminal:

    `grpcurl -plaintext -d '{"text": "Once upon", "params": {"max_tokens": 8}}'
    127.0.0.1:50051 treadle.v1.GenerationService/Generate`

    Health says NOT_SERVING until every program is compiled. SIGTERM drains: nothing new is taken,
    what runs may finish, and the command exits with 0; a second signal does not wait. When the
    engine is lost, while it drains too, health says NOT_SERVING and the command exits with 1 within
    5 seconds.
    """
    from engine.serving import logs
    from engine.serving.grpc_server import ServerSettings

    settings = ServerSettings(
        host=host,
        port=port,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        drain_seconds=drain_seconds,
        max_receive_bytes=max_receive_mib * 2**20,
        request_seconds=request_seconds,
        step_seconds=step_seconds,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        token_file=token_file,
        insecure=insecure,
        admin=admin,
        profile_dir=profile_dir,
        otel_endpoint=otel_endpoint,
    )
    logs.configure(log_format)
    if max_queued == 0:
        raise ValueError(
            "--max-queued is 0, but every request waits for a step, so that none would be taken; "
            "let at least 1 wait"
        )
    limits = dataclasses.replace(LIMITS, queued_requests=max_queued)
    config = engine.config(model, limits=limits, masked_rows=engine.served_masked_rows)
    run(config, settings, startup.error_console())


def run(config: EngineConfig, settings: ServerSettings, console: rich.console.Console) -> None:
    """Serves until told to stop.

    What can be known of the model without its weights is checked first, then the ports are taken,
    then the weights are read.

    Raises:
      OSError: a port cannot be used, or the model's files cannot be read.
      ValueError, RuntimeError: the engine does not start or was lost.
    """
    from engine.serving import grpc_server

    tokenizer = startup.check_files(config)

    def make_llm(report: startup.Report) -> AsyncLLM:
        with startup.stages(console) as shown:

            def tell(stage: str, fraction: float, detail: str) -> None:
                report(stage, fraction, detail)
                shown(stage, fraction, detail)

            llm = startup.make_async_llm(config, tell, tokenizer)
        console.print(startup.describe(config, llm.info), soft_wrap=True)
        return llm

    async def main() -> bool:
        signals = grpc_server.StopSignals()
        with signals.installed():
            return await grpc_server.serve(
                make_llm,
                settings,
                settings_text(config),
                signals=signals,
                announce=lambda line: console.print(line, markup=False, soft_wrap=True),
                on_lost=_end_soon,
            )

    # The engine's thread asks for the interpreter many times a step, and must not wait 5 ms each.
    sys.setswitchinterval(_SWITCH_SECONDS)
    if not asyncio.run(main()):
        _leave()


def _leave() -> None:
    """Ends the process around threads that still compile.

    They cannot be interrupted, and an interpreter that goes down beneath them aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_soon() -> None:
    """Ends the process even if a broken device never answers again."""
    timer = threading.Timer(_LOST_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def settings_text(config: EngineConfig) -> dict[str, str]:
    """Every engine setting as text, for GetServerInfo."""
    return {
        field.name: str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name != "limits"
    } | {f"limits.{name}": str(value) for name, value in dataclasses.asdict(config.limits).items()}
