"""What other engines were reported for, tried on a tiny model through the real loop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from engine.core import Core
from engine.request import Request, TokenLogprobs
from tests.engine import loop
from tests.families import tiny

GOLDENS = Path(__file__).parents[1] / "goldens"
PAGE_SIZE = 4
MAX_MODEL_LEN = 96
VOCAB_SIZE = 131

# float32 logits of one model, by another program or library: the goldens' own gate is 5e-5.
CLOSE = 2e-4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    path = tiny.write_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    core = loop.start(path, page_size=PAGE_SIZE, max_model_len=MAX_MODEL_LEN)
    yield core
    core.close()


@pytest.fixture
def core(llama: Core) -> Core:
    """An empty scheduler and state over the module's programs."""
    return loop.rescheduled(llama)


@pytest.fixture(scope="module")
def window_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    """Sliding window of 7 tokens."""
    path = tiny.write_checkpoint("mistral_swa", tmp_path_factory.mktemp("mistral"))
    core = loop.start(path, page_size=PAGE_SIZE, max_model_len=MAX_MODEL_LEN)
    yield core
    core.close()


@pytest.fixture(scope="module")
def golden() -> tuple[np.ndarray, np.ndarray]:
    """i32[17] prompt and f64[17, V] its log-probabilities by an independent implementation."""
    with np.load(GOLDENS / "llama.npz") as stored:
        ids, logits = stored["ids_17"], stored["logits_17"].astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return ids, logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def solo(core: Core, request: Request) -> loop.Output:
    """One request of one choice by itself."""
    (output,) = loop.run(core, [request]).values()
    return output


def ids_of(outputs: loop.Outputs) -> dict[str, list[int]]:
    return {name: one.token_ids for (name, _), one in outputs.items()}


def assert_close(found, expected) -> None:
    """Equal log-probabilities of equal positions."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)
            assert len(one.top_ids) == len(other.top_ids)


def assert_scores(position: TokenLogprobs, row: np.ndarray, token_id: int, num_top: int) -> None:
    """One position against all log-probabilities of its row."""
    assert position.logprob == pytest.approx(row[token_id], abs=CLOSE)
    ahead = (row > row[token_id] + CLOSE).sum()
    assert ahead < position.rank <= (row > row[token_id] - CLOSE).sum()
    assert len(position.top_ids) == len(set(position.top_ids)) == num_top
    np.testing.assert_allclose(position.top_logprobs, np.sort(row)[::-1][:num_top], atol=CLOSE)
    np.testing.assert_allclose(position.top_logprobs, row[list(position.top_ids)], atol=CLOSE)


# --- prompt log-probabilities ---


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("start", [0, 1, 8, 16, 17])
def test_prompt_scores_are_right_wherever_they_start_cold_and_warm(core, golden, start, max_tokens):
    ids, expected = golden
    for is_warm in (False, True):
        output = solo(
            core,
            loop.request(
                "a", ids, max_tokens, prompt_logprobs=3, prompt_logprobs_start=start, logprobs=2
            ),
        )
        # A hit ends before the first wanted position.
        assert (output.num_cached_tokens > 0) == (is_warm and start > PAGE_SIZE)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 17 - start
        for position, scored in enumerate(output.prompt_logprobs, start):
            if position == 0:
                assert scored is None
            else:
                assert_scores(scored, expected[position - 1], int(ids[position]), 3)
        assert len(output.logprobs) == len(output.token_ids) == max_tokens
        for told in output.logprobs:
            assert_scores(told, expected[16], output.token_ids[0], 2)


@pytest.mark.parametrize("count", [0, 1, 5, 10, 20])
def test_every_count_of_alternatives_is_served(core, golden, count):
    ids, expected = golden
    output = solo(core, loop.request("a", ids, 1, prompt_logprobs=count, logprobs=count))
    for position in range(1, 17):
        scored = output.prompt_logprobs[position]
        assert_scores(scored, expected[position - 1], int(ids[position]), count)
    assert_scores(output.logprobs[0], expected[16], output.token_ids[0], count)


def test_prompt_of_one_token_has_one_position_without_score(core):
    output = solo(core, loop.request("a", [7], 2, prompt_logprobs=1))
    assert output.prompt_logprobs == (None,)
    assert len(output.token_ids) == 2


def scored_crowd(lengths: tuple[int, ...], max_tokens: int = 4) -> list[Request]:
    """Wanted positions begin at the prompt's end, in its middle, at its start, or nowhere."""
    made = []
    for i, length in enumerate(lengths):
        start = (length, length // 2, 0, 0)[i % 4]
        wanted = {"prompt_logprobs": 2, "prompt_logprobs_start": start}
        made.append(
            loop.request(
                f"r{i}",
                tiny.random_ids("llama", length),
                max_tokens,
                logprobs=1,
                **({} if i % 4 == 3 else wanted),
            )
        )
    return made


def test_rows_without_wanted_positions_shift_nobodys_scores(core):
    requests = scored_crowd((9, 11, 7, 10, 5, 6, 8, 4))
    alone = loop.rescheduled(core, prefix_cache=False)
    expected = {one.request_id: solo(alone, one) for one in requests}
    together = loop.rescheduled(core, prefix_cache=False)
    for (name, _), output in loop.run(together, requests).items():
        assert output.token_ids == expected[name].token_ids
        assert_close(output.prompt_logprobs or (), expected[name].prompt_logprobs or ())
        assert_close(output.logprobs, expected[name].logprobs)
    lengths = [len(one.prompt_logprobs or ()) for one in expected.values()]
    assert lengths == [0, 6, 7, 0, 0, 3, 8, 0]


def test_prompt_scores_survive_chunks_and_preemption(core):
    requests = scored_crowd((33, 21, 26, 30, 19, 28), max_tokens=20)
    expected = loop.run(loop.rescheduled(core, prefix_cache=False), requests)
    for prefix_cache in (False, True):
        crowded = loop.rescheduled(core, num_pages=26, max_chunk=5, prefix_cache=prefix_cache)
        found = loop.run(crowded, requests)
        assert crowded.stats().preemptions > 0
        for key, output in found.items():
            assert output.token_ids == expected[key].token_ids
            assert_close(output.prompt_logprobs or (), expected[key].prompt_logprobs or ())
            assert_close(output.logprobs, expected[key].logprobs)


# --- log-probabilities of outputs ---


@pytest.mark.parametrize("lane", [{"depth": 2}, {"depth": 3}, {"ids_from_host": True}], ids=str)
@pytest.mark.parametrize("sampler", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=str)
def test_no_alternatives_still_report_the_chosen_id(core, lane, sampler):
    prompt = tiny.random_ids("llama", 9)
    core = loop.rescheduled(core, **lane)
    bare = solo(core, loop.request("a", prompt, 6, logprobs=0, **sampler))
    full = solo(core, loop.request("a", prompt, 6, logprobs=5, **sampler))
    assert bare.token_ids == full.token_ids
    assert [one.rank for one in bare.logprobs] == [one.rank for one in full.logprobs]
    assert all(one.top_ids == one.top_logprobs == () for one in bare.logprobs)
    for one, other in zip(bare.logprobs, full.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)


def test_numbers_are_of_the_unmodified_logits_unless_processed_ones_are_asked_for(core, golden):
    ids, expected = golden
    asked = {
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "top_k": 4,
        "logprobs": 5,
        "prompt_logprobs": 2,
    }
    raw = solo(core, loop.request("a", ids, 4, **asked))
    processed = solo(core, loop.request("a", ids, 4, processed_logprobs=True, **asked))
    assert raw.token_ids == processed.token_ids
    assert_scores(raw.logprobs[0], expected[16], raw.token_ids[0], 5)
    # A prompt's numbers are of the unmodified logits in both: nothing was chosen there.
    for output in (raw, processed):
        for position in range(1, 17):
            scored = output.prompt_logprobs[position]
            assert_scores(scored, expected[position - 1], int(ids[position]), 2)
    for one in processed.logprobs:
        finite = np.array(one.top_logprobs)[np.isfinite(one.top_logprobs)]
        assert len(finite) == 4 and np.exp(finite).sum() == pytest.approx(1.0, abs=1e-5)


def test_numbers_of_masked_ids_are_minus_infinity_and_never_nan(core):
    asked = {"allowed_token_ids": (7,), "logprobs": 5, "processed_logprobs": True}
    output = solo(core, loop.request("a", [5, 6], 3, **asked))
    assert output.token_ids == [7, 7, 7]
    for one in output.logprobs:
        assert (one.logprob, one.rank) == (0.0, 1)
        assert one.top_logprobs == (0.0, *[-np.inf] * 4)
        assert json.loads(json.dumps(one.top_logprobs)) == list(one.top_logprobs)


def test_id_that_ends_the_output_has_its_number(core):
    prompt = tiny.random_ids("llama", 9)
    free = solo(core, loop.request("a", prompt, 12, logprobs=1))
    last = free.token_ids[5]
    count = free.token_ids.index(last) + 1
    ended = solo(core, loop.request("a", prompt, 12, (last,), logprobs=1))
    assert (ended.finish_reason, ended.stop_id) == ("stop", last)
    assert ended.token_ids == free.token_ids[:count]
    assert_close(ended.logprobs, free.logprobs[:count])


# --- sampling ---


def test_narrowest_filters_say_what_greedy_says(core):
    prompts = [tiny.random_ids("llama", length) for length in range(1, 13)]
    said = {}
    for label, params in {
        "greedy": {},
        "top_k": {"temperature": 1.0, "top_k": 1},
        "top_p": {"temperature": 1.0, "top_p": 0.0},
        "tiny top_p": {"temperature": 1.0, "top_p": 1e-12},
        "min_p": {"temperature": 1.0, "min_p": 1.0},
        "full greedy": {"logprobs": 1},
    }.items():
        requests = [loop.request(f"r{i}", ids, 8, **params) for i, ids in enumerate(prompts)]
        said[label] = ids_of(loop.run(loop.rescheduled(core), requests))
    assert len({str(one) for one in said.values()}) == 1, said


def test_filters_and_seeds_of_neighbours_change_nothing(core):
    """Eight rows, every kind of filter and the seeds of all neighbours changed between two runs."""
    prompt = tiny.random_ids("llama", 9)
    kinds = [{"top_k": top_k} for top_k in (-1, 1, 5, VOCAB_SIZE, 10**7)]
    kinds += [{"temperature": 0.0}, {"top_p": 0.5}, {"min_p": 0.2, "repetition_penalty": 1.3}]
    requests = [
        loop.request(f"r{i}", prompt, 10, **({"temperature": 1.0} | kind))
        for i, kind in enumerate(kinds)
    ]
    alone = loop.rescheduled(core, prefix_cache=False)
    expected = {one.request_id: solo(alone, one).token_ids for one in requests}
    assert ids_of(loop.run(loop.rescheduled(core), requests)) == expected
    strangers = [dataclasses.replace(one, seed=one.seed ^ 0xABCDEF) for one in requests]
    for kept in (0, 4, 6):
        crowd = [*strangers[:kept], requests[kept], *strangers[kept + 1 :]]
        found = ids_of(loop.run(loop.rescheduled(core), crowd))
        assert found[f"r{kept}"] == expected[f"r{kept}"]
        assert found != expected


def test_disabled_top_k_is_not_greedy(core):
    prompt = tiny.random_ids("llama", 9)
    greedy = solo(core, loop.request("a", prompt, 12)).token_ids
    said = {
        tuple(solo(core, loop.request("a", prompt, 12, temperature=2.0, top_k=top_k)).token_ids)
        for top_k in (0, -1, VOCAB_SIZE, 10**7)
    }
    assert len(said) == 1 and tuple(greedy) not in said


def contains(ids: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(ids[i : i + len(word)]) == word for i in range(len(ids)))


def test_bad_words_hold_for_every_choice(core):
    prompt = tiny.random_ids("llama", 9)
    asked = {"temperature": 0.7, "n": 3}
    free = loop.run(core, [loop.request("a", prompt, 10, **asked)])
    first = free["a", 1].token_ids[0]
    word = tuple(free["a", 2].token_ids[3:6])
    assert first not in word
    banned = {"bad_word_ids": ((first,), word)}
    found = loop.run(core, [loop.request("a", prompt, 10, **asked, **banned)])
    for choice in range(3):
        ids = found["a", choice].token_ids
        assert len(ids) == 10 and not contains(ids, (first,)) and not contains(ids, word)
    assert contains(free["a", 2].token_ids, word) and first in free["a", 1].token_ids


def test_penalties_work_before_there_is_any_output(core):
    free = solo(core, loop.request("a", [7], 1)).token_ids
    asked = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    penalised = solo(core, loop.request("a", [7], 6, logprobs=1, **asked))
    assert penalised.token_ids[:1] == free
    assert all(np.isfinite(one.logprob) for one in penalised.logprobs)


def test_seeded_request_draws_the_same_from_a_cold_and_a_warm_cache(core):
    request = loop.request("a", tiny.random_ids("llama", 21), 16, temperature=1.0, top_p=0.95)
    cold, warm = solo(core, request), solo(core, request)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 20)
    assert cold.token_ids == warm.token_ids
    other = dataclasses.replace(request, seed=request.seed + 1)
    assert solo(core, other).token_ids != cold.token_ids


def test_slot_forgets_the_constraints_of_its_last_owner(core):
    prompt = tiny.random_ids("llama", 9)
    constrained = {
        "allowed_token_ids": (7, 8, 9),
        "logit_bias": {8: 50.0},
        "bad_word_ids": ((9,),),
        "min_tokens": 3,
    }
    core = loop.rescheduled(core, max_rows=1, max_slots=1, prefix_cache=False)
    # The full sampler in both runs: it is the one that reads the tables.
    free = loop.request("free", prompt, 8, temperature=1.0)
    expected = solo(core, free)
    tied = solo(core, loop.request("tied", prompt, 5, (7,), temperature=1.0, **constrained))
    assert set(tied.token_ids) <= {7, 8}
    assert solo(core, free).said == expected.said


# --- lengths ---


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_output_fills_the_model_length_and_writes_nothing_past_it(core, depth):
    core = loop.rescheduled(core, depth=depth)
    outputs = loop.run(
        core,
        [
            loop.request("long", tiny.random_ids("llama", 90), MAX_MODEL_LEN - 90),
            loop.request("short", tiny.random_ids("llama", 9), MAX_MODEL_LEN - 9),
        ],
    )
    assert [len(one.token_ids) for one in outputs.values()] == [6, 87]
    assert {one.finish_reason for one in outputs.values()} == {"length"}
    # The last output id needs no place in the cache.
    assert int(np.asarray(core.runner.state.num_tokens).max()) == MAX_MODEL_LEN - 1


@pytest.mark.parametrize("max_chunk", [1, 2, 3, 4, 5])
def test_chunks_around_the_page_size_say_what_one_shot_says(core, max_chunk):
    requests = [
        loop.request(
            f"r{length}", tiny.random_ids("llama", length), 5, prompt_logprobs=1, logprobs=1
        )
        for length in (3, 4, 5, 8, 13)
    ]
    expected = loop.run(loop.rescheduled(core, prefix_cache=False), requests)
    chunked = loop.rescheduled(core, max_chunk=max_chunk)
    for is_warm in (False, True):
        found = loop.run(chunked, requests)
        for key, output in found.items():
            assert output.token_ids == expected[key].token_ids
            assert_close(output.prompt_logprobs, expected[key].prompt_logprobs)
            assert_close(output.logprobs, expected[key].logprobs)
        assert not is_warm or chunked.stats().prefix_queries > 0
    plain = [dataclasses.replace(one, params=loop.request("x", [1]).params) for one in requests]
    for key, output in loop.run(chunked, plain).items():
        assert output.token_ids == expected[key].token_ids
        length = int(key[0][1:])
        assert output.num_cached_tokens == (length - 1) // PAGE_SIZE * PAGE_SIZE


# --- caches ---

CANARY = 7.25


@pytest.mark.parametrize("sampler", [{}, {"temperature": 1.0}], ids=["greedy", "full"])
def test_padding_rows_and_tokens_write_to_page_zero_alone(core, sampler):
    # Three rows in programs of eight, chunks of 5 and 9 tokens in a program of 64.
    requests = [
        loop.request(f"r{i}", tiny.random_ids("llama", length), 6, **sampler)
        for i, length in enumerate((5, 9, 2))
    ]
    expected = {one.request_id: solo(core, one).token_ids for one in requests}
    core = loop.rescheduled(core, prefix_cache=False)
    runner = core.runner
    runner.state = runner.state.replace(
        pools=jax.tree.map(
            lambda pool: jax.device_put(np.full_like(pool, CANARY), pool.sharding),
            runner.state.pools,
        )
    )
    outputs: loop.Outputs = {}
    places: dict[str, list[int]] = {}
    for one in requests:
        core.submit(one)
    while not core.is_idle:
        core.step()
        loop.take(core, outputs)
        for live in core.scheduler._requests.values():
            choice = live.choices[0]
            if choice.slot >= 0:
                pages = core.scheduler._groups[0].table[choice.slot]
                name = choice.request.request_id
                places[name] = max(places.get(name, []), pages[pages > 0].tolist(), key=len)
    may_change = {
        (page, offset)
        for one in requests
        for position in range(len(one.prompt_ids) + one.max_tokens - 1)
        for page, offset in [(places[one.request_id][position // PAGE_SIZE], position % PAGE_SIZE)]
    }
    assert len(may_change) == 5 + 9 + 2 + 3 * 5
    for pool in jax.tree.leaves(runner.state.pools):
        is_changed = (np.asarray(pool) != CANARY).any(axis=(1, 2, 4))  # [P, page_size]
        changed = {(int(page), int(offset)) for page, offset in np.argwhere(is_changed)}
        assert {place for place in changed if place[0] > 0} == may_change
        assert any(page == 0 for page, _ in changed), "padding is written somewhere"
    assert ids_of(outputs) == expected


@pytest.mark.parametrize("depth", [2, 3])
def test_window_model_frees_pages_under_overlap_without_harm(window_core, depth):
    requests = [
        loop.request(f"r{length}", tiny.random_ids("mistral_swa", length), 60, logprobs=0)
        for length in (5, 9, 20, 30)
    ]
    roomy = loop.rescheduled(window_core, ids_from_host=True, prefix_cache=False)
    expected = loop.run(roomy, requests)
    # Whole contexts would take 16 to 23 pages each; 48 hold all four only if windows are freed.
    tight = loop.rescheduled(window_core, depth=depth, num_pages=49, prefix_cache=False)
    found: loop.Outputs = {}
    for one in requests:
        tight.submit(one)
    most_rows = 0
    while not tight.is_idle:
        tight.step()
        loop.take(tight, found)
        most_rows = max(most_rows, tight.stats().num_running)
    loop.assert_released(tight)
    assert most_rows == 4 and tight.stats().preemptions == 0
    assert ids_of(found) == ids_of(expected)
    for key, output in found.items():
        assert_close(output.logprobs, expected[key].logprobs)
