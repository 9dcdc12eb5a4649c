"""A served engine over its faults, in a process of its own with a real tiny model."""

import contextlib
import pathlib
import subprocess
import sys
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc
from tests.families import tiny
from tests.serving.served_process import Served

_ROOT = pathlib.Path(__file__).parents[2]
_SECONDS = 60.0
_EXIT_SECONDS = 5.0
"""What an operator is promised between the loss of the engine and the end of the process."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# The first launch that reads prompt id 99 runs out of memory; from the first one on that reads 98,
# every launch fails.
_FAULTS = """
import jax
from engine.execution.runner import Runner

launch, faults, is_broken = Runner.launch, [], []

def faulty(runner, packed):
    ids = packed.schedule.token_ids.tolist()
    output = launch(runner, packed)
    if is_broken or 98 in ids:
        is_broken.append(True)
        raise RuntimeError("device lost: secret of the machine")
    if 99 in ids and not faults:
        faults.append(True)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: secret bytes")
    return output

Runner.launch = faulty
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tiny.write_checkpoint("llama", tmp_path_factory.mktemp("served"))
    with Served(folder, "--max-rows", 4, before=_FAULTS) as one:
        yield one


def tokens(served, first, **fields):
    """Output ids of a greedy request whose prompt begins with `first`."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[first, 5, 6, 7]),
        params=pb.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        **fields,
    )
    stream = served.stub.Generate(request, timeout=_SECONDS)
    return [i for message in stream for choice in message.choices for i in choice.token_ids]


def test_running_out_of_memory_once_shows_in_no_stream(served):
    whole = {}

    def run(first):
        whole[first] = tokens(served, first)

    together = [threading.Thread(target=run, args=(first,)) for first in (99, 10, 11)]
    for one in together:
        one.start()
    for one in together:
        one.join(_SECONDS)
    assert any("a step failed; what was in flight runs again" in line for line in served.lines)
    for first, found in whole.items():
        assert len(found) == 24 and found == tokens(served, first), first
    health = health_pb2_grpc.HealthStub(served.channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=_SECONDS).status == _SERVING


def test_device_that_stays_broken_ends_the_request_by_name_and_then_the_process(served):
    health = health_pb2_grpc.HealthStub(served.channel)
    seen = []

    def watch():
        with contextlib.suppress(grpc.RpcError):
            for update in health.Watch(health_pb2.HealthCheckRequest(), timeout=_SECONDS):
                seen.append(update.status)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for first, name in ((98, "twice"), (12, "again")):
        with pytest.raises(grpc.RpcError) as caught:
            tokens(served, first, request_id=name)
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert caught.value.details() == (
            f"request {name!r} was in two failed launches, the last one by RuntimeError"
        )
    with pytest.raises(grpc.RpcError) as caught:
        tokens(served, 12)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "secret" not in caught.value.details()
    assert served.process.wait(_EXIT_SECONDS) == 1
    watcher.join(_SECONDS)
    assert seen == [_SERVING, _NOT_SERVING]
    assert served.until("error: the engine failed: RuntimeError: 6 steps failed")


def test_device_that_hangs_while_it_is_closed_does_not_keep_the_process():
    # The engine's thread dies and its core never closes: the process ends all the same.
    code = """
import sys, threading
from engine.serving import cli
from engine.serving.commands import startup
from engine.serving.llm import AsyncLLM
from tests.serving.fake_core import FakeCore

class Hanging(FakeCore):
    def close(self):
        threading.Event().wait()

startup.check_files = lambda config: None
startup.make_async_llm = lambda config, report, tokenizer: AsyncLLM(
    config, tokenizer=None, core_factory=lambda config, progress: Hanging(fail_at_step=2)
)
cli.main(sys.argv[1:])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "m", "--port", "0"],
        cwd=_ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stderr:
            if line.startswith("listening on "):
                address = line.split()[2].rstrip(";")
            if line.startswith("serving "):
                break
        with grpc.insecure_channel(address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(request, timeout=_SECONDS))
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert process.wait(_EXIT_SECONDS) == 1
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
