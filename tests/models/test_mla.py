"""Latent attention in a model: its config, its weights, its cache, and what it refuses."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.mla import api
from models import checkpoint, decoder_config, layers, mla, registry
from models.batch import Batch
from models.cache import CacheSpec, LatentGroup, open_cache, write_latents
from models.decoder_config import parse_rope
from models.layers import PerHead
from models.mla import MlaConfig
from tests.families import tiny
from tests.models import forward_adapter

V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
"""DeepSeek-V2-Lite as published, fields of training aside."""
GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
"""GLM-4.7-Flash as published."""


def model_of(config, **changes) -> registry.Model:
    return registry.of_config(config | changes)


# --- config ---


def test_fields_of_deepseek_v2_lite_are_read():
    config = model_of(V2_LITE).config
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert mscale**2 == pytest.approx(1.5896, abs=1e-4)
    assert config.mla == MlaConfig(
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        latent_norm_eps=1e-6,
        scale=192**-0.5 * mscale**2,
    )
    assert (config.head_dim, config.rope.head_dim, config.rope.kind) == (192, 64, "yarn")
    assert config.moe_layers == tuple(range(1, 27))
    moe = config.moe
    assert (moe.scoring, moe.renormalize, moe.scale, moe.router_dtype) == (
        *("softmax", False, 1.0, "float32"),
    )
    assert (moe.shared_intermediate_size, moe.num_groups, moe.has_bias) == (2816, 1, False)


def test_fields_of_glm_flash_are_read():
    config = model_of(GLM_FLASH).config
    assert config.mla == MlaConfig(
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        latent_norm_eps=1e-6,
        scale=256**-0.5,
    )
    assert config.rms_norm_eps == 1e-5 and config.num_mtp_layers == 1
    moe = config.moe
    assert (moe.scoring, moe.renormalize, moe.scale, moe.router_dtype) == (
        *("sigmoid", True, 1.8, "float32"),
    )
    assert (moe.shared_intermediate_size, moe.num_groups, moe.has_bias) == (1536, 1, True)


def test_groups_count_where_the_router_says_so():
    fields = {"n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    limited = model_of(V2_LITE, topk_method="group_limited_greedy", **fields).config.moe
    greedy = model_of(V2_LITE, **fields).config.moe
    assert (limited.num_groups, limited.top_groups, limited.scale) == (8, 3, 16.0)
    assert (greedy.num_groups, greedy.top_groups, greedy.scale) == (1, 1, 16.0)


def test_rope_fields_of_newer_files_say_the_same():
    newer = {k: v for k, v in V2_LITE.items() if k not in ("rope_theta", "rope_scaling")}
    scaling = {"rope_theta": 10000, "rope_type": "yarn"} | V2_LITE["rope_scaling"]
    del scaling["type"]
    assert model_of(newer, rope_parameters=scaling).config == model_of(V2_LITE).config


def test_list_of_layer_kinds_says_the_same_as_the_number_of_dense_ones():
    kinds = ["dense"] + ["sparse"] * 46
    listed = {k: v for k, v in GLM_FLASH.items() if k != "first_k_dense_replace"}
    assert model_of(listed, mlp_layer_types=kinds).config == model_of(GLM_FLASH).config
    with pytest.raises(ValueError, match=r"mlp_layer_types is .* it must name every layer"):
        model_of(listed, mlp_layer_types=kinds[::-1])
    with pytest.raises(ValueError, match=r"mlp_layer_types is .* it must name every layer"):
        model_of(listed, mlp_layer_types=kinds[:-1])


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (V2_LITE, {"attention_bias": True}, "attention_bias is True but DeepSeek-V2 is served"),
        (V2_LITE, {"mlp_bias": True}, "mlp_bias is True but DeepSeek-V2 is served without"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is True .* published code never"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; DeepSeek-V2 has greedy"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; 'softmax' is the only"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq is 2; 1 is the only one"),
        (
            V2_LITE,
            {"num_key_value_heads": 4},
            "num_key_value_heads is 4 but num_attention_heads 16",
        ),
        (V2_LITE, {"kv_lora_rank": None}, "kv_lora_rank is None, it must be a positive integer"),
        (
            V2_LITE,
            {"first_k_dense_replace": -1},
            "first_k_dense_replace is -1; it must be a number",
        ),
        (V2_LITE, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            V2_LITE,
            {"rope_scaling": {"type": "llama3", "factor": 8}},
            "rope scaling 'llama3' is not supported; known: default, dynamic, yarn",
        ),
        (V2_LITE, {"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn' has no 'factor'"),
        (
            V2_LITE,
            {"rope_scaling": V2_LITE["rope_scaling"] | {"truncate": False}},
            "rope scaling has truncate false",
        ),
        (GLM_FLASH, {"attention_bias": True}, "attention_bias is True but GLM-4.7-Flash is served"),
        (GLM_FLASH, {"topk_method": "greedy"}, "topk_method is 'greedy'; 'noaux_tc' is the only"),
        (
            GLM_FLASH,
            {"scoring_func": "softmax"},
            "scoring_func is 'softmax'; 'sigmoid' is the only",
        ),
        (
            GLM_FLASH,
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; 1.0 is the only",
        ),
        (GLM_FLASH, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1; it must be"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:40],
)
def test_what_a_family_does_not_do_is_refused_by_name(base, changes, message):
    with pytest.raises(ValueError, match=message):
        model_of(base, **changes)


# --- yarn ---


def test_yarn_frequencies_are_those_of_transformers():
    """Made by transformers 5.24.0 from the published file."""
    rope = model_of(V2_LITE).config.rope
    expected = {0: 1.0, 9: 0.0749894157, 10: 0.0562341288, 11: 0.0390069261, 15: 0.0083345091}
    expected |= {16: 0.00550000044, 20: 0.000790569407, 22: 0.00017782794, 23: 3.33380340e-5}
    expected |= {24: 2.49999994e-5, 31: 3.33380353e-6}
    found = rope.inverse_frequencies()
    assert found.dtype == np.float32
    np.testing.assert_allclose([found[i] for i in expected], list(expected.values()), rtol=1e-6)
    assert rope.amplitude == 1.0


@pytest.mark.parametrize(
    ("fields", "amplitude"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
        ({"attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 0.5}, 1.25),
        ({"factor": 0.5}, 1.0),
    ],
    ids=str,
)
def test_yarn_amplitude_multiplies_cosines_and_sines(fields, amplitude):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | fields
    rope = parse_rope({"rope_scaling": scaling}, 16, 256, scalings=("yarn",))
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)
    positions = jnp.arange(9, dtype=jnp.int32)
    turn = layers.rotation(rope, positions)
    plain = layers.rotation(dataclasses.replace(rope, amplitude=1.0), positions)
    np.testing.assert_allclose(turn.cos, plain.cos * amplitude, rtol=1e-6)
    np.testing.assert_allclose(turn.sin, plain.sin * amplitude, rtol=1e-6, atol=1e-7)


def test_scale_grows_with_yarn_only_where_the_file_says_by_how_much():
    scaling = dict(V2_LITE["rope_scaling"])
    del scaling["mscale_all_dim"]
    assert model_of(V2_LITE, rope_scaling=scaling).config.mla.scale == 192**-0.5
    assert model_of(V2_LITE, rope_scaling=None).config.mla.scale == 192**-0.5


# --- weights ---


@pytest.mark.parametrize(
    ("config", "total"), [(V2_LITE, 15_706_484_224), (GLM_FLASH, 29_943_390_976)]
)
def test_published_sizes_have_the_published_number_of_parameters(config, total):
    leaves = model_of(config).leaves()
    # The correction of the router's choice is a buffer: no count has it.
    sizes = [math.prod(leaf.shape) for path, leaf in leaves.items() if "router_bias" not in path]
    assert sum(sizes) == total


def test_kv_b_is_stored_once_and_whole():
    leaves = model_of(GLM_FLASH).leaves()
    k_up, v_up = leaves["layers.3.k_up"], leaves["layers.3.v_up"]
    assert (k_up.shape, v_up.shape) == ((20, 192, 512), (20, 256, 512))
    stored = np.arange(20 * 448 * 512, dtype=np.int32).reshape(20 * 448, 512)
    (key,), (value,) = k_up.parts, v_up.parts
    assert key.name == value.name == "model.layers.3.self_attn.kv_b_proj.weight"
    heads = np.concatenate([key.arrange(stored), value.arrange(stored)], axis=1)
    assert (heads.reshape(stored.shape) == stored).all()


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_rotated_rows_lie_in_halves_in_queries_and_key_alike(is_interleaved):
    changes = {"rope_interleave": is_interleaved}
    leaves = model_of(tiny.config("glm4_moe_lite"), **changes).leaves()
    order = np.r_[0:16:2, 1:16:2] if is_interleaved else np.arange(16)
    (q,) = leaves["layers.0.q"].parts
    stored = np.arange(5 * 40 * 24).reshape(5 * 40, 24)
    heads = stored.reshape(5, 40, 24)
    expected = np.concatenate([heads[:, :24], heads[:, 24:][:, order]], axis=1)
    assert (q.arrange(stored) == expected.transpose(2, 0, 1)).all()
    kv_a = leaves["layers.0.qkv_a"].parts[1]
    stored = np.arange(48 * 80).reshape(48, 80)
    expected = np.concatenate([stored[:32], stored[32:][order]])
    assert (kv_a.arrange(stored) == expected.T).all()


def test_layers_that_predict_further_tokens_are_known_by_name_and_nothing_else_is():
    model = model_of(tiny.config("glm4_moe_lite"))
    stored = tiny.tensors("glm4_moe_lite")
    wanted = {part.name for leaf in model.leaves().values() for part in leaf.parts}
    further = set(stored) - wanted
    assert len(further) > 30
    assert all(name.startswith("model.layers.3.") for name in further)
    assert all(model.ignores(name) for name in further)
    for name in ("model.layers.3.mlp.experts.8.up_proj.weight", "model.layers.3.other.weight"):
        assert not model.ignores(name)
    assert not model.ignores("model.layers.4.enorm.weight")
    assert not any(model.ignores(name) for name in wanted)


def test_layers_that_the_config_does_not_name_are_left_over(tmp_path):
    overrides = {"num_nextn_predict_layers": 0}
    folder = tiny.write_checkpoint("glm4_moe_lite", tmp_path, overrides=overrides)
    model = registry.of_config(checkpoint.read_json_config(folder)[0])
    with pytest.raises(ValueError, match=r"tensors \(model.layers.3.* not expected"):
        forward_adapter.load_params(model, checkpoint.open_source(folder))


def test_first_layers_keep_both_kinds_and_every_size():
    model = model_of(V2_LITE)
    shallow = model.first_layers(4).config
    assert (shallow.num_layers, shallow.moe_layers) == (4, (1, 2, 3))
    assert shallow.mla == model.config.mla
    assert decoder_config.first_layers(model.config, 1).moe_layers == (0,)


# --- cache ---


def test_page_of_a_latent_group_holds_one_entry_per_token_and_layer():
    spec = model_of(V2_LITE).cache_spec(64, "bfloat16")
    (group,) = spec.groups
    assert (group.kind, group.window, group.prefix_cacheable) == ("latent", None, True)
    assert group.page_shape == (64, 576)
    assert spec.page_bytes == group.page_bytes == 27 * 64 * 576 * 2
    assert spec.paged == spec.groups and spec.recurrent == ()
    ((pool, *_),) = spec.pool_shapes(10)
    assert (pool.shape, str(pool.dtype)) == ((10, 64, 576), "bfloat16")


def batch_of(num_tokens: int, num_padding: int = 1) -> Batch:
    """One chunk from position 0 on, then padding; its pages are 3, 1, 2."""
    size = num_tokens + num_padding
    token = np.arange(size, dtype=np.int32)
    return Batch(
        positions=jnp.asarray(np.where(token < num_tokens, token, 0)),
        rows=jnp.zeros(size, jnp.int32),
        is_real=jnp.asarray(token < num_tokens),
        kv_lens=jnp.array([num_tokens], jnp.int32),
        cu_q_lens=jnp.array([0, num_tokens], jnp.int32),
        num_decode=jnp.int32(0),
        page_tables=(jnp.array([[3, 1, 2]], jnp.int32),),
        is_decode=False,
        max_chunk_rows=1,
    )


def test_entries_go_to_their_pages_and_padding_to_trash():
    batch = batch_of(6, num_padding=2)
    entries = jnp.asarray(np.arange(16, dtype=np.float32).reshape(8, 2) + 1)
    pool, is_bad = write_latents(jnp.zeros((4, 4, 2)), entries, batch, batch.page_tables[0])
    assert not is_bad.any()
    assert (pool[3] == entries[:4]).all() and (pool[1, :2] == entries[4:6]).all()
    assert not pool[1, 2:].any() and not pool[2].any()
    assert pool[0, 0].any() and not pool[0, 1:].any()


def test_entry_that_is_not_finite_is_stored_as_zero_and_flags_its_token_alone():
    batch = batch_of(3, num_padding=2)
    entries = jnp.ones((5, 2)).at[1, 0].set(jnp.nan).at[3, 1].set(jnp.inf)
    pool, is_bad = write_latents(jnp.zeros((4, 4, 2)), entries, batch, batch.page_tables[0])
    # Token 3 is padding: nobody's fault.
    assert is_bad.tolist() == [False, True, False, False, False]
    assert pool[3, :3].tolist() == [[1, 1], [0, 1], [1, 1]]
    assert jnp.isfinite(pool).all()


def test_groups_of_both_kinds_may_stand_beside_each_other():
    latents = LatentGroup((0, 2), entry_dim=12, page_size=8, dtype="float32")
    other = dataclasses.replace(latents, layers=(1,), page_size=4, dtype="bfloat16")
    spec = CacheSpec((latents, other))
    assert spec.page_bytes == 2 * 8 * 12 * 4 + 4 * 12 * 2
    assert [len(pools) for pools in spec.pool_shapes(2)] == [2, 1]


# --- attention ---


CONFIG = MlaConfig(
    q_lora_rank=None,
    kv_lora_rank=8,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=10,
    latent_norm_eps=1e-6,
    scale=0.3,
)


def attention_scene(rows: int, query_len: int):
    """Up-projections, queries and a pool; every row has 11 tokens on pages of its own."""
    rng = np.random.default_rng(5)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    table = 1 + np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)[:, ::-1]
    q = normal(rows * query_len, 3, 10)
    ups = PerHead(normal(3, 6, 8)), PerHead(normal(3, 10, 8), output_major=True)
    return ups, q, normal(rows * 3 + 1, 4, 12), jnp.asarray(table)


def batch_at_the_end(rows: int, query_len: int, num_decode: int, is_decode: bool) -> Batch:
    """The last query_len of 11 tokens of every row."""
    positions = np.tile(np.arange(11 - query_len, 11, dtype=np.int32), rows)
    return Batch(
        positions=jnp.asarray(positions),
        rows=jnp.asarray(np.repeat(np.arange(rows, dtype=np.int32), query_len)),
        is_real=jnp.ones(rows * query_len, jnp.bool_),
        kv_lens=jnp.full(rows, 11, jnp.int32),
        cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32) * query_len,
        num_decode=jnp.int32(num_decode),
        page_tables=(),
        is_decode=is_decode,
        max_chunk_rows=0 if is_decode else rows,
    )


def attended(query_len: int, num_decode: int, is_decode: bool) -> np.ndarray:
    ups, q, pool, table = attention_scene(3, query_len)
    batch = batch_at_the_end(3, query_len, num_decode, is_decode)
    run = jax.jit(functools.partial(mla.attend, CONFIG))
    return np.asarray(run(*ups, q, pool, batch, table))


@pytest.mark.parametrize("query_len", [1, 3])
def test_decode_program_in_latents_equals_a_chunk_that_expands_them(query_len):
    absorbed = attended(query_len, 3, is_decode=True)
    expanded = attended(query_len, 0, is_decode=False)
    assert np.abs(expanded).max() > 0.5
    # Float32 sums in another order.
    np.testing.assert_allclose(absorbed, expanded, rtol=2e-5, atol=2e-6)


def test_mixed_step_attends_decode_rows_in_latents_and_chunks_expanded():
    mixed = attended(1, 2, is_decode=False)
    np.testing.assert_array_equal(mixed[2], attended(1, 0, is_decode=False)[2])
    np.testing.assert_allclose(mixed, attended(1, 3, is_decode=True), rtol=2e-5, atol=2e-6)


def test_a_decode_program_expands_nothing():
    counts = api.decode.counts["reference"], api.prefill.counts["reference"]
    ups, q, pool, table = attention_scene(3, 2)
    batch = batch_at_the_end(3, 2, 3, is_decode=True)
    jax.eval_shape(functools.partial(mla.attend, CONFIG), *ups, q, pool, batch, table)
    after = api.decode.counts["reference"], api.prefill.counts["reference"]
    assert after == (counts[0] + 1, counts[1])


@functools.cache
def loaded(name: str):
    """The first two layers of a tiny model: a dense one and one with experts."""
    model = model_of(tiny.config(name)).first_layers(2)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = checkpoint.dummy(
        model.leaves(), dtype="float32", seed=1, shardings=lambda leaf: sharding
    )
    return model, params


def run_tapped(name: str, tap=None):
    """Six tokens and one of padding, over pages of four."""
    model, params = loaded(name)
    shapes = model.cache_spec(4, "float32").pool_shapes(4)
    pools = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    taps = {} if tap is None else {"tap": tap}

    @jax.jit
    def run(params, pools, batch):
        ids = jnp.arange(7, dtype=jnp.int32) + 3
        return model.forward(params, open_cache(pools, 7), ids, batch, **taps)

    return run(params, pools, batch_of(6))


def test_a_tap_sees_queries_and_entries_and_changes_nothing_by_looking():
    seen = {}

    def tap(name, x):
        seen[name] = x.shape
        return x

    hidden, cache = run_tapped("deepseek_v2", tap)
    plain, plain_cache = run_tapped("deepseek_v2")
    assert seen["layers.1.q"] == (7, 4, 40) and seen["layers.0.latent"] == (7, 48)
    assert np.abs(hidden[:6]).max() > 0.5
    # Float32, fused in another way.
    np.testing.assert_allclose(hidden[:6], plain[:6], rtol=2e-5, atol=5e-6)
    for pool, other in zip(cache.pools[0], plain_cache.pools[0], strict=True):
        assert pool[3].all() and not pool[2].any()
        np.testing.assert_allclose(pool[1:], other[1:], rtol=2e-5, atol=5e-6)


def test_an_entry_that_is_not_finite_flags_its_token_in_the_step():
    def tap(name, x):
        return x.at[2, 5].set(jnp.nan) if name == "layers.1.latent" else x

    _, cache = run_tapped("glm4_moe_lite", tap)
    assert cache.is_nonfinite.tolist() == [False, False, True, False, False, False, False]
    assert all(bool(jnp.isfinite(pool[1:]).all()) for pool in cache.pools[0])
