import dataclasses
import random
import time

import numpy as np
import pytest

from engine.config import Limits
from engine.request import SamplingParams
from engine.serving.frontend import Frontend
from tests.serving.fake_core import ASSISTANT, BOS, EOS, VOCAB_SIZE, FakeInfo, FakeTokenizer

INFO = FakeInfo(max_model_len=16)


def frontend(tokenizer=None, limits=None, **info):
    return Frontend(
        dataclasses.replace(INFO, **info),
        FakeTokenizer() if tokenizer is None else tokenizer,
        limits or Limits(),
    )


def prepare(prompt=(1, 2, 3), params=None, **options):
    return frontend().prepare(prompt, params, **options).request


# Prompts.


def test_text_is_encoded_with_the_tokenizers_own_prefix():
    prepared = frontend().prepare("hi")
    assert prepared.request.prompt_ids.tolist() == [BOS, *b"hi"]
    assert prepared.request.prompt_ids.dtype == np.int32
    assert prepared.prompt == "hi"


@pytest.mark.parametrize(
    "prompt",
    [[1, 2], (1, 2), np.array([1, 2]), [np.int64(1), 2], {"prompt_token_ids": [1, 2]}],
    ids=repr,
)
def test_ids_come_in_every_usual_shape(prompt):
    prepared = frontend().prepare(prompt)
    assert prepared.request.prompt_ids.tolist() == [1, 2]
    assert prepared.prompt is None


def test_ids_run_and_text_is_reported_when_a_prompt_has_both():
    prepared = frontend().prepare({"prompt": "shown", "prompt_token_ids": [7]})
    assert (prepared.request.prompt_ids.tolist(), prepared.prompt) == ([7], "shown")


def test_prompt_ids_do_not_follow_the_callers_array():
    ids = np.array([1, 2, 3], np.int32)
    request = prepare(ids)
    ids[:] = 9
    assert request.prompt_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("prompt", ["", [], (), np.array([], np.int32), {"prompt": ""}], ids=repr)
def test_empty_prompt_is_refused(prompt):
    # LIM-09
    with pytest.raises(ValueError, match="prompt is empty"):
        prepare(prompt)


@pytest.mark.parametrize("prompt", [" ", "\n\t", [BOS], "<s>"], ids=repr)
def test_prompt_of_blanks_or_of_bos_alone_is_served(prompt):
    # LIM-09
    assert len(prepare(prompt).prompt_ids) >= 1


@pytest.mark.parametrize("bad", [VOCAB_SIZE, VOCAB_SIZE + 1, -1, 2**31, -(2**63), 10**30])
@pytest.mark.parametrize("place", [0, 2])
def test_prompt_id_outside_the_vocabulary_is_refused(bad, place):
    # SAMP-32, LOGP-12
    ids = [5, 5, 5]
    ids[place] = bad
    with pytest.raises(ValueError, match=rf"prompt\[{place}\] is {bad}, outside .* of 260 ids"):
        prepare(ids)
    with pytest.raises(ValueError, match=rf"is {bad}, outside the vocabulary"):
        frontend().prepare_score([1], ids)


def test_last_id_of_the_vocabulary_is_served():
    # SAMP-32
    assert prepare([VOCAB_SIZE - 1, 0]).prompt_ids.tolist() == [VOCAB_SIZE - 1, 0]


@pytest.mark.parametrize(
    "bad", [True, 1.0, "1", None, np.float32(1), [1], np.bool_(True)], ids=repr
)
def test_prompt_id_of_a_wrong_type_is_refused(bad):
    with pytest.raises(TypeError, match=r"prompt\[1\] is .* must be a token id"):
        prepare([1, bad])


@pytest.mark.parametrize(
    "prompt", [None, 5, 1.5, b"bytes", {1, 2}, np.zeros((2, 2), int), np.zeros(2)], ids=repr
)
def test_prompt_of_a_wrong_type_is_refused(prompt):
    with pytest.raises(TypeError, match="prompt is a"):
        prepare(prompt)


def test_mapping_without_a_prompt_or_with_a_strange_key_is_refused():
    with pytest.raises(ValueError, match="neither 'prompt' nor 'prompt_token_ids'"):
        prepare({})
    with pytest.raises(ValueError, match="unknown key 'promt'"):
        prepare({"promt": "x"})
    with pytest.raises(TypeError, match="prompt is a int"):
        prepare({"prompt": 3})


def test_text_needs_a_tokenizer():
    bare = Frontend(INFO, None)
    assert bare.prepare([1]).request.prompt_ids.tolist() == [1]
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
        bare.prepare("text")
    with pytest.raises(ValueError, match="stop strings needs a tokenizer"):
        bare.prepare([1], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="bad_words needs a tokenizer"):
        bare.prepare([1], SamplingParams(bad_words=("x",)))


# Lengths.


def test_prompt_one_below_at_and_over_the_limit():
    # LIM-03
    assert prepare([1] * 15).max_tokens == 1
    with pytest.raises(ValueError, match="16 tokens but max_model_len is 16, which leaves no room"):
        prepare([1] * 16)
    with pytest.raises(ValueError, match="prompt has 17 tokens but max_model_len is 16; shorten"):
        prepare([1] * 17)


def test_over_long_prompt_is_refused_by_its_length_before_its_ids_are_read():
    # LIM-04
    prompt = [None] * 10**6
    with pytest.raises(ValueError, match="prompt has 1000000 tokens but max_model_len is 16"):
        prepare(prompt)
    assert prepare([1]).max_tokens == 15


def test_max_tokens_fills_the_rest_unless_given():
    assert prepare([1, 2, 3]).max_tokens == 13
    assert prepare([1, 2, 3], SamplingParams()).max_tokens == 13
    assert prepare([1, 2, 3], SamplingParams(max_tokens=13)).max_tokens == 13


def test_max_tokens_that_does_not_fit_is_refused_with_the_room_there_is():
    with pytest.raises(ValueError, match=r"max_tokens is 14 .* is 16; lower .* to 13"):
        prepare([1, 2, 3], SamplingParams(max_tokens=14))


def test_max_tokens_left_out_is_bounded_by_the_page_pool():
    small = frontend(max_model_len=200, num_pages=3, page_size=8)
    assert small.prepare([1] * 10).request.max_tokens == 7


def test_no_output_is_allowed_only_where_the_prompt_is_scored():
    # LOGP-14
    request = prepare([1, 2], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert request.max_tokens == 0
    assert prepare([1] * 16, SamplingParams(max_tokens=0, prompt_logprobs=1)).max_tokens == 0
    with pytest.raises(ValueError, match="max_tokens is 0 with prompt_logprobs None"):
        prepare([1, 2], SamplingParams(max_tokens=0))
    with pytest.raises(ValueError, match="and n 2"):
        prepare([1, 2], SamplingParams(max_tokens=0, prompt_logprobs=1, n=2))


def test_min_tokens_beyond_the_room_is_refused():
    # STOP-18
    with pytest.raises(ValueError, match="min_tokens is 14 but only 13 tokens"):
        prepare([1, 2, 3], SamplingParams(min_tokens=14))
    with pytest.raises(ValueError, match="min_tokens is 3 but max_tokens is 2"):
        SamplingParams(min_tokens=3, max_tokens=2)


# Defaults of the checkpoint.

CHECKPOINT = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "max_new_tokens": 5,
    "eos_token_id": 2,
}


def test_checkpoint_defaults_apply_where_the_caller_left_params_out():
    request = frontend(generation_defaults=CHECKPOINT).prepare([1, 2]).request
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (
        0.6,
        20,
        0.95,
    )
    assert request.max_tokens == 5


def test_params_built_by_the_caller_are_taken_as_they_are():
    request = frontend(generation_defaults=CHECKPOINT).prepare([1, 2], SamplingParams()).request
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (1.0, 0, 1.0)
    assert request.max_tokens == 14


def test_mapping_stands_for_what_differs_from_the_checkpoint():
    served = frontend(generation_defaults=CHECKPOINT)
    request = served.prepare([1, 2], {"temperature": 0.0}).request
    assert (request.params.temperature, request.params.top_k) == (0.0, 20)
    assert request.max_tokens == 5
    with pytest.raises(ValueError, match="unknown field 'temprature'"):
        served.prepare([1, 2], {"temprature": 1})
    with pytest.raises(TypeError, match="params is a float"):
        served.prepare([1, 2], 0.7)


def test_checkpoints_max_new_tokens_is_a_default_and_no_ceiling():
    # LIM-07
    served = frontend(generation_defaults={"max_new_tokens": 5})
    assert served.prepare([1, 2], {"max_tokens": 9}).request.max_tokens == 9
    assert served.prepare([1, 2], SamplingParams(max_tokens=9)).request.max_tokens == 9
    assert served.prepare([1] * 13).request.max_tokens == 3
    assert frontend().prepare([1, 2]).request.max_tokens == 14


def test_checkpoint_that_does_not_sample_is_greedy():
    assert frontend(generation_defaults={"do_sample": False}).default_params.is_greedy


@pytest.mark.parametrize(
    "bad", [{"top_p": 7.0}, {"temperature": "hot"}, {"max_new_tokens": -1}], ids=repr
)
def test_unusable_checkpoint_defaults_are_refused_at_start(bad):
    with pytest.raises((ValueError, TypeError), match=r"generation_config\.json: "):
        frontend(generation_defaults=bad)


# Ends.


def test_end_ids_are_those_of_model_and_tokenizer_together():
    # STOP-10
    served = frontend(FakeTokenizer(eos_ids=(EOS, 258)), eos_ids=(EOS, 259))
    assert served.prepare([1]).request.stop_ids == (EOS, 259, 258)
    assert served.prepare([1]).request.eos_ids == (EOS, 259, 258)


def test_end_id_zero_counts():
    # STOP-09
    served = frontend(FakeTokenizer(eos_ids=()), eos_ids=(0,))
    assert served.prepare([1]).request.stop_ids == (0,)
    request = served.prepare([1], SamplingParams(ignore_eos=True, stop_token_ids=(0,))).request
    assert request.stop_ids == (0,)


def test_ignore_eos_leaves_the_callers_stop_ids():
    # STOP-11
    request = prepare([1], SamplingParams(ignore_eos=True, stop_token_ids=(9,)))
    assert (request.stop_ids, request.eos_ids) == ((9,), (EOS,))


def test_min_tokens_needs_no_end_id():
    # STOP-17
    served = frontend(FakeTokenizer(eos_ids=()), eos_ids=())
    assert served.prepare([1], SamplingParams(min_tokens=5)).request.stop_ids == ()


def test_end_id_of_the_tokenizer_outside_the_models_vocabulary_is_left_out():
    assert frontend(FakeTokenizer(eos_ids=(10**6,))).eos_ids == (EOS,)


def test_stop_ids_together_are_bounded():
    served = frontend(eos_ids=tuple(range(250, 258)))
    with pytest.raises(ValueError, match="make 38 ids, the limit is 32"):
        served.prepare([1], SamplingParams(stop_token_ids=tuple(range(30))))


# Ids in parameters.


@pytest.mark.parametrize("bad", [VOCAB_SIZE, -1])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("stop_token_ids", lambda i: {"stop_token_ids": (1, i)}),
        ("logit_bias", lambda i: {"logit_bias": {i: 1.0}}),
        ("allowed_token_ids", lambda i: {"allowed_token_ids": (1, i)}),
        ("bad_word_ids", lambda i: {"bad_word_ids": ((1, i),)}),
    ],
)
def test_parameter_id_outside_the_vocabulary_is_refused(name, make, bad):
    with pytest.raises(ValueError, match=f"{name} holds {bad}, outside the vocabulary of 260"):
        prepare([1], SamplingParams(**make(bad)))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("stop_token_ids", {"stop_token_ids": (1.0,)}),
        ("stop_token_ids", {"stop_token_ids": (True,)}),
        ("logit_bias", {"logit_bias": {"1": 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": ("1",)}),
    ],
)
def test_parameter_id_of_a_wrong_type_is_refused(name, fields):
    with pytest.raises(TypeError, match=f"{name} holds"):
        prepare([1], SamplingParams(**fields))


def test_bad_words_become_ids_with_and_without_a_space_before_them():
    request = prepare([1], SamplingParams(bad_words=("ab",), bad_word_ids=((7, 8),)))
    # The byte tokenizer writes the space as an id of its own, so the bare word covers both.
    assert request.params.bad_word_ids == ((7, 8), tuple(b"ab"))
    assert request.params.bad_words == ()


class Merging(FakeTokenizer):
    """Makes a space and the letter behind it one id, as real vocabularies do."""

    def encode(self, text, add_special_tokens=True):
        ids = super().encode(text, add_special_tokens)
        return [200, *ids[2:]] if text.startswith(" ") else ids


def test_bad_word_whose_first_id_swallows_the_space_is_two_sequences():
    request = frontend(Merging()).prepare([1], SamplingParams(bad_words=("ab",))).request
    assert request.params.bad_word_ids == (tuple(b"ab"), (200, ord("b")))


def test_bad_words_over_a_limit_are_refused():
    with pytest.raises(ValueError, match="'abcdefghi' has 9 token ids, it must have 1 to 8"):
        prepare([1], SamplingParams(bad_words=("abcdefghi",)))
    words = tuple(f"{chr(97 + i)}{chr(97 + i)}" for i in range(17))
    with pytest.raises(ValueError, match=r"make 34 token sequences, .* the limit is 32"):
        frontend(Merging()).prepare([1], SamplingParams(bad_words=words))


def test_allowed_ids_that_are_all_banned_are_refused():
    with pytest.raises(ValueError, match=r"allowed_token_ids \(257,\) are all banned"):
        prepare([1], SamplingParams(allowed_token_ids=(EOS,), min_tokens=1))
    with pytest.raises(ValueError, match="are all banned by bad_words"):
        prepare([1], SamplingParams(allowed_token_ids=(5, 6), bad_word_ids=((5,), (6,))))
    request = prepare([1], SamplingParams(allowed_token_ids=(5, 6, 5), bad_word_ids=((5,), (6, 5))))
    assert request.params.allowed_token_ids == (5, 6)


@pytest.mark.parametrize("top_k", [0, -1, VOCAB_SIZE, 10**7])
def test_top_k_that_keeps_everything_is_off_and_not_greedy(top_k):
    # SAMP-05, SAMP-06
    request = prepare([1], SamplingParams(top_k=top_k))
    assert request.params.top_k == 0
    assert not request.params.is_greedy


def test_top_k_below_the_vocabulary_is_kept():
    assert prepare([1], SamplingParams(top_k=VOCAB_SIZE - 1)).params.top_k == VOCAB_SIZE - 1


@pytest.mark.parametrize("penalty", [2.5, 1e-6, 100.0])
def test_repetition_penalty_has_no_small_bound(penalty):
    # SAMP-19
    assert (
        prepare([1], SamplingParams(repetition_penalty=penalty)).params.repetition_penalty
        == penalty
    )


@pytest.mark.parametrize("penalty", [0.0, -1.0, float("nan"), float("inf")])
def test_repetition_penalty_that_is_not_positive_is_refused(penalty):
    # SAMP-19
    with pytest.raises(ValueError, match="repetition_penalty is"):
        SamplingParams(repetition_penalty=penalty)


@pytest.mark.parametrize("count", [0, 1, 5, 10, 20])
def test_prompt_logprobs_up_to_the_limit_are_served(count):
    # LOGP-10
    request = prepare([1], SamplingParams(prompt_logprobs=count, logprobs=count))
    assert request.params.prompt_logprobs == count


def test_prompt_logprobs_over_the_limit_are_refused():
    # LOGP-10
    with pytest.raises(ValueError, match=r"prompt_logprobs is 21, it must lie in \[0, 20\]"):
        SamplingParams(prompt_logprobs=21)
    tight = frontend(limits=Limits(logprobs=3))
    with pytest.raises(ValueError, match=r"logprobs is 4, it must lie in \[0, 3\]"):
        tight.prepare([1], SamplingParams(logprobs=4))
    with pytest.raises(ValueError, match="logprobs is 4"):
        tight.prepare_score([1], [2], logprobs=4)


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_prompt_logprobs_may_start_anywhere_in_the_prompt_and_at_its_end(start):
    # LOGP-14
    request = prepare([1, 2, 3], SamplingParams(prompt_logprobs=1, prompt_logprobs_start=start))
    assert request.params.prompt_logprobs_start == start


def test_prompt_logprobs_that_start_behind_the_prompt_are_refused():
    # LOGP-14
    with pytest.raises(ValueError, match="prompt_logprobs_start is 4 but the prompt has 3 tokens"):
        prepare([1, 2, 3], SamplingParams(prompt_logprobs=1, prompt_logprobs_start=4))


# Seeds.


def test_unseeded_requests_differ_and_leave_the_callers_random_state_alone():
    # SAMP-22
    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    seeds = {prepare([1], SamplingParams()).seed for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    random.seed(7)
    assert prepare([1]).seed not in seeds


@pytest.mark.parametrize(("seed", "used"), [(0, 0), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1)])
def test_seed_of_the_caller_is_used(seed, used):
    assert prepare([1], SamplingParams(seed=seed)).seed == used


# The rest of a request.


def test_request_ids_are_drawn_or_checked():
    assert prepare([1]).request_id != prepare([1]).request_id
    assert prepare([1], request_id="mine").request_id == "mine"
    with pytest.raises(ValueError, match="request_id has 257 characters"):
        prepare([1], request_id="x" * 257)
    with pytest.raises(ValueError, match="request_id has 0 characters"):
        prepare([1], request_id="")
    with pytest.raises(TypeError, match="request_id is 5"):
        prepare([1], request_id=5)


def test_salt_and_priority_are_checked():
    assert prepare([1], cache_salt="é").cache_salt == "é".encode()
    with pytest.raises(ValueError, match="cache_salt has 258 bytes, the limit is 256"):
        prepare([1], cache_salt="é" * 129)
    with pytest.raises(TypeError, match="cache_salt is a int"):
        prepare([1], cache_salt=1)
    with pytest.raises(ValueError, match="priority is 2147483648"):
        prepare([1], priority=2**31)
    with pytest.raises(TypeError, match=r"priority is 1\.0"):
        prepare([1], priority=1.0)


def test_engines_own_limits_are_enforced():
    with pytest.raises(ValueError, match=r"n is 3, it must lie in \[1, 2\]"):
        frontend(limits=Limits(n=2)).prepare([1], SamplingParams(n=3))


def test_hostile_counts_are_refused_before_any_work():
    # LIM-10
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"n is 1000000, it must lie in \[1, 128\]"):
        SamplingParams(n=10**6)
    with pytest.raises(ValueError, match="stop has 100000 strings, the limit is 16"):
        SamplingParams(stop=["x"] * 10**5)
    with pytest.raises(ValueError, match="1000000 prompts, the limit is 100000"):
        frontend().check_count(10**6)
    with pytest.raises(ValueError, match="bad_words has 100000 entries"):
        SamplingParams(bad_words=["x"] * 10**5)
    assert time.perf_counter() - began < 1.0


# Scoring.


def score(prompt, continuation, tokenizer=None):
    request = frontend(tokenizer).prepare_score(prompt, continuation).request
    start = request.params.prompt_logprobs_start
    return request.prompt_ids[:start].tolist(), request.prompt_ids[start:].tolist()


def test_score_cuts_text_behind_the_prompts_ids():
    assert score("ab", " c") == ([BOS, *b"ab"], [*b" c"])


def test_score_counts_spaces_at_the_prompts_end_to_the_continuation():
    assert score("ab ", "c") == ([BOS, *b"ab"], [*b" c"])


def test_score_of_an_empty_prompt_stands_behind_bos_or_else_eos():
    assert score("", "ab") == ([BOS], [*b"ab"])
    assert score("", "ab", FakeTokenizer(bos_id=None, adds_bos=False)) == ([EOS], [*b"ab"])
    with pytest.raises(ValueError, match="no bos or eos id"):
        Frontend(
            dataclasses.replace(INFO, eos_ids=()), FakeTokenizer(bos_id=None, eos_ids=())
        ).prepare_score("", "a")


def test_score_keeps_a_continuation_where_the_border_vanishes_inside_one_token():
    class Merging(FakeTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [ASSISTANT] if text == "ab" else super().encode(text, add_special_tokens)

    assert score("a", "b", Merging(adds_bos=False)) == ([ord("a")], [ord("b")])


def test_score_takes_ids_up_to_the_whole_model_length():
    assert score([1] * 15, [2]) == ([1] * 15, [2])
    with pytest.raises(ValueError, match="prompt has 17 tokens but max_model_len is 16"):
        score([1] * 15, [2, 3])


def test_score_asks_for_no_output_and_for_the_continuations_positions():
    request = frontend().prepare_score([1, 2], [3, 4], logprobs=2).request
    assert request.max_tokens == 0
    assert request.params.prompt_logprobs == 2
    assert request.params.prompt_logprobs_start == 2


def test_score_refuses_what_cannot_be_scored():
    with pytest.raises(ValueError, match="continuation is empty"):
        score("a", "")
    with pytest.raises(ValueError, match="continuation is empty"):
        score([1], [])
    with pytest.raises(ValueError, match="prompt is empty"):
        score([], [1])
    with pytest.raises(TypeError, match="both be text or both be token ids"):
        score("a", [1])


def test_conversation_length_is_bounded():
    with pytest.raises(ValueError, match="messages has 4097 messages, it must have 1 to 4096"):
        frontend().check_messages([{}] * 4097)


class Unread(FakeTokenizer):
    """Refuses to be asked."""

    def encode(self, text, add_special_tokens=True):
        raise AssertionError("a text that cannot fit was encoded")


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        (lambda one: one.prepare("a" * 177), "prompt has 177 bytes"),
        (lambda one: one.prepare({"prompt": "\u00e9" * 90}), "prompt has 180 bytes"),
        (lambda one: one.prepare_score("a" * 100, "b" * 77), "continuation has 177 bytes"),
        (lambda one: one.prepare_score("", "b" * 177), "continuation has 177 bytes"),
        (lambda one: one.encode("a" * 177, "chat"), "prompt has 177 bytes"),
    ],
    ids=range(5),
)
def test_text_that_cannot_fit_is_refused_before_it_is_encoded(ask, found):
    words = (
        f"{found} of text or more but max_model_len is 16 tokens of at most 11 bytes, 176 "
        "together; shorten it or start the engine with a larger max_model_len"
    )
    with pytest.raises(ValueError, match=words):
        ask(frontend(Unread()))


def test_longest_text_that_may_fit_is_encoded():
    with pytest.raises(AssertionError, match="was encoded"):
        frontend(Unread()).prepare("a" * 176)
    assert len(frontend().prepare("<assistant>" * 14).request.prompt_ids) == 15


def test_bad_word_of_more_bytes_than_its_ids_could_have_is_refused_unread():
    with pytest.raises(ValueError, match="a bad word has 89 characters, more than the 88 bytes of"):
        frontend(Unread()).prepare([1], SamplingParams(max_tokens=1, bad_words=("w" * 89,)))
