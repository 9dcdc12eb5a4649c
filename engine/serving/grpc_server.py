"""Serves the generation service over gRPC: listens at once, answers when every program is warm."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import prometheus_client
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import (
    aio as aio_health,  # pyright: ignore[reportAttributeAccessIssue]
)
from grpc_reflection.v1alpha import reflection

from engine.config import Setting, SettingError
from engine.serving import admin, compatibility, exposure, interceptors, metrics
from engine.serving.grpc_service import GenerationService, UnreadableRequests
from engine.serving.thread import EngineDead
from engine.serving.tracing import Spans
from proto.treadle.v1 import admin_pb2_grpc
from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from engine.core import CoreStats
    from engine.serving.llm import AsyncLLM

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
"""Name under which health answers for the generation service; "" answers alike."""

_LOG = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_ENGINE_POLL_SECONDS = 0.5
_STATS_SECONDS = 2.0
# Lets statuses leave; the calls themselves are over, or are to be cut.
_CLOSING_SECONDS = 0.5
_ENGINE_CLOSING_SECONDS = 5.0
"""A step that runs is waited for, then memory is given back; a device that hangs does neither."""
_LOST_CLOSING_SECONDS = 1.0
_HURRY_SECONDS = 1.0
"""The same behind a second signal."""
_CLOSE_POLL_SECONDS = 0.02

Report = Callable[[str, float, str], None]
MakeLLM = Callable[[Report], "AsyncLLM"]
"""Loads the model and warms the engine; called once, on a thread of its own."""


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Where and how a server listens."""

    host: str = "127.0.0.1"
    """Others than loopback need TLS, a token file or `insecure`."""
    port: int = 50051
    """0 lets the system choose."""
    metrics_port: int | None = None
    """Serves Prometheus metrics; None: none."""
    metrics_host: str = "127.0.0.1"
    """Where metrics listen. They need no token and say nothing of prompts."""
    drain_seconds: float = 30.0
    """How long running requests may go on after SIGTERM."""
    max_receive_bytes: int = 4 * 2**20
    """Bytes of one request."""
    request_seconds: float | None = None
    """How long a call that makes tokens may take, whatever its own deadline; None: no limit."""
    step_seconds: float = 300.0
    """How long one step may take until the engine counts as lost; 0: no limit."""
    tls_cert: pathlib.Path | None = None
    """PEM certificate of the server, its chain behind it."""
    tls_key: pathlib.Path | None = None
    """Its key."""
    tls_client_ca: pathlib.Path | None = None
    """Clients must show a certificate of this authority."""
    token_file: pathlib.Path | None = None
    """Bearer tokens, one a line: calls need one of them, health excepted."""
    insecure: bool = False
    """Other machines may call without TLS and without a token."""
    admin: bool = False
    """Serves treadle.v1.AdminService too."""
    profile_dir: pathlib.Path | None = None
    """Where the admin service puts recordings."""
    otel_endpoint: str | None = None
    """Collector of OpenTelemetry spans (OTLP over gRPC); None: no spans."""
    ping_seconds: float = 10.0
    """A connection may be pinged once in so long, without calls too; more often closes it.

    Gateways ping idle connections every 30 s, which gRPC's own defaults punish.
    """
    keepalive_seconds: float = 30.0
    """A silent connection is pinged after so long: requests of a dead client would hold pages."""
    keepalive_timeout_seconds: float = 10.0
    """How long the answer to that ping may take until the client counts as dead."""

    def __post_init__(self) -> None:
        for name, low, high in (("port", 0, 65535), ("max_receive_bytes", 1024, 2**31 - 1)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise SettingError(Setting(name), f" is {value}, it must lie in [{low}, {high}]")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise SettingError(
                Setting("metrics_port"), f" is {self.metrics_port}, it must lie in [0, 65535]"
            )
        if not 0.0 <= self.drain_seconds <= 86_400.0:
            raise SettingError(
                Setting("drain_seconds"), f" is {self.drain_seconds}, it must lie in [0, 86400]"
            )
        if self.request_seconds is not None and not 0.0 < self.request_seconds <= 86_400.0:
            raise SettingError(
                Setting("request_seconds"), f" is {self.request_seconds}, it must lie in (0, 86400]"
            )
        if not 0.0 <= self.step_seconds <= 86_400.0:
            raise SettingError(
                Setting("step_seconds"), f" is {self.step_seconds}, it must lie in [0, 86400]"
            )
        cert, key = Setting("tls_cert"), Setting("tls_key")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingError(cert, " and ", key, " belong together; give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise SettingError(
                Setting("tls_client_ca"), " needs ", cert, " and ", key, "; give them too"
            )
        if self.profile_dir is not None and not self.admin:
            raise SettingError(
                Setting("profile_dir"),
                " is for the admin service; turn that on with ",
                Setting("admin"),
            )
        endpoint = self.otel_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise SettingError(
                Setting("otel_endpoint"),
                f" is {endpoint!r}, it must begin with http:// (plain) or https:// "
                "(TLS), as http://127.0.0.1:4317",
            )

    def credentials(self) -> grpc.ServerCredentials | None:
        """What TLS needs; None: plain text.

        Raises:
          OSError, ValueError: a file cannot be read or does not hold what it should.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        return exposure.credentials(self.tls_cert, self.tls_key, self.tls_client_ca)


class StopSignals:
    """Two steps to the end: the first signal drains, the second no longer waits."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.hurry = asyncio.Event()

    def stop(self) -> None:
        """One signal."""
        if self.drain.is_set():
            self.hurry.set()
        self.drain.set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Takes SIGTERM and SIGINT of the process while inside."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


async def serve(
    make_llm: MakeLLM,
    settings: ServerSettings,
    engine_settings: Mapping[str, str],
    *,
    signals: StopSignals,
    announce: Callable[[str], None],
    on_lost: Callable[[], None] = lambda: None,
) -> bool:
    """Serves until told to stop, then drains.

    The port is taken before `make_llm` is called, so that no weights are read for a port in use;
    health says NOT_SERVING until the engine is warm, and again from the first stop signal on.

    Args:
      make_llm: makes the engine.
      settings: where to listen.
      engine_settings: what GetServerInfo tells about the engine's settings.
      signals: what ends it.
      announce: gets a line at each turn of the server's life.
      on_lost: called when the engine is lost or a second signal has come, before anything is
        closed, which may then take long.

    Returns:
      False: told to stop before the engine was warm; its compilations go on in their threads.

    Raises:
      ValueError: the host is open to others without TLS, a token or `insecure`; or a file of the
        settings does not hold what it should.
      OSError: a port cannot be used.
      EngineDead: the engine failed while serving or draining, or does not end.
      Exception: what `make_llm` raised.
    """
    warning = exposure.check_host(
        settings.host,
        has_tls=settings.tls_cert is not None,
        has_tokens=settings.token_file is not None,
        is_insecure=settings.insecure,
    )
    spans = None if settings.otel_endpoint is None else Spans.to_collector(settings.otel_endpoint)
    registry = prometheus_client.CollectorRegistry()
    service = GenerationService(
        {**engine_settings, "compatibility_service": compatibility.described()}
    )
    server = _server(
        service, settings, interceptors.Calls(registry, settings.request_seconds, spans)
    )
    port = _bind(server, settings)
    if warning is not None:
        announce(f"warning: {warning}")
    announce(f"compatibility service: {compatibility.described()}")
    with contextlib.ExitStack() as stack:
        if spans is not None:
            stack.callback(spans.close)
        if settings.metrics_port is not None:
            place = metrics.listening(registry, settings.metrics_port, settings.metrics_host)
            number = stack.enter_context(place)
            announce(f"metrics on http://{settings.metrics_host}:{number}/metrics")
        checks = aio_health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        await _set_health(checks, _NOT_SERVING)
        await server.start()
        try:
            announce(f"listening on {settings.host}:{port}; not serving until the engine is warm")
            llm = await _started(make_llm, service, signals)
            if llm is None:
                announce("stopped before the engine was warm")
                return False
            stack.callback(llm.shutdown, 0.0)
            service.become_ready(llm, metrics.Metrics(registry, llm.info, _stats_reader(llm)))
            await _set_health(checks, _SERVING)
            announce(f"serving {llm.info.model_name} on {settings.host}:{port}")
            try:
                await _serve_and_drain(llm, service, checks, signals, settings, announce)
                if signals.hurry.is_set():
                    on_lost()
                await server.stop(_CLOSING_SECONDS)
                if not await _closed(llm, signals, _ENGINE_CLOSING_SECONDS):
                    raise EngineDead("the engine hangs: its last step does not end")
            except EngineDead as error:
                _LOG.error("the engine is lost; the server ends: %s", error)
                on_lost()
                # Callers are told no more: what a device says may name the machine.
                service.become_failed("its log says why")
                await checks.enter_graceful_shutdown()
                await server.stop(_CLOSING_SECONDS)
                await _closed(llm, signals, _LOST_CLOSING_SECONDS)
                raise
        finally:
            await server.stop(_CLOSING_SECONDS)
    announce("stopped")
    return True


def _server(
    service: GenerationService,
    settings: ServerSettings,
    calls: interceptors.Calls,
) -> grpc.aio.Server:
    around: list[grpc.aio.ServerInterceptor] = [calls]
    if settings.token_file is not None:
        around.append(interceptors.Tokens(interceptors.read_tokens(settings.token_file)))
    server = grpc.aio.server(
        interceptors=(*around, UnreadableRequests()),
        options=(
            # Two servers on one port would each get half of the clients.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", settings.max_receive_bytes),
            # What we send is bounded by what we make: prompt log-probabilities may be large.
            ("grpc.max_send_message_length", -1),
            ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(settings.ping_seconds)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive_seconds)),
            # The first bounds what TCP waits for, the second the answer to a ping.
            ("grpc.keepalive_timeout_ms", _milliseconds(settings.keepalive_timeout_seconds)),
            ("grpc.http2.ping_timeout_ms", _milliseconds(settings.keepalive_timeout_seconds)),
        ),
    )
    pb_grpc.add_GenerationServiceServicer_to_server(service, server)
    names = [SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
    if settings.admin:
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            admin.AdminService(service.call, settings.profile_dir), server
        )
        names.append(admin.SERVICE)
    names.extend(compatibility.add_to_server(service, server))
    reflection.enable_server_reflection(names, server)
    return server


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1e3)


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> int:
    address = f"{settings.host}:{settings.port}"
    secrets = settings.credentials()
    try:
        if secrets is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, secrets)
    except RuntimeError:
        port = 0
    if port == 0:
        raise OSError(
            f"cannot listen on {address}; it is in use or not this machine's: choose another "
            "--port or --host"
        )
    return port


async def _set_health(
    checks: aio_health.HealthServicer, status: health_pb2.HealthCheckResponse.ServingStatus
) -> None:
    for name in ("", SERVICE, *compatibility.names()):
        await checks.set(name, status)


async def _started(
    make_llm: MakeLLM, service: GenerationService, signals: StopSignals
) -> AsyncLLM | None:
    """The engine once it is warm; None when told to stop before that."""
    loop = asyncio.get_running_loop()
    started: asyncio.Future[AsyncLLM] = loop.create_future()

    def settle(llm: AsyncLLM | None, error: BaseException | None) -> None:
        if started.done():
            return
        if error is not None:
            started.set_exception(error)
        elif llm is not None:
            started.set_result(llm)

    def make() -> None:
        llm, error = None, None
        try:
            llm = make_llm(service.report)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, llm, error)

    # A daemon, because a compilation cannot be interrupted and must not hold up the exit.
    threading.Thread(target=make, name="treadle-start", daemon=True).start()
    stop = asyncio.ensure_future(signals.drain.wait())
    try:
        await asyncio.wait({started, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
    return started.result() if started.done() else None


def _check_engine(llm: AsyncLLM, step_seconds: float) -> None:
    """Raises EngineDead when the engine is lost: it said so, or one of its steps does not end."""
    llm.check_health()
    if 0.0 < step_seconds < llm.busy_seconds:
        raise EngineDead(
            f"a step has run for more than {step_seconds:g} s, the limit: the device hangs; look "
            "at it, or start the server with a larger --step-seconds"
        )


async def _watch(llm: AsyncLLM, step_seconds: float) -> None:
    """Returns never; raises EngineDead when the engine is lost."""
    while True:
        _check_engine(llm, step_seconds)
        await asyncio.sleep(_ENGINE_POLL_SECONDS)


async def _first_of(*events: Coroutine[Any, Any, object], seconds: float | None = None) -> None:
    """Returns when one of them has come, or after `seconds`; raises what that one raised."""
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _serve_and_drain(
    llm: AsyncLLM,
    service: GenerationService,
    checks: aio_health.HealthServicer,
    signals: StopSignals,
    settings: ServerSettings,
    announce: Callable[[str], None],
) -> None:
    """From the warm engine to the last call; raises EngineDead when the engine is lost on it."""
    await _first_of(_watch(llm, settings.step_seconds), signals.drain.wait())
    announce(f"draining: {service.num_calls} calls run")
    service.become_draining()
    await checks.enter_graceful_shutdown()
    await _first_of(
        _watch(llm, settings.step_seconds),
        service.wait_idle(),
        signals.hurry.wait(),
        seconds=settings.drain_seconds,
    )
    service.cut()
    _check_engine(llm, settings.step_seconds)  # no call is left of a lost one either


async def _closed(llm: AsyncLLM, signals: StopSignals, seconds: float) -> bool:
    """Closes the engine; False: it has not ended after `seconds`, or soon behind a second signal.

    Polls, because whatever waits in a thread for one that hangs would hang with it.
    """
    llm.shutdown(0.0)
    began = time.monotonic()
    while not llm.is_closed:
        limit = min(seconds, _HURRY_SECONDS) if signals.hurry.is_set() else seconds
        if time.monotonic() - began > limit:
            return False
        await asyncio.sleep(_CLOSE_POLL_SECONDS)
    return True


def _stats_reader(llm: AsyncLLM) -> Callable[[], CoreStats | None]:
    """Reads the core's counters from any thread; None when the engine does not answer."""
    loop = asyncio.get_running_loop()

    def read() -> CoreStats | None:
        try:
            return asyncio.run_coroutine_threadsafe(llm.stats(), loop).result(_STATS_SECONDS)
        except (EngineDead, RuntimeError, TimeoutError):
            return None

    return read
