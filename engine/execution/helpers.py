"""Processes that trace and lower steps beside this one, which could only take one after another.

They only ever save time: whatever one of them fails to do, its asker does itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from engine.execution.contract import Finding

PATIENCE_S = 180.0
"""How long a helper may take over a step, its own start included: more than any ever did."""
_ROOT = pathlib.Path(__file__).parents[2]
_LOG = logging.getLogger(__name__)
_TOLD_BYTES = 4000
"""Of what a helper that failed wrote last."""


class HelperError(RuntimeError):
    """A helper did not do what it was asked for; the log says why."""


@dataclasses.dataclass(frozen=True)
class Help:
    """A step that was lowered elsewhere."""

    export: bytes
    """For `Recipe.imported`."""
    findings: Sequence[Finding]
    seconds: float
    """That the helper took."""


class Helpers:
    """Some helpers, started when they are first needed. One that fails is not started again.

    Args:
      number: of processes, at most.
      environment: what theirs has besides this process's own: it keeps them off the device.
      patience_s: how long one may take over a job.
    """

    def __init__(
        self, number: int, environment: Mapping[str, str], patience_s: float = PATIENCE_S
    ) -> None:
        self._number = number
        self._environment = environment
        self._patience_s = patience_s
        self._processes: list[_Process] = []
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._num_failed = 0
        self._is_open = True
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, number), "helper")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all of them, whatever they are doing."""
        self._is_open = False
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._idle.put(None)
        for process in self._processes:
            process.stop()
        self._pool.shutdown()

    @property
    def number(self) -> int:
        """Processes, at most."""
        return self._number

    @property
    def pids(self) -> list[int]:
        """Of all that were started."""
        return [process.pid for process in self._processes]

    def start(self, number: int) -> None:
        """Starts as many as so many jobs can use, without waiting for them."""
        while len(self._processes) < min(number, self._number):
            try:
                self._processes.append(_Process(self._environment))
            except OSError as error:
                _LOG.warning("only %d helpers could be started: %s", len(self._processes), error)
                self._number = len(self._processes)
                break
            self._idle.put(self._processes[-1])

    def ask(self, jobs: Sequence[str]) -> list[concurrent.futures.Future[Help]]:
        """Has jobs of `helper.job_of` done, each by the first helper that is free.

        A future raises HelperError where that failed, and the log tells why.
        """
        self.start(len(jobs))
        if self._num_failed == len(self._processes):
            self._idle.put(None)
        return [self._pool.submit(self._ask, job) for job in jobs]

    def _ask(self, job: str) -> Help:
        process = self._idle.get()
        if process is None:
            self._idle.put(None)  # for the next that waits
            raise HelperError("no helper is left")
        try:
            head, export = process.ask(job, self._patience_s)
        except (OSError, ValueError) as error:
            self._forget(process, error)
            raise HelperError("a helper ended") from error
        self._idle.put(process)
        if "error" in head:
            _LOG.warning("a helper could not lower a step:\n%s", head["error"])
            raise HelperError("a helper could not lower a step")
        return Help(export, [Finding(**one) for one in head["findings"]], head["seconds"])

    def _forget(self, process: _Process, error: Exception) -> None:
        said = process.stop()
        if self._is_open:
            _LOG.warning("a helper failed and is not used any more: %s\n%s", error, said)
        with self._lock:
            self._num_failed += 1
            if self._num_failed == len(self._processes):
                self._idle.put(None)


class _Process:
    """One helper and the pipes to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with contextlib.ExitStack() as undo:
            self._errors = undo.enter_context(tempfile.TemporaryFile())
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.execution.helper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
                start_new_session=True,  # Ctrl-C is for this process, which then ends its helpers
            )
            undo.pop_all()  # what `stop` closes
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, job: str, patience_s: float) -> tuple[dict[str, Any], bytes]:
        """The two parts of `helper.answer`.

        Raises:
          OSError, ValueError: it ended, or had to be ended for want of an answer.
        """
        started = time.monotonic()
        timer = threading.Timer(patience_s, self._process.kill)
        timer.start()
        try:
            self._to.write(job.encode() + b"\n")
            self._to.flush()
            head = json.loads(self._from.readline() or b"{}")
            size = head.get("size", 1)
            export = self._from.read(size)
        finally:
            timer.cancel()
        if len(export) < size:
            is_late = time.monotonic() - started >= patience_s
            raise OSError(f"no answer within {patience_s:g} s" if is_late else "it ended")
        return head, export

    def stop(self) -> str:
        """Ends it, and returns the end of what it wrote besides answers."""
        with self._lock:
            if self._errors.closed:
                return ""
            self._process.kill()
            self._process.wait()
            for pipe in (self._to, self._from):
                with contextlib.suppress(OSError):  # nobody reads what was still to be written
                    pipe.close()
            with self._errors as errors:
                errors.seek(0)
                return errors.read()[-_TOLD_BYTES:].decode(errors="replace")
