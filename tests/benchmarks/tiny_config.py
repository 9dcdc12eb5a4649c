"""A model of one layer and an engine of two rows, for the scripts."""

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
SMALL = ("--max-rows", "2", "--token-budget", "32", "--max-model-len", "64")
