"""`treadle gateway`: an engine and, before it, the HTTP gateway that speaks OpenAI's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from engine.serving import keyed_gateway
from engine.serving.commands import startup

if TYPE_CHECKING:
    from engine.serving.grpc_server import StopSignals

_HOST = "127.0.0.1"
_PANEL = "Gateway"
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 1.0
_GRACE_SECONDS = 30
"""How long the gateway's running requests may go on; the engine's own time to drain follows."""


def gateway(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="As for `treadle serve`.", show_default=False),
    ],
    port: Annotated[
        int, typer.Option(help="HTTP port, on loopback.", rich_help_panel=_PANEL)
    ] = 8000,
    engine_port: Annotated[
        int, typer.Option(help="gRPC port of the engine, on loopback.", rich_help_panel=_PANEL)
    ] = 50051,
    gateway_metrics_port: Annotated[
        int, typer.Option(help="The gateway's own Prometheus metrics.", rich_help_panel=_PANEL)
    ] = 29000,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="How the model writes tool calls, as `qwen`.", rich_help_panel=_PANEL),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="How the model marks its reasoning, as `qwen3`.", rich_help_panel=_PANEL),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=keyed_gateway.VARIABLE,
            help="Callers must show this key. Best given by the variable: words of a command "
            "stand in the list of processes.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP with the OpenAI and Anthropic protocols, on loopback.

    `treadle gateway MODEL --port 8000`

    Then any client of these protocols finds the model at `http://127.0.0.1:8000/v1`.

    Starts `treadle serve` and, once it is warm, the gateway `smg` of the extra `gateway`. Every
    other option is one of `treadle serve`, as `--max-rows 64`. SIGTERM lets both finish what runs.
    docs/gateway.md says what a key guards and how to open the gateway to others.
    """
    if model.startswith("-"):
        raise ValueError(f"MODEL is {model}; name the model before the options of `treadle serve`")
    if importlib.util.find_spec("smg") is None:
        raise RuntimeError("the gateway is not installed; install treadle with the extra `gateway`")
    _check_words(context.args)
    # An empty variable is a slip, which must not open the gateway; typer takes it for none.
    _check_key(os.environ.get(keyed_gateway.VARIABLE) if api_key is None else api_key)
    for number, option in ((port, "--port"), (engine_port, "--engine-port")):
        _check_free(number, option)
    engine_command = _python("engine.serving.cli", "serve", model, *context.args)
    engine_command += ["--host", _HOST, "--port", str(engine_port)]
    parsers = {"--tool-call-parser": tool_call_parser, "--reasoning-parser": reasoning_parser}
    gateway_command = [
        *_python("smg" if api_key is None else keyed_gateway.__name__, "launch"),
        *("--host", _HOST, "--port", str(port)),
        *("--worker-urls", f"grpc://{_HOST}:{engine_port}", "--policy", "cache_aware"),
        *("--prometheus-host", _HOST, "--prometheus-port", str(gateway_metrics_port)),
        *("--worker-startup-check-interval", "1", "--log-level", "warn"),
        *("--shutdown-grace-period-secs", str(_GRACE_SECONDS)),
        *(word for name, value in parsers.items() if value for word in (name, value)),
    ]
    console = startup.error_console()
    asyncio.run(
        _main(
            engine_command,
            gateway_command,
            f"{_HOST}:{engine_port}",
            f"{_HOST}:{port}",
            api_key,
            lambda line: console.print(line, markup=False, soft_wrap=True),
        )
    )


def _check_words(words: Sequence[str]) -> None:
    """Refuses options of `treadle serve` that would keep the gateway from its engine."""
    for word in words:
        option = word.partition("=")[0]
        if option == "--host":
            raise ValueError(
                "--host is loopback here, for engine and gateway; docs/gateway.md says how to open "
                "the gateway to others"
            )
        if option in ("--token-file", "--tls-cert", "--tls-key", "--tls-client-ca"):
            raise ValueError(
                f"{option} does not go with a gateway: it can neither send a token nor speak TLS "
                "to its engine; both stay on loopback"
            )


def _check_key(key: str | None) -> None:
    from engine.serving import interceptors

    if key is not None:
        interceptors.check_token("the API key", key)


def _check_free(port: int, option: str) -> None:
    """Finds out before the engine is started whether a port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            raise ValueError(f"port {port} is in use; choose another {option}") from None


def _python(module: str, *words: str) -> list[str]:
    return [sys.executable, "-m", module, *words]


async def _main(
    engine_command: Sequence[str],
    gateway_command: Sequence[str],
    engine_address: str,
    http_address: str,
    key: str | None,
    announce: Callable[[str], None],
) -> None:
    """Runs both until told to stop; the gateway alone is given the key.

    Raises:
      RuntimeError: one of them ended by itself.
    """
    from engine.serving.grpc_server import StopSignals

    signals = StopSignals()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(signals.installed())

        async def start(name: str, command: Sequence[str], key: str | None = None) -> None:
            children[name] = await stack.enter_async_context(_running(command, key, signals))

        children: dict[str, asyncio.subprocess.Process] = {}
        await start("engine", engine_command)
        await _until(lambda: _is_serving(engine_address), children, signals)
        if not signals.drain.is_set():
            await start("gateway", gateway_command, key)
            await _until(lambda: _can_be_asked(http_address, key), children, signals)
        if not signals.drain.is_set():
            announce(f"OpenAI and Anthropic protocols on http://{http_address}/v1")
            await _until(lambda: False, children, signals)


@contextlib.asynccontextmanager
async def _running(
    command: Sequence[str], key: str | None, signals: StopSignals
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is told to end when the block ends, and killed at a second stop signal."""
    environment = dict(os.environ)
    environment.pop(keyed_gateway.VARIABLE, None)
    if key is not None:
        environment[keyed_gateway.VARIABLE] = key
    # A group of its own: Ctrl-C reaches it through us, the gateway before the engine.
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        ends = [asyncio.ensure_future(one) for one in (process.wait(), signals.hurry.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await ends[0]
        ends[1].cancel()


async def _until(
    is_true: Callable[[], bool],
    children: Mapping[str, asyncio.subprocess.Process],
    signals: StopSignals,
) -> None:
    """Returns when it is true, or at a stop signal; `is_true` may block."""
    while not signals.drain.is_set() and not await asyncio.to_thread(is_true):
        for name, process in children.items():
            if process.returncode is not None:
                raise RuntimeError(
                    f"the {name} ended with code {process.returncode}; its lines above say why"
                )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.drain.wait(), _POLL_SECONDS)


def _is_serving(address: str) -> bool:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_SECONDS)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def _can_be_asked(address: str, key: str | None) -> bool:
    """The gateway lists a model and has its tokenizer, which it may get later (smg 1.13.0)."""
    connection = http.client.HTTPConnection(address, timeout=_ANSWER_SECONDS)
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    try:
        connection.request("GET", "/v1/models", headers=headers)
        answer = connection.getresponse()
        models = json.load(answer)["data"] if answer.status == 200 else []
        if not models:
            return False
        body = json.dumps({"model": models[0]["id"], "prompt": "a"})
        connection.request("POST", "/v1/tokenize", body, headers)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
