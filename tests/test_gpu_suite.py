"""The GPU suite never passes without a GPU, a model or a test, and keeps a report."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import types
from pathlib import Path

import pytest

from tests.gpu import conftest, run

ROOT = Path(__file__).parents[1]


def test_machine_without_a_gpu_fails_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "_device", lambda env: (False, f"no {env['JAX_PLATFORMS']}"))
    assert run.main(["--out", str(tmp_path / "out.txt")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: jax finds no NVIDIA GPU here (no cuda); run the GPU suite on")
    assert not (tmp_path / "out.txt").exists()


def test_platform_that_is_not_there_is_no_device():
    found, reason = run._device(os.environ | {"JAX_PLATFORMS": "nowhere"})
    assert not found and "nowhere" in reason


def test_a_run_keeps_what_its_tests_saw(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "FILES", ("test_gpu_goldens.py",))
    out = tmp_path / "out.txt"
    words = ["-k", "family_equals and internlm2"]
    assert run.main(["--device", "cpu", "--out", str(out), *words]) == 0
    text = out.read_text()
    assert text.startswith("GPU suite: 1 passed, 0 failed, 0 skipped\ncpu, driver ")
    assert "    internlm2: " in text


def test_a_run_of_no_test_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "_device", lambda env: (True, "NVIDIA H200"))
    monkeypatch.setattr(run, "FILES", ())
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert run.main([]) == 1
    assert "0 passed" in (tmp_path / "gpu_suite_h200.txt").read_text()


@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_missing_model_fails_the_run_unless_it_is_allowed(is_allowed):
    options = {"--without-smollm2": is_allowed}
    config = types.SimpleNamespace(getoption=lambda name, default: options.get(name, default))
    report = conftest.Report(config)
    skip = pytest.TestReport(
        "t.py::t", ("t.py", 1, "t"), {}, "skipped", ("t.py", 1, f"Skipped: {conftest.SMOLLM2}"),
        "setup",
    )  # fmt: skip
    report.pytest_runtest_logreport(skip)
    session = types.SimpleNamespace(exitstatus=0)
    report.pytest_sessionfinish(session)
    assert session.exitstatus == (0 if is_allowed else 1)
    assert report._tests["t.py::t"]["why"].endswith(conftest.SMOLLM2)


def test_options_reach_every_file():
    options = argparse.Namespace(device="cpu", smollm2=Path("m.gguf"), without_smollm2=True)
    words = run.command(options, run.FILES[0], Path("r.json"), ["-x"])
    assert words[-1] == "-x" and str(Path("m.gguf").resolve()) in words
    assert {"--without-smollm2", "--report"} < set(words)
    files = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert sorted(run.FILES) == files


def test_the_suite_of_a_cpu_leaves_the_folder_out(tmp_path):
    for folder in ("tests/gpu", "tests/habits", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests" / "test_one.py").touch()
    shutil.copy(ROOT / "tests" / "run", tmp_path / "tests" / "run")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    done = subprocess.run([tmp_path / "tests" / "run"], capture_output=True, text=True, check=True)
    assert "tests/habits tests/test_one.py" in done.stdout and "tests/gpu" not in done.stdout
