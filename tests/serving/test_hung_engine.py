"""`treadle serve` over an engine that dies while it drains, or whose step never ends."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc
from tests.serving.fake_core import FakeCore

_ROOT = pathlib.Path(__file__).parents[2]
_SECONDS = 60.0
_EXIT_SECONDS = 15.0
"""Bounds of the server add up to less; without one of them it would never end."""
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Hanging(FakeCore):
    """Its third step never ends."""

    def step(self):
        if self.num_steps == 2:
            threading.Event().wait()
        return super().step()


class Dying(FakeCore):
    """Dies at SIGUSR1."""

    def __init__(self):
        super().__init__(step_seconds=0.05)
        self.dies = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self.dies.set())

    def poll(self):
        if self.dies.is_set():
            raise RuntimeError("secret of the machine")
        return super().poll()


class DyingAndHanging(Dying):
    """And never closes."""

    def close(self):
        threading.Event().wait()


class Process:
    """The command, its lines and one call of many tokens under way.

    Args:
      core: name of the class above that it serves.
      *arguments: more words of the command.
    """

    def __init__(self, core, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, __file__, core, "serve", "m", "--port", "0", *map(str, arguments)],
            cwd=_ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(_ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        self.call_ended = threading.Event()
        self.code = None

    def _until(self, start):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if line.startswith(start):
                return line
        raise AssertionError(self.lines)

    def __enter__(self):
        address = self._until("listening on ").split()[2].rstrip(";")
        self._until("serving ")
        self.channel = grpc.insecure_channel(address)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self._seen = threading.Event()
        self._caller = threading.Thread(target=self._call, daemon=True)
        self._caller.start()
        assert self._seen.wait(_SECONDS)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def _call(self):
        params = pb.SamplingParams(max_tokens=250, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), params=params)
        try:
            for _ in pb_grpc.GenerationServiceStub(self.channel).Generate(request):
                self._seen.set()
            self.code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            self.code = error.code()
        self.call_ended.set()

    def watch(self):
        """Health as it changes up to the end, gathered by a thread."""
        seen = []

        def run():
            with contextlib.suppress(grpc.RpcError):
                for update in self.health.Watch(health_pb2.HealthCheckRequest()):
                    seen.append(update.status)

        watcher = threading.Thread(target=run, daemon=True)
        watcher.start()
        return seen, watcher

    def said(self, words):
        self._reader.join(_SECONDS)
        return any(words in line for line in self.lines)

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self._reader.join(_SECONDS)
        self._caller.join(_SECONDS)
        self.channel.close()
        self.process.stderr.close()


@pytest.mark.parametrize("core", ["Dying", "DyingAndHanging"])
def test_engine_that_dies_in_a_drain_ends_the_process_with_1(core):
    with Process(core, "--drain-seconds", 600) as one:
        seen, watcher = one.watch()
        one.process.send_signal(signal.SIGTERM)
        watcher.join(0.5)
        one.process.send_signal(signal.SIGUSR1)
        assert one.process.wait(_EXIT_SECONDS) == 1
        assert one.call_ended.wait(_SECONDS) and one.code == grpc.StatusCode.UNAVAILABLE
        watcher.join(_SECONDS)
        assert seen[-1] == _NOT_SERVING
        assert one.said("the engine is lost; the server ends: the engine failed: RuntimeError")


def test_step_that_hangs_is_drained_no_longer_than_allowed():
    with Process("Hanging", "--drain-seconds", 0.5) as one:
        seen, watcher = one.watch()
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(2 * _EXIT_SECONDS) == 1
        assert one.call_ended.wait(_SECONDS) and one.code == grpc.StatusCode.UNAVAILABLE
        watcher.join(_SECONDS)
        assert seen[-1] == _NOT_SERVING
        assert one.said("the engine hangs: its last step does not end")


def test_second_signal_ends_a_hanging_engine_at_once():
    with Process("Hanging", "--drain-seconds", 600) as one:
        one.process.send_signal(signal.SIGTERM)
        while not any(line.startswith("draining") for line in one.lines):
            one.call_ended.wait(0.05)
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(_EXIT_SECONDS) == 1


def test_step_that_hangs_while_serving_is_found_after_the_limit_and_named():
    with Process("Hanging", "--step-seconds", 1) as one:
        seen, watcher = one.watch()
        assert one.process.wait(_EXIT_SECONDS) == 1
        assert one.call_ended.wait(_SECONDS) and one.code == grpc.StatusCode.UNAVAILABLE
        watcher.join(_SECONDS)
        assert seen[-1] == _NOT_SERVING
        assert one.said("a step has run for more than 1 s, the limit: the device hangs; look at")


if __name__ == "__main__":
    from engine.serving import cli
    from engine.serving.commands import startup
    from engine.serving.llm import AsyncLLM

    core = globals()[sys.argv.pop(1)]()
    startup.check_files = lambda config: None
    startup.make_async_llm = lambda config, report, tokenizer: AsyncLLM(
        config, tokenizer=None, core_factory=lambda config, progress: core
    )
    cli.main(sys.argv[1:])
