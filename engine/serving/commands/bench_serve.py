"""`treadle bench serve`: a crowd of requests against a running server, in figures and a plot."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import rich.box
import rich.console
import rich.progress
import rich.table
import typer

from engine.serving import versions
from engine.serving.client import ADDRESS
from engine.serving.commands import startup

if TYPE_CHECKING:
    import grpc

    from engine.serving import load

_FILE_WIDTH = 100
_CROWD = "Crowd"
_ACCESS = "Access"


def bench_serve(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="HOST:PORT of the gRPC server.")
    ] = ADDRESS,
    requests: Annotated[int, typer.Option(help="Requests in all.", rich_help_panel=_CROWD)] = 200,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, whatever the server does (open loop).",
            rich_help_panel=_CROWD,
        ),
    ] = None,
    arrivals: Annotated[
        Literal["poisson", "fixed"],
        typer.Option(help="Spacing of the open loop.", rich_help_panel=_CROWD),
    ] = "poisson",
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Requests at a time, one more whenever one ends (closed loop). Default: 8, where "
            "no --rate is given.",
            rich_help_panel=_CROWD,
        ),
    ] = None,
    prompt_len: Annotated[
        int, typer.Option(help="Random token ids of a prompt.", rich_help_panel=_CROWD)
    ] = 128,
    output_len: Annotated[
        int, typer.Option(help="Tokens of an output, exactly.", rich_help_panel=_CROWD)
    ] = 128,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.", rich_help_panel=_CROWD)] = 0,
    protocol: Annotated[
        Literal["treadle", "vllm"],
        typer.Option(help="treadle.v1, or the service gateways call.", rich_help_panel=_ACCESS),
    ] = "treadle",
    token_file: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE", help="The first token in it is sent.", rich_help_panel=_ACCESS
        ),
    ] = None,
    tls_ca: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Authority of the server's certificate; turns TLS on.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    tls_cert: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM certificate to show to a server with mTLS.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    tls_key: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="PEM key of it.", rich_help_panel=_ACCESS),
    ] = None,
    json_file: Annotated[
        pathlib.Path | None,
        typer.Option("--json", metavar="FILE", help="Also write figures and conditions here."),
    ] = None,
    plot: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Also draw them into a PNG (extra `plot`)."),
    ] = None,
) -> None:
    """Measure a running server under load, over gRPC.

    `treadle bench serve --concurrency 64 --requests 512 --plot load.png`

    `treadle bench serve --rate 20 --arrivals poisson --json load.json`

    Latencies of the open loop count from the time a request was due, not from the time the client
    came to send it.
    """
    from engine.serving import load, load_plot

    if rate is not None and concurrency is not None:
        raise ValueError(
            "--rate is for the open loop and --concurrency for the closed one; give one"
        )
    plan = load.Plan(
        num_requests=requests,
        prompt_len=prompt_len,
        num_output_tokens=output_len,
        arrivals="closed" if rate is None else arrivals,
        rate=rate or 0.0,
        concurrency=8 if concurrency is None else concurrency,
        seed=seed,
    )
    console = startup.error_console()
    tls = _credentials(tls_ca, tls_cert, tls_key)
    model_name, seen = asyncio.run(_run(address, plan, protocol, token_file, tls, console))
    found = load.figures(seen)
    printed = rich.console.Console()
    if not printed.is_terminal:
        printed.width = max(printed.width, _FILE_WIDTH)  # a file has no edge to fold at
    printed.print(_table(found))
    title = f"{model_name}, {described(plan)}"
    if json_file is not None:
        report = {
            "conditions": {
                "command": sys.argv[1:],
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "model": model_name,
                "protocol": protocol,
                "plan": dataclasses.asdict(plan),
                "versions": versions.versions(),
            },
            "figures": dataclasses.asdict(found),
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        load_plot.write(plot, seen, title)
    if found.codes.keys() != {"OK"}:
        raise RuntimeError(
            f"some requests failed: {found.codes}; the first one: {found.first_fault}"
        )


async def _run(
    address: str,
    plan: load.Plan,
    protocol: load.Protocol,
    token_file: pathlib.Path | None,
    tls: grpc.ChannelCredentials | None,
    console: rich.console.Console,
) -> tuple[str, list[load.Seen]]:
    import grpc

    from engine.serving import interceptors, load

    token = None if token_file is None else interceptors.read_tokens(token_file)[0]
    num_streams = plan.concurrency if plan.arrivals == "closed" else plan.num_requests
    connections = load.Connections(address, num_streams, tls=tls, token=token)
    try:
        call = connections.call(protocol)
        try:
            model = await connections.model()
        except grpc.RpcError as error:
            raise RuntimeError(_refused(address, error, is_tls=tls is not None)) from error
        needed = plan.prompt_len + plan.num_output_tokens
        if needed > model.max_model_len:
            raise ValueError(
                f"--prompt-len and --output-len need {needed} tokens but max_model_len is "
                f"{model.max_model_len}; lower them"
            )
        with rich.progress.Progress(console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("requests", total=plan.num_requests)
            seen = await load.drive(
                call,
                plan,
                plan.prompts(model.vocab_size),
                lambda count: progress.update(bar, completed=count),
            )
        return model.model_name, seen
    finally:
        await connections.close()


def described(plan: load.Plan) -> str:
    """A plan in a few words."""
    size = f"{plan.num_requests} requests of {plan.prompt_len}+{plan.num_output_tokens} tokens"
    if plan.arrivals == "closed":
        return f"{size}, {plan.concurrency} at a time"
    return f"{size}, {plan.rate:g}/s ({plan.arrivals})"


def _table(found: load.Figures) -> rich.table.Table:
    codes = ", ".join(f"{code} {count}" for code, count in found.codes.items())
    table = rich.table.Table(
        title=f"{found.output_token_rate:,.0f} tok/s   {found.request_rate:,.2f} requests/s   "
        f"{found.seconds:.2f} s   {codes}",
        caption=f"{found.tokens_per_message:.2f} tokens a message",
        box=rich.box.SIMPLE,
    )
    table.add_column("ms", no_wrap=True)
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    for name in columns:
        table.add_column(name, justify="right")
    for name, summary in (
        ("first token", found.ttft_ms),
        ("per later token", found.tpot_ms),
        ("between tokens", found.itl_ms),
        ("whole request", found.e2e_ms),
    ):
        table.add_row(name, *(f"{summary[c]:,.2f}" if summary else "–" for c in columns))
    return table


def _credentials(
    ca: pathlib.Path | None, cert: pathlib.Path | None, key: pathlib.Path | None
) -> grpc.ChannelCredentials | None:
    import grpc

    if (cert is None) != (key is None):
        raise ValueError("--tls-cert and --tls-key belong together; give both or none")
    if ca is None:
        if cert is not None:
            raise ValueError("--tls-cert needs --tls-ca, which turns TLS on; give it too")
        return None
    pair = (None, None) if cert is None or key is None else (key.read_bytes(), cert.read_bytes())
    return grpc.ssl_channel_credentials(ca.read_bytes(), *pair)


def _refused(address: str, error: Any, *, is_tls: bool) -> str:
    """Why the first call failed, and the way out."""
    import grpc

    from engine.serving import unreached

    code, detail = error.code(), error.details() or ""
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return f"the server at {address} wants a token that it knows; give --token-file"
    if unreached.is_unreached(detail):
        return unreached.described(detail, address, is_tls=is_tls, ways=unreached.COMMAND)
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return f"{address} does not serve {detail}; name the address of a Treadle server"
    return f"{address}: {detail}"
