"""Llama with its table on the host: what is loaded where, and that the forward reads no ids."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import checkpoint, llama, llama_host_embed, registry
from models.checkpoint import Leaf, Part
from tests.families import tiny
from tests.models import forward_adapter

NAME = "LlamaHostEmbedForCausalLM"
TABLE = "model.embed_tokens.weight"


def model_of(base: str, architecture: str = NAME) -> registry.Model:
    return registry.of_config(tiny.config(base) | {"architectures": [architecture]})


def test_declaring_host_embed_and_device_token_ids_is_refused_by_name():
    with pytest.raises(ValueError) as refusal:
        dataclasses.replace(llama_host_embed.REGISTRATION, device_token_ids=True)
    assert str(refusal.value) == (
        "LlamaHostEmbedForCausalLM declares both device_token_ids and host_embed; rows made on the "
        "host need every id there, so declare one of them"
    )


@pytest.mark.parametrize("base", ["llama", "llama_tied_bias"])
def test_device_gets_everything_but_the_table_and_a_tied_head_too(base):
    plain, model = model_of(base, "LlamaForCausalLM"), model_of(base)
    assert set(model.leaves()) == set(plain.leaves()) - {"embed"} | {"head"}
    assert set(model.host_leaves()) == {"embed"} and not plain.host_leaves()
    (head,) = model.leaves()["head"].parts
    assert head.name == (TABLE if plain.config.tie_word_embeddings else "lm_head.weight")
    assert model.ignores(TABLE) and not plain.ignores(TABLE)


@pytest.mark.parametrize("base", ["llama", "llama_tied_bias"])
def test_logits_equal_those_of_llama_bit_for_bit(base, tmp_path):
    source = checkpoint.open_source(tiny.write_checkpoint(base, tmp_path))
    ids = tiny.random_ids(base, 37)
    found = []
    for architecture in (NAME, "LlamaForCausalLM"):
        model = model_of(base, architecture)
        params = forward_adapter.load_params(model, source)
        found.append(forward_adapter.full_logits(model, params, ids, 16, num_decoded=3))
    assert np.isfinite(found[0]).all() and found[0].tobytes() == found[1].tobytes()


# --- the table ---


def stored_in(dtype: np.dtype, folder: Path) -> checkpoint.Source:
    folder.mkdir()
    tensors = {name: array.astype(dtype) for name, array in tiny.tensors("llama").items()}
    save_file(tensors, folder / "model.safetensors")
    return checkpoint.open_source(folder)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_table_is_a_view_of_the_mapped_file_and_rows_are_cast(stored, tmp_path):
    model = model_of("llama")
    source = stored_in(stored, tmp_path / "model")
    tables = checkpoint.load_host(model.host_leaves(), source, dtype="float32")
    table = tables["embed"]
    assert table.shape == (131, 96) and table.dtype == stored
    assert not table.flags.owndata and not table.flags.writeable
    ids = np.array([5, 0, 130, 5], np.int32)
    rows = model.host_embed(tables, ids, np.dtype(np.float32))
    expected = tiny.tensors("llama")[TABLE][ids].astype(stored).astype(np.float32)
    assert rows.dtype == np.float32 and rows.tobytes() == expected.tobytes()


def test_rows_are_an_array_of_their_own_every_time(tmp_path):
    model = model_of("llama")
    source = stored_in(np.dtype(np.float32), tmp_path / "model")
    tables = checkpoint.load_host(model.host_leaves(), source, dtype="float32")
    first, second = (model.host_embed(tables, np.arange(4), np.float32) for _ in range(2))
    assert first.flags.writeable and not np.shares_memory(first, second)
    assert not np.shares_memory(first, tables["embed"])


def test_table_missing_from_the_checkpoint_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({name: x for name, x in tiny.tensors("llama").items() if name != TABLE}, file)
    with pytest.raises(ValueError, match=rf"1 tensor \({TABLE} \[131, 96\]\) missing"):
        checkpoint.load_host(
            model_of("llama").host_leaves(), checkpoint.open_source(file), dtype="float32"
        )


def test_table_of_several_tensors_is_refused(tmp_path):
    source = stored_in(np.dtype(np.float32), tmp_path / "model")
    halves = tuple(Part(TABLE, (131, 96), (slice(i, i + 1),)) for i in range(2))
    leaves = {"embed": Leaf((131, 96), halves, (None, None))}
    with pytest.raises(ValueError, match=r"1 host table \(embed\) not made of one tensor each"):
        checkpoint.load_host(leaves, source, dtype="float32")


def test_random_tables_depend_on_seed_and_path_alone():
    leaf = llama.leaves(model_of("llama").config)["embed"]
    first = checkpoint.dummy_host({"embed": leaf}, dtype="float32", seed=3)["embed"]
    same = checkpoint.dummy_host({"other": leaf, "embed": leaf}, dtype="float32", seed=3)
    later = checkpoint.dummy_host({"embed": leaf}, dtype="bfloat16", seed=4)["embed"]
    assert first.dtype == np.float32 and later.dtype == ml_dtypes.bfloat16
    assert (first == same["embed"]).all() and (first != same["other"]).any()
    assert (first.astype(ml_dtypes.bfloat16) != later).any()
    # 12,576 draws: their spread is within 3 % of what they were drawn with.
    assert abs(first.std() * 96**0.5 - 1) < 0.03


def test_fixture_is_tied_and_has_no_head_of_its_own():
    assert json.loads((tiny.FOLDER / "llama_host_embed.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in tiny.tensors("llama_host_embed")
