"""The list of a step's kernels: read from a trace, summed by name, costliest first."""

from __future__ import annotations

import json
import os

from benchmarks import step_kernels
from tests.benchmarks.tiny_config import TINY


def named(kind, pid, tid, name):
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def ran(name, us, tid=7, pid=1, **args):
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": 0, "dur": us, "args": args}


NAMES = [
    named("process_name", 1, 0, "/device:GPU:0"),
    named("process_name", 2, 0, "/host:CPU"),
    named("thread_name", 1, 7, "Stream #13(Compute)"),
    named("thread_name", 1, 9, "XLA Ops"),
]
EVENTS = [
    *NAMES,
    *(ran(f"gemm_fusion.{i}", 10.0 + i, cuda_graph_id="4") for i in range(4)),
    *(ran("attention_decode", 30.0) for _ in range(2)),
    ran("MemcpyD2H", 5.0),
    ran("attention_decode", 30.0, tid=9),
    ran("attention_decode", 30.0, pid=2),
]


def test_kernels_are_summed_by_name_and_other_lines_left_out():
    found = step_kernels.kernels_of(EVENTS, num_steps=2)
    assert found["kernels"] == [
        {"name": "attention_decode", "per_step": 1.0, "us": 30.0, "us_per_step": 30.0},
        {"name": "gemm_fusion", "per_step": 2.0, "us": 11.5, "us_per_step": 23.0},
    ]
    assert (found["num_kernels"], found["us_per_step"]) == (3.0, 53.0)
    assert found["share_in_graphs"] == 0.6667


def test_page_has_conditions_and_a_line_a_kernel():
    conditions = {
        "model": "qwen3_8b",
        "dtype": "bfloat16",
        "device": "NVIDIA H200",
        "driver": "580",
        "versions": {"jax": "0.11.2"},
        "commit": "abc",
        "date": "2026-11-30",
    }
    report = step_kernels.kernels_of(EVENTS, 2) | {
        "conditions": conditions, "rows": 64, "ms_per_step_untraced": 5.2, "in_graphs_asked": False,
    }  # fmt: skip
    lines = step_kernels.page(report).splitlines()
    assert lines[0] == "One decode step of qwen3_8b, 64 rows, bfloat16, on NVIDIA H200"
    assert "3.0 kernels, 53.0 us; a step takes 5.2 ms" in lines[2]
    assert lines[-1].split() == ["23.0", "2.00", "11.50", "gemm_fusion"]
    text = step_kernels.page(report | {"in_graphs_asked": True})
    assert text.endswith("66.7% of the kernels inside CUDA graphs\n")


def test_a_device_whose_trace_names_no_kernel_fails_and_leaves_no_list(tmp_path, capsys):
    config, out = tmp_path / "tiny.json", tmp_path / "list.txt"
    config.write_text(json.dumps(TINY))
    words = ("--model", config, "--rows", 2, "--prompt", 4, "--steps", 2, "--txt", out)
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    settings = ("--max-model-len", 128, "--token-budget", 32, "--compilation-cache", cache)
    assert step_kernels.main([*map(str, (*words, *settings))]) == 1
    assert "0.0 kernels, 0.0 us" in capsys.readouterr().out and not out.exists()
