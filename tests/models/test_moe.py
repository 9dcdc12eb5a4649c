"""The mixture of experts in a model: its weights, its router, loads, padding, what is refused."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.execution import jaxprs
from kernels.moe.reference import row_block
from models import checkpoint, moe, registry
from models.cache import open_cache
from models.moe import MoeConfig
from models.stream import Stream
from tests.families import tiny
from tests.models import forward_adapter

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Qwen3-30B-A3B as published, fields of training aside."""
CODER = QWEN3_30B | {
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "qkv_bias": False,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}
"""Qwen3-Coder-30B-A3B."""


def tiny_config(**changes):
    return registry.of_config(tiny.config("qwen3_moe") | changes).config


def example(**changes):
    described = registry.get("Qwen3MoeForCausalLM").example
    return registry.of_config(
        {**described, "architectures": ["Qwen3MoeForCausalLM"], **changes}
    ).config


# --- config ---


def test_fields_of_the_router_are_read():
    config = registry.of_config(QWEN3_30B).config
    assert config.moe == MoeConfig(
        num_experts=128, top_k=8, intermediate_size=768, scoring="softmax", renormalize=True
    )
    assert config.moe_layers == tuple(range(48))
    assert config.qk_norm and config.head_dim == 128
    coder = registry.of_config(CODER).config
    assert coder.moe == config.moe and coder.rope.theta == 1e7


def test_weights_are_renormalised_only_where_the_config_says_so():
    assert tiny_config().moe.renormalize
    assert not tiny_config(norm_topk_prob=False).moe.renormalize
    described = {k: v for k, v in tiny.config("qwen3_moe").items() if k != "norm_topk_prob"}
    assert not registry.of_config(described).config.moe.renormalize


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mlp_only_layers": []}, (0, 1, 2, 3, 4, 5)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3, 4, 5)),
        ({"mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, (1, 3, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
    ],
    ids=str,
)
def test_layers_are_dense_by_list_and_by_step(changes, expected):
    assert example(num_hidden_layers=6, **changes).moe_layers == expected


REFUSED = {
    "window": ({"use_sliding_window": True}, "use_sliding_window is true"),
    "shared expert": (
        {"shared_expert_intermediate_size": 64},
        "shared_expert_intermediate_size is 64 .* no shared expert",
    ),
    "q, k and v biases": ({"qkv_bias": True}, "qkv_bias is True .* by 'attention_bias' alone"),
    "no q and k norm": ({"use_qk_norm": False}, "use_qk_norm is false"),
    "no experts": ({"num_experts": 0}, "num_experts is 0, it must be a positive integer"),
    "no sizes": ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    "layers": ({"mlp_only_layers": "1"}, "mlp_only_layers is '1'; it must be a list of layer n"),
    "too many": ({"num_experts_per_tok": 8}, "goes to 8 experts but there are 7; num_experts_per"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not sup"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_architecture_does_not_have_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"num_groups": 5, "top_groups": 2}, "12 experts in 5 groups of which 2 count; the gr"),
        ({"num_groups": 4, "top_groups": 5}, "12 experts in 4 groups of which 5 count; the gr"),
        ({"num_groups": 4, "top_groups": 1}, "to 4 experts but its 1 groups hold 3; raise topk_"),
    ],
    ids=str,
)
def test_groups_that_cannot_hold_the_choice_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        MoeConfig(num_experts=12, top_k=4, intermediate_size=8, **groups)


# --- weights ---


@pytest.mark.parametrize("described", [QWEN3_30B, CODER], ids=["Qwen3-30B-A3B", "Coder"])
def test_published_sizes_add_up_to_the_published_total(described):
    model = registry.of_config(described)
    found = model.leaves()
    # A scale of queries is stored once and laid out per head of a group: 7 more of 128 a layer.
    repeated = 48 * (model.config.group - 1) * 128
    total = sum(math.prod(leaf.shape) for leaf in found.values())
    assert total - repeated == 30_532_122_624
    assert found["layers.47.experts_gate_up"].shape == (128, 1536, 2048)
    assert found["layers.47.experts_down"].shape == (128, 2048, 768)
    assert found["layers.47.router"].shape == (2048, 128)
    assert {part.name for leaf in found.values() for part in leaf.parts} >= {
        "model.layers.47.mlp.experts.127.down_proj.weight",
        "model.layers.47.mlp.gate.weight",
    }
    for leaf in found.values():
        assert sum(math.prod(part.shape) for part in leaf.parts) >= math.prod(leaf.shape)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The tiny model and its parameters."""
    folder = tiny.write_checkpoint("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))
    model = registry.of_config(checkpoint.read_json_config(folder)[0])
    return model, forward_adapter.load_params(model, checkpoint.open_source(folder))


def test_experts_lie_as_the_kernels_want_them(loaded):
    model, params = loaded
    stored, weights = tiny.tensors("qwen3_moe"), params["layers"]["2"]
    size = model.config.moe.intermediate_size
    block = row_block(size)
    assert (size, block) == (40, 8)
    for expert in range(7):
        prefix = f"model.layers.2.mlp.experts.{expert}."
        rows = np.asarray(weights["experts_gate_up"][expert])
        for i in range(size):
            place = i // block * 2 * block + i % block
            assert (rows[place] == stored[prefix + "gate_proj.weight"][i]).all()
            assert (rows[place + block] == stored[prefix + "up_proj.weight"][i]).all()
        down = np.asarray(weights["experts_down"][expert])
        assert (down == stored[prefix + "down_proj.weight"]).all()
    router = np.asarray(weights["router"].kernel)
    assert (router == stored["model.layers.2.mlp.gate.weight"].T).all()
    assert set(params["layers"]["1"]) == {"qkv", "o", "gate_up", "down", "vectors"}


def test_experts_are_cut_along_the_expert_and_tensor_axes_and_nothing_else_is():
    c = MoeConfig(
        num_experts=8,
        top_k=2,
        intermediate_size=64,
        has_bias=True,
        shared_intermediate_size=32,
        router_dtype="float32",
    )
    found = moe.leaves(c, 16, moe.Names(), 3)
    assert {path: leaf.partition for path, leaf in found.items()} == {
        "router": (None, None),
        "router_bias": (None,),
        "experts_gate_up": ("expert", "tensor", None),
        "experts_down": ("expert", None, "tensor"),
        "shared_gate_up": (None, None, "tensor"),
        "shared_down": ("tensor", None),
    }
    assert {p: leaf.dtype for p, leaf in found.items() if leaf.dtype} == {
        "router": "float32",
        "router_bias": "float32",
    }
    assert found["router_bias"].parts[0].name.endswith("3.mlp.gate.e_score_correction_bias")
    assert "model.layers.3.mlp.shared_experts.up_proj.weight" in {
        part.name for part in found["shared_gate_up"].parts
    }


# --- the layer ---


def layer_inputs(c, num_tokens, hidden_size=16, dtype="float32", padding=0):
    """Random weights of one layer, activations, and a batch whose last tokens are padding."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weights = checkpoint.dummy(
        moe.leaves(c, hidden_size, moe.Names(), 0),
        dtype=dtype,
        seed=1,
        shardings=lambda _: sharding,
    )
    x = np.random.default_rng(2).standard_normal((num_tokens, hidden_size), np.float32)
    batch = forward_adapter.prefill_step(
        1, np.zeros(4, np.int32), 0, num_tokens - padding, num_tokens
    )
    return weights, jnp.asarray(x).astype(dtype), batch


class Normed(Stream):
    """A stream that is normed already."""

    def __init__(self, x):
        super().__init__(x, None, vectors=x, scale_at=0, eps=0.0, kernels="plain")

    def normed(self):
        return self.hidden, self.hidden


@functools.partial(jax.jit, static_argnums=0)
def mlp(c, weights, x, batch):
    hidden, (only,) = moe.mlp(c, weights, Normed(x), batch)
    assert hidden is x
    return only


def tapped_mlp(c, weights, x, batch):
    """What a tap sees, by name."""
    seen = {}
    moe.mlp(c, weights, Normed(x), batch, tap=lambda name, value: seen.setdefault(name, value))
    return seen


SHARED = MoeConfig(
    num_experts=6,
    top_k=2,
    intermediate_size=24,
    scoring="sigmoid",
    scale=1.8,
    has_bias=True,
    shared_intermediate_size=40,
    router_dtype="float32",
)


def test_shared_expert_is_added_unscaled_to_every_token():
    weights, x, batch = layer_inputs(SHARED, 10)
    without = dataclasses.replace(SHARED, shared_intermediate_size=None)
    halves = np.einsum("TD,DHF->THF", x, weights["shared_gate_up"].kernel)
    silu = halves[:, 0] / (1 + np.exp(-halves[:, 0]))
    shared = (silu * halves[:, 1]) @ np.asarray(weights["shared_down"].kernel)
    found = np.asarray(mlp(SHARED, weights, x, batch))
    routed = np.asarray(mlp(without, weights, x, batch))
    np.testing.assert_allclose(found - routed, shared, atol=1e-5)


@pytest.mark.parametrize("router_dtype", ["float32", "activation"])
def test_router_of_bfloat16_activations_computes_in_its_own_type(router_dtype):
    c = dataclasses.replace(SHARED, router_dtype=router_dtype)
    weights, x, batch = layer_inputs(c, 64, dtype="bfloat16")
    seen = jax.jit(functools.partial(tapped_mlp, c))(weights, x, batch)
    router = np.asarray(weights["router"].kernel)
    exact = np.asarray(x, np.float32) @ router.astype(np.float32)
    found = np.asarray(seen["router_logits"])
    assert found.dtype == np.float32
    if router_dtype == "float32":
        assert router.dtype == np.float32
        np.testing.assert_allclose(found, exact, atol=1e-5)
    else:
        assert router.dtype == jnp.bfloat16
        assert (found.astype(jnp.bfloat16) == found).all()
        np.testing.assert_allclose(found, exact, atol=0.05)


def test_padding_changes_no_other_token_and_is_zero_without_a_shared_expert():
    c = dataclasses.replace(SHARED, shared_intermediate_size=None)
    weights, x, batch = layer_inputs(c, 24, padding=9)
    first = np.asarray(mlp(c, weights, x, batch))
    second = np.asarray(mlp(c, weights, x.at[15:].set(jnp.nan), batch))
    assert (first[15:] == 0).all() and (second[15:] == 0).all()
    assert first[:15].tobytes() == second[:15].tobytes() and np.abs(first[:15]).min() > 0


# --- loads ---


def test_expert_load_counts_every_choice_and_no_padding():
    ids = jnp.array([[0, 2], [2, 1], [5, 5], [2, 0]])  # 5: padding of five experts
    assert moe.expert_load(ids, 5).tolist() == [2, 1, 3, 0, 0]


def test_loads_of_a_forward_come_from_its_tap(loaded):
    """As in a notebook: which experts a prompt uses, layer by layer."""
    model, params = loaded
    params = {name: leaf for name, leaf in params.items() if name != "host"}
    ids, length = np.zeros(40, np.int32), 30
    ids[:length] = tiny.random_ids("qwen3_moe", length)
    batch = forward_adapter.prefill_step(1, np.array([1, 2, 3], np.int32), 0, length, 40)
    batch = jax.tree.map(jnp.asarray, batch)
    spec = model.cache_spec(16, "float32")
    pools = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec.pool_shapes(4))

    @jax.jit
    def forward(params, pools):
        loads = {}

        def tap(name: str, x: jax.Array) -> jax.Array:
            if name.endswith(".topk_ids"):
                loads[name] = moe.expert_load(x, model.config.moe.num_experts)
            return x

        hidden, _ = model.forward(params, open_cache(pools, 40), ids, batch, tap=tap)
        untapped, _ = model.forward(params, open_cache(pools, 40), ids, batch)
        return loads, hidden, untapped

    loads, tapped, untapped = forward(params, pools)
    assert list(loads) == ["layers.0.topk_ids", "layers.2.topk_ids"]
    for load in loads.values():
        assert int(load.sum()) == length * model.config.moe.top_k
        assert 0 < int(load.max()) < length
    np.testing.assert_allclose(tapped[:length], untapped[:length], atol=1e-5)


# --- the first layers, which tell what a whole model needs ---


@pytest.mark.parametrize(
    ("dense", "expected"),
    [
        ([], (0, 1, 2, 3)),
        ([0], (1, 2, 3)),
        ([0, 1, 2, 3, 4], (3,)),
        ([7], (0, 1, 2)),
        ([2], (0, 1, 3)),
        (list(range(8)), ()),
    ],
    ids=str,
)
def test_first_layers_have_one_of_each_kind(dense, expected):
    model = registry.get("Qwen3MoeForCausalLM").bind(
        example(num_hidden_layers=8, mlp_only_layers=dense)
    )
    shallow = model.first_layers(4)
    assert shallow.config.num_layers == 4 and shallow.config.moe_layers == expected
    leaves = shallow.leaves()
    for i in range(4):
        assert (f"layers.{i}.experts_down" in leaves) == (i in expected)
    assert model.first_layers(20).config == model.config


def traced(vocab_size):
    """The jaxpr of a forward of seven layers, the third one dense, not traced before."""
    model = registry.get("Qwen3MoeForCausalLM").bind(
        example(num_hidden_layers=7, mlp_only_layers=[2], vocab_size=vocab_size)
    )
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = checkpoint.abstract(model.leaves(), dtype="float32", shardings=lambda _: sharding)
    batch = forward_adapter.prefill_step(1, np.array([1, 2], np.int32), 0, 13, 19)
    pools = model.cache_spec(16, "float32").pool_shapes(3)

    def forward(params, pools, ids, batch):
        return model.forward(params, open_cache(pools, 19), ids, batch)[0]

    ids = jax.ShapeDtypeStruct((19,), jnp.int32)
    return jax.make_jaxpr(forward)(params, pools, ids, batch)


def test_layers_of_a_kind_are_traced_once_and_the_first_one_apart(monkeypatch):
    calls = []
    expert = moe.api.experts
    monkeypatch.setattr(
        moe.api, "experts", lambda *args, **kwargs: calls.append(1) or expert(*args, **kwargs)
    )
    traced(vocab_size=131)
    # To the first layer nothing is left to add.
    assert len(calls) == 2


def test_a_forward_sorts_nothing_and_holds_no_integer_table():
    jaxpr = traced(vocab_size=137)
    primitives = {e.primitive.name for inner in jaxprs.walk(jaxpr) for e in jaxprs.body(inner).eqns}
    assert {"dot_general", "scan", "cumsum"} <= primitives
    assert not {name for name in primitives if "sort" in name or "top_k" in name}
    assert not jaxprs.integer_constants(jaxpr)
