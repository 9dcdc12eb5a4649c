import asyncio
import importlib.util
import pathlib
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from engine.serving import grpc_server
from engine.serving.thread import EngineDead
from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc
from tests.serving.fake_core import FakeCore, FakeInfo
from tests.serving.running_server import RunningServer, running

_ROOT = pathlib.Path(__file__).parents[2]
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SECONDS = 20.0
# So that a call nobody answers fails its test instead of stopping the run.
_DEADLINE = ("grpc.service_config", '{"methodConfig": [{"name": [{}], "timeout": "20s"}]}')


class Stub(pb_grpc.GenerationServiceStub):
    """A bare stub with the health calls beside it."""

    def __init__(self, channel):
        super().__init__(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    def health(self, service=""):
        request = health_pb2.HealthCheckRequest(service=service)
        return self._health.Check(request, timeout=_SECONDS).status


class Connected:
    def __init__(self, server):
        self._channel = grpc.insecure_channel(server.address, options=[_DEADLINE])

    def __enter__(self):
        return Stub(self._channel)

    def __exit__(self, *error):
        self._channel.close()


@pytest.fixture(scope="module")
def server():
    core = FakeCore(error_prompts=frozenset({13}))
    with running(core) as one:
        yield one


@pytest.fixture
def stub(server):
    with Connected(server) as one:
        yield one


def _ids(*ids, **fields):
    params = pb.SamplingParams(max_tokens=fields.pop("max_tokens", 4))
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), params=params, **fields)


def _status(call):
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


def _until(is_true):
    end = time.monotonic() + _SECONDS
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_true()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": float("nan")}, "temperature is nan, it must be finite"),
        ({"top_p": 1.5}, r"top_p is 1.5, it must lie in [0, 1]"),
        ({"n": 1_000_000}, "n is 1000000, it must lie in [1, 128]"),
        ({"logprobs": 21}, "logprobs is 21, it must lie in [0, 20]"),
        ({"stop": [""]}, "stop holds an empty string"),
        ({"stop": ["x"] * 100_000}, "stop has 100000 strings, the limit is 16"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens is 9 but max_tokens is 4"),
        ({"max_tokens": 300}, "max_tokens is 300"),
        ({"stop_token_ids": [260]}, "stop_token_ids holds 260, outside the vocabulary"),
        ({"logit_bias": {5: 101.0}}, "logit_bias[5] is 101.0, it must lie in [-100, 100]"),
        ({"allowed_token_ids": pb.TokenIds()}, "allowed_token_ids has 0 ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_parameters_are_invalid_argument_with_field_value_and_limit(stub, params, message):
    request = pb.GenerateRequest(text="a", params=pb.SamplingParams(**params))
    code, detail = _status(stub.Generate(request))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert message in detail


@pytest.mark.parametrize(
    ("request_message", "message"),
    [
        (pb.GenerateRequest(), "prompt is missing; set text or token_ids"),
        (pb.GenerateRequest(text=""), "prompt is empty"),
        (_ids(), "prompt is empty; give at least one token id"),
        (_ids(1, 260), "prompt[1] is 260, outside the vocabulary of 260 ids"),
        (_ids(*[1] * 257), "prompt has 257 tokens but max_model_len is 256"),
        (_ids(*[1] * 256), "leaves no room for output"),
        (_ids(1, request_id="x" * 257), "request_id has 257 characters"),
        (_ids(1, cache_salt=b"x" * 257), "cache_salt has 257 bytes, the limit is 256"),
    ],
)
def test_bad_requests_are_invalid_argument(stub, request_message, message):
    code, detail = _status(stub.Generate(request_message))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert message in detail


def test_bytes_that_are_no_message_are_not_status_unknown(server):
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_stream(f"/{grpc_server.SERVICE}/Generate")
        code, _ = _status(call(b"\x12\x02\xff\xfe", timeout=_SECONDS))
    assert code == grpc.StatusCode.INVALID_ARGUMENT


def test_bytes_that_are_no_message_of_reflection_are_the_callers_fault(server, caplog):
    good = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(f"/{reflection.SERVICE_NAME}/ServerReflectionInfo")
        answers = call(iter([good, b"\x1a\x02\xff\xfe", good]), timeout=_SECONDS)
        services = reflection_pb2.ServerReflectionResponse.FromString(next(answers))
        assert services.list_services_response.service
        code, _ = _status(answers)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert not [one for one in caplog.records if one.exc_info or one.levelname == "ERROR"]


def test_a_request_over_the_receive_limit_is_refused_and_others_go_on(server, stub):
    with running(max_receive_bytes=2048) as small, Connected(small) as one:
        code, _ = _status(one.Generate(pb.GenerateRequest(text="x" * 4096)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(list(one.Generate(_ids(1)))) >= 1


def test_a_second_live_request_of_one_id_is_refused_and_the_first_goes_on():
    core = FakeCore(step_seconds=0.01)
    with running(core) as server, Connected(server) as stub:
        first = stub.Generate(_ids(1, max_tokens=40, request_id="same"))
        next(first)
        code, detail = _status(stub.Generate(_ids(1, request_id="same")))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id 'same' is live already" in detail
        assert list(first)[-1].usage.completion_tokens == 40


def test_a_fault_of_one_request_is_internal_without_inner_words(stub):
    code, detail = _status(stub.Generate(_ids(13)))
    assert code == grpc.StatusCode.INTERNAL
    assert detail.startswith("request ") and detail.endswith(": a logit was not finite")
    assert len(list(stub.Generate(_ids(1)))) >= 1


def test_a_long_refusal_still_fits_the_trailers(server, stub):
    text = pb.SamplingParams(bad_words=["é" * 5000])
    code, detail = _status(stub.Generate(pb.GenerateRequest(text="a", params=text)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert len(detail) <= 1001


def test_first_message_has_prompt_and_seed_and_last_has_usage(stub):
    messages = list(stub.Generate(_ids(5, 6, max_tokens=6)))
    assert list(messages[0].prompt.token_ids) == [5, 6]
    assert messages[0].HasField("seed")
    assert not any(one.HasField("prompt") or one.HasField("seed") for one in messages[1:])
    assert [one.HasField("usage") for one in messages] == [False] * (len(messages) - 1) + [True]
    usage = messages[-1].usage
    num_ids = sum(len(choice.token_ids) for one in messages for choice in one.choices)
    assert (usage.prompt_tokens, usage.completion_tokens, num_ids) == (2, 6, 6)
    assert usage.total_seconds >= usage.time_to_first_token_seconds > 0


def test_final_mode_sends_one_message(stub):
    request = _ids(5, max_tokens=6, stream_mode=pb.STREAM_MODE_FINAL)
    (message,) = stub.Generate(request)
    assert len(message.choices[0].token_ids) == 6
    assert message.choices[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert message.usage.completion_tokens == 6


def test_a_stream_faster_than_its_reader_loses_no_token():
    with running(FakeCore()) as server, Connected(server) as stub:
        call = stub.Generate(_ids(1, max_tokens=200))
        time.sleep(0.3)
        messages = list(call)
    assert sum(len(one.choices[0].token_ids) for one in messages) == 200


def test_unset_fields_take_the_models_own_defaults_and_zero_does_not():
    core = FakeCore(info=FakeInfo(generation_defaults={"temperature": 0.25, "top_k": 7}))
    with running(core) as server, Connected(server) as stub:
        list(stub.Generate(_ids(1)))
        zero = pb.SamplingParams(temperature=0.0, top_k=0, max_tokens=1)
        list(stub.Generate(pb.GenerateRequest(text="a", params=zero)))
    unset, given = core.submitted
    assert (unset.params.temperature, unset.params.top_k) == (0.25, 7)
    assert (given.params.temperature, given.params.top_k) == (0.0, 0)


def test_a_cancelled_call_is_aborted_in_the_engine():
    core = FakeCore(step_seconds=0.01)
    with running(core) as server, Connected(server) as stub:
        call = stub.Generate(_ids(1, max_tokens=200, request_id="gone"))
        next(call)
        call.cancel()
        _until(lambda: ("gone", "abort", None) in core.aborts)
        _until(lambda: core.stats().num_running == 0)


def test_a_cancelled_score_call_is_aborted_in_the_engine():
    # A step of one item is long beside the checks of them all, on a slow machine too.
    core = FakeCore(step_seconds=0.5, info=FakeInfo(max_rows=1))
    items = [pb.ScoreItem(prompt_text="a", continuation_text="b")] * 100
    with running(core) as server, Connected(server) as stub:
        call = stub.Score.future(pb.ScoreRequest(items=items))
        _until(lambda: core.stats().num_running == 1)
        call.cancel()
        _until(lambda: core.stats().num_running == core.stats().num_waiting == 0)
        assert len(core.aborts) > 50


def test_a_score_call_with_one_item_at_fault_leaves_nothing_behind():
    # A step of one item is long beside the checks of them all, on a slow machine too.
    core = FakeCore(step_seconds=0.5, info=FakeInfo(max_rows=1))
    items = [pb.ScoreItem(prompt_text="a", continuation_text="b")] * 100
    items.append(pb.ScoreItem(prompt_text="a", continuation_text=""))
    with running(core) as server, Connected(server) as stub:
        with pytest.raises(grpc.RpcError, match=r"items\[100\]: continuation is empty"):
            stub.Score(pb.ScoreRequest(items=items))
        _until(lambda: core.stats().num_running == core.stats().num_waiting == 0)
        assert len(core.aborts) > 50


def test_score_of_an_item_without_continuation_is_invalid(stub):
    request = pb.ScoreRequest(items=[pb.ScoreItem(prompt_text="a")])
    with pytest.raises(grpc.RpcError) as caught:
        stub.Score(request)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "continuation is missing; set continuation_text or continuation_ids" in str(caught.value)


def test_health_is_not_serving_until_the_engine_is_warm():
    gate = threading.Event()
    server = RunningServer(gate=gate).start("listening on ")
    try:
        with Connected(server) as stub:
            for service in ("", grpc_server.SERVICE):
                assert stub.health(service) == _NOT_SERVING
            code, detail = _status(stub.Generate(_ids(1)))
            assert code == grpc.StatusCode.UNAVAILABLE
            assert "the server is starting (compile 50% decode)" in detail
            info = stub.GetServerInfo(pb.GetServerInfoRequest())
            assert info.state == pb.SERVER_STATE_STARTING
            assert info.detail == "compile 50% decode"
            gate.set()
            server.wait_for("serving ")
            for service in ("", grpc_server.SERVICE):
                assert stub.health(service) == _SERVING
            assert stub.GetServerInfo(pb.GetServerInfoRequest()).state == pb.SERVER_STATE_READY
            assert len(list(stub.Generate(_ids(1)))) >= 1
    finally:
        gate.set()
        server.stop()
        server.join()
    assert server.failure is None


def test_a_stop_signal_during_start_up_does_not_wait_for_the_engine():
    gate = threading.Event()
    server = RunningServer(gate=gate).start("listening on ")
    try:
        server.stop()
        server.join()
    finally:
        gate.set()
    assert server.failure is None


def test_an_engine_that_does_not_start_ends_the_server_with_its_error():
    server = RunningServer(error=ValueError("no such architecture")).start("never said")
    server.join()
    assert isinstance(server.failure, ValueError)


def test_drain_finishes_what_runs_and_takes_nothing_new():
    core = FakeCore(step_seconds=0.02)
    with running(core) as server, Connected(server) as stub:
        call = stub.Generate(_ids(1, max_tokens=60))
        next(call)
        server.stop()
        server.wait_for("draining")
        _until(lambda: stub.health() == _NOT_SERVING)
        assert stub.health(grpc_server.SERVICE) == _NOT_SERVING
        code, detail = _status(stub.Generate(_ids(1)))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "draining" in detail
        assert stub.GetServerInfo(pb.GetServerInfoRequest()).state == pb.SERVER_STATE_DRAINING
        assert list(call)[-1].usage.completion_tokens == 60
        server.join()
    assert server.failure is None
    assert core.is_closed


def test_drain_cuts_what_runs_longer_than_it_may():
    core = FakeCore(step_seconds=0.05)
    with running(core, drain_seconds=0.1) as server, Connected(server) as stub:
        call = stub.Generate(_ids(1, max_tokens=250))
        next(call)
        server.stop()
        code, detail = _status(call)
        server.join()
    assert code == grpc.StatusCode.UNAVAILABLE
    assert "try another replica" in detail
    assert server.failure is None
    assert core.is_closed


def test_a_second_signal_does_not_wait_for_what_runs():
    core = FakeCore(step_seconds=0.05)
    with running(core, drain_seconds=1000.0) as server, Connected(server) as stub:
        next(stub.Generate(_ids(1, max_tokens=250)))
        server.stop()
        server.stop()
        server.join()
    assert server.failure is None


def test_a_lost_engine_is_unavailable_and_ends_the_server():
    core = FakeCore(fail_at_step=3)
    server = RunningServer(core).start()
    with Connected(server) as stub:
        code, detail = _status(stub.Generate(_ids(1, max_tokens=50)))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "secret" not in detail
        server.join()
    assert isinstance(server.failure, EngineDead)
    assert "3 steps failed in a row" in str(server.failure)
    assert "(after RuntimeError: device lost" in str(server.failure)


def test_a_port_in_use_is_named_with_the_way_out(server):
    port = int(server.address.rsplit(":", 1)[1])
    second = RunningServer(port=port).start("never said")
    second.join()
    assert isinstance(second.failure, OSError)
    assert f"cannot listen on 127.0.0.1:{port}" in str(second.failure)
    assert "--port" in str(second.failure)


def test_a_metrics_port_in_use_is_named_with_the_way_out():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        second = RunningServer(metrics_port=port).start("never said")
        second.join()
    assert isinstance(second.failure, OSError)
    assert f"metrics port 127.0.0.1:{port} cannot be used" in str(second.failure)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, r"port is 70000, it must lie in \[0, 65535\]"),
        ({"metrics_port": -1}, r"metrics_port is -1, it must lie in \[0, 65535\]"),
        ({"max_receive_bytes": 1}, "max_receive_bytes is 1, it must lie in"),
        ({"drain_seconds": float("nan")}, "drain_seconds is nan, it must lie in"),
    ],
)
def test_server_settings_name_value_and_limit(settings, message):
    with pytest.raises(ValueError, match=message):
        grpc_server.ServerSettings(**settings)


def test_reflection_names_the_service(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=grpc_server.SERVICE),
        ]
        names, file = stub.ServerReflectionInfo(iter(requests), timeout=_SECONDS)
    services = {one.name for one in names.list_services_response.service}
    assert {"treadle.v1.GenerationService", "grpc.health.v1.Health"} <= services
    assert file.file_descriptor_response.file_descriptor_proto


def test_abort_of_an_unknown_id_is_no_error(stub):
    assert stub.Abort(pb.AbortRequest(request_id="nobody")) == pb.AbortResponse()


def test_many_streams_at_once_each_get_their_own_tokens(stub):
    calls = [stub.Generate(_ids(i, max_tokens=20)) for i in range(20, 60)]
    seen = []
    for call in calls:
        messages = list(call)
        ids = [i for one in messages for choice in one.choices for i in choice.token_ids]
        assert len(ids) == 20
        seen.append((tuple(messages[0].prompt.token_ids), tuple(ids)))
    assert [prompt for prompt, _ in seen] == [(i,) for i in range(20, 60)]


def test_generated_code_is_that_of_the_proto_file(tmp_path):
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    spec = importlib.util.spec_from_file_location("generate", _ROOT / "proto" / "generate.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sources = script.generate(tmp_path)
    made = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 3 * len(sources) > 0
    for path in made:
        assert path.read_bytes() == (_ROOT / path.relative_to(tmp_path)).read_bytes(), path.name


def test_importing_the_client_imports_no_jax():
    code = "import sys, engine.serving.client; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=_ROOT, check=False).returncode == 0


def test_stop_signals_count():
    async def main():
        signals = grpc_server.StopSignals()
        signals.stop()
        first = (signals.drain.is_set(), signals.hurry.is_set())
        signals.stop()
        return first, (signals.drain.is_set(), signals.hurry.is_set())

    assert asyncio.run(main()) == ((True, False), (True, True))


def test_fault_of_what_was_asked_for_is_told_so_that_nobody_tries_again():
    core = FakeCore(error_prompts=frozenset({13}))
    core.is_callers_fault = True
    with running(core) as server, Connected(server) as stub:
        code, detail = _status(stub.Generate(_ids(13)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "a logit was not finite" in detail


def test_long_text_is_tokenized_though_no_prompt_could_be_as_long(stub):
    answer = stub.Tokenize(pb.TokenizeRequest(text="a" * 5000))
    assert len(answer.token_ids) == 5001
