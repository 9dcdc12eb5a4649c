"""Runs the gRPC server over a fake core on a free port, in a thread with a loop of its own."""

import asyncio
import contextlib
import threading

from engine.serving import grpc_server
from engine.serving.llm import AsyncLLM
from tests.serving.fake_core import FakeCore, FakeTokenizer

_SECONDS = 20.0


class RunningServer:
    """A server from its first line to its end.

    Args:
      core: what it serves.
      gate: the engine waits for it before it is built; None: it does not wait.
      error: the engine's construction raises it.
      settings: changes of ServerSettings.
    """

    def __init__(self, core=None, *, gate=None, error=None, **settings):
        self.core = core or FakeCore()
        self.lines = []
        self.failure = None
        self._gate, self._error = gate, error
        self._settings = grpc_server.ServerSettings(**{"port": 0, "drain_seconds": 10.0} | settings)
        self._news = threading.Condition()
        self._is_over = False
        self._loop = None
        self.signals = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def start(self, line="serving"):
        """Returns once the server has said a line that starts like this, or has ended."""
        self._thread.start()
        self.wait_for(line)
        return self

    def wait_for(self, line):
        with self._news:
            found = lambda: self._is_over or any(one.startswith(line) for one in self.lines)  # noqa: E731
            assert self._news.wait_for(found, _SECONDS), self.lines

    @property
    def address(self):
        (line,) = (one for one in self.lines if one.startswith("listening on "))
        return line.removeprefix("listening on ").split(";")[0]

    @property
    def metrics_url(self):
        (line,) = (one for one in self.lines if one.startswith("metrics on "))
        return line.removeprefix("metrics on ")

    def stop(self):
        """One stop signal; nothing where the server has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.signals.stop)

    def join(self):
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive()

    async def _main(self):
        self._loop = asyncio.get_running_loop()
        self.signals = grpc_server.StopSignals()
        try:
            await grpc_server.serve(
                self._make_llm,
                self._settings,
                {"depth": "2"},
                signals=self.signals,
                announce=self._say,
            )
        except Exception as error:
            self.failure = error
        finally:
            with self._news:
                self._is_over = True
                self._news.notify_all()

    def _make_llm(self, report):
        report("compile", 0.5, "decode")
        if self._gate is not None:
            assert self._gate.wait(_SECONDS)
        if self._error is not None:
            raise self._error
        return AsyncLLM(
            "fake", tokenizer=FakeTokenizer(), core_factory=lambda config, progress: self.core
        )

    def _say(self, line):
        with self._news:
            self.lines.append(line)
            self._news.notify_all()


@contextlib.contextmanager
def running(core=None, **options):
    """A ready server, stopped at the end."""
    server = RunningServer(core, **options).start()
    try:
        if server.failure is not None:
            raise server.failure
        yield server
    finally:
        server.stop()
        server.stop()
        server.join()
