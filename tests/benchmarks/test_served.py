import json
import pathlib
import queue
import subprocess
import sys

import pytest

from benchmarks import served
from engine.serving.commands.bench import Shape
from tests.serving.fake_core import FakeCore
from tests.serving.running_server import running

_ROOT = pathlib.Path(__file__).parents[2]


def options(*words):
    return served._parser().parse_known_args(["--model", "m", *words])


def test_words_of_the_engine_are_passed_on():
    given, engine = options("--clients", "2", "--max-model-len", "96", "--no-prefix-cache")
    assert given.clients == 2 and engine == ["--max-model-len", "96", "--no-prefix-cache"]


def test_share_is_of_medians():
    def runs(*rates):
        return [{"output_tokens_per_second": rate} for rate in rates]

    assert served._share(runs(90.0, 10.0, 96.0), runs(100.0, 120.0, 1.0)) == 0.9
    assert served._share(runs(90.0), []) is None


def test_crowd_of_several_clients_reads_every_stream():
    given, _ = options("--clients", "2")
    with running(FakeCore()) as server:
        found = served._crowd(given, Shape.parse("5x4+6"), server.address, seed=1)
    assert abs(found["output_tokens_per_second"] * found["seconds"] - 30) < 1e-6
    assert found["tokens_per_message"] >= 1.0 and found["median_first_token_seconds"] > 0


def test_client_that_is_refused_fails_the_run():
    command = [sys.executable, "benchmarks/served.py", "--model", "m", "--shape", "1x300+6"]
    with running(FakeCore()) as server:
        done = subprocess.run(
            [*command, "--client", server.address],
            cwd=_ROOT,
            input="go\n",
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1 and "max_model_len is 256" in done.stderr


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["compile: done\n", "listening on 127.0.0.1:5; not\n", "serving m on x\n"], "127.0.0.1:5"),
        (["error: no model there\n"], None),
    ],
)
def test_server_is_waited_for_and_its_error_is_told(lines, expected):
    given = queue.SimpleQueue()
    for line in lines:
        given.put(line)
    if expected is None:
        with pytest.raises(RuntimeError, match="did not start: error: no model there"):
            served._address(given)
    else:
        assert served._address(given) == expected


def test_report_of_a_served_run_keeps_its_conditions(tmp_path, monkeypatch):
    monkeypatch.setattr(served, "_offline", lambda *_: [{"output_tokens_per_second": 10.0}])
    monkeypatch.setattr(served, "_served", lambda *_: iter([{"output_tokens_per_second": 9.0}]))
    path = tmp_path / "served.json"
    served.main(["--model", "configs/x.json", "--json", str(path)])
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["share"] == 0.9
    assert report["conditions"]["model"] == "x" and report["conditions"]["clients"] == 4
