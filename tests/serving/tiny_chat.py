"""Writes a tiny chat model: three Llama layers of fixed weights and a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.families import tiny

SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 256 + len(SPECIAL)
EOS = 257
TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(directory: Path) -> Path:
    """A folder with config.json, weights, tokenizer and chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny.config("llama") | {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "bos_token_id": 256,
        "eos_token_id": EOS,
    }
    (directory / "config.json").write_text(json.dumps(config))
    arrays = tiny.tensors("llama")
    generator = np.random.Generator(np.random.Philox(key=7))
    shape = (VOCAB_SIZE, config["hidden_size"])
    for name, scale in (("model.embed_tokens.weight", 0.7), ("lm_head.weight", 0.5)):
        arrays[name] = generator.standard_normal(shape, np.float32) * np.float32(scale)
    # Of the letters the likeliest is far likelier than anything else: outputs are text to read.
    letters = [token_id for char, token_id in _alphabet().items() if char.isascii()]
    arrays["lm_head.weight"][np.setdiff1d(np.arange(VOCAB_SIZE), letters)] = 0.0
    save_file(arrays, directory / "model.safetensors")
    tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": SPECIAL[0],
                "eos_token": SPECIAL[1],
                "chat_template": TEMPLATE,
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        )
    )
    return directory


def tokenizer() -> Tokenizer:
    """Every byte is a token; then the special ones."""
    made = Tokenizer(models.BPE(vocab=_alphabet(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return made


def _alphabet() -> dict[str, int]:
    return {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
