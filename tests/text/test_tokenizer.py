"""Loading, encoding and decoding, with SmolLM2's own vocabulary and a small byte-fallback one."""

import json
import random
import threading

import pytest
import tokenizers
from tokenizers import decoders, models

from engine.text import tokenizer as tokenizer_module
from engine.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "12 345  6 runs   7",
    "it's\n\n\ttabs ",
    "日本語 ☃ 👩‍👩‍👧 naïve",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_smollm_cuts_digits_apart_before_words(smollm2):
    spelt = [smollm2.id_to_text(id_) for id_ in smollm2.encode("in  123")]
    assert spelt == ["in", "  ", "1", "2", "3"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ"]),
        ("gpt-2", ["It", "'s", "Ġ1234", "ĊĊ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "ĊĊ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ"]),
    ],
)
def test_gguf_pre_tokenizers_cut_words_as_named(name, words):
    cut = tokenizer_module._PRE_TOKENIZERS[name]().pre_tokenize_str("It's 1234\n\n")
    assert [word for word, _ in cut] == words


def test_gguf_metadata_gives_special_ids_and_template(smollm2):
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.vocab_size) == (1, (2,), 49152)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.has_chat_template
    assert smollm2.encode("<|im_start|>user") == [1, 4093]


def test_decode_equals_the_library_on_random_ids(smollm2):
    rng = random.Random(0)
    for skip in (True, False):
        ids = [rng.randrange(smollm2.vocab_size) for _ in range(2000)]
        assert smollm2.decode(ids, skip) == smollm2._backend.decode(ids, skip_special_tokens=skip)


def test_decode_equals_the_library_on_encoded_text(tokenizer):
    for text in [*TEXTS, " leading", "  two", "ab AB"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


def test_joined_bytes_of_tokens_are_the_text(tokenizer):  # DETOK-01
    text = "naïve 日本語 👩‍👩‍👧"
    data = b"".join(tokenizer.id_to_bytes(id_) for id_ in tokenizer.encode(text))
    assert data.decode().removeprefix(" " * tokenizer.num_stripped_spaces) == text


def test_ids_that_look_alike_keep_their_own_bytes(smollm2):  # DETOK-07
    first, second, *_ = smollm2.encode("日☃")
    broken = [
        id_
        for id_ in range(smollm2.vocab_size)
        if smollm2.id_to_text(id_) == "\N{REPLACEMENT CHARACTER}"
    ]
    assert first != second and len(broken) > 100
    assert len({smollm2.id_to_bytes(id_) for id_ in broken}) == len(broken)


def test_ids_of_equal_bytes_stay_two_ids(model_folder):  # DETOK-07
    tokenizer = load_tokenizer(model_folder)
    letter, byte = tokenizer.text_to_id("A"), tokenizer.text_to_id("<0x41>")
    assert letter != byte
    assert tokenizer.id_to_bytes(letter) == tokenizer.id_to_bytes(byte) == b"A"


@pytest.mark.parametrize("token_id", [-1, 49152, 2**31 - 1, 2**40])
def test_id_without_a_token_adds_nothing(smollm2, token_id):
    assert smollm2.id_to_bytes(token_id) == b""
    assert smollm2.decode([504, token_id]) == "The"


def test_skipping_special_tokens_keeps_the_other_added_ones(model_folder):
    tokenizer = load_tokenizer(model_folder)
    ids = [tokenizer.text_to_id(token) for token in ("<s>", "a", "<tool>", "</s>")]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a<tool></s>"


@pytest.mark.parametrize(
    ("file", "content", "eos_ids"),
    [
        ("generation_config.json", {"eos_token_id": 0}, (2, 0)),
        ("generation_config.json", {"eos_token_id": [5, 2]}, (2, 5)),
        ("config.json", {"eos_token_id": [7, 8]}, (2, 7, 8)),
        ("config.json", {"eos_token_id": None}, (2,)),
        ("tokenizer_config.json", {}, ()),
    ],
)
def test_eos_ids_are_the_union_of_what_the_files_name(model_folder, file, content, eos_ids):
    (model_folder / file).write_text(json.dumps(content))
    assert load_tokenizer(model_folder).eos_ids == eos_ids


def test_bos_of_the_model_serves_where_the_tokenizer_names_none(model_folder):
    (model_folder / "tokenizer_config.json").write_text("{}")
    (model_folder / "config.json").write_text('{"bos_token_id": 0}')
    assert load_tokenizer(model_folder).bos_id == 0


def test_truncation_asked_for_by_the_file_is_ignored(model_folder, byte_fallback_backend):
    cutting = tokenizers.Tokenizer.from_str(byte_fallback_backend.to_str())
    cutting.enable_truncation(2)
    cutting.save(str(model_folder / "tokenizer.json"))
    assert (
        load_tokenizer(model_folder).decode(load_tokenizer(model_folder).encode("ababab"))
        == "ababab"
    )


def test_template_file_wins_over_the_config(model_folder):
    assert load_tokenizer(model_folder).chat_templates == {"default": "hi"}
    (model_folder / "chat_template.jinja").write_text("own")
    assert load_tokenizer(model_folder).chat_templates == {"default": "own"}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read .* copy it again"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
        ("config.json", "[]", r"config\.json holds a list, not an object"),
        (
            "tokenizer_config.json",
            '{"eos_token": "<end>"}',
            "eos_token is '<end>', which tokenizer",
        ),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id holds '2'"),
    ],
)
def test_broken_file_is_named(model_folder, file, content, message):
    (model_folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(model_folder)


def test_decoder_of_an_unknown_kind_is_named():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.CTC()
    with pytest.raises(ValueError, match=r'decoder \{"type": "CTC".*Treadle reads ByteLevel'):
        Tokenizer(backend)


def test_places_without_a_tokenizer_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; give a model folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json and 0 \.gguf files"):
        load_tokenizer(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"a\.gguf is truncated"):
        load_tokenizer(tmp_path)
    (tmp_path / "words.txt").touch()
    with pytest.raises(ValueError, match=r"words\.txt is no \.gguf file"):
        load_tokenizer(tmp_path / "words.txt")


def _metadata(**changed):
    values = {
        "ggml.model": "gpt2",
        "ggml.pre": "llama-bpe",
        "ggml.tokens": ["a", "b", "ab", "<s>", "</s>", "<eot>"],
        "ggml.token_type": [1, 1, 1, 3, 3, 3],
        "ggml.merges": ["a b"],
        "ggml.bos_token_id": 3,
        "ggml.eos_token_id": 4,
        "ggml.eot_token_id": 5,
        "ggml.add_bos_token": True,
    }
    values |= {f"ggml.{name}": value for name, value in changed.items()}
    return {f"tokenizer.{name}": value for name, value in values.items()}


def test_gguf_that_asks_for_bos_gets_it_before_the_prompt_only():
    built = tokenizer_module._from_gguf_metadata("m.gguf", _metadata())
    assert built.encode("ab") == [3, 2]
    assert built.encode("ab", add_special_tokens=False) == [2]
    assert built.eos_ids == (4, 5)
    assert not built.has_chat_template


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pre": "tekken"}, r"pre-tokenizer 'tekken' is not known, only gpt-2, llama-bpe, qwen2"),
        ({"model": "llama"}, r"tokenizer model 'llama' is not supported, only 'gpt2'"),
        ({"token_type": [1]}, "token_type is missing or too short"),
        ({"merges": ["ab"]}, r"merges is malformed"),
        ({"merges": ["a z"]}, r"merges is malformed"),
        ({"eos_token_id": 6}, r"eos_token_id is 6, the vocabulary has 6 tokens"),
    ],
)
def test_gguf_metadata_that_cannot_serve_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_module._from_gguf_metadata("m.gguf", _metadata(**changed))


def test_text_that_is_no_text_is_refused(smollm2):
    with pytest.raises(ValueError, match="text must be a string, got int"):
        smollm2.encode(7)
    with pytest.raises(ValueError, match="half a surrogate pair at character 2"):
        smollm2.encode("ab\ud800")


def test_long_text_is_encoded_like_a_short_one_and_refused_like_it(smollm2):
    text = "Once upon a time, <|im_start|> 1234 \u00e9\n" * 100
    assert len(text) > tokenizer_module._BRIEF_CHARS
    assert smollm2.encode(text) == smollm2._backend.encode(text).ids
    with pytest.raises(ValueError, match="half a surrogate pair at character 3000"):
        smollm2.encode(text[:3000] + "\ud800")


def test_other_threads_run_while_a_long_text_is_encoded(smollm2):
    ticks, is_over = [], threading.Event()

    def tick():
        while not is_over.wait(0.001):
            ticks.append(True)

    ticker = threading.Thread(target=tick)
    ticker.start()
    while not ticks:
        pass
    before = len(ticks)
    num_ids = len(smollm2.encode("a " * 200_000))
    during = len(ticks) - before
    is_over.set()
    ticker.join()
    # With the interpreter kept there is one tick at most; some 500 ms have room for hundreds.
    assert num_ids == 200_001 and during >= 8
