import itertools
import json
import random

import pytest

from engine.request import Delta, SamplingParams, TokenLogprobs
from engine.serving.frontend import Frontend
from engine.serving.outputs import OutputAssembler, RequestFailed
from tests.serving.fake_core import (
    ASSISTANT,
    BOS,
    EOS,
    FakeInfo,
    FakeTokenizer,
    fake_logprobs,
)

TOKENIZER = FakeTokenizer()
FRONTEND = Frontend(FakeInfo(), TOKENIZER)


class Run:
    """An assembler and what it told the engine."""

    def __init__(self, prompt="p", tokenizer=TOKENIZER, frontend=FRONTEND, **params):
        self.aborts = []
        prepared = frontend.prepare(prompt, SamplingParams(**params), request_id="r")
        self.params = prepared.request.params
        self.assembler = OutputAssembler(
            prepared, tokenizer, lambda *arguments: self.aborts.append(arguments)
        )

    def push(self, ids, finish=None, stop_id=None, choice=0, **more):
        """A delta with these ids, given as ids or as text."""
        ids = tuple(ids.encode() if isinstance(ids, str) else ids)
        wanted = self.params.logprobs
        logprobs = () if wanted is None else tuple(fake_logprobs(i, wanted) for i in ids)
        self.assembler.push(
            Delta("r", choice, ids, logprobs, finish_reason=finish, stop_id=stop_id, **more)
        )
        return self

    @property
    def output(self):
        return self.assembler.output().outputs[0]


def deltas_of(ids, size, finish="length", stop_id=None):
    """The ids in deltas of `size`, the last of which finishes."""
    pieces = [ids[i : i + size] for i in range(0, len(ids), size)] or [()]
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        yield piece, finish if is_last else None, stop_id if is_last else None


def whole_and_streamed(ids, size, finish="length", stop_id=None, **params):
    whole, streamed = Run(**params), Run(**params)
    pieces = []
    for delta in deltas_of(ids, size, finish, stop_id):
        whole.push(*delta)
        streamed.push(*delta)
        pieces.append(streamed.assembler.delta())
    return whole.output, [choice for piece in pieces for choice in piece.outputs]


# Text and ends.


def test_output_at_max_tokens_holds_all_text_and_ids():
    output = Run().push("hel").push("lo", "length").output
    assert (output.text, output.token_ids) == ("hello", list(b"hello"))
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


def test_models_own_end_is_an_id_without_text_or_stop_reason():
    # LOGP-19: the end id has its log-probability.
    output = Run(logprobs=1).push("hi").push([EOS], "stop", EOS).output
    assert (output.text, output.token_ids) == ("hi", [*b"hi", EOS])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert len(output.logprobs) == 3
    assert list(output.logprobs[-1]) == [EOS]


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi!")])
def test_callers_stop_id_is_the_stop_reason(include, text):
    run = Run(stop_token_ids=(ord("!"),), include_stop_str_in_output=include)
    output = run.push("hi").push("!", "stop", ord("!")).output
    assert (output.text, output.token_ids) == (text, list(b"hi!"))
    assert (output.finish_reason, output.stop_reason) == ("stop", ord("!"))
    assert run.aborts == []


def test_stop_id_zero_is_a_stop_reason():
    # STOP-09
    output = Run(stop_token_ids=(0,)).push([65, 0], "stop", 0).output
    assert (output.stop_reason, output.text) == (0, "A")


def test_end_id_that_the_caller_names_too_is_the_callers():
    output = Run(stop_token_ids=(EOS,)).push([EOS], "stop", EOS).output
    assert output.stop_reason == EOS


def test_special_tokens_show_when_asked_for():
    output = Run(skip_special_tokens=False).push([65, ASSISTANT, 66], "length").output
    assert output.text == "A<assistant>B"


def test_nothing_generated_is_empty_text():
    # DETOK-05: aborted before the first id, ended at the first id, no output wanted.
    for run in (
        Run("prompt text").push((), "abort"),
        Run("prompt text").push([EOS], "stop", EOS),
        Run("prompt text", max_tokens=0, prompt_logprobs=0).push(
            (), "length", prompt_logprobs=(None,) * 12
        ),
    ):
        assert run.output.text == ""
        assert run.assembler.is_finished
    assert Run("prompt text").output.text == ""


# Stop strings.


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("stops", list(itertools.permutations(["two", "one", "ne t"])))
def test_stop_string_that_completes_first_wins_whatever_the_order_and_step(size, stops):
    # STOP-01, STOP-03
    run = Run(stop=stops, logprobs=0)
    for delta in deltas_of(b"zero one two three", size):
        run.push(*delta)
    assert (run.output.text, run.output.stop_reason) == ("zero ", "one")
    assert run.output.token_ids == list(b"zero one")
    assert run.output.finish_reason == "stop"


def test_text_behind_a_stop_string_inside_one_delta_is_cut_and_the_choice_aborted_once():
    # STOP-03
    run = Run(stop="b", logprobs=1).push("abcd").push("efg").push((), "stop")
    assert run.aborts == [("r", "stop", 0)]
    output = run.output
    assert (output.text, output.token_ids, output.stop_reason) == ("a", list(b"ab"), "b")
    assert len(output.logprobs) == 2
    assert run.assembler.is_finished


@pytest.mark.parametrize(("include", "text"), [(False, "say "), (True, "say STOP")])
def test_stop_string_and_end_id_in_one_step(include, text):
    # STOP-02
    run = Run(stop="STOP", include_stop_str_in_output=include)
    run.push([*b"say STOP", EOS], "stop", EOS)
    assert (run.output.text, run.output.stop_reason) == (text, "STOP")
    assert run.output.token_ids == list(b"say STOP")
    # The engine has ended the choice already.
    assert run.aborts == []


def test_stop_string_that_completes_with_the_last_token_wins_over_length():
    output = Run(stop="c").push("ab").push("c", "length").output
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", "c", "ab")


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [("xababa", "aba", "x"), ("xaaa", "aa", "x"), ("aab", "ab", "a"), ("ababac", "abac", "ab")],
)
@pytest.mark.parametrize("size", [1, 2, 6])
def test_stop_string_that_overlaps_itself_ends_at_its_first_occurrence(text, stop, kept, size):
    # STOP-05
    whole, streamed = whole_and_streamed(text.encode(), size, stop=stop)
    assert whole.text == kept
    assert "".join(piece.text for piece in streamed) == kept


@pytest.mark.parametrize("stop", ["\n", ".*", "(", "\\", "[a-z]", "$"])
def test_stop_string_is_taken_literally(stop):
    # STOP-13
    output = Run(stop=stop).push(f"aXb{stop}c", "length").output
    assert (output.text, output.stop_reason) == ("aXb", stop)
    assert Run(stop=stop).push("abcXYZ", "length").output.text == "abcXYZ"


def test_text_before_min_tokens_is_no_part_of_a_stop_string():
    # STOP-14
    output = Run(stop="ab", min_tokens=3).push("ababxab", "length").output
    assert (output.text, output.stop_reason) == ("ababx", "ab")
    assert output.token_ids == list(b"ababxab")


@pytest.mark.parametrize("seed", range(40))
def test_streamed_pieces_join_to_the_whole(seed):
    # STOP-04, DETOK-02, DETOK-11, DETOK-12
    rng = random.Random(seed)
    text = "".join(rng.choice("abcé☃🧵") for _ in range(30))
    ids = [*text.encode(), *(rng.randrange(256) for _ in range(8))]
    stops = [
        "".join(rng.choice("abcé☃🧵") for _ in range(rng.randint(2, 4)))
        for _ in range(rng.randint(0, 3))
    ]
    params = {
        "stop": stops,
        "logprobs": rng.choice([None, 0, 2]),
        "include_stop_str_in_output": rng.random() < 0.5,
        "min_tokens": rng.choice([0, 5]),
    }
    expected = None
    for size in (1, 2, 3, 5, len(ids)):
        whole, streamed = whole_and_streamed(ids, size, **params)
        assert "".join(piece.text for piece in streamed) == whole.text
        assert [i for piece in streamed for i in piece.token_ids] == whole.token_ids
        assert whole.token_ids == ids[: len(whole.token_ids)]
        assert streamed[-1].finish_reason == whole.finish_reason
        if params["logprobs"] is not None:
            assert [one for piece in streamed for one in piece.logprobs] == whole.logprobs
            assert len(whole.logprobs) == len(whole.token_ids)
            assert streamed[-1].cumulative_logprob == whole.cumulative_logprob
        expected = expected or whole
        assert whole == expected
    if expected.finish_reason == "length":
        assert expected.text == TOKENIZER.decode(ids)


def test_held_text_is_released_when_the_match_does_not_come():
    # DETOK-11
    run = Run(stop="abc")
    run.push("xab")
    assert run.assembler.delta().outputs[0].text == "x"
    run.push("d")
    assert run.assembler.delta().outputs[0].text == "abd"
    run.push("ab", "length")
    assert run.assembler.delta().outputs[0].text == "ab"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("end", ["stop string", "stop id", "eos", "length"])
def test_ids_log_probabilities_and_usage_agree(include, logprobs, end):
    # STOP-21
    run = Run(
        stop="STOP",
        stop_token_ids=(1,),
        logprobs=logprobs,
        include_stop_str_in_output=include,
    )
    last = {
        "stop string": (b"STOPxy", None, None),
        "stop id": ([1], "stop", 1),
        "eos": ([EOS], "stop", EOS),
        "length": (b"z", "length", None),
    }[end]
    run.push("some ").push(*last)
    record = run.assembler.output()
    (output,) = record.outputs
    assert record.finished
    assert record.num_output_tokens == len(output.token_ids)
    if logprobs is None:
        assert output.logprobs is None
    else:
        assert len(output.logprobs) == len(output.token_ids)
        expected = sum(-(1.0 + i / 1000) for i in output.token_ids)
        assert output.cumulative_logprob == pytest.approx(expected)


# Several choices.


def test_choices_end_apart_and_a_stop_string_ends_its_own_choice_alone():
    # STOP-12
    run = Run(n=3, stop="x")
    run.push("ab", choice=0).push("ax", choice=1)
    assert run.aborts == [("r", "stop", 1)]
    assert not run.assembler.is_finished
    run.push("late", choice=1).push("c", "length", choice=0).push([EOS], "stop", EOS, choice=2)
    record = run.assembler.output()
    assert record.finished
    assert [o.text for o in record.outputs] == ["abc", "a", ""]
    assert [o.index for o in record.outputs] == [0, 1, 2]
    assert [o.finish_reason for o in record.outputs] == ["length", "stop", "stop"]


def test_delta_holds_only_choices_with_news():
    run = Run(n=2)
    run.push("a", choice=1)
    assert [o.index for o in run.assembler.delta().outputs] == [1]
    assert run.assembler.delta().outputs == []
    run.push("b", "length", choice=1).push("c", choice=0)
    first, second = run.assembler.delta().outputs
    assert (first.text, first.finish_reason) == ("c", None)
    assert (second.text, second.token_ids, second.finish_reason) == ("b", [98], "length")


# Log-probabilities.


def test_candidates_are_keyed_by_id_so_equal_texts_do_not_collide():
    # DETOK-07
    class Twins(FakeTokenizer):
        def id_to_bytes(self, token_id):
            return b"a"

    tokenizer = Twins()
    run = Run(tokenizer=tokenizer, frontend=Frontend(FakeInfo(), tokenizer), logprobs=3)
    (position,) = run.push([5], "length").output.logprobs
    assert list(position) == [5, 6, 7]
    assert {one.text for one in position.values()} == {"a"}


def test_chosen_id_outside_the_likeliest_stands_first_with_its_rank():
    run = Run(logprobs=2)
    scored = TokenLogprobs(-5.0, 9, (1, 2), (-0.5, -1.0))
    run.assembler.push(Delta("r", 0, (3,), (scored,), finish_reason="length"))
    (position,) = run.output.logprobs
    assert [(i, one.logprob, one.rank) for i, one in position.items()] == [
        (3, -5.0, 9),
        (1, -0.5, 1),
        (2, -1.0, 2),
    ]


def test_bytes_of_the_positions_join_to_the_text():
    # DETOK-01
    text = "aé☃🧵👩‍🚀"
    output = Run(logprobs=0).push(text, "length").output
    data = b"".join(p[i].bytes for i, p in zip(output.token_ids, output.logprobs, strict=True))
    assert data.decode() == output.text == text


def test_one_token_prompt_has_one_position_without_log_probability():
    # LOGP-09
    run = Run([7], prompt_logprobs=1).push("a", "length", prompt_logprobs=(None,))
    assert run.assembler.output().prompt_logprobs == [None]


def test_prompt_positions_are_named_by_the_ids_they_score():
    # LOGP-14
    run = Run([7, 8, 9], prompt_logprobs=0, prompt_logprobs_start=1)
    run.push("a", "length", prompt_logprobs=(fake_logprobs(8, 0), fake_logprobs(9, 0)))
    assert [list(position) for position in run.assembler.output().prompt_logprobs] == [[8], [9]]


def test_prompt_log_probabilities_come_once_in_a_stream():
    run = Run([7], prompt_logprobs=0).push("a", prompt_logprobs=(None,))
    assert run.assembler.delta().prompt_logprobs == [None]
    run.push("b", "length")
    assert run.assembler.delta().prompt_logprobs is None
    assert run.assembler.output().prompt_logprobs == [None]


def test_log_probability_of_an_impossible_id_stays_a_number():
    # LOGP-07
    run = Run(logprobs=1)
    scored = TokenLogprobs(0.0, 1, (65,), (float("-inf"),))
    run.assembler.push(Delta("r", 0, (66,), (scored,), finish_reason="length"))
    (position,) = run.output.logprobs
    assert position[65].logprob == float("-inf")
    assert json.loads(json.dumps(position[65].logprob)) == float("-inf")


# Scores and failures.


def score(prompt, continuation, scored, finish="length", **more):
    prepared = FRONTEND.prepare_score(prompt, continuation)
    assembler = OutputAssembler(prepared, TOKENIZER, lambda *arguments: None)
    assembler.push(
        Delta(prepared.request.request_id, 0, (), (), scored, finish_reason=finish, **more)
    )
    return assembler.score()


def test_score_sums_the_continuation_and_tells_whether_it_is_greedy():
    # LOGP-14
    likely, unlikely = TokenLogprobs(-0.5, 1), TokenLogprobs(-2.0, 2)
    result = score([1, 2], [3, 4], (likely, unlikely), num_cached_tokens=1)
    assert (result.logprob, result.token_logprobs) == (-2.5, [-0.5, -2.0])
    assert (result.prompt_token_ids, result.token_ids) == ([1, 2], [3, 4])
    assert not result.is_greedy
    assert result.num_cached_tokens == 1
    assert [list(position) for position in result.logprobs] == [[3], [4]]
    assert score([1], [3], (likely,)).is_greedy


def test_score_that_did_not_finish_is_an_error():
    with pytest.raises(RequestFailed, match="a logit was not finite"):
        score([1], [2], None, "error", error="a logit was not finite")
    with pytest.raises(RequestFailed, match="finish reason 'abort'"):
        score([1], [2], None, "abort")


def test_failed_choice_carries_its_error():
    output = Run().push("a").push((), "error", error="a logit was not finite").output
    assert (output.finish_reason, output.error, output.text) == (
        "error",
        "a logit was not finite",
        "a",
    )


# Records.


def test_record_tells_prompt_seed_and_cached_tokens():
    run = Run("hi", seed=5).push("a", num_cached_tokens=3).push("b", "length", num_cached_tokens=3)
    record = run.assembler.output()
    assert (record.prompt, record.prompt_token_ids) == ("hi", [BOS, *b"hi"])
    assert (record.seed, record.num_cached_tokens, record.request_id) == (5, 3, "r")


def test_times_are_measured_from_submission_to_first_id_and_end():
    run = Run()
    assert run.assembler.output().metrics.ttft is None
    began = run.assembler._began
    run.assembler.push(Delta("r", 0), began + 1.0)
    run.assembler.push(Delta("r", 0, (65,)), began + 2.0)
    run.assembler.push(Delta("r", 0, (65,), finish_reason="length"), began + 5.0)
    metrics = run.assembler.output().metrics
    assert metrics.ttft == pytest.approx(2.0)
    assert metrics.e2e == pytest.approx(5.0)


def test_reprs_are_short():
    record = Run("p" * 200).push("a" * 200, "length").assembler.output()
    assert len(repr(record)) < 500
    assert "(200 ids)" in repr(record)
    assert "(200 characters)" in repr(record)


def test_ids_alone_are_served_without_a_tokenizer():
    bare = Frontend(FakeInfo(), None)
    output = Run([1], tokenizer=None, frontend=bare, logprobs=1).push([2, 3], "length").output
    assert (output.text, output.token_ids) == ("", [2, 3])
    assert output.logprobs[0][2].bytes == b""
