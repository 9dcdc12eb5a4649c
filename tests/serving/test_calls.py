"""What stands around every call: names, deadlines, statuses, log lines."""

import asyncio
import contextlib
import io
import json
import logging
import re
import sys
import time
import urllib.request

import grpc
import grpc.aio
import prometheus_client
import pytest

from engine.serving import interceptors, logs, messages
from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc
from tests.serving.fake_core import FakeCore, FakeInfo
from tests.serving.running_server import running

_SECONDS = 20.0
_GENERATE = "/treadle.v1.GenerationService/Generate"


@contextlib.contextmanager
def served(core=None, **settings):
    """A server with metrics, and a stub of it."""
    with (
        running(core, metrics_port=0, **settings) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield server, pb_grpc.GenerationServiceStub(channel)


def ids(*token_ids, max_tokens=4, **fields):
    params = pb.SamplingParams(max_tokens=max_tokens)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), params=params, **fields)


def status(call):
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


def calls_ended(server, method="Generate"):
    """Ended calls by status code, once there is one."""
    pattern = re.compile(r'treadle:calls_total\{code="(\w+)",method="[^"]*/(\w+)"\} (\d+)')
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        text = urllib.request.urlopen(server.metrics_url, timeout=_SECONDS).read().decode()
        found = {code: int(n) for code, name, n in pattern.findall(text) if name == method}
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(text)


def until(is_true):
    end = time.monotonic() + _SECONDS
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_true()


def test_running_request_is_ended_at_its_deadline():
    core = FakeCore(step_seconds=0.02)
    with served(core) as (server, stub):
        error = status(stub.Generate(ids(1, max_tokens=250, request_id="late"), timeout=0.3))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: core.is_idle)
        assert [one[0] for one in core.aborts] == ["late"]
        # The caller's clock began first: it may have given up before ours said so.
        (code,) = calls_ended(server)
        assert code in ("DEADLINE_EXCEEDED", "CANCELLED")


def test_queued_request_that_cannot_make_it_is_dropped_without_having_run():
    core = FakeCore(step_seconds=0.02, info=FakeInfo(max_rows=1))
    with served(core) as (_, stub):
        first = stub.Generate(ids(1, max_tokens=100), timeout=_SECONDS)
        next(first)
        error = status(stub.Generate(ids(2, request_id="queued"), timeout=0.2))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: not core._waiting)
        assert [one[0] for one in core.aborts] == ["queued"]
        assert core._running[0].request.prompt_ids.tolist() == [1], "the first one was disturbed"
        assert sum(len(c.token_ids) for m in first for c in m.choices) == 99


def test_request_over_the_servers_own_limit_of_time_is_told_so():
    core = FakeCore(step_seconds=0.02)
    with served(core, request_seconds=0.2) as (_, stub):
        error = status(stub.Generate(ids(1, max_tokens=250)))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details() == (
            "the request ran for 0.2 s, the server's limit; ask for fewer tokens or start the "
            "server with a larger --request-seconds"
        )
        until(lambda: core.is_idle)
        assert stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=_SECONDS).device == "cpu"


class Context:
    """As much of a call's context as `Calls` touches."""

    def __init__(self, seconds):
        self._seconds = seconds
        self.aborted = None

    def time_remaining(self):
        return self._seconds

    def set_trailing_metadata(self, metadata):
        self.metadata = metadata

    def code(self):
        return self.aborted[0] if self.aborted else None

    async def abort(self, code, details):
        self.aborted = (code, details)
        raise grpc.aio.AbortError


def around(answer, seconds, **settings):
    """What `Calls` makes of one call whose behaviour is `answer`."""
    calls = interceptors.Calls(prometheus_client.CollectorRegistry(), **settings)
    context = Context(seconds)
    call = logs.Call(_GENERATE, "id")
    with contextlib.suppress(grpc.aio.AbortError):
        asyncio.run(calls._around(call, answer, object(), context))
    return context.aborted


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_call_that_arrives_late_is_not_begun(seconds):
    async def answer():
        raise AssertionError("it was begun")

    code, details = around(answer, seconds)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert details == "the deadline had passed when the call arrived"


def test_the_server_itself_ends_a_call_at_the_callers_deadline():
    ended = []

    async def answer():
        try:
            await asyncio.sleep(_SECONDS)
        finally:
            ended.append(True)

    code, details = around(answer, 0.05, request_seconds=10.0)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED and ended
    assert details == "the deadline of 0.050 s passed; what was queued or running is ended"


@pytest.mark.parametrize(("seconds", "code"), [(0.01, "DEADLINE_EXCEEDED"), (60.0, "CANCELLED")])
def test_status_that_no_longer_reaches_its_caller_is_no_fault_of_the_server(seconds, code):
    async def answer():
        raise grpc.aio.InternalError("the call is over")

    registry = prometheus_client.CollectorRegistry()
    calls = interceptors.Calls(registry)
    with pytest.raises(grpc.aio.InternalError):
        asyncio.run(calls._around(logs.Call(_GENERATE, "id"), answer, object(), Context(seconds)))
    labels = {"method": _GENERATE, "code": code}
    assert registry.get_sample_value("treadle:calls_total", labels) == 1.0


def test_timeout_that_is_no_deadline_is_a_fault_of_the_server(caplog):
    async def answer():
        raise TimeoutError("secret of the machine")

    code, details = around(answer, None)
    assert code == grpc.StatusCode.INTERNAL and "secret" not in details
    assert "secret of the machine" in caplog.text


def test_exception_of_any_handler_is_internal_with_the_calls_id_and_a_traceback_in_the_log(
    monkeypatch, caplog
):
    monkeypatch.setattr(messages, "fill_engine_facts", lambda *_: 1 / 0)
    with served() as (server, stub):
        metadata = (("x-request-id", "mine-1"),)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=_SECONDS, metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert caught.value.details() == (
            "the server failed on call mine-1; its log names the cause"
        )
        assert ("x-request-id", "mine-1") in [tuple(m) for m in caught.value.trailing_metadata()]
        assert calls_ended(server, "GetServerInfo") == {"INTERNAL": 1}
    assert "ZeroDivisionError" in caplog.text and "fill_engine_facts" in caplog.text


def test_streams_written_as_generators_are_served_too():
    written = []

    class Writer:
        async def write(self, message):
            written.append(message)

    async def behave(request, context):
        yield f"{request} 1"
        yield f"{request} 2"

    assert asyncio.run(interceptors._answer(behave, "message", Writer())) is None
    assert written == ["message 1", "message 2"]


def test_log_line_of_a_call_names_call_trace_request_and_status(caplog):
    caplog.set_level(logging.INFO)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(logs.JsonLines())
    logging.getLogger("treadle.calls").addHandler(handler)
    try:
        with served() as (server, stub):
            metadata = (("x-request-id", "gateway-7"), ("traceparent", trace))
            list(stub.Generate(ids(1, request_id="r-1"), timeout=_SECONDS, metadata=metadata))
            calls_ended(server)
    finally:
        logging.getLogger("treadle.calls").removeHandler(handler)
    (line,) = [json.loads(one) for one in lines.getvalue().splitlines()]
    assert line.pop("seconds") > 0 and line.pop("time").endswith("+00:00")
    assert line == {
        "level": "INFO",
        "logger": "treadle.calls",
        "message": "call ended",
        "method": _GENERATE,
        "call_id": "gateway-7",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "parent_id": "b7ad6b7169203331",
        "code": "OK",
        "request_id": "r-1",
    }


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", True),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", False),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", False),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\n", False),
        ("", False),
    ],
)
def test_traceparent_counts_only_where_the_standard_allows_it(text, is_valid):
    found = logs.read_traceparent(text)
    assert found == ((text[3:35], text[36:52], True) if is_valid else ("", "", True))
    assert logs.read_traceparent(text.replace("331-01", "331-00"))[2] is not is_valid


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a=1", "a=1"),
        (" vendor@system=of two words ,\t, b/2=~! ", "vendor@system=of two words,b/2=~!"),
        (",".join(f"k{i}=v" for i in range(32)), ",".join(f"k{i}=v" for i in range(32))),
        (",".join(f"k{i}=v" for i in range(33)), ""),
        ("a=1,a=2", ""),
        ("a=1,b", ""),
        ("A=1", ""),
        ("a=", ""),
        ("a=b=c", ""),
        (f"a={'v' * 257}", ""),
        ("a=\n", ""),
        ("", ""),
    ],
)
def test_tracestate_counts_only_where_the_standard_allows_it(text, found):
    assert logs.read_tracestate(text) == found


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "line\nbreak", 'quote"'])
def test_unsuitable_call_ids_are_replaced(given):
    call_id = logs.call_of(_GENERATE, {"x-request-id": given}).call_id
    assert re.fullmatch("[0-9a-f]{16}", call_id)


def test_log_lines_of_both_forms_carry_facts_and_traceback():
    def record():
        try:
            raise ValueError("why")
        except ValueError:
            return logging.LogRecord(
                "treadle", logging.ERROR, __file__, 1, "it %s", ("failed",), sys.exc_info()
            )

    made = record()
    made.facts = {"code": "INTERNAL"}
    text = logs.TextLines().format(made)
    assert " ERROR treadle: it failed [code=INTERNAL]\n    Traceback" in text
    line = json.loads(logs.JsonLines().format(made))
    assert (line["message"], line["code"]) == ("it failed", "INTERNAL")
    assert "ValueError: why" in line["traceback"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_configured_log_goes_to_one_place(form, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    for name in logs._OURS:
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    lines = io.StringIO()
    logs.configure(form, lines)
    logs.configure(form, lines)
    logging.getLogger("treadle.x").info("once")
    logging.getLogger("somebody.else").info("not at all")
    (line,) = lines.getvalue().splitlines()
    assert json.loads(line)["message"] == "once" if form == "json" else line.endswith(": once")


_FORGED = "x\n2026-01-01 00:00:00,000 ERROR engine: forged\u2028line\x1b[2J] [code=OK"


def test_what_a_caller_sends_makes_no_line_and_no_fact_of_its_own():
    made = logging.LogRecord("engine", logging.INFO, "f", 1, f"said {_FORGED}", None, None)
    made.facts = {"request_id": _FORGED, "code": "OK", "plain": "a-1"}
    line = logs.TextLines().format(made)
    assert len(line.splitlines()) == 1 and line.isprintable()
    assert line.endswith('\\u001b[2J] [code=OK" code=OK plain=a-1]')
    try:
        raise ValueError(_FORGED)
    except ValueError:
        made = logging.LogRecord("engine", logging.ERROR, "f", 1, "failed", None, sys.exc_info())
    first, *others = logs.TextLines().format(made).split("\n")
    assert first.endswith("ERROR engine: failed")
    assert others and all(line.startswith("    ") and line.isprintable() for line in others)


class RecordedSpans:
    """What would leave for a collector."""

    def __init__(self):
        self.request_ids = []

    def begin(self, call):
        return call

    def end(self, span, code, request_id):
        self.request_ids.append(request_id)


def test_request_id_over_the_limit_is_refused_and_neither_logged_nor_recorded_whole(
    monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    spans = RecordedSpans()
    monkeypatch.setattr(interceptors.Calls, "__init__", _with_spans(spans))
    with served() as (_, stub):
        error = status(stub.Generate(ids(1, request_id="y" * 100_000), timeout=_SECONDS))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "request_id has 100000 characters, it must have 1 to 256"
        list(stub.Generate(ids(1, request_id="z" * 256), timeout=_SECONDS))
    short = f"{'y' * 32}... (100000 characters)"
    assert spans.request_ids == [short, "z" * 256]
    (first, second) = [r.facts["request_id"] for r in caplog.records if hasattr(r, "facts")]
    assert (first, second) == (short, "z" * 256)


def _with_spans(spans):
    init = interceptors.Calls.__init__

    def begun(self, registry, request_seconds=None, _=None):
        init(self, registry, request_seconds, spans)

    return begun
