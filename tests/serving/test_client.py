import asyncio
import itertools
import threading
import time

import grpc
import pytest

from engine.config import Limits
from engine.request import SamplingParams
from engine.scheduling.scheduler import QueueFull
from engine.serving.client import AsyncClient, Client, Unavailable
from engine.serving.llm import LLM
from tests.serving.fake_core import EOS, FakeCore, FakeTokenizer
from tests.serving.running_server import RunningServer, running


@pytest.fixture(scope="module")
def server():
    with running() as one:
        yield one


@pytest.fixture
def client(server):
    with Client(server.address, timeout=20.0) as one:
        yield one


@pytest.fixture(scope="module")
def llm():
    with LLM(
        "fake", tokenizer=FakeTokenizer(), core_factory=lambda config, progress: FakeCore()
    ) as one:
        yield one


def test_generate_gives_what_the_llm_of_one_process_gives(client, llm):
    params = SamplingParams(seed=7, max_tokens=9, n=2, logprobs=2, prompt_logprobs=1, stop=("zz",))
    remote = client.generate("Hello", params, request_id="r-1")
    (local,) = llm.generate("Hello", params, use_progress_bar=False)
    assert remote.request_id == "r-1"
    assert remote.finished
    assert remote.seed == 7
    assert remote.prompt_token_ids == local.prompt_token_ids
    assert remote.metrics.e2e >= remote.metrics.ttft > 0
    assert len(remote.outputs) == 2
    for mine, theirs in zip(remote.outputs, local.outputs, strict=True):
        assert mine.text == theirs.text
        assert mine.token_ids == theirs.token_ids
        assert mine.finish_reason == theirs.finish_reason == "length"
        assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, rel=1e-6)
        assert [list(one) for one in mine.logprobs] == [list(one) for one in theirs.logprobs]
        for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert [c.bytes for c in one.values()] == [c.bytes for c in other.values()]
            assert [c.rank for c in one.values()] == [c.rank for c in other.values()]
    assert remote.prompt_logprobs[0] is None
    assert [list(one) for one in remote.prompt_logprobs[1:]] == [
        list(one) for one in local.prompt_logprobs[1:]
    ]


def test_deltas_of_a_stream_add_up_to_the_whole():
    params = {"max_tokens": 12, "seed": 3}
    # Tokens of quicker steps may all meet in one message.
    with running(FakeCore(step_seconds=0.02)) as server, Client(server.address) as client:
        whole = client.generate([1, 2, 3], params)
        deltas = list(client.stream([1, 2, 3], params))
    assert len(deltas) > 1
    assert [one.finished for one in deltas] == [False] * (len(deltas) - 1) + [True]
    assert {one.seed for one in deltas} == {3}
    joined = "".join(choice.text for one in deltas for choice in one.outputs)
    ids = [i for one in deltas for choice in one.outputs for i in choice.token_ids]
    assert joined == whole.outputs[0].text
    assert ids == whole.outputs[0].token_ids
    assert len(ids) == 12


def test_zero_and_unset_are_told_apart_on_the_wire(client, server):
    client.generate([1], {"temperature": 0, "max_tokens": 1, "top_k": 0})
    request = server.core.submitted[-1]
    assert request.params.temperature == 0.0
    client.generate([1], {"max_tokens": 1})
    assert server.core.submitted[-1].params.temperature == 1.0


def test_every_sampling_parameter_arrives(client, server):
    params = SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={5: -1.5},
        allowed_token_ids=(97, 98, 99),
        bad_word_ids=((97, 98),),
        max_tokens=3,
        min_tokens=1,
        stop=("xyz",),
        stop_token_ids=(99,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        seed=2**64 - 1,
        logprobs=1,
        prompt_logprobs=0,
        prompt_logprobs_start=1,
        processed_logprobs=True,
    )
    client.generate([1, 2], params, priority=-3, cache_salt=b"salt")
    request = server.core.submitted[-1]
    assert request.params == params
    assert request.seed == 2**64 - 1
    assert request.priority == -3
    assert request.cache_salt == b"salt"
    assert request.stop_ids == (99,)


def test_bad_words_are_turned_into_ids_on_the_server(client, server):
    client.generate([1], {"bad_words": ["ab"], "max_tokens": 1})
    assert (97, 98) in server.core.submitted[-1].params.bad_word_ids


def test_stop_reasons_tell_strings_from_ids():
    core = FakeCore(reply=lambda request, choice: [*b"one two", EOS])
    with running(core) as server, Client(server.address) as client:
        by_text = client.generate([1], {"stop": [" t"]}).outputs[0]
        by_id = client.generate([1], {"stop_token_ids": [ord("t")]}).outputs[0]
        by_end = client.generate([1]).outputs[0]
    assert (by_text.text, by_text.finish_reason, by_text.stop_reason) == ("one", "stop", " t")
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", ord("t"))
    assert (by_end.text, by_end.finish_reason, by_end.stop_reason) == ("one two", "stop", None)


def test_score_gives_the_sum_over_the_continuation(client):
    first, second = client.score([("ab", "cd"), ([1, 2], [3])])
    assert first.token_ids == (ord("c"), ord("d"))
    assert first.token_logprobs == pytest.approx((-1.099, -1.1), rel=1e-6)
    assert first.logprob == pytest.approx(-2.199)
    assert first.is_greedy
    assert second.token_ids == (3,)


def test_score_names_the_item_at_fault(client):
    with pytest.raises(ValueError, match=r"items\[1\]: continuation is empty"):
        client.score([("a", "b"), ("a", "")])


def test_text_and_ids_round_trip(client):
    ids = client.tokenize("añ")
    assert ids == [256, 97, 0xC3, 0xB1]
    assert client.tokenize("a", add_special_tokens=False) == [97]
    assert client.detokenize(ids) == "añ"
    assert client.detokenize(ids, skip_special_tokens=False) == "<s>añ"


def test_detokenize_refuses_an_id_outside_the_vocabulary(client):
    with pytest.raises(ValueError, match="token_ids holds 260, outside the vocabulary of 260 ids"):
        client.detokenize([260])


def test_info_tells_model_and_server(client):
    info = client.info()
    assert (info.model_name, info.vocab_size, list(info.eos_token_ids)) == ("fake", 260, [EOS])
    server = client.server_info()
    assert (server.lane, server.depth, server.num_programs) == ("overlap", 2, 3)
    assert server.settings["depth"] == "2"
    assert server.versions["grpcio"] == grpc.__version__


def test_refusals_are_value_errors_with_the_servers_words(client):
    with pytest.raises(ValueError, match=r"temperature is -1.0, it must lie in \[0, 100\]"):
        client.generate("a", {"temperature": -1.0})


def test_unknown_parameter_is_refused_before_it_is_sent(client):
    with pytest.raises(ValueError, match="params has unknown field 'temprature'; known are n, "):
        client.generate("a", {"temprature": 0})


def test_negative_token_id_is_refused_before_it_is_sent(client):
    with pytest.raises(ValueError, match="a token id cannot be sent"):
        client.generate([-1])


def test_value_the_wire_cannot_carry_is_named(client):
    with pytest.raises(ValueError, match="n is 'two', which cannot be sent"):
        client.generate("a", {"n": "two"})


def test_full_queue_is_queue_full():
    core = FakeCore(limits=Limits(queued_requests=0))
    with (
        running(core) as server,
        Client(server.address) as client,
        pytest.raises(QueueFull, match="the limit is 0"),
    ):
        client.generate("a")


def test_nobody_listening_is_unavailable():
    with Client("127.0.0.1:1", timeout=5.0) as client, pytest.raises(Unavailable):
        client.info()


def test_deadline_is_a_timeout_error_and_frees_the_request():
    core = FakeCore(step_seconds=0.01)
    with running(core) as server:
        with Client(server.address, timeout=0.2) as client, pytest.raises(TimeoutError):
            client.generate("a", {"max_tokens": 200})
        _until(lambda: core.aborts and core.stats().num_running == 0)


def test_closing_a_stream_frees_the_request():
    core = FakeCore(step_seconds=0.01)
    with running(core) as server, Client(server.address) as client:
        stream = client.stream("a", {"max_tokens": 200})
        next(stream)
        assert core.stats().num_running == 1
        stream.close()
        _until(lambda: core.stats().num_running == 0)
        assert core.aborts


def test_abort_ends_the_stream_with_its_reason(client):
    core = FakeCore(step_seconds=0.01)
    with running(core) as server, Client(server.address) as client:
        stream = client.stream("a", {"max_tokens": 200}, request_id="long")
        next(stream)
        client.abort("long")
        client.abort("nobody")
        assert list(stream)[-1].outputs[0].finish_reason == "abort"


def test_wait_ready_says_what_the_server_does():
    with Client("127.0.0.1:1") as client, pytest.raises(TimeoutError, match="cannot be reached"):
        client.wait_ready(0.0)


def test_wait_ready_waits_for_the_engine():
    gate = threading.Event()
    server = RunningServer(gate=gate).start("listening on ")
    try:
        with Client(server.address) as client:
            with pytest.raises(TimeoutError, match="compile 50% decode"):
                client.wait_ready(0.0)
            gate.set()
            client.wait_ready(20.0)
            assert client.info().model_name == "fake"
    finally:
        gate.set()
        server.stop()
        server.join()


def test_wait_ready_of_the_async_client_says_the_same():
    async def main():
        async with AsyncClient("127.0.0.1:1") as one:
            await one.wait_ready(0.0)

    with pytest.raises(TimeoutError, match=r"not ready after 0.0 s: 127.0.0.1:1 cannot be reached"):
        asyncio.run(main())


def test_async_client_gives_the_same(server, client):
    async def main():
        async with AsyncClient(server.address, timeout=20.0) as one:
            params = {"max_tokens": 5, "seed": 1}
            outputs = await asyncio.gather(*(one.generate([i], params) for i in range(1, 9)))
            texts = [output.outputs[0].text for output in outputs]
            deltas = [delta async for delta in one.stream([1], params)]
            assert "".join(d.outputs[0].text for d in deltas) == texts[0]
            await one.wait_ready(10.0)
            assert (await one.info()).model_name == "fake"
            assert (await one.server_info()).lane == "overlap"
            assert await one.tokenize("a") == [256, 97]
            assert await one.detokenize([97]) == "a"
            (score,) = await one.score([("a", "b")])
            await one.abort("nobody")
            with pytest.raises(ValueError, match="prompt is empty"):
                await one.generate("")
            return texts, score

    texts, score = asyncio.run(main())
    params = {"max_tokens": 5, "seed": 1}
    assert texts == [client.generate([i], params).outputs[0].text for i in range(1, 9)]
    assert score == client.score([("a", "b")])[0]
    assert len(set(texts)) == 8


def _until(is_true):
    for _ in itertools.takewhile(lambda _: not is_true(), range(1000)):
        time.sleep(0.01)
    assert is_true()
