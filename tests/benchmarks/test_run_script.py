"""One command composes every measurement, keeps to its minutes and makes tables of what came."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import run, table
from tests.benchmarks.tiny_config import SMALL, TINY

ROOT = Path(__file__).parents[2]


def steps_of(*words: str) -> list[run.Step]:
    options, engine = run._parser().parse_known_args(words)
    return run.plan(options, engine, "h200")


def test_every_op_and_every_model_is_a_step_and_its_script_exists():
    steps = steps_of()
    names = [step.name for step in steps]
    ops = {path.stem for path in (ROOT / "benchmarks" / "kernels").glob("*.py")} - {"harness"}
    assert {f"op:{op}" for op in ops} == {name for name in names if name.startswith("op:")}
    assert names[0].startswith("qwen3_8b") and len(names) == len(set(names))
    ends = ("startup", "served", "masked", "memory", "kernels:1", "kernels:64", "graphs")
    assert {f"qwen3_8b:{end}" for end in ends} | {"qwen3_8b", "qwen3_30b_a3b"} <= set(names)
    assert all(Path(step.command[1]).is_file() for step in steps)
    assert all(step.result.parent == table.RESULTS for step in steps if ":vllm" not in step.name)


def test_results_are_named_by_model_and_device():
    found = {step.name: step.result.name for step in steps_of()}
    assert found["qwen3_8b"] == "qwen3_8b_h200.json"
    assert found["op:mla"] == "mla_decode_h200.json"
    assert found["qwen3_8b:kernels:64"] == "kernels_qwen3_8b_h200_b64.txt"


def test_engine_words_go_to_engines_alone():
    steps = {step.name: step.words for step in steps_of("--max-rows", "2")}
    assert "--max-rows" in steps["qwen3_8b"] and "--row-rungs" not in steps["qwen3_8b"]
    assert "--max-rows" in steps["qwen3_8b:startup"] and "--max-rows" not in steps["op:moe"]


def test_a_tokenizer_goes_to_the_masked_rows_alone():
    words = {step.name: step.words for step in steps_of("--tokenizer", "t.gguf")}
    assert [name for name, given in words.items() if "t.gguf" in given] == ["qwen3_8b:masked"]


def test_only_chooses_by_name_and_by_beginning():
    steps = steps_of()
    found = [step.name for step in run.chosen(steps, "qwen3_8b,op:*")]
    assert found[0] == "qwen3_8b" and len(found) > 5
    assert all(name.startswith("op:") for name in found[1:])
    with pytest.raises(ValueError, match="--only names 'opp', which is no step; there are: qwen3"):
        run.chosen(steps, "op:moe,opp")


def test_step_starts_only_with_its_minutes_left(monkeypatch, tmp_path):
    now, ran = [0.0], []

    def take(step, seconds):
        ran.append((step.name, seconds))
        now[0] += 60 * step.minutes
        return "done"

    monkeypatch.setattr(run, "_run_one", take)
    steps = [
        run.Step(name, ("offline.py",), tmp_path / name, minutes)
        for name, minutes in (("a", 2.0), ("b", 4.0), ("c", 1.0))
    ]
    outcomes = run.run(steps, 4.0, tmp_path / "run.json", clock=lambda: now[0])
    assert ran == [("a", 240.0), ("c", 120.0)]
    assert [one["outcome"] for one in outcomes] == ["done", "no time left", "done"]
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == outcomes


def test_step_is_stopped_with_its_own_processes_when_time_is_over(monkeypatch, tmp_path):
    code = "import os, time; os.fork(); time.sleep(60)"
    step = run.Step("endless", ("x.py",), tmp_path, 0.0)
    monkeypatch.setattr(run.Step, "command", property(lambda _: [sys.executable, "-c", code]))
    assert run._run_one(step, 0.5) == "cut short"
    monkeypatch.setattr(run.Step, "command", property(lambda _: [sys.executable, "-c", "1 / 0"]))
    assert run._run_one(step, 60.0) == "failed with 1"


def test_list_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr(run, "_run_one", None)
    assert run.main(["--list", "--only", "op:norm"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "op:norm" in line and "kernels/norm.py --json" in line


def test_a_model_is_measured_and_stands_in_the_tables(tmp_path):
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(TINY))
    out = tmp_path / "results"
    words = ("--only", "tiny", "--model", config, "--shapes", "1x8+4", "--repeats", 1)
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    words = (*words, "--out", out, "--compilation-cache", cache)
    assert run.main([*map(str, words), *SMALL]) == 0
    report = json.loads((out / "tiny_cpu.json").read_text())
    assert [one["shape"] for one in report["results"]] == ["1x8+4"]
    assert "| 1 x 8+4 |" in (out / "README.md").read_text()
    (step,) = json.loads((out / "run_cpu.json").read_text())["steps"]
    assert step["outcome"] == "done" and "tiny.json" in step["command"]
