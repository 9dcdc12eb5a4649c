"""Makes the golden logits: runs transformers' own classes on the tiny checkpoints and SmolLM2.

Run apart, in an environment that has torch:

    python -m venv ENV
    ENV/bin/pip install torch==2.13.0 'transformers>=5.17' accelerate gguf tokenizers
    ENV/bin/python tests/goldens/make.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf [NAME ...]

Older transformers are wrong for later families. Made with torch 2.13.0 (CPU) and
transformers 5.24.0 on 2026-11-29 and 30.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "families"))

import tiny  # noqa: E402

# Around the borders of pages and chunks of 16 and 64 tokens.
LENGTHS = (1, 7, 15, 16, 17, 63, 64, 65, 90, 130)
# Up to this length the logits of every position are kept, beyond it those of `kept_positions`.
WHOLE_LENGTH = 17
TOP = 20
# Of SmolLM2's 49,152 logits at the last position every fourth is kept.
VOCAB_STRIDE = 4

TEXTS = (
    "The capital of France is Paris. It lies on the Seine, and about two million people live "
    "within its limits; many more live in the towns around it.",
    "<|im_start|>system\nYou answer in one short sentence.<|im_end|>\n<|im_start|>user\n"
    "What does a weaver press with the foot?<|im_end|>\n<|im_start|>assistant\n",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n\nprint(mean([1, 22, 333]))\n\n# In 1804 Joseph Marie "
    "Jacquard showed a loom that read its pattern from punched cards. Each card stood for one "
    "row of the cloth, and a hole let a hook lift its thread.",
)


def kept_positions(length: int) -> np.ndarray:
    """i32 positions: all of a short prompt, else eight spread ones and the last four."""
    if length <= WHOLE_LENGTH:
        return np.arange(length, dtype=np.int32)
    spread = np.linspace(0, length - 5, 8).astype(np.int32)
    return np.unique(np.concatenate([spread, np.arange(length - 4, length, dtype=np.int32)]))


def reference(name: str, folder: Path) -> torch.nn.Module:
    """transformers' own class in float32, read from the published layout."""
    tiny.write_checkpoint(name, folder)
    if tiny.config(name)["model_type"] == "internlm2":
        return _internlm2_as_llama(name)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _internlm2_as_llama(name: str) -> torch.nn.Module:
    """transformers has no InternLM2: Llama computes the same once the rows of wqkv are sorted."""
    data = tiny.config(name)
    heads, kv_heads = data["num_attention_heads"], data["num_key_value_heads"]
    group, hidden = heads // kv_heads, data["hidden_size"]
    head_dim = hidden // heads
    renamed = {}
    for tensor, array in tiny.tensors(name).items():
        weight = torch.from_numpy(array)
        if tensor.endswith("attention.wqkv.weight"):
            prefix = tensor.replace("attention.wqkv.weight", "self_attn.")
            rows = weight.view(kv_heads, group + 2, head_dim, hidden)
            renamed[prefix + "q_proj.weight"] = rows[:, :group].reshape(-1, hidden)
            renamed[prefix + "k_proj.weight"] = rows[:, group].reshape(-1, hidden)
            renamed[prefix + "v_proj.weight"] = rows[:, group + 1].reshape(-1, hidden)
            continue
        for old, new in (
            ("attention.wo", "self_attn.o_proj"),
            ("attention_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("feed_forward.w1", "mlp.gate_proj"),
            ("feed_forward.w3", "mlp.up_proj"),
            ("feed_forward.w2", "mlp.down_proj"),
            ("tok_embeddings", "embed_tokens"),
        ):
            tensor = tensor.replace(old, new)
        renamed["lm_head.weight" if tensor == "output.weight" else tensor] = weight
    kept = {
        key: data[key]
        for key in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
            *("rms_norm_eps", "rope_theta", "bos_token_id", "eos_token_id", "pad_token_id"),
        )
    }
    config = transformers.LlamaConfig(**kept, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    model.load_state_dict(renamed)
    return model


def logits_of(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """f32[T, V]."""
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
    return out.logits[0].to(torch.float32).numpy()


def make_tiny(name: str) -> None:
    """One golden file: ids, positions and logits per prompt length, and their common std."""
    with tempfile.TemporaryDirectory() as folder:
        model = reference(name, Path(folder))
    kept, every = {}, []
    for length in LENGTHS:
        ids = tiny.random_ids(name, length)
        logits = logits_of(model, ids)
        positions = kept_positions(length)
        every.append(logits.reshape(-1))
        kept |= {
            f"ids_{length}": ids,
            f"positions_{length}": positions,
            f"logits_{length}": logits[positions],
        }
    std = np.concatenate(every).std(dtype=np.float64)
    weights = np.array(tiny.digest(tiny.tensors(name)))
    _save(name, std=np.float32(std), weights=weights, lengths=np.array(LENGTHS), **kept)


def make_smollm2(path: Path) -> None:
    """Top logits of every position and a quarter of the last one's, on real text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = _smollm2_tokenizer(path)
    kept, stds = {}, []
    for i, text in enumerate(TEXTS):
        ids = np.array(tokenizer.encode(text).ids, np.int32)
        assert 20 <= len(ids) <= 120, len(ids)
        logits = logits_of(model, ids)
        top = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP].astype(np.int32)
        stds.append(logits.std(dtype=np.float64))
        kept |= {
            f"text_{i}": np.array(text),
            f"ids_{i}": ids,
            f"top_ids_{i}": top,
            f"top_logits_{i}": np.take_along_axis(logits, top, axis=-1),
            f"last_logits_{i}": logits[-1, ::VOCAB_STRIDE],
        }
    _save(
        "smollm2",
        std=np.float32(np.mean(stds)),
        vocab_stride=np.array(VOCAB_STRIDE),
        num_texts=np.array(len(TEXTS)),
        **kept,
    )


def _smollm2_tokenizer(path: Path) -> "tokenizers.Tokenizer":  # noqa: F821
    """Byte-level BPE with single digits, from the file's own vocabulary and merges."""
    import gguf
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ", 1)) for m in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    controls = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)]
    tokenizer.add_special_tokens(controls)
    return tokenizer


def _save(name: str, **arrays: np.ndarray) -> None:
    file = HERE / f"{name}.npz"
    np.savez_compressed(file, **arrays)
    print(f"{file.name}: {file.stat().st_size} bytes, std {arrays['std']:.4f}")


def main() -> None:
    """Makes the files of the named models, or of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("names", nargs="*", default=[*tiny.NAMES, *tiny.EPS_NAMES, "smollm2"])
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for name in arguments.names:
        if name == "smollm2":
            make_smollm2(arguments.smollm2)
        else:
            make_tiny(name)


if __name__ == "__main__":
    main()
