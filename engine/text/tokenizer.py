"""Text to token ids and back, from a model folder's tokenizer.json or a GGUF file's metadata."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from models.gguf import read_header


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads the tokenizer of a checkpoint.

    Args:
      path: a folder with tokenizer.json or exactly one .gguf file, or a .gguf file.
    """
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return Tokenizer.from_gguf(path)
        raise ValueError(f"{path} is no .gguf file; give one or a folder with tokenizer.json")
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; give a model folder or a .gguf file")
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_directory(path)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return Tokenizer.from_gguf(gguf_files[0])
    raise FileNotFoundError(
        f"{path} holds no tokenizer.json and {len(gguf_files)} .gguf files; "
        "add the checkpoint's tokenizer.json or name one .gguf file"
    )


_BRIEF_CHARS = 1024
"""Up to here a text is encoded in about a millisecond, and never behind a long one of another
thread, which the library's own few threads may be busy with."""


class Tokenizer:
    """Encodes text and decodes ids. Immutable after loading and safe to share between threads.

    Decoded text is the UTF-8 reading of the joined bytes of the tokens, malformed bytes replaced,
    whatever the tokenizer's kind; so a token's bytes, streamed text and one-shot text always agree.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Takes over a loaded tokenizer.

        Args:
          backend: not used elsewhere afterwards.
          bos_id: id put before a prompt by models that want one.
          eos_ids: ids that end an answer, without repeats, as the tokenizer's files name them.
          special_tokens: template variables such as `bos_token` and their text.
          chat_templates: Jinja sources by name; `default` is the usual one.
        """
        # Files may ask for cutting and padding, which fit training and would corrupt a prompt.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._byte_reading = _ByteReading.of(backend.decoder)
        self._added_bytes = {id_: token.content.encode() for id_, token in added.items()}
        self._bytes_of: dict[int, bytes] = {}
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json, and the special ids and chat templates of the files beside it."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; copy it from the checkpoint")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file} cannot be read ({error}); copy it again") from error
        config = _read_json(folder / "tokenizer_config.json")
        generation, model = (
            _read_json(folder / name) for name in ("generation_config.json", "config.json")
        )
        special_tokens = _special_tokens(config)
        named = {
            name: _id_of(backend, special_tokens[name], folder / "tokenizer_config.json", name)
            for name in ("bos_token", "eos_token")
            if name in special_tokens
        }
        bos_ids = [*_ids_in(generation, "bos_token_id"), *_ids_in(model, "bos_token_id")]
        return cls(
            backend,
            bos_id=named["bos_token"] if "bos_token" in named else next(iter(bos_ids), None),
            eos_ids=(
                *([named["eos_token"]] if "eos_token" in named else []),
                *_ids_in(generation, "eos_token_id"),
                *_ids_in(model, "eos_token_id"),
            ),
            special_tokens=special_tokens,
            chat_templates=_chat_templates(folder, config),
        )

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """Builds the tokenizer a GGUF file describes; byte-level BPE only."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; give a .gguf file")
        return _from_gguf_metadata(path, read_header(path).metadata)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return "default" in self.chat_templates

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the model's own prefix and suffix ids unless told otherwise.

        The text of special tokens inside `text` becomes those tokens. A rendered chat template
        already holds them: encode it with `add_special_tokens=False`. A byte for which a
        byte-level vocabulary has no token (SmolLM2 lacks some control characters) is left out.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {type(text).__name__}")
        try:
            if len(text) <= _BRIEF_CHARS:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            # Of the library's calls only those for batches leave the interpreter to other threads.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return encoding.ids
        except TypeError as error:  # what the library makes of half a surrogate pair
            place = next(i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff")
            raise ValueError(
                f"text holds half a surrogate pair at character {place}; send valid Unicode"
            ) from error

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids without a token, such as a padded vocabulary's, add nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.id_to_bytes(id_) for id_ in token_ids if id_ not in skipped)
        text = data.decode("utf-8", "replace")
        num_spaces = len(text) - len(text.lstrip(" "))
        return text[min(num_spaces, self.num_stripped_spaces) :]

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for, maybe a part of a character; empty without a token."""
        data = self._bytes_of.get(token_id)
        if data is None:
            data = self._bytes_of[token_id] = self._read_bytes(token_id)
        return data

    def id_to_text(self, token_id: int) -> str:
        """The token alone as text, for people to read; different ids may look the same."""
        return self.id_to_bytes(token_id).decode("utf-8", "replace")

    def to_json(self) -> str:
        """What a tokenizer.json holds that makes this tokenizer again."""
        return self._backend.to_str()

    def text_to_id(self, token: str) -> int | None:
        """The id of the token spelt `token` in the tokenizer's file."""
        return self._backend.token_to_id(token)

    @property
    def num_stripped_spaces(self) -> int:
        """Leading spaces that decoding removes, because encoding put them there."""
        return self._byte_reading.num_stripped_spaces

    def _read_bytes(self, token_id: int) -> bytes:
        if token_id in self._added_bytes:
            return self._added_bytes[token_id]
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if token is None else self._byte_reading.read(token)

    def __repr__(self) -> str:
        ids = f"bos_id={self.bos_id}, eos_ids={self.eos_ids}"
        return f"Tokenizer(vocab_size={self.vocab_size}, {ids})"


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins of GPT-2's byte-level BPE: character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


@dataclasses.dataclass(frozen=True)
class _ByteReading:
    """How the spelling of a token in the vocabulary stands for bytes."""

    is_byte_level: bool = False
    has_byte_tokens: bool = False  # spelt <0x0A>
    replacements: tuple[tuple[str, str], ...] = ()
    num_stripped_spaces: int = 0

    @classmethod
    def of(cls, decoder: decoders.Decoder | None) -> _ByteReading:
        if decoder is None:
            return cls()
        description = json.loads(decoder.__getstate__())
        steps = description["decoders"] if description["type"] == "Sequence" else [description]
        reading = cls()
        for step in steps:
            reading = reading._with_step(step)
        return reading

    def _with_step(self, step: dict[str, Any]) -> _ByteReading:
        match step:
            case {"type": "ByteLevel"}:
                return dataclasses.replace(self, is_byte_level=True)
            case {"type": "ByteFallback"}:
                return dataclasses.replace(self, has_byte_tokens=True)
            case {"type": "Fuse"}:
                return self
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                return self._replacing(pattern, content)
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                return dataclasses.replace(self, num_stripped_spaces=start)
            case {"type": "Metaspace", "replacement": pattern, "prepend_scheme": scheme}:
                reading = self._replacing(pattern, " ")
                return dataclasses.replace(reading, num_stripped_spaces=int(scheme != "never"))
            case _:
                raise ValueError(
                    f"tokenizer.json asks for the decoder {json.dumps(step)}; Treadle reads "
                    "ByteLevel, ByteFallback, Fuse, Metaspace, Replace of a string and Strip of "
                    "leading spaces"
                )

    def _replacing(self, pattern: str, content: str) -> _ByteReading:
        return dataclasses.replace(self, replacements=(*self.replacements, (pattern, content)))

    def read(self, token: str) -> bytes:
        if self.has_byte_tokens and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            return bytes.fromhex(token[3:5])
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        if self.is_byte_level and all(char in _BYTE_LEVEL_ALPHABET for char in token):
            return bytes(_BYTE_LEVEL_ALPHABET[char] for char in token)
        return token.encode()


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not an object; copy it again")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by their name in tokenizer_config.json, where they are text or an object."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _id_of(backend: tokenizers.Tokenizer, token: str, file: Path, name: str) -> int:
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise ValueError(
            f"{file}: {name} is {token!r}, which tokenizer.json lacks; correct one of them"
        )
    return token_id


def _ids_in(config: Mapping[str, Any], name: str) -> list[int]:
    """Ids under `name`, written as a number or a list of numbers."""
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id_ in ids:
        if not isinstance(id_, int) or isinstance(id_, bool) or id_ < 0:
            raise ValueError(f"{name} holds {id_!r}; it must be a token id or a list of token ids")
    return ids


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file of their own wins over tokenizer_config.json."""
    written = config.get("chat_template")
    if isinstance(written, list):
        templates = {entry["name"]: entry["template"] for entry in written}
    else:
        templates = {} if written is None else {"default": written}
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates


_GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


# GGUF files name how text is cut into words before the merges; the name is all they say of it.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _words(_GPT2_WORDS),
    "llama-bpe": lambda: _words(_LLAMA3_WORDS),
    "qwen2": lambda: _words(_QWEN2_WORDS),
    "smollm": _single_digits,
}
_CONTROL, _USER_DEFINED = 3, 4  # token types that are matched in text before any merge


def _from_gguf_metadata(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    def read(name: str) -> Any:
        return metadata.get(f"tokenizer.{name}")

    kind, pre = read("ggml.model"), read("ggml.pre")
    if kind != "gpt2":
        raise ValueError(
            f"{path}: tokenizer model {kind!r} is not supported, only 'gpt2' (byte-level BPE); "
            "use the checkpoint's tokenizer.json"
        )
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: pre-tokenizer {pre!r} is not known, only {', '.join(_PRE_TOKENIZERS)}; "
            "use the checkpoint's tokenizer.json"
        )
    tokens, merges, types = read("ggml.tokens"), read("ggml.merges"), read("ggml.token_type")
    if not tokens or merges is None or types is None or len(types) != len(tokens):
        raise ValueError(
            f"{path}: tokenizer.ggml.tokens, merges or token_type is missing or too short; "
            "copy it again"
        )
    backend = _byte_level_bpe(path, pre, tokens, merges, types)
    ids = {name: read(f"ggml.{name}_token_id") for name in ("bos", "eos", "eot", "unknown")}
    ids = {name: id_ for name, id_ in ids.items() if id_ is not None}
    for name, id_ in ids.items():
        if not 0 <= id_ < len(tokens):
            raise ValueError(
                f"{path}: tokenizer.ggml.{name}_token_id is {id_}, the vocabulary has "
                f"{len(tokens)} tokens; copy it again"
            )
    if read("ggml.add_bos_token") and "bos" in ids:
        bos = tokens[ids["bos"]]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, ids["bos"])]
        )
    variables = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown"}
    template = read("chat_template")
    return Tokenizer(
        backend,
        bos_id=ids.get("bos"),
        eos_ids=[ids[name] for name in ("eos", "eot") if name in ids],
        special_tokens={
            variable: tokens[ids[name]] for variable, name in variables.items() if name in ids
        },
        chat_templates={} if template is None else {"default": template},
    )


def _byte_level_bpe(
    path: Path, pre: str, tokens: list[str], merges: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    try:
        model = models.BPE(
            vocab={token: id_ for id_, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
            ignore_merges=pre == "llama-bpe",  # Llama 3 takes a whole word that is a token as it is
        )
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: tokenizer.ggml.merges is malformed ({error})") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=type_ == _CONTROL, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend
