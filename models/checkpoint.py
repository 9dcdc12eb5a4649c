"""Reads checkpoint tensors by name and lays them into the parameter arrays a model declares."""

import hashlib
import json
import logging
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import traverse_util

from models import block_fp8

_LOG = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
# The limit of the safetensors format itself.
MAX_HEADER_BYTES = 100_000_000
MAX_NAMES_IN_ERROR = 5
# Columns copied at a time when a copy transposes: 1.3 GB/s against 0.3 GB/s for one plain
# assignment of a 4096 x 4096 bfloat16 matrix (2-core CPU machine, 2026-11-29).
TRANSPOSE_COLUMNS = 128

STORED_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Bytes of an element for the types that may lie in a file without being read as weights.
OTHER_STORED_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8, "C64": 8,
}  # fmt: skip


def identity(array: Any) -> Any:
    """Returns its argument: the default arrangement and the default node."""
    return array


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor and where it lands in a fused leaf."""

    name: str
    """Tensor name in the checkpoint, in its published spelling."""
    shape: tuple[int, ...]
    """Shape the tensor must have in the checkpoint."""
    index: tuple[int | slice, ...] = ()
    """Region of the leaf that it fills; () is the whole leaf."""
    arrange: Callable[[np.ndarray], np.ndarray] = identity
    """Maps the stored array to one of the region's shape; views cost no memory, copies do."""


@dataclass(frozen=True)
class Leaf:
    """One parameter array on the device."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    """Together they fill every element once."""
    partition: tuple[str | None, ...]
    """Mesh axis name per dimension, as in PartitionSpec(*partition)."""
    dtype: str | None = None
    """None takes the model's dtype."""
    node: Callable[[Any], Any] = identity
    """Wraps the array, or its abstract shape, into its pytree node."""
    parts_shape: tuple[int, ...] | None = None
    """The same elements in the shape that the parts' indexes speak of; None: `shape`."""
    fan_in: int | None = None
    """Dummy weights are normal with std 1/sqrt(fan_in); None makes 1 + 0.1 x normal."""


Leaves = Mapping[str, Leaf]
Progress = Callable[[int, int], None]


class Source(Protocol):
    """An opened checkpoint: float tensors by their published names."""

    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every stored tensor."""
        ...

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One tensor, as a view of the mapped file where its stored type allows.

        `dtype` is what the caller will cast to: a source that has to compute the values
        writes them in it, so that no wider copy exists.
        """
        ...


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor's bytes lie."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsSource:
    """Tensors of one or more safetensors files, read through memory maps."""

    def __init__(self, files: Sequence[Path], index: Mapping[str, str] | None = None) -> None:
        """Reads every header; no tensor is touched.

        Args:
          files: the shards.
          index: tensor name to file name; each must be where it says.

        Raises:
          ValueError: a file is truncated or corrupt, a tensor is in two files, or the
            index names a tensor that its file lacks.
        """
        self._tensors: dict[str, StoredTensor] = {}
        self._maps = {file: _map(file) for file in files}
        for file, data in self._maps.items():
            for name, tensor in _read_header(file, data).items():
                if name in self._tensors:
                    raise ValueError(
                        f"tensor {name} is in both {self._tensors[name].file.name} and "
                        f"{file.name}; keep one of them, or add {INDEX_FILE}"
                    )
                self._tensors[name] = tensor
        self._check_index(index or {})
        self._scales = self._block_scales()

    def _check_index(self, index: Mapping[str, str]) -> None:
        missing = [
            f"{name} (in {file})"
            for name, file in index.items()
            if name not in self._tensors or self._tensors[name].file.name != file
        ]
        if missing:
            raise ValueError(
                f"{_listed(missing, 'tensor')} named by {INDEX_FILE} not found in the file it "
                "names; copy the shards and their index again from one revision"
            )

    def _block_scales(self) -> Mapping[str, str]:
        """The name of its scales, for each weight that is stored as FP8 blocks."""
        scales = {}
        for name, tensor in self._tensors.items():
            scale = self._tensors.get(name + block_fp8.SCALE_SUFFIX)
            if tensor.dtype != "F8_E4M3" or scale is None:
                continue
            expected = block_fp8.scale_shape(tensor.shape)
            if len(tensor.shape) != 2 or scale.shape != expected:
                raise ValueError(
                    f"tensor {name} is {list(tensor.shape)} but its scales are "
                    f"{list(scale.shape)}, expected {list(expected)}, one per 128 x 128 block of "
                    "a matrix; use a checkpoint with such scales"
                )
            scales[name] = name + block_fp8.SCALE_SUFFIX
        if scales:
            _LOG.warning(
                "%s stored as FP8 blocks; they are dequantised to the model's dtype as they are "
                "read and take its memory",
                _listed(list(scales), "tensor"),
            )
        return scales

    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every stored tensor; the scales of FP8 blocks belong to their weights."""
        hidden = set(self._scales.values())
        return {name: one.shape for name, one in self._tensors.items() if name not in hidden}

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """A read-only view of one tensor in its stored dtype, or the values of its FP8 blocks.

        `dtype` is that of the latter, float32 without one; to a view it changes nothing.

        Raises:
          ValueError: the stored type is not one of float64, float32, float16, bfloat16, and no
            scales are stored with it.
        """
        scales = self._scales.get(name)
        if scales is not None:
            stored = self._view(name, np.dtype(np.uint8))
            return block_fp8.dequantised(stored, self.read(scales), dtype or np.dtype(np.float32))
        stored_dtype = STORED_DTYPES.get(self._tensors[name].dtype)
        if stored_dtype is None:
            raise ValueError(
                f"tensor {name} is stored as {self._tensors[name].dtype} but weights are read "
                f"from {', '.join(STORED_DTYPES)}, and from F8_E4M3 with {name}"
                f"{block_fp8.SCALE_SUFFIX}; use a checkpoint in one of these"
            )
        return self._view(name, stored_dtype)

    def _view(self, name: str, stored: np.dtype) -> np.ndarray:
        tensor = self._tensors[name]
        size = math.prod(tensor.shape)
        array = np.frombuffer(self._maps[tensor.file], stored, size, tensor.offset)
        return array.reshape(tensor.shape)


def open_source(path: str | os.PathLike[str]) -> Source:
    """Opens a checkpoint: headers are read and checked, tensors are not.

    Args:
      path: a folder with *.safetensors (the files of its index, where it has one), a folder
        with one .gguf, or one such file.

    Raises:
      FileNotFoundError: nothing to load at `path`, or a shard of the index is absent.
      ValueError: a file is truncated or corrupt, or the choice is not clear.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"model path {str(path)!r} does not exist; give a folder with *.safetensors or a "
            ".gguf file (models are not downloaded)"
        )
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".safetensors":
        return SafetensorsSource([path])
    if path.suffix == ".gguf":
        return _open_gguf(path)
    raise ValueError(
        f"model file {path.name!r} ends in {path.suffix!r}; give a .safetensors or .gguf file, "
        "or the folder that holds the shards"
    )


def _open_gguf(path: Path) -> Source:
    # Imported here: the quantisation tables are only needed for this format.
    from models import gguf

    return gguf.GGUFSource(path)


def _open_folder(folder: Path) -> Source:
    if (folder / INDEX_FILE).is_file():
        return _open_indexed(folder)
    shards = sorted(folder.glob("*.safetensors"))
    # Mistral's repositories carry the same weights again under other names in this file.
    shards = [file for file in shards if file.name != "consolidated.safetensors"] or shards
    if shards:
        return SafetensorsSource(shards)
    quantised = sorted(folder.glob("*.gguf"))
    if len(quantised) == 1:
        return _open_gguf(quantised[0])
    if quantised:
        raise ValueError(
            f"folder {str(folder)!r} has {len(quantised)} .gguf files "
            f"({_listed([file.name for file in quantised], 'file')}); give the path of one"
        )
    raise FileNotFoundError(
        f"folder {str(folder)!r} has no *.safetensors and no .gguf file; pickled weights "
        "(.bin, .pt) are not read, convert them to safetensors"
    )


def _open_indexed(folder: Path) -> SafetensorsSource:
    index = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(
            f"{INDEX_FILE} has no weight_map of tensor names to files; copy it again or remove "
            "it to load every *.safetensors of the folder"
        )
    for name, file in index.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{INDEX_FILE} places tensor {name} in {file!r}; it must be a file name in the "
                "same folder"
            )
    files = sorted(set(index.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{_listed(absent, 'shard')} of {INDEX_FILE} not found in {str(folder)!r}; copy the "
            f"missing files ({len(files)} are named)"
        )
    return SafetensorsSource([folder / file for file in files], index)


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size == 0:
            raise ValueError(f"{file.name} is empty (0 bytes); copy the file again")
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(file: Path, data: mmap.mmap) -> dict[str, StoredTensor]:
    """Tensors of one file, each proved to lie inside it and to touch no other."""
    start = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 10 <= start <= min(len(data), 8 + MAX_HEADER_BYTES):
        raise ValueError(
            f"{file.name} is truncated or no safetensors file: its header should end at byte "
            f"{start} but the file has {len(data)}; copy the file again"
        )
    try:
        header = json.loads(data[8:start])
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file.name} has a corrupt header ({error}); copy the file again"
        ) from error
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} has a corrupt header (not a table); copy the file again")
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(file, name, entry, start) for name, entry in header.items()}
    _check_layout(file, tensors, start, len(data))
    return tensors


def _parse_entry(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        stored = STORED_DTYPES.get(dtype)
        itemsize = stored.itemsize if stored is not None else OTHER_STORED_BYTES[dtype]
        are_sizes = all(type(size) is int and size >= 0 for size in (*shape, begin, end))
        if are_sizes and end - begin == math.prod(shape) * itemsize:
            return StoredTensor(file, dtype, shape, start + begin, end - begin)
    except (KeyError, TypeError, ValueError):
        pass  # Told below, as is an entry whose fields disagree.
    raise ValueError(
        f"{file.name} has a corrupt entry for tensor {name}: {str(entry)[:200]} does not give a "
        "known dtype, a shape and as many bytes as they need; copy the file again"
    )


def _check_layout(
    file: Path, tensors: Mapping[str, StoredTensor], start: int, file_bytes: int
) -> None:
    ordered = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes))
    cut = [name for name, tensor in ordered if tensor.offset + tensor.num_bytes > file_bytes]
    expected = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=start)
    if cut:
        raise ValueError(
            f"{file.name} is truncated: it has {file_bytes} bytes but {expected} are expected, "
            f"which cuts {_listed(cut, 'tensor')}; copy the file again"
        )
    position = start
    for name, tensor in ordered:
        if tensor.offset != position:
            raise ValueError(
                f"{file.name} is corrupt: tensor {name} starts at byte {tensor.offset} but the "
                f"one before it ends at {position}; copy the file again"
            )
        position += tensor.num_bytes
    if expected != file_bytes:
        raise ValueError(
            f"{file.name} is corrupt: it has {file_bytes} bytes but its tensors end at "
            f"{expected}; copy the file again"
        )


def load(
    leaves: Leaves,
    source: Source,
    *,
    dtype: Any,
    put: Callable[[np.ndarray, Leaf], jax.Array],
    ignore: Callable[[str], bool],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Builds the parameters leaf by leaf; the host holds one leaf's buffer at a time.

    Args:
      leaves: what the model declares, by dotted path.
      source: an opened checkpoint.
      dtype: the model's dtype, for leaves that name none.
      put: moves a filled host buffer of [*leaf.shape] to the device. The buffer is its to
        keep: it is never written again.
      ignore: tells of a stored tensor that no leaf wants whether it may be left out.
      progress: called with (bytes on the device, bytes in all) after each leaf.

    Returns:
      The pytree of nodes, nested along the dots of the paths.

    Raises:
      ValueError: tensors are missing, left over, empty or of another shape; at most five
        are named, with their total.
    """
    for path, leaf in leaves.items():
        _check_cover(path, leaf)
    _check_tensors(leaves, source.names(), ignore)
    sizes = {
        path: math.prod(leaf.shape) * _dtype(leaf, dtype).itemsize for path, leaf in leaves.items()
    }
    total, done, nodes = sum(sizes.values()), 0, {}
    for path, leaf in leaves.items():
        nodes[path] = leaf.node(_load_leaf(path, leaf, source, _dtype(leaf, dtype), put))
        done += sizes[path]
        if progress is not None:
            progress(done, total)
    return traverse_util.unflatten_dict(nodes, sep=".")


def load_host(leaves: Leaves, source: Source, *, dtype: Any) -> dict[str, np.ndarray]:
    """Tables that stay in host memory, whole tensors as they are stored.

    Args:
      leaves: tables by path, each one tensor.
      source: an opened checkpoint.
      dtype: the model's dtype, for sources that compute their values.

    Returns:
      [*leaf.shape] by path: a read-only view of the mapped file where its format allows, in the
      stored dtype, so that no page is read before its rows are asked for.

    Raises:
      ValueError: tensors are missing, empty or of another shape, or a table has several parts.
    """
    several = [path for path, leaf in leaves.items() if len(leaf.parts) != 1]
    if several:
        raise ValueError(
            f"{_listed(several, 'host table')} not made of one tensor each; correct the model's "
            "host leaves"
        )
    _check_tensors(leaves, source.names(), ignore=lambda name: True)
    return {
        path: source.read(leaf.parts[0].name, _dtype(leaf, dtype)) for path, leaf in leaves.items()
    }


def dummy_host(leaves: Leaves, *, dtype: Any, seed: int) -> dict[str, np.ndarray]:
    """Random tables made in host memory, as `dummy` makes parameters on the device."""
    tables = {}
    for path, leaf in leaves.items():
        key = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key)))
        values = generator.standard_normal(leaf.shape, np.float32)
        values *= np.float32((leaf.fan_in or 1) ** -0.5)
        tables[path] = values.astype(_dtype(leaf, dtype), copy=False)
    return tables


def _load_leaf(
    path: str,
    leaf: Leaf,
    source: Source,
    dtype: np.dtype,
    put: Callable[[np.ndarray, Leaf], jax.Array],
) -> jax.Array:
    buffer = np.empty(leaf.shape, dtype)
    view = buffer.reshape(leaf.parts_shape or leaf.shape)
    for part in leaf.parts:
        region = view[part.index]
        arranged = part.arrange(source.read(part.name, dtype))
        # numpy would stretch a smaller array over the region without a word.
        if arranged.shape != region.shape:
            raise ValueError(
                f"tensor {part.name} is arranged to {arranged.shape} but fills a region of "
                f"{region.shape} in parameter {path}; correct the model's leaves"
            )
        _copy(region, arranged)
        del arranged
    # Until the transfer is complete the buffer lives, so the next one must not exist yet.
    return jax.block_until_ready(put(buffer, leaf))


def _copy(region: np.ndarray, array: np.ndarray) -> None:
    """Assigns with a cast; a transposing copy goes in narrow columns that stay in the cache."""
    if array.ndim < 2 or array.strides[-1] == min(array.strides):
        region[...] = array
        return
    for middle in np.ndindex(array.shape[1:-1]):
        for start in range(0, array.shape[-1], TRANSPOSE_COLUMNS):
            tile = (slice(None), *middle, slice(start, start + TRANSPOSE_COLUMNS))
            region[tile] = array[tile]


def _check_tensors(
    leaves: Leaves, found: Mapping[str, tuple[int, ...]], ignore: Callable[[str], bool]
) -> None:
    wanted = {part.name: part.shape for leaf in leaves.values() for part in leaf.parts}
    missing = [f"{name} {list(shape)}" for name, shape in wanted.items() if name not in found]
    if missing:
        raise ValueError(
            f"{_listed(missing, 'tensor')} missing from the checkpoint, which has {len(found)}; "
            "use the weights that belong to this config.json, all shards of them"
        )
    extra = [name for name in found if name not in wanted and not ignore(name)]
    if extra:
        raise ValueError(
            f"{_listed(extra, 'tensor')} of the checkpoint not expected by the model, which "
            f"reads {len(wanted)}; check that config.json belongs to these weights"
        )
    empty = [f"{name} {list(found[name])}" for name in wanted if 0 in found[name]]
    if empty:
        raise ValueError(
            f"{_listed(empty, 'tensor')} of the checkpoint empty, elements are expected; copy "
            "or convert the checkpoint again"
        )
    misshaped = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if found[name] != shape
    ]
    if misshaped:
        raise ValueError(
            f"{_listed(misshaped, 'tensor')} of another shape than the config gives; check "
            "that config.json belongs to these weights"
        )


def _check_cover(path: str, leaf: Leaf) -> None:
    whole = np.broadcast_to(np.empty((), np.bool_), leaf.parts_shape or leaf.shape)
    filled = sum(whole[part.index].size for part in leaf.parts)
    if filled != whole.size:
        names = [part.name for part in leaf.parts]
        raise ValueError(
            f"parameter {path} has {whole.size} elements but its parts fill {filled} "
            f"({_listed(names, 'tensor')}); correct the model's leaves"
        )


def _listed(names: Sequence[str], noun: str) -> str:
    """At most five names, and how many there are: '2 tensors (a, b)'."""
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    more = ", ..." if len(names) > MAX_NAMES_IN_ERROR else ""
    return f"{len(names)} {noun}{'s' if len(names) != 1 else ''} ({shown}{more})"


def _dtype(leaf: Leaf, model_dtype: Any) -> np.dtype:
    return np.dtype(jnp.dtype(leaf.dtype or model_dtype))


def dummy(
    leaves: Leaves,
    *,
    dtype: Any,
    seed: int,
    shardings: Callable[[Leaf], jax.sharding.Sharding],
) -> dict[str, Any]:
    """Random parameters made where they stay; nothing passes through the host.

    A leaf's values depend on the seed, its path and its shape, not on the other leaves or
    the mesh. Leaves of one shape, dtype, kind and sharding share one compiled program.
    """
    makers: dict[Any, Callable[..., jax.Array]] = {}
    key = jax.random.key(seed)
    nodes = {}
    for path, leaf in leaves.items():
        sharding = shardings(leaf)
        kind = (leaf.shape, _dtype(leaf, dtype), leaf.fan_in is None, sharding)
        if kind not in makers:
            make = partial(_random, shape=leaf.shape, dtype=kind[1], is_norm=kind[2])
            makers[kind] = jax.jit(make, out_shardings=sharding)
        scale = np.float32(0.1 if leaf.fan_in is None else leaf.fan_in**-0.5)
        nodes[path] = leaf.node(makers[kind](key, _path_number(path), scale))
    return traverse_util.unflatten_dict(nodes, sep=".")


def abstract(
    leaves: Leaves, *, dtype: Any, shardings: Callable[[Leaf], jax.sharding.Sharding]
) -> dict[str, Any]:
    """Shape, dtype and sharding of every parameter, as `load` and `dummy` make them."""
    nodes = {
        path: leaf.node(
            jax.ShapeDtypeStruct(leaf.shape, _dtype(leaf, dtype), sharding=shardings(leaf))
        )
        for path, leaf in leaves.items()
    }
    return traverse_util.unflatten_dict(nodes, sep=".")


def _random(
    key: jax.Array,
    number: jax.Array,
    scale: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: np.dtype,
    is_norm: bool,
) -> jax.Array:
    values = scale * jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)
    return (1 + values if is_norm else values).astype(dtype)


def _path_number(path: str) -> np.uint32:
    return np.uint32(int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest()))


def read_json_config(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads (config.json, generation_config.json) of a folder; the second may be absent.

    Bare Infinity and NaN, which some published files carry, are accepted.

    Raises:
      FileNotFoundError: the folder has no config.json.
      ValueError: a file is no JSON object.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"folder {str(folder)!r} has no config.json; copy the one that belongs to the weights"
        )
    generation = folder / "generation_config.json"
    config = _read_json(folder / "config.json")
    return config, _read_json(generation) if generation.is_file() else {}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not valid JSON ({error}); copy it again") from error
    if not isinstance(data, dict):
        raise ValueError(
            f"{file.name} holds a {type(data).__name__}, a JSON object is expected; copy it again"
        )
    return data


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """Every id that ends a sequence: the union over both files, those of config.json first.

    Each gives one id, a list of them or none; a nested text_config counts with config.json.

    Raises:
      ValueError: eos_token_id is neither an id nor a list of ids.
    """
    ids: dict[int, None] = {}
    for mapping in (config, config.get("text_config") or {}, generation_config or {}):
        value = mapping.get("eos_token_id")
        listed = [] if value is None else value if isinstance(value, list | tuple) else [value]
        for token_id in listed:
            if type(token_id) is not int or token_id < 0:
                raise ValueError(
                    f"eos_token_id is {value!r}; it must be an id of 0 or more, or a list of them"
                )
            ids[token_id] = None
    return tuple(ids)
