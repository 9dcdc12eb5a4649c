"""Checkpoints and configs as they come: contradicting flags, old names, shards, long contexts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from engine.execution.buckets import ProgramKey
from engine.execution.packing import Packed
from engine.execution.step import lay_out
from models import attention, checkpoint, decoder_config, layers, registry
from models.batch import Batch, Tiling
from models.cache import open_cache
from models.layers import RopeConfig
from tests.families import tiny
from tests.models import forward_adapter

GOLDENS = Path(__file__).parents[1] / "goldens"
GATE = 5e-5
"""Of the logits' standard deviation, as in the parity tests."""
LENGTH = 17


def error(name: str, folder: Path) -> float:
    """Largest error of a folder's logits against the golden, in standard deviations."""
    model = registry.of_config(checkpoint.read_json_config(folder)[0])
    params = forward_adapter.load_params(model, checkpoint.open_source(folder))
    with np.load(GOLDENS / f"{name}.npz") as stored:
        logits = forward_adapter.full_logits(model, params, stored[f"ids_{LENGTH}"], page_size=16)
        wanted = stored[f"logits_{LENGTH}"]
        return float(np.abs(logits - wanted).max() / stored["std"])


def rewritten(folder: Path, **fields) -> Path:
    """config.json with these fields; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: v for name, v in config.items() if v is not None}))
    return folder


# --- MODEL-10: tie_word_embeddings ---


@pytest.mark.parametrize("flag", [False, None], ids=["false", "absent"])
def test_head_tensor_is_read_where_the_flag_is_false_or_absent(flag, tmp_path):
    folder = rewritten(tiny.write_checkpoint("llama", tmp_path), tie_word_embeddings=flag)
    assert error("llama", folder) <= GATE


@pytest.mark.parametrize("name", ["llama_tied_bias", "qwen3_tied"])
def test_embedding_is_the_head_where_the_flag_is_true_and_no_head_is_stored(name, tmp_path):
    assert error(name, tiny.write_checkpoint(name, tmp_path)) <= GATE


@pytest.mark.parametrize("flag", [False, None], ids=["false", "absent"])
def test_missing_head_is_named_unless_the_flag_ties_it(flag, tmp_path):
    folder = rewritten(tiny.write_checkpoint("qwen3_tied", tmp_path), tie_word_embeddings=flag)
    with pytest.raises(ValueError, match=r"1 tensor \(lm_head.weight \[\d+, \d+\]\) missing"):
        error("qwen3_tied", folder)


@pytest.mark.parametrize("name", ["llama_tied_bias", "qwen3_tied"])
def test_stored_copy_of_the_embedding_does_not_stop_a_tied_model(name, tmp_path):
    folder = tiny.write_checkpoint(name, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, file)
    assert error(name, folder) <= GATE


# --- MODEL-15: attention_bias ---


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("LlamaForCausalLM", {"q", "k", "v", "o"}),
        ("Qwen3ForCausalLM", {"q", "k", "v", "o"}),
    ],
)
@pytest.mark.parametrize("flag", [True, False, None], ids=["true", "false", "absent"])
def test_attention_bias_asks_for_exactly_its_tensors(name, tensors, flag):
    config = dict(registry.get(name).example) | {"architectures": [name]}
    model = registry.of_config(config if flag is None else config | {"attention_bias": flag})
    wanted = {part.name for leaf in model.leaves().values() for part in leaf.parts}
    biases = {one for one in wanted if one.endswith(".bias") and "self_attn" in one}
    expected = {
        f"model.layers.{i}.self_attn.{kind}_proj.bias"
        for i in range(model.config.num_layers)
        for kind in tensors
    }
    assert biases == (expected if flag else set())


# --- MODEL-18, MODEL-21, MODEL-22, MODEL-23: rotary embedding ---

LLAMA_31 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def llama3_frequencies(head_dim: int) -> list[float]:
    """The published rule in float64, one frequency at a time."""
    found = []
    for i in range(0, head_dim, 2):
        frequency = 500000.0 ** (-i / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            found.append(frequency)
        elif wavelength > 8192 / 1:
            found.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            found.append((1 - smooth) * frequency / 8 + smooth * frequency)
    return found


def test_llama_31_frequencies_equal_the_rule_in_float64():
    rope = decoder_config.parse_rope(LLAMA_31, head_dim=128, max_positions=131072)
    expected = llama3_frequencies(128)
    plain = RopeConfig(theta=500000.0, head_dim=128).inverse_frequencies()
    ratios = plain / np.array(expected)
    assert ((ratios > 1.01) & (ratios < 7.9)).any(), "the blended band is not empty"
    # float32: a relative step is 6e-8, and a power and a blend take a few of them.
    np.testing.assert_allclose(rope.inverse_frequencies(), expected, rtol=1e-6)


OLD = {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 1e6}, {"theta": 1e6}),
        ({"rope_theta": 1e6, "rope_scaling": None}, {"theta": 1e6}),
        ({}, {"theta": 1e4}),
        ({"rope_scaling": OLD}, {"kind": "linear", "factor": 4.0}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"kind": "linear", "factor": 4}),
        (
            {"rope_scaling": {"rope_type": "llama3", "type": "linear", "factor": 8.0}},
            {"kind": "llama3"},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"theta": 5e5}),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"theta": 5e5},
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            {"theta": 5e5, "kind": "linear", "factor": 2.0},
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {"kind": "default", "factor": 1.0}),
    ],
    ids=str,
)
def test_rope_settings_are_read_under_every_name_they_had(config, expected):
    rope = decoder_config.parse_rope(config, head_dim=16, max_positions=4096)
    assert {name: getattr(rope, name) for name in expected} == expected


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["yarn", "longrope", "su", "mrope"])
def test_rope_scaling_without_code_is_refused_by_name(key, kind):
    config = {"rope_scaling": {key: kind, "factor": 4.0}}
    with pytest.raises(ValueError, match=f"rope scaling '{kind}' is not supported; known: "):
        decoder_config.parse_rope(config, head_dim=16, max_positions=4096)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_rope_scaling_without_its_factor_is_refused_by_name(kind):
    with pytest.raises(ValueError, match="factor"):
        decoder_config.parse_rope({"rope_scaling": {"type": kind}}, head_dim=16, max_positions=4096)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotation_of_far_positions_is_made_in_float32_for_every_model_dtype(dtype):
    rope = RopeConfig(theta=500000.0, head_dim=128)
    positions = jnp.asarray(np.array([0, 1, 4095, 100_000, 131_071], np.int32))
    turn = layers.rotation(rope, positions)
    assert turn.cos.dtype == turn.sin.dtype == jnp.float32
    exact = np.asarray(positions, np.float64)[:, None] * 500000.0 ** (-np.arange(0, 128, 2) / 128)
    # An angle of up to 131,071 in float32 is off by some 2^-24 of itself, from the frequency and
    # from the product; bfloat16 would be off by whole turns.
    limit = 3 * 131_071 * 2.0**-24
    np.testing.assert_allclose(turn.cos, np.cos(exact), atol=limit, rtol=0)
    np.testing.assert_allclose(turn.sin, np.sin(exact), atol=limit, rtol=0)
    x = np.random.default_rng(0).standard_normal((5, 2, 128)).astype(np.float32)
    x = np.asarray(jnp.asarray(x, dtype), np.float64)  # what the model's dtype can hold of it
    found = layers.rotate(jnp.asarray(x.astype(np.float32)).astype(dtype), turn)
    cos, sin = (np.asarray(part, np.float64)[:, None] for part in (turn.cos, turn.sin))
    first, second = np.split(x, 2, axis=-1)
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    assert found.dtype == dtype
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=4 * step, rtol=step)


# --- SCHED-23: positions beyond 16 bits ---

FAR = (32_766, 32_767, 32_768, 40_000, 65_536, 131_071)


def decode_batch(num_tokens: tuple[int, ...]) -> Batch:
    """One decode row per entry, which holds so many tokens already."""
    rows = len(num_tokens)
    key = ProgramKey(
        is_decode=True,
        head="sample",
        rows=rows,
        tokens=rows,
        query_len=1,
        width=1,
        sampler="greedy",
        max_chunk_rows=0,
    )
    packed = Packed(
        num_decode=jnp.int32(rows),
        slots=jnp.arange(rows, dtype=jnp.int32),
        q_lens=jnp.ones(rows, jnp.int32),
        kinds=jnp.zeros(rows, jnp.int32),
        page_changes=(jnp.zeros((3, 0), jnp.int32),),
        sampling=None,
    )
    tables = (jnp.zeros((rows + 1, 1), jnp.int32),)
    return lay_out(key, Tiling(), packed, jnp.asarray(np.array([*num_tokens, 0], np.int32)), tables)


def test_positions_and_lengths_count_past_sixteen_bits():
    batch = decode_batch(FAR)
    assert batch.positions.tolist() == list(FAR)
    assert batch.kv_lens.tolist() == [length + 1 for length in FAR]
    arrays = jax.tree.leaves(batch)
    assert {str(one.dtype) for one in arrays} == {"int32", "bool"}


@pytest.mark.parametrize("needle", [0, 32_767, 32_768, 39_999])
def test_decode_row_of_forty_thousand_tokens_finds_the_one_that_matches(needle):
    length, page_size, head_dim = 40_000, 64, 16
    width = -(-(length + 1) // page_size)
    pool = np.zeros((width + 1, 1, 2, page_size, head_dim), np.float32)
    pool[1 + needle // page_size, 0, 0, needle % page_size, 0] = 40.0
    pool[1 + needle // page_size, 0, 1, needle % page_size] = np.arange(head_dim)
    table = jnp.asarray(np.stack([1 + np.arange(width), np.zeros(width)]).astype(np.int32))
    batch = decode_batch((length, 0)).replace(page_tables=(table,))
    batch = batch.replace(
        is_real=jnp.array([True, False]), kv_lens=jnp.asarray(np.array([length + 1, 0], np.int32))
    )
    q = jnp.zeros((2, 1, head_dim), jnp.float32).at[0, 0, 0].set(1.0)
    new = jnp.zeros((2, 1, head_dim), jnp.float32)
    queries, is_bad = attention.written(
        q, new, new, jnp.asarray(pool), batch, table, scale=1.0, window=None
    )
    out = queries.attended()
    # exp(-40) of the other 40,000 tokens is 2e-13 of the whole.
    np.testing.assert_allclose(out[0, 0], np.arange(head_dim), rtol=1e-6)
    assert not out[1].any() and not is_bad.any()


# --- MODEL-27: shards ---


@pytest.mark.parametrize("has_index", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize(
    "names",
    [
        ["model-00003-of-00003", "model-00001-of-00003", "model-00002-of-00003"],
        ["model-00000-of-00002", "model-00002-of-00002", "model-00001-of-00002"],
        ["model-2", "model-10", "model-1"],
    ],
    ids=["shuffled", "counted from zero", "without leading zeros"],
)
def test_names_and_order_of_shards_do_not_matter(names, has_index, tmp_path):
    whole = tiny.write_checkpoint("llama", tmp_path / "whole")
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "config.json").write_text((whole / "config.json").read_text())
    tensors, index = tiny.tensors("llama"), {}
    for i, name in enumerate(names):
        some = sorted(tensors)[i::3]
        save_file({one: tensors[one] for one in some}, folder / f"{name}.safetensors")
        index |= dict.fromkeys(some, f"{name}.safetensors")
    if has_index:
        (folder / checkpoint.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    model = registry.of_config(checkpoint.read_json_config(folder)[0])
    found, expected = (
        jax.tree.leaves(forward_adapter.load_params(model, checkpoint.open_source(one)))
        for one in (folder, whole)
    )
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


# --- MODEL-31: dtype ---


@pytest.mark.parametrize("architecture", registry.architectures())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_reaches_weights_hidden_states_and_cache_of_every_family(architecture, dtype):
    registration = registry.get(architecture)
    model = registry.of_config(dict(registration.example) | {"architectures": [architecture]})
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def traced():
        params = checkpoint.dummy(model.leaves(), dtype=dtype, seed=0, shardings=lambda _: sharding)
        spec = model.cache_spec(16, dtype)
        pools = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec.pool_shapes(3))
        table = jnp.zeros((2, 2), jnp.int32)
        batch = decode_batch((3, 5)).replace(page_tables=(table,) * len(spec.groups))
        if registration.host_embed is not None:
            rows = jnp.zeros((2, model.config.hidden_size), dtype)
            batch = batch.replace(embeddings=rows)
        ids = jnp.zeros(2, jnp.int32)
        hidden, cache = model.forward(params, open_cache(pools, 2), ids, batch)
        return params, hidden, cache.pools, model.logits(params, hidden)

    params, hidden, pools, logits = jax.eval_shape(traced)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves((hidden, pools))} == {dtype}
    flat = traverse_util.flatten_dict(params, sep=".")
    for path, leaf in model.leaves().items():
        # A router may keep to float32 whatever the rest has.
        (array,) = jax.tree.leaves(flat[path])
        assert str(array.dtype) == (leaf.dtype or dtype), path
    own = {path.rpartition(".")[2] for path, leaf in model.leaves().items() if leaf.dtype}
    assert own <= {"router", "router_bias"}
    assert logits.dtype == jnp.float32
