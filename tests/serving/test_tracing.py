import sys
import threading

import grpc
import pytest

from engine.serving import grpc_server, logs, tracing
from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc
from tests.serving.running_server import running

_SECONDS = 20.0
_TRACE = "0af7651916cd43dd8448eb211c80319c"
_PARENT = "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch):
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs the extra `otel`"
    )
    one = memory.InMemorySpanExporter()
    made = classmethod(lambda cls, endpoint: cls(one))
    monkeypatch.setattr(grpc_server.Spans, "to_collector", made)
    return one


def calls(server, *metadata):
    """One call that is answered and one that is refused."""
    with grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        request = pb.GenerateRequest(
            text="a", request_id="r-1", params=pb.SamplingParams(max_tokens=2)
        )
        list(stub.Generate(request, timeout=_SECONDS, metadata=metadata))
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(pb.GenerateRequest(), timeout=_SECONDS, metadata=metadata))


def test_each_call_is_a_span_under_the_callers(exporter):
    trace = ("traceparent", f"00-{_TRACE}-{_PARENT}-01")
    with running(otel_endpoint="http://unused") as server:
        calls(server, trace, ("x-request-id", "call-1"))
    first, second = exporter.get_finished_spans()
    assert first.name == "treadle.v1.GenerationService/Generate"
    assert f"{first.context.trace_id:032x}" == f"{second.context.trace_id:032x}" == _TRACE
    assert f"{first.parent.span_id:016x}" == _PARENT
    assert dict(first.attributes) == {
        "rpc.system": "grpc",
        "rpc.service": "treadle.v1.GenerationService",
        "rpc.method": "Generate",
        "rpc.grpc.status": "OK",
        "treadle.call_id": "call-1",
        "treadle.request_id": "r-1",
    }
    assert second.attributes["rpc.grpc.status"] == "INVALID_ARGUMENT"
    assert first.resource.attributes["service.name"] == "treadle"


def test_trace_that_the_caller_does_not_record_is_not_sent(exporter):
    with running(otel_endpoint="http://unused") as server:
        calls(server, ("traceparent", f"00-{_TRACE}-{_PARENT}-00"))
    assert exporter.get_finished_spans() == ()


def test_span_carries_on_the_callers_tracestate(exporter):
    trace = ("traceparent", f"00-{_TRACE}-{_PARENT}-01")
    states = (("tracestate", "one=1 , two=b@x"), ("tracestate", "three=t"))
    with running(otel_endpoint="http://unused") as server:
        calls(server, trace, *states)
        calls(server, trace, ("tracestate", "not valid"))
        calls(server, *states)
    found = [span.context.trace_state.to_header() for span in exporter.get_finished_spans()]
    assert found == ["one=1,two=b@x,three=t"] * 2 + [""] * 4


class StuckExporter:
    """A collector that takes nothing until it is let go."""

    def __init__(self):
        self.is_asked, self.is_free = threading.Event(), threading.Event()

    def export(self, spans):
        self.is_asked.set()
        self.is_free.wait(2 * _SECONDS)

    def shutdown(self):
        pass


def test_collector_that_takes_nothing_does_not_keep_the_server_from_its_end():
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")
    stuck = StuckExporter()
    spans = tracing.Spans(stuck)
    spans.end(spans.begin(logs.call_of("/service/Method", {})), "OK", "")
    closing = threading.Thread(target=spans.close, daemon=True)
    closing.start()
    assert stuck.is_asked.wait(_SECONDS)
    # The SDK itself would wait half a minute.
    closing.join(_SECONDS / 2)
    is_closed = not closing.is_alive()
    stuck.is_free.set()
    assert is_closed


def test_call_without_a_trace_begins_its_own(exporter):
    with running(otel_endpoint="http://unused") as server:
        calls(server)
    first, second = exporter.get_finished_spans()
    assert first.parent is None and first.context.trace_id != second.context.trace_id


def test_endpoint_without_the_packages_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(RuntimeError, match="needs the packages of OpenTelemetry; install the ext"):
        tracing.Spans.to_collector("http://127.0.0.1:4317")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "localhost:4317", "grpc://host:4317", ""])
def test_endpoint_without_a_known_scheme_is_refused(endpoint):
    with pytest.raises(ValueError, match=r"it must begin with http:// \(plain\) or https://"):
        grpc_server.ServerSettings(otel_endpoint=endpoint)
