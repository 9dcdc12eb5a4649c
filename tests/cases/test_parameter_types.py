"""Sampling parameters of wrong types are refused by name; numpy's numbers serve like Python's."""

import math

import numpy as np
import pytest

from engine.request import SamplingParams

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
INTEGERS = ("n", "top_k", "min_tokens", "prompt_logprobs_start")
OPTIONAL_INTEGERS = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "processed_logprobs",
)
TEXTS = ("stop", "bad_words")
IDS = ("stop_token_ids", "allowed_token_ids")


@pytest.mark.parametrize(
    "value", ["1", True, None, [1], np.bool_(True), np.array([1.0]), 1j], ids=repr
)
@pytest.mark.parametrize("name", NUMBERS)
def test_number_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} is .*, it must be a number$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", ["1", True, 1.0, np.float32(1), [1]], ids=repr)
@pytest.mark.parametrize("name", INTEGERS + OPTIONAL_INTEGERS)
def test_integer_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} is .*, it must be an integer$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_that_must_be_there_is_not_none(name):
    with pytest.raises(TypeError, match=f"^{name} is None, it must be an integer$"):
        SamplingParams(**{name: None})


@pytest.mark.parametrize("value", ["no", 0, 1, None], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_flag_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} is .*, it must be True or False$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [5, None, b"x", {"a": 1}, 1.5], ids=repr)
@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_a_wrong_type_are_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} is .*, it must be a string or a list of them$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_hold_something_else_are_refused_by_name(name):
    with pytest.raises(TypeError, match=rf"^{name} holds 5, it must hold strings$"):
        SamplingParams(**{name: ["a", 5]})


@pytest.mark.parametrize("value", [5, "ab", b"ab", {1: 2}, np.int64(5)], ids=repr)
@pytest.mark.parametrize("name", IDS)
def test_ids_of_a_wrong_type_are_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} is .*, it must be a list of integers$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [1]], ids=repr)
@pytest.mark.parametrize("name", IDS)
def test_ids_that_hold_something_else_are_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} holds .*, it must hold integers$"):
        SamplingParams(**{name: [1, value]})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "bad_word_ids is 5, it must be a list of lists of integers"),
        ((5,), "bad_word_ids holds 5, it must hold lists of integers"),
        (("ab",), "bad_word_ids holds 'ab', it must hold lists of integers"),
        (((1.5,),), "bad_word_ids holds 1.5, it must hold integers"),
    ],
    ids=repr,
)
def test_bad_word_ids_of_a_wrong_type_are_refused_by_name(value, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(bad_word_ids=value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], r"logit_bias is \[1\], it must be a mapping of integer ids to numbers"),
        ({"1": 1.0}, "logit_bias holds '1', it must hold integers"),
        ({True: 1.0}, "logit_bias holds True, it must hold integers"),
        ({1: True}, r"logit_bias\[1\] is True, it must be a number"),
        ({1: "x"}, r"logit_bias\[1\] is 'x', it must be a number"),
    ],
    ids=repr,
)
def test_logit_bias_of_a_wrong_type_is_refused_by_name(value, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(logit_bias=value)


def test_numpys_numbers_and_lists_are_made_plain():
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_k=np.int8(5),
        seed=np.uint64(2**64 - 1),
        ignore_eos=np.bool_(True),
        stop=np.array(["x"]),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=range(3),
        bad_word_ids=np.array([[1, 2]]),
        logit_bias={np.int32(3): np.float16(1)},
    )
    plain = SamplingParams(
        n=2,
        temperature=0.5,
        top_k=5,
        seed=2**64 - 1,
        ignore_eos=True,
        stop="x",
        stop_token_ids=(1, 2),
        allowed_token_ids=(0, 1, 2),
        bad_word_ids=((1, 2),),
        logit_bias={3: 1.0},
    )
    assert params == plain and repr(params) == repr(plain)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**400], ids=["2^64", "-2^63 - 1", "huge"])
def test_seed_outside_64_bits_is_refused(value):
    with pytest.raises(ValueError, match=f"^seed is {value}, it must be a 64-bit integer$"):
        SamplingParams(seed=value)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 10**400, -(10**400)],
    ids=["nan", "inf", "-inf", "huge", "-huge"],
)
@pytest.mark.parametrize("name", NUMBERS)
def test_number_that_is_not_finite_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is (nan|inf|-inf), it must be finite$"):
        SamplingParams(**{name: value})
    with pytest.raises(ValueError, match=r"^logit_bias\[5\] is .* must lie in \[-100, 100\]$"):
        SamplingParams(logit_bias={5: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("top_p", -1e-9),
        ("top_p", 1.1),
        ("min_p", 2),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 101),
        ("n", 0),
        ("top_k", -2),
        ("max_tokens", -1),
        ("min_tokens", 2**31),
        ("logprobs", -1),
        ("prompt_logprobs_start", -1),
    ],
)
def test_number_outside_its_range_names_value_and_range(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is {value}(\.0)?, it must lie in [\[(].*\]$"):
        SamplingParams(**{name: value})


def test_parameters_do_not_follow_the_callers_containers():
    bias, stops = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops)
    bias[2] = 3.0
    stops.append("b")
    assert (params.logit_bias, params.stop) == ({1: 2.0}, ("a",))
