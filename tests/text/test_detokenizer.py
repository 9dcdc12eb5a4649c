"""Streamed text equals one-shot text, for any ids at all."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def streamed(tokenizer, ids, skip=True):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
def test_random_walk_streams_to_the_one_shot_text(tokenizer, skip):  # DETOK-02, DETOK-04
    rng = random.Random(0)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(2000)]
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_stream_to_the_one_shot_text(tokenizer, data):  # DETOK-02
    partial = [
        id_
        for id_ in range(tokenizer.vocab_size)
        if max(tokenizer.id_to_bytes(id_), default=0) > 127
    ]
    outside = st.sampled_from([-1, tokenizer.vocab_size, 2**40])
    ids = data.draw(
        st.lists(
            st.sampled_from(partial) | st.integers(0, tokenizer.vocab_size - 1) | outside,
            max_size=40,
        )
    )
    for skip in (True, False):
        assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=60, deadline=None)
# SmolLM2 has no tokens for some control characters and for the planes past the third.
@given(
    text=st.text(
        st.characters(
            max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"], exclude_characters=REPLACEMENT
        ),
        max_size=30,
    )
)
def test_valid_text_never_shows_a_replacement_on_the_way(tokenizer, text):  # DETOK-01, DETOK-02
    texts = streamed(tokenizer, tokenizer.encode(text, add_special_tokens=False), skip=False)
    assert REPLACEMENT not in "".join(texts)
    assert "".join(texts) == text


def test_character_comes_whole_with_its_last_token(smollm2):
    ids = smollm2.encode("☃")
    assert len(ids) > 1
    assert streamed(smollm2, ids) == [""] * (len(ids) - 1) + ["☃", ""]


def test_unfinished_character_is_replaced_once_at_the_end(smollm2):
    detokenizer = Detokenizer(smollm2)
    assert detokenizer.feed(smollm2.encode("☃")[0]) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_no_tokens_give_no_text(tokenizer):  # DETOK-05
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed_all([]) + detokenizer.flush() == ""
    assert detokenizer.feed_all(tokenizer.eos_ids) + detokenizer.flush() == ""


def test_leading_space_is_stripped_once_as_in_one_shot(byte_fallback_backend):
    tokenizer = Tokenizer(byte_fallback_backend)
    ids = [tokenizer.text_to_id(token) for token in ("<s>", "▁", "▁a", "▁▁", "b")]
    assert tokenizer.decode(ids) == " a  b"
    assert streamed(tokenizer, ids) == ["", "", " a", "  ", "b", ""]
