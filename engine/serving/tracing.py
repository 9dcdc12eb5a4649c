"""Spans of calls for OpenTelemetry: one each, under the caller's own where it named one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

from engine.serving import versions

if TYPE_CHECKING:
    from engine.serving.logs import Call


_CLOSING_SECONDS = 1.0
"""How long a collector may keep the process from its end."""


class Spans:
    """Begins and ends spans; they leave in the background, or are dropped when nobody takes them.

    Args:
      exporter: of the OpenTelemetry SDK.

    Raises:
      RuntimeError: its packages are not installed.
    """

    def __init__(self, exporter: Any) -> None:
        trace, sdk, export, resources = _packages()
        facts = {"service.name": "treadle", "service.version": versions.own_version()}
        self._trace = trace
        # Closed by us and not at the interpreter's end, where nobody would bound the wait.
        self._provider = sdk.TracerProvider(
            resource=resources.Resource.create(facts), shutdown_on_exit=False
        )
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("treadle")

    @classmethod
    def to_collector(cls, endpoint: str) -> Self:
        """Spans for a collector that speaks OTLP over gRPC.

        Args:
          endpoint: as http://127.0.0.1:4317; https turns TLS on.

        Raises:
          RuntimeError: the packages are not installed.
        """
        _packages()
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://")))

    def begin(self, call: Call) -> Any:
        """A span that runs; a child of the caller's span when the call names one."""
        context = None
        if call.trace_id:
            parent = self._trace.SpanContext(
                int(call.trace_id, 16),
                int(call.parent_id, 16),
                is_remote=True,
                trace_flags=self._trace.TraceFlags(int(call.is_sampled)),
                trace_state=self._trace.TraceState.from_header([call.trace_state]),
            )
            context = self._trace.set_span_in_context(self._trace.NonRecordingSpan(parent))
        service, _, method = call.method.strip("/").partition("/")
        return self._tracer.start_span(
            call.method.strip("/"),
            context=context,
            kind=self._trace.SpanKind.SERVER,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": service,
                "rpc.method": method,
                "treadle.call_id": call.call_id,
            },
        )

    def end(self, span: Any, code: str, request_id: str) -> None:
        """Ends a span with the call's status."""
        span.set_attribute("rpc.grpc.status", code)
        if request_id:
            span.set_attribute("treadle.request_id", request_id)
        if code in ("INTERNAL", "UNAVAILABLE"):
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
        span.end()

    def close(self) -> None:
        """Sends what is left; what no collector has taken after a second is dropped."""
        # A daemon: the SDK waits up to half a minute for a collector, and offers no shorter wait.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSING_SECONDS)


def _packages() -> tuple[Any, Any, Any, Any]:
    try:
        from opentelemetry import trace
        from opentelemetry.sdk import resources
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.trace import export
    except ImportError as error:
        raise RuntimeError(
            "--otel-endpoint needs the packages of OpenTelemetry; install the extra `otel`"
        ) from error
    return trace, sdk, export, resources
