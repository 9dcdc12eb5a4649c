"""The whole engine behind its notebook face: bad requests harm nobody, closing gives all back."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import jax
import numpy as np
import pytest

from engine import LLM, SamplingParams
from tests.families import tiny

VOCAB_SIZE = 131
MAX_MODEL_LEN = 96


def start(path: Path) -> LLM:
    """Three programs, whose compiles the test run's own cache keeps."""
    return LLM(
        path,
        deterministic=True,
        page_size=4,
        max_model_len=MAX_MODEL_LEN,
        row_rungs=(8,),
        token_rungs=(64,),
        token_budget=64,
        num_pages=60,
        compilation_cache=None,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(path):
    with start(path) as made:
        yield made


PROMPTS = [tiny.random_ids("llama", length) for length in range(3, 13)]


def said(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_progress_bar=False)
    assert all(one.outputs[0].finish_reason == "length" for one in outputs)
    return [one.outputs[0].token_ids for one in outputs]


BAD = {
    "empty prompt": ([[]], {}, "prompt is empty"),
    "id over the vocabulary": ([[1, VOCAB_SIZE]], {}, "131, outside the vocabulary of 131 ids"),
    "negative id": ([[-1]], {}, "-1, outside the vocabulary"),
    "prompt at max_model_len": ([[1] * 96], {}, "leaves no room for output"),
    "prompt over max_model_len": ([[1] * 97], {}, "97 tokens but max_model_len is 96"),
    "output over max_model_len": ([[1] * 90], {"max_tokens": 7}, "lower max_tokens to 6"),
    "min over max": ([[1]], {"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9 but max_tokens"),
    "nan": ([[1]], {"temperature": float("nan")}, "temperature is nan"),
    "logprobs": ([[1]], {"logprobs": 21}, r"logprobs is 21, it must lie in \[0, 20\]"),
    "n": ([[1]], {"n": 10**6}, "n is 1000000"),
    "prompts": ([[1]] * 10**6, {}, "1000000 prompts, the limit is 100000"),
    "stop strings": ([[1]], {"stop": ["x"] * 10**5}, "stop has 100000 strings, the limit is 16"),
    "empty stop string": ([[1]], {"stop": ""}, "stop holds an empty string"),
    "stop string without a tokenizer": ([[1]], {"stop": "x"}, "stop strings needs a tokenizer"),
    "text without a tokenizer": (["text"], {}, "a text prompt needs a tokenizer"),
    "start behind the prompt": (
        [[1]],
        {"prompt_logprobs": 1, "prompt_logprobs_start": 2},
        "prompt_logprobs_start is 2 but the prompt has 1 tokens",
    ),
    "bias of an id over the vocabulary": (
        [[1]],
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        "logit_bias holds 131, outside the vocabulary",
    ),
}


def test_bad_requests_of_every_kind_leave_the_engine_as_it_was(llm):
    expected = said(llm)
    for prompts, params, message in BAD.values():
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, params, use_progress_bar=False)
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert said(llm) == expected


def test_running_streams_do_not_notice_bad_requests(llm):
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (expected,) = llm.generate([PROMPTS[0]], params, use_progress_bar=False)
    ids = []
    kinds = iter(BAD.values())
    for piece in llm.stream(PROMPTS[0], params):
        ids += piece.outputs[0].token_ids
        if (bad := next(kinds, None)) is not None:
            with pytest.raises(ValueError, match=bad[2]):
                llm.generate(bad[0], bad[1], use_progress_bar=False)
    assert next(kinds, None) is None
    assert ids == expected.outputs[0].token_ids


def test_unseeded_calls_differ_and_leave_the_callers_random_state_alone(path, llm):
    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    params = SamplingParams(temperature=1.0, max_tokens=12)
    outputs = llm.generate([PROMPTS[0]] * 8, params, use_progress_bar=False)
    assert len({tuple(one.outputs[0].token_ids) for one in outputs}) == 8
    assert len({one.seed for one in outputs}) == 8
    again = SamplingParams(temperature=1.0, max_tokens=12, seed=outputs[3].seed)
    (repeated,) = llm.generate([PROMPTS[0]], again, use_progress_bar=False)
    assert repeated.outputs[0].token_ids == outputs[3].outputs[0].token_ids
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def live_bytes() -> tuple[int, int]:
    """Arrays alive in the process, and their bytes."""
    arrays = [one for one in jax.live_arrays() if not one.is_deleted()]
    return len(arrays), sum(one.nbytes for one in arrays)


def test_engines_made_and_closed_in_turn_give_everything_back(path, llm):
    """Also with a stream left open; the engine beside them goes on. (Core: five times.)"""
    expected = said(llm)
    gc.collect()
    before = live_bytes()
    for _ in range(2):
        other = start(path)
        assert live_bytes() > before
        assert said(other) == expected
        stream = other.stream(PROMPTS[0], SamplingParams(max_tokens=80, ignore_eos=True))
        next(stream)
        other.close()
        del other, stream
        gc.collect()
        assert live_bytes() == before
    assert said(llm) == expected
