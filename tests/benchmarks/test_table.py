"""Tables and charts say what the JSON says, and the README's block is replaced whole."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmarks import table

CONDITIONS = {
    "device": "NVIDIA H200",
    "driver": "580.1",
    "date": "2026-11-29T10:00:00+00:00",
    "commit": "abc1234",
    "versions": {"jax": "0.11.2"},
    "model": "qwen3_8b",
    "settings": {"load_format": "dummy"},
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "max_rows": 256,
    "token_budget": 2048,
    "lane": "overlap",
    "depth": 2,
    "num_programs": 24,
    "work": "greedy",
}


def result(shape, rate, total, peer=None, bound=None):
    return {
        "shape": shape,
        "output_tokens_per_second": rate,
        "total_tokens_per_second": total,
        "ms_per_output_step": 4.5,
        "host_ms_per_step": 0.7,
        "peer": peer,
        "bound": bound,
    }


OFFLINE = {
    "benchmark": "offline",
    "conditions": CONDITIONS,
    "results": [
        result(
            "1x32+256",
            200.0,
            225.0,
            {
                "engine": "Other 1.0",
                "conditions": "random weights",
                "output_tokens_per_second": 194,
                "ms_per_output_step": 5.16,
            },
            {"output_tokens_per_second": 400.0, "total_tokens_per_second": 500.0},
        ),
        result(
            "16x4096+1",
            10.0,
            30000.0,
            {"engine": "Other 1.0", "conditions": "random weights", "total_tokens_per_second": 4e4},
            {"output_tokens_per_second": 13.0, "total_tokens_per_second": 50000.0},
        ),
    ],
}
START = {
    "imported_seconds": 2.0,
    "first_token_seconds": 41.5,
    "num_programs": 24,
    "stage_seconds": {"load": 3.0, "compile": 30.0},
}
STARTUP = {"benchmark": "startup", "conditions": CONDITIONS, "cold": START, "warm": START}
POISON = {
    "benchmark": "poison",
    "conditions": {
        name: CONDITIONS[name] for name in ("device", "driver", "date", "commit", "versions")
    },
    "results": [
        {"bytes": 4096, "way": way, "seen": seen, "tries": 20}
        for way, seen in (("device_put", 1), ("argument", 0))
    ],
}


def test_a_row_counts_output_tokens_and_a_prefill_row_all_tokens():
    lines = table.page({"run": OFFLINE}).splitlines()
    assert "| 1 x 32+256 | 200 | 194 | 400 | 50% | 4.50 | 5.16 | 0.70 |" in lines
    assert "| 16 x 4096+1 | 30,000 (all) | 40,000 | 50,000 | 60% | – | – | 0.70 |" in lines


def test_every_table_stands_with_its_conditions_and_the_peer_with_its_own():
    page = table.page({"run": OFFLINE, "start": STARTUP, "late": POISON})
    assert page.count("Conditions: NVIDIA H200; driver 580.1; jax 0.11.2; 2026-11-29") == 3
    assert "Other 1.0: random weights." in page
    assert "| cold | 24 | 41.5 | 2.0 | 3.0 | 30.0 |" in page
    assert "| 4,096 | 1 of 20 | 0 of 20 |" in page


def test_a_kernels_figures_keep_their_names_and_its_checks_are_counted():
    report = {
        "benchmark": "decode_attention",
        "conditions": POISON["conditions"],
        "results": [{"shape": "64x1024", "tb_per_second": 4.058}],
        "checks": [{"check": "one", "holds": True}, {"check": "two", "holds": False}],
    }
    lines = table.page({"run": report}).splitlines()
    assert "| shape | tb per second |" in lines and "| 64x1024 | 4.058 |" in lines
    assert "1 of 2 checks hold." in lines


def test_a_result_without_bound_and_peer_has_dashes_and_no_chart():
    bare = OFFLINE | {"results": [result("2x8+4", 50.0, 150.0)]}
    assert "| 2 x 8+4 | 50 | – | – | – | 4.50 | – | 0.70 |" in table.page({"run": bare})
    assert table.shares_of_bound(bare) == []


def test_bars_are_as_long_as_their_share_of_the_bound():
    bars = table.shares_of_bound(OFFLINE)
    assert bars[0] == ("1x32+256", [("Treadle", 0.5), ("Other 1.0", 0.485)])
    root = ElementTree.fromstring(table.chart(OFFLINE, bars))
    widths = [
        float(rect.get("width")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("height") == "12"
    ]  # fmt: skip
    assert widths == [240.0, 232.8, 288.0, 384.0]


def test_the_same_bars_are_drawn_as_png(tmp_path):
    path = tmp_path / "run.png"
    assert table.draw(path, OFFLINE, table.shares_of_bound(OFFLINE))
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_readme_block_alone_is_replaced(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    file = tmp_path / "run.json"
    file.write_text(json.dumps(OFFLINE))
    table.main([str(file), "--out", str(tmp_path / "out"), "--readme", str(readme)])
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| 1 x 32+256 |" in text
    table.main([str(file), "--out", str(tmp_path / "out"), "--readme", str(readme)])
    assert readme.read_text() == text
    assert (tmp_path / "out" / "run.svg").exists()


@pytest.mark.parametrize("text", ["none", f"{table.END} {table.BEGIN}", table.BEGIN * 2])
def test_markers_that_are_not_one_pair_are_refused(text):
    with pytest.raises(ValueError, match="needs one '<!-- begin"):
        table.filled(text, "block")


def test_memory_report_names_every_part_and_what_lies_outside():
    report = {
        "benchmark": "memory",
        "conditions": CONDITIONS,
        "parts": [
            {"name": "weights", "planned": 3 * 2**30, "measured": 3 * 2**30 + 2**20, "holds": True}
        ],
        "pools": 5 * 2**20,
        "peak_bytes_in_use": 7 * 2**20,
        "outside_allocator": 9 * 2**20,
    }
    text = table.page({"some": report})
    assert "| weights | 3,072.0 | 3,073.0 |" in text
    assert "| pools | 5.0 | – |" in text and "| peak in the allocator | – | 7.0 |" in text
    assert "| outside the allocator | – | 9.0 |" in text


SERVED = {
    "benchmark": "served",
    "conditions": {
        **{name: CONDITIONS[name] for name in ("device", "driver", "date", "commit", "versions")},
        "model": "qwen3_8b",
        "shape": "256x128+256",
        "clients": 4,
    },
    "offline": [{"output_tokens_per_second": rate} for rate in (18_000.0, 17_000.0, 19_000.0)],
    "served": [
        {
            "output_tokens_per_second": rate,
            "tokens_per_message": 3.2,
            "median_first_token_seconds": 0.48,
        }
        for rate in (17_500.0, 17_820.0, 18_100.0)
    ],
    "share": 0.99,
}
MASKED = {
    "benchmark": "masked",
    "conditions": CONDITIONS,
    "results": [
        {
            "temperature": 0.0,
            "free_rows": 255,
            "token_ms_without_masked_row": 11.4531,
            "token_ms_with_masked_row": 11.6603,
            "slower_percent": 1.81,
        }
    ],
}


def test_served_and_masked_runs_are_tables_with_their_conditions():
    text = table.page({"one": SERVED, "two": MASKED})
    assert "| 256 x 128+256 | 18,000 | 17,820 | 99.0% | 3.2 | 0.48 |" in text
    assert "qwen3_8b, 4 client processes" in text
    assert "| 255 | 0.0 | 11.45 | 11.66 | 1.8% |" in text


def test_readme_shows_a_model_once_a_kind():
    other = OFFLINE | {"conditions": CONDITIONS | {"commit": "older"}}
    block = table.readme_block({"b_older": other, "a": OFFLINE})
    assert block.count("**Offline throughput, qwen3_8b**") == 1
    assert "commit abc1234" in block and "older" not in block
