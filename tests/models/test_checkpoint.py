import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import checkpoint
from models.checkpoint import Leaf, Part

D, N, K, H, F, V = 12, 4, 2, 6, 20, 30
G = N // K


def heads(groups):
    return lambda w: w.reshape(K, groups, H, D).transpose(3, 0, 1, 2)


def layer_leaves(i, stored_as=lambda name: name):
    def part(name, shape, *rest):
        return Part(stored_as(f"model.layers.{i}.{name}"), shape, *rest)

    qkv = (
        part("q.weight", (N * H, D), (slice(None), slice(None), slice(0, G)), heads(G)),
        part("k.weight", (K * H, D), (slice(None), slice(None), slice(G, G + 1)), heads(1)),
        part("v.weight", (K * H, D), (slice(None), slice(None), slice(G + 1, G + 2)), heads(1)),
    )
    gate_up = (
        part("gate.weight", (F, D), (slice(None), 0), np.transpose),
        part("up.weight", (F, D), (slice(None), 1), np.transpose),
    )
    norm = (part("norm.weight", (D,)),)
    return {
        f"layers.{i}.qkv": Leaf((D, K, G + 2, H), qkv, (None, "tensor", None, None), fan_in=D),
        f"layers.{i}.gate_up": Leaf((D, 2, F), gate_up, (None, None, "tensor"), fan_in=D),
        f"layers.{i}.norm": Leaf((D,), norm, (None,), dtype="float32"),
    }


def small_leaves(layers=2):
    leaves = {"embed": Leaf((V, D), (Part("embed.weight", (V, D)),), ("tensor", None), fan_in=1)}
    for i in range(layers):
        leaves |= layer_leaves(i)
    return leaves


def tensors_of(leaves, dtype=np.float32):
    rng = np.random.default_rng(0)
    parts = {part.name: part.shape for leaf in leaves.values() for part in leaf.parts}
    return {
        name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in parts.items()
    }


def save_shards(folder, tensors, shards):
    names, index = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
        index |= dict.fromkeys(names[i::shards], file)
    (folder / checkpoint.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return index


def put(buffer, leaf):
    return jax.device_put(buffer)


def nothing(name):
    return False


def load(leaves, path, dtype="float32", ignore=nothing, **kwargs):
    source = checkpoint.open_source(path)
    return checkpoint.load(leaves, source, dtype=dtype, put=put, ignore=ignore, **kwargs)


def test_parts_land_in_their_regions(tmp_path):
    leaves = small_leaves()
    tensors = tensors_of(leaves)
    save_file(tensors, tmp_path / "model.safetensors")
    params = load(leaves, tmp_path)
    assert set(params) == {"embed", "layers"}
    assert set(params["layers"]["1"]) == {"qkv", "gate_up", "norm"}
    q, v = tensors["model.layers.1.q.weight"], tensors["model.layers.1.v.weight"]
    qkv = np.asarray(params["layers"]["1"]["qkv"])
    for head in range(N):
        rows = q[head * H : (head + 1) * H]
        assert (qkv[:, head // G, head % G] == rows.T).all()
    assert (qkv[:, 1, G + 1] == v[H:].T).all()
    assert (params["layers"]["0"]["gate_up"][:, 1] == tensors["model.layers.0.up.weight"].T).all()
    assert (np.asarray(params["embed"]) == tensors["embed.weight"]).all()


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_stored_dtype_is_cast_to_the_leafs(tmp_path, stored, wanted):
    leaves = small_leaves(1)
    tensors = tensors_of(leaves, stored)
    save_file(tensors, tmp_path / "model.safetensors")
    params = load(leaves, tmp_path, dtype=wanted)
    assert params["embed"].dtype == jnp.dtype(wanted)
    expected = tensors["embed.weight"].astype(np.float32).astype(jnp.dtype(wanted))
    assert (np.asarray(params["embed"]) == expected).all()
    norm = params["layers"]["0"]["norm"]
    assert norm.dtype == jnp.float32
    assert (np.asarray(norm) == tensors["model.layers.0.norm.weight"].astype(np.float32)).all()


def test_wide_transposes_are_copied_whole(tmp_path):
    shape = (3 * checkpoint.TRANSPOSE_COLUMNS + 5, 7)
    tensor = np.random.default_rng(1).standard_normal(shape, np.float32)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    leaves = {"w": Leaf(shape[::-1], (Part("w", shape, (), np.transpose),), (None, None))}
    assert (np.asarray(load(leaves, tmp_path)["w"]) == tensor.T).all()


def test_progress_counts_bytes_and_nodes_wrap_arrays(tmp_path):
    leaves = {
        "a.w": Leaf((4,), (Part("a", (4,)),), (None,), node=lambda array: ("dense", array)),
        "b": Leaf((2, 2), (Part("b", (2, 2)),), (None, None), dtype="float32"),
    }
    save_file(tensors_of(leaves), tmp_path / "model.safetensors")
    seen = []
    params = load(leaves, tmp_path, "bfloat16", progress=lambda *figures: seen.append(figures))
    assert seen == [(8, 24), (24, 24)]
    assert params["a"]["w"][0] == "dense"


def test_shards_of_the_index_are_read_and_no_other_file(tmp_path):
    leaves = small_leaves()
    tensors = tensors_of(leaves)
    save_shards(tmp_path, tensors, 3)
    save_file({"other.weight": np.ones(3, np.float32)}, tmp_path / "consolidated.safetensors")
    params = load(leaves, tmp_path)
    assert (np.asarray(params["embed"]) == tensors["embed.weight"]).all()


def test_without_an_index_all_shards_are_read_but_never_the_consolidated_file(tmp_path):
    leaves = small_leaves()
    tensors = tensors_of(leaves)
    save_shards(tmp_path, tensors, 3)
    (tmp_path / checkpoint.INDEX_FILE).unlink()
    save_file(tensors, tmp_path / "consolidated.safetensors")
    assert load(leaves, tmp_path)["embed"].shape == (V, D)


def test_a_single_file_is_a_checkpoint(tmp_path):
    leaves = small_leaves()
    save_file(tensors_of(leaves), tmp_path / "weights.safetensors")
    assert load(leaves, tmp_path / "weights.safetensors")["embed"].shape == (V, D)


# --- refusals: by name ---------------------------------------------------------------------


def test_missing_tensors_are_named_five_at_most_with_their_total(tmp_path):
    leaves = small_leaves(4)
    tensors = tensors_of(leaves)
    for name in list(tensors):
        if name.endswith(("k.weight", "v.weight")):
            del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"8 tensors \(model.layers.0.k.weight \[12, 12\], ") as e:
        load(leaves, tmp_path)
    assert str(e.value).count(".weight") == checkpoint.MAX_NAMES_IN_ERROR
    assert "use the weights that belong to this config.json" in str(e.value)


def test_left_over_tensors_are_named_unless_ignored(tmp_path):
    leaves = small_leaves()
    tensors = tensors_of(leaves) | {"model.vision.w": np.ones(2, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 tensor \(model.vision.w\) .* not expected"):
        load(leaves, tmp_path)
    assert load(leaves, tmp_path, ignore=lambda name: "vision" in name)["embed"].shape == (V, D)


def test_another_shape_is_named_with_both(tmp_path):
    leaves = small_leaves()
    tensors = tensors_of(leaves)
    tensors["model.layers.1.up.weight"] = tensors["model.layers.1.up.weight"].T.copy()
    save_file(tensors, tmp_path / "model.safetensors")
    expected = r"model.layers.1.up.weight is \[12, 20\], expected \[20, 12\]"
    with pytest.raises(ValueError, match=expected):
        load(leaves, tmp_path)


def test_an_empty_tensor_is_named(tmp_path):
    leaves = small_leaves()
    tensors = tensors_of(leaves) | {"embed.weight": np.ones((0, D), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 tensor \(embed.weight \[0, 12\]\) .* empty"):
        load(leaves, tmp_path)


def test_a_truncated_file_names_the_tensors_it_cuts(tmp_path):
    leaves = small_leaves()
    tensors = tensors_of(leaves)
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:-1])
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    last = max(
        (name for name in header if name in tensors), key=lambda n: header[n]["data_offsets"]
    )
    with pytest.raises(
        ValueError, match=rf"model.safetensors is truncated: .* 1 tensor \({last}\)"
    ):
        checkpoint.open_source(tmp_path)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"truncated or no safetensors file: .* has 100"):
        checkpoint.open_source(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"is empty \(0 bytes\)"):
        checkpoint.open_source(tmp_path)


def write_raw(file, header, num_bytes):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "num_bytes", "message"),
    [
        (b"{not json}", 8, "corrupt header"),
        (b"[" * 100_000, 8, "corrupt header"),
        (b"[1, 2, 3, 4]", 8, r"corrupt header \(not a table\)"),
        (b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe\xff\xfe", 8, "corrupt header"),
        ({"w": GOOD | {"dtype": "F31"}}, 8, "corrupt entry for tensor w"),
        ({"w": GOOD | {"shape": [3]}}, 8, "corrupt entry for tensor w"),
        ({"w": GOOD | {"shape": [-2]}}, 8, "corrupt entry for tensor w"),
        ({"w": GOOD | {"shape": 2}}, 8, "corrupt entry for tensor w"),
        ({"w": GOOD | {"data_offsets": [8, 0]}}, 8, "corrupt entry for tensor w"),
        ({"w": GOOD | {"data_offsets": [0]}}, 8, "corrupt entry for tensor w"),
        ({"w": {"dtype": "F32"}}, 8, "corrupt entry for tensor w"),
        ({"w": 3}, 8, "corrupt entry for tensor w"),
        ({"w": GOOD, "x": GOOD}, 8, "tensor x starts at byte"),
        ({"w": GOOD | {"data_offsets": [4, 12]}}, 12, "tensor w starts at byte"),
        ({"w": GOOD}, 9, "is corrupt: it has .* bytes but its tensors end at"),
    ],
)
def test_a_corrupt_file_is_refused_by_name(tmp_path, header, num_bytes, message):
    write_raw(tmp_path / "model.safetensors", header, num_bytes)
    with pytest.raises(ValueError, match=message):
        checkpoint.open_source(tmp_path)


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(ValueError, match="truncated or no safetensors file"):
        checkpoint.open_source(tmp_path)


def test_weights_in_an_integer_type_are_refused_by_name(tmp_path):
    save_file({"w": np.ones(4, np.int8)}, tmp_path / "model.safetensors")
    leaves = {"w": Leaf((4,), (Part("w", (4,)),), (None,))}
    with pytest.raises(ValueError, match="tensor w is stored as I8 but weights are read from F64"):
        load(leaves, tmp_path)


def test_a_shard_that_is_absent_is_named(tmp_path):
    save_shards(tmp_path, tensors_of(small_leaves()), 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 shard \(model-00002-of-00003.safetensors\)"):
        checkpoint.open_source(tmp_path)


def test_an_index_that_disagrees_with_its_shards_names_the_tensor(tmp_path):
    index = save_shards(tmp_path, tensors_of(small_leaves()), 2)
    moved = index | {"embed.weight": "model-00002-of-00002.safetensors"}
    (tmp_path / checkpoint.INDEX_FILE).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match=r"embed.weight \(in model-00002-of-00002.safetensors\)"):
        checkpoint.open_source(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "a/b.safetensors", 3])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path, file):
    (tmp_path / checkpoint.INDEX_FILE).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(ValueError, match="must be a file name in the same folder"):
        checkpoint.open_source(tmp_path)


def test_an_index_without_a_map_is_refused(tmp_path):
    (tmp_path / checkpoint.INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        checkpoint.open_source(tmp_path)


def test_one_name_in_two_shards_is_refused(tmp_path):
    for file in ("a", "b"):
        save_file({"w": np.ones(2, np.float32)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(ValueError, match=r"tensor w is in both a.safetensors and b.safetensors"):
        checkpoint.open_source(tmp_path)


def test_paths_without_weights_say_what_is_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"org/model' does not exist; .* not downloaded"):
        checkpoint.open_source("org/model")
    with pytest.raises(FileNotFoundError, match=r"pickled weights .* are not read"):
        checkpoint.open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"ends in '.bin'; give a .safetensors or .gguf file"):
        checkpoint.open_source(tmp_path / "pytorch_model.bin")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"has 2 .gguf files .*; give the path of one"):
        checkpoint.open_source(tmp_path)


def test_parts_that_do_not_fill_a_leaf_are_refused(tmp_path):
    save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "model.safetensors")
    hole = {"w": Leaf((3, 3), (Part("w", (2, 3), (slice(0, 2),)),), (None, None))}
    with pytest.raises(ValueError, match="parameter w has 9 elements but its parts fill 6"):
        load(hole, tmp_path)
    stretched = {"w": Leaf((2, 3), (Part("w", (2, 3), (), lambda w: w[:1]),), (None, None))}
    with pytest.raises(ValueError, match=r"tensor w is arranged to \(1, 3\) but fills .* \(2, 3\)"):
        load(stretched, tmp_path)


# --- dummy weights -------------------------------------------------------------------------


def test_dummy_weights_have_the_declared_spread_and_depend_on_seed_and_path():
    leaves = {
        "layers.0.w": Leaf((64, 128), (), (None, None), fan_in=64),
        "layers.1.w": Leaf((64, 128), (), (None, None), fan_in=64),
        "norm": Leaf((4096,), (), (None,), dtype="float32"),
    }
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def make(seed, some=leaves):
        return checkpoint.dummy(some, dtype="bfloat16", seed=seed, shardings=lambda _: sharding)

    params = make(0)
    first, second = (np.asarray(params["layers"][i]["w"], np.float32) for i in "01")
    assert params["layers"]["0"]["w"].dtype == jnp.bfloat16
    # 8192 normal values: their std is within 3% at 4 sigma.
    assert first.std() == pytest.approx(1 / 8, rel=0.03)
    assert params["norm"].dtype == jnp.float32
    assert float(params["norm"].mean()) == pytest.approx(1, abs=0.01)
    assert float(params["norm"].std()) == pytest.approx(0.1, rel=0.05)
    assert (first != second).mean() > 0.9
    same = make(0, {"layers.1.w": leaves["layers.1.w"]})["layers"]["1"]["w"]
    assert (np.asarray(same, np.float32) == second).all()
    assert (np.asarray(make(1)["layers"]["0"]["w"], np.float32) != first).mean() > 0.9


def test_dummy_compiles_once_per_shape_dtype_and_kind():
    shapes = {"a": (8, 16), "b": (8, 16), "c": (16, 8)}
    leaves = {
        name: Leaf(shape, (), (None, None), fan_in=i + 1)
        for i, (name, shape) in enumerate(shapes.items())
    }
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    compiled = []

    def count(event, _seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    key = jax.block_until_ready(jax.random.key(0))  # its own programs are compiled by now
    del key
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        checkpoint.dummy(leaves, dtype="float32", seed=0, shardings=lambda _: sharding)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert len(compiled) == 2


# --- memory --------------------------------------------------------------------------------

# 24 fused leaves of 8 MiB (bfloat16) from 3 shards, gate and up as they lie in files.
MEASURE = """
import sys, threading, time, gc
import jax, numpy as np
from models import checkpoint
from models.checkpoint import Leaf, Part

ROWS, D, LAYERS = 2048, 1024, 24

def leaves():
    made = {}
    for i in range(LAYERS):
        parts = tuple(
            Part(f"layers.{i}.{kind}.weight", (ROWS, D), (slice(None), at), np.transpose)
            for at, kind in enumerate(("gate", "up"))
        )
        made[f"layers.{i}.gate_up"] = Leaf((D, 2, ROWS), parts, (None, None, "tensor"))
    return made

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

peak = 0
def sample():
    global peak
    peak = max(peak, anonymous())

def watch():
    while watching:
        sample()
        time.sleep(0.001)

def put_away(buffer, leaf):
    # A device with memory of its own: the bytes leave the host.
    sample()
    return jax.device_put(float(buffer[0, 0, 0]))

def put_here(buffer, leaf):
    sample()
    return jax.device_put(buffer)

put = {"away": put_away, "here": put_here}[sys.argv[2]]
source = checkpoint.open_source(sys.argv[1])
def run(some):
    return checkpoint.load(
        some, source, dtype="bfloat16", put=put, ignore=lambda name: True,
    )
first = dict(list(leaves().items())[:1])
run(first)  # libraries and pools are warm: what is measured is the load
gc.collect()
before = anonymous()
watching = True
thread = threading.Thread(target=watch)
thread.start()
params = run(leaves())
watching = False
thread.join()
gc.collect()
idle = anonymous() if sys.argv[2] == "here" else before
print(peak - idle, idle - before)
"""


@pytest.mark.parametrize("where", ["away", "here"])
def test_loading_holds_at_most_two_of_the_largest_leaf(tmp_path, where):
    """`away`: a device's memory is not the host's. `here`: the CPU, above the loaded engine."""
    rows, d, layers = 2048, 1024, 24
    tensors = {
        f"layers.{i}.{kind}.weight": np.full((rows, d), 0.5, ml_dtypes.bfloat16)
        for i in range(layers)
        for kind in ("gate", "up")
    }
    save_shards(tmp_path, tensors, 3)
    largest = 2 * rows * d * 2
    slack = 2 << 20  # The allocator's and the sampling thread's own pages.
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), where],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    above_idle, kept = map(int, done.stdout.split())
    assert above_idle <= 2 * largest + slack
    assert kept == 0 if where == "away" else kept > 20 * largest


# --- config files --------------------------------------------------------------------------


def test_config_files_are_read_with_bare_infinity(tmp_path):
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "eos_token_id": 2}')
    config, generation = checkpoint.read_json_config(tmp_path)
    assert config["time_step_limit"] == [0.0, float("inf")]
    assert generation == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert checkpoint.eos_token_ids(*checkpoint.read_json_config(tmp_path)) == (2, 7)


def test_config_files_that_are_no_json_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        checkpoint.read_json_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(ValueError, match=r"config.json is not valid JSON \(.*line 1"):
        checkpoint.read_json_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config.json holds a list, a JSON object is expected"):
        checkpoint.read_json_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [5, 3]}, {"eos_token_id": 9}, (5, 3, 9)),
        ({"eos_token_id": None}, {}, ()),
        ({}, {"eos_token_id": [4]}, (4,)),
        ({"text_config": {"eos_token_id": 8}}, None, (8,)),
    ],
)
def test_eos_ids_are_the_union_of_both_files(config, generation, expected):
    assert checkpoint.eos_token_ids(config, generation) == expected


@pytest.mark.parametrize("value", ["2", [2, None], True, -1, 2.0])
def test_eos_ids_of_another_type_are_refused(value):
    with pytest.raises(ValueError, match=r"eos_token_id is .* must be an id of 0 or more"):
        checkpoint.eos_token_ids({"eos_token_id": value})
