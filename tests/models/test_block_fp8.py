"""FP8 block checkpoints: values at every edge, the tensors they take, and what is refused."""

import json
import logging
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import block_fp8, checkpoint, registry
from models.checkpoint import Leaf, Part
from tests.families import tiny
from tests.models import forward_adapter

E4M3 = ml_dtypes.float8_e4m3fn
QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def quantised(weight, scale_dtype=np.float32):
    """Bytes and scales of a matrix, each block by its own largest value."""
    rows, columns = block_fp8.scale_shape(weight.shape)
    scales = np.empty((rows, columns), np.float32)
    stored = np.empty(weight.shape, E4M3)
    for i in range(rows):
        for j in range(columns):
            block = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            scales[i, j] = np.float32(np.abs(weight[block]).max() / 448).astype(scale_dtype)
            stored[block] = (weight[block] / scales[i, j]).astype(E4M3)
    return stored, scales.astype(scale_dtype)


def element_by_element(stored, scales):
    """The values as the format defines them."""
    out = np.empty(stored.shape, np.float32)
    for i, row in enumerate(stored.astype(np.float32)):
        for j, value in enumerate(row):
            out[i, j] = value * np.float32(scales[i // 128, j // 128])
    return out


SHAPES = [(128, 128), (1, 5), (130, 200), (127, 129), (256, 40), (40, 257)]


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_is_multiplied_with_the_scale_of_its_block(shape, scale_dtype):
    weight = np.random.default_rng(0).standard_normal(shape, np.float32)
    stored, scales = quantised(weight, scale_dtype)
    expected = element_by_element(stored, scales)
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        found = block_fp8.dequantised(stored.view(np.uint8), scales, dtype)
        assert found.dtype == dtype and found.tobytes() == expected.astype(dtype).tobytes()
    assert np.abs(expected - weight).max() < 0.07 * np.abs(weight).max()


def test_every_byte_is_the_number_that_it_stands_for():
    stored = np.arange(256, dtype=np.uint8).reshape(2, 128)
    found = block_fp8.dequantised(stored, np.ones((1, 1), np.float32), np.dtype(np.float32))
    assert found[0, 0] == 0 and found[0, 1] == 2**-9 and found[0, 8] == 2**-6
    assert found[0, 126] == 448 and found[1, 126] == -448
    assert np.isnan(found[:, 127]).all() and np.isfinite(found[:, :127]).all()
    np.testing.assert_array_equal(found, stored.view(E4M3).astype(np.float32))


def save(folder, tensors):
    """Weights as FP8 blocks where they are given as (bytes, scales)."""
    flat = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            flat[name], flat[name + block_fp8.SCALE_SUFFIX] = tensor
        else:
            flat[name] = tensor
    save_file(flat, folder / "model.safetensors")


def test_weights_and_scales_load_into_a_fused_leaf_and_the_log_says_so(tmp_path, caplog):
    rng = np.random.default_rng(1)
    gate, up = (rng.standard_normal((150, 140), np.float32) for _ in range(2))
    norm = rng.standard_normal(140, np.float32)
    made = {"gate.weight": quantised(gate), "up.weight": quantised(up), "norm.weight": norm}
    save(tmp_path, made)
    parts = tuple(
        Part(name, (150, 140), (slice(None), half), np.transpose)
        for half, name in enumerate(("gate.weight", "up.weight"))
    )
    leaves = {
        "gate_up": Leaf((140, 2, 150), parts, (None, None, None)),
        "norm": Leaf((140,), (Part("norm.weight", (140,)),), (None,)),
    }
    with caplog.at_level(logging.WARNING):
        source = checkpoint.open_source(tmp_path)
    assert "2 tensors (gate.weight, up.weight) stored as FP8 blocks; they are deq" in caplog.text
    params = checkpoint.load(
        leaves,
        source,
        dtype="bfloat16",
        put=lambda buffer, leaf: jax.device_put(buffer),
        ignore=lambda name: False,
    )
    for half, name in enumerate(("gate.weight", "up.weight")):
        expected = element_by_element(*made[name]).astype(ml_dtypes.bfloat16)
        assert (np.asarray(params["gate_up"])[:, half] == expected.T).all()
    assert (np.asarray(params["norm"]) == norm.astype(ml_dtypes.bfloat16)).all()


def test_checkpoint_without_fp8_says_nothing(tmp_path, caplog):
    save(tmp_path, {"w": np.ones((3, 4), np.float32)})
    with caplog.at_level(logging.INFO):
        assert checkpoint.open_source(tmp_path).names() == {"w": (3, 4)}
    assert not caplog.records


def test_model_of_fp8_blocks_computes_what_its_values_compute(tmp_path):
    values, stored = {}, {}
    for name, tensor in tiny.tensors("qwen3_moe").items():
        is_block = "_proj." in name
        stored[name] = quantised(tensor) if is_block else tensor
        values[name] = element_by_element(*stored[name]) if is_block else tensor
    logits = []
    for label, tensors in (("fp8", stored), ("values", values)):
        folder = tmp_path / label
        folder.mkdir()
        config = tiny.config("qwen3_moe")
        config |= {"quantization_config": QUANTIZED} if label == "fp8" else {}
        (folder / "config.json").write_text(json.dumps(config))
        save(folder, tensors)
        model = registry.of_config(checkpoint.read_json_config(folder)[0])
        params = forward_adapter.load_params(model, checkpoint.open_source(folder))
        ids = tiny.random_ids("qwen3_moe", 17)
        logits.append(forward_adapter.full_logits(model, params, ids, page_size=16))
    assert logits[0].tobytes() == logits[1].tobytes()


def test_fp8_without_scales_is_refused_by_name(tmp_path):
    save(tmp_path, {"a.weight": np.ones((3, 4), E4M3)})
    source = checkpoint.open_source(tmp_path)
    message = r"tensor a.weight is stored as F8_E4M3 but .* with a.weight_scale_inv; use"
    with pytest.raises(ValueError, match=message):
        source.read("a.weight")


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1,)], ids=str)
def test_scales_of_other_blocks_are_refused_with_both_shapes(tmp_path, shape):
    save(tmp_path, {"a.weight": (np.ones((130, 140), E4M3), np.ones(shape, np.float32))})
    message = rf"a.weight is \[130, 140\] .* are \[{str([*shape])[1:-1]}\], expected \[2, 2\]"
    with pytest.raises(ValueError, match=message):
        checkpoint.open_source(tmp_path)


def test_scales_of_a_weight_that_is_not_fp8_are_left_over(tmp_path):
    save(tmp_path, {"a.weight": (np.ones((3, 4), np.float32), np.ones((1, 1), np.float32))})
    assert set(checkpoint.open_source(tmp_path).names()) == {"a.weight", "a.weight_scale_inv"}


def test_reading_holds_one_tensor_beside_the_leaf(tmp_path):
    rows, columns, count = 512, 768, 6
    stored, scales = np.full((rows, columns), 1, E4M3), np.ones((4, 6), np.float32)
    save(tmp_path, {f"{i}.weight": (stored, scales) for i in range(count)})
    parts = tuple(Part(f"{i}.weight", (rows, columns), (i,)) for i in range(count))
    leaves = {"w": Leaf((count, rows, columns), parts, (None, None, None))}
    source = checkpoint.open_source(tmp_path)
    tracemalloc.start()
    checkpoint.load(
        leaves,
        source,
        dtype="bfloat16",
        put=lambda buffer, leaf: jax.device_put(np.float32(0)),
        ignore=lambda name: False,
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tensor = rows * columns * 2
    slack = 128 * columns * 16  # float32 products of 128 rows, and what looks them up
    assert count * tensor < peak < (count + 1) * tensor + slack


REFUSED = {
    "another method": ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors'"),
    "no method": ({"quant_method": None}, "quant_method None"),
    "modelopt": ({"quant_method": "modelopt"}, "quant_method 'modelopt'"),
    "another block": ({"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
    "one scale a tensor": ({"weight_block_size": None}, "weight_block_size None"),
    "another format": ({"fmt": "e5m2"}, "fmt 'e5m2'"),
    "static activations": ({"activation_scheme": "static"}, "activation_scheme 'static'"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_weights_quantised_in_another_way_are_refused_by_name(changes, message):
    config = tiny.config("qwen3_moe") | {"quantization_config": QUANTIZED | changes}
    with pytest.raises(ValueError, match=rf"quantization_config has {message}; .* use"):
        registry.of_config(config)


@pytest.mark.parametrize("value", [None, {}, QUANTIZED], ids=["null", "empty", "blocks"])
def test_configs_that_are_read_give_the_same_model(value):
    config = tiny.config("qwen3_moe")
    found = registry.of_config(config | {"quantization_config": value})
    assert found.config == registry.of_config(config).config
