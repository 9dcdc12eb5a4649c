"""The official client, the gateway and the engine, each in a process of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import pathlib
import re
import signal
import socket
import time

import grpc
import openai
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from engine.serving.client import Client
from tests.serving import tiny_chat
from tests.serving.gateway_process import (
    ASK,
    SECONDS,
    Gateway,
    Process,
    count,
    end_of,
    ports,
    until,
)

_PAGE = 16
_KEY = "-a-key-of-the-callers-0123456789"
_ENGINE = (
    *("--max-rows", "4", "--max-model-len", "1024", "--num-pages", "300"),
    *("--page-size", str(_PAGE), "--compilation-cache", "off", "--drain-seconds", "5"),
)
_STAGES = ("queue", "prefill", "decode", "inference")


class Engine:
    """What an engine says of itself, the gateway aside."""

    def __init__(self, port, metrics_port):
        self.address = f"127.0.0.1:{port}"
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"

    def count(self, name):
        return count(self._metrics, name)

    def load(self):
        with grpc.insecure_channel(self.address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            answer = stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=SECONDS)
        return answer.loads[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_chat.write(tmp_path_factory.mktemp("gateway") / "tiny")


@pytest.fixture(scope="module")
def launched(model):
    """The one documented command: process, engine, gateway."""
    http_port, port, metrics_port, gateway_metrics = ports(4)
    words = ["--port", http_port, "--engine-port", port, "--metrics-port", metrics_port]
    words += ["--gateway-metrics-port", gateway_metrics, "--reasoning-parser", "qwen3"]
    command = ("engine.serving.cli", "gateway", str(model), *map(str, words), *_ENGINE)
    process = Process(model.parent / "launched.log", *command, TREADLE_API_KEY=_KEY)
    try:
        process.wait_for("OpenAI and Anthropic protocols on")
        gateway = Gateway(http_port, gateway_metrics, _KEY)
        with contextlib.closing(gateway.client):
            yield process, Engine(port, metrics_port), gateway
    finally:
        # Its children have groups of their own, which it ends.
        process.popen.terminate()
        process.popen.terminate()
        process.popen.wait(SECONDS)


@pytest.fixture
def engine(launched):
    return launched[1]


@pytest.fixture
def gateway(launched):
    return launched[2]


@pytest.fixture(scope="module")
def pair(model, launched):
    """A second engine and a gateway before both: process of the new engine, engines, gateway."""
    port, metrics_port, http_port, gateway_metrics = ports(4)
    # After the first engine, so that its programs come from where that one left them.
    words = ("serve", str(model), "--port", str(port), "--metrics-port", str(metrics_port))
    second = Process(model.parent / "second.log", "engine.serving.cli", *words, *_ENGINE)
    balancer = None
    try:
        second.wait_for("serving tiny on")
        engines = (launched[1], Engine(port, metrics_port))
        urls = [f"grpc://{engine.address}" for engine in engines]
        words = ["--host", "127.0.0.1", "--port", str(http_port), "--policy", "cache_aware"]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(gateway_metrics)]
        words += ["--worker-urls", *urls, "--log-level", "warn"]
        balancer = Process(model.parent / "balancer.log", "smg", "launch", *words)
        gateway = Gateway(http_port, gateway_metrics)
        with contextlib.closing(gateway.client):
            until(lambda: gateway.count("smg_kv_event_subscriptions_total") == 2)
            yield second, engines, gateway
    finally:
        second.kill()
        if balancer is not None:
            balancer.kill()


# --- one engine behind the documented command ---


def test_chat_is_what_the_engine_itself_says(gateway, engine):
    messages = [{"role": "user", "content": "Snow: ☃ 雪"}]
    answer = gateway.chat(messages)
    with Client(engine.address) as own:
        prompt = "<s><|user|>Snow: ☃ 雪<|assistant|>"
        expected = own.generate(prompt, {"temperature": 0.0, "max_tokens": 16})
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 16


def test_stream_is_the_same_answer_in_pieces(gateway):
    whole = gateway.chat(max_tokens=40)
    chunks = list(gateway.chat(max_tokens=40, stream=True, stream_options={"include_usage": True}))
    pieces = [one.choices[0].delta.content or "" for one in chunks if one.choices]
    assert "".join(pieces) == whole.choices[0].message.content and len(pieces) > 5
    reasons = [one.choices[0].finish_reason for one in chunks if one.choices]
    assert [one for one in reasons if one] == ["length"]
    (usage,) = [one.usage for one in chunks if one.usage]
    assert usage.completion_tokens == 40 == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_choices_differ_and_a_seed_repeats_them(gateway):
    def texts(seed):
        answer = gateway.chat(n=3, seed=seed, temperature=1.0)
        assert answer.usage.completion_tokens == 3 * 16
        assert [one.index for one in answer.choices] == [0, 1, 2]
        return [one.message.content for one in answer.choices]

    first = texts(1)
    assert len(set(first)) == 3 and texts(1) == first != texts(2)


def test_streamed_choices_are_the_unary_ones(gateway):
    whole = gateway.chat(n=2, seed=5, temperature=1.0)
    texts = {0: "", 1: ""}
    for chunk in gateway.chat(n=2, seed=5, temperature=1.0, stream=True):
        for one in chunk.choices:
            texts[one.index] += one.delta.content or ""
    assert texts == {one.index: one.message.content for one in whole.choices}


def test_logprobs_are_the_engines(gateway, engine):
    answer = gateway.chat(logprobs=True, top_logprobs=2, max_tokens=6)
    with Client(engine.address) as own:
        params = {"temperature": 0.0, "max_tokens": 6, "logprobs": 2}
        expected = own.generate("<s><|user|>Tell me a story<|assistant|>", params)
    found = answer.choices[0].logprobs.content
    chosen = [next(iter(one.values())) for one in expected.outputs[0].logprobs]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in chosen])
    assert "".join(one.token for one in found) == answer.choices[0].message.content
    for one in found:
        assert len(one.top_logprobs) == 2 and one.top_logprobs[0].token == one.token
        assert one.top_logprobs[0].logprob > one.top_logprobs[1].logprob


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_string_ends_the_work_in_the_engine(gateway, engine, is_stream):
    text = gateway.chat(max_tokens=30).choices[0].message.content
    stop = text[10:13]
    end = text.index(stop)
    before = engine.count("vllm:generation_tokens_total")
    options = {"max_tokens": 900, "stop": [stop], "extra_body": {"ignore_eos": True}}
    if is_stream:
        usage = {"include_usage": True}
        chunks = list(gateway.chat(stream=True, stream_options=usage, **options))
        content = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        reason = [one.choices[0].finish_reason for one in chunks if one.choices][-1]
        completion_tokens = chunks[-1].usage.completion_tokens
    else:
        answer = gateway.chat(**options)
        content, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        completion_tokens = answer.usage.completion_tokens
    assert (content, reason) == (text[:end], "stop")
    # One byte is one token here.
    assert completion_tokens == end + len(stop)
    until(lambda: engine.count("vllm:generation_tokens_total") - before == completion_tokens)


def test_completions_take_text(gateway, engine):
    answer = gateway.client.completions.create(
        model="tiny", prompt="Once upon", max_tokens=12, temperature=0.0
    )
    with Client(engine.address) as own:
        expected = own.generate("Once upon", {"temperature": 0.0, "max_tokens": 12})
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.usage.completion_tokens == 12


def test_anthropic_messages_are_the_same_answer(gateway):
    expected = gateway.chat().choices[0].message.content
    body = {"model": "tiny", "messages": ASK, "max_tokens": 16, "temperature": 0.0}
    status, answer = gateway.post("/v1/messages", body)
    assert status == 200 and answer["content"][0]["text"] == expected
    assert answer["usage"]["output_tokens"] == 16


def test_usage_is_what_the_engine_counted(gateway, engine):
    def counted():
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        return [engine.count(name) for name in names]

    names = ("e2e_request_latency", *(f"request_{one}_time" for one in _STAGES))
    ended = {
        f"vllm:{one}_seconds_count": engine.count(f"vllm:{one}_seconds_count") for one in names
    }
    before = counted()
    asks = [{"n": 2, "temperature": 1.0}, {"max_tokens": 3}, {"max_tokens": 33}, {"logprobs": True}]
    usages = [gateway.chat(**options).usage for options in asks]
    chunks = list(gateway.chat(stream=True, stream_options={"include_usage": True}))
    usages.append(chunks[-1].usage)
    sums = [
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
    ]
    for name, number in ended.items():
        until(lambda name=name, number=number: engine.count(name) - number == len(usages))
    until(lambda: [a - b for a, b in zip(counted(), before, strict=True)] == sums)
    assert sums[1] == 2 * 16 + 3 + 33 + 16 + 16


def test_repeated_prompt_is_read_from_the_engines_cache(gateway, engine):
    messages = [{"role": "user", "content": "a prompt of several pages " * 4}]
    first = gateway.chat(messages).usage
    before = engine.count("vllm:prefix_cache_hits_total")
    second = gateway.chat(messages).usage
    cached = second.prompt_tokens_details.cached_tokens
    assert first.prompt_tokens_details.cached_tokens < cached
    assert cached == (second.prompt_tokens - 1) // _PAGE * _PAGE
    assert engine.count("vllm:prefix_cache_hits_total") - before == cached


def test_gateways_index_is_what_the_engine_holds(gateway, engine):
    status, _ = gateway.post("/flush_cache", {})
    assert status == 200
    until(lambda: gateway.count("smg_kv_index_blocks") == 0)
    usage = gateway.chat([{"role": "user", "content": "x" * 100}], max_tokens=20).usage
    # The last id of an output has no place in the cache.
    full = (usage.prompt_tokens + usage.completion_tokens - 1) // _PAGE
    until(lambda: gateway.count("smg_kv_index_blocks") == full)
    assert gateway.count("smg_kv_event_parentless_stores_total") == 0
    assert gateway.count("smg_kv_event_gaps_total") == 0


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 5000}, {"logprobs": True, "top_logprobs": 20, "n": 129}, {"stop": [""]}],
    ids=["too long", "too many choices", "empty stop string"],
)
def test_bad_request_is_the_callers_fault_at_once(gateway, options):
    with pytest.raises(openai.BadRequestError):
        gateway.chat(**options)


@pytest.mark.parametrize("seed", range(3))
def test_answer_has_the_form_that_was_asked_for(gateway, seed):
    options = {"temperature": 1.0, "seed": seed, "max_tokens": 200}
    answer = gateway.chat(extra_body={"regex": "[a-c]{5}x"}, **options)
    assert re.fullmatch("[a-c]{5}x", answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "two", "schema": schema}}
    made = json.loads(gateway.chat(response_format=wanted, **options).choices[0].message.content)
    assert made.keys() == {"n", "ok"} and made["n"] in (1, 22) and isinstance(made["ok"], bool)


def test_tool_that_must_be_called_is_called(gateway):
    parameters = {"type": "object", "properties": {"day": {"enum": [3, 4]}}, "required": ["day"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    # JSON allows spaces without end, which this model would write without a penalty.
    options = {"frequency_penalty": 2.0, "max_tokens": 600}
    answer = gateway.chat(tools=[tool], tool_choice="required", **options)
    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["day"] in (3, 4)
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_is_told_apart_from_the_answer(gateway, is_stream):
    # The grammar makes the engine itself say what a reasoning model would.
    form = {"regex": "<think>[a-c]{5}</think>[x-z]{4}"}
    options = {"extra_body": form, "temperature": 1.0, "seed": 1, "max_tokens": 60}
    if is_stream:
        chunks = gateway.chat(stream=True, stream_options={"include_usage": True}, **options)
        chunks = list(chunks)
        deltas = [one.delta for chunk in chunks for one in chunk.choices]
        reasoning = "".join(getattr(one, "reasoning_content", None) or "" for one in deltas)
        content = "".join(one.content or "" for one in deltas)
        usage = chunks[-1].usage
    else:
        answer = gateway.chat(**options)
        message, usage = answer.choices[0].message, answer.usage
        reasoning, content = message.reasoning_content, message.content
    assert re.fullmatch("[a-c]{5}", reasoning) and re.fullmatch("[x-z]{4}", content)
    # One byte is one token here, the marks too.
    assert usage.completion_tokens == len(f"<think>{reasoning}</think>{content}")


def test_gateway_with_a_key_answers_who_shows_it_alone(gateway):
    for key in ("none", _KEY[:-1], f"{_KEY}x"):
        with contextlib.closing(Gateway(gateway.port, key=key).client) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.chat.completions.create(model="tiny", messages=ASK, max_tokens=1)
            assert caught.value.status_code == 401 and _KEY not in str(caught.value)
    stranger = Gateway(gateway.port, key="none")
    with contextlib.closing(stranger.client):
        for path in ("/v1/completions", "/v1/messages", "/v1/responses", "/flush_cache"):
            body = {"model": "tiny", "messages": ASK, "prompt": "a", "input": "a", "max_tokens": 1}
            assert stranger.post(path, body)[0] == 401, path
    assert gateway.chat(max_tokens=1).usage.completion_tokens == 1


def test_key_stands_in_no_list_of_processes_and_the_engine_is_not_given_it(launched):
    process = launched[0].popen.pid
    children = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
    assert len(children) == 2
    holders = []
    for one in (process, *map(int, children)):
        folder = pathlib.Path(f"/proc/{one}")
        assert _KEY.encode() not in (folder / "cmdline").read_bytes()
        if _KEY.encode() in (folder / "environ").read_bytes():
            holders.append(one)
    assert len(holders) == 2 and process in holders


def test_caller_that_leaves_mid_stream_frees_engine_and_pages_within_a_second(gateway, engine):
    stream = gateway.chat(max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    for _ in range(5):
        next(stream)
    load = engine.load()
    assert load.num_running_reqs == 1 and load.token_usage > 0
    stream.close()
    left = time.monotonic()
    while (load := engine.load()).num_total_reqs or load.token_usage:
        assert time.monotonic() - left < 1.0, load
    assert engine.count("vllm:request_success_total") > 0


# --- two engines behind one gateway ---


def test_prompts_of_one_prefix_stay_on_the_engine_that_holds_it(pair):
    _, engines, gateway = pair
    groups, rounds = 6, 5
    prefixes = [f"{number} {chr(97 + number) * 6 * _PAGE}" for number in range(groups)]
    before = [engine.count("vllm:prefix_cache_hits_total") for engine in engines]
    cached = 0
    for turn in range(rounds):
        for prefix in prefixes:
            messages = [{"role": "user", "content": f"{prefix} and question {turn}"}]
            usage = gateway.chat(messages, max_tokens=2).usage
            found = usage.prompt_tokens_details.cached_tokens
            assert found >= 6 * _PAGE if turn else found < 6 * _PAGE
            cached += found
    hits = [
        engine.count("vllm:prefix_cache_hits_total") - count
        for engine, count in zip(engines, before, strict=True)
    ]
    assert sum(hits) == cached and min(hits) > 0
    assert gateway.count("smg_kv_event_gaps_total") == 0


def test_engine_killed_under_load_loses_no_request_and_cuts_its_streams_with_an_error(pair):
    second, engines, gateway = pair
    streams = []
    num_on_second = 0
    # The gateway chooses: on until both engines have one.
    while not 0 < num_on_second < len(streams):
        assert len(streams) < 40
        messages = [{"role": "user", "content": f"{len(streams)} stream " * 5}]
        options = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
        streams.append(gateway.chat(messages, stream=True, **options))
        next(streams[-1])
        num_on_second = engines[1].load().num_running_reqs
    before = engines[1].count("vllm:request_success_total")

    def ask(number):
        messages = [{"role": "user", "content": f"{number} " * 20}]
        answer = gateway.chat(messages, max_tokens=24, extra_body={"ignore_eos": True})
        return answer.usage.completion_tokens

    def kill():
        until(lambda: engines[1].count("vllm:request_success_total") > before)
        second.kill()

    with concurrent.futures.ThreadPoolExecutor(8 + 1) as pool:
        killed = pool.submit(kill)
        assert list(pool.map(ask, range(120))) == [24] * 120
        assert killed.done() and killed.result() is None
    assert second.popen.returncode == -signal.SIGKILL
    ends = [end_of(stream) for stream in streams]
    cut = [end for end in ends if isinstance(end, openai.APIError)]
    assert 0 < len(cut) <= num_on_second < len(streams)
    assert [end for end in ends if end not in cut] == [["length"]] * (len(streams) - len(cut))
    assert all("Stream error" in str(end) for end in cut)


# --- the end ---


def test_one_signal_ends_gateway_and_engine_well(launched):
    process, engine, gateway = launched
    process.popen.terminate()
    assert process.popen.wait(SECONDS) == 0
    for port in (gateway.port, int(engine.address.partition(":")[2])):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
