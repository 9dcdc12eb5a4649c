import asyncio
import importlib.util
import json
import sys

import numpy as np
import pytest

from engine.config import Limits
from engine.serving import cli, load, load_plot
from tests.serving.fake_core import FakeCore, FakeInfo
from tests.serving.running_server import running


def plan(**changes):
    fields = {
        "num_requests": 12,
        "prompt_len": 3,
        "num_output_tokens": 4,
        "arrivals": "closed",
        "concurrency": 5,
    }
    return load.Plan(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_requests": 0}, "num_requests is 0, it must be at least 1"),
        ({"num_output_tokens": 0}, "num_output_tokens is 0"),
        ({"concurrency": 0}, "concurrency is 0, the closed loop needs at least 1"),
        ({"arrivals": "poisson"}, "rate is 0.0, arrivals poisson need requests per second"),
        ({"arrivals": "fixed", "rate": float("nan")}, "rate is nan"),
    ],
)
def test_plans_that_cannot_run_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_fixed_arrivals_are_evenly_spaced():
    starts = plan(arrivals="fixed", rate=4.0).starts()
    assert np.array_equal(starts, np.arange(12) / 4.0)


def test_poisson_arrivals_have_their_rate_and_follow_the_seed():
    many = plan(arrivals="poisson", rate=50.0, num_requests=20_000)
    gaps = np.diff(many.starts())
    assert many.starts()[0] == 0.0 and abs(gaps.mean() * 50.0 - 1.0) < 0.03
    assert abs(gaps.std() / gaps.mean() - 1.0) < 0.05, "not exponential"
    assert np.array_equal(many.starts(), plan(**vars(many)).starts())
    assert not np.array_equal(many.starts(), plan(**vars(many) | {"seed": 1}).starts())


def test_prompts_lie_in_the_vocabulary_and_differ():
    prompts = plan(num_requests=50, prompt_len=8).prompts(260)
    assert prompts.min() >= 0 and prompts.max() < 260
    assert len({tuple(row) for row in prompts.tolist()}) == 50


def test_closed_loop_keeps_its_number_of_requests_in_flight():
    now, most = 0, 0

    async def call(prompt_ids, num_tokens):
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(num_tokens):
            await asyncio.sleep(0.001)
            yield 1
        now -= 1

    seen = asyncio.run(load.drive(call, plan(), plan().prompts(260)))
    assert most == 5 and len(seen) == 12
    assert all(one.num_tokens == 4 for one in seen)


def test_open_loop_starts_requests_whatever_the_server_does():
    async def call(prompt_ids, num_tokens):
        await asyncio.sleep(0.2)
        yield num_tokens

    crowd = plan(arrivals="fixed", rate=1000.0)
    seen = asyncio.run(load.drive(call, crowd, crowd.prompts(260)))
    assert [one.due for one in seen] == crowd.starts().tolist()
    assert max(one.arrivals[0][0] for one in seen) < 12 * 0.2, "they waited for each other"


def one_seen(due, arrivals, end=1.0, code="OK"):
    return load.Seen(due, arrivals, end, code, "why" if code != "OK" else "")


def test_figures_count_from_the_due_time_and_spread_joined_tokens():
    seen = [
        one_seen(0.5, [(0.75, 1), (1.0, 2), (1.25, 1)], end=1.5),
        one_seen(0.0, [(0.25, 4)], end=0.25),
        one_seen(0.0, [], end=2.0, code="RESOURCE_EXHAUSTED"),
    ]
    found = load.figures(seen)
    assert found.codes == {"OK": 2, "RESOURCE_EXHAUSTED": 1} and found.first_fault == "why"
    assert found.seconds == 2.0 and found.request_rate == 1.0 and found.output_token_rate == 4.0
    assert found.ttft_ms["mean"] == 250.0 and found.ttft_ms["max"] == 250.0
    assert abs(found.tpot_ms["p50"] - 500.0 / 3) < 1e-9
    assert sorted(seen[0].gaps()) == [0.0, 0.25, 0.25]
    assert found.itl_ms["p50"] == 250.0 and found.itl_ms["max"] == 250.0
    assert found.e2e_ms["max"] == 1000.0
    assert found.tokens_per_message == 2.0


def test_figures_of_requests_that_all_failed_have_no_latencies():
    found = load.figures([one_seen(0.0, [], code="UNAVAILABLE")])
    assert found.ttft_ms == {} and found.request_rate == 0.0


@pytest.mark.parametrize("protocol", ["treadle", "vllm"])
def test_bench_serve_measures_a_running_server(protocol, tmp_path, capsys):
    if protocol == "vllm" and importlib.util.find_spec("smg_grpc_proto") is None:
        pytest.skip("needs the extra `gateway`")
    path = tmp_path / "load.json"
    with running(FakeCore()) as server, pytest.raises(SystemExit) as ended:
        cli.main(
            [
                *("bench", "serve", server.address, "--requests", "20", "--concurrency", "4"),
                *("--prompt-len", "5", "--output-len", "7", "--json", str(path)),
                *("--protocol", protocol),
            ]
        )
    assert ended.value.code == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["figures"]["codes"] == {"OK": 20}
    figures = report["figures"]
    assert abs(figures["output_token_rate"] * figures["seconds"] - 140) < 1e-6
    assert set(figures["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99", "max"}
    assert report["conditions"]["plan"]["arrivals"] == "closed"
    out = capsys.readouterr().out
    assert "first token" in out and "OK 20" in out


def test_refused_requests_are_counted_by_status_and_end_the_command(tmp_path, capsys):
    path = tmp_path / "load.json"
    core = FakeCore(limits=Limits(queued_requests=1), info=FakeInfo(max_rows=1), step_seconds=0.01)
    with running(core) as server, pytest.raises(SystemExit) as ended:
        cli.main(
            [
                *("bench", "serve", server.address, "--requests", "9", "--rate", "1000"),
                *("--arrivals", "fixed", "--prompt-len", "5", "--output-len", "7"),
                *("--json", str(path)),
            ]
        )
    assert ended.value.code == 1
    codes = json.loads(path.read_text(encoding="utf-8"))["figures"]["codes"]
    assert sum(codes.values()) == 9 and codes["RESOURCE_EXHAUSTED"] > 0 < codes["OK"]
    assert "error: some requests failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "1", "--concurrency", "2"], "--rate is for the open loop and --concurrency"),
        (
            ["--prompt-len", "200", "--output-len", "100"],
            "need 300 tokens but max_model_len is 256",
        ),
        (["--token-file", "none"], "No such file"),
    ],
)
def test_bench_serve_names_what_does_not_suit(words, message, capsys):
    with running(FakeCore()) as server, pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", server.address, *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_serve_sends_its_token(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("a-token-of-sixteen-or-more\n", encoding="utf-8")
    words = ["--requests", "3", "--prompt-len", "5", "--output-len", "7"]
    with running(FakeCore(), token_file=path) as server:
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", "serve", server.address, *words])
        assert ended.value.code == 1
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", "serve", server.address, *words, "--token-file", str(path)])
        assert ended.value.code == 0


def test_plot_is_a_png_of_what_was_seen(tmp_path):
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs the extra `plot`")
    path = tmp_path / "load.png"
    seen = [
        one_seen(0.1 * i, [(0.1 * i + 0.05, 1), (0.1 * i + 0.08, 2)], 0.1 * i + 0.09)
        for i in range(9)
    ]
    load_plot.write(path, [*seen, one_seen(0.2, [], 0.9, "INTERNAL")], "a crowd")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 20_000


def test_plot_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="--plot needs matplotlib; install the extra `plot`"):
        load_plot.write(tmp_path / "load.png", [one_seen(0.0, [])], "")


def test_protocol_without_its_messages_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "smg_grpc_proto.generated", None)

    async def main():
        connections = load.Connections("127.0.0.1:1", 1)
        try:
            with pytest.raises(RuntimeError, match="install the extra `gateway`"):
                connections.call("vllm")
        finally:
            await connections.close()

    asyncio.run(main())
