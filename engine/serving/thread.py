"""Owns a core in one thread: requests and aborts flow in from any thread, deltas out to sinks."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from engine.request import Delta, Request
from engine.scheduling.scheduler import QueueFull as QueueFull

if TYPE_CHECKING:
    from engine.core import Core, EngineInfo

_LOG = logging.getLogger(__name__)

# Bounds the pause of running rows while a large batch is handed in; a submit costs microseconds.
_COMMANDS_PER_STEP = 256
JOIN_SECONDS = 60.0
"""How long a close waits for the engine: a device that hangs must not keep the process."""


class EngineDead(RuntimeError):
    """The engine failed or was closed; it takes no more requests."""


Sink = Callable[[Delta | Exception], None]
"""Receives the deltas of one request, called on the engine's thread: hand over and return.

An exception is the last thing a sink receives: ValueError or QueueFull when the core refused the
request, EngineDead when the engine failed under it.
"""


@dataclasses.dataclass
class _Live:
    sink: Sink
    num_open: int
    """Choices without a finish reason."""


@dataclasses.dataclass(frozen=True)
class _Submit:
    request: Request
    sink: Sink


@dataclasses.dataclass(frozen=True)
class _Abort:
    request_id: str
    reason: str
    choice: int | None
    owner: Sink | None


@dataclasses.dataclass(frozen=True)
class _Call:
    function: Callable[[Core], Any]
    future: concurrent.futures.Future[Any]


class _Close:
    """Ends the thread."""


_Command = _Submit | _Abort | _Call | _Close


class EngineThread:
    """Runs a core in a thread of its own, which sleeps while there is nothing to do.

    The thread starts at construction and builds the core; requests handed in before it is ready
    wait. Every public method may be called from any thread.

    Args:
      core_factory: makes the core; runs on the engine's thread.
    """

    def __init__(self, core_factory: Callable[[], Core]) -> None:
        self._core_factory = core_factory
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._started: concurrent.futures.Future[EngineInfo] = concurrent.futures.Future()
        self._failure: str | None = None
        self._step_began: float | None = None
        # Makes "dead?" and "queue it" one act, so that nothing is queued after the last look.
        # Reentrant, since a finalizer may close the engine in the middle of a submit.
        self._lock = threading.RLock()
        # A daemon, so that an engine nobody closed does not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="treadle-engine", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """True once the core is built, also after it has failed."""
        return self._started.done() and self._started.exception() is None

    @property
    def healthy(self) -> bool:
        """True while requests are served."""
        return self.is_ready and self._failure is None and self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        """Why the engine takes no more requests; None while it does."""
        return self._failure

    def wait_ready(self, timeout: float | None = None) -> EngineInfo:
        """Facts of the engine, once the core is built.

        Raises:
          TimeoutError: after `timeout` seconds.
          Exception: what the core's construction raised.
        """
        return self._started.result(timeout)

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands a request in; its deltas, or an exception, come to `sink`.

        Raises:
          EngineDead: the engine failed or was closed.
        """
        self._put(_Submit(request, sink))

    def abort(
        self,
        request_id: str,
        reason: str = "abort",
        choice: int | None = None,
        *,
        owner: Sink | None = None,
    ) -> None:
        """Ends a request or one choice of it; one that is not live, or a dead engine, is no error.

        The sink still receives the finishing delta of every choice that was open.

        Args:
          request_id: of the request.
          reason: "abort", or "stop" for a stop string.
          choice: None ends all choices.
          owner: the sink handed in with the request. Whoever ends what it submitted itself names
            it, so that a request of the same id, live when this one was refused or submitted when
            it had finished, goes on.
        """
        with self._lock:
            if self._failure is None:
                self._inbox.put(_Abort(request_id, reason, choice, owner))

    def call[T](self, function: Callable[[Core], T]) -> concurrent.futures.Future[T]:
        """Runs `function(core)` on the engine's thread between two steps.

        Its exception goes to the future alone.

        Raises:
          EngineDead: the engine failed or was closed.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._put(_Call(function, future))
        return future

    def close(self, seconds: float = JOIN_SECONDS) -> bool:
        """Ends live requests with EngineDead and closes the core; idempotent.

        Args:
          seconds: how long to wait until the core is closed. One that is still being built is
            closed once it is; one whose device hangs never is.

        Returns:
          False when it has not been closed by then.
        """
        self._inbox.put(_Close())
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        if seconds and self._thread.is_alive():
            _LOG.warning("the engine has not ended after %g s; its memory stays taken", seconds)
        return not self._thread.is_alive()

    @property
    def is_closed(self) -> bool:
        """True when the core is closed and the thread has ended."""
        return not self._thread.is_alive()

    @property
    def busy_seconds(self) -> float:
        """How long the step that runs has run, recovery included; 0.0 when none does."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _put(self, command: _Command) -> None:
        with self._lock:
            if self._failure is not None:
                raise EngineDead(self._failure)
            self._inbox.put(command)

    def _run(self) -> None:
        try:
            core = self._core_factory()
        except BaseException as error:
            self._die(f"the engine did not start: {_named(error)}")
            self._started.set_exception(error)
            return
        self._started.set_result(core.info)
        try:
            self._serve(core)
            self._die("the engine is closed; make a new one")
        except BaseException as error:
            _LOG.exception("the engine failed and takes no more requests")
            self._die(f"the engine failed: {_named(error)}{_cause(error)}; make a new one")
        try:
            core.close()
        except Exception:
            _LOG.exception("the engine's core did not close cleanly")

    def _serve(self, core: Core) -> None:
        is_busy = False
        while self._take_commands(core, should_wait=not is_busy):
            self._step_began = time.monotonic()
            try:
                is_busy = core.step()
            except Exception as error:
                _LOG.exception("a step failed; what was in flight runs again")
                core.recover(_kind(error))
                is_busy = True
            self._step_began = None
            self._deliver(core, core.poll())
            if not is_busy and not core.is_idle:
                raise RuntimeError("requests are live but none of them can run")

    def _take_commands(self, core: Core, *, should_wait: bool) -> bool:
        """Obeys what has come in; False when the engine is to end."""
        for _ in range(_COMMANDS_PER_STEP):
            try:
                command = self._inbox.get(block=should_wait)
            except queue.Empty:
                return True
            should_wait = False
            match command:
                case _Submit(request, sink):
                    self._submit(core, request, sink)
                case _Abort(request_id, reason, choice, owner):
                    live = self._live.get(request_id)
                    if owner is None or (live is not None and live.sink is owner):
                        core.abort(request_id, reason, choice)
                case _Call(function, future):
                    _answer(future, function, core)
                case _:
                    return False
        return True

    def _submit(self, core: Core, request: Request, sink: Sink) -> None:
        request_id = request.request_id
        if request_id in self._live:
            error = ValueError(f"request_id {request_id!r} is live already; choose another")
            _give(sink, error)
            return
        self._live[request_id] = _Live(sink, request.params.n)
        try:
            core.submit(request)
        except (ValueError, TypeError, QueueFull) as error:
            del self._live[request_id]
            _give(sink, error)

    def _deliver(self, core: Core, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is None:
                continue
            if delta.finish_reason is not None:
                live.num_open -= 1
                if live.num_open == 0:
                    del self._live[delta.request_id]
            if not _give(live.sink, delta) and self._live.pop(delta.request_id, None):
                core.abort(delta.request_id)

    def _die(self, reason: str) -> None:
        with self._lock:
            self._failure = reason
            live, self._live = self._live, {}
            left: list[_Command] = []
            while not self._inbox.empty():
                left.append(self._inbox.get())
        for one in live.values():
            _give(one.sink, EngineDead(reason))
        for command in left:
            if isinstance(command, _Submit):
                _give(command.sink, EngineDead(reason))
            elif isinstance(command, _Call):
                command.future.set_exception(EngineDead(reason))


def _give(sink: Sink, event: Delta | Exception) -> bool:
    """False when the sink raised, which must not end the engine for everybody else."""
    try:
        sink(event)
    except Exception:
        _LOG.exception("a request's sink raised; the request is dropped")
        return False
    return True


def _answer(
    future: concurrent.futures.Future[Any], function: Callable[[Core], Any], core: Core
) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(core)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _kind(error: Exception) -> str:
    """What callers may learn of a fault: the log has the rest, which may name the machine."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return "running out of device memory"
    return type(error).__name__


def _cause(error: BaseException) -> str:
    """What was being recovered from, where recovering failed."""
    return "" if error.__context__ is None else f" (after {_named(error.__context__)})"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
