from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import io
import json
import random
import threading
import time
import zipfile

import grpc
import numpy as np
import pytest
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from engine.config import LIMITS
from engine.request import StructuredOutput
from engine.scheduling.config import GroupConfig
from engine.scheduling.prefix_cache import PageKeys, PrefixCache
from engine.serving import compatibility, vllm_service
from engine.serving.llm import AsyncLLM
from engine.text.tokenizer import load_tokenizer
from proto.treadle.v1 import generation_pb2, generation_pb2_grpc
from tests.serving import tiny_chat
from tests.serving.fake_core import EOS, FakeCore, FakeInfo, FakeTokenizer
from tests.serving.running_server import RunningServer

_SECONDS = 20.0
_DEADLINE = ("grpc.service_config", '{"methodConfig": [{"name": [{}], "timeout": "20s"}]}')
_GROUPS = (GroupConfig(num_pages=40, page_size=4), GroupConfig(num_pages=40, page_size=8, window=9))


class Core(FakeCore):
    """A fake core with a real prefix cache and counters of its own choosing."""

    def __init__(self, **options):
        super().__init__(**options)
        self.cache = PrefixCache(_GROUPS)
        self.num_resets = 0
        self.counts = {}

    def watch_prefix_cache(self, watch):
        return self.cache.watch(watch)

    def unwatch_prefix_cache(self, watch):
        self.cache.unwatch(watch)

    def reset_prefix_cache(self):
        self.num_resets += 1

    def stats(self):
        return dataclasses.replace(super().stats(), **self.counts)


class Server(RunningServer):
    """A server over it, whose model and tokenizer are given."""

    def __init__(self, core=None, *, model="fake", tokenizer=None, **options):
        super().__init__(core or Core(), **options)
        self._model, self._tokenizer = model, tokenizer
        self.llm = None

    def _make_llm(self, report):
        if self._gate is not None:
            assert self._gate.wait(_SECONDS)
        self.llm = AsyncLLM(
            str(self._model),
            tokenizer=self._tokenizer or FakeTokenizer(),
            core_factory=lambda config, progress: self.core,
        )
        return self.llm

    def on_engine(self, function):
        """Runs it on the engine's thread."""
        return self.llm._thread.call(function).result(_SECONDS)


@contextlib.contextmanager
def running(core=None, **options):
    server = Server(core, **options).start()
    try:
        if server.failure is not None:
            raise server.failure
        with grpc.insecure_channel(server.address, options=[_DEADLINE]) as channel:
            yield server, vllm_engine_pb2_grpc.VllmEngineStub(channel)
    finally:
        server.stop()
        server.stop()
        server.join()


@pytest.fixture(scope="module")
def served():
    with running(Core(error_prompts=frozenset({13}))) as one:
        yield one


@pytest.fixture
def core(served):
    return served[0].core


@pytest.fixture
def stub(served):
    return served[1]


def _request(ids=(1, 2, 3), *, stream=False, **params):
    params = {"max_tokens": 4, "skip_special_tokens": True} | params
    return vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=ids),
        sampling_params=vllm_engine_pb2.SamplingParams(**params),
        stream=stream,
    )


def _complete(stub, *arguments, **params):
    (message,) = stub.Generate(_request(*arguments, **params))
    return message.complete


def _stream(stub, *arguments, **params):
    messages = list(stub.Generate(_request(*arguments, stream=True, **params)))
    return (
        [one.chunk for one in messages if one.HasField("chunk")],
        [one.complete for one in messages if one.HasField("complete")],
    )


def _status(call):
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


def _until(is_true):
    end = time.monotonic() + _SECONDS
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_true()


# --- parameters ---

# Field of the message: (value sent, field of SamplingParams, value there).
_FIELDS = {
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.25, "top_p", 0.25),
    "top_k": (7, "top_k", 7),
    "min_p": (0.125, "min_p", 0.125),
    "frequency_penalty": (0.5, "frequency_penalty", 0.5),
    "presence_penalty": (-0.5, "presence_penalty", -0.5),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "max_tokens": (3, "max_tokens", 3),
    "min_tokens": (2, "min_tokens", 2),
    "stop": (["xy", "z"], "stop", ("xy", "z")),
    "stop_token_ids": ([5, 6], "stop_token_ids", (5, 6)),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "ignore_eos": (True, "ignore_eos", True),
    "n": (2, "n", 2),
    "logprobs": (3, "logprobs", 3),
    "prompt_logprobs": (2, "prompt_logprobs", 2),
    "seed": (-5, "seed", -5),
    "include_stop_str_in_output": (True, "include_stop_str_in_output", True),
    "logit_bias": ({9: 0.5}, "logit_bias", {9: 0.5}),
}
_CONSTRAINTS = {
    "json_schema": "{}",
    "regex": "a+",
    "grammar": 'root ::= "a"',
    "structural_tag": "{}",
    "json_object": True,
    "choice": vllm_engine_pb2.ChoiceConstraint(choices=["a"]),
}
# What changes no id: spaces are the gateway's to write, and where a constraint begins.
_WITHOUT_EFFECT = {"spaces_between_special_tokens", "grammar_from_first_token"}


def test_every_field_of_the_message_is_known_here():
    fields = {field.name for field in vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields}
    assert fields == {*_FIELDS, *_CONSTRAINTS, *_WITHOUT_EFFECT, "truncate_prompt_tokens"}


@pytest.mark.parametrize("name", sorted(_FIELDS))
def test_parameter_reaches_the_engine(stub, core, name):
    sent, field, expected = _FIELDS[name]
    list(stub.Generate(_request(**{name: sent})))
    assert getattr(core.submitted[-1].params, field) == expected


def test_zero_and_nothing_are_neutral_where_zero_means_nothing(stub, core):
    zeros = {"top_p": 0.0, "repetition_penalty": 0.0, "n": 0, "max_tokens": 4}
    list(stub.Generate(_request(**zeros)))
    params = core.submitted[-1].params
    assert (params.top_p, params.repetition_penalty, params.n) == (1.0, 1.0, 1)
    assert (params.temperature, params.logprobs, params.seed) == (1.0, None, None)
    assert params.logit_bias is None and params.top_k == 0


def test_zero_that_was_set_counts(stub, core):
    list(stub.Generate(_request(temperature=0.0, seed=0, logprobs=0)))
    params = core.submitted[-1].params
    assert (params.temperature, params.seed, params.logprobs) == (0.0, 0, 0)


def test_neutral_values_stand_in_place_of_the_checkpoints_defaults_but_max_tokens(tmp_path):
    defaults = {"temperature": 0.3, "top_k": 9, "top_p": 0.5, "max_new_tokens": 6}
    core = Core(info=FakeInfo(generation_defaults=defaults))
    with running(core, model=tiny_chat.write(tmp_path / "tiny")) as (server, stub):
        request = _request()
        request.sampling_params.ClearField("max_tokens")
        (message,) = stub.Generate(request)
        params = server.core.submitted[-1].params
        assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 1.0)
        assert message.complete.completion_tokens == 6
        told = stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert json.loads(told.default_sampling_params_json) == {
            "temperature": 0.3,
            "top_k": 9,
            "top_p": 0.5,
        }


@pytest.mark.parametrize(
    ("truncate", "max_tokens", "kept"), [(2, 4, 2), (100, 4, 30), (-1, 240, 16), (-1, 4, 30)]
)
def test_prompt_is_cut_to_its_end(stub, core, truncate, max_tokens, kept):
    ids = list(range(30))
    request = _request(ids, truncate_prompt_tokens=truncate, max_tokens=max_tokens)
    (message,) = stub.Generate(request)
    assert core.submitted[-1].prompt_ids.tolist() == ids[-kept:]
    assert message.complete.prompt_tokens == kept


@pytest.mark.parametrize("num_tokens", [255, 256, 257])
def test_prompt_around_the_models_length_fits_once_it_is_cut(stub, core, num_tokens):
    ids = [1] * num_tokens
    request = _request(ids, truncate_prompt_tokens=-1)
    request.sampling_params.ClearField("max_tokens")
    (message,) = stub.Generate(request)
    assert message.complete.prompt_tokens == 255 and message.complete.completion_tokens == 1
    code, detail = _status(stub.Generate(_request(ids)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "max_model_len is 256" in detail


def test_text_is_tokenized_here_and_cut_too(stub, core):
    request = _request(truncate_prompt_tokens=2)
    request.text = "abc"
    list(stub.Generate(request))
    assert core.submitted[-1].prompt_ids.tolist() == [98, 99]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"json_schema": "{}"}, StructuredOutput("json_schema", "{}")),
        ({"regex": "a+"}, StructuredOutput("regex", "a+")),
        ({"grammar": 'start: "a"'}, StructuredOutput("grammar", 'start: "a"')),
        ({"json_object": True}, StructuredOutput("json_object")),
        ({"json_object": False}, None),
        ({"choice": {"choices": ["a", "b"]}}, StructuredOutput("choice", choices=("a", "b"))),
        ({}, None),
    ],
    ids=str,
)
def test_constraint_becomes_the_form_of_the_output(sent, expected):
    message = vllm_engine_pb2.SamplingParams(**sent)
    assert vllm_service.params_fields(message)["structured"] == expected


# --- status codes ---


def test_structural_tag_is_refused_by_name(stub):
    code, detail = _status(stub.Generate(_request(structural_tag="{}")))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "structural_tag is set but this engine does not know it" in detail


@pytest.mark.parametrize("name", sorted(_CONSTRAINTS))
def test_constraint_is_never_ignored(stub, core, name):
    # The engine here takes no masks, so whatever is asked for is refused.
    before = len(core.submitted)
    code, _ = _status(stub.Generate(_request(**{name: _CONSTRAINTS[name]})))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and len(core.submitted) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_inputs": vllm_engine_pb2.MultimodalInputs()}, "mm_inputs is set but the model"),
        ({"extra_mm_inputs": [vllm_engine_pb2.MultimodalInputs()]}, "extra_mm_inputs is set"),
        ({"media_refs": vllm_engine_pb2.MediaRefs()}, "media_refs is set but the model reads"),
        ({"kv_transfer_params": vllm_engine_pb2.KvTransferParams()}, "kv_transfer_params is set"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json is set but prefill"),
        ({"data_parallel_rank": 1}, "data_parallel_rank is 1 but the engine is one rank"),
        ({"request_id": "x" * 257}, "request_id has 257 characters"),
        ({"params": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens is 0, it must be"),
        ({"params": {"logprobs": -1}}, "logprobs is -1, it must lie in [0, 20]"),
        ({"params": {"top_p": 1.5}}, "top_p is 1.5, it must lie in [0, 1]"),
        ({"params": {"stop_token_ids": [260]}}, "stop_token_ids holds 260, outside"),
        ({"params": {"max_tokens": 300}}, "max_tokens is 300"),
        ({"params": {"n": 129}}, "n is 129, it must lie in [1, 128]"),
        ({"ids": [1, 260]}, "is 260, outside the vocabulary of 260 ids"),
        ({"ids": []}, "is empty; give at least one token id"),
        ({"ids": [1] * 257}, "prompt has 257 tokens but max_model_len is 256"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_bad_request_is_invalid_argument(stub, change, message):
    request = _request(change.pop("ids", (1, 2, 3)), **change.pop("params", {}))
    request.MergeFrom(vllm_engine_pb2.GenerateRequest(**change))
    code, detail = _status(stub.Generate(request))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert message in detail


def test_rank_zero_is_this_engine(stub):
    request = _request()
    request.data_parallel_rank = 0
    assert len(list(stub.Generate(request))) == 1


def test_request_without_input_is_invalid_argument(stub):
    code, detail = _status(stub.Generate(vllm_engine_pb2.GenerateRequest()))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "input is missing; set tokenized or text" in detail


def test_bytes_that_are_no_message_are_invalid_argument(served):
    with grpc.insecure_channel(served[0].address) as channel:
        call = channel.unary_stream(f"/{compatibility.SERVICE}/Generate")
        code, _ = _status(call(b"\x0a\x02\xff\xfe", timeout=_SECONDS))
    assert code == grpc.StatusCode.INVALID_ARGUMENT


def test_full_queue_is_resource_exhausted():
    limits = dataclasses.replace(LIMITS, queued_requests=0)
    with running(Core(limits=limits)) as (_, stub):
        code, detail = _status(stub.Generate(_request()))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the limit is 0" in detail


def test_request_that_fails_in_the_engine_is_internal(stub):
    code, _ = _status(stub.Generate(_request((13,))))
    assert code == grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("method", "message", "words"),
    [
        ("Embed", vllm_engine_pb2.EmbedRequest(), "no embedding models"),
        ("StartProfile", common_pb2.StartProfileRequest(), "profiles are taken"),
        ("StopProfile", common_pb2.StopProfileRequest(), "profiles are taken"),
    ],
)
def test_what_is_not_served_is_unimplemented_with_the_reason(stub, method, message, words):
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(message)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert words in caught.value.details()


_CALLS = {
    "HealthCheck": vllm_engine_pb2.HealthCheckRequest(),
    "GetModelInfo": vllm_engine_pb2.GetModelInfoRequest(),
    "GetServerInfo": vllm_engine_pb2.GetServerInfoRequest(),
    "GetLoads": vllm_engine_pb2.GetLoadsRequest(),
    "FlushCache": common_pb2.FlushCacheRequest(),
}
_STREAMS = {
    "Generate": _request(),
    "GetTokenizer": common_pb2.GetTokenizerRequest(),
    "SubscribeKvEvents": common_pb2.SubscribeKvEventsRequest(),
}


def _codes(stub):
    for name, message in (_CALLS | _STREAMS).items():
        call = getattr(stub, name)
        with pytest.raises(grpc.RpcError) as caught:
            answer = call(message)
            if name in _STREAMS:
                list(answer)
        yield caught.value.code()


def test_every_call_is_unavailable_while_the_engine_starts():
    gate = threading.Event()
    server = Server(gate=gate).start("listening")
    try:
        with grpc.insecure_channel(server.address, options=[_DEADLINE]) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            assert set(_codes(stub)) == {grpc.StatusCode.UNAVAILABLE}
            assert stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["nobody"]))
            gate.set()
            server.wait_for("serving")
            assert stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest()).healthy
    finally:
        gate.set()
        server.stop()
        server.join()


def test_every_call_is_unavailable_while_the_server_drains_and_what_runs_ends_well():
    with running(Core(step_seconds=0.02)) as (server, stub):
        call = stub.Generate(_request(max_tokens=60, stream=True, ignore_eos=True))
        first = next(call)
        server.stop()
        server.wait_for("draining")
        assert set(_codes(stub)) == {grpc.StatusCode.UNAVAILABLE}
        rest = list(call)
        assert first.HasField("chunk") and rest[-1].complete.completion_tokens == 60


# --- answers ---


def test_complete_has_ids_counts_and_reason(stub, core):
    message = _complete(stub, ignore_eos=True)
    assert len(message.output_ids) == 4 == message.completion_tokens
    assert (message.finish_reason, message.prompt_tokens, message.index) == ("length", 3, 0)
    assert message.WhichOneof("matched_stop") is None
    assert not message.HasField("output_logprobs") and not message.HasField("input_logprobs")


def test_chunks_are_increments_that_the_complete_repeats(stub):
    chunks, (complete,) = _stream(stub, ignore_eos=True, max_tokens=9, seed=4)
    joined = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert joined == list(complete.output_ids) and len(joined) == 9
    assert [chunk.completion_tokens for chunk in chunks] == [len(c.token_ids) for c in chunks]
    assert joined == list(_complete(stub, ignore_eos=True, max_tokens=9, seed=4).output_ids)


def test_each_choice_has_its_chunks_and_its_complete(stub):
    chunks, completes = _stream(stub, n=3, ignore_eos=True, seed=1)
    by_choice = {complete.index: list(complete.output_ids) for complete in completes}
    assert by_choice.keys() == {0, 1, 2} and len({*map(tuple, by_choice.values())}) == 3
    for index, ids in by_choice.items():
        assert ids == [i for chunk in chunks if chunk.index == index for i in chunk.token_ids]


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_string_ends_the_request_in_the_engine_and_is_named(is_stream):
    with running(Core(reply=lambda request, choice: b"abcdefgh" * 20)) as (server, stub):
        request = _request(max_tokens=150, stop=["zz", "de"], stream=is_stream)
        complete = list(stub.Generate(request))[-1].complete
        assert bytes(complete.output_ids) == b"abcde" and complete.completion_tokens == 5
        assert complete.finish_reason == "stop" and complete.matched_stop_str == "de"
        _until(lambda: server.core.is_idle)
        assert server.core.aborts[-1][1] == "stop"


@pytest.mark.parametrize(
    ("stop_ids", "ids", "matched"), [([99], b"abc", 99), ([], [*b"abcd", EOS], None)]
)
def test_stop_id_of_the_caller_is_named_and_the_models_own_is_not(stop_ids, ids, matched):
    with running(Core(reply=lambda request, choice: [*b"abcd", EOS])) as (_, stub):
        complete = _complete(stub, stop_token_ids=stop_ids, max_tokens=9)
    assert list(complete.output_ids) == list(ids) and complete.finish_reason == "stop"
    named = complete.matched_token_id if complete.WhichOneof("matched_stop") else None
    assert named == matched


def test_stop_id_zero_is_named():
    with running(Core(reply=lambda request, choice: [97, 0, 98])) as (_, stub):
        complete = _complete(stub, stop_token_ids=[0], max_tokens=9)
    assert complete.WhichOneof("matched_stop") == "matched_token_id"
    assert complete.matched_token_id == 0


def test_logprobs_stand_beside_their_ids(stub):
    complete = _complete(stub, logprobs=2, ignore_eos=True)
    scored = complete.output_logprobs
    assert list(scored.token_ids) == list(complete.output_ids)
    expected = [-(1.0 + token_id / 1000) for token_id in complete.output_ids]
    assert list(scored.token_logprobs) == pytest.approx(expected, rel=1e-6)
    assert [len(top.token_ids) for top in scored.top_logprobs] == [2] * 4
    assert [top.token_ids[0] for top in scored.top_logprobs] == list(complete.output_ids)


def test_logprobs_without_alternatives_are_the_chosen_tokens_alone(stub):
    scored = _complete(stub, logprobs=0, ignore_eos=True).output_logprobs
    assert len(scored.token_logprobs) == 4 and not scored.top_logprobs


def test_streamed_logprobs_are_those_of_the_chunk(stub):
    chunks, (complete,) = _stream(stub, logprobs=1, ignore_eos=True)
    for chunk in chunks:
        assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
    assert not complete.HasField("output_logprobs")


@pytest.mark.parametrize("is_stream", [False, True])
def test_prompt_logprobs_come_once_with_no_number_for_the_first_token(stub, is_stream):
    request = _request((65, 66, 67), prompt_logprobs=1, ignore_eos=True, stream=is_stream)
    messages = list(stub.Generate(request))
    parts = [getattr(message, message.WhichOneof("response")) for message in messages]
    (scored,) = [part.input_logprobs for part in parts if part.HasField("input_logprobs")]
    assert parts[0].HasField("input_logprobs")
    assert list(scored.token_ids) == [65, 66, 67]
    assert [one.HasField("value") for one in scored.token_logprobs] == [False, True, True]
    assert scored.token_logprobs[2].value == pytest.approx(-1.067, rel=1e-6)
    assert [list(top.token_ids) for top in scored.top_logprobs] == [[], [66], [67]]


def test_prompt_can_be_scored_without_output(stub):
    complete = _complete(stub, (65, 66), prompt_logprobs=0, max_tokens=0)
    assert not complete.output_ids and len(complete.input_logprobs.token_logprobs) == 2


# --- ends ---


def test_abort_ends_live_requests_and_others_are_no_error():
    with running(Core(step_seconds=0.01)) as (server, stub):
        request = _request(max_tokens=200, ignore_eos=True, stream=True)
        request.request_id = "mine"
        call = stub.Generate(request)
        next(call)
        for _ in range(2):
            stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["nobody", "mine"]))
        assert list(call)[-1].complete.finish_reason == "abort"
        _until(lambda: server.core.is_idle)


def test_caller_that_leaves_frees_its_request():
    with running(Core(step_seconds=0.01)) as (server, stub):
        call = stub.Generate(_request(max_tokens=200, ignore_eos=True, stream=True))
        next(call)
        call.cancel()
        _until(lambda: server.core.is_idle)
        assert server.core.aborts


# --- facts ---


def test_model_info_says_what_is_served(tmp_path):
    model = tiny_chat.write(tmp_path / "tiny")
    info = FakeInfo(model_name="tiny", architecture="LlamaForCausalLM")
    with running(Core(info=info), model=model, tokenizer=load_tokenizer(model)) as (_, stub):
        told = stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert told.served_model_name == "tiny" and told.is_generation
    assert told.tokenizer_path == str(model) == told.model_path
    assert (told.max_context_length, told.max_req_input_len, told.vocab_size) == (256, 256, 260)
    assert (told.model_type, list(told.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert (list(told.eos_token_ids), told.bos_token_id) == ([EOS], 256)
    assert told.default_sampling_params_json == "" and not told.supports_vision


def test_server_info_and_loads_are_the_engines_numbers():
    core = Core()
    core.counts = {
        "num_running": 3,
        "num_waiting": 2,
        "free_pages": 42,
        "total_pages": 63,
        "prefix_queries": 200,
        "prefix_hits": 50,
    }
    with running(core) as (_, stub):
        told = stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        assert (told.server_type, told.active_requests, told.data_parallel_size) == (
            *("treadle", 5),
            1,
        )
        assert (told.block_size, told.max_num_seqs, told.model_dtype) == (16, 8, "float32")
        answer = stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())
        (load,) = answer.loads
        assert answer.dp_rank_count == 1 and load.dp_rank == 0
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
        assert load.token_usage == pytest.approx(1 / 3)
        assert (load.max_total_num_tokens, load.num_used_tokens) == (63 * 16, 21 * 16)
        assert load.cache_hit_rate == 0.25 and load.max_running_requests == 8
        assert load.utilization == 3 / 8 and load.num_waiting_uncached_tokens == 0


def test_loads_count_prompts_without_an_answer_and_tokens_per_second(monkeypatch):
    monkeypatch.setattr(vllm_service, "_SECONDS_PER_RATE", 0.0)
    gate = threading.Event()

    class Slow(Core):
        def step(self):
            if gate.is_set():
                return super().step()
            time.sleep(0.005)
            return bool(self._live())

    with running(Slow()) as (_, stub):
        loads = lambda: stub.GetLoads(vllm_engine_pb2.GetLoadsRequest()).loads[0]  # noqa: E731
        assert loads().gen_throughput == 0.0
        call = stub.Generate(_request(range(1, 8), max_tokens=40, ignore_eos=True))
        _until(lambda: loads().num_waiting_uncached_tokens == 7)
        gate.set()
        assert next(call).complete.completion_tokens == 40
        after = loads()
        assert after.num_waiting_uncached_tokens == 0 and after.gen_throughput > 0.0


def test_flush_forgets_the_prefix_cache(stub, core):
    before = core.num_resets
    assert stub.FlushCache(common_pb2.FlushCacheRequest()).success
    assert core.num_resets == before + 1


# --- the tokenizer ---


def _bundle(stub):
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_tokenizer_of_a_folder_arrives_with_its_config(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_service, "_TOKENIZER_CHUNK_BYTES", 100)
    model = tiny_chat.write(tmp_path / "tiny")
    with running(model=model, tokenizer=load_tokenizer(model)) as (_, stub):
        files = _bundle(stub)
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    assert files["config.json"] == (model / "config.json").read_bytes()
    loaded = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    assert loaded.encode("<|user|>é").ids == load_tokenizer(model).encode("<|user|>é")
    assert "assistant" in json.loads(files["tokenizer_config.json"])["chat_template"]


def test_tokenizer_of_a_gguf_file_arrives_as_files_made_of_it(smollm2_gguf):
    own = load_tokenizer(smollm2_gguf)
    with running(model=smollm2_gguf, tokenizer=own) as (_, stub):
        files = _bundle(stub)
        told = stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    loaded = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in ("Hello 123  45 wörld<|im_end|>", "雪だるま ☃ 🙂", "\n\n\tx"):
        assert loaded.encode(text).ids == own.encode(text)
    config = json.loads(files["tokenizer_config.json"])
    assert config["eos_token"] == "<|im_end|>" and "im_start" in config["chat_template"]
    assert json.loads(files["config.json"])["model_type"] == "llama" == told.model_type
    assert (told.bos_token_id, told.pad_token_id) == (1, 2)


def test_model_without_a_tokenizer_says_so(stub, served, monkeypatch):
    monkeypatch.setattr(served[0].llm, "_tokenizer", None)
    code, detail = _status(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "the model has no tokenizer; send token ids" in detail


# --- cache events ---


class Known:
    """What a subscriber knows of the cache after the batches it has read."""

    def __init__(self):
        self.pages = {}
        self.sequence = 0
        self.num_snapshots = 0

    def read(self, batch):
        assert batch.sequence_number == self.sequence + 1
        self.sequence = batch.sequence_number
        if batch.HasField("snapshot") and batch.snapshot.index == 0:
            self.num_snapshots += 1
            assert batch.events[0].HasField("cleared")
        for event in batch.events:
            getattr(self, event.WhichOneof("data"))(getattr(event, event.WhichOneof("data")))

    def stored(self, message):
        assert message.kv_cache_spec_kind == "full_attention"
        parent = message.parent_block_hash if message.HasField("parent_block_hash") else None
        for block in message.blocks:
            assert block.block_hash not in self.pages and block.block_size == 4
            self.pages[block.block_hash] = (parent, tuple(block.token_ids), message.cache_salt)
            parent = block.block_hash

    def removed(self, message):
        for block_hash in message.block_hashes:
            del self.pages[block_hash]

    def cleared(self, message):
        self.pages.clear()


def _held(cache):
    """The same of the cache itself, for its group of full attention."""
    short = lambda key: int.from_bytes(key[:8], "little", signed=True)  # noqa: E731
    return {
        short(stored.key): (
            None if stored.parent is None else short(stored.parent),
            tuple(np.frombuffer(stored.token_ids, np.int32).tolist()),
            hashlib.sha256(stored.cache_salt).hexdigest() if stored.cache_salt else "",
        )
        for stored in cache._contents[0].values()
    }


def _churn(cache, generator, num_steps):
    """Publishes, evicts and clears at random, in both groups."""
    for _ in range(num_steps):
        kind = generator.random()
        if kind < 0.02:
            cache.clear()
        elif kind < 0.3 and cache.cached_pages(0):
            cache.evict(0, generator.choice(sorted(cache.cached_pages(0))))
        elif kind < 0.35 and cache.cached_pages(1):
            cache.evict(1, generator.choice(sorted(cache.cached_pages(1))))
        else:
            salt = generator.choice([b"", b"", b"secret"])
            keys = PageKeys(0, salt, _GROUPS)
            ids = np.full(32, generator.randrange(3), np.int32)
            group = generator.choice([0, 0, 0, 1])
            for place in range(generator.randrange(1, 4)):
                free = set(range(1, 40)) - cache.cached_pages(group)
                cache.publish(group, keys, ids, place, min(free))


def _read_until(stream, known, is_true):
    while not is_true():
        known.read(next(stream))


@pytest.mark.parametrize("seed", range(3))
def test_events_add_up_to_the_content_of_the_cache(seed, monkeypatch):
    monkeypatch.setattr(vllm_service, "_PAGES_PER_BATCH", 2)
    generator = random.Random(seed)
    with running() as (server, stub):
        cache = server.core.cache
        server.on_engine(lambda core: _churn(cache, generator, 60))
        known = Known()
        stream = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        sizes = set()
        for _ in range(30):
            held = server.on_engine(lambda core: _held(cache))
            _read_until(stream, known, lambda held=held: known.pages == held)
            sizes.add(len(known.pages))
            server.on_engine(lambda core: _churn(cache, generator, 8))
        assert known.num_snapshots == 1 and known.sequence > 10 and len(sizes) > 5


def test_salt_is_told_apart_without_being_told():
    with running() as (server, stub):
        ids = np.arange(8, dtype=np.int32)
        for page, salt in enumerate((b"", b"tenant-secret"), start=1):
            keys = PageKeys(0, salt, _GROUPS)
            server.on_engine(lambda core, k=keys, p=page: core.cache.publish(0, k, ids, 0, p))
        batch = next(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
        salts = {event.stored.cache_salt for event in batch.events if event.HasField("stored")}
        assert len(salts) == 2 and "" in salts
        assert b"tenant-secret" not in batch.SerializeToString()


def test_subscriber_that_falls_behind_gets_the_whole_content_again(monkeypatch):
    monkeypatch.setattr(
        vllm_service, "CacheWatch", functools.partial(vllm_service.CacheWatch, max_events=5)
    )
    generator = random.Random(3)
    with running() as (server, stub):
        cache, known = server.core.cache, Known()
        stream = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        known.read(next(stream))
        server.on_engine(lambda core: _churn(cache, generator, 40))
        held = server.on_engine(lambda core: _held(cache))
        _read_until(stream, known, lambda: known.pages == held and known.num_snapshots == 2)


def test_nobody_is_watched_after_the_last_subscriber_left():
    with running() as (server, stub):
        assert not server.core.cache._watches
        streams = [stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()) for _ in "ab"]
        for stream in streams:
            next(stream)
        assert len(server.core.cache._watches) == 2
        for stream in streams:
            stream.cancel()
        _until(lambda: not server.core.cache._watches)


def test_numbers_go_on_from_where_a_subscriber_left():
    with running() as (_, stub):
        request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=41)
        batch = next(stub.SubscribeKvEvents(request))
        assert batch.sequence_number == 42 and batch.snapshot.count == 1


def test_subscription_does_not_hold_up_a_drain():
    server = Server(drain_seconds=_SECONDS).start()
    with grpc.insecure_channel(server.address, options=[_DEADLINE]) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        stream = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        next(stream)
        began = time.monotonic()
        server.stop()
        server.join()
        assert time.monotonic() - began < _SECONDS / 2 and server.failure is None


# --- the extra ---


def test_health_and_reflection_know_the_service(served):
    with grpc.insecure_channel(served[0].address) as channel:
        request = health_pb2.HealthCheckRequest(service=compatibility.SERVICE)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        settings = _settings(channel)
    assert settings["compatibility_service"] == "on, vllm.grpc.engine.VllmEngine"


def test_server_without_the_extra_serves_the_rest_and_says_so(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "smg_grpc_proto" else find(name)
    )
    with running() as (server, stub):
        with pytest.raises(grpc.RpcError) as caught:
            stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with grpc.insecure_channel(server.address) as channel:
            said = _settings(channel)["compatibility_service"]
        assert said == "off, install the extra `gateway` to serve gateways"
        assert f"compatibility service: {said}" in server.lines


def _settings(channel):
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.GetServerInfoRequest()
    return dict(stub.GetServerInfo(request, timeout=_SECONDS).settings)


def test_wire_names_are_those_of_the_stubs():
    service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    assert service.full_name == compatibility.SERVICE
    methods = {method.name for method in service.methods}
    assert methods == {name for name in vars(vllm_service.VllmEngineService) if name[0].isupper()}
    assert all(
        asyncio.iscoroutinefunction(getattr(vllm_service.VllmEngineService, name))
        for name in methods
    )
