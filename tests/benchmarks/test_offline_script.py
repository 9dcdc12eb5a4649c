"""The benchmark script runs as it is, checks what it measures and records its conditions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import offline, startup
from engine.request import Delta
from engine.serving.commands.bench import Shape
from tests.benchmarks.tiny_config import SMALL, TINY

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def run_script(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "offline.py"), *(str(word) for word in words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # Away from the repository: the script finds its own tree.
        cwd="/",
    )


@pytest.fixture(scope="module")
def report(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("report") / "deep" / "report.json"
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    done = run_script(
        *("--model", tiny_config, "--shapes", "1x8+4,5x16+3,2x20+1", "--repeats", 2, *SMALL),
        *("--compilation-cache", cache, "--json", path),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(path.read_text())


def test_every_shape_is_measured_in_the_order_given(report):
    assert [result["shape"] for result in report["results"]] == ["1x8+4", "5x16+3", "2x20+1"]


def test_rates_follow_from_the_median_run(report):
    for result, num_output, num_total in zip(
        report["results"], (4, 15, 2), (12, 95, 42), strict=True
    ):
        assert len(result["run_seconds"]) == 2
        assert result["seconds"] == pytest.approx(sum(result["run_seconds"]) / 2, abs=2e-5)
        for name, count in (
            ("output_tokens_per_second", num_output),
            ("total_tokens_per_second", num_total),
        ):
            assert result[name] * result["seconds"] == pytest.approx(count, rel=0.01)


def test_steps_cover_the_tokens_and_every_host_stage_has_a_median(report):
    first, waves, prefill = report["results"]
    assert first["steps"] == 4  # one prefill step, three decode steps
    assert waves["steps"] >= 9  # five requests on two rows: three waves of three tokens
    assert prefill["ms_per_token_after_first"] is None
    for result in report["results"]:
        own_stages = ("schedule", "pack", "hand_over", "settle")
        assert set(result["host_ms"]) == {*own_stages, "launch", "wait"}
        assert all(ms > 0 for ms in result["host_ms"].values())
        own = sum(result["host_ms"][stage] for stage in own_stages)
        assert result["host_ms_per_step"] == pytest.approx(own, abs=1e-3)
        assert result["preemptions"] == 0


def test_conditions_name_device_versions_settings_programs_and_memory(report):
    conditions = report["conditions"]
    assert conditions["device"] == "cpu" and conditions["platform"] == "cpu"
    assert conditions["versions"]["jax"].startswith("0.")
    assert conditions["model"] == "tiny" and conditions["settings"]["load_format"] == "dummy"
    assert conditions["settings"]["prefix_cache"] is False
    assert conditions["settings"]["compilation_cache"] is True
    assert "limits" not in conditions["settings"] and "model" not in conditions["settings"]
    assert conditions["ladder"]["rows"] == [2] and conditions["ladder"]["tokens"] == [32]
    assert conditions["num_programs"] == 5
    assert {"load", "compile", "prove"} <= set(conditions["stage_seconds"])
    programs = {name.partition(" ")[2] for name in conditions["program_seconds"]}
    assert len(programs) == 5 + 2 and {"install", "fresh"} < programs
    memory = conditions["memory_bytes"]
    assert memory["total"] <= memory["limit"]
    assert memory["pools"] == memory["page_bytes"] * memory["num_pages"]


def test_a_device_of_unknown_ceilings_has_neither_bound_nor_peer(report):
    assert all(result["bound"] is None and result["peer"] is None for result in report["results"])


def test_a_shape_longer_than_the_model_names_the_limit():
    with pytest.raises(ValueError, match="1x60\\+8 needs 68 tokens but max_model_len is 64"):
        offline.measure(_LosingCore(), Shape.parse("1x60+8"), repeats=1)


def test_first_token_is_timed_from_the_start_of_the_process(tiny_config, tmp_path):
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    path = tmp_path / "start.json"
    done = run_script(
        *("--model", tiny_config, *SMALL, "--startup", "--first-token"),
        *("--compilation-cache", cache, "--json", path),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    start = json.loads(path.read_text())
    order = [start[f"{name}_seconds"] for name in ("imported", "ready", "first_token")]
    assert 0 < order[0] < order[1] <= order[2]
    stages = start["conditions"]["stage_seconds"]
    assert 0 < max(stages.values()) <= order[2]  # not their sum: some run side by side


def test_a_cold_start_refuses_a_folder_that_holds_programs(tmp_path):
    (tmp_path / "program").write_text("")
    with pytest.raises(ValueError, match="is not empty; name an empty folder"):
        startup.cold_and_warm(["--startup"], str(tmp_path))


def test_cold_and_warm_share_one_cache_that_is_empty_before_the_first(monkeypatch, tmp_path):
    seen = []

    def child(words, cache, report):
        seen.append((list(words), sorted(one.name for one in cache.iterdir())))
        (cache / "program").touch()
        engine = {"stage_seconds": {"compile": 1.0}, "program_seconds": {}, "num_programs": 5}
        return {
            "conditions": engine,
            "imported_seconds": 1.0,
            "first_token_seconds": 2.0,
            **engine,
        }

    monkeypatch.setattr(startup, "_child", child)
    words = ["--startup", "/somewhere/x.json"]
    report = startup.cold_and_warm(words, str(tmp_path / "xla"))
    assert seen == [(words, []), (words, ["program"])]
    assert report["cold"]["num_programs"] == report["warm"]["num_programs"] == 5
    assert report["conditions"]["command"] == ["offline.py", "--startup", "x.json"]
    assert report["benchmark"] == "startup" and "conditions" not in report["cold"]


class _LosingCore:
    """Finishes every request one token early."""

    class info:
        vocab_size = 8
        max_model_len = 64

    def __init__(self, error=None):
        self._live, self._error, self.is_idle = [], error, True

    def submit(self, request):
        self._live.append(request)
        self.is_idle = False

    def step(self):
        self.is_idle = True

    def poll(self):
        return [
            Delta(one.request_id, 0, (1,) * (one.max_tokens - 1), error=self._error)
            for one in self._live
        ]


def test_a_run_that_lost_a_token_is_no_figure():
    with pytest.raises(RuntimeError, match="gave 12 tokens, 15 were asked for"):
        offline.run(_LosingCore(), Shape.parse("3x4+5"), seed=0)


def test_a_failed_request_is_no_figure():
    with pytest.raises(RuntimeError, match="request 0-0 failed: bad id"):
        offline.run(_LosingCore(error="bad id"), Shape.parse("1x4+5"), seed=0)
