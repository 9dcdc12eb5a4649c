"""Habits as code: a test that checked nothing fails, and what was not run is listed.

A test has checked something when its call passed an `assert`, a `pytest.raises` or `pytest.warns`
block, an `assert_*` function of numpy, or when an engine made a step. The few tests that check in
another way stand with their reason in `no_assertion.toml`.
"""

from __future__ import annotations

import functools
import os
import sys
import tomllib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.assertion import rewrite, util

# Modules rewritten without `enable_assertion_pass_hook` count nothing, and pytest would read them
# from older bytecode files: these have a name of their own.
rewrite.PYC_TAIL = rewrite.PYC_TAIL.replace(".pyc", "-counted.pyc")

LIST = Path(__file__).with_name("no_assertion.toml")
GPU = "an NVIDIA GPU (JAX_PLATFORMS=cuda)"
_STEPS = (("engine.core", "Core", "step"), ("engine.execution.runner", "Runner", "launch"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="a test that would be skipped fails: what it needs was installed for this run",
    )


def pytest_configure(config: pytest.Config) -> None:
    habits = Habits(
        tomllib.loads(LIST.read_text()), may_skip=not config.getoption("--no-skips", False)
    )
    config.pluginmanager.register(habits, "habits")


class Habits:
    """Counts checks during each call, and keeps what was left out."""

    def __init__(self, exempt: Mapping[str, str], *, may_skip: bool = True) -> None:
        self._exempt = exempt
        self._may_skip = may_skip
        self._num_checks = 0
        self._is_calling = False
        self._session: pytest.Session | None = None
        self._missing: dict[str, list[str]] = {}
        self._restore: list[Callable[[], None]] = []
        self._wrapped: set[object] = set()

    # What counts.

    def pytest_assertion_pass(self) -> None:
        self._num_checks += 1
        if self._is_calling:
            # One is enough: pytest words every assertion that it reports here. It turns the
            # reports on again for the next test.
            util._assertion_pass = None

    def _count(self, owner: Any, name: str) -> None:
        """Counts the calls of a function from now to the end of the run."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._num_checks += 1
            return function(*args, **kwargs)

        setattr(owner, name, counted)
        self._restore.append(lambda: setattr(owner, name, function))

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        # The context that `raises` and `warns` return: leaving it is the check.
        for context in (type(pytest.raises(ValueError)), type(pytest.warns(UserWarning))):
            self._count(context, "__exit__")
        for name in dir(np.testing):
            if name.startswith("assert_"):
                self._count(np.testing, name)

    def _watch_engines(self) -> None:
        """Wraps the engine's steps once somebody has imported them; the plugin imports no jax."""
        for module, owner, name in _STEPS:
            if module in sys.modules and module not in self._wrapped:
                kind = getattr(sys.modules[module], owner, None)
                if kind is not None:  # else it is being imported just now
                    self._wrapped.add(module)
                    self._count(kind, name)

    def pytest_unconfigure(self) -> None:
        for restore in reversed(self._restore):
            restore()
        self._restore.clear()

    # What must have been counted.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._watch_engines()
        self._num_checks, self._is_calling = 0, True
        try:
            result = yield
        finally:
            self._is_calling = False
        # An expected failure that passes is judged by its own mark.
        if item.get_closest_marker("xfail") is None:
            self._judge(item.nodeid.partition("[")[0])
        return result

    def _judge(self, name: str) -> None:
        if not self._num_checks and name not in self._exempt:
            pytest.fail(
                "executed no assertion and no engine step: assert what it is for, or give the "
                f"reason in {LIST.name}",
                pytrace=False,
            )
        if self._num_checks and name in self._exempt:
            pytest.fail(f"{LIST.name} says that it asserts nothing; it does: take its row away")

    # What was left out.

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves the GPU suites out where jax is told to run on the CPU."""
        if os.environ.get("JAX_PLATFORMS") != "cpu":
            return
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        if left_out:
            self._missing.setdefault(GPU, []).extend(item.nodeid for item in left_out)
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """A GPU suite owns the device's memory and its process: one file at a time."""
        suites = sorted(
            {str(item.path.name) for item in session.items if item.get_closest_marker("gpu")}
        )
        if len(suites) > 1:
            raise pytest.UsageError(
                f"{len(suites)} GPU suites in one process ({', '.join(suites)}); run each file by "
                "itself"
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = _reason(report)
            if reason in ("", "unconditional skip"):
                report.outcome = "failed"
                report.longrepr = "skipped without a reason: name the missing resource"
            elif not self._may_skip:
                report.outcome = "failed"
                report.longrepr = f"would be skipped, and --no-skips was given: {reason}"
            else:
                self._missing.setdefault(reason, []).append(item.nodeid)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._missing.setdefault(_reason(report), []).append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Lists what was left out by what was missing, and words the exit status last."""
        if self._missing:
            terminalreporter.section("not run, for want of")
        for reason, names in sorted(self._missing.items()):
            terminalreporter.line(f"{reason}: {len(names)}")
            for name in names:
                terminalreporter.line(f"  {name}")
        # The session's own, which any plugin may have changed after the last test.
        if self._session is not None and self._session.exitstatus:
            status = int(self._session.exitstatus)
            terminalreporter.line(f"exit status {status}, whatever the counts say")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The words after "Skipped: "."""
    _, _, text = report.longrepr if isinstance(report.longrepr, tuple) else (None, 0, "")
    return str(text).removeprefix("Skipped").removeprefix(": ").strip()
