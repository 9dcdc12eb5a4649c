from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import sys
import threading
import time

import pytest

from engine.serving import cli
from engine.serving.commands import gateway

_SECONDS = 30.0
# Says when it runs, and when it is told to end; takes as long to end as it is told.
_CHILD = """
import pathlib, signal, sys, time
name, log, seconds = sys.argv[1], pathlib.Path(sys.argv[2]), float(sys.argv[3])
def say(word):
    with log.open("a") as file:
        file.write(f"{name} {word}\\n")
def end(*_):
    time.sleep(seconds)
    say("ends")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
say("runs")
time.sleep(100)
"""


def _child(name, log, seconds=0.0):
    return [sys.executable, "-c", _CHILD, name, str(log), str(seconds)]


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.write_text("")
    monkeypatch.setattr(gateway, "_is_serving", lambda address: "engine runs" in path.read_text())
    monkeypatch.setattr(
        gateway, "_can_be_asked", lambda address, key: "gateway runs" in path.read_text()
    )
    return path


def _main(engine, before, announce=lambda line: None):
    asyncio.run(gateway._main(engine, before, "", "127.0.0.1:8000", None, announce))


def _signal_when(log, words, count=1):
    def run():
        end = time.monotonic() + _SECONDS
        while words not in log.read_text() and time.monotonic() < end:
            time.sleep(0.02)
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    threading.Thread(target=run, daemon=True).start()


def _run(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(word) for word in words])
    return caught.value.code, capsys.readouterr().err


def test_gateway_starts_once_the_engine_is_warm_and_ends_before_it(log):
    lines = []

    def announce(line):
        lines.append(line)
        assert log.read_text().splitlines() == ["engine runs", "gateway runs"]
        os.kill(os.getpid(), signal.SIGTERM)

    _main(_child("engine", log), _child("gateway", log, 0.3), announce)
    assert log.read_text().splitlines()[2:] == ["gateway ends", "engine ends"]
    assert lines == ["OpenAI and Anthropic protocols on http://127.0.0.1:8000/v1"]


def test_signal_while_the_engine_starts_ends_it_alone(log, monkeypatch):
    monkeypatch.setattr(gateway, "_is_serving", lambda address: False)
    _signal_when(log, "engine runs")
    _main(_child("engine", log), _child("gateway", log))
    assert log.read_text().splitlines() == ["engine runs", "engine ends"]


def test_second_signal_does_not_wait(log):
    _signal_when(log, "gateway runs", count=2)
    began = time.monotonic()
    _main(_child("engine", log, 60.0), _child("gateway", log, 60.0))
    assert time.monotonic() - began < _SECONDS and "ends" not in log.read_text()


@pytest.mark.parametrize("name", ["engine", "gateway"])
def test_end_of_one_ends_the_other_and_is_an_error(log, name):
    children = {one: _child(one, log) for one in ("engine", "gateway")}
    code = f"open({str(log)!r}, 'a').write('{name} runs\\n'); import sys; sys.exit(7)"
    children[name] = [sys.executable, "-c", code]
    with pytest.raises(RuntimeError, match=f"the {name} ended with code 7"):
        _main(children["engine"], children["gateway"])
    if name == "gateway":
        assert "engine ends" in log.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--host", "0.0.0.0"), "--host is loopback here"),
        (("--token-file", "t"), "--token-file does not go with a gateway"),
        (("--tls-cert=c",), "--tls-cert does not go with a gateway"),
    ],
)
def test_options_that_would_keep_the_gateway_from_its_engine_are_refused(capsys, words, message):
    code, err = _run(capsys, "gateway", "m", *words)
    assert code == 2 and message in err


@pytest.mark.parametrize("option", ["--port", "--engine-port"])
def test_port_in_use_is_found_before_the_engine_starts(capsys, option):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, err = _run(capsys, "gateway", "m", option, port)
    assert code == 2 and f"port {port} is in use; choose another {option}" in err


def test_everything_is_bound_to_loopback_and_other_options_reach_the_engine(monkeypatch, capsys):
    commands = []

    async def main(*given):
        commands.extend(given[:2])

    monkeypatch.setattr(gateway, "_main", main)
    words = ("model", "--max-rows", "2", "--port", "8123", "--engine-port", "50123")
    others = ("--tool-call-parser", "qwen", "--deterministic")
    assert _run(capsys, "gateway", *words, *others)[0] == 0
    engine, before = commands
    assert engine[3:8] == ["serve", "model", "--max-rows", "2", "--deterministic"]
    assert engine[-4:] == ["--host", "127.0.0.1", "--port", "50123"]
    pairs = dict(zip(before[4::2], before[5::2], strict=True))
    assert (pairs["--host"], pairs["--prometheus-host"]) == ("127.0.0.1", "127.0.0.1")
    assert (pairs["--port"], pairs["--worker-urls"]) == ("8123", "grpc://127.0.0.1:50123")
    assert pairs["--tool-call-parser"] == "qwen" and "--reasoning-parser" not in pairs


@pytest.mark.parametrize("is_variable", [False, True])
def test_key_reaches_the_gateway_by_no_command(monkeypatch, capsys, is_variable):
    given = []

    async def main(*words):
        given.extend(words)

    monkeypatch.setattr(gateway, "_main", main)
    key = "a-key-of-the-callers-0123456789"
    words = ["model", "--port", "8123", "--engine-port", "50123"]
    if is_variable:
        monkeypatch.setenv("TREADLE_API_KEY", key)
    else:
        words += ["--api-key", key]
    assert _run(capsys, "gateway", *words)[0] == 0
    engine, before, *_, found, _ = given
    assert found == key and not any(key in word for word in (*engine, *before))
    assert before[:4] == [sys.executable, "-m", "engine.serving.keyed_gateway", "launch"]


def test_gateway_alone_is_given_the_key(log, monkeypatch):
    key = "a-key-of-the-callers-0123456789"
    monkeypatch.setenv("TREADLE_API_KEY", key)
    shown = _CHILD.replace(
        'say("runs")', 'import os; say(os.environ.get("TREADLE_API_KEY", "-")); say("runs")'
    )
    engine, before = (
        [sys.executable, "-c", shown, name, str(log), "0"] for name in ("engine", "gateway")
    )
    _signal_when(log, "gateway runs")
    asyncio.run(gateway._main(engine, before, "", "", key, lambda line: None))
    assert {"engine -", f"gateway {key}"} <= set(log.read_text().splitlines())


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "the API key has 0 characters, it must have at least 16"),
        ("short", "the API key has 5 characters"),
        ("a key with spaces in it", "the API key holds a space"),
    ],
)
@pytest.mark.parametrize("is_variable", [False, True])
def test_key_that_does_not_suit_is_refused_and_not_said(
    monkeypatch, capsys, key, message, is_variable
):
    words = ["gateway", "model"]
    if is_variable:
        monkeypatch.setenv("TREADLE_API_KEY", key)
    else:
        words += ["--api-key", key]
    code, err = _run(capsys, *words)
    assert code == 2 and message in err and (not key or key not in err)


def test_option_in_place_of_the_model_is_bad_input(capsys):
    code, err = _run(capsys, "gateway", "--max-rows", "2", "model")
    assert code == 2 and "name the model before the options" in err


def test_without_the_extra_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, err = _run(capsys, "gateway", "model")
    assert code == 1 and "install treadle with the extra `gateway`" in err


def test_probes_answer_no_where_nobody_listens():
    assert not gateway._is_serving("127.0.0.1:1") and not gateway._can_be_asked("127.0.0.1:1", None)
