"""Reads a GGUF file: its metadata as an HF-style config, its tensors under HF names."""

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

Type = gguf.GGMLQuantizationType

ARCHITECTURES: Mapping[str, str] = {"llama": "LlamaForCausalLM"}
DEFAULT_ALIGNMENT = 32
# Read as they lie in the file; every other type is computed by the gguf package.
PLAIN_DTYPES: Mapping[Type, np.dtype] = {
    Type.F64: np.dtype(np.float64),
    Type.F32: np.dtype(np.float32),
    Type.F16: np.dtype(np.float16),
    Type.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Float32 elements computed at a time: bounds what stands beside the array being filled.
DEQUANTIZE_ELEMENTS = 1 << 20

SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9

GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Holds the llama3 frequency factors; config_from_gguf turns it into rope_scaling.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies and how it is coded."""

    type: Type
    shape: tuple[int, ...]
    """Rows first, as in numpy; the file lists the fastest dimension first."""
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """Everything before the data of one GGUF file."""

    metadata: Mapping[str, Any]
    """Numbers, strings and lists by key, among them tokenizer.ggml.*."""
    tensors: Mapping[str, StoredTensor]
    """By the file's own names."""


class _Cursor:
    """Walks the header, never past the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self._data):
            raise ValueError(
                f"{self._path.name} is truncated: its header goes on to byte {end} but the "
                f"file has {len(self._data)}; copy the file again"
            )
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(
                f"{self._path.name} has metadata of unknown type {kind} at byte "
                f"{self.position}; copy or convert the file again"
            )
        item, count = self.number("I"), self.number("Q")
        if item in SCALARS:
            code = SCALARS[item]
            items = self.take(count * struct.calcsize(code))
            return list(struct.unpack(f"<{count}{code}", items))
        if item != STRING:
            raise ValueError(
                f"{self._path.name} has a metadata list of type {item} at byte {self.position}; "
                "lists of numbers or strings are expected, convert the file again"
            )
        return self._texts(count)

    def _texts(self, count: int) -> list[str]:
        # A vocabulary has 10^5 strings: locals only, a quarter of the time of `text`.
        data, position, unpack = self._data, self.position, struct.Struct("<Q").unpack_from
        if count > (len(data) - position) // 8:
            self.take(count * 8)
        texts = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0] if start <= len(data) else start
            if position > len(data):
                self.take(position - self.position)
            texts.append(data[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return texts


def read_header(path: str | os.PathLike[str]) -> Header:
    """Parses the metadata and the table of tensors; 0.1 s for a vocabulary of 49,000.

    Raises:
      ValueError: no GGUF file of version 2 or 3, one part of a split model, or one that is
        truncated or corrupt; tensors that are cut are named.
    """
    path = Path(path)
    return _parse_header(path, _map(path))


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size == 0:
            raise ValueError(f"{path.name} is empty (0 bytes); copy the file again")
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def _parse_header(path: Path, data: mmap.mmap) -> Header:
    cursor = _Cursor(path, data)
    magic, version = cursor.take(4), cursor.number("I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(
            f"{path.name} starts with {magic!r} and version {version}, but b'GGUF' and version "
            "2 or 3 are read (little-endian); convert the model again"
        )
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    if metadata.get("split.count", 1) not in (0, 1):
        raise ValueError(
            f"{path.name} is one of {metadata['split.count']} parts of a model; merge the parts "
            "into one .gguf file"
        )
    entries = [_read_entry(path, cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(
            f"{path.name} has general.alignment {alignment!r}; it must be 1 or more, convert "
            "the model again"
        )
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, kind, shape, offset in entries:
        if name in tensors:
            raise ValueError(f"{path.name} lists tensor {name} twice; convert the model again")
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(shape) // block * block_bytes
        tensors[name] = StoredTensor(kind, shape, start + offset, num_bytes)
    _check_bounds(path, tensors, len(data))
    return Header(metadata, tensors)


def _read_entry(path: Path, cursor: _Cursor) -> tuple[str, Type, tuple[int, ...], int]:
    name, num_dims = cursor.text(), cursor.number("I")
    shape = tuple(cursor.number("Q") for _ in range(min(num_dims, 8)))[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in Type._value2member_map_ or not 1 <= num_dims <= 4:
        raise ValueError(
            f"{path.name}: tensor {name} has type {number} and {num_dims} dimensions; known "
            f"types end at {max(Type)} and 1 to 4 dimensions are expected; use a file made for "
            f"gguf {_package_version()} or older"
        )
    kind = Type(number)
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if shape[-1] % block:
        raise ValueError(
            f"{path.name}: tensor {name} has rows of {shape[-1]} elements but {kind.name} codes "
            f"{block} at a time; convert the model again"
        )
    return name, kind, shape, offset


def _package_version() -> str:
    from importlib import metadata

    return metadata.version("gguf")


def _check_bounds(path: Path, tensors: Mapping[str, StoredTensor], file_bytes: int) -> None:
    cut = [
        name for name, tensor in tensors.items() if tensor.offset + tensor.num_bytes > file_bytes
    ]
    if cut:
        needed = max(tensor.offset + tensor.num_bytes for tensor in tensors.values())
        raise ValueError(
            f"{path.name} is truncated: it has {file_bytes} bytes but {needed} are expected, "
            f"which cuts {_listed(cut)}; copy the file again"
        )


class GGUFSource:
    """Tensors of one GGUF file under HF names, computed one at a time.

    Query and key rows, which GGUF keeps in interleaved rotary order, come back in the
    half-split order of HF checkpoints.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the header; no tensor is touched.

        Raises:
          ValueError: as read_header and config_from_gguf, or tensors of a type that cannot
            be computed; at most five are named.
        """
        path = Path(path)
        self._data = _map(path)
        header = _parse_header(path, self._data)
        _check_types(path, header.tensors)
        self.config = _make_config(path, header, self._data)
        self._tensors = {
            _hf_name(name): tensor
            for name, tensor in header.tensors.items()
            if name != ROPE_FACTORS
        }

    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor; one without an HF name keeps its own."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One tensor: a view where the file holds plain floats in HF order, else computed.

        A computed one comes in `dtype` (float32 when None) and is filled in blocks of rows,
        so that no second copy of it exists.
        """
        tensor = self._tensors[name]
        rows = _stored_rows(self._data, tensor)
        order = self._row_order(name, tensor)
        if tensor.type in PLAIN_DTYPES:
            return (rows if order is None else rows[order]).reshape(tensor.shape)
        target = np.float32 if dtype is None else dtype
        values = np.empty((len(rows), tensor.shape[-1]), target)
        step = max(1, DEQUANTIZE_ELEMENTS // tensor.shape[-1])
        for start in range(0, len(rows), step):
            block = slice(start, start + step)
            coded = rows[block if order is None else order[block]]
            values[block] = gguf.dequantize(coded, tensor.type)
        return values.reshape(tensor.shape)

    def _row_order(self, name: str, tensor: StoredTensor) -> np.ndarray | None:
        """Stored row of each HF row, or None where they are the same."""
        if ".q_proj." in name:
            num_heads = self.config["num_attention_heads"]
        elif ".k_proj." in name:
            num_heads = self.config["num_key_value_heads"]
        else:
            return None
        num_rows = tensor.shape[0]
        if num_rows % (2 * num_heads):
            raise ValueError(
                f"tensor {name} has {num_rows} rows, which do not divide into {num_heads} heads "
                "of pairs; convert the model again"
            )
        pairs = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
        return pairs.swapaxes(1, 2).reshape(-1)


def _stored_rows(data: mmap.mmap, tensor: StoredTensor) -> np.ndarray:
    """A view by rows: [rows, width] floats ([n] for a vector), or [rows, bytes] when coded."""
    plain = PLAIN_DTYPES.get(tensor.type)
    if plain is not None:
        floats = np.frombuffer(data, plain, math.prod(tensor.shape), tensor.offset)
        return floats.reshape(tensor.shape)
    coded = np.frombuffer(data, np.uint8, tensor.num_bytes, tensor.offset)
    return coded.reshape(math.prod(tensor.shape[:-1]), -1)


def _check_types(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    unknown = {kind for kind in {t.type for t in tensors.values()} if not _is_readable(kind)}
    refused = [f"{name} {t.type.name}" for name, t in tensors.items() if t.type in unknown]
    if refused:
        readable = ", ".join(kind.name for kind in Type if _is_readable(kind))
        raise ValueError(
            f"{path.name} has {_listed(refused)} of a type that cannot be computed; convert "
            f"the model to one of {readable}"
        )


def _is_readable(kind: Type) -> bool:
    if kind in PLAIN_DTYPES:
        return True
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _listed(names: list[str]) -> str:
    more = ", ..." if len(names) > 5 else ""
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''} ({', '.join(names[:5])}{more})"


def _hf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}.{ending}"
    match = LAYER_TENSOR.fullmatch(name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    return name


def config_from_gguf(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The file's metadata under the keys of an HF config.json.

    The llama3 scaling, which GGUF keeps as a tensor of frequency factors, comes back as
    rope_scaling.

    Raises:
      ValueError: as read_header, or an architecture or rope scaling that is not known, or a
        key that is absent.
    """
    path = Path(path)
    data = _map(path)
    return _make_config(path, _parse_header(path, data), data)


def _make_config(path: Path, header: Header, data: mmap.mmap) -> dict[str, Any]:
    metadata, tensors = header.metadata, header.tensors
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path.name} has general.architecture {architecture!r}; GGUF is read for "
            f"{', '.join(ARCHITECTURES)}, use the model's safetensors checkpoint"
        )
    if metadata.get(f"{architecture}.expert_count"):
        raise ValueError(
            f"{path.name} has {metadata[f'{architecture}.expert_count']} experts; GGUF is read "
            "for dense models only, use the model's safetensors checkpoint"
        )

    number = partial(_number, path, metadata, architecture)
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path.name} has no tensor token_embd.weight; convert the model again")
    num_heads = number("attention.head_count")
    head_dim = number("attention.key_length", number("embedding_length") // num_heads)
    rotary_dim = number("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise ValueError(
            f"{path.name} rotates {rotary_dim} of {head_dim} head dimensions; only whole heads "
            "are read from GGUF, use the model's safetensors checkpoint"
        )
    theta = _shortest(number("rope.freq_base", 10000.0))
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(path, header, data, architecture, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        **_special_ids(metadata),
    }


def _number(
    path: Path, metadata: Mapping[str, Any], architecture: str, key: str, default: Any = None
) -> Any:
    value = metadata.get(f"{architecture}.{key}", default)
    if type(value) not in (int, float) or value <= 0:
        raise ValueError(
            f"{path.name} has {architecture}.{key} {value!r}; one positive number is expected, "
            "convert the model again"
        )
    return value


def _shortest(value: float) -> float:
    """The decimal that was meant: 1e-5 where float32 gives 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    # A chat model may end its turns with another id than its documents; both end a sequence.
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope_scaling(
    path: Path, header: Header, data: mmap.mmap, architecture: str, theta: float, head_dim: int
) -> dict[str, Any] | None:
    keys = {
        key.rpartition(".")[2]: value
        for key, value in header.metadata.items()
        if key.startswith(f"{architecture}.rope.scaling.")
    }
    kind = keys.get("type", "none")
    if kind == "none" and ROPE_FACTORS in header.tensors:
        factors = _stored_rows(data, header.tensors[ROPE_FACTORS])
        return _llama3_scaling(path, factors, theta, head_dim)
    if kind == "none":
        return None
    if kind != "linear" or "factor" not in keys:
        raise ValueError(
            f"{path.name} has rope scaling {kind!r} {keys}; none, linear with a factor, and the "
            "llama3 frequency factors are read from GGUF, use the safetensors checkpoint"
        )
    return {"rope_type": "linear", "factor": _shortest(keys["factor"])}


def _llama3_scaling(
    path: Path, factors: np.ndarray, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """The rope_scaling that makes exactly these frequency divisors, with Llama 3's bounds."""
    if (factors == 1).all():
        return None
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors[-1]),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    turns = 8192 / (2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = np.clip((turns - 1.0) / 3.0, 0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError(
            f"{path.name} has {ROPE_FACTORS} {factors.tolist()[:4]}..., which are not Llama 3's "
            "for this theta; use the model's safetensors checkpoint"
        )
    return scaling
