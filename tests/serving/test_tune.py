"""`treadle tune` with times that a test makes up."""

import dataclasses
import json

import jax
import pytest

from engine.config import EngineConfig
from engine.execution import runner
from engine.execution.candidates import Measured
from engine.serving import cli
from engine.serving.commands import tune
from kernels import tuning
from kernels.tuning import Choice
from models.batch import Tiling

MODEL = "benchmarks/configs/qwen3_8b.json"


class FakeBench:
    """A device on which every candidate takes what `seconds` says of it."""

    def __init__(self, seconds):
        self.seconds = seconds
        profile = runner.device_profile(jax.devices()[0], EngineConfig(model="any"))
        self.profile = dataclasses.replace(
            profile,
            name="Some GPU",
            dtype="bfloat16",
            page_size=64,
            row_rungs=(),
            tiling=Tiling(kernels="mosaic"),
        )
        self.jobs = []

    def measure(self, jobs):
        for job in jobs:
            self.jobs.append(job)
            times = [self.seconds(job.op, i, one) for i, one in enumerate(job.candidates)]
            yield Measured(job, tuple(times), 1e-6)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run(seconds, *words) -> (exit code, output, error, the bench)."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")

    def run(seconds, *words):
        bench = FakeBench(seconds)
        monkeypatch.setattr(tune, "open_bench", lambda report: bench)
        with pytest.raises(SystemExit) as caught:
            cli.main(["tune", *map(str, words)])
        return caught.value.code, *capsys.readouterr(), bench

    return run


def split_in_four(op, number, choice):
    is_fast = choice == Choice.of("mosaic", depth=64, splits=4)
    return 8e-6 if is_fast else 10e-6


def formula_first(op, number, choice):
    return 10e-6 + number * 1e-6


def test_choices_that_pay_are_written_and_found(run, tmp_path):
    code, out, err, bench = run(split_in_four, MODEL, "--json", tmp_path / "all.json")
    assert code == 0 and "error" not in err
    kept = tuning.read(tmp_path / "tuned" / "some_gpu.json")
    assert kept.device == "Some GPU"
    assert [(one.op, tuple(one.shape.values())) for one in kept.entries] == [
        ("linear.parts", (4096, 4096)),
        ("linear.parts", (12288, 4096)),
    ]
    assert {(one.us, one.formula_us) for one in kept.entries} == {(8.0, 10.0)}
    assert all(jax.__version__ in one.measured for one in kept.entries)
    assert "some_gpu.json: 2 choices" in out
    (row,) = {
        " ".join(line.split()) for line in out.splitlines() if "chosen" in line and "8.00" in line
    }
    assert row == "mosaic depth=64 splits=4 8.00 12% chosen"
    assert "mosaic depth=128 splits=2 10.00 10% formula, loses 25.0%" in " ".join(out.split())
    report = json.loads((tmp_path / "all.json").read_text())
    assert report["conditions"]["device"] == "Some GPU" and len(report["tuned"]) == len(bench.jobs)
    assert report["held_out"] == []


def test_choice_that_pays_no_more_is_taken_away(run, tmp_path):
    run(split_in_four, MODEL, "--ops", "linear.parts")
    code, out, _, bench = run(formula_first, MODEL, "--ops", "linear.parts")
    assert code == 0 and "some_gpu.json: 0 choices" in out
    assert {job.op for job in bench.jobs} == {"linear.parts"}
    assert tuning.read(tmp_path / "tuned" / "some_gpu.json").entries == ()


def test_run_cut_short_keeps_what_it_measured(run, tmp_path):
    def seconds(op, number, choice):
        if op == "linear.gated":
            raise RuntimeError("the device is gone")
        return split_in_four(op, number, choice)

    words = ("--ops", "linear.parts", "--ops", "linear.gated", "--json", tmp_path / "all.json")
    code, _, err, _ = run(seconds, MODEL, *words)
    assert code == 1 and err == "error: the device is gone\n"
    (kept,) = tuning.read(tmp_path / "tuned" / "some_gpu.json").entries
    assert tuple(kept.shape.values()) == (4096, 4096)
    assert len(json.loads((tmp_path / "all.json").read_text())["tuned"]) == 1


def test_the_same_model_twice_is_measured_once(run):
    *_, once = run(formula_first, MODEL, "--ops", "linear.parts")
    *_, twice = run(formula_first, MODEL, MODEL, "--ops", "linear.parts")
    assert once.jobs == twice.jobs != []


@pytest.mark.parametrize(("gain", "code"), [(0.05, 0), (0.095, 0), (0.12, 1)])
def test_check_ends_with_1_where_a_formula_loses_more_than_a_tenth(run, tmp_path, gain, code):
    def seconds(op, number, choice):
        return 10e-6 / (1 + gain) if number == 1 and op == "moe.experts" else 10e-6

    found, out, _, bench = run(seconds, "--check", "--json", tmp_path / "all.json")
    assert found == code and len(bench.jobs) == 6
    assert ("no formula loses more than 10%" in out) == (code == 0)
    assert not (tmp_path / "tuned").exists()
    assert len(json.loads((tmp_path / "all.json").read_text())["held_out"]) == 6


def test_check_of_nothing_fails(run):
    code, out, *_ = run(formula_first, "--check", "--ops", "mla.decode")
    assert code == 1 and "nothing ran" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "error: nothing to measure; name a MODEL, or give --check"),
        ((MODEL, "--ops", "norm"), "error: --ops is 'norm', it must be one of attention.decode,"),
        (("no/such.json",), "error: model 'no/such.json' does not exist"),
    ],
)
def test_bad_words_end_in_one_line_and_code_2(run, words, message):
    code, out, err, bench = run(formula_first, *words)
    assert code == 2 and not bench.jobs and out == ""
    assert err.startswith(message) and len(err.splitlines()) == 1


def test_machine_without_the_device_ends_in_one_line_and_the_way_out(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["tune", MODEL])
    out, err = capsys.readouterr()
    assert caught.value.code == 1 and out == ""
    assert err.startswith("error: the first device here is cpu, which runs none of the kernels")
    assert "run `treadle tune` on a machine with a Hopper GPU" in err
    assert len(err.splitlines()) == 1
