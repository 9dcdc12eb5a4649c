"""vLLM's script gives it our prompts, writes what our report reads, and says when vLLM lacks."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import sys
import types

import numpy as np
import pytest

from benchmarks import offline
from benchmarks.peers import run_vllm
from engine.serving.commands.bench import Shape
from tests.benchmarks.tiny_config import TINY


class FakeLLM:
    """Answers every prompt with zeros, and keeps what it was asked."""

    def __init__(self, **settings):
        self.settings, self.asked = settings, []
        FakeLLM.last = self

    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm and params["ignore_eos"] and params["temperature"] == 0.0
        self.asked.append((prompts, params["max_tokens"]))
        answer = types.SimpleNamespace(token_ids=[0] * params["max_tokens"])
        return [types.SimpleNamespace(outputs=[answer]) for _ in prompts]


@pytest.fixture
def with_vllm(monkeypatch):
    cuda = types.SimpleNamespace(get_device_name=lambda _: "NVIDIA H200")
    modules = {
        "vllm": {"LLM": FakeLLM, "SamplingParams": dict},
        "torch": {"cuda": cuda, "__version__": "2.11"},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.9")


def test_machine_without_vllm_is_told_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(run_vllm.importlib.util, "find_spec", lambda _: None)
    assert run_vllm.main(["--model", "x.json"]) == 2
    assert capsys.readouterr().err == ("error: vLLM is not installed here; run this where it is\n")


def test_figures_stand_beside_ours(with_vllm, monkeypatch, tmp_path):
    config, out = tmp_path / "tiny.json", tmp_path / "peers" / "vllm_h200.json"
    config.write_text(json.dumps(TINY))
    words = ["--model", str(config), "--json", str(out), "--repeats", "2", "--shapes"]
    assert run_vllm.main([*words, "3x8+4,2x16+1"]) == 0
    assert run_vllm.main([*words, "1x8+4"]) == 0  # the others are kept
    found = json.loads(out.read_text())
    assert found["engine"] == "vLLM 9.9" and "prefix caching off" in found["conditions"]
    assert found["models"]["tiny"]["startup_seconds"] > 0
    assert set(found["models"]["tiny"]["shapes"]) == {"3x8+4", "2x16+1", "1x8+4"}
    assert set(found["models"]["tiny"]["shapes"]["2x16+1"]) == {"total_tokens_per_second"}
    monkeypatch.setattr(offline, "_PEERS", out.parent)
    info = types.SimpleNamespace(model_path="some/tiny.json", device="NVIDIA H200")
    peer = offline._peer(types.SimpleNamespace(info=info), Shape.parse("3x8+4"))
    assert peer["engine"] == "vLLM 9.9" and peer["output_tokens_per_second"] > 0


def test_the_work_is_ours(with_vllm, tmp_path):
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(TINY))
    run_vllm.main(["--model", str(config), "--shapes", "3x8+4", "--repeats", "1"])
    settings = FakeLLM.last.settings
    assert settings["enable_prefix_caching"] is False and settings["load_format"] == "dummy"
    prompts, max_tokens = FakeLLM.last.asked[-1]
    ours = offline.prompts(TINY["vocab_size"], Shape.parse("3x8+4"), seed=1)
    assert max_tokens == 4
    assert np.array_equal([one["prompt_token_ids"] for one in prompts], ours)


def test_a_run_that_lost_a_token_is_no_figure(with_vllm, monkeypatch):
    llm = FakeLLM()
    monkeypatch.setattr(FakeLLM, "generate", lambda *_, **__: [])
    with pytest.raises(RuntimeError, match="0 tokens came, 12 were asked for"):
        run_vllm.measure(llm, 96, Shape.parse("3x8+4"), repeats=1, seed=0)
