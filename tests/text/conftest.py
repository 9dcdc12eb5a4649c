"""Tokenizers of both kinds: a real byte-level one, and a small one with byte-fallback tokens."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from engine.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="session")
def byte_fallback_backend() -> tokenizers.Tokenizer:
    words = ["▁", "a", "b", "A", "▁a", "ab", "▁ab", "▁▁"]
    spelt = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: id_ for id_, token in enumerate(spelt)},
            merges=[("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in spelt[:3]]
        + [AddedToken("<tool>", special=False, normalized=False)]
    )
    return backend


@pytest.fixture
def model_folder(tmp_path: Path, byte_fallback_backend: tokenizers.Tokenizer) -> Path:
    byte_fallback_backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "hi"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture(scope="session", params=["byte-level", "byte-fallback"])
def tokenizer(request, smollm2: Tokenizer, byte_fallback_backend) -> Tokenizer:
    if request.param == "byte-level":
        return smollm2
    copy = tokenizers.Tokenizer.from_str(byte_fallback_backend.to_str())
    return Tokenizer(copy, bos_id=1, eos_ids=[2])
