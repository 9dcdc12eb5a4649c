import asyncio
import dataclasses
import functools
import gc
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import engine
from engine import LLM, AsyncLLM, EngineConfig, SamplingParams
from engine.config import Limits
from engine.scheduling.scheduler import QueueFull
from engine.serving import llm as faces
from engine.serving import outputs
from engine.serving.outputs import RequestFailed, RequestRefused
from engine.serving.thread import EngineDead
from tests.serving.fake_core import BOS, EOS, FakeCore, FakeInfo, FakeStats, FakeTokenizer

_ROOT = pathlib.Path(engine.__file__).parents[1]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Made:
    """A face and the fake core behind it."""

    def __init__(self, face, tokenizer, limits=None, **options):
        self.core = FakeCore(limits=limits or Limits(), **options)
        self.llm = face(
            EngineConfig(model="fake", limits=limits or Limits()),
            core_factory=lambda config, progress: self.core,
            tokenizer=tokenizer,
        )

    async def becomes_idle(self):
        """Waits on the event loop: once that is closed, the engine drops its streams by itself."""
        while (stats := await self.llm.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.005)

    def idle_stats(self):
        """Counters once nothing runs: aborts are obeyed at the next step."""
        for _ in range(1000):
            stats = self.llm._thread.call(lambda core: core.stats()).result()
            if stats.num_running == stats.num_waiting == 0:
                break
            time.sleep(0.005)
        return stats


@pytest.fixture
def make():
    """Makes faces over fake cores and closes them."""
    made = []

    def build(face=LLM, tokenizer=None, **options):
        made.append(Made(face, tokenizer or FakeTokenizer(), **options))
        return made[-1]

    yield build
    for one in made:
        one.llm._thread.close()


def echo(request, choice):
    """Answers with the prompt's own ids."""
    return [*request.prompt_ids[1:].tolist(), EOS]


# The face.


def test_importing_the_face_imports_no_jax():
    code = (
        "import sys, engine; from engine import LLM, AsyncLLM, SamplingParams, RequestOutput; "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=_ROOT).returncode == 0


def test_face_names_resolve_and_others_do_not():
    assert engine.RequestOutput is outputs.RequestOutput
    assert {"LLM", "AsyncLLM", "SamplingParams", "EngineConfig"} <= set(dir(engine))
    with pytest.raises(AttributeError, match="has no attribute 'Engine'"):
        _ = engine.Engine


def test_settings_come_as_fields_or_as_a_config():
    for llm in (
        LLM("fake", max_model_len=9, core_factory=FakeCore.start, tokenizer=FakeTokenizer()),
        LLM(
            EngineConfig(model="fake"),
            max_model_len=9,
            core_factory=FakeCore.start,
            tokenizer=FakeTokenizer(),
        ),
        LLM(
            model=pathlib.Path("fake"),
            max_model_len=9,
            core_factory=FakeCore.start,
            tokenizer=FakeTokenizer(),
        ),
    ):
        with llm:
            assert (llm.info.max_model_len, llm.config.model) == (9, "fake")


def test_start_tells_its_stages_and_its_failure():
    stages = []
    with LLM(
        "fake",
        core_factory=FakeCore.start,
        tokenizer=FakeTokenizer(),
        progress=lambda stage, fraction, detail: stages.append(stage),
    ):
        assert stages == ["load", "plan", "compile", "prove"]

    def fail(config, progress):
        raise ValueError("unknown architecture 'Foo'")

    with pytest.raises(ValueError, match="unknown architecture 'Foo'"):
        LLM("fake", core_factory=fail, tokenizer=FakeTokenizer())


def test_engine_whose_border_cannot_be_built_is_closed(make):
    class Broken(FakeTokenizer):
        eos_ids = property(lambda self: 1 / 0, lambda self, value: None)

    core = FakeCore()
    with pytest.raises(ZeroDivisionError):
        LLM("fake", core_factory=lambda config, progress: core, tokenizer=Broken())
    for _ in range(1000):
        if core.is_closed:
            break
        time.sleep(0.005)
    assert core.is_closed


def test_repr_is_short_and_tells_the_end(make):
    llm = make().llm
    assert repr(llm) == "LLM(fake, float32, lane overlap, depth 2, 64 pages of 16)"
    llm.close()
    assert "closed" in repr(llm)


def test_close_frees_the_core_and_later_calls_say_so(make):
    made = make()
    made.llm.close()
    made.llm.close()
    assert made.core.is_closed
    with pytest.raises(EngineDead, match="closed; make a new one"):
        made.llm.generate("x", use_progress_bar=False)


def test_with_block_and_garbage_close_the_core():
    cores = [FakeCore(), FakeCore()]
    with LLM("fake", core_factory=lambda config, progress: cores[0], tokenizer=FakeTokenizer()):
        pass
    llm = LLM("fake", core_factory=lambda config, progress: cores[1], tokenizer=FakeTokenizer())
    assert not cores[1].is_closed
    del llm
    gc.collect()
    assert [core.is_closed for core in cores] == [True, True]


def test_model_and_stats_are_the_cores(make):
    made = make()
    model = made.llm.model
    assert (model.forward, model.logits, model.params) == (len, abs, made.core.params)
    assert repr(model) == "StudyModel({'hidden_size': 4})"
    assert made.llm.stats().num_running == 0
    made.llm.reset_prefix_cache()


def test_missing_tokenizer_leaves_ids(tmp_path):
    with LLM(tmp_path, core_factory=FakeCore.start) as llm:
        assert llm.tokenizer is None
        (output,) = llm.generate([1, 2], GREEDY, use_progress_bar=False)
        assert len(output.outputs[0].token_ids) == 8
        with pytest.raises(ValueError, match="needs a tokenizer"):
            llm.generate("text")
        with pytest.raises(ValueError, match="chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])


def test_fake_core_has_the_real_ones_face():
    from engine.core import Core, CoreStats, EngineInfo

    for fake, real in ((FakeInfo, EngineInfo), (FakeStats, CoreStats)):
        names = [[field.name for field in dataclasses.fields(one)] for one in (fake, real)]
        assert names[0] == names[1]
    for name in vars(FakeCore):
        assert name.startswith("_") or hasattr(Core, name)


# generate.


def test_outputs_come_in_the_order_of_the_prompts(make):
    llm = make(reply=echo).llm
    prompts = ["word" * (1 + (7 * i) % 5) + str(i) for i in range(40)]
    got = llm.generate(prompts, SamplingParams(temperature=0.0), use_progress_bar=False)
    assert [o.outputs[0].text for o in got] == prompts
    assert [o.prompt for o in got] == prompts
    assert all(o.finished for o in got)


@pytest.mark.parametrize(
    "prompts", ["hi", [BOS, *b"hi"], {"prompt": "hi"}, np.array([BOS, *b"hi"])], ids=repr
)
def test_one_prompt_gives_a_list_of_one(make, prompts):
    (output,) = make(reply=echo).llm.generate(prompts, use_progress_bar=False)
    assert output.outputs[0].text == "hi"


def test_params_for_each_prompt(make):
    llm = make().llm
    each = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 2, 3)]
    got = llm.generate(["a", "b", "c"], each, use_progress_bar=False)
    assert [len(o.outputs[0].token_ids) for o in got] == [1, 2, 3]
    with pytest.raises(ValueError, match="params has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], each)


def test_rows_with_different_stop_strings_equal_their_solo_runs(make):
    # STOP-12
    llm = make(reply=lambda request, choice: list(b"one two three four")).llm
    each = [SamplingParams(temperature=0.0, stop=stop) for stop in ("two", "four", "e t", "xyz")]
    together = llm.generate(["same"] * 4, each, use_progress_bar=False)
    solo = [llm.generate("same", one, use_progress_bar=False)[0] for one in each]
    assert [o.outputs[0].text for o in together] == [o.outputs[0].text for o in solo]
    assert [o.outputs[0].text for o in together][:3] == ["one ", "one two three ", "on"]


@pytest.mark.parametrize("ids_per_step", [1, 4])
def test_stop_string_frees_the_row_in_the_engine(make, ids_per_step):
    made = make(reply=lambda request, choice: list(b"go STOP on and on"), ids_per_step=ids_per_step)
    (output,) = made.llm.generate(
        "p", SamplingParams(temperature=0.0, stop="STOP", max_tokens=200), use_progress_bar=False
    )
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("go ", "STOP")
    assert made.idle_stats().num_running == 0
    assert made.core.aborts == [(output.request_id, "stop", 0)]


def test_ignore_eos_makes_exactly_max_tokens(make):
    # STOP-11
    llm = make(reply=lambda request, choice: [EOS] * 20).llm
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)
    (output,) = llm.generate("p", params, use_progress_bar=False)
    assert output.outputs[0].token_ids == [EOS] * 9
    assert output.outputs[0].finish_reason == "length"


def test_min_tokens_passes_over_a_stop_id(make):
    # STOP-14
    llm = make(reply=lambda request, choice: list(b"ab!cd!ef")).llm
    params = SamplingParams(temperature=0.0, stop_token_ids=(ord("!"),), min_tokens=5)
    (output,) = llm.generate("p", params, use_progress_bar=False)
    assert output.outputs[0].text == "abmcd"
    assert output.outputs[0].stop_reason == ord("!")


def test_chat_stops_at_an_end_id_that_only_the_tokenizer_names(make):
    # STOP-10
    tokenizer = FakeTokenizer(eos_ids=(EOS, 259))
    llm = make(tokenizer=tokenizer, reply=lambda request, choice: [*b"Hi", 259, *b"more"]).llm
    (output,) = llm.chat([{"role": "user", "content": "x"}], GREEDY, use_progress_bar=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("Hi", "stop")


def test_seed_is_reported_and_repeats_the_output(make):
    # SAMP-22
    llm = make().llm
    params = SamplingParams(max_tokens=12)
    first, second = llm.generate(["p", "p"], params, use_progress_bar=False)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    again = SamplingParams(max_tokens=12, seed=first.seed)
    (repeated,) = llm.generate("p", again, use_progress_bar=False)
    assert repeated.outputs[0].token_ids == first.outputs[0].token_ids


def test_every_choice_is_reported(make):
    (output,) = make().llm.generate("p", SamplingParams(n=3, max_tokens=4), use_progress_bar=False)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3


def test_prompt_log_probabilities_reach_the_caller(make):
    # LOGP-09, LOGP-14
    llm = make().llm
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([7], params, use_progress_bar=False)
    assert output.prompt_logprobs == [None]
    for start in (0, 1, 2, 3):
        for max_tokens in (0, 1):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                prompt_logprobs=1,
                prompt_logprobs_start=start,
            )
            (output,) = llm.generate([7, 8, 9], params, use_progress_bar=False)
            scored = [None if one is None else next(iter(one)) for one in output.prompt_logprobs]
            assert scored == [None, 8, 9][start:]
            assert output.outputs[0].text == "" or max_tokens


def test_all_prompts_are_checked_before_one_runs_and_the_bad_one_is_named(make):
    made = make()
    with pytest.raises(ValueError, match=r"prompts\[2\]: prompt is empty"):
        made.llm.generate(["a", "b", ""], GREEDY)
    with pytest.raises(TypeError, match=r"prompts\[1\]: prompt is a NoneType"):
        made.llm.generate(["a", None], GREEDY)
    assert made.core.submitted == []


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([], ValueError, "prompts is empty"),
        ("", ValueError, "prompt is empty"),
        ([[]], ValueError, "prompt is empty"),
        ([260], ValueError, "outside the vocabulary"),
        ([-1], ValueError, "outside the vocabulary"),
        ([1.5], TypeError, "must be a token id"),
        ([True], TypeError, "must be a token id"),
        (None, TypeError, "prompts is a NoneType"),
        ((p for p in ("a", "b")), TypeError, "prompts is a generator"),
        ([1] * 257, ValueError, "prompt has 257 tokens but max_model_len is 256"),
    ],
    ids=str,
)
def test_bad_prompts_are_refused_and_the_engine_serves_on(make, prompts, error, message):
    # LIM-09, SAMP-32, LOGP-12
    llm = make().llm
    with pytest.raises(error, match=message):
        llm.generate(prompts, GREEDY)
    assert len(llm.generate("fine", GREEDY, use_progress_bar=False)[0].outputs[0].token_ids) == 8


def test_million_prompts_are_refused_by_count(make):
    # LIM-10
    made = make()
    began = time.perf_counter()
    for call in (made.llm.generate, made.llm.chat, made.llm.score):
        with pytest.raises(ValueError, match="1000000 prompts, the limit is 100000"):
            call([[]] * 10**6)
    assert time.perf_counter() - began < 1.0
    assert made.core.submitted == []


def test_over_long_request_fails_alone(make):
    # LIM-04
    llm = make().llm
    with pytest.raises(ValueError, match="max_model_len is 256"):
        llm.generate("x" * 300, GREEDY)
    got = llm.generate(["fine"] * 10, GREEDY, use_progress_bar=False)
    assert [len(o.outputs[0].token_ids) for o in got] == [8] * 10


def test_request_the_engine_fails_carries_its_error_and_others_finish(make):
    llm = make(error_prompts=frozenset({9})).llm
    bad, good = llm.generate([[9, 1], [8, 1]], GREEDY, use_progress_bar=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "a logit was not finite" in bad.outputs[0].error
    assert good.outputs[0].finish_reason == "length"


def test_request_the_core_refuses_ends_the_call_and_leaves_nothing_behind(make):
    made = make(limits=Limits(queued_requests=2), step_seconds=0.001)
    with pytest.raises(QueueFull, match="the limit is 2"):
        made.llm.generate(["a"] * 50, SamplingParams(max_tokens=100), use_progress_bar=False)
    assert made.idle_stats().num_running == 0


def test_dead_engine_is_named_to_everybody(make):
    llm = make(fail_at_step=2).llm
    with pytest.raises(EngineDead, match="device lost"):
        llm.generate(["a", "b"], GREEDY, use_progress_bar=False)
    with pytest.raises(EngineDead, match="device lost"):
        llm.generate("a", GREEDY)
    assert "device lost" in repr(llm)


def test_interrupt_aborts_what_was_submitted(make, monkeypatch):
    made = make(step_seconds=0.001)
    pushed = []

    def interrupt(self, delta, now=None):
        pushed.append(delta)
        raise KeyboardInterrupt

    monkeypatch.setattr(outputs.OutputAssembler, "push", interrupt)
    endless = SamplingParams(max_tokens=250, ignore_eos=True)
    short = SamplingParams(max_tokens=1)
    with pytest.raises(KeyboardInterrupt):
        made.llm.generate(["a"] * 20, [short] + [endless] * 19, use_progress_bar=False)
    assert pushed
    assert made.idle_stats().num_running == 0
    # The short one had ended by itself.
    assert len({one[0] for one in made.core.aborts}) == 19


def test_progress_bar_does_not_disturb_the_outputs(make, capsys):
    (output,) = make(reply=echo).llm.generate("hi", use_progress_bar=True)
    assert output.outputs[0].text == "hi"
    assert capsys.readouterr().out == ""


# chat, score, stream.


def test_chat_renders_the_template_without_a_second_bos(make):
    made = make()
    made.llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_progress_bar=False)
    assert made.core.submitted[0].prompt_ids.tolist() == [BOS, 258, *b"hi", EOS, 259]
    first, second = made.llm.chat(
        [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
        GREEDY,
        use_progress_bar=False,
    )
    assert (first.prompt, second.prompt) == (
        "<s><user>a</s><assistant>",
        "<s><user>b</s><assistant>",
    )


@pytest.mark.parametrize("messages", ["hi", [], [{"content": "x"}], [[{"role": "user"}]]], ids=repr)
def test_malformed_conversation_is_refused(make, messages):
    with pytest.raises(ValueError, match=r"messages"):
        make().llm.chat(messages, GREEDY)


def test_score_takes_one_prompt_many_prompts_or_pairs(make):
    llm = make().llm
    expected = [-(1.0 + ord("c") / 1000), -(1.0 + ord("d") / 1000)]
    for arguments in (
        ("ab", ["c", "d"]),
        (["ab", "xy"], ["c", "d"]),
        ([("ab", "c"), ("xy", "d")],),
        ([[1, 2], [3]], [[ord("c")], [ord("d")]]),
    ):
        got = llm.score(*arguments, use_progress_bar=False)
        assert [one.logprob for one in got] == pytest.approx(expected)
    (one,) = llm.score("ab", "cd", use_progress_bar=False)
    assert one.token_ids == list(b"cd")
    with pytest.raises(ValueError, match="2 prompts have 3 continuations"):
        llm.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(TypeError, match=r"prompts\[0\] must be a pair"):
        llm.score(["a"])
    with pytest.raises(ValueError, match=r"pairs\[1\]: continuation is empty"):
        llm.score("a", ["b", ""])


@pytest.mark.parametrize("ids_per_step", [1, 3])
def test_stream_joins_to_generate(make, ids_per_step):
    llm = make(reply=lambda request, choice: list("naïve ☃ STOP".encode())).llm
    params = SamplingParams(temperature=0.0, stop="STOP", logprobs=1)
    (whole,) = llm.generate("p", params, use_progress_bar=False)
    pieces = list(llm.stream("p", params))
    assert "".join(c.text for piece in pieces for c in piece.outputs) == whole.outputs[0].text
    ids = [i for piece in pieces for c in piece.outputs for i in c.token_ids]
    assert ids == whole.outputs[0].token_ids
    assert [piece.finished for piece in pieces].count(True) == 1
    assert pieces[-1].finished


def test_stream_left_early_ends_the_request(make):
    made = make(step_seconds=0.001)
    for _ in made.llm.stream("p", SamplingParams(max_tokens=250, ignore_eos=True)):
        break
    gc.collect()
    assert made.idle_stats().num_running == 0
    assert made.core.num_steps < 250


def test_stream_refuses_at_the_call_and_raises_faults(make):
    llm = make(error_prompts=frozenset({9})).llm
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.stream("")
    with pytest.raises(RequestFailed, match="a logit was not finite"):
        list(llm.stream([9]))


# AsyncLLM.


async def collect(stream):
    return [output async for output in stream]


def test_async_modes_tell_the_same_story(make):
    llm = make(AsyncLLM, reply=echo).llm

    async def run():
        return [
            await collect(llm.generate("hello", mode=mode))
            for mode in ("delta", "cumulative", "final")
        ]

    deltas, cumulative, final = asyncio.run(run())
    assert "".join(o.outputs[0].text for o in deltas) == "hello"
    assert cumulative[-1].outputs[0].text == "hello"
    assert [o.outputs[0].text for o in final] == ["hello"]
    assert all(o.finished == (o is final[-1]) for o in final)


def test_async_streams_run_together_and_ids_do_not_mix(make):
    # DETOK-12
    llm = make(AsyncLLM, reply=echo, ids_per_step=3).llm
    prompts = [f"prompt number {i}" for i in range(30)]

    async def run():
        return await asyncio.gather(*(collect(llm.generate(p)) for p in prompts))

    for prompt, pieces in zip(prompts, asyncio.run(run()), strict=True):
        ids = [i for piece in pieces for c in piece.outputs for i in c.token_ids]
        assert ids == [*prompt.encode(), EOS]
        assert "".join(c.text for piece in pieces for c in piece.outputs) == prompt


def test_async_face_works_from_one_event_loop_after_another(make):
    llm = make(AsyncLLM, reply=echo).llm
    for _ in range(3):
        assert asyncio.run(collect(llm.generate("hi", mode="final")))[0].outputs[0].text == "hi"


@pytest.mark.parametrize("ends", ["cancelled", "left", "closed"])
def test_async_request_that_is_given_up_is_aborted(make, ends):
    # SCHED-06
    made = make(AsyncLLM, step_seconds=0.001)
    endless = SamplingParams(max_tokens=250, ignore_eos=True)

    async def run():
        stream = made.llm.generate("p", endless)
        await anext(stream)
        if ends == "closed":
            await stream.aclose()
        elif ends == "cancelled":
            task = asyncio.ensure_future(collect(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            del stream
        await made.becomes_idle()

    asyncio.run(run())
    assert made.core.num_steps < 250


def test_async_request_cancelled_while_it_waits_for_its_first_id_is_aborted(make):
    made = make(AsyncLLM, step_seconds=0.05)

    async def run():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await collect(made.llm.generate("p", SamplingParams(max_tokens=250)))
        await made.becomes_idle()

    asyncio.run(run())
    assert made.core.num_steps < 250


def test_async_abort_finishes_the_stream(make):
    made = make(AsyncLLM, step_seconds=0.001)

    async def run():
        endless = SamplingParams(max_tokens=250, ignore_eos=True)
        pieces = []
        async for piece in made.llm.generate("p", endless, request_id="mine"):
            pieces.append(piece)
            await made.llm.abort("mine")
            await made.llm.abort("mine")
            await made.llm.abort("nobody")
        return pieces

    assert asyncio.run(run())[-1].outputs[0].finish_reason == "abort"


def test_async_slow_reader_gets_several_steps_at_once(make):
    llm = make(AsyncLLM).llm

    async def run():
        pieces = []
        async for piece in llm.generate("p", SamplingParams(temperature=0.0, max_tokens=200)):
            pieces.append(piece)
            if len(pieces) == 1:
                await asyncio.sleep(0.3)
        return pieces

    pieces = asyncio.run(run())
    assert sum(len(c.token_ids) for piece in pieces for c in piece.outputs) == 200
    assert len(pieces) < 200


def test_async_errors_reach_their_own_caller(make):
    made = make(AsyncLLM, error_prompts=frozenset({9}), step_seconds=0.001)

    async def run():
        good = asyncio.ensure_future(collect(made.llm.generate("fine", GREEDY)))
        with pytest.raises(ValueError, match="prompt is empty"):
            await collect(made.llm.generate(""))
        with pytest.raises(RequestFailed, match="a logit was not finite"):
            await collect(made.llm.generate([9]))
        first = made.llm.generate("p", SamplingParams(max_tokens=250), request_id="mine")
        await anext(first)
        with pytest.raises(ValueError, match="request_id 'mine' is live already"):
            await collect(made.llm.generate("p", request_id="mine"))
        await anext(first)
        await first.aclose()
        assert sum(len(o.outputs[0].token_ids) for o in await good) == 8

    asyncio.run(run())


def test_streams_of_an_event_loop_that_was_closed_under_them_are_dropped(make):
    made = make(AsyncLLM, step_seconds=0.01)
    loop = asyncio.new_event_loop()
    mailbox = faces._AsyncMailbox(loop)
    sinks = [functools.partial(mailbox.post, faces._Reader()) for _ in range(3)]
    loop.close()
    for index, sink in enumerate(sinks):
        endless = SamplingParams(max_tokens=250, ignore_eos=True)
        prepared = made.llm.frontend.prepare([1], endless, request_id=f"r{index}")
        made.llm._thread.submit(prepared.request, sink)
    assert made.idle_stats().num_running == 0
    assert len(made.core.aborts) == 3


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_async_second_request_of_a_live_id_leaves_the_first_alone(make, is_cancelled):
    # SCHED-32: also when the second is given up before its refusal is known.
    made = make(AsyncLLM, step_seconds=0.005)

    async def run():
        params = SamplingParams(temperature=0.0, max_tokens=40)
        first = asyncio.ensure_future(collect(made.llm.generate("p", params, request_id="mine")))
        while not made.core.submitted:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(collect(made.llm.generate("p", params, request_id="mine")))
        await asyncio.sleep(0)
        if is_cancelled:
            second.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else ValueError):
            await second
        return await first

    pieces = asyncio.run(run())
    assert sum(len(piece.outputs[0].token_ids) for piece in pieces) == 40
    assert made.core.aborts == []


def test_async_score_and_long_text(make):
    llm = make(AsyncLLM).llm

    async def run():
        with pytest.raises(ValueError, match="prompt has 2501 tokens but max_model_len is 256"):
            await collect(llm.generate("x" * 2500))
        return await llm.score("ab", "c", logprobs=2)

    result = asyncio.run(run())
    assert result.logprob == pytest.approx(-(1.0 + ord("c") / 1000))
    assert len(result.logprobs[0]) == 2


def test_async_health_turns_when_the_engine_dies(make):
    made = make(AsyncLLM, fail_at_step=2)
    made.llm.check_health()

    async def run():
        with pytest.raises(EngineDead, match="device lost"):
            await collect(made.llm.generate("p", GREEDY))
        with pytest.raises(EngineDead, match="device lost"):
            await made.llm.stats()

    asyncio.run(run())
    with pytest.raises(EngineDead, match="device lost"):
        made.llm.check_health()


def test_async_shutdown_ends_streams(make):
    made = make(AsyncLLM, step_seconds=0.001)

    async def run():
        stream = made.llm.generate("p", SamplingParams(max_tokens=250, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(made.llm.shutdown)
        with pytest.raises(EngineDead, match="is closed"):
            await collect(stream)

    asyncio.run(run())
    assert made.core.is_closed
    assert not made.llm._thread._thread.is_alive()


class Threads(FakeTokenizer):
    """Remembers who asked for how much."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def encode(self, text, add_special_tokens=True):
        self.asked.append((threading.current_thread() is threading.main_thread(), len(text)))
        return super().encode(text, add_special_tokens)


def test_texts_of_one_turn_of_the_event_loop_are_encoded_off_it_when_they_are_long_together(make):
    tokenizer = Threads()
    llm = make(AsyncLLM, tokenizer=tokenizer).llm

    async def run():
        await asyncio.gather(*(llm.score("a" * 100, "b" * 20) for _ in range(60)))
        on_loop = sum(length for is_loop, length in tokenizer.asked if is_loop)
        assert on_loop <= 3 * 1024, "an item is read about twice"
        assert len(tokenizer.asked) == 120
        tokenizer.asked.clear()
        await llm.score("a" * 100, "b" * 20)
        assert [is_loop for is_loop, _ in tokenizer.asked] == [True, True]
        tokenizer.asked.clear()
        await collect(llm.generate({"prompt": "a" * 1100}, GREEDY))

    with pytest.raises(ValueError, match="prompt has 1101 tokens but max_model_len is 256"):
        asyncio.run(run())
    assert tokenizer.asked == [(False, 1100)]


def test_request_that_can_never_be_done_is_told_apart_from_one_that_failed(make):
    made = make(error_prompts=frozenset({9}))
    made.core.is_callers_fault = True
    with pytest.raises(RequestRefused, match="a logit was not finite"):
        list(made.llm.stream([9]))
