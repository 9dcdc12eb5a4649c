"""A stream whose engine is lost on the way ends with an error behind the gateway too."""

from __future__ import annotations

import contextlib
import json
import signal

import openai
import pytest

from tests.serving import tiny_chat
from tests.serving.gateway_process import SECONDS, Gateway, Process, end_of, ports

_FAULTS = {
    "killed": (signal.SIGKILL, -signal.SIGKILL, "Stream error: "),
    "thread dies": (signal.SIGUSR1, 1, "Stream error: the engine was lost; the server ends"),
    "request fails": (signal.SIGUSR2, None, "Stream error: not finite"),
}
"""By what happens to the engine: its signal, how its process ends, what the caller reads."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_chat.write(tmp_path_factory.mktemp("faults") / "tiny")


@pytest.fixture
def served(model, tmp_path):
    """A fake engine's process, and a gateway before it."""
    port, http_port, metrics_port = ports(3)
    command = ("tests.serving.faulty_engine", "serve", str(model), "--port", str(port))
    with contextlib.ExitStack() as stack:
        engine = Process(tmp_path / "engine.log", *command)
        stack.callback(engine.kill)
        engine.wait_for("serving tiny on")
        words = ["--host", "127.0.0.1", "--port", str(http_port), "--worker-urls"]
        words += [f"grpc://127.0.0.1:{port}", "--prometheus-port", str(metrics_port)]
        smg = Process(tmp_path / "smg.log", "smg", "launch", *words, "--log-level", "warn")
        stack.callback(smg.kill)
        gateway = Gateway(http_port)
        stack.enter_context(contextlib.closing(gateway.client))
        gateway.until_ready()
        yield engine, gateway


@pytest.mark.parametrize("fault", _FAULTS)
def test_stream_whose_engine_is_lost_is_an_error_and_never_a_short_answer(served, fault):
    engine, gateway = served
    number, code, words = _FAULTS[fault]
    official = gateway.chat(max_tokens=200, stream=True)
    plain = gateway.events("/v1/chat/completions", max_tokens=200)
    anthropic = gateway.events("/v1/messages", max_tokens=200)
    begun = [next(plain) for _ in range(4)]
    next(official), next(anthropic)
    engine.popen.send_signal(number)
    end = end_of(official)
    assert isinstance(end, openai.APIError), end
    assert str(end).startswith(words) and "secret" not in str(end)
    # The gateway says that it is done behind an error too (smg 1.13.0), but gives no reason.
    *lines, error, done = [value for _, value in (*begun, *plain)]
    assert done == "[DONE]" and json.loads(error)["error"]["message"].startswith(words)
    choices = [one for line in lines for one in json.loads(line)["choices"]]
    assert len(choices) > 1 and not any(one.get("finish_reason") for one in choices)
    names = [value for name, value in anthropic if name == "event"]
    assert names[-1] == "error" and not {"message_delta", "message_stop"} & set(names)
    if code is not None:
        assert engine.popen.wait(SECONDS) == code
